"""Steps through a case: each step against the oracle, then all of it with other settings."""

from __future__ import annotations

import copy
import pickle
import traceback
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import fusedstep
from fusedstep._native import ops
from fuzz import oracle
from fuzz.choices import ROWS
from fuzz.memory import DTYPES, Area

Case = dict[str, Any]
Digests = list[dict[str, int]]


class CaseError(Exception):
    """A wrong step: `kind` is value, outside, bits or the name of an exception."""

    def __init__(self, kind: str, n: int, text: str):
        super().__init__(f"step {n}: {text}")
        self.kind, self.n = kind, n


def check(case: Case, tally: oracle.Tally, kind: type[Run] | None = None) -> None:
    """Raises `CaseError` unless a case gives what it should, and in each setting the same bits."""
    kind = kind or Run
    if not any(group["weights"] for group in case["groups"]):
        return  # which no optimizer takes
    first, *others = case["settings"]
    digests = kind(case, first, tally).run()
    for setting in others:
        for step, expected, actual in zip(
            case["steps"], digests, kind(case, setting, None).run(), strict=True
        ):
            differing = [name for name, crc in expected.items() if actual.get(name) != crc]
            if differing:
                text = f"{_named(setting)}: not the bits of {_named(first)}: {differing[0]}"
                raise CaseError("bits", step["n"], text)


def _named(setting: list[int]) -> str:
    isa, threads = setting
    return f"{_isa(isa)} with {threads} threads"


def _isa(index: int) -> str:
    isas = fusedstep.isas()
    return isas[index % len(isas)]


class Run:
    """A case with one setting. Without a tally its results are not compared with the oracle."""

    rows: Mapping[str, Any] = ROWS

    def __init__(self, case: Case, setting: list[int], tally: oracle.Tally | None):
        self.case, self.tally = case, tally
        self.isa, self.threads = _isa(setting[0]), setting[1]
        self.row = self.rows[case["row"]]
        self.areas: list[Area] = []
        self.params: dict[int, Parameter] = {}
        self.grad_areas: dict[int, Area] = {}
        self.frozen: set[int] = set()
        #: Weights whose states a skipped step has made. An optimizer without a step count in its
        #: states knows it until they are loaded or copied.
        self.untouched: set[int] = set()

    def run(self) -> Digests:
        threads, digests = torch.get_num_threads(), []
        torch.set_num_threads(self.threads)
        ops.force_isa(self.isa)
        step = {"n": 0}
        try:
            groups = [self._group(group) for group in self.case["groups"] if group["weights"]]
            self.optimizer = self.row.optimizer(groups, **_options(self.case["options"]))
            for step in self.case["steps"]:
                for change in step["changes"]:
                    CHANGES[change["do"]](self, change)
                self._set_gradients(step)
                digests.append(self._step(step))
        except oracle.WrongError as wrong:
            raise CaseError("value", step["n"], str(wrong)) from None
        except CaseError:
            raise
        except Exception as error:
            where = traceback.format_exc()
            raise CaseError(type(error).__name__, step["n"], where) from error
        finally:
            ops.force_isa(None)
            torch.set_num_threads(threads)
        return digests

    # Operands

    def area(self, dtype: torch.dtype, shape: list[int], place: dict[str, Any]) -> Area:
        area = Area(dtype, shape, place.get("strides"), place.get("offset", 0))
        self.areas.append(area)
        return area

    def seed(self, identity: int, n: int) -> int:
        return self.case["seed"] * 1_000_003 + identity * 1_009 + n

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        params = []
        for weight in group["weights"]:
            area = self.area(DTYPES[weight["dtype"]], weight["shape"], weight)
            area.write(weight.get("values", "usual"), self.seed(weight["id"], 0))
            params.append(Parameter(area.view))
            self.params[weight["id"]] = params[-1]
        return {"params": params} | _options(group["options"])

    def _set_gradients(self, step: dict[str, Any]) -> None:
        later = []
        for identity, p in self.params.items():
            gradient = step["grads"].get(str(identity), {"how": "refill"})
            how = "none" if identity in self.frozen else gradient["how"]
            if how == "share":
                later.append((p, self.params.get(gradient["of"])))
            elif how == "none":
                p.grad = None
            elif how != "keep":
                if how == "new" or identity not in self.grad_areas:
                    self.grad_areas[identity] = self.area(p.dtype, p.shape, gradient)
                area = self.grad_areas[identity]
                area.write(gradient.get("values", "usual"), self.seed(identity, step["n"]))
                p.grad = area.view
        for p, other in later:
            p.grad = None if other is None else other.grad

    # The step

    def take_step(self, call: dict[str, Any]) -> Any:
        is_scaled = not call.keys().isdisjoint(("scale", "found_inf"))
        if is_scaled:
            self.optimizer.grad_scale = torch.tensor(call.get("scale", 1.0))
            self.optimizer.found_inf = torch.tensor(float(call.get("found_inf", False)))
        options = {name: call[name] for name in ("max_norm", "zero_grad") if name in call}
        if "closure" in call:
            options["closure"] = None if call["closure"] == "none" else lambda: 1.5
        try:
            return self.optimizer.step(**options)
        finally:
            if is_scaled:
                del self.optimizer.grad_scale, self.optimizer.found_inf

    def _step(self, step: dict[str, Any]) -> dict[str, int]:
        call = step["call"]
        if self.tally is None:
            self.take_step(call)
            return self._digests({})
        untouched = frozenset(self.params[identity] for identity in self.untouched)
        asked = oracle.Step(
            **{name: call[name] for name in call if name != "closure"}, untouched=untouched
        )
        expected, norm = oracle.expected_step(self.row, self.optimizer, asked)
        still = {
            identity: self._bits(identity)
            for identity, p in self.params.items()
            if expected[p].weight is None and expected[p].is_decidable
        }
        grads = {
            p: p.grad.clone()
            for p in expected
            if p.grad is not None and isinstance(expected[p].gradient, str)
        }
        with_gradient = {identity for identity, p in self.params.items() if p.grad is not None}
        numbers = {"step", *self.row.numbers}
        known = numbers.union(oracle.BESIDE)
        stateless = {
            i
            for i in with_gradient
            if not self.optimizer.state.get(self.params[i], {}).keys() - known
        }
        returned = self.take_step(call)
        self._check_returned(returned, call, norm)
        self._check_outside(step["n"])
        for identity, p in self.params.items():
            what = f"weight {identity}"
            if identity in still:
                # States may have been made, as they are before a step. The count of a weight
                # without any other state begins anew then.
                kept = still[identity]
                if identity in stateless:
                    kept = {name: kept[name] for name in kept.keys() - numbers}
                if not kept.items() <= self._bits(identity).items():
                    raise oracle.WrongError(f"{what}: it or a state has changed")
            else:
                oracle.compare(expected[p], p, self.optimizer.state[p], what, self.tally)
            if identity in with_gradient:
                oracle.compare_gradient(expected[p], grads.get(p), p, what)
        self._check_isa(set(self.params) - set(still))
        if not call.get("found_inf"):
            self.untouched -= with_gradient
        elif not self.row.counts:
            self.untouched |= stateless
        return self._digests(expected)

    def _check_returned(self, returned: Any, call: dict[str, Any], norm: float) -> None:
        if call.get("closure") == "loss":
            if returned != 1.5:
                raise oracle.WrongError(f"step() returned {returned!r} instead of the loss")
        elif "max_norm" in call:
            if returned.dtype != torch.float64 or returned.dim() != 0:
                raise oracle.WrongError(f"step() returned {returned!r}")
            if not (returned.item() == norm or abs(returned.item() - norm) <= 1e-9 * norm):
                raise oracle.WrongError(f"the norm is {returned.item()!r} instead of {norm!r}")
        elif returned is not None:
            raise oracle.WrongError(f"step() returned {returned!r}")

    def _check_outside(self, n: int) -> None:
        for area in self.areas:
            if touched := area.touched_outside():
                view = area.view
                raise CaseError(
                    "outside",
                    n,
                    f"{touched} elements beside a {view.dtype} view of {list(view.shape)} "
                    f"at strides {list(view.stride())} have changed",
                )

    def _check_isa(self, stepped: set[int]) -> None:
        if any(self.params[identity].numel() for identity in stepped):
            isa = self.optimizer._isa()
            if isa != self.isa:
                raise oracle.WrongError(f"{isa} has run instead of {self.isa}")

    # Bits

    def _bits(self, identity: int) -> dict[str, int]:
        p = self.params[identity]
        state = self.optimizer.state.get(p, {})
        return {"weight": _crc(p.detach())} | {name: _crc(state[name]) for name in state}

    def _digests(self, expected: dict[Tensor, oracle.Expected]) -> dict[str, int]:
        """Checksums of weights and states, and of gradients with an expected value."""
        found = {}
        for identity, p in self.params.items():
            found |= {f"{name} of {identity}": crc for name, crc in self._bits(identity).items()}
            told = p not in expected or expected[p].gradient is not oracle.ANY
            if p.grad is not None and told:
                found[f"gradient of {identity}"] = _crc(p.grad)
        return found


def _crc(tensor: Tensor) -> int:
    """Checksum of the elements in the order of their indices. All NaN count as one number."""
    if tensor.itemsize == 1:
        tensor = tensor.contiguous().view(torch.uint8)
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    tensor = tensor.clone(memory_format=torch.contiguous_format)  # one element has any strides
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy())


def _options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: _option(name, value) for name, value in options.items()}


def _option(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return torch.tensor(value["tensor"])
    if isinstance(value, list):
        return tuple(value)
    return DTYPES.get(value, value) if name in ("state_dtype", "ns_dtype") else value


# Changes between steps. A weight or group that a smaller case lacks is passed over.


def _option_changes(run: Run, change: dict[str, Any]) -> None:
    groups = run.optimizer.param_groups
    if change["group"] < len(groups):
        groups[change["group"]][change["name"]] = _option(change["name"], change["value"])


def _group_is_added(run: Run, change: dict[str, Any]) -> None:
    if change["of"]["weights"]:
        run.optimizer.add_param_group(run._group(change["of"]))


def _weights_are_reversed(run: Run, change: dict[str, Any]) -> None:
    groups = run.optimizer.param_groups
    if change["group"] < len(groups):
        groups[change["group"]]["params"].reverse()


def _is_loaded(run: Run, change: dict[str, Any]) -> None:
    # A dictionary that lacks a part of a weight's state is refused.
    states = {*getattr(run.row, "states", ())}
    if all(state.keys() >= states for state in run.optimizer.state.values() if state):
        run.untouched.clear()
        run.optimizer.load_state_dict(run.optimizer.state_dict())


def _is_replaced(run: Run, optimizer: torch.optim.Optimizer) -> None:
    before, after = (
        [p for group in each.param_groups for p in group["params"]]
        for each in (run.optimizer, optimizer)
    )
    copies = dict(zip(before, after, strict=True))
    run.params = {identity: copies[p] for identity, p in run.params.items()}
    run.optimizer = optimizer
    run.untouched.clear()


def _is_copied(run: Run, change: dict[str, Any]) -> None:
    _is_replaced(run, copy.deepcopy(run.optimizer))


def _is_pickled(run: Run, change: dict[str, Any]) -> None:
    if run.case["options"].get("state_dtype") == "fp8":
        return  # torch saves such tensors, but pickle cannot load them
    _is_replaced(run, pickle.loads(pickle.dumps(run.optimizer)))


def _grads_are_cleared(run: Run, change: dict[str, Any]) -> None:
    run.optimizer.zero_grad()


def _layout_changes(run: Run, p: Parameter, change: dict[str, Any]) -> None:
    view = run.area(p.dtype, p.shape, change).view
    p.data = view.copy_(p.detach())


def _data_changes(run: Run, p: Parameter, change: dict[str, Any]) -> None:
    area = run.area(p.dtype, p.shape, {})
    area.write("usual", run.seed(change["weight"], 500))
    p.data = area.view


def _weight_changes(run: Run, p: Parameter, change: dict[str, Any]) -> None:
    with torch.no_grad():
        p.mul_(change["factor"])


def _states_of(run: Run, p: Parameter) -> dict[str, Tensor]:
    state = run.optimizer.state.get(p, {})
    left_out = {"step", *run.row.numbers, *oracle.BESIDE[1:]}  # and codes, beside their absmax
    left_out |= {n for n in state if n.endswith(oracle.ABSMAX) or n + oracle.ABSMAX in state}
    return {name: value for name, value in state.items() if name not in left_out}


def _states_are_placed(run: Run, p: Parameter, change: dict[str, Any]) -> None:
    for name, value in _states_of(run, p).items():
        run.optimizer.state[p][name] = run.area(value.dtype, p.shape, change).view.copy_(value)


def _states_are_scaled(run: Run, p: Parameter, change: dict[str, Any]) -> None:
    for value in _states_of(run, p).values():
        value.mul_(change["factor"])


def _state_is_dropped(run: Run, p: Parameter, change: dict[str, Any]) -> None:
    names = sorted(_states_of(run, p))
    if names:
        del run.optimizer.state[p][names[change["weight"] % len(names)]]


def _states_are_dropped(run: Run, p: Parameter, change: dict[str, Any]) -> None:
    run.optimizer.state.pop(p, None)


def _count_changes(run: Run, p: Parameter, change: dict[str, Any]) -> None:
    state = run.optimizer.state.get(p, {})
    if "step" in state:
        state["step"].fill_(change["value"])


def _is_frozen(run: Run, p: Parameter, change: dict[str, Any]) -> None:
    run.frozen ^= {change["weight"]}
    p.requires_grad_(change["weight"] not in run.frozen)


def _of_weight(function):
    def change_weight(run: Run, change: dict[str, Any]) -> None:
        if change["weight"] in run.params:
            function(run, run.params[change["weight"]], change)

    return change_weight


CHANGES = {
    "option": _option_changes,
    "group": _group_is_added,
    "order": _weights_are_reversed,
    "load": _is_loaded,
    "copy": _is_copied,
    "pickle": _is_pickled,
    "zero_grad": _grads_are_cleared,
    "layout": _of_weight(_layout_changes),
    "data": _of_weight(_data_changes),
    "weight": _of_weight(_weight_changes),
    "place_state": _of_weight(_states_are_placed),
    "scale_state": _of_weight(_states_are_scaled),
    "drop_state": _of_weight(_state_is_dropped),
    "drop_states": _of_weight(_states_are_dropped),
    "count": _of_weight(_count_changes),
    "freeze": _of_weight(_is_frozen),
}
