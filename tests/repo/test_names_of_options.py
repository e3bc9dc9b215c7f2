"""Law: names of options and states stand in an optimizer's own file, in its records."""

import ast
from pathlib import Path

import pytest

from fusedstep._api.registry import classes
from fusedstep._options.shared import CAPTURABLE, OF_TORCH

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "fusedstep"

#: Names that optimizers have beyond those of nearly all.
OWN = {name for cls in classes for name in (*cls._option_kinds, *cls._state_kinds)} - {
    *OF_TORCH,
    *CAPTURABLE,
    "step",
}

#: Modules of one family of optimizers, of other libraries' options, of torch's functions, and the
#: records that several optimizers share.
OF_SOME = {"foreign.py", "functional.py", "shared.py", "docs.py"}

#: Texts that mean no option: a typecode of arrays, a stand-in for any state, the one option that
#: tells whether a foreign form of weight decay asks for anything.
OTHERS = {("repeat.py", "d"), ("state.py", "sum"), ("unknown.py", "weight_decay")}

MODULES = [
    module
    for folder in ("_native", "_options", "_sharding", "_state", "_step", "_torch_ops", "_api")
    for module in sorted((PACKAGE / folder).glob("*.py"))
    if module.name not in OF_SOME
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: "/".join(module.parts[-2:]))
def test_no_module_below_an_optimizer_names_its_options_and_states(module):
    texts = {
        (module.name, node.value)
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in OWN
    }
    assert texts - OTHERS == set()
