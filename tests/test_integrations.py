"""Modules of `fusedstep.integrations`: nothing is imported before `register()`.

tests/frameworks has a test of each with its framework.
"""

import importlib
import subprocess
import sys

import pytest

from fusedstep import integrations

FRAMEWORKS = sorted(integrations.__all__)


def test_no_framework_is_imported_before_it_is_registered(repository):
    code = (
        "import sys; from fusedstep import integrations;"
        f"print(sorted(sys.modules.keys() & set({FRAMEWORKS})))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(repository / "python")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_one_that_is_missing_is_named(name, monkeypatch):
    for loaded in [name, *(each for each in sys.modules if each.startswith(f"{name}."))]:
        monkeypatch.setitem(sys.modules, loaded, None)
    module = importlib.import_module(f"fusedstep.integrations.{name}")
    module.unregister()
    with pytest.raises(ModuleNotFoundError, match=name):
        module.register()
    module.unregister()
