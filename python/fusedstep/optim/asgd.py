from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.asgd import asgd
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep._api.functional import by_torch
from fusedstep._options.kinds import Number, Options
from fusedstep._options.shared import CAPTURABLE, OF_TORCH
from fusedstep._state.kinds import COUNT, State, States
from fusedstep._step.undo import numbers_first

__all__ = ["ASGD"]


class ASGD(FusedOptimizer):
    """Implements the ASGD algorithm, in signature and states :class:`torch.optim.ASGD`.

    For a weight ``w`` with gradient ``g``, at step ``t`` = 1, 2, …::

        g = g + weight_decay * w
        w = (1 - lambd * eta) * w - eta * g     # eta is lr at first
        ax = ax + mu * (w - ax)                 # mu starts at 1, which makes it w
        eta = lr / (1 + lambd * lr * t)**alpha  # for the next step, as is mu
        mu = 1 / max(1, t - t0)

    The mean of the weights since step ``t0`` is the state ``ax``; nothing uses it here. This is
    `Acceleration of Stochastic Approximation by Averaging`_ with Bottou's learning rates.

    Args:
        lr (float, Tensor, optional): learning rate (default: 1e-2)
        lambd (float, optional): decay of the weights and of the learning rate (default: 1e-4)
        alpha (float, optional): power of the learning rate's decay (default: 0.75)
        t0 (float, optional): step at which to begin averaging (default: 1e6)
        weight_decay (float, optional): weight decay (L2 penalty) (default: 0)

    Example::

        >>> optimizer = optim.ASGD(model.parameters(), lr=1e-2, t0=1000)

    .. _Acceleration of Stochastic Approximation by Averaging:
        https://doi.org/10.1137/0330046
    """

    _rule = "asgd"
    _state_kinds: ClassVar[States] = {
        "ax": State(),
        **COUNT,
        "eta": State(start="lr", is_number=True),
        "mu": State(start=1.0, is_number=True),
    }
    _learns_in_int4 = True
    _allocates_first = True
    _torch_fuses = False
    _option_kinds: ClassVar[Options] = {
        **OF_TORCH,
        **CAPTURABLE,
        "lambd": Number(),
        "alpha": Number(usual=1),  # a power
        "t0": Number(least=None),
        "weight_decay": Number(),
    }
    _formula = by_torch(asgd, "ax", "mu", "eta", "step")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lambd: float = 1e-4,
        alpha: float = 0.75,
        t0: float = 1e6,
        weight_decay: float = 0,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        capturable: bool = False,
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

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        weights, grads, mus, axs, etas, *others = lists
        return super()._init_group(group, weights, grads, axs, etas, mus, *others)

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        lr, lambd, ax = float(group["lr"]), group["lambd"], state["ax"]
        step, decay = state["step"].item() + 1, group["weight_decay"]
        eta, averages = state["eta"].item(), state["mu"].item() != 1
        if decay:
            grad = grad.add(weight, alpha=decay)
        (keep,) = numbers_first(weight, 1 - lambd * eta)
        away = torch.empty_like(ax) if averages else None

        state["step"].fill_(step)  # nothing is allocated from here on
        weight.mul_(keep).add_(grad, alpha=-eta)
        if away is not None:
            ax.add_(torch.sub(weight, ax, out=away).mul_(state["mu"]))
        else:
            ax.copy_(weight)
        state["eta"].fill_(lr / (1 + lambd * lr * step) ** group["alpha"])
        state["mu"].fill_(1 / max(1, step - group["t0"]))
