from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep._options.kinds import Flag, Number, Options
from fusedstep._options.shared import EPSILON, SHARED
from fusedstep._sharding.dtensor import is_dtensor
from fusedstep._state.checks import name_of
from fusedstep._state.kinds import COUNT, Group, State, States
from fusedstep._step.owner import Owner
from fusedstep._step.strategy import Strategy

__all__ = ["RowWiseAdagrad"]


def _one_each_row(group: dict[str, Any], shape: torch.Size) -> torch.Size:
    return torch.Size([*shape[:1], *[1] * (len(shape) - 1)])


class _OfRows(Strategy):
    """Takes gradients of whole rows."""

    def launches(
        self, optimizer: Owner, index: int, group: Group, weights: list[Tensor], grads: list[Tensor]
    ) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
        for grad in grads:
            if grad.is_sparse and grad.sparse_dim() != 1:
                raise RuntimeError(
                    "RowWiseAdagrad does not support gradients that are sparse in "
                    f"{grad.sparse_dim()} dimensions: a row, which has one moment, would have "
                    "several entries"
                )
        return super().launches(optimizer, index, group, weights, grads)


class RowWiseAdagrad(FusedOptimizer):
    """Implements the RowWiseAdagrad algorithm: Adagrad with one second moment for each row.

    It is what torchrec's class of the name does, and FBGEMM's EXACT_ROWWISE_ADAGRAD. For a row
    ``w`` of a weight with gradient ``g``, at step ``t`` = 1, 2, … of the weight::

        g = g + weight_decay * w                # unless decoupled_weight_decay
        s = s + mean(g**2)                      # a number; starts at initial_accumulator_value
        w = (1 - lr * weight_decay) * w         # if decoupled_weight_decay
        w = w - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)

    This is `Adagrad`_ with the mean over a row in place of each square.

    A row is all that a weight has at one index of its first dimension. Of a weight with a sparse
    gradient only the rows that it has entries for are read and written, and decay; entries for the
    same row are added up by the step.

    Weights are dense, of the native dtypes and in any layout. On the CPU the step has the same bits
    for any number of threads; on a GPU torch operations step weight by weight. The state ``sum``
    has the shape [rows, 1, …, 1] and is float32, beside float64 weights float64; ``step`` is a
    0-dimensional float32 tensor.

    Args:
        lr (float, Tensor, optional): learning rate (default: 1e-2)
        lr_decay (float, optional): decay of the learning rate (default: 0)
        weight_decay (float, optional): weight decay: an L2 penalty, unless it is decoupled
            (default: 0)
        initial_accumulator_value (float, optional): what the sums start at (default: 0)
        eps (float, optional): term added to the denominator (default: 1e-10)
        decoupled_weight_decay (bool, optional): take the decay out of the gradient, as FBGEMM's
            WeightDecayMode.DECOUPLE does (default: False)

    Raises:
        ValueError: if a hyper-parameter is out of range, ``params`` is empty, or a weight is
            sparse, complex or a sharded DTensor.
        RuntimeError: at :meth:`step`, before anything is changed, for gradients that are sparse in
            more than their first dimension, and weights that overlap themselves in memory.

    Example::

        >>> table = torch.nn.EmbeddingBag(10**6, 64, mode="sum", sparse=True)
        >>> optimizer = optim.RowWiseAdagrad(table.parameters(), lr=1e-2)
        >>> loss_fn(model(table(input)), target).backward()
        >>> optimizer.step(zero_grad="none")

    .. _Adagrad:
        https://jmlr.org/papers/v12/duchi11a.html
    """

    _rule = "rowwise_adagrad"
    _against_sparse = None
    _strategy_class = _OfRows
    _native_devices = ("cpu",)
    _steps_shards_natively = False
    _state_kinds: ClassVar[States] = {
        "sum": State(shape=_one_each_row, start="initial_accumulator_value"),
        **COUNT,
    }
    _composite = True
    _foreign_states = frozenset({"momentum1"})
    _torch_fuses = False
    _option_kinds: ClassVar[Options] = {
        **SHARED,
        "lr_decay": Number(),
        "weight_decay": Number(),
        "initial_accumulator_value": Number(),
        "eps": EPSILON,
        "decoupled_weight_decay": Flag(before=False),
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(params, locals())

    def _in_form(
        self, group: dict[str, Any], weight: Tensor, state: dict[str, Any]
    ) -> dict[str, Any]:
        if "momentum1" not in state:
            return state
        sums = state["momentum1"].reshape(_one_each_row(group, weight.shape))  # of FBGEMM
        return {"step": state.get("step", 0.0), "sum": sums}

    def _check_group(self, index: int, group: dict[str, Any]) -> None:
        for place, weight in enumerate(group["params"]):
            kind = "sparse" if weight.is_sparse else "complex" if weight.is_complex() else None
            if is_dtensor(weight) and not all(each.is_replicate() for each in weight.placements):
                kind = "sharded"
            if kind:
                name = name_of(group, index, place)
                raise ValueError(
                    f"RowWiseAdagrad does not support {kind} parameters: {name} is one"
                )

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        lr, decay = float(group["lr"]), group["weight_decay"]
        state["step"] += 1
        clr = lr / (1 + (state["step"].item() - 1) * group["lr_decay"])
        rows: Any = ...
        if grad.is_sparse:
            grad = grad.coalesce()  # the update is not linear: one value an index
            rows, grad = tuple(grad.indices()), grad.values()
        values, total = weight[rows], state["sum"][rows]
        if decay != 0 and not group["decoupled_weight_decay"]:
            grad = grad.add(values, alpha=decay)
        dims = tuple(range(1, grad.dim()))
        squares = grad * grad
        if dims:  # a row without elements has no mean
            squares = (torch.mean if grad.numel() else torch.sum)(squares, dims, keepdim=True)
        total = total + squares
        if decay != 0 and group["decoupled_weight_decay"]:
            values = values * (1 - lr * decay)
        state["sum"][rows] = total
        weight[rows] = values.addcdiv(grad, total.sqrt().add_(group["eps"]), value=-clr)
