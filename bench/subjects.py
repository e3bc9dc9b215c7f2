"""What is stepped: weights and gradients of a shape list, and the check that a step is right."""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import Tensor
from torch.nn import Parameter

from cases import Case
from implementations import Stepper
from shapes import ShapeList

#: Steps by which an implementation is checked.
CHECKED_STEPS = 3

#: Elements that the reference works out at most, unless one tensor has more.
CHECKED_ELEMENTS = 1 << 20

#: torch's norm of floats, and with it the trust ratio of an unfused step, loses digits as the
#: tensor grows: less than one epsilon for so many elements (5e-3 in all at 64 M elements).
NORM_ELEMENTS = 1024

_NOISE = torch.randn((1 << 20) + 4096, generator=torch.Generator().manual_seed(0))


def make(shape_list: ShapeList, dtype: torch.dtype, device: str = "cpu") -> list[Parameter]:
    """Weights of a shape list with gradients, the same every time."""
    params = []
    with torch.device(device):
        for index, shape in enumerate(shape_list.shapes):
            params.append(Parameter(_fill_weight(_empty(shape, shape_list.layout, dtype), index)))
            of_grad = "channels-last" if shape_list.layout == "channels-last" else "contiguous"
            params[-1].grad = _fill_gradient(_empty(shape, of_grad, dtype), index, step=1)
    return params


def _empty(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> Tensor:
    if layout == "transposed":
        return torch.empty(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape))))
    if layout == "sliced":
        return torch.empty((*shape[:-1], 2 * shape[-1]), dtype=dtype)[..., ::2]
    if layout == "channels-last" and len(shape) == 4:
        return torch.empty(shape, dtype=dtype, memory_format=torch.channels_last)
    return torch.empty(shape, dtype=dtype)


@functools.cache
def _noise(device: torch.device) -> Tensor:
    return _NOISE.to(device)


def _fill_weight(tensor: Tensor, index: int) -> Tensor:
    return _fill(tensor, index)


def _fill_gradient(tensor: Tensor, index: int, step: int) -> Tensor:
    return _fill(tensor, index + 1000 * step)


class Gradients:
    """Those of weights, in place; other numbers each time that they are made anew."""

    def __init__(self, params: list[Parameter]) -> None:
        self._params, self._steps = params, itertools.count(CHECKED_STEPS + 1)

    def renew(self) -> None:
        step = next(self._steps)
        for index, param in enumerate(self._params):
            _fill_gradient(param.grad, index, step)


def _fill(tensor: Tensor, seed: int) -> Tensor:
    """Normal values, other ones for another seed, in the order of the tensor's elements."""
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.new_empty(tensor.numel())
    noise = _noise(tensor.device)[seed * 61 % 4096 :][: 1 << 20]
    for part in flat.split(len(noise)):
        part.copy_(noise[: len(part)])
    return tensor if tensor.is_contiguous() else tensor.copy_(flat.view(tensor.shape))


class Check:
    """Compares an implementation's first steps with the row's reference in double precision.

    A sample of a shape list's tensors is compared: no tensor's update depends on another. A weight
    may be off by `slack` of the largest move besides.
    """

    def __init__(
        self, case: Case, shape_list: ShapeList, dtype: torch.dtype, slack: float = 0.0
    ) -> None:
        self._sample = _sample(shape_list)
        self._expected: list[Tensor] = []
        self._bounds: list[Tensor] = []
        epsilon = torch.finfo(dtype).eps
        for index in self._sample:
            shape = shape_list.shapes[index]
            weight = _fill_weight(torch.empty(shape, dtype=dtype), index).double()
            state: dict[str, Tensor] = {}
            moved = 0.0
            for step in range(1, CHECKED_STEPS + 1):
                grad = _fill_gradient(torch.empty(shape, dtype=dtype), index, step).double()
                before = weight
                weight, state = case.reference(before, grad, state, step, **case.options)
                moved = max(moved, (weight - before).abs().max().item())
            self._expected.append(weight)
            relative = 32 if case.elementwise else 32 + weight.numel() / NORM_ELEMENTS
            self._bounds.append(epsilon * (8 * weight.abs() + relative * moved) + slack * moved)

    def __call__(self, stepper: Stepper, params: list[Parameter]) -> str | None:
        """Makes the first steps; returns what is wrong with them, or None."""
        for step in range(1, CHECKED_STEPS + 1):
            for index, param in enumerate(params):
                _fill_gradient(param.grad, index, step)
            stepper.step()
        for index, expected, bound in zip(self._sample, self._expected, self._bounds, strict=True):
            off = (params[index].detach().cpu().double() - expected).abs()
            if not (off <= bound).all():
                return f"tensor {index} is {off.max().item():.1e} off"
        return None


def _sample(shape_list: ShapeList) -> list[int]:
    """Indices of tensors from small to large, of a bounded number of elements in all."""
    sizes = [math.prod(shape) for shape in shape_list.shapes]
    by_size = sorted(range(len(sizes)), key=sizes.__getitem__)
    chosen = by_size[:: max(1, len(by_size) // 16)]
    while len(chosen) > 1 and sum(sizes[index] for index in chosen) > CHECKED_ELEMENTS:
        chosen.pop()
    return chosen
