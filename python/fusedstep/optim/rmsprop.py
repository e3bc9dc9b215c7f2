from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.optim.rmsprop import rmsprop

from fusedstep._api.base import FusedOptimizer
from fusedstep._api.functional import by_torch
from fusedstep._options.kinds import Flag, Number, Options
from fusedstep._options.shared import CAPTURABLE, EPSILON, OF_TORCH
from fusedstep._state.kinds import COUNT, State, States
from fusedstep._step.undo import numbers_first

__all__ = ["RMSprop"]


class RMSprop(FusedOptimizer):
    """Implements the RMSprop algorithm, in signature and states :class:`torch.optim.RMSprop`.

    For a weight ``w`` with gradient ``g``::

        g = g + weight_decay * w
        v = alpha * v + (1 - alpha) * g**2
        a = alpha * a + (1 - alpha) * g         # if centered; else 0
        b = momentum * b + g / (sqrt(v - a**2) + eps)
        w = w - lr * b

    Where ``alpha`` is 0 the averages keep nothing, and the variance ``v - a**2`` is 0.

    This is RMSprop of `lecture 6e`_, with the centered form of `Generating Sequences With Recurrent
    Neural Networks`_.

    Args:
        lr (float, Tensor, optional): learning rate (default: 1e-2)
        alpha (float, optional): coefficient of the running averages of the gradient and
            its square (default: 0.99)
        eps (float, optional): term added to the denominator (default: 1e-8)
        weight_decay (float, optional): weight decay (L2 penalty) (default: 0)
        momentum (float, optional): momentum factor (default: 0)
        centered (bool, optional): divide by an estimate of the gradient's standard
            deviation instead of its root mean square; warns once if states are in codes,
            with which weights move too far (default: False)

    Example::

        >>> optimizer = optim.RMSprop(model.parameters(), lr=1e-2, momentum=0.9)

    .. _lecture 6e:
        https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf
    .. _Generating Sequences With Recurrent Neural Networks:
        https://arxiv.org/abs/1308.0850
    """

    _rule = "rmsprop"
    _state_kinds: ClassVar[States] = {
        "square_avg": State(),
        "momentum_buffer": State(needs=lambda group: group["momentum"] > 0),
        "grad_avg": State(needs="centered"),
        **COUNT,
    }
    _learns_in_int4 = True
    _allocates_first = True
    _torch_fuses = False
    _option_kinds: ClassVar[Options] = {
        **OF_TORCH,
        **CAPTURABLE,
        "alpha": Number(usual=1),
        "eps": EPSILON,
        "weight_decay": Number(),
        "momentum": Number(before=0),
        "centered": Flag(
            before=False,
            against_codes="centered=True and states in codes moves weights too far: it divides by "
            "the root of a difference of two states, which is zero where their codes are nearly "
            "equal. Use float32 states (docs/small_states.md).",
        ),
    }
    _formula = by_torch(rmsprop, "square_avg", "grad_avg", "momentum_buffer", "step")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        *,
        fused: bool | None = None,
        state_dtype: torch.dtype | str | None = None,
        master_weights: bool | str = False,
        rounding: str | None = None,
        seed: int = 0,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(params, locals())

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        square_avg, alpha, decay = state["square_avg"], group["alpha"], group["weight_decay"]
        lr, step = float(group["lr"]), state["step"].item() + 1
        if decay:
            grad = grad.add(weight, alpha=decay)
        avg = torch.empty_like(square_avg)
        alpha_, momentum, eps = numbers_first(avg, alpha, group["momentum"], group["eps"])

        state["step"].fill_(step)  # nothing is allocated from here on
        square_avg.mul_(alpha_).addcmul_(grad, grad, value=1 - alpha)
        if group["centered"]:
            mean = state["grad_avg"].lerp_(grad, 1 - alpha)
            if alpha == 0:  # the two are equal, and their difference would be a rounding error
                avg.zero_()
            else:
                torch.addcmul(square_avg, mean, mean, value=-1, out=avg).clamp_(min=0).sqrt_()
        else:
            torch.sqrt(square_avg, out=avg)
        avg.add_(eps)
        if group["momentum"] > 0:
            buffer = state["momentum_buffer"].mul_(momentum).addcdiv_(grad, avg)
            weight.add_(buffer, alpha=-lr)
        else:
            weight.addcdiv_(grad, avg, value=-lr)
