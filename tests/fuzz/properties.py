"""Steps through the cases of `composites`: against a formula, and by properties of a step.

Each step is taken from the operands as they are stored before it. The bound of a formula's result
is relative to the largest move of the weight, beside what rounded sums of entries may change.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from fuzz import choices, composites, events, formulas, oracle, run
from reference.codes import rounds_by_step

OF_FORMULA = 1e-4
"""Largest distance from a formula, in the largest move of an element and in the element."""


def check(case: run.Case, tally: oracle.Tally) -> None:
    """Raises `run.CaseError` unless a case of any kind gives what it should."""
    if "mode" in case:
        events.check(case)
        return
    run.check(case, tally, CompositeRun if case["row"] in composites.ROWS else None)


class CompositeRun(run.Run):
    """A case with one setting, of an optimizer whose states have shapes of their own."""

    rows = composites.ROWS

    def _set_gradients(self, step: dict[str, Any]) -> None:
        kept = {
            identity: p.grad
            for identity, p in self.params.items()
            if step["grads"].get(str(identity), {}).get("how") == "keep"
        }
        super()._set_gradients(step)
        for identity, p in self.params.items():
            kind = step["grads"].get(str(identity), {}).get("sparse")
            if self.row.sparse == 1:
                kind = kind or "usual"
            if p.grad is None or identity in kept or kind is None or p.dim() == 0:
                continue
            rows = composites.entries_of(kind, len(p), self.seed(identity, step["n"]))
            values = p.grad[rows % max(len(p), 1)].clone()
            p.grad = torch.sparse_coo_tensor(rows[None], values, p.shape, check_invariants=True)
            if kind == "coalesced":
                p.grad = p.grad.coalesce()

    def _bits(self, identity: int) -> dict[str, int]:
        p = self.params[identity]
        state = self.optimizer.state.get(p, {})
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        return {"weight": run._crc(p.detach())} | {k: run._crc(v) for k, v in tensors.items()}

    def _digests(self, expected: dict[Tensor, oracle.Expected]) -> dict[str, int]:
        return {
            f"{name} of {identity}": crc
            for identity in self.params
            for name, crc in self._bits(identity).items()
        }

    def _step(self, step: dict[str, Any]) -> dict[str, int]:
        call = {name: value for name, value in step["call"].items() if name != "refused"}
        if self.tally is None:
            self.take_step(call)
            return self._digests({})
        if step["call"].get("refused"):
            self._check_refused()
        norm, factor = self._norm_and_factor(call)
        before = {identity: self._bits(identity) for identity in self.params}
        grads = {p: p.grad.clone() for p in self.params.values() if p.grad is not None}
        weights = {
            p: oracle.value_of(p.detach(), self.optimizer.state.get(p, {})).clone() for p in grads
        }
        states = {p: copy.deepcopy(self.optimizer.state.get(p, {})) for p in grads}
        other = self._copy(call)
        returned = self.take_step(call)
        self._check_returned(returned, call, norm)
        self._check_outside(step["n"])
        for identity, p in self.params.items():
            what = f"weight {identity}"
            if call.get("found_inf") or p not in grads:
                if not before[identity].items() <= self._bits(identity).items():
                    raise oracle.WrongError(f"{what}: it or a state has changed")
                continue
            self.tally.elements += p.numel()
            if not {"scale", "max_norm", "zero_grad"} & call.keys():
                self._check_gradient(grads[p], p.grad, what)
            place = _place_of(p, self.optimizer.param_groups)
            self._check_formula(place, weights[p], grads[p], states[p], factor, p, what)
        if other is not None:
            self._check_copy(other)
        return self._digests({})

    # The properties

    def _check_refused(self) -> None:
        """A step with a wrong argument changes nothing."""
        if all(p.grad is None for p in self.params.values()):
            return
        before = self._digests({})
        try:
            self.optimizer.step(max_norm=-1.0)
        except ValueError:
            pass
        else:
            raise oracle.WrongError("a step with a negative max_norm is taken")
        after = self._digests({})
        if any(after.get(name) != crc for name, crc in before.items()):
            raise oracle.WrongError("a step that is refused has changed something")

    def _norm_and_factor(self, call: dict[str, Any]) -> tuple[float, float]:
        squares = 0.0
        for p in self.params.values():
            if p.grad is not None:
                grad = p.grad.coalesce().values() if p.grad.is_sparse else p.grad
                squares += grad.double().square().sum().item()
        factor = 1.0 / call.get("scale", 1.0)
        norm = math.inf if call.get("found_inf") else math.sqrt(squares) * factor
        if "max_norm" in call:
            factor *= min(1.0, call["max_norm"] / (norm + oracle.CLIP_EPSILON))
        return norm, factor

    def _copy(self, call: dict[str, Any]) -> torch.optim.Optimizer | None:
        """A copy that has been through a dictionary, and has taken the same step."""
        if call.get("found_inf") or not any(p.grad is not None for p in self.params.values()):
            return None
        other = copy.deepcopy(self.optimizer)
        pairs = zip(_ordered(self.optimizer), _ordered(other), strict=True)
        for p, its in pairs:
            its.data = _copied(p)
            its.grad = copy.deepcopy(p.grad)  # at the same strides, expanded ones too
        other.load_state_dict(other.state_dict())
        mine, self.optimizer = self.optimizer, other
        try:
            self.take_step({name: value for name, value in call.items() if name != "closure"})
        finally:
            self.optimizer = mine
        return other

    def _check_copy(self, other: torch.optim.Optimizer) -> None:
        names = {p: identity for identity, p in self.params.items()}
        pairs = zip(_ordered(self.optimizer), _ordered(other), strict=True)
        for p, its in pairs:
            what = f"weight {names[p]}"
            if run._crc(p.detach()) != run._crc(its.detach()):
                raise oracle.WrongError(f"{what}: other bits after a trip through a dictionary")
            self._check_same_states(p, its, other, what)

    def _check_same_states(self, p: Tensor, its: Tensor, other: Any, what: str) -> None:
        mine, theirs = self.optimizer.state.get(p, {}), other.state.get(its, {})
        if mine.keys() != theirs.keys():
            raise oracle.WrongError(f"{what}: states {[*mine]}, and {[*theirs]} of its copy")
        group = next(g for g in other.param_groups if any(each is its for each in g["params"]))
        bits_of = _bits_but_signs_of_zeros if group.get("momentum", 1.0) == 0 else run._crc
        for name, value in mine.items():
            if isinstance(value, Tensor) and (
                (value.dtype, value.shape) != (theirs[name].dtype, theirs[name].shape)
                or bits_of(value) != bits_of(theirs[name])
            ):
                raise oracle.WrongError(f"{what}: {name} is not that of its copy")

    def _check_gradient(self, before: Tensor, after: Tensor, what: str) -> None:
        if after is None or before.is_sparse != after.is_sparse:
            raise oracle.WrongError(f"{what}: the gradient has another form")
        if before.is_sparse:
            before, after = before.to_dense(), after.to_dense()
        if not torch.equal(before, after):
            raise oracle.WrongError(f"{what}: the gradient has changed")

    # The formulas

    def _check_formula(
        self,
        place: tuple[int, int, int],
        weight: Tensor,
        grad: Tensor,
        state: dict[str, Tensor],
        factor: float,
        p: Tensor,
        what: str,
    ) -> None:
        if p.numel() == 0:
            return
        group, after = self.optimizer.param_groups[place[0]], self.optimizer.state.get(p, {})
        defaults = choices.options_of(self.row)
        names = {
            name: oracle.number(value)
            for name, value in (defaults | self.case["options"] | group).items()
            if name not in oracle.NOT_IN_FORMULAS or name in ("fused", "seed", "state_dtype")
        }
        step = float(state["step"]) + 1.0 if "step" in state else 1.0
        values, error, rows = _sums(grad, factor)
        value_dtype = torch.float32 if self._way(p) else p.dtype
        asked = formulas.Asked(
            names, weight, values, rows, state, after, step, p.dtype, value_dtype, place,
            self.case["seed"], error,
        )  # fmt: skip
        expected = self.row.formula(asked)
        # All elements are shifted by +error, by -error, and each by a random sign. A quotient by a
        # sum hardly changes if all elements shift together.
        generator = torch.Generator().manual_seed(self.case["seed"])
        signs = [2 * torch.rand(values.shape, generator=generator) - 1 for _ in range(2)]
        nearby = dataclasses.replace(asked, error=None)
        near = [
            self.row.formula(dataclasses.replace(nearby, grad=values + sign * error)).values
            for sign in (1, -1, *(each.sign() for each in signs))
            if error.any() and expected.feels_gradient
        ]
        if "step" in after and after["step"].item() != step:
            raise oracle.WrongError(f"{what}: the step count is {after['step'].item()}")
        for name in expected.values:
            self._compare(name, expected, near, asked, p, what)

    def _compare(
        self,
        name: str,
        stepped: formulas.Stepped,
        near: list[dict[str, Tensor]],
        asked: formulas.Asked,
        p: Tensor,
        what: str,
    ) -> None:
        expected, after = stepped.values[name], asked.after
        if name == "weight":
            (actual, eps, beside), old = self._weight(p, after), asked.weight
        else:
            actual, old = (oracle.decoded(name, each, expected.shape) if name in each else None
                           for each in (after, asked.before))  # fmt: skip
            eps = torch.finfo(after[name].dtype if name + oracle.ABSMAX not in after
                              else torch.float32).eps  # fmt: skip
            beside = 0.0
        expected = expected.reshape(actual.shape)
        old = torch.zeros_like(expected) if old is None else old.reshape(actual.shape)
        scale = expected.abs() + old.abs()
        close = 1e-11 if p.dtype is torch.float64 else OF_FORMULA
        if name == "weight":
            bound = close * (scale + (expected - old).abs().nan_to_num(0.0, 0.0).max())
        else:
            bound = 10 * close * scale
        bound = bound + eps * scale + torch.finfo(p.dtype).tiny + beside
        for each in near:
            bound = bound + 2 * (each[name].reshape(actual.shape) - expected).abs()
        if name in stepped.errors:
            bound = bound + stepped.errors[name].reshape(actual.shape)
        if name + oracle.ABSMAX in after:
            number = oracle.Bounded(expected, bound, oracle.Arithmetic.of(torch.float32))
            step = int(after["step"].item()) if "step" in after and rounds_by_step(after) else 0
            bound = oracle.as_codes(name, number, after, expected.shape, step).error
        # A number within the bound may be one that overflows.
        known = expected.isfinite() & (expected.abs() + bound < 0.9 * torch.finfo(p.dtype).max)
        off = torch.where(known, (actual - expected).abs(), 0.0)
        if name in stepped.in_norm:
            bound = torch.where(known, bound, 0.0).norm() + stepped.in_norm[name]
            if not off.norm() <= bound:
                raise oracle.WrongError(
                    f"{what}: {name} is {off.norm().item():.4g} from what is expected, in norm, "
                    f"and not within {bound.item():.4g}; its move is {(expected - old).norm():.4g}"
                )
            return
        wrong = known & ~(off <= bound)
        if wrong.any():
            first = tuple(wrong.nonzero()[0].tolist())
            raise oracle.WrongError(
                f"{what}: {name} is {actual[first].item()!r} at {first} instead of "
                f"{expected[first].item()!r} within {bound[first].item():.2g}, and so are "
                f"{int(wrong.sum())} of {wrong.numel()} elements"
            )

    def _weight(self, p: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, float, Tensor | float]:
        """The value of a weight, the epsilon it is kept with, and what it is rounded by beside."""
        value = oracle.value_of(p.detach(), state)
        way = self._way(p)
        if way is None:
            return value, torch.finfo(p.dtype).eps, 0.0
        beside: Tensor | float = 0.0
        if way == "stochastic":
            beside = torch.finfo(p.dtype).eps * value.abs()
        elif way == "kahan":
            beside = 2.0**-16 * value.abs()
        elif way == oracle.MASTER:
            oracle.check_master(value, p.detach(), "a weight")
        return value, torch.finfo(torch.float32).eps, beside

    def _way(self, p: Tensor) -> str | None:
        is_short = p.dtype in oracle.SIXTEEN_BITS
        return oracle._way_of(self.case["options"]) if is_short else None


def _bits_but_signs_of_zeros(tensor: Tensor) -> int:
    """With a weight of 1, torch.lerp gives a zero a sign that depends on strides."""
    is_number = tensor.is_floating_point() and tensor.itemsize > 1
    return run._crc(tensor + 0.0 if is_number else tensor)


def _copied(p: Tensor) -> Tensor:
    """A copy of the same strides and alignment, on which a library's products may depend."""
    memory = p.untyped_storage().clone()
    return torch.empty(0, dtype=p.dtype).set_(memory, p.storage_offset(), p.shape, p.stride())


def _ordered(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _place_of(p: Tensor, groups: list[dict[str, Any]]) -> tuple[int, int, int]:
    """The number of a weight's group, its own there, and how many there are."""
    return next(
        (index, place, len(group["params"]))
        for index, group in enumerate(groups)
        for place, each in enumerate(group["params"])
        if each is p
    )


def _sums(grad: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values of a gradient in float64, the error that sums of entries have, and its rows.

    Where a factor is applied in place it rounds each entry that is not zero.
    """
    eps = max(torch.finfo(grad.dtype).eps, 2.0**-22 if grad.dtype != torch.float64 else 0.0)
    least = torch.finfo(grad.dtype).smallest_normal * eps * (factor != 1)  # a denormal's error
    if not grad.is_sparse:
        values = grad.double() * factor
        return values, eps * values.abs() * (factor != 1) + least * (values != 0), None
    entries, at = grad._values().double() * factor, grad._indices()[0]
    rows, places = at.unique(return_inverse=True)
    sums = entries.new_zeros(len(rows), *entries.shape[1:])
    values, sizes = (sums.index_add(0, places, each) for each in (entries, entries.abs()))
    counts = torch.bincount(places, minlength=len(rows)).reshape(-1, *[1] * (values.dim() - 1))
    return values, eps * sizes * (counts - 1 + (factor != 1)) + least * counts * (sizes > 0), rows
