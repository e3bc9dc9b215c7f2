from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep.optim.adam import Adam

__all__ = ["AdamW"]


class AdamW(Adam):
    """Implements the AdamW algorithm, in signature and states :class:`torch.optim.AdamW`.

    For a weight ``w`` with gradient ``g``, at step ``t`` = 1, 2, …::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        w = (1 - lr * weight_decay) * w
        w = w - lr / (1 - beta1**t) * m / (sqrt(v / (1 - beta2**t)) + eps)

    With ``amsgrad`` the largest ``v`` so far takes its place in the last line. This is algorithm 2
    of `Decoupled Weight Decay Regularization`_.

    Args:
        lr (float, Tensor, optional): learning rate (default: 1e-3)
        betas (tuple[float | Tensor, float | Tensor], optional): coefficients of the
            running averages of the gradient and its square (default: (0.9, 0.999))
        eps (float, optional): term added to the denominator (default: 1e-8)
        weight_decay (float, optional): decoupled weight decay (default: 1e-2)
        amsgrad (bool, optional): divide by the largest second moment so far, as in
            `On the Convergence of Adam and Beyond`_ (default: False)

    Example::

        >>> optimizer = optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

    .. _Decoupled Weight Decay Regularization:
        https://arxiv.org/abs/1711.05101
    .. _On the Convergence of Adam and Beyond:
        https://openreview.net/forum?id=ryQu7f-RZ
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | str | None = None,
        master_weights: bool | str = False,
        rounding: str | None = None,
        seed: int = 0,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        FusedOptimizer.__init__(self, params, locals() | {"decoupled_weight_decay": True})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # whatever a loaded dictionary says
            group["decoupled_weight_decay"] = True
