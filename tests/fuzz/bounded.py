"""Numbers in float64 with a bound for the error that maths in a narrower type may have made.

A formula that is written for tensors runs over these, and gives a bound for each element: whatever
the order of its operations, and whether products and sums are rounded together or one by one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class UndecidableError(Exception):
    """A comparison that the error may turn round."""


class Arithmetic(NamedTuple):
    unit: float
    """The error of an operation, relative to its result: two roundings to nearest."""
    tiny: float
    """Its absolute error where the result is denormal."""
    norm: float
    """The relative error of a norm."""

    @staticmethod
    def of(dtype: torch.dtype) -> Arithmetic:
        """Arithmetic of a step whose weights have this dtype."""
        if dtype != torch.float64:
            info = torch.finfo(torch.float32)
            return Arithmetic(info.eps, info.smallest_normal * info.eps, 8 * info.eps)
        # The oracle's own roundings are as large. Where squares are equal, all roundings of a sum
        # may go to one side.
        info = torch.finfo(torch.float64)
        return Arithmetic(2 * info.eps, info.smallest_normal * info.eps, 64 * info.eps)


class Bounded:
    """A tensor, a bound for the error of each element, and the arithmetic that makes errors."""

    def __init__(
        self, value: Tensor, error: Tensor | float, arithmetic: Arithmetic, is_state: bool = False
    ):
        self.value = value
        self.error = torch.as_tensor(error, dtype=torch.float64).expand_as(value)
        self.arithmetic = arithmetic
        self._is_state = is_state

    def _result(self, value: Tensor, error: Tensor, underflows: Tensor | bool = False) -> Bounded:
        unit, tiny, _ = self.arithmetic
        return Bounded(value, error + unit * value.abs() + tiny * underflows, self.arithmetic)

    def _number(self, number: float) -> Bounded:
        """A number of the formula, which is rounded to the type of the maths first."""
        value = torch.tensor(float(number), dtype=torch.float64)
        return Bounded(value, self.arithmetic.unit / 2 * value.abs(), self.arithmetic)

    def _operand(self, other: Bounded | Tensor | float) -> Bounded:
        if isinstance(other, Tensor):
            return Bounded(other.double(), 0.0, self.arithmetic)
        return other if isinstance(other, Bounded) else self._number(other)

    def __getitem__(self, index: Any) -> Bounded:
        return Bounded(self.value[index], self.error[index], self.arithmetic)

    def __setitem__(self, index: Any, elements: Bounded) -> None:
        self.value[index], self.error[index] = elements.value, elements.error

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    def clone(self) -> Bounded:
        return Bounded(self.value.clone(), self.error.clone(), self.arithmetic)

    def reshape(self, *shape: int) -> Bounded:
        return Bounded(self.value.reshape(shape), self.error.reshape(shape), self.arithmetic)

    def __add__(self, other: Bounded | float) -> Bounded:
        other = self._operand(other)
        return self._result(self.value + other.value, self.error + other.error)

    def __neg__(self) -> Bounded:
        return Bounded(-self.value, self.error, self.arithmetic)

    def __sub__(self, other: Bounded | float) -> Bounded:
        return self + -self._operand(other)

    def __rsub__(self, other: Tensor | float) -> Bounded:
        return -self + other

    def __mul__(self, other: Bounded | float) -> Bounded:
        factor = self._operand(other)
        error = self.value.abs() * factor.error + (factor.value.abs() + factor.error) * self.error
        if self._is_state and not isinstance(other, Bounded):
            # beta m + (1 - beta) g may be computed as m + (1 - beta) (g - m).
            error = error + self.arithmetic.unit * self.value.abs() * abs(1 - other)
        underflows = (self.value != 0) & (factor.value != 0)
        return self._result(self.value * factor.value, error, underflows)

    def __truediv__(self, other: Bounded | float) -> Bounded:
        other = self._operand(other)
        nearest = (other.value.abs() - other.error).clamp(min=0)
        value = self.value / other.value
        error = (self.error + value.abs() * other.error) / nearest
        exact = (self.value == 0) & (self.error == 0) & (nearest > 0)
        return self._result(value, torch.where(exact, 0.0, error), self.value != 0)

    def __rtruediv__(self, other: Tensor | float) -> Bounded:
        return self._operand(other) / self

    def __pow__(self, exponent: float) -> Bounded:
        if exponent == 2:
            return self * self
        if exponent == 0.5:
            return self.sqrt()
        raise NotImplementedError(f"Bounded ** {exponent}: see tests/fuzz/bounded.py")

    __radd__, __rmul__ = __add__, __mul__

    def sqrt(self) -> Bounded:
        value = self.value.sqrt()
        above = (self.value + self.error).sqrt() - value
        below = value - (self.value - self.error).clamp(min=0).sqrt()
        return self._result(value, torch.maximum(above, below))

    def square(self) -> Bounded:
        return self * self

    def sum(self, *dim: int, keepdim: bool = False) -> Bounded:
        value, error, sizes = (
            each.sum(dim or None, keepdim=keepdim)
            for each in (self.value, self.error, self.value.abs())
        )
        return self._result(value, error + self.arithmetic.norm * sizes)

    def mean(self, *dim: int) -> Bounded:
        total = self.sum(*dim)
        return total / (self.value.numel() / max(total.value.numel(), 1))

    def clamp(self, min: float) -> Bounded:  # noqa: A002 – its name in torch
        value, *ends = (
            each.clamp(min=min)
            for each in (self.value, self.value - self.error, self.value + self.error)
        )
        return Bounded(value, torch.maximum(value - ends[0], ends[1] - value), self.arithmetic)

    def abs(self) -> Bounded:
        return Bounded(self.value.abs(), self.error, self.arithmetic)

    def sign(self) -> Bounded:
        """Sign of the value; 0 with an error of 1 where the error may turn it round."""
        turns = (self.value.abs() <= self.error) & (self.error > 0)
        value = torch.where(turns, 0.0, self.value.sign())
        return Bounded(value, turns.double(), self.arithmetic)

    def norm(self) -> Bounded:
        # Not vector_norm, which adds thousands of squares one to another.
        value = self.value.square().sum().sqrt()
        error = self.error.square().sum().sqrt() + self.arithmetic.norm * value
        return self._result(value, error)

    def item(self) -> Bounded:
        return self

    def _compare(self, other: Bounded | float) -> float:
        """Less than zero, zero, or more: as this number is less than the other, or more."""
        other = self._operand(other)
        return (self.value - other.value).item()

    def __lt__(self, other: Bounded | float) -> bool:
        return self._compare(other) < 0

    def __gt__(self, other: Bounded | float) -> bool:
        return self._compare(other) > 0

    def __ne__(self, other: object) -> bool:
        """Equality is what formulas branch at: it has to be certain."""
        difference, error = self._compare(other), self.error.item()
        if abs(difference) <= error and error > 0:
            raise UndecidableError
        return difference != 0

    def __eq__(self, other: object) -> bool:
        return not self != other

    __hash__ = None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function not in _FUNCTIONS:
            raise NotImplementedError(f"torch.{function.__name__}: see tests/fuzz/bounded.py")
        return _FUNCTIONS[function](*args, **(kwargs or {}))


def _full_like(like: Bounded, number: float) -> Bounded:
    constant = like._number(number)
    return Bounded(constant.value.expand_as(like.value), constant.error, like.arithmetic)


def _maximum(a: Bounded, b: Bounded) -> Bounded:
    is_sure = (a.value - b.value).abs() > a.error + b.error
    of_larger = torch.where(a.value > b.value, a.error, b.error)
    error = torch.where(is_sure, of_larger, torch.maximum(a.error, b.error))
    return Bounded(torch.maximum(a.value, b.value), error, a.arithmetic)


def _is_more(a: Bounded, b: Bounded | float) -> Bounded:
    """1 where a number is more than the other, else 0; with an error of 1 where one cannot say."""
    sign = (a - b).sign()
    return Bounded((sign.value > 0).double(), sign.error, a.arithmetic)


def _where(condition: Bounded, a: Bounded, b: Bounded) -> Bounded:
    value = torch.where(condition.value > 0, a.value, b.value)
    error = torch.where(condition.value > 0, a.error, b.error)
    either = torch.maximum(a.error, b.error) + (a.value - b.value).abs()
    return Bounded(value, torch.where(condition.error > 0, either, error), a.arithmetic)


_FUNCTIONS = {
    torch.Tensor.add: lambda a, b: b + a,
    torch.Tensor.sub: lambda a, b: -b + a,
    torch.Tensor.mul: lambda a, b: b * a,
    torch.Tensor.div: lambda a, b: b._operand(a) / b,
    torch.gt: _is_more,
    torch.lt: lambda a, b: _is_more(-a, -b),
    torch.where: _where,
    torch.minimum: lambda a, b: -_maximum(-a, -b),
    torch.zeros_like: lambda like: _full_like(like, 0.0),
    torch.full_like: _full_like,
    torch.maximum: _maximum,
    torch.sqrt: Bounded.sqrt,
}


class Verdict(NamedTuple):
    wrong: Tensor
    """Elements that no rounding explains."""
    vague: Tensor
    """Elements in which an error of 2e-5 of the value would not be seen."""
    low: Tensor
    high: Tensor


def judge(actual: Tensor, expected: Bounded) -> Verdict:
    """Compares what is stored with what a number within the bound is rounded to."""
    low, high = (
        (expected.value + sign * expected.error).to(actual.dtype).double() for sign in (-1, 1)
    )
    known = expected.value.isfinite() & expected.error.isfinite()
    stored = actual.double()
    wrong = known & ~((low <= stored) & (stored <= high))
    vague = ~known | ((expected.error > 2e-5 * expected.value.abs()) & (low != high))
    return Verdict(wrong, vague, low, high)
