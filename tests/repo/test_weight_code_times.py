"""The tables of the page on small states have the figures of the results."""

import json

import pytest

from support.pages import ROOT

PAGE = (ROOT / "docs" / "small_states.md").read_text()


@pytest.fixture
def probe(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "bench" / "probes")  # where it finds another one
    from probes import weight_codes

    return weight_codes


@pytest.mark.parametrize(
    ("machine", "device"), [("nvidia-h200", "cuda"), ("intel-emerald-rapids-16-cores", "cpu")]
)
def test_the_page_has_the_table_of_the_probe(probe, machine, device):
    results = ROOT / "bench" / "results" / machine / "weight_codes.json"
    assert probe.page(json.loads(results.read_text()), device) in PAGE


def test_a_small_run_fills_the_table(probe, monkeypatch, tmp_path):
    monkeypatch.setattr(probe, "shapes", lambda: [(64, 80), (7,)])
    monkeypatch.setattr(probe, "SMALL", [(8, 8)] * 2)
    monkeypatch.setattr(probe, "PEERS", {"torch, float32": probe.PEERS["torch, float32"]})
    file = tmp_path / "weight_codes.json"
    probe.main(str(file), "cpu")
    probe.main(str(file), "cpu", "another run")
    table = json.loads(file.read_text())
    assert [*table["ms"]] == [*probe.WAYS, *probe.PEERS]
    assert [*table["another run"]["ms"]] == ["float32", "float32, int8", "torch, float32"]
    lines = probe.page(table, "cpu").splitlines()
    assert len(lines) == 2 + len(table["ms"])
    assert "| float32 weights | 28 |" in lines[2]
    assert " | 1.00 | " in lines[2]
