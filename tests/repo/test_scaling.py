"""The model of many ranks has the tables of its page, and meets what was measured."""

import runpy

import pytest

from support.pages import ROOT

SCRIPT = runpy.run_path(str(ROOT / "bench" / "probes" / "scaling.py"))


def test_the_page_has_the_tables_of_the_script(capsys, tmp_path):
    picture = tmp_path / "picture.svg"
    found = SCRIPT["main"]([str(picture)])
    page = (ROOT / "docs" / "scaling.md").read_text()
    for name, table in found.items():
        assert table in page, f"run bench/probes/scaling.py: {name}"
    results = ROOT / "bench" / "results" / "nvidia-h200"
    assert picture.read_bytes() == (results / "fsdp2-scaling.svg").read_bytes()


def test_the_model_meets_what_was_measured():
    network = SCRIPT["Network"](400e9, 50e9, 1e-5)
    known, times = SCRIPT["measured"](network), SCRIPT["seconds_measured"]()
    models = {model.name: model for model in SCRIPT["MODELS"]}
    assert len(times) >= 12
    for (way, model, ranks), measured in times.items():
        seconds = SCRIPT["step_of"](models[model], ranks, way, known, network)
        assert seconds == pytest.approx(measured, rel=0.2), (way, model, ranks)
