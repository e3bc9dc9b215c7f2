"""Gradients that are not finite: which weight has one, and how many steps they left out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusedstep._sharding.dtensor import local
from fusedstep._state.checks import name_of
from fusedstep._step.factors import Factors
from fusedstep._step.plan import Work
from fusedstep._step.sums import SpreadWeights, in_real_numbers, of_each


class SkippedSteps:
    """A count of steps that were left out, on a device where the host does not know of them."""

    def __init__(self) -> None:
        self._here = 0
        self._there: Tensor | None = None

    def add(self, factors: Factors) -> None:
        """Takes note of a step with these factors, without waiting for a device."""
        self._here += factors.is_skipped
        if factors.found_inf is None:
            return
        if self._there is None:
            with torch.inference_mode(False):  # steps outside of it count as well
                self._there = torch.zeros_like(factors.found_inf, dtype=torch.float64)
        # In place: a captured graph counts as well.
        self._there += factors.found_inf.to(self._there.device)

    def count(self) -> int:
        return self._here + (0 if self._there is None else int(self._there.item()))


def not_finite(tensor: Tensor) -> bool:
    """Returns whether a tensor has elements that are NaN or infinite."""
    total = tensor.sum(dtype=torch.float64 if tensor.dtype is torch.float64 else torch.float32)
    return not (math.isfinite(total.item()) or bool(tensor.isfinite().all()))


def check_norm(
    factors: Factors, work: list[Work], spread: SpreadWeights, groups: list[dict[str, Any]]
) -> None:
    """Raises if the norm of a step's gradients is not finite; waits for a device that has it.

    Of weights that are spread over processes all of these raise the same.
    """
    norm = float(factors.norm)
    if math.isfinite(norm):
        return
    bad = _with_bad_gradients(work, spread)
    names = (
        name_of(group, index, place)
        for index, group in enumerate(groups)
        for place, weight in enumerate(group["params"])
        if id(weight) in bad
    )
    name = next(names, None)
    what = f"the gradient of {name} is not finite, and " if name else ""
    raise RuntimeError(
        f"{what}the norm of all gradients is {norm}: no weight or state has been changed. With "
        "error_if_nonfinite=False the step is taken all the same"
    )


def _with_bad_gradients(work: list[Work], spread: SpreadWeights) -> set[int]:
    """The weights whose gradient is not finite, by id(): in any process that has a part."""
    weights, flags = [], []
    for weight, grad in (pair for item in work for pair in item.pairs()):
        values = local(grad.coalesce().values() if grad.is_sparse else grad)
        weights.append(weight)
        flags.append([float(not_finite(in_real_numbers(values)))])
    found = spread.sums_of_rows(of_each(1, everywhere=True), weights, flags)
    return {id(weight) for weight, (is_bad,) in zip(weights, found, strict=True) if is_bad}
