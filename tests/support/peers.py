"""Peers of our classes, to compare behaviour with: torch's classes of the same names.

An experiment is a function of an optimizer's class and mode. Its outcome is its warnings, its error
and its value: the same with ours as with torch's, or the difference is listed.
"""

import contextlib
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.optim.optimizer import _use_grad_for_differentiable

from fusedstep import optim
from support.cases import PLAIN, WITH_STATES

MODES = {
    "default": {},
    "fused": {"fused": True},
    "unfused": {"fused": False},
    "foreach": {"foreach": True},
}


def _options(function: Callable) -> dict[str, Any]:
    """The options that it takes, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


class ByFormula:
    """Stands in for torch's class where torch has none: makes `ours` by its `formula`.

    Constructor, checks, texts and housekeeping are those of the class that comes after this one in
    the bases of a subclass: torch's nearest in options and states. The formula gives defaults,
    weights and states; it may have options and states that the base has not.
    """

    ours: type[torch.optim.Optimizer]
    formula: Callable
    not_kept: tuple[str, ...]
    """States of the base that `ours` has not: they are there in the base's step only."""

    def __init__(self, params, **given):
        options = _options(self.ours) | _options(self.formula) | given
        own = {k: options.pop(k) for k in _options(self.ours).keys() - self.options_of_base()}
        super().__init__(params, **options)
        for stored in (self.defaults, *self.param_groups):
            for name, value in own.items():
                stored.setdefault(name, value)

    @classmethod
    def options_of_base(cls) -> set[str]:
        return set(_options(super().__init__))

    def __setstate__(self, state):
        """Some bases look at their count then."""
        states = [each for each in state.get("state", {}).values() if isinstance(each, dict)]
        for each in states:
            each.update({name: torch.zeros(()) for name in self.not_kept})
        super().__setstate__(state)
        for each in states:
            for name in self.not_kept:
                del each[name]

    @_use_grad_for_differentiable
    def step(self, closure=None):
        before = {
            p: (p.detach().clone(), self._states(p))
            for group in self.param_groups
            for p in group["params"]
        }
        with self._states_of_base():
            loss = self._step_of_base(closure)
            self._follow_formula(before)
        return loss

    @contextlib.contextmanager
    def _states_of_base(self):
        """With those that are not kept, in all states that there are."""
        params = [p for group in self.param_groups for p in group["params"]]
        for p in filter(self.state.get, params):
            for name in self.not_kept:
                self.state[p][name] = torch.zeros_like(p) if name != "step" else torch.zeros(())
        try:
            yield
        finally:
            for p in filter(self.state.get, params):
                for name in self.not_kept:
                    self.state[p].pop(name, None)

    def _follow_formula(self, before):
        with torch.no_grad():
            for group in self.param_groups:
                names = _options(self.formula).keys() & group.keys()
                options = {name: _plain(group[name]) for name in names}
                for p in group["params"]:
                    if p.grad is not None:
                        self._update(p, *before[p], group["differentiable"], options)

    def _step_of_base(self, closure):
        """Without the hooks around it, which torch puts around the step of each class."""
        return inspect.unwrap(super().step)(self, closure)

    def _states(self, param):
        state = self.state.get(param, {})
        return {k: v.clone() for k, v in state.items() if k != "step" and torch.is_tensor(v)}

    def _update(self, param, weight, state, differentiable, options):
        count = self.state[param]["step"]
        count = count if differentiable else count.item()
        weight, gradient, state = _in_double(weight, param.grad, state)
        weight, new_state = self.formula(weight, gradient, state, count, **options)
        stored = self.state[param]
        pairs = [(stored.setdefault(k, torch.empty_like(param)), v) for k, v in new_state.items()]
        for old, new in ((param, weight), *pairs):
            old.copy_(torch.view_as_complex(new) if old.is_complex() else new)


def _plain(option):
    if isinstance(option, tuple):
        return tuple(map(_plain, option))
    return option.item() if isinstance(option, torch.Tensor) else option


def _in_double(weight, gradient, state):
    def double(tensor):
        return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()

    return double(weight), double(gradient), {k: double(v) for k, v in state.items()}


class _Adan(ByFormula, torch.optim.Adam):
    """Its base sees the first two of three betas, and no `foreach`: that chooses something else."""

    def __init__(self, params, **given):
        options = _options(self.ours) | given
        betas, foreach = options["betas"], options["foreach"]
        super().__init__(params, **(given | {"betas": betas[:2], "foreach": None}))
        if not 0.0 <= betas[2] < 1.0:
            raise ValueError(f"Invalid beta parameter at index 2: {betas[2]}")
        for stored in (self.defaults, *self.param_groups):
            stored["foreach"] = foreach
            if len(stored["betas"]) == 2:
                stored["betas"] = (*stored["betas"], betas[2])

    def _step_of_base(self, closure):
        groups = [dict(group) for group in self.param_groups]
        for group in self.param_groups:
            group |= {"betas": group["betas"][:2], "foreach": None}
        try:
            return super()._step_of_base(closure)
        finally:
            for group, before in zip(self.param_groups, groups, strict=True):
                group.update(betas=before["betas"], foreach=before["foreach"])


_OWN_BASES = {optim.Adan: _Adan}


def _peer_of(case):
    if case.namesake is not None:
        return case.namesake
    cls, nearest = case.optimizer, case.nearest
    assert nearest, f"the rows of {cls.__name__} in tests/optimizers name no `nearest` of torch"
    bases = (_OWN_BASES[cls],) if cls in _OWN_BASES else (ByFormula, nearest)
    of_base = _states_of(nearest)
    own = {
        "ours": cls,
        "formula": staticmethod(case.reference),
        "not_kept": tuple(name for name in of_base if name not in case.states + case.numbers),
        "__module__": __name__,
    }
    peer = type(cls.__name__, bases, own)
    globals()[cls.__name__] = peer  # where pickle looks for it
    return peer


def _states_of(cls):
    weight = torch.zeros(2, requires_grad=True)
    weight.grad = torch.zeros(2)
    optimizer = cls([weight])
    optimizer.step()
    return optimizer.state[weight]


#: torch's class for each of ours.
PEERS = {case.optimizer: _peer_of(case) for case in PLAIN}
ALL = tuple(PEERS)
NAMESAKES = tuple(cls for cls in ALL if not issubclass(PEERS[cls], ByFormula))

#: torch has no option `fused` for these.
WITHOUT_FUSED = tuple(cls for cls in NAMESAKES if "fused" not in _options(PEERS[cls]))


def peer_of(cls: type) -> Callable[..., torch.optim.Optimizer]:
    """Makes its peer from options of ours; torch's for-loop is the peer where it has no `fused`."""
    peer = PEERS[cls]
    if cls not in WITHOUT_FUSED:
        return peer

    def without_fused(params, fused=None, **options):
        return peer(params, **options)

    return without_fused


def own_options(cls: type) -> set[str]:
    """Options of ours that torch's class has not; `cls` is one of the two."""
    ((ours, peer),) = (pair for pair in PEERS.items() if cls in pair)
    theirs = _options(peer) if ours in NAMESAKES else peer.options_of_base()
    return _options(ours).keys() - theirs


#: For each of our classes a row with states, if there is one: an experiment would see little else.
ROWS = {case.optimizer: case for case in (*PLAIN, *WITH_STATES)}
#: Classes whose states have a step count in these rows.
COUNTING = tuple(cls for cls in ALL if ROWS[cls].counts)
STATEFUL = tuple(cls for cls in ALL if ROWS[cls].states)


def options_of(cls: type) -> dict[str, Any]:
    """Options that an experiment passes to one of our classes or to its peer: those of its row."""
    (row,) = (case for ours, case in ROWS.items() if cls in (ours, PEERS[ours]))
    return {name: value for name, value in row.options.items() if name != "lr"}


#: Our classes to which `foreach=True` means torch operations, as it does to torch's.
WITH_FOREACH = tuple(cls for cls in ALL if _options(cls)["foreach"] is None)


def fitted(cls: type, options: dict[str, Any]) -> dict[str, Any]:
    """Options for a class that has more than two betas: the second is the others too."""
    betas, more = options.get("betas", ()), len(_options(cls).get("betas", ())) - 2
    return options | {"betas": (*betas, *betas[-1:] * more)} if len(betas) == 2 else options


def having(option: str) -> tuple[type, ...]:
    """Our classes that have this option."""
    return tuple(cls for cls in ALL if option in _options(cls))


class Difference(NamedTuple):
    """Difference between ours and torch's."""

    row: str
    """The beginning of the row of docs/differences.md that tells the difference and says why."""
    experiment: str
    classes: tuple[type, ...]
    modes: tuple[str, ...]
    until: str | None = None
    """The first torch that does as ours."""


class Build:
    """Makes optimizers of one class in one mode."""

    def __init__(self, cls: type, mode: str):
        chosen = MODES[mode]
        if not issubclass(cls, ByFormula):  # torch has no `fused` for some: its for-loop then
            chosen = {name: value for name, value in chosen.items() if name in _options(cls)}
        self.cls, self.mode = cls, options_of(cls) | chosen

    def __call__(self, params, **options):
        return self.cls(params, **(self.mode | options))


class Outcome(NamedTuple):
    warnings: list[str]
    error: str | None
    value: Any

    def __str__(self) -> str:
        return "\n".join([*self.warnings, str(self.value) if self.error is None else self.error])


def outcome_of(experiment: Callable, *arguments) -> Outcome:
    value = error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = experiment(*arguments)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    told = [w for w in caught if w.category in (UserWarning, FutureWarning)]
    texts = {f"{w.category.__name__}: {w.message}" for w in told}
    # Drops a warning that comes once in a process: only the first of two outcomes has it.
    texts = {text for text in texts if "Sparse invariant checks" not in text}
    return Outcome(sorted(texts), error, value)


def is_same(ours: Outcome, theirs: Outcome) -> bool:
    """Numbers are as close as two orders of the same operations leave them over a few steps."""
    if (ours.warnings, ours.error) != (theirs.warnings, theirs.error):
        return False
    try:
        assert_same_values(ours.value, theirs.value, rtol=1e-5, atol=1e-6)
    except AssertionError:
        return False
    return True


def assert_same_values(ours, theirs, rtol: float, atol: float) -> None:
    """The same structure, types and texts, and numbers that are close."""
    assert type(ours) is type(theirs), (ours, theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        ours, theirs = list(ours.values()), [theirs[key] for key in ours]
    if isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for our, their in zip(ours, theirs, strict=True):
            assert_same_values(our, their, rtol, atol)
    elif isinstance(ours, torch.Tensor):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, equal_nan=True)
    elif isinstance(ours, float):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=rtol, atol=atol)
    else:
        assert ours == theirs


def said(function: Callable, *arguments) -> str:
    """The error that is part of what an experiment tells."""
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def without_own(groups: list[dict[str, Any]], cls: type) -> list[dict[str, Any]]:
    """Groups without the options that torch's class does not have."""
    own = own_options(cls)
    return [{k: v for k, v in group.items() if k not in own} for group in groups]


def of(*classes: type) -> Callable:
    """Restricts an experiment to some of our classes."""

    def mark(experiment):
        experiment.classes = classes
        return experiment

    return mark


def check_same_unless_listed(ours: Outcome, theirs: Outcome, what, differences) -> bool:
    """Returns whether it is listed. `what`: the experiment's name, our class and the mode."""
    experiment, cls, mode = what
    if mode == "foreach" and cls not in WITH_FOREACH:  # it chooses the same code as the default
        mode = "default"
    rows = [
        each.row
        for each in differences
        if each.experiment == experiment and cls in each.classes and mode in each.modes
        if each.until is None or torch.__version__ < each.until
    ]
    assert len(rows) <= 1, rows
    if is_same(ours, theirs) != (not rows):
        problem = (
            f"listed as {rows[0]!r}, but the same"
            if rows
            else "another outcome, but not in DIFFERENCES, the list of this file"
        )
        peer = name_of_peer(cls)
        pytest.fail(f"{experiment}: {problem}\n{cls.__name__}:\n{ours}\n{peer}:\n{theirs}")
    return bool(rows)


def name_of_peer(cls: type) -> str:
    if cls in NAMESAKES:
        return f"torch.optim.{cls.__name__}"
    return f"ByFormula({PEERS[cls].formula.__name__}) in tests/support/peers.py"


def check_is_told(difference: Difference, experiments: set[str], repository: Path) -> None:
    assert difference.experiment in experiments
    lines = (repository / "docs" / "differences.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith(f"| {difference.row}")]
    assert rows, f"docs/differences.md has no row {difference.row!r}"
    for row in rows:
        *_, reason = row.strip("|").split(" | ")
        assert reason.strip(), f"no reason: {row}"


def laws(namespace: dict[str, Any], differences: list[Difference]) -> tuple[Callable, ...]:
    """The tests of a module of experiments, which are its functions of `build`."""
    experiments = list(filter(_is_experiment, namespace.values()))
    subjects = pytest.mark.parametrize(
        ("cls", "experiment"),
        [
            pytest.param(cls, experiment, id=f"{cls.__name__}-{experiment.__name__}")
            for experiment in experiments
            for cls in getattr(experiment, "classes", PEERS)
        ],
    )

    @pytest.mark.parametrize("mode", MODES)
    @subjects
    def does_as_torch(cls, experiment, mode):
        """The same outcome as with torch's class, or a listed difference that is there."""
        ours, theirs = (outcome_of(experiment, Build(each, mode)) for each in (cls, PEERS[cls]))
        check_same_unless_listed(ours, theirs, (experiment.__name__, cls, mode), differences)

    @subjects
    def shows_something(cls, experiment):
        """An experiment that torch never runs to its end would compare nothing but an error."""
        errors = (outcome_of(experiment, Build(PEERS[cls], mode)).error for mode in MODES)
        assert any(error is None for error in errors)

    @pytest.mark.parametrize("difference", differences, ids=lambda each: each.experiment)
    def differences_are_told(difference, repository):
        check_is_told(difference, {each.__name__ for each in experiments}, repository)

    return does_as_torch, shows_something, differences_are_told


def _is_experiment(member: Any) -> bool:
    return inspect.isfunction(member) and list(inspect.signature(member).parameters) == ["build"]
