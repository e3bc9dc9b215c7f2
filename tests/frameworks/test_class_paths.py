"""Tools that take the path of a class: the paths on the page are those of classes."""

import importlib
import re

import pytest

from fusedstep import optim
from support import small
from support.pages import OVERVIEW


def section() -> str:
    return OVERVIEW.read_text().partition("## By a class path")[2].partition("\n## ")[0]


def test_every_path_is_that_of_a_class():
    paths = re.findall(r"fusedstep\.optim\.(\w+)", section())
    assert len(paths) >= 4
    for name in paths:
        assert issubclass(
            getattr(importlib.import_module("fusedstep.optim"), name), optim.Optimizer
        )


def test_the_line_of_lightnings_cli():
    """As LightningCLI reads it, and makes the optimizer of it."""
    pytest.importorskip("jsonargparse")
    cli = pytest.importorskip("lightning.pytorch.cli")
    (line,) = re.findall(r"`(--optimizer [^`]+)`", section())
    parser = cli.LightningArgumentParser()
    parser.add_optimizer_args((optim.Optimizer,), "optimizer")
    given = parser.parse_args(line.split()).optimizer
    optimizer = cli.instantiate_class(small.network().parameters(), given)
    assert type(optimizer) is optim.AdamW
    assert optimizer.defaults["lr"] == 1e-3
