from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep._api.functional import by_torch
from fusedstep._options.kinds import Number, Options
from fusedstep._options.shared import EPSILON, OF_TORCH
from fusedstep._state.kinds import COUNT, State, States
from fusedstep._step.strategy import strategy_of
from fusedstep._step.undo import numbers_first

__all__ = ["Adagrad"]


class Adagrad(FusedOptimizer):
    """Implements the Adagrad algorithm, in signature and states :class:`torch.optim.Adagrad`.

    For a weight ``w`` with gradient ``g``, at step ``t`` = 1, 2, …::

        g = g + weight_decay * w
        s = s + g**2                            # starts at initial_accumulator_value
        w = w - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)

    This is the diagonal form in section 1.1 of `Adaptive Subgradient Methods for Online Learning
    and Stochastic Optimization`_.

    Of a weight with a sparse gradient only the rows that it has are read and written; what it has
    for the same row is added first, in its order. ``weight_decay`` must then be 0.

    Args:
        lr (float, Tensor, optional): learning rate (default: 1e-2)
        lr_decay (float, optional): decay of the learning rate (default: 0)
        weight_decay (float, optional): weight decay (L2 penalty) (default: 0)
        initial_accumulator_value (float, optional): what the sum of squares starts at
            (default: 0)
        eps (float, optional): term added to the denominator (default: 1e-10)

    Raises:
        ValueError: if a hyper-parameter is out of range, or ``params`` is empty.
        RuntimeError: if ``fused=True`` meets ``foreach`` or ``differentiable``, weights that are
            not of the dtypes and devices above, or a missing native library; at :meth:`step`,
            before anything is changed, for sparse gradients with weight decay and weights that
            overlap themselves in memory.

    .. _Adaptive Subgradient Methods for Online Learning and Stochastic Optimization:
        https://jmlr.org/papers/v12/duchi11a.html
    """

    _rule = "adagrad"
    _against_sparse = None
    _zero_with_sparse = ("weight_decay",)
    _state_kinds: ClassVar[States] = {
        "sum": State(start="initial_accumulator_value"),
        **COUNT,
    }
    _learns_in_int4 = True
    _allocates_first = True
    _option_kinds: ClassVar[Options] = {
        **OF_TORCH,
        "lr_decay": Number(),
        "weight_decay": Number(),
        "initial_accumulator_value": Number(),
        "eps": EPSILON,
    }
    _formula = by_torch(adagrad, "sum", "step")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
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

    def share_memory(self) -> None:
        """Calls tensor.share_memory_() on the state sum tensors, which it makes if need be."""
        for group in self.param_groups:
            weights = group["params"]
            is_native = strategy_of(self).is_native(self, group, weights)
            self._store.create(group, weights, is_native, self._groups)
            for p in weights:
                self.state[p]["sum"].share_memory_()

    def _init_group(  # type: ignore[override]  # torch's classes return different things
        self, group: dict[str, Any], *lists: list[Tensor]
    ) -> tuple[bool, bool]:
        """As torch's: whether there is a sparse gradient, and whether a complex weight."""
        has_complex = super()._init_group(group, *lists)
        _, grads, *_ = lists
        return any(grad.is_sparse for grad in grads), has_complex

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        step = state["step"].item() + 1
        clr = float(group["lr"]) / (1 + (step - 1) * group["lr_decay"])

        if group["weight_decay"] != 0:
            grad = grad.add(weight, alpha=group["weight_decay"])
        if grad.is_sparse:
            state["step"].fill_(step)
            grad = grad.coalesce()  # the update is not linear: one value an index
            rows, values = tuple(grad.indices()), grad.values()
            state["sum"][rows] = total = state["sum"][rows].addcmul_(values, values)
            std = total.sqrt().add_(group["eps"])
            weight[rows] = weight[rows].addcdiv_(values, std, value=-clr)
        else:
            std, (eps,) = torch.empty_like(state["sum"]), numbers_first(state["sum"], group["eps"])
            state["step"].fill_(step)  # nothing is allocated from here on
            torch.sqrt(state["sum"].addcmul_(grad, grad), out=std).add_(eps)
            weight.addcdiv_(grad, std, value=-clr)
