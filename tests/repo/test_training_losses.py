"""Small states and 16-bit weights train as float32 does: results on the page, and the probe."""

import json
import re

import pytest
import torch

from probes import training_losses as probe
from support.pages import ROOT

PAGE = ROOT / "docs" / "small_states.md"
RESULTS = ROOT / "bench" / "results" / "amd-zen4-2-cores" / "training_losses.json"
SUMMARY = json.loads(RESULTS.read_text())["summary"]


def percent(ratio):
    return f"{100 * (ratio - 1):+.1f} %".replace("-0.0", "+0.0")


def test_the_page_has_the_figures_of_the_results():
    (table,) = re.findall(r"^\| run \|.*?\n\n", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    _, _, *lines = table.strip().split("\n")
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    expected = []
    for name, found in SUMMARY.items():
        row = [name]
        for kind in ("training", "validation"):
            row.append(f"{found[kind]:.3f}")
            ratios = found[f"{kind} ratio"], found[f"{kind} ratio, worst"]
            row += map(percent, ratios) if name != "float32" else ["", ""]
        expected.append(row)
    assert shown == expected


@pytest.mark.parametrize(
    ("name", "most"), [("int8", 1.01), ("int4", 1.03), ("fp8", 1.03), ("bf16, stochastic", 1.01)]
)
def test_losses_are_near_those_of_float32(name, most):
    for kind in ("training", "validation"):
        assert SUMMARY[name][f"{kind} ratio"] <= most


def test_results_are_summed_up_from_their_rows():
    results = json.loads(RESULTS.read_text())
    for name, found in probe.summary(results["rows"]).items():  # those are of four digits
        assert found == pytest.approx(results["summary"][name], rel=6e-4)
    assert list(results["summary"]) == list(probe.RUNS)
    assert results["steps"] == probe.STEPS


@pytest.fixture
def data(monkeypatch):
    """Characters at random, in small batches."""
    monkeypatch.setattr(probe, "BATCH", 2)
    tokens = torch.randint(20, (3000,), generator=torch.Generator().manual_seed(0))
    return tokens[:2000], tokens[2000:], 20


def test_split_weights_have_the_values_of_masters_with_the_same_gradients(data):
    found = probe.compare_values(data, 12)
    assert found["values that differ in the end"] == 0
    recorded = json.loads(RESULTS.read_text())["split weights beside masters of the same gradients"]
    assert recorded["values that differ in the end"] == 0


def test_a_value_that_differs_is_seen(data):
    (model, optimizer), (_, other) = (probe.start("bf16, split", 20, 0) for _ in range(2))
    probe.loss_of(model, probe.batches(data[0], 1, 0)[0]).backward()
    for mine, theirs in zip(
        *(each.param_groups[0]["params"] for each in (optimizer, other)), strict=True
    ):
        theirs.grad = mine.grad.clone()
    optimizer.step()
    other.step()
    assert probe.differing(optimizer, other) == 0
    other.state[other.param_groups[0]["params"][0]]["low_param"].view(-1)[5] ^= 1
    assert probe.differing(optimizer, other) == 1


def test_runs_of_a_seed_begin_alike(data, monkeypatch, tmp_path):
    monkeypatch.setattr(probe, "EVERY", 1)
    rows = [probe.train(name, data, 1, 3) for name in probe.RUNS]
    by_dtype = {}
    for row in rows:
        by_dtype.setdefault(probe.RUNS[row["run"]][0], []).append(row["curve"])
    for curves in by_dtype.values():
        assert len({curve[0] for curve in curves}) == 1
        assert all(len(curve) == 3 for curve in curves)
    assert len({tuple(curve) for curve in by_dtype[torch.float32]}) > 1
    results = {"rows": rows, "summary": probe.summary(rows)}
    assert results["summary"]["float32"]["training ratio"] == 1
    files = [tmp_path / name for name in ("one.svg", "other.svg")]
    for file in files:
        probe.draw(results, file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert all(name in files[0].read_text() for name in probe.RUNS)


def test_the_rate_rises_and_falls():
    rates = [probe.rate(step, 500) for step in range(500)]
    assert rates[0] == pytest.approx(0.02)
    assert max(rates) == rates[probe.WARM_UP] == 1
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
