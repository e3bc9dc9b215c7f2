"""A type checker's view of the public functions."""

import ast
import os
import subprocess
import sys

import pytest

import fusedstep
from fusedstep import integrations, optim
from support.pages import ROOT

CASES = ROOT / "tests" / "support" / "typing_cases.py"


def test_all_that_is_public_is_written_down():
    """By a name of ours: `optim.AdamW`, and not `torch.optim.AdamW`."""
    used = {
        (node.value.id, node.attr)
        for node in ast.walk(ast.parse(CASES.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    for module in (fusedstep, optim, integrations):
        name = module.__name__.rpartition(".")[2]
        modules = {"optim", "integrations"} if module is fusedstep else set()
        assert {(name, each) for each in {*module.__all__} - modules} - used == set()


#: Without the half of torch that none of our types comes from, and without other libraries, which
#: the integrations import: mypy would read them for half a minute.
CONFIG = """
[mypy]
strict = True
follow_imports = skip
[mypy-fusedstep.*,torch.*]
follow_imports = silent
[mypy-torch._dynamo.*,torch._inductor.*,torch.distributed.*,torch.distributions.*,torch.fx.*]
follow_imports = skip
[mypy-torch.ao.*,torch.export.*,torch._export.*,torch._functorch.*,torch._higher_order_ops.*]
follow_imports = skip
"""


def test_mypy_finds_the_types_that_are_written_down(request, repository, tmp_path):
    """It keeps what it has read of torch for the next time where pytest has a cache."""
    pytest.importorskip("mypy", reason="mypy is not installed: pip install mypy")
    caches = request.config.pluginmanager.has_plugin("cacheprovider")
    config = tmp_path / "mypy.ini"
    config.write_text(CONFIG)
    cache = request.config.cache.mkdir("mypy") if caches else os.devnull
    run = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--config-file", str(config)),
            *("--cache-dir", str(cache), str(CASES)),
        ],
        env={"MYPYPATH": str(repository / "python"), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
