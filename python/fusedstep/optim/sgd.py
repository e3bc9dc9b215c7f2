from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

from fusedstep._api.base import FusedOptimizer
from fusedstep._options.kinds import Flag, Number, Options
from fusedstep._options.shared import OF_TORCH
from fusedstep._state.kinds import State, States
from fusedstep._step.undo import numbers_first

__all__ = ["SGD"]


class SGD(FusedOptimizer):
    """Implements the SGD algorithm, in signature and states :class:`torch.optim.SGD`.

    For a weight ``w`` with gradient ``g``::

        g = g + weight_decay * w
        b = momentum * b + (1 - dampening) * g      # b = g at the first step
        d = g + momentum * b if nesterov else b
        w = w - lr * d

    Without momentum there is no state, and ``b`` is ``g``. The momentum is that of `On the
    importance of initialization and momentum in deep learning`_.

    Of a weight with a sparse gradient only the rows that it has are read and written; what it has
    for the same row is added first, in its order. ``momentum`` and ``weight_decay`` must then be 0.

    Args:
        lr (float, Tensor, optional): learning rate (default: 1e-3)
        momentum (float, optional): momentum factor (default: 0)
        dampening (float, optional): dampening for momentum (default: 0)
        weight_decay (float, optional): weight decay (L2 penalty) (default: 0)
        nesterov (bool, optional): Nesterov momentum, which needs a momentum and no dampening
            (default: False)

    Example::

        >>> optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    .. _On the importance of initialization and momentum in deep learning:
        https://proceedings.mlr.press/v28/sutskever13.html
    """

    _rule = "sgd"
    _against_sparse = None
    _zero_with_sparse = ("momentum", "weight_decay")
    _state_kinds: ClassVar[States] = {"momentum_buffer": State(needs="momentum")}
    _allocates_first = True
    _option_kinds: ClassVar[Options] = {
        **OF_TORCH,
        "momentum": Number(),
        "dampening": Number(least=None),
        "weight_decay": Number(),
        "nesterov": Flag(before=False),
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
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
        if options["nesterov"] and (options["momentum"] <= 0 or options["dampening"] != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        """As torch's: None for a buffer that is missing, and whether there is a sparse gradient."""
        weights, grads, buffers, *_ = lists
        weights.extend(p for p in group["params"] if p.grad is not None)
        grads.extend(p.grad for p in weights)
        if group["momentum"] != 0:
            buffers.extend(self.state[p].get("momentum_buffer") for p in weights)
        return any(grad.is_sparse for grad in grads)

    def _formula(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        state["step"] += 1
        sgd(
            [weight],
            [grad],
            [state.get("momentum_buffer")],
            has_sparse_grad=grad.is_sparse,
            foreach=False,
            fused=False,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"] if state["step"] > 1 else 0,
            nesterov=group["nesterov"],
            maximize=False,
        )
        return weight

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        if grad.is_sparse:
            super()._imperative(group, weight, grad, state)
            return
        step, decay = state["step"].item() + 1, float(group["weight_decay"])
        momentum = group["momentum"]
        if decay:
            grad = grad.add(weight, alpha=decay)
        if momentum:
            buffer = state["momentum_buffer"]
            (momentum_,) = numbers_first(buffer, momentum)
            ahead = torch.empty_like(grad) if group["nesterov"] else None
            # Nothing is allocated from here on.
            dampening = 0 if step == 1 else group["dampening"]
            buffer.mul_(momentum_).add_(grad, alpha=1 - dampening)
            grad = buffer if ahead is None else torch.add(grad, buffer, alpha=momentum, out=ahead)
        state["step"].fill_(step)
        weight.add_(grad, alpha=-float(group["lr"]))
