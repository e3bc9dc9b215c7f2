"""Law: every optimizer of the package has all its pieces, and torch's face where torch has it."""

import ast
import inspect
import math
import re

import pytest
import torch

from fusedstep import optim
from fusedstep._api.registry import classes
from fusedstep._options.shared import CAPTURABLE, OF_TORCH
from fusedstep.optim import low_bit
from support.cases import CASES, COMPOSITES, PLAIN

#: Names in torch.optim that scripts use beside its optimizers.
TORCHS = ("Optimizer", "lr_scheduler", "swa_utils")
NAMES = sorted(optim.__all__)
COMPOSED = sorted(cls.__name__ for cls in COMPOSITES)
WITH_ROWS = sorted(set(NAMES) - set(COMPOSED))


def rows_of(name):
    rows = [case for case in CASES if case.optimizer is getattr(optim, name)]
    assert rows, f"tests/optimizers has no row for {name}"
    return rows


def rule_of(name) -> str:
    """The name under which rule, operator and reference are filed: AdamW is Adam's rule."""
    return rows_of(name)[0].reference.__module__.removeprefix("reference.")


def test_every_class_is_exported():
    for name, member in vars(optim).items():
        if isinstance(member, type) and issubclass(member, torch.optim.Optimizer):
            is_base = member in (torch.optim.Optimizer, optim.FusedOptimizer)
            is_alias = member in vars(low_bit).values() and member.__module__ == low_bit.__name__
            assert (name in optim.__all__) != (is_base or is_alias)
    assert NAMES
    assert all(issubclass(getattr(optim, name), optim.FusedOptimizer) for name in NAMES)


@pytest.mark.parametrize("name", TORCHS)
def test_has_what_scripts_use_beside_optimizers(name):
    assert getattr(optim, name) is getattr(torch.optim, name)
    assert name not in optim.__all__


@pytest.mark.parametrize("name", WITH_ROWS)
def test_has_a_row(name):
    assert rows_of(name)
    assert issubclass(getattr(optim, name), torch.optim.Optimizer)


@pytest.mark.parametrize("cls", COMPOSITES, ids=lambda cls: cls.__name__)
def test_has_laws_of_its_own(cls, repository):
    assert not any(case.optimizer is cls for case in CASES)
    files = (repository / "tests" / "laws").rglob(f"test_{COMPOSITES[cls]}*.py")
    assert any(f"optim.{cls.__name__}" in file.read_text() for file in files)


@pytest.mark.parametrize("name", NAMES)
def test_has_a_short_reference_of_its_own(name, repository):
    file = COMPOSITES.get(getattr(optim, name)) or rule_of(name)
    source = repository / "tests" / "reference" / f"{file}.py"
    assert len(source.read_text().splitlines()) <= 40
    assert "import fusedstep" not in source.read_text()
    assert "from fusedstep" not in source.read_text()


@pytest.mark.parametrize(
    "piece",
    [
        "include/fusedstep/rules/{rule}.h",
        "tests/reference/{rule}.py",
    ],
)
@pytest.mark.parametrize("name", WITH_ROWS)
def test_has_its_pieces(name, piece, repository):
    path = piece.format(rule=rule_of(name))
    assert (repository / path).is_file(), f"{path} is missing"


@pytest.mark.parametrize("name", WITH_ROWS)
def test_has_a_class_in_cpp(name, repository):
    """It is in a header of its own, or follows from its rule."""
    folder = repository / "include" / "fusedstep"
    rules = (folder / "rules" / "list.h").read_text()
    plain, _, _ = rules.partition("#define FUSEDSTEP_PLAIN_RULES")[2].partition("\n\n")
    assert f"X({name})" in plain or (folder / "optim" / f"{name.lower()}.h").is_file()


@pytest.mark.parametrize("cls", classes, ids=lambda cls: cls.__name__)
def test_each_option_of_a_group_has_a_record(cls):
    group = cls([torch.zeros(3, 4, requires_grad=True)]).param_groups[0]
    assert group.keys() - {"params"} <= cls._option_kinds.keys()
    assert cls._own_options.keys() | cls._later_options.keys() <= cls._option_kinds.keys()


#: Modules that take the options of a class from its records.
GENERAL = ("_sharding/*", "_state/*", "_step/*", "_torch_ops/*", "_options/kinds")


def test_general_modules_name_no_option_of_a_class(repository):
    shared = OF_TORCH.keys() | CAPTURABLE.keys()
    names = {name for cls in classes for name in cls._option_kinds} - shared
    assert len(names) > 40
    package = repository / "python/fusedstep"
    for path in (path for part in GENERAL for path in package.glob(f"{part}.py")):
        nodes = ast.walk(ast.parse(path.read_text()))
        texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
        found = {text for text in texts if isinstance(text, str)} & names
        assert not found, f"{path} names {sorted(found)}"


@pytest.mark.parametrize("name", NAMES)
def test_has_a_page(name, repository):
    page = f"docs/optimizers/{COMPOSITES.get(getattr(optim, name), name.lower())}.md"
    assert (repository / page).is_file(), f"{page} is missing"
    text = (repository / page).read_text()
    for part in ("## When to use it", "```math", "## Source"):
        assert f"\n{part}\n" in text, f"{page} has no {part}"


@pytest.mark.parametrize("name", NAMES)
def test_help_begins_with_what_it_is_and_a_plain_formula(name):
    """Its page has the formula in the usual notation."""
    beginning, args, _ = inspect.getdoc(getattr(optim, name)).partition("\nArgs:\n")
    assert args
    assert beginning.startswith(f"Implements the {'LAMB' if name == 'Lamb' else name} algorithm")
    assert re.search(r"::\n\n(    .*\n)*    w = .*\blr\b", beginning)
    assert not re.search(r"\\[a-z]|:math:", beginning)
    if "keep_grad" in inspect.signature(getattr(optim, name)).parameters:
        assert ".grad" in beginning.partition("::")[0]


@pytest.mark.parametrize("name", NAMES)
def test_is_told_in_the_changelog(name, repository):
    text = (repository / "CHANGELOG.md").read_text()
    assert re.search(rf"`{name}`", text), f"CHANGELOG.md does not name {name}"


@pytest.mark.parametrize("name", NAMES)
def test_is_documented(name):
    """The docstring has every option, the formula, its source and an example."""
    text = inspect.getdoc(getattr(optim, name))
    for option in inspect.signature(getattr(optim, name)).parameters:
        assert option in text, f"{option} is not in the docstring of {name}"
    assert "https://" in text
    assert f"\n    >>> optimizer = optim.{name}(" in text


@pytest.mark.parametrize("name", [name for name in COMPOSED if hasattr(torch.optim, name)])
def test_composed_has_the_signature_of_the_namesake_and_more(name):
    ours, theirs = getattr(optim, name), getattr(torch.optim, name)
    parameters = [list(inspect.signature(each).parameters.values()) for each in (ours, theirs)]
    described = [[(p.name, p.kind, p.default) for p in each] for each in parameters]
    shared = [each for each in described[0] if each in described[1]]
    assert shared == described[1]
    others = [kind for each in described[0] if each not in shared for kind in each[1:2]]
    assert set(others) == {inspect.Parameter.KEYWORD_ONLY}
    param = [torch.zeros(3, 4, requires_grad=True)]
    assert ours(param).defaults == theirs(param).defaults


@pytest.mark.parametrize("name", [name for name in WITH_ROWS if hasattr(torch.optim, name)])
def test_has_the_signature_of_the_namesake(name):
    ours, theirs = getattr(optim, name), getattr(torch.optim, name)
    parameters = [inspect.signature(each).parameters for each in (ours, theirs)]
    described = [
        [(p.name, p.kind, p.default) for p in signature.values()] for signature in parameters
    ]
    shared = {"fused": None, "state_dtype": None, "master_weights": False, "rounding": None}
    shared |= {"seed": 0, "max_grad_norm": None, "skip_nonfinite": False}
    assert shared.items() <= ours._own_options.items()
    assert name in COMPOSITES or shared == ours._own_options
    own = {k: v for k, v in ours._own_options.items() if k not in shared} | shared
    own = {name: unset for name, unset in own.items() if name not in parameters[1]}
    keyword = inspect.Parameter.KEYWORD_ONLY
    assert described[0] == [*described[1], *((name, keyword, own[name]) for name in own)]
    assert name in COMPOSITES or all(case.namesake is theirs for case in rows_of(name))
    param = [torch.zeros(3, 3, requires_grad=True)]
    assert ours(param).defaults == theirs(param).defaults
    given = {"state_dtype": torch.float32, "master_weights": True, "max_grad_norm": 2.0}
    assert ours(param, **given).defaults == theirs(param).defaults | given


def test_lamb_has_its_papers_defaults():
    parameters = inspect.signature(optim.Lamb).parameters
    assert optim.Lamb([torch.zeros(3)]).defaults == {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0,
        "debias": True,
        "decoupled_decay": False,
        "always_adapt": True,
        "max_grad_norm": math.inf,
        "max_weight_norm": math.inf,
        "min_ratio": 0.0,
        "max_ratio": math.inf,
        "foreach": None,
        "maximize": False,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "keep_grad": False,
    }
    positional = [n for n, p in parameters.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == ["params", "lr", "betas", "eps", "weight_decay"]


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_plain_rows_use_defaults_but_for_lr(case):
    assert set(case.options) == {"lr"}
