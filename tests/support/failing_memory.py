"""Has allocations of a step fail, one in each try; a program for test_out_of_memory.py.

Every allocation of a tensor fails in turn, and the first and the last of each chain of calls in the
library that allocates other memory.

It runs with a library preloaded by which allocations can be made to fail. Takes that library's
path, the number of a part of the subjects, and the file for what it finds: a list for each
optimizer and scenario.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fusedstep import optim
from fusedstep._step.program import Program
from fusedstep._step.undo import NO_RESERVE
from support.cases import PLAIN, Case, first_of_each
from support.stepping import bits, make_gradients, make_weights

SHAPES = ((40_000,), (7,), (6, 5))
"""Work for two threads, tensors of several chunks and of one, and one that is transposed."""

MATRICES = ((40, 60), (7, 3), (6, 5))

MOST = 1000
"""More allocations than any step makes."""

NEW, TENSORS, LIMIT = 0, 1, 2
"""The library's own allocations, those of torch's tensors, and a limit of what these hold."""

PARTS = 4
"""Processes, so that several CPUs share them. Each takes six seconds to begin."""

LIMITS = 12
"""Limits that are tried, from none to all that a step needs."""


class Composite(NamedTuple):
    """A row for an optimizer that has none in the case table, or for steps in torch operations."""

    name: str
    optimizer: Callable[..., torch.optim.Optimizer]
    of_group: dict[str, Any]
    sparse: bool = False
    dtype: torch.dtype = torch.float32

    def build(self, groups: list[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
        return self.optimizer([group | self.of_group for group in groups], **options)


_LOW_RANK = {"rank": 2, "update_proj_gap": 2, "weight_decay": 0.1}
_MUSGD = {"use_muon": True, "momentum": 0.9, "weight_decay": 0.1}
_CODES = {"state_dtype": "int8", "weight_decay": 0.1}
_BFLOAT16 = {"dtype": torch.bfloat16}

COMPOSED = (
    Composite("galore", optim.GaLoreAdamW, _LOW_RANK),
    Composite("galore, both sides", optim.GaLoreAdamW, _LOW_RANK | {"proj_type": "full"}),
    Composite(
        "galore, split", optim.GaLoreAdamW, _LOW_RANK | {"master_weights": "split"}, **_BFLOAT16
    ),
    Composite("galore_adafactor", optim.GaLoreAdafactor, _LOW_RANK),
    Composite(
        "galore_adafactor, both sides",
        optim.GaLoreAdafactor,
        _LOW_RANK | {"proj_type": "full", "beta1": 0.9},
    ),
    Composite("apollo", optim.APOLLOAdamW, _LOW_RANK),
    Composite("apollo, mini", optim.APOLLOAdamW, _LOW_RANK | {"scale_type": "tensor"}),
    Composite("apollo, kahan", optim.APOLLOAdamW, _LOW_RANK | {"rounding": "kahan"}, **_BFLOAT16),
    Composite("muon", optim.Muon, {}),
    Composite("muon, cautious", optim.Muon, {"cautious_decay": True}),
    Composite(
        "muon, int8", optim.Muon, {"state_dtype": "int8", "rounding": "stochastic"}, **_BFLOAT16
    ),
    Composite("muon, chosen rows", optim.Muon, {"rank_fraction": 0.5}),
    Composite("muon, chosen rows, normuon", optim.Muon, {"rank_fraction": 0.5, "normuon": True}),
    Composite("muon, almost orthogonal", optim.Muon, {"ns_start": "aol"}),
    Composite("muon for AdamW", optim.Muon, {"use_muon": False}),
    Composite("musgd", optim.MuSGD, _MUSGD),
    Composite(
        "musgd, int8",
        optim.MuSGD,
        _MUSGD | {"state_dtype": "int8", "rounding": "stochastic"},
        **_BFLOAT16,
    ),
    Composite("musgd, unfused", optim.MuSGD, _MUSGD | {"fused": False}),
    Composite("rowwise_adagrad", optim.RowWiseAdagrad, {}, sparse=True),
    Composite("came", optim.CAME, {"weight_decay": 0.1}),
    Composite("came, unfused", functools.partial(optim.CAME, fused=False), {}),
    Composite("came, split", optim.CAME, {"master_weights": "split"}, **_BFLOAT16),
    Composite("adafactor", optim.Adafactor, {}),
    Composite("adafactor, split", optim.Adafactor, {"master_weights": "split"}, **_BFLOAT16),
    Composite("sparse_adam", optim.SparseAdam, {}, sparse=True),
)


def _tiny_lamb(groups: list[dict[str, Any]], **options: Any) -> optim.Lamb:
    """Norms whose squares are below float32's numbers."""
    with torch.no_grad():
        for weight in itertools.chain.from_iterable(group["params"] for group in groups):
            weight.mul_(1e-30)
    return optim.Lamb(groups, lr=1e-30, fused=False, **options)


UNFUSED = (
    *(
        Composite(f"{case.name}, unfused", functools.partial(case.build, fused=False), {})
        for case in first_of_each(lambda case: case.optimizer, PLAIN)
    ),
    Composite("adam, unfused int8", functools.partial(optim.Adam, fused=False), _CODES),
    Composite("lamb of tiny weights", _tiny_lamb, {}),
    Composite("adan, one by one", functools.partial(optim.Adan, fused=False, foreach=False), {}),
)


@functools.cache
def sparse_gradients(shapes: tuple, dtype: torch.dtype, step: int) -> list[torch.Tensor]:
    return [grad.to_sparse(1).coalesce() for grad in make_gradients(shapes, dtype, step)]


class Subject:
    """An optimizer before the step that is to fail."""

    def __init__(self, case: Case | Composite, steps: int, groups: int = 1, **options: Any) -> None:
        self.case = case
        self.shapes = MATRICES if isinstance(case, Composite) else SHAPES
        self.dtype = case.dtype if isinstance(case, Composite) else torch.float32
        weights = make_weights(self.shapes, self.dtype)
        weights[2] = weights[2].t().contiguous().t()
        self.params = [torch.nn.Parameter(weight) for weight in weights]
        self.dictionary: dict[str, Any] = {}
        half = len(self.params) // groups
        lists = [{"params": self.params[:half]}, {"params": self.params[half:]}][:groups]
        self.optimizer = case.build(lists, **options)
        for step in range(steps):
            self.set_grads(step)
            self.optimizer.step()
        self.set_grads(steps)
        self.kept = [self._keep(p) for p in self.params]

    def _keep(self, p: torch.nn.Parameter) -> tuple:
        state = dict(self.optimizer._state.get(p, {}))
        tensors = [p.detach(), *([] if p.grad.is_sparse else [p.grad]), *state.values()]
        grad = p.grad.clone() if p.grad.is_sparse else p.grad
        return p, grad, state, [(tensor, tensor.clone()) for tensor in tensors]

    def put_back(self) -> None:
        """To where it began, in the same memory, after a step that neither clips nor clears."""
        self.set_grads(0)
        self.optimizer.step()
        for p, grad, state, tensors in self.kept:
            for tensor, value in tensors:
                tensor.copy_(value)
            p.grad = grad.clone() if grad.is_sparse else grad
            if state:
                self.optimizer._state[p].clear()
                self.optimizer._state[p].update(state)

    def set_grads(self, step: int) -> None:
        is_sparse = isinstance(self.case, Composite) and self.case.sparse
        make = sparse_gradients if is_sparse else make_gradients
        grads = make(self.shapes, self.dtype, step)
        for p, grad in zip(self.params, grads, strict=True):
            if is_sparse:
                p.grad = grad.clone()
            elif p.grad is None or p.grad.is_sparse:
                p.grad = grad
            else:
                p.grad.copy_(grad)

    def contents(self) -> dict[str, torch.Tensor]:
        """Weights, gradients, and states that have been stepped: others are as if made anew.

        They are no copies, but views.
        """
        found = {}
        for i, p in enumerate(self.params):
            grad = p.grad if p.grad is None or not p.grad.is_sparse else p.grad.to_dense()
            found |= {f"weight {i}": p.detach(), f"gradient {i}": grad}
            state = self.optimizer._state.get(p, {})
            made = [state["step"]] if "step" in state else list(state.values())
            if any(value.any() for value in made):
                found |= {f"{name} {i}": value for name, value in state.items()}
        groups = self.optimizer._groups
        found |= {f"lr {i}": torch.tensor(group["lr"]) for i, group in enumerate(groups)}
        return {name: bits(value) for name, value in found.items() if value is not None}


def step(subject: Subject) -> None:
    subject.optimizer.step()


def looked_at(case: Case) -> Subject:
    subject = Subject(case, 0)
    assert not subject.optimizer.state[subject.params[0]]
    for number in range(3):
        subject.set_grads(number)
        subject.optimizer.step()
    return subject


def of_different_age(case: Case) -> Subject:
    subject = Subject(case, 1)
    for p in subject.params[::2]:
        p.grad = None
    subject.optimizer.step()
    subject.set_grads(2)
    return subject


def with_moved_gradients(case: Case) -> Subject:
    subject = Subject(case, 2)
    for p in subject.params:
        p.grad = p.grad.clone(memory_format=torch.preserve_format)
    return subject


def with_other_layouts(case: Case) -> Subject:
    subject = Subject(case, 2)
    for p in subject.params[2:]:
        p.grad = p.grad.t().contiguous().t()
    return subject


def with_sparse_gradients(case: Case) -> Subject:
    subject = Subject(case, 1)
    for p in subject.params[2:]:
        index = torch.tensor([[3, 1, 3, 0]])
        values = p.grad[:4].clone()
        p.grad = torch.sparse_coo_tensor(index, values, p.shape, check_invariants=True)
    return subject


def with_a_dictionary(case: Case) -> Subject:
    other = Subject(case, 3)
    other.optimizer.param_groups[0]["lr"] = 0.5
    subject = Subject(case, 1)
    subject.dictionary = copy.deepcopy(other.optimizer.state_dict())
    return subject


class Scenario(NamedTuple):
    make: Callable[[Case], Subject]
    act: Callable[[Subject], Any] = step
    kinds: tuple[int, ...] = (NEW,)
    clips: bool = False
    is_alone: bool = True
    """False where another thread takes the memory that a step gives back for its next part."""
    repeats: tuple[int, ...] = ()
    """Kinds of which every try needs as many: a subject is put back, not made anew."""


SCENARIOS = {
    "first": Scenario(lambda case: Subject(case, 0), kinds=(NEW, TENSORS)),
    "repeated": Scenario(lambda case: Subject(case, 2), repeats=(NEW, TENSORS, LIMIT)),
    "looked at": Scenario(looked_at),
    "of different age": Scenario(of_different_age),
    "moved gradients": Scenario(with_moved_gradients),
    "other layouts": Scenario(with_other_layouts),
    "clipped": Scenario(
        lambda case: Subject(case, 2),
        lambda subject: subject.optimizer.step(max_norm=0.5),
        kinds=(NEW, TENSORS),
    ),
    "zeroed": Scenario(
        lambda case: Subject(case, 2), lambda subject: subject.optimizer.step(zero_grad=True)
    ),
    "first of two groups": Scenario(lambda case: Subject(case, 0, groups=2), kinds=(NEW, TENSORS)),
    "two groups": Scenario(lambda case: Subject(case, 2, groups=2)),
    "two groups clipped": Scenario(
        lambda case: Subject(case, 2, groups=2),
        lambda subject: subject.optimizer.step(max_norm=0.5, zero_grad=True),
        clips=True,
        repeats=(TENSORS, LIMIT),  # not NEW: the first step that clips makes plans for it
    ),
    "sparse": Scenario(with_sparse_gradients),
    "loaded": Scenario(
        with_a_dictionary,
        lambda subject: subject.optimizer.load_state_dict(subject.dictionary),
        kinds=(NEW, TENSORS),
    ),
}
# Scenarios of every optimizer. One optimizer of each family runs all scenarios.
OTHERS = ("repeated", "two groups clipped")
THOROUGH = first_of_each(lambda case: case.elementwise, PLAIN)


def kinds_of(case: Composite, name: str, scenario: Scenario) -> Scenario:
    """Without the library's own allocations where an optimizer's other ways step two groups.

    They are those of its first way, and of one group.
    """
    is_other = "," in case.name and name == "two groups clipped"
    return scenario._replace(kinds=(TENSORS, LIMIT)) if is_other else scenario


OF_COMPOSED = {
    name: SCENARIOS[name]._replace(
        kinds=(NEW, TENSORS) if name == "repeated" else (NEW, TENSORS, LIMIT)
    )
    for name in ("first", "repeated", "two groups clipped")
}


def scenarios_of(case: Case) -> list[str]:
    names = [name for name in SCENARIOS if case in THOROUGH or name in OTHERS]
    names = [name for name in names if name != "sparse"]
    return [*names, "sparse"] if case.sparse else names


def subjects() -> list[tuple[Case | Composite, str, Scenario]]:
    """Optimizers with the scenarios that they go through, and their names."""
    rows = [(case, name, SCENARIOS[name]) for case in PLAIN for name in scenarios_of(case)]
    rows += [
        (case, name, kinds_of(case, name, scenario))
        for case in COMPOSED
        for name, scenario in OF_COMPOSED.items()
        # A row with other options of a class steps one group by the code that steps two groups.
        if name != "repeated" or "," not in case.name
    ]
    tensors = OF_COMPOSED["two groups clipped"]._replace(kinds=(TENSORS, LIMIT))
    rows += [(case, "two groups clipped", tensors) for case in UNFUSED]
    beside = OF_COMPOSED["repeated"]._replace(kinds=(TENSORS,), is_alone=False, repeats=())
    # Those whose step allocates between two of its parts on every CPU.
    names = ("muon, int8", "came", "galore, split", "musgd, unfused")
    return rows + [(case, "beside others", beside) for case in COMPOSED if case.name in names]


def part_of_subjects(part: int) -> list[tuple[Case | Composite, str, Scenario]]:
    return subjects()[part::PARTS]


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    both = a.keys() & b.keys()
    return sorted(
        (a.keys() ^ b.keys()) | {name for name in both if not torch.equal(a[name], b[name])}
    )


def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def made(scenario: Scenario, case: Case | Composite) -> Subject:
    subject = scenario.make(case)
    if not scenario.is_alone:
        strategy = subject.optimizer._strategy_class

        class WithoutReserve(strategy):
            def program(self, *of: Any) -> Program:
                program = super().program(*of)
                program.reserve = lambda: NO_RESERVE
                return program

        subject.optimizer._strategy_class = WithoutReserve
        subject.optimizer._forget_plans()
    return subject


def to_fail(library: ctypes.CDLL) -> list[int]:
    """The numbers of the noted allocations that are to fail, then those after all of them.

    Of those that the same chain of calls makes, of one weight after another, these are the first
    and the last.
    """
    chains = (ctypes.c_ulong * MOST)()
    count = library.noted_allocations(chains, MOST)
    places: dict[int, list[int]] = {}
    for number, chain in enumerate(chains[:count], 1):
        places.setdefault(chain, []).append(number)
    chosen = {number for each in places.values() for number in (each[0], each[-1])}
    return [*sorted(chosen), *range(count + 1, MOST)]


def tried(
    library: ctypes.CDLL, case: Case | Composite, scenario: Scenario, kind: int
) -> dict[str, Any]:
    """Counts the allocations that were made to fail, and lists the faults found after them."""
    subject = made(scenario, case)
    before = copied(subject.contents())
    if kind == LIMIT:
        library.limit_tensors(sys.maxsize)
    if kind == NEW:
        library.note_allocations()
    scenario.act(subject)
    numbers: Iterable[int] = range(1, LIMITS if kind == LIMIT else MOST)
    if kind == NEW:
        numbers = to_fail(library)
    most = library.most_held() if kind == LIMIT else 0
    after = copied(subject.contents())
    faults, partial = [], 0
    is_right = True
    for n in numbers:
        if kind in scenario.repeats and is_right:
            subject.put_back()
        else:
            subject = made(scenario, case)
        is_right = False
        error = None
        if kind == LIMIT:
            library.limit_tensors(most * n // LIMITS)
        else:
            library.fail_allocation(kind, n)
        try:
            scenario.act(subject)
        except Exception as raised:
            error = raised
        if kind == LIMIT:
            library.most_held()
        elif library.allocations_left() > 0:
            if error:
                faults.append(f"{n}: {error!r} without a failure")
            return {"tried": n - 1, "partial": partial, "faults": faults}
        found = subject.contents()
        if error is None:
            is_right = not differing(found, after)
            if not is_right:
                faults.append(f"{n}: no error, but not as it should be: {differing(found, after)}")
            continue
        if not (isinstance(error, MemoryError) or "memory" in str(error)):
            faults.append(f"{n}: {error!r}")
        stepped = {id(p) for p in getattr(error, "stepped", [])}
        partial += bool(stepped)
        # Weights an error names are as after the step, but for gradients; all others as before.
        done = {f" {i}" for i, p in enumerate(subject.params) if id(p) in stepped}

        def is_done(name: str, done: set[str] = done) -> bool:
            return not name.startswith("gradient") and name[name.rindex(" ") :] in done

        right = {name: value for name, value in before.items() if not is_done(name)}
        right |= {name: value for name, value in after.items() if is_done(name)}
        if differing(found, right):
            faults.append(f"{n}: {error!r} has changed {differing(found, right)}")
            continue
        if stepped and scenario.clips:
            continue  # by the norm of gradients of which some are done with
        for p in subject.params:
            p.grad = None if id(p) in stepped else p.grad
        scenario.act(subject)
        gone = [f"gradient{place}" for place in done]
        right = {name: value for name, value in after.items() if name not in gone}
        found = subject.contents()
        is_right = not differing(found, right)
        if not is_right:
            faults.append(f"{n}: then not as it should be: {differing(found, right)}")
    if kind == LIMIT:
        return {"tried": most, "partial": partial, "faults": faults}
    return {"tried": MOST, "partial": partial, "faults": [*faults, "there is no end of it"]}


def main(path: str, part: str, results: str) -> None:
    library = ctypes.CDLL(path)
    library.limit_tensors.argtypes, library.most_held.restype = [ctypes.c_long], ctypes.c_long
    torch.set_num_threads(2)
    # torch turns it off, and has other bits from then on, where a product of it finds no memory.
    torch.backends.mkldnn.set_flags(False)
    found = {
        f"{case.name}: {name}": {
            str(kind): tried(library, case, scenario, kind) for kind in scenario.kinds
        }
        for case, name, scenario in part_of_subjects(int(part))
    }
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
