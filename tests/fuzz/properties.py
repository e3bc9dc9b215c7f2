"""Steps through the cases of `composites`: against a formula, and by properties of a step.

Each step is taken from the operands as they are stored before it. The bound of a formula's result
is relative to the largest move of the weight, beside what rounded sums of entries may change.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from fuzz import choices, composites, oracle, run

OF_FORMULA = 1e-4
"""Largest distance from a formula, in the largest move of an element and in the element."""


def check(case: run.Case, tally: oracle.Tally) -> None:
    """Raises `run.CaseError` unless a case of either kind gives what it should."""
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
        weights = {p: p.detach().clone() for p in grads}
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
            group = next(g for g in self.optimizer.param_groups if _has(g["params"], p))
            self._check_formula(group, weights[p], grads[p], states[p], factor, p, what)
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
        for name, value in mine.items():
            if isinstance(value, Tensor) and (
                (value.dtype, value.shape) != (theirs[name].dtype, theirs[name].shape)
                or run._crc(value) != run._crc(theirs[name])
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
        group: dict[str, Any],
        weight: Tensor,
        grad: Tensor,
        state: dict[str, Tensor],
        factor: float,
        p: Tensor,
        what: str,
    ) -> None:
        if p.numel() == 0:
            return
        defaults = choices.options_of(self.row)
        names = {
            name: oracle.number(value)
            for name, value in (defaults | self.case["options"] | group).items()
            if name not in oracle.NOT_IN_FORMULAS
        }
        step = float(state["step"]) + 1.0 if "step" in state else 1.0
        state = {name: value.double() for name, value in state.items() if name != "step"}
        values, error, rows = _sums(grad, factor)
        function = _FORMULAS[self.case["row"]]
        found = [
            function(self.row.formula, names, weight.double(), values + sign * error, rows,
                     state, step, p.dtype, self.optimizer.state[p])
            for sign in (0, 1, -1, values.sign(), -values.sign())
        ]  # fmt: skip
        new_state = self.optimizer.state[p]
        if new_state["step"].item() != step:
            raise oracle.WrongError(f"{what}: the step count is {new_state['step'].item()}")
        for name, expected in found[0].items():
            near = [each[name] for each in found[1:]]
            actual = p.detach() if name == "weight" else new_state[name]
            old = weight if name == "weight" else state.get(name)
            self._compare(name, actual, expected, near, old, p.dtype, what)

    def _compare(
        self,
        name: str,
        actual: Tensor,
        expected: Tensor,
        near: list[Tensor],
        old: Tensor | None,
        dtype: torch.dtype,
        what: str,
    ) -> None:
        expected, near = expected.reshape(actual.shape), [e.reshape(actual.shape) for e in near]
        old = torch.zeros_like(expected) if old is None else old.double()
        scale = expected.abs() + old.abs()
        if name == "weight":
            scale = scale + (expected - old).abs().nan_to_num(0.0, 0.0).max()
        close = 1e-11 if dtype is torch.float64 else OF_FORMULA
        info = torch.finfo(actual.dtype)
        bound = close * scale if name == "weight" else 10 * close * scale
        bound = bound + info.eps * scale + info.tiny
        bound = bound + 2 * sum((each - expected).abs() for each in near)
        known = expected.isfinite() & bound.isfinite() & (expected.abs() < 0.9 * info.max)
        wrong = known & ~((actual.double() - expected).abs() <= bound)
        if wrong.any():
            first = tuple(wrong.nonzero()[0].tolist())
            raise oracle.WrongError(
                f"{what}: {name} is {actual[first].item()!r} at {first} instead of "
                f"{expected[first].item()!r} within {bound[first].item():.2g}, and so are "
                f"{int(wrong.sum())} of {wrong.numel()} elements"
            )


def _ordered(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _has(params: list[Tensor], p: Tensor) -> bool:
    return any(each is p for each in params)


def _sums(grad: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values of a gradient in float64, the error that sums of entries have, and its rows.

    Where a factor is applied in place it rounds each entry.
    """
    eps = max(torch.finfo(grad.dtype).eps, 2.0**-22 if grad.dtype != torch.float64 else 0.0)
    least = torch.finfo(grad.dtype).smallest_normal * eps * (factor != 1)  # a denormal's error
    if not grad.is_sparse:
        values = grad.double() * factor
        return values, eps * values.abs() * (factor != 1) + least, None
    entries, at = grad._values().double() * factor, grad._indices()[0]
    rows, places = at.unique(return_inverse=True)
    sums = entries.new_zeros(len(rows), *entries.shape[1:])
    values, sizes = (sums.index_add(0, places, each) for each in (entries, entries.abs()))
    counts = torch.bincount(places, minlength=len(rows)).reshape(-1, *[1] * (values.dim() - 1))
    return values, eps * sizes * (counts - 1 + (factor != 1)) + least * counts, rows


def _rowwise(formula, group, weight, grad, rows, state, step, dtype, named):
    shape = (len(weight), *[1] * (weight.dim() - 1)) if weight.dim() else ()
    first = torch.full(shape, float(group["initial_accumulator_value"]), dtype=torch.float64)
    total = state.get("sum", first).reshape(-1, 1).clone()
    new = weight.reshape(len(total), -1).clone()
    rows = torch.arange(len(total)) if rows is None else rows
    options = {k: group[k] for k in (
        "lr", "lr_decay", "weight_decay", "eps", "decoupled_weight_decay", "maximize")}  # fmt: skip
    grad = grad.reshape(len(rows), new.shape[1])
    new[rows], total[rows] = formula(new[rows], grad, total[rows], step, **options)
    return {"weight": new.reshape(weight.shape), "sum": total}


def _sparse_adam(formula, group, weight, grad, rows, state, step, dtype, named):
    names = ("exp_avg", "exp_avg_sq")
    moments = {k: state[k].clone() if k in state else torch.zeros_like(weight) for k in names}
    options = {k: group[k] for k in ("lr", "betas", "eps", "weight_decay", "maximize")}
    return {"weight": formula(weight, rows, grad, moments, step, **options)} | moments


def _adafactor(formula, group, weight, grad, rows, state, step, dtype, named):
    torchs = "row_var" in named or "variance" in named
    row, column = ("row_var", "col_var") if torchs else ("exp_avg_sq_row", "exp_avg_sq_col")
    if weight.dim() < 2:
        column = "variance" if torchs else "exp_avg_sq"
    names = {"row": row, "column": column, "moment": "exp_avg"}
    own = {key: state[name] for key, name in names.items() if name in state}
    if torchs and weight.dim() >= 2 and "row" in own:
        own |= {"row": own["row"].squeeze(-1), "column": own["column"].squeeze(-2)}
    eps1, eps2 = group["eps"]
    if eps1 is None:
        eps1 = torch.finfo(dtype).eps if torchs else 1e-30
    new, states = formula(
        weight, grad, own, step, torchs=torchs, lr=group["lr"], decay=group["beta2_decay"],
        eps1=eps1, eps2=eps2, d=group["d"], weight_decay=group["weight_decay"],
        beta1=group["beta1"], scale=group["scale_parameter"] is not False,
        relative=group["relative_step"] is not False,
        warmup=bool(group["warmup_init"]), maximize=group["maximize"],
    )  # fmt: skip
    return {"weight": new} | {names[key]: value for key, value in states.items()}


_FORMULAS = {"rowwise_adagrad": _rowwise, "sparse_adam": _sparse_adam, "adafactor": _adafactor}
