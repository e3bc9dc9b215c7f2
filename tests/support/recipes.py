"""Runs the recipes of examples/recipes."""

import importlib
import re
import sys

import pytest
import torch

from support.pages import ROOT

FOLDER = ROOT / "examples" / "recipes"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "recipe")
CLOSING_LINE = r"^\d+\.\d\d s, [\d,]+ samples/s, [\d,]+ MiB .*; loss \d\.\d+ to \d\.\d+$"


def run(name: str, *options: str, device: str = "cpu"):
    """Returns what a recipe's `main` does, on the text that it makes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEDSTEP_DATA", "nowhere")
        patch.syspath_prepend(str(FOLDER))
        module = importlib.import_module(name)
        try:
            return module.main([*options, "--device", device])
        finally:
            for each in (*NAMES, "recipe"):
                sys.modules.pop(each, None)


def assert_trains(
    capsys, name: str, *options: str, steps: int = 12, falls_by: float = 0.1, device: str = "cpu"
):
    """Runs a few steps: the loss falls, and the last line tells time, speed and memory."""
    it = run(name, "--steps", str(steps), *options, device=device)
    losses = torch.tensor([float(loss) for loss in it.losses])
    assert losses[-3:].mean() < losses[:3].mean() - falls_by
    assert len(losses) >= steps
    assert re.search(CLOSING_LINE, capsys.readouterr().out.splitlines()[-1])
    return losses
