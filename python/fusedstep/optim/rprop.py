from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.optim.rprop import rprop

from fusedstep._api.base import FusedOptimizer
from fusedstep._api.functional import by_torch
from fusedstep._options.kinds import NumberTuple, Options
from fusedstep._options.shared import CAPTURABLE, OF_TORCH
from fusedstep._sharding.dtensor import is_dtensor, local
from fusedstep._state.kinds import COUNT, State, States

__all__ = ["Rprop"]


def _of_pair(option: str, place: int) -> Callable[[dict[str, Any]], float]:
    """Returns a function that takes one number of a group's option, which has two."""

    def number(group: dict[str, Any]) -> float:
        first, second = map(float, group[option])
        return second if place else first

    return number


class Rprop(FusedOptimizer):
    r"""Implements the Rprop algorithm, in signature and states :class:`torch.optim.Rprop`.

    For an element ``w`` with gradient ``g``, at each step::

        s = sign(g * prev)
        d = d * (etas[1] if s > 0 else etas[0] if s < 0 else 1)
        d = clamp(d, *step_sizes)
        prev = g = 0 if s < 0 else g
        w = w - d * sign(g)     # d is lr at first

    The states are ``prev`` and ``step_size`` (d), which starts at ``lr``; later changes of ``lr``
    have no effect. This is `A Direct Adaptive Method for Faster Backpropagation Learning: The RPROP
    Algorithm`_, for gradients of the whole training set.

    Args:
        lr (float, Tensor, optional): the step size of each element at first (default: 1e-2)
        etas (tuple[float, float], optional): factors of a step size where the sign of the gradient
            changes, and where it stays (default: (0.5, 1.2))
        step_sizes (tuple[float, float], optional): smallest and largest step size
            (default: (1e-6, 50))

    .. _A Direct Adaptive Method for Faster Backpropagation Learning\: The RPROP Algorithm:
        https://doi.org/10.1109/ICNN.1993.298623
    """

    _rule = "rprop"
    _rule_values: ClassVar[dict[str, Any]] = {
        "etaminus": _of_pair("etas", 0),
        "etaplus": _of_pair("etas", 1),
        "step_size_min": _of_pair("step_sizes", 0),
        "step_size_max": _of_pair("step_sizes", 1),
    }
    _state_kinds: ClassVar[States] = {"prev": State(), "step_size": State(start="lr"), **COUNT}
    _learns_in_int4 = True
    _allocates_first = True
    _torch_fuses = False
    _option_kinds: ClassVar[Options] = {
        **OF_TORCH,
        **CAPTURABLE,
        "etas": NumberTuple(),
        "step_sizes": NumberTuple(),
    }
    _by_torch = by_torch(rprop, "prev", "step_size", "step")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        etas: tuple[float, float] = (0.5, 1.2),
        step_sizes: tuple[float, float] = (1e-6, 50),
        *,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | str | None = None,
        master_weights: bool | str = False,
        rounding: str | None = None,
        seed: int = 0,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(params, locals())

    def _check(self, options: dict[str, Any]) -> None:
        super()._check(options)
        shrinks, grows = options["etas"]
        if not 0.0 < shrinks < 1.0 < grows:
            raise ValueError(f"Invalid eta values: {shrinks}, {grows}")

    def _formula(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        given = weight, grad, state
        if not group["differentiable"]:
            given = _shards(*given)
        self._by_torch(self._rule_options(group), *given)
        return weight

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        weight, grad, state = _shards(weight, grad, state)
        prev, step_size, step = state["prev"], state["step_size"], state["step"].item() + 1
        (shrinks, grows), (smallest, largest) = group["etas"], group["step_sizes"]
        sign = grad.mul(prev).sign()
        sign[sign.gt(0)] = grows
        sign[sign.lt(0)] = shrinks
        sign[sign.eq(0)] = 1
        grad = grad.clone(memory_format=torch.preserve_format)
        grad[sign.eq(shrinks)] = 0
        direction = grad.sign()

        state["step"].fill_(step)  # nothing is allocated from here on
        step_size.mul_(sign).clamp_(float(smallest), float(largest))
        weight.addcmul_(direction, step_size, value=-1)
        prev.copy_(grad)


def _shards(
    weight: Tensor, grad: Tensor, state: dict[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The shards of DTensors: elements chosen by a mask are written, which DTensors don't know."""
    if not is_dtensor(weight):
        return weight, grad, state
    return local(weight), local(grad), {name: local(value) for name, value in state.items()}
