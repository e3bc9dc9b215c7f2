"""The model of many ranks has the tables of its page, and meets what was measured."""

import json
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
    results = ROOT / "bench" / "results" / "nvidia-h100"
    assert picture.read_bytes() == (results / "fsdp2-scaling.svg").read_bytes()


def test_the_model_meets_what_was_measured():
    known, network = SCRIPT["measured"](), SCRIPT["Network"](400e9, 50e9, 1e-5)
    file = ROOT / "bench" / "results" / "nvidia-h100" / "fsdp2.json"
    times = json.loads(file.read_text())["on_gpus"]["ms"]["AdamW"]
    for clips, name in ((False, "fusedstep"), (True, "fusedstep, clipped")):
        seconds = SCRIPT["step_of"](SCRIPT["MODELS"][0], 2, "AdamW", known, network, clips=clips)
        assert seconds * 1e3 == pytest.approx(times[name], rel=1e-9)
