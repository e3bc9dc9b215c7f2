"""The benchmark of steps on a GPU: what is chosen, and its table. It runs where there is a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cuda
import rows

ROOT = Path(__file__).resolve().parents[1]


def test_rows_are_chosen_by_name():
    assert [str(row) for row in cuda.selected("^lamb/(matrix|gpt2)$")] == [
        "lamb/matrix",
        "lamb/gpt2",
    ]
    precisions = {row.precision for row in cuda.selected("adamw/")}
    assert precisions == {rows.BFLOAT16, rows.MIXED}
    assert cuda.selected("no such row") == []


def test_the_table_tells_what_was_wrong_or_missing():
    found = {
        "fused": {"ms": 0.5, "gbps": 56.0, "share": 0.8},
        "foreach": {"wrong": "tensor 0 is 1.0e+00 off"},
        "torch_fused": {"ms": 1.0, "gbps": 28.0, "share": 0.4},
    }
    row = {"optimizer": "adam", "title": "[1024, 1024]", "limit": 0.4, "results": found}
    (cells,) = cuda.lines({"rows": [row]})
    table = dict(zip(cuda.HEADER, cells, strict=True))
    assert table == {
        "optimizer": "adam",
        "tensors": "[1024, 1024]",
        "ours unfused": "–",
        "torch foreach": "wrong",
        "torch fused": "1.00",
        "torch fused, graph": "–",
        "ours fused": "0.500",
        "ours, graph": "–",
        "limit": "0.400",
        "share": "0.80",
    }
    results = {"rows": [row], "device": "a GPU", "torch": "2.11", "date": "today"}
    assert "| adam | [1024, 1024] |" in cuda.markdown(results)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_one_line_says_so():
    done = subprocess.run(
        [sys.executable, ROOT / "bench" / "cuda.py"],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join((str(ROOT / "python"), str(ROOT / "tests")))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.strip() == "bench: torch sees no CUDA device"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_row_is_measured_on_the_device():
    folder = ROOT / "build" / "release" / "bench"
    if not (folder / cuda.NAME).is_file():
        pytest.skip("the limit is not built")
    (row,) = cuda.selected("^adam/matrix$")
    measured = cuda.measure(row, cuda.Limit(folder))
    assert set(measured["results"]) == set(cuda.IMPLEMENTATIONS)
    assert all("ms" in result for result in measured["results"].values()), measured
