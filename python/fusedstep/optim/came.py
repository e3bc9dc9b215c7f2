from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep._factored.blocks import FactoredMoments, Numbers, step_in_blocks
from fusedstep._factored.moments import factored_states, moved_factor, rms
from fusedstep._options.kinds import (
    Betas,
    Number,
    NumberTuple,
    Options,
    check_number,
    check_pair,
    floats,
)
from fusedstep._options.shared import SHARED
from fusedstep._sharding.dtensor import is_dtensor, local
from fusedstep._state.checks import name_of
from fusedstep._state.kinds import COUNT, Group, State, States, same_shape
from fusedstep._step.factors import Factors
from fusedstep._step.kernels import wants_native
from fusedstep._step.owner import Owner
from fusedstep._step.plan import Work
from fusedstep._step.program import Program
from fusedstep._step.strategy import Strategy
from fusedstep._step.undo import numbers_first

__all__ = ["CAME"]

_SQUARES = ("exp_avg_sq_row", "exp_avg_sq_col")
_RESIDUALS = ("exp_avg_res_row", "exp_avg_res_col")


class _OfBlocks(Strategy):
    """Steps all groups block by block, without a plan."""

    takes_complex = False

    def is_composite(self, optimizer: Owner, group: Group) -> bool:
        return True

    def check_own(self, group: Group) -> None:
        _check_own(group)

    def program(self, optimizer: Owner, work: list[Work], factors: Factors) -> Program:
        return _CAMEProgram(optimizer, work, factors)


class CAME(FusedOptimizer):
    """Implements the CAME algorithm: Adafactor's moments, and a first one that is trusted by rows.

    Signature and states are those of ``came_pytorch.CAME``. Where its updates have been far from
    their running average, it takes smaller steps. For a weight ``w`` of two dimensions with
    gradient ``g``, with ``rms`` the root of the mean square of all elements::

        row = beta2 * row + (1 - beta2) * mean(g**2 + eps1, of each row)
        col = beta2 * col + (1 - beta2) * mean(g**2 + eps1, of each column)
        u = g / sqrt(row * col / mean(row))
        u = u / max(1, rms(u) / clip_threshold)
        m = beta1 * m + (1 - beta1) * u
        r = (u - m)**2 + eps2
        res_row = beta3 * res_row + (1 - beta3) * mean(r, of each row)
        res_col = beta3 * res_col + (1 - beta3) * mean(r, of each column)
        w = (1 - lr * weight_decay) * w - lr * m / sqrt(res_row * res_col / mean(res_row))

    Weights of less than two dimensions have the running average of ``g**2 + eps1`` in place of
    ``row * col / mean(row)``, and no residuals: ``lr * m`` is taken from them. Those of more are
    stacks of matrices, of the last two. This is algorithm 2 of `CAME`_, and what its authors'
    package does.

    Weights are float32, float64, bfloat16 or float16, of any shape and strides and on any device,
    as may be their gradients. The states are ``exp_avg`` of the weight's shape and, of a matrix,
    ``exp_avg_sq_row``, ``exp_avg_sq_col``, ``exp_avg_res_row`` and ``exp_avg_res_col``; of less
    than two dimensions ``exp_avg_sq``. They have the weight's dtype, float32 beside 16 bits.
    ``step`` is a 0-dimensional float32 tensor. The step is made of torch operations, for a block
    of rows at a time: of float32 and float64 weights it needs memory for two blocks.

    Args:
        lr (float, Tensor, optional): learning rate (default: 2e-4)
        eps (tuple[float, float], optional): eps1 and eps2, added to the squares of gradients and
            of residuals (default: (1e-30, 1e-16))
        clip_threshold (float, optional): largest root mean square of an update before it is
            averaged (default: 1.0)
        betas (tuple[float, float, float], optional): coefficients of the running averages of the
            update, the squares and the residuals (default: (0.9, 0.999, 0.9999))
        weight_decay (float, optional): decoupled weight decay (default: 0)
        fused (bool, optional): False steps in the operations of the formula above, with memory for
            several times the largest weight; True and None take blocks of rows (default: None)

    Raises:
        ValueError: if a hyper-parameter is out of range, ``params`` is empty, or a weight is
            complex or a sharded DTensor; the error names the parameter.
        RuntimeError: at :meth:`step`, before anything is changed, for sparse gradients and weights
            that overlap themselves in memory.

    Example::

        >>> optimizer = optim.CAME(model.parameters(), lr=2e-4, weight_decay=1e-2)

    .. _CAME:
        https://arxiv.org/abs/2307.02047
    """

    _rule = "came"
    _unread_states = frozenset({"RMS"})  # came_pytorch's class keeps it
    _state_kinds: ClassVar[States] = {
        **factored_states(*_SQUARES, "exp_avg_sq"),
        **factored_states(*_RESIDUALS),
        "exp_avg": State(shape=same_shape, takes_codes=False),
        **COUNT,
    }
    _elementwise = False
    _allocates_first = True
    _composite = True
    _strategy_class = _OfBlocks
    _torch_fuses = False
    _option_kinds: ClassVar[Options] = {
        **SHARED,
        "eps": NumberTuple(),
        "clip_threshold": Number(above=True),
        "betas": Betas(count=3),
        "weight_decay": Number(),
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 2e-4,
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        fused: bool | None = None,
        master_weights: bool | str = False,
        rounding: str | None = None,
        seed: int = 0,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(params, locals())

    # Options and states

    def _check(self, options: dict[str, Any]) -> None:
        _check_own(options)
        super()._check(options)

    def _check_group(self, index: int, group: dict[str, Any]) -> None:
        _check_own(group)
        for place, weight in enumerate(group["params"]):
            kind = "complex" if weight.is_complex() else None
            if is_dtensor(weight) and not all(each.is_replicate() for each in weight.placements):
                kind = "sharded"
            if kind:
                name = name_of(group, index, place)
                raise ValueError(f"CAME does not support {kind} parameters: {name} is one")

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        weight, grad = local(weight), local(grad)
        state = {name: local(value) for name, value in state.items()}
        if weight.numel() == 0:  # of which there are no means
            state["step"].add_(*numbers_first(state["step"], 1.0))
        elif weight.dim() < 2 or not wants_native(self, group):
            super()._imperative(group, weight, grad, state)
        else:
            moments, residuals = (
                FactoredMoments(*(state[name] for name in names))
                for names in (_SQUARES, _RESIDUALS)
            )
            (one,) = numbers_first(state["step"], 1.0)
            numbers = _numbers(group)
            step_in_blocks(weight, grad, state["exp_avg"], moments, residuals, numbers)
            state["step"].add_(one)

    def _formula(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        lr, (beta1, beta2, beta3), eps, threshold, decay = _numbers(group)
        state["step"] = state["step"] + 1
        squares = grad * grad + eps[0]
        names = _SQUARES if weight.dim() > 1 else ("exp_avg_sq",)
        update = grad * moved_factor(state, names, squares, 1 - beta2)
        update = update / (rms(update) / threshold).clamp(min=1)
        move = state["exp_avg"] = beta1 * state["exp_avg"] + (1 - beta1) * update
        if weight.dim() > 1:
            residuals = (update - move) ** 2 + eps[1]
            move = move * moved_factor(state, _RESIDUALS, residuals, 1 - beta3)
        return weight * (1 - decay) - lr * move


class _CAMEProgram(Program):
    """A program that steps replicated DTensors by way of their copies."""

    def step(self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]) -> None:
        super().step(group, weights, grads)
        increment_version([p for p in weights if is_dtensor(p)])


def _numbers(group: dict[str, Any]) -> Numbers:
    lr, eps = float(group["lr"]), group["eps"]
    return Numbers(
        lr=lr,
        betas=floats(CAME._option_kinds, group),
        eps=(float(eps[0]), float(eps[1])),
        threshold=float(group["clip_threshold"]),
        decay=lr * float(group["weight_decay"]),
    )


def _check_own(options: dict[str, Any]) -> None:
    """Raises the first of the options that only this class has that is out of range."""
    check_pair("eps", options["eps"])
    for index, value in enumerate(options["eps"]):
        if not value >= 0:
            raise ValueError(f"Invalid epsilon value at index {index}: {value}")
    check_number("clip_threshold", options["clip_threshold"])
    if not options["clip_threshold"] > 0:
        raise ValueError(f"Invalid clip_threshold value: {options['clip_threshold']}")
