"""support/bits.py: a record is the same each time, and a comparison names what is not."""

import json
import sys

import pytest
import torch

import fusedstep
from support import bits
from support.cases import PLAIN


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch):
    monkeypatch.setattr(bits, "CASES", PLAIN[:1])
    monkeypatch.setattr(bits, "DTYPES", (torch.float32,))


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["bits.py", *map(str, arguments)])
    bits.main()


def test_a_comparison_names_what_is_missing_and_what_is_different(tmp_path, monkeypatch):
    baseline, again = tmp_path / "baseline.json", tmp_path / "again.json"
    run(monkeypatch, baseline)
    run(monkeypatch, again, "--compare", baseline)
    digests = json.loads(baseline.read_text())
    isa = fusedstep.isas()[-1]
    del digests[f"lamb/float32/{isa}/strided/weight"]  # one more than there was
    digests[f"lamb/float32/{isa}/clipped/exp_avg"] = "0"
    digests["nonesuch/float32/base/clipped/weight"] = "0"
    baseline.write_text(json.dumps(digests))
    with pytest.raises(SystemExit) as error:
        run(monkeypatch, again, "--compare", baseline)
    assert error.value.code.splitlines() == [
        "missing    nonesuch/float32/base/clipped/weight",
        f"different  lamb/float32/{isa}/clipped/exp_avg",
    ]


def test_every_kind_has_digests_of_its_own():
    found = bits.record("cpu")
    for isa in fusedstep.isas():
        kinds = [name for name, kind in bits.KINDS.items() if torch.float32 in kind.dtypes]
        kinds.remove("capturable")
        weights = [found[f"lamb/float32/{isa}/{kind}/weight"] for kind in kinds]
        assert len(set(weights)) == len(kinds) == 4
