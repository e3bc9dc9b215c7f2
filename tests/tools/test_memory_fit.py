"""Law: the ways to train that `memory --fit` prints run, and need the memory that it says."""

import json
import re
import sys

import pytest
import torch

from fusedstep import __main__
from fusedstep.memory.fit import Way, code
from fusedstep.memory.model import load
from fusedstep.memory.plan import Choice, Run, state_bytes
from suites import small_gpt
from support.allocations import peak_of_training
from support.stepping import threads

BATCH = ("--batch", "2", "--sequence", "64")


def fit(capsys, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["fusedstep", "memory", *arguments])
    __main__.main()
    return capsys.readouterr().out


def found(capsys, monkeypatch, *arguments):
    return json.loads(fit(capsys, monkeypatch, *arguments, "--json"))


#: A limit for a model of 7.1 MB in float32, and what is searched.
SEARCHES = {
    "much": ("--fit", "50MB"),
    "less": ("--fit", "16MB", "--headroom", "1MB"),
    "rank": ("--fit", "40MB", "--optimizer", "APOLLOAdamW:proj=random", "--rank", "24"),
    "masters": ("--fit", "50MB", "--optimizer", "Lion", "--weights", "bf16", "--masters", "fp32"),
}


@pytest.fixture
def one_thread():
    """MKL's threads spin for one another in each small QR: a hundred times as long on busy CPUs."""
    with threads(1):
        yield


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("arguments", SEARCHES.values(), ids=SEARCHES)
def test_the_lines_run_and_peak_at_what_is_told(capsys, monkeypatch, arguments):
    monkeypatch.setitem(sys.modules, "peft", None)  # tests/frameworks has LoRA
    more = ("--headroom", "0B", "--bucket-cap-mb", "0.25", *arguments)
    ways = found(capsys, monkeypatch, "suites.small_gpt:tiny", *BATCH, *more)
    assert ways["notes"] == ["LoRA needs peft: pip install peft"]
    assert ways["fits"]
    for way in ways["fits"]:
        told = way["bytes"]["total"]
        assert told <= ways["limit"] - ways["headroom"]
        if way["offload"]:
            # Here the host's memory is the model's, and not pinned. The worker's states are not in
            # the measured peak, which is this thread's.
            weights = small_gpt.tiny().to(getattr(torch, way["weights"])).parameters()
            shapes, dtype = tuple(p.shape for p in weights), getattr(torch, way["weights"])
            choice = Choice(way["optimizer"], way["options"], way["states"])
            sizes = [shape.numel() * dtype.itemsize for shape in shapes]
            told += way["host"] - 2 * sum((1 << (each - 1).bit_length()) - each for each in sizes)
            told -= sum(state_bytes(shapes, dtype, choice, way["masters"]))
        assert told == pytest.approx(peak_of_training(way, small_gpt.tiny, (2, 64)), rel=0.1), way


#: The ways that train 7 billion weights in 24 GB by other steps than AdamW's.
WAYS_OF_7B = {
    ("AdamW", "int4", True, False, False),
    ("Adafactor", "default", True, False, False),
    ("GaLoreAdamW", "default", True, False, False),
    ("AdamW", "default", False, True, False),
    ("AdamW", "default", False, False, True),
}


def test_seven_billion_weights_fit_into_24_gb(capsys, monkeypatch):
    ways = found(capsys, monkeypatch, "7B", "--fit", "24GiB")
    names = ("optimizer", "states", "step_in_backward", "offload")
    fits = {(*(way[name] for name in names), bool(way["lora"])) for way in ways["fits"]}
    assert fits == WAYS_OF_7B
    assert all(way["bytes"]["total"] <= 23 * 2**30 for way in ways["fits"])


def test_the_smallest_is_told_if_nothing_fits(capsys, monkeypatch):
    asked = ("1B", "--optimizer", "AdamW", "--fit", "1GB", "--weights", "bf16")
    text = fit(capsys, monkeypatch, *asked)
    assert "Nothing fits into 954 MiB with 1.00 GiB left (--headroom). The smallest way:" in text
    assert re.search(r"^1  LoRA of rank 8 by AdamW, bfloat16 .*GiB", text, re.MULTILINE)
    assert "model = get_peft_model(model, LoraConfig(r=8" in text
    ways = found(capsys, monkeypatch, *asked)
    assert (ways["fits"], ways["smallest"]["lora"]) == ([], 8)


def test_ranks_shard_the_model(capsys, monkeypatch):
    text = fit(capsys, monkeypatch, "7B", "--optimizer", "AdamW", "--ranks", "8", "--fit", "24GiB")
    assert "7B: 7,000,000,000 parameters; on each of 8 ranks, ZeRO 3" in text
    assert re.search(r"^1  AdamW, float32, fully_shard on 8 .* 13\.04 GiB$", text, re.MULTILINE)
    assert "fully_shard(model)\noptimizer = optim.AdamW(model.parameters(), lr=lr)" in text
    assert "offload" not in text


def test_no_adapters_for_a_model_that_has_frozen_weights(capsys, monkeypatch):
    """The adapters are there already, and others would be adapters of adapters."""
    ways = found(capsys, monkeypatch, "test_memory_needs:adapter", "--fit", "2GiB")
    assert ways["notes"] == ["LoRA is left out: the model has frozen weights, as one with adapters"]
    assert ways["fits"]
    assert not any(way["lora"] for way in ways["fits"])


def blocks():
    return torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([torch.nn.Linear(8, 8)])})


def test_lines_of_checkpoints_and_shards_name_the_blocks():
    made = load(f"{__name__}:blocks")
    way = Way(made, Choice("AdamW", {}, "default"), Run(zero=2, ranks=2), 0, checkpointing=True)
    lines = code(way)
    assert lines.count('for block in model.get_submodule("blocks"):') == 2
    assert "fully_shard(model, reshard_after_forward=False)" in lines
    names = {"model": blocks(), "lr": 1e-3}
    exec("\n".join(code(way._replace(run=Run()))), names)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("1B --fit 1GB --inference", "--fit does not take --inference"),
        ("1B --fit 1GB --zero 1 --ranks 2", "--fit shards by fully_shard: --zero 2 or 3, not 1"),
        ("1B --fit 1GB --optimizer SGD:speed=1", "--optimizer SGD:speed=1: SGD lacks 'speed'"),
        ("1B --fit 1GB --lora 0", "--lora: must be a number above 0"),
        ("1B --fit 1GB --headroom much", "--headroom: must be a size as 24GiB or 24GB, not 'much'"),
        ("1B --fit 1GB --batch 1", "--batch: a parameter count does not tell the activations"),
    ],
)
def test_errors_name_the_argument(capsys, monkeypatch, arguments, error):
    with pytest.raises(SystemExit):
        fit(capsys, monkeypatch, *arguments.split())
    assert error in capsys.readouterr().err
