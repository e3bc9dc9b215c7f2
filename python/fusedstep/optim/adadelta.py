from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adadelta import adadelta
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep._api.functional import by_torch
from fusedstep._options.kinds import Number, Options
from fusedstep._options.shared import CAPTURABLE, EPSILON, OF_TORCH
from fusedstep._state.kinds import COUNT, States, plain
from fusedstep._step.undo import numbers_first

__all__ = ["Adadelta"]


class Adadelta(FusedOptimizer):
    r"""Implements the Adadelta algorithm, in signature and states :class:`torch.optim.Adadelta`.

    For a weight ``w`` with gradient ``g``::

        g = g + weight_decay * w
        v = rho * v + (1 - rho) * g**2
        d = sqrt(a + eps) / sqrt(v + eps) * g
        a = rho * a + (1 - rho) * d**2
        w = w - lr * d

    This is algorithm 1 of `ADADELTA: An Adaptive Learning Rate Method`_, with a learning rate.

    Args:
        lr (float, Tensor, optional): factor of the update (default: 1.0)
        rho (float, optional): coefficient of both running averages (default: 0.9)
        eps (float, optional): term added to both averages under the roots (default: 1e-6)
        weight_decay (float, optional): weight decay (L2 penalty) (default: 0)

    .. _ADADELTA\: An Adaptive Learning Rate Method:
        https://arxiv.org/abs/1212.5701
    """

    _rule = "adadelta"
    _state_kinds: ClassVar[States] = {**plain("square_avg", "acc_delta"), **COUNT}
    _learns_in_int4 = True
    _allocates_first = True
    _torch_fuses = False
    _option_kinds: ClassVar[Options] = {
        **OF_TORCH,
        **CAPTURABLE,
        "rho": Number(most=1),
        "eps": EPSILON,
        "weight_decay": Number(),
    }
    _formula = by_torch(adadelta, "square_avg", "acc_delta", "step")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        *,
        capturable: bool = False,
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

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        square_avg, acc_delta, rho = state["square_avg"], state["acc_delta"], group["rho"]
        step, decay = state["step"].item() + 1, group["weight_decay"]
        if decay:
            grad = grad.add(weight, alpha=decay)
        rho_, eps = numbers_first(square_avg, rho, group["eps"])
        std, delta = torch.empty_like(square_avg), acc_delta.add(eps)

        state["step"].fill_(step)  # nothing is allocated from here on
        square_avg.mul_(rho_).addcmul_(grad, grad, value=1 - rho)
        torch.add(square_avg, eps, out=std).sqrt_()
        delta.sqrt_().div_(std).mul_(grad)
        acc_delta.mul_(rho_).addcmul_(delta, delta, value=1 - rho)
        weight.add_(delta, alpha=-float(group["lr"]))
