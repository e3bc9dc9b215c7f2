"""Factors of a step's gradients: a GradScaler's scale, and the one that clips their norm."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Factors(NamedTuple):
    """Numbers where the host knows them, otherwise 0-dimensional float64 tensors on a device."""

    grad: float | Tensor = 1.0
    """The factor of ``.grad``."""
    clip: float | Tensor = 1.0
    """Another factor, of the gradients of the step alone."""
    norm: float | Tensor = math.inf
    """The 2-norm of ``.grad`` times the scale, if it was asked for."""
    found_inf: Tensor | None = None
    """Not zero if the step is to be skipped: on the device, where the host does not know."""
    is_skipped: bool = False
    """True if the host knows that the step is to be skipped."""

    @property
    def on_device(self) -> Tensor | None:
        """The product, where it is not known to the host."""
        if is_one(self.clip):  # an operation on a device takes the host microseconds
            product = self.grad
        else:
            product = self.clip if is_one(self.grad) else self.grad * self.clip
        return product if isinstance(product, Tensor) else None

    @property
    def on_host(self) -> float:
        """The product, or one where it is on a device."""
        if isinstance(self.grad, Tensor) or isinstance(self.clip, Tensor):
            return 1.0
        return self.grad * self.clip

    def waited(self) -> Factors:
        """The same factors on the host; waits for a device that has one of them."""
        return self._replace(grad=float(self.grad), clip=float(self.clip))

    @property
    def of_others(self) -> float | Tensor:
        """Returns the factor of those gradients that the step does not multiply."""
        if self.found_inf is None or is_one(self.grad):
            return self.grad
        return torch.where(self.found_inf != 0, 1.0, self.grad)


#: The factors of a step without a scaler and a norm, which is most steps.
PLAIN = Factors()


def is_one(factor: float | Tensor) -> bool:
    """Returns whether a factor is known to be one."""
    return not isinstance(factor, Tensor) and factor == 1
