"""Optimizers with groups that Muon steps, and groups that a rule of the library steps.

This has which groups these are, and Muon's step of one weight in operations of torch. Subclasses
have the other rule beside them, as their base.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fusedstep._api.base import FusedOptimizer
from fusedstep._matrix.arrangement import MOST_BYTES, last_arrangement
from fusedstep._matrix.chosen import Chosen, has_choice
from fusedstep._matrix.muon_groups import (
    beta2_of,
    check_muon_options,
    form_of,
    keeps_range,
    norm_dtype,
    ns_dtype_of,
    parts_of,
    ratio_of,
    starts_aol,
    to_divisors,
    uses_muon,
    why_no_matrix,
)
from fusedstep._matrix.muon_program import MuonProgram
from fusedstep._matrix.newton_schulz import LEAST_SUM, Scratch, coefficients_of
from fusedstep._matrix.operands import Moving
from fusedstep._sharding.dtensor import local
from fusedstep._sharding.exchange import cut_of, is_gathered, step_whole
from fusedstep._state.checks import name_of
from fusedstep._step.factors import Factors
from fusedstep._step.owner import Owner
from fusedstep._step.plan import Work
from fusedstep._step.program import Program
from fusedstep._torch_ops.imperative import MOST_COPIES, size_of


class MuonSteps(Owner):
    """Steps groups with ``use_muon`` by Muon, and all others as the next class does."""

    _queues_factors = True

    # A class's own words for its groups

    def _as_muon(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group with Muon's options: those that it has not are what the class does always."""
        return group

    def _as_other(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group without Muon, with the options of the other rule."""
        raise NotImplementedError

    #: The class that steps groups without Muon, in errors.
    _other: str

    def _ratio(self, group: dict[str, Any], shape: Sequence[int]) -> float:
        """The factor of the learning rate for a matrix: its rows, and all other dimensions."""
        return ratio_of(group, shape[0], math.prod(shape[1:]))

    def _takes_batches(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> bool:
        """Returns whether a composite group is stepped in batches, and not weight by weight."""
        return True

    def _second_step(self, group: dict[str, Any], moving: list[Moving]) -> Callable[[], None]:
        """Prepares a step that weights take when Muon has moved them, and returns what takes it.

        Nothing is written before, and nothing can fail on a CPU from then on.
        """
        return lambda: None

    # Which groups

    def _check_group(self, index: int, group: dict[str, Any]) -> None:
        check_muon_options(self._as_muon(group))
        if not uses_muon(group):
            return
        for place, weight in enumerate(group["params"]):
            if reason := why_no_matrix(self._as_muon(group), weight, self._other):
                raise ValueError(f"{name_of(group, index, place)} {reason}")

    def _checked_options(self, item: Work, factors: Factors) -> tuple[float, ...]:
        group = item.group
        has_all = len(group["params"]) == len(item.weights)
        if has_all and last_arrangement(self, group, item.weights):  # weights have been looked at
            check_muon_options(self._as_muon(group))
        else:
            self._check_group(item.number, group)
        return super()._checked_options(item, factors)

    def _rule_options(self, group: dict[str, Any]) -> dict[str, Any]:
        return super()._rule_options(self._as_other(group))

    def _is_composite(self, group: dict[str, Any]) -> bool:
        return uses_muon(group) and self._wants_native(group)

    def _products_dtype(self, group: dict[str, Any], weight: Tensor) -> torch.dtype | None:
        if not uses_muon(group):
            return None
        products = ns_dtype_of(group, weight.device)
        if group.get("ns_dtype") is None and products is torch.float16:
            products = torch.bfloat16  # updates are rounded to it before products in float16
        return max(products, weight.dtype, key=lambda dtype: torch.finfo(dtype).eps)

    def _exact_options(self, group: dict[str, Any]) -> dict[str, Any]:
        return {"ns_dtype": torch.float64} if uses_muon(group) else {}

    # The step

    @functools.cached_property
    def _scratch(self) -> Scratch:
        return Scratch()

    def _exchanges(self, group: dict[str, Any]) -> bool:
        return uses_muon(group)

    def _program(self, work: list[Work], factors: Factors) -> Program:
        return MuonProgram(self, work, factors)

    def _part_size(self, item: Work) -> int:
        """That of a batch, if the group has batches."""
        sizes = list(map(size_of, item.weights, item.grads))
        batch = min(sum(sizes), MOST_BYTES) if self._is_composite(item.group) else 0
        return MOST_COPIES * max(batch, *sizes)

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        if not uses_muon(group):
            super()._imperative(self._as_other(group), weight, grad, state)
            return
        group = self._as_muon(group)
        if is_gathered(form_of(group, weight), cut_of(weight)):
            step_whole(functools.partial(self._formula, group), weight, grad, state)
        else:
            whole = cast("FusedOptimizer", self)  # which a class mixes these steps into
            parts = {name: local(each) for name, each in state.items()}
            FusedOptimizer._imperative(whole, group, local(weight), local(grad), parts)

    def _formula(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        if not uses_muon(group):
            return super()._formula(group, weight, grad, state)
        lr, momentum = float(group["lr"]), float(group["momentum"])
        if has_choice(group):
            average = state["momentum_buffer"] + grad
            update = average.clone()  # its chosen rows decay
        else:
            average = state["momentum_buffer"].lerp(grad, 1 - momentum)
            update = grad.lerp(average, momentum) if group["nesterov"] else average
        state["momentum_buffer"] = average

        parts = parts_of(group, weight)
        orthogonal = torch.empty_like(update, memory_format=torch.contiguous_format)
        if group.get("normuon"):
            state["second_momentum_buffer"] = state["second_momentum_buffer"].clone()
        for part in parts:
            matrices = part.of(update).reshape(part.form)
            chosen = Chosen.among(group, matrices) if has_choice(group) else None
            x = _iterated(group, chosen.take(matrices) if chosen else matrices)
            if group.get("normuon"):
                kept = part.of(state["second_momentum_buffer"])
                moments = kept.reshape(*part.form[:2], 1).clone()
                own = chosen.take(moments) if chosen else moments
                _normalize_rows(x, own, beta2_of(group))
                kept.copy_((chosen.put(moments, own) if chosen else own).view(kept.shape))
            if chosen:
                chosen.put(matrices, chosen.take(matrices) * momentum)
                part.of(average).copy_(matrices.view(part.shape))
                x = chosen.put(torch.zeros_like(matrices), x)
            part.of(orthogonal).copy_(x.view(part.shape))

        decay = lr * group["weight_decay"]
        if group.get("cautious_decay"):
            decay = decay * (orthogonal * weight >= 0).to(weight.dtype)
        for part in parts:
            part.of(orthogonal).mul_(lr * self._ratio(group, part.matrix_shape))
        return weight * (1 - decay) - orthogonal


def _iterated(group: dict[str, Any], update: Tensor) -> Tensor:
    """Iterates on updates [count, rows, columns], one by one; returns their dtype."""
    orthogonal = torch.empty_like(update, memory_format=torch.contiguous_format)
    steps = coefficients_of(group["ns_coefficients"], group["ns_steps"])
    is_tall = update.shape[1] > update.shape[2]
    with torch._C._DisableAutocast():  # it would round the products
        narrow = ns_dtype_of(group, update.device)
        for place, matrix in enumerate(update):
            x = matrix.to(narrow) if keeps_range(narrow) else matrix
            x = x.T if is_tall else x
            x = (x / to_divisors(group, x.norm(dtype=norm_dtype(x)))).to(narrow)
            if starts_aol(group):
                x = _almost_orthogonal(x)
            for a, b, c in steps:
                gram = x @ x.T
                x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
            orthogonal[place].copy_(x.T if is_tall else x)
    return orthogonal


def _almost_orthogonal(x: Tensor) -> Tensor:
    """The rows of a wide matrix of norm 1, scaled as the AOL start scales them."""
    side = len(x)
    gram = torch.mm(x * side, x.T).abs()  # in the range of float16
    sums = gram.sum(1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    return (x * (side / sums.clamp(min=LEAST_SUM)).sqrt()).to(x.dtype)


def _normalize_rows(x: Tensor, moments: Tensor, beta2: float) -> None:
    """Gives the rows of matrices [count, rows, columns] one size, as NorMuon does, in place.

    ``moments`` [count, rows, 1], running averages of the mean squares of rows, are taken forward.
    """
    mean = torch.mean if x.numel() else torch.sum  # none without elements
    means = mean(x.square(), -1, keepdim=True)
    averages = moments.lerp(means, 1 - beta2)
    moments.copy_(averages)
    norm = x.norm(dim=(1, 2), keepdim=True)
    x /= averages.sqrt() + 1e-10
    x *= norm / (x.norm(dim=(1, 2), keepdim=True) + 1e-10)
