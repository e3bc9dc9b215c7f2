"""The probe that times tables beside torch's and FBGEMM's compares their results first."""

import pytest
import torch

from fusedstep import optim
from probes import embeddings

SMALL = ("--rows", "500", "--columns", "8", "--bags", "16", "--items", "5", "--rounds", "2")

pytestmark = pytest.mark.filterwarnings("ignore")


def test_times_all_that_are_there(capsys, tmp_path):
    found = embeddings.main([*SMALL, "--json", str(tmp_path / "found.json")])
    assert list(found) == ["RowWiseAdagrad", "Adagrad", "SparseAdam"]
    assert "torch" in found["Adagrad"]
    said = capsys.readouterr().out
    for name in ("RowWiseAdagrad", "Adagrad"):
        assert "FBGEMM" in found[name] or f"{name}: FBGEMM is left out" in said
    assert (tmp_path / "found.json").read_text().startswith('{"torch":')


def test_another_result_is_an_error(monkeypatch):
    ways = embeddings.KINDS["Adagrad"] | {
        "torch": lambda start: embeddings.Table(start, optim.RowWiseAdagrad)
    }
    monkeypatch.setattr(embeddings, "KINDS", {"Adagrad": ways})
    with pytest.raises(AssertionError, match="not close"):
        embeddings.main([*SMALL])


def test_bags_have_items_of_the_table():
    items, begins = embeddings.batch(500, 16, 5, 0)
    assert torch.equal(begins, torch.arange(0, 80, 5))
    assert items.min() >= 0
    assert items.max() < 500
