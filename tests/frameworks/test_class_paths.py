"""Tools that take the path of a class: the paths on the page are those of classes."""

import importlib
import re

import pytest

from fusedstep import optim
from pages import INTEGRATIONS, run_section


def section() -> str:
    run_section("By a class path")
    return INTEGRATIONS.read_text().partition("## By a class path")[2].partition("\n## ")[0]


def test_every_path_is_that_of_a_class():
    paths = re.findall(r"fusedstep\.optim\.(\w+)", section())
    assert len(paths) >= 4
    for name in paths:
        assert issubclass(
            getattr(importlib.import_module("fusedstep.optim"), name), optim.Optimizer
        )


def test_a_line_of_lightnings_cli_makes_the_optimizer(tmp_path):
    """`--optimizer`, with its arguments: the class that jsonargparse finds."""
    pytest.importorskip("jsonargparse")
    lightning = pytest.importorskip("lightning.pytorch.cli")
    parser = lightning.LightningArgumentParser()
    parser.add_optimizer_args(optim.Optimizer, "optimizer")
    (line,) = re.findall(r"--optimizer (fusedstep\S+) (--optimizer\.\S+)", section())
    given = parser.parse_args([f"--optimizer={line[0]}", line[1]])
    assert given.optimizer.class_path == "fusedstep.optim.adamw.AdamW"
