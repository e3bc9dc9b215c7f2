"""Weights and gradients that are stepped, and the check that a step is right."""

from __future__ import annotations

import itertools
import math
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from suites.rows import BAGS, Row
from suites.shapes import ShapeList
from support.cases import Case

#: Steps by which an implementation is checked.
CHECKED_STEPS = 3

#: Elements that the reference computes at most, unless one tensor has more.
CHECKED_ELEMENTS = 1 << 20

#: torch's norm of floats, and with it the trust ratio of an unfused step, loses digits as the
#: tensor grows: less than one epsilon for so many elements (5e-3 in all at 64 M elements).
NORM_ELEMENTS = 1024

#: The share of the elements that a step may turn the other way where the update jumps.
FEW = 1e-3

#: Rows of a table that a batch touches, and batches that follow one another, each with rows of its
#: own: a training does not find them in the cache.
TOUCHED, BATCHES = 4096, 16

#: Items of each bag of BAGS, of which there are TOUCHED. A few items are in many.
ITEMS = 20

#: The slack of a check where hundreds of items add to a row's gradient in another order.
SUMMED = 1e-3

#: The norm that clipped gradients are scaled to, in every step.
MAX_NORM = 0.5

_NOISE = torch.randn((1 << 20) + 4096, generator=torch.Generator().manual_seed(0))


def make(shape_list: ShapeList, dtype: torch.dtype, device: str = "cpu") -> list[Parameter]:
    """Weights of a shape list with gradients, the same every time."""
    params = []
    with torch.device(device):
        for index, shape in enumerate(shape_list.shapes):
            params.append(Parameter(_fill(_empty(shape, shape_list.layout, dtype), index)))
            of_grad = "channels-last" if shape_list.layout == "channels-last" else "contiguous"
            params[-1].grad = _fill(_empty(shape, of_grad, dtype), index, step=1)
    return params


def _empty(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Tensor:
    if layout == "transposed":
        return torch.empty(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape))))
    if layout == "sliced":
        return torch.empty((*shape[:-1], 2 * shape[-1]), dtype=dtype)[..., ::2]
    if layout == "channels-last" and len(shape) == 4:
        return torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)
    return torch.empty(shape, dtype=dtype)


@cache
def _noise(device: torch.device) -> Tensor:
    return _NOISE.to(device)


def _fill(tensor: Tensor, index: int, step: int = 0) -> Tensor:
    """Normal values in the order of the elements, other ones for another tensor or step."""
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.new_empty(tensor.numel())
    noise = _noise(tensor.device)[(index + 1000 * step) * 61 % 4096 :][: 1 << 20]
    for part in flat.split(len(noise)):
        part.copy_(noise[: len(part)])
    return tensor if tensor.is_contiguous() else tensor.copy_(flat.view(tensor.shape))


# ---- Gradients of the steps that are timed -------------------------------------------------------


class Gradients:
    """Gradients in place, with other numbers each time that they are renewed."""

    def __init__(self, params: list[Parameter]) -> None:
        self._params, self._steps = params, itertools.count(CHECKED_STEPS + 1)

    def before(self) -> None:
        """Before each step, not timed."""

    def renew(self) -> None:
        step = next(self._steps)
        for index, param in enumerate(self._params):
            _fill(param.grad, index, step)


class Restored(Gradients):
    """Gradients that a step uses up, restored before the next one."""

    def __init__(self, params: list[Parameter]) -> None:
        super().__init__(params)
        self._saved = [param.grad.clone() for param in params]

    def before(self) -> None:
        torch._foreach_copy_([param.grad for param in self._params], self._saved)

    def renew(self) -> None:
        super().renew()
        torch._foreach_copy_(self._saved, [param.grad for param in self._params])


class Batches(Gradients):
    """Sparse gradients of one table, batch after batch, and what they are taken by."""

    def __init__(self, stepper: Any, params: list[Parameter], gradient: str) -> None:
        super().__init__(params)
        (table,) = params
        self._stepper = stepper
        shape = tuple(table.shape)
        grads = [batch(gradient, seed, shape).to(table.device) for seed in range(BATCHES)]
        self._grads = itertools.cycle(grads)

    def before(self) -> None:
        self._stepper.take(next(self._grads))

    def renew(self) -> None:
        """Each step has another batch already."""


def batch(gradient: str, seed: int, shape: tuple[int, int]) -> Tensor:
    """A gradient as an embedding makes it: one entry or two for each row, in disorder."""
    generator = torch.Generator().manual_seed(seed)
    if gradient == BAGS:
        items = (shape[0] * torch.rand(TOUCHED * ITEMS, generator=generator) ** 4).long()
        # All have one sign: a sum of hundreds that cancel has no digit that all orders agree on.
        of_bags = torch.rand(TOUCHED, shape[1], generator=generator)
        values = of_bags.repeat_interleave(ITEMS, dim=0)
        return torch.sparse_coo_tensor(items[None], values, shape, check_invariants=False)
    times = 2 if gradient == "each-row-twice" else 1
    touched = torch.randperm(shape[0], generator=generator)[:TOUCHED].repeat(times)
    touched = touched[torch.randperm(len(touched), generator=generator)]
    values = torch.randn(len(touched), shape[1], generator=generator)
    found = torch.sparse_coo_tensor(touched[None], values, shape, check_invariants=False)
    return found.coalesce() if gradient == "coalesced" else found


def bags_of(batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The items of all bags, where each bag begins, and the gradients of what was looked up."""
    items = batch._indices()[0]
    begins = torch.arange(0, len(items), ITEMS, device=items.device)
    return items, begins, batch._values()[::ITEMS].contiguous()


# ---- The check -----------------------------------------------------------------------------------


class Check:
    """Compares an implementation's first steps with a case's reference in double precision.

    A sample of a shape list's tensors is compared: no tensor's update depends on another, except by
    the norm that gradients are clipped to. A weight may be off by `slack` of the largest move
    besides.
    """

    def __init__(
        self,
        case: Case,
        shape_list: ShapeList,
        dtype: torch.dtype,
        slack: float = 0.0,
        max_norm: float = math.inf,
    ) -> None:
        self._sample = _sample(shape_list)
        self._compared: list[Compared] = []
        factors = _clipping(shape_list, dtype, max_norm)
        for index in self._sample:
            values = partial(_values, shape_list.shapes[index], dtype, index)
            grads = [values(step).double() * factor for step, factor in enumerate(factors, 1)]
            self._compared.append(Compared(case, values(), grads, slack))

    def __call__(self, stepper: Any, params: list[Parameter]) -> str | None:
        """Takes the first steps; returns what is wrong with them, or None."""
        for step in range(1, CHECKED_STEPS + 1):
            for index, param in enumerate(params):
                _fill(param.grad, index, step)
            stepper.step()
        for index, compared in zip(self._sample, self._compared, strict=True):
            if wrong := compared.wrong(params[index]):
                return f"tensor {index} is {wrong} off"
        return None


class SparseCheck:
    """The same for sparse gradients of a table: by the rows that they touch, and no other moves."""

    def __init__(self, row: Row) -> None:
        (shape,) = row.shape_list.shapes
        self._batches = [batch(row.gradient, seed, shape) for seed in range(CHECKED_STEPS)]
        self._touched = torch.cat([b._indices()[0] for b in self._batches]).unique()
        self._start = _values(shape, torch.float32, 0)
        grads = []
        for each in self._batches:
            grads.append(torch.zeros(len(self._touched), shape[1], dtype=torch.double))
            places = torch.searchsorted(self._touched, each._indices()[0])
            grads[-1].index_add_(0, places, each._values().double())
        slack = SUMMED if row.gradient == BAGS else 0.0
        self._compared = Compared(row.case, self._start[self._touched], grads, slack)

    def __call__(self, stepper: Any, params: list[Parameter]) -> str | None:
        (table,) = params
        is_dense = table.grad is not None and not table.grad.is_sparse
        for each in self._batches:
            grad = each.to(table.device)
            stepper.take(grad.to_dense() if is_dense else grad)
            stepper.step()
        moved = (table.detach().cpu() != self._start).any(dim=1).nonzero()[:, 0]
        if strangers := (~torch.isin(moved, self._touched)).sum().item():
            return f"{strangers} rows without a gradient have moved"
        wrong = self._compared.wrong(table.detach().cpu()[self._touched])
        return wrong and f"the table is {wrong} off"


class Compared:
    """The reference's weight after some gradients, and how far another may be off."""

    def __init__(self, case: Case, weight: Tensor, grads: list[Tensor], slack: float) -> None:
        epsilon = torch.finfo(weight.dtype).eps
        weight, moved = weight.double(), 0.0
        state: dict[str, Tensor] = {}
        for step, grad in enumerate(grads, 1):
            before = weight
            weight, state = case.reference(before, grad, state, step, **case.options)
            moved = max(moved, (weight - before).abs().max().item())
        relative = 32 if case.elementwise else 32 + weight.numel() / NORM_ELEMENTS
        self._expected = weight
        self._bound = epsilon * (8 * weight.abs() + relative * moved) + slack * moved
        #: If the update jumps, a few elements may be off by another sign in each step.
        self._few = 0 if case.continuous else FEW * len(grads) * weight.numel()
        self._far = self._bound + (0 if case.continuous else 2 * moved * len(grads))

    def wrong(self, weight: Tensor) -> str | None:
        off = (weight.detach().cpu().double() - self._expected).abs()
        is_right = (off <= self._far).all() and (~(off <= self._bound)).sum() <= self._few
        return None if is_right else f"{off.max().item():.1e}"


def _values(shape: tuple[int, ...], dtype: torch.dtype, index: int, step: int = 0) -> Tensor:
    return _fill(torch.empty(shape, dtype=dtype), index, step)


def _clipping(shape_list: ShapeList, dtype: torch.dtype, max_norm: float) -> list[float]:
    """The factors of the steps' gradients, by the norm of all together."""
    if max_norm == math.inf:
        return [1.0] * CHECKED_STEPS
    factors = []
    for step in range(1, CHECKED_STEPS + 1):
        grads = (_values(shape, dtype, i, step) for i, shape in enumerate(shape_list.shapes))
        norm = math.sqrt(sum(grad.double().square().sum().item() for grad in grads))
        factors.append(min(1.0, max_norm / (norm + 1e-6)))
    return factors


def _sample(shape_list: ShapeList) -> list[int]:
    """Indices of tensors from small to large, of a bounded number of elements in all."""
    sizes = [math.prod(shape) for shape in shape_list.shapes]
    by_size = sorted(range(len(sizes)), key=sizes.__getitem__)
    chosen = by_size[:: max(1, len(by_size) // 16)]
    while len(chosen) > 1 and sum(sizes[index] for index in chosen) > CHECKED_ELEMENTS:
        chosen.pop()
    return chosen
