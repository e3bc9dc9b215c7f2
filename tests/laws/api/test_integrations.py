"""Modules of `fusedstep.integrations`: nothing is imported before `register()`.

tests/frameworks has a test of each with its framework.
"""

import importlib
import itertools
import subprocess
import sys
import threading
from types import ModuleType

import pytest

from fusedstep import integrations
from fusedstep.integrations._replaced import Replaced

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


# Attributes that are replaced, and put back


class Base:
    @staticmethod
    def inherited():
        return "theirs"


class Framework(Base):
    value = "theirs"

    @staticmethod
    def method():
        return "theirs"


@pytest.fixture
def framework():
    return type("Framework", (Base,), dict(vars(Framework)))


def look(framework):
    return framework.value, framework.method(), framework.inherited(), framework().method()


def attributes(framework, value):
    method = staticmethod(lambda: value)
    return (
        (framework, "value", value),
        (framework, "method", method),
        (framework, "inherited", method),
    )


def test_all_is_put_back_as_it_was(framework):
    before, replaced = dict(vars(framework)), Replaced()
    for _ in range(2):
        assert not replaced
        replaced.put(*attributes(framework, "ours"))
        assert replaced
        assert look(framework) == ("ours",) * 4
        replaced.put_back()
        assert dict(vars(framework)) == before
    replaced.put_back()
    assert dict(vars(framework)) == before


def test_nothing_is_replaced_where_an_attribute_is_missing(framework):
    before, replaced = dict(vars(framework)), Replaced()
    with pytest.raises(AttributeError, match="missing"):
        replaced.put(*attributes(framework, "ours"), (framework, "missing", 1))
    assert not replaced
    assert dict(vars(framework)) == before


@pytest.mark.parametrize("name", ["value", "inherited"])
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
def test_several_that_are_put_back_in_any_order(framework, order, name):
    """The last that is left stands there, and in the end what was there at first."""
    before, several = dict(vars(framework)), [Replaced() for _ in range(3)]
    for number, replaced in enumerate(several):
        replaced.put((framework, name, number))
    left = [0, 1, 2]
    for number in order:
        several[number].put_back()
        assert not several[number]
        left.remove(number)
        if left:
            assert getattr(framework, name) == left[-1]
    assert dict(vars(framework)) == before


def test_what_others_have_put_there_stays(framework):
    replaced = Replaced()
    replaced.put((framework, "value", "ours"))
    framework.value = "of others"
    replaced.put_back()
    assert framework.value == "of others"


def test_two_threads_that_replace_an_attribute(framework):
    before, replaced = dict(vars(framework)), Replaced()
    barrier = threading.Barrier(2)

    def put():
        barrier.wait()
        replaced.put(*attributes(framework, "ours"))

    threads = [threading.Thread(target=put) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert look(framework) == ("ours",) * 4
    replaced.put_back()
    assert dict(vars(framework)) == before


def test_a_release_without_an_attribute_is_left_as_it_was(monkeypatch):
    names = ("megatron", "megatron.core", "megatron.core.optimizer")
    modules = [ModuleType(name) for name in (*names, f"{names[-1]}.distrib_optimizer")]
    for module in modules:
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
        parent, _, name = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], name, module)
    core, distributed = modules[2:]
    core.Adam = core.SGD = distributed.Adam = "theirs"
    methods = (
        "state_dict",
        "_set_main_param_and_optimizer_states",
        "load_parameter_state_from_dp_reshardable",
    )
    distributed.DistributedOptimizer = type("DistributedOptimizer", (), dict.fromkeys(methods))
    before = [dict(vars(module)) for module in modules]
    for _ in range(2):  # the second call says so too
        with pytest.raises(AttributeError, match="CPUAdam"):
            integrations.megatron.register()
        assert [dict(vars(module)) for module in modules] == before
    core.CPUAdam = core.CPUSGD = "theirs"
    core.USING_PYTORCH_OPTIMIZER = True
    before = [dict(vars(module)) for module in modules]
    integrations.megatron.register()
    assert core.Adam != "theirs"
    integrations.megatron.register()
    integrations.megatron.unregister()
    assert [dict(vars(module)) for module in modules] == before
