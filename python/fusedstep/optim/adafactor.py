from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep._factored.formula import (
    TORCHS,
    TRANSFORMERS,
    factored_update,
    length_of,
    numbers_of,
    size_at,
)
from fusedstep._factored.moments import factored_states, placements_of_weight, rms
from fusedstep._factored.options import (
    ADAFACTOR,
    FACTORED_RULE,
    LR,
    as_set,
    averages,
    by_torchs_names,
    check_adafactor_options,
    check_given_lr,
    is_torchs,
    is_transformers,
    of_a_variant,
    option_of,
)
from fusedstep._factored.strategy import FactoredSteps
from fusedstep._options.kinds import Options
from fusedstep._sharding.dtensor import is_dtensor, whole
from fusedstep._state.checks import name_of
from fusedstep._state.kinds import COUNT, State, States, same_shape

__all__ = ["Adafactor"]


class Adafactor(FusedOptimizer):
    r"""Implements the Adafactor algorithm: torch's, or transformers'.

    It keeps second moments of the rows and of the columns of a matrix, in place of one for each of
    its elements. For a weight ``w`` of two dimensions with gradient ``g``, at step ``t`` = 1, 2, …,
    with ``rms`` the root of the mean square of all elements::

        row = (1 - t**beta2_decay) * row + t**beta2_decay * mean(g**2 + eps1, of each row)
        col = (1 - t**beta2_decay) * col + t**beta2_decay * mean(g**2 + eps1, of each column)
        u = g / sqrt(row * col / mean(row))
        u = u / max(1, rms(u) / d)
        s = max(eps2, rms(w))
        w = w - min(lr, 1 / sqrt(t)) * s * (u + weight_decay * w)

    Weights of less than two dimensions have the running average of ``g**2 + eps1`` in place of
    ``row * col / mean(row)``; those of more are matrices of the last two. This is algorithm 5 of
    `Adafactor: Adaptive Learning Rates with Sublinear Memory Cost`_, and what
    ``transformers.Adafactor`` does. ``variant="torch"``, as :class:`torch.optim.Adafactor`, adds no
    eps1 to the squares; the mean of the rows is at least eps1, the root of ``row * col /
    mean(row)`` at least eps1 too, and the weight is multiplied by ``1 - lr * weight_decay``.

    Weights are float32, float64, bfloat16 or float16, of any shape and strides, as may be their
    gradients; of a gradient only the shape, dtype and device must be the weight's. On the CPU and
    on CUDA one native operation steps all weights of a group, with the same bits. The states
    ``row_var`` and ``col_var``, or ``variance`` of less than two dimensions, have the weight's
    dtype, float32 beside 16 bits; with transformers' variant they are ``exp_avg_sq_row``,
    ``exp_avg_sq_col`` and ``exp_avg_sq``, and ``exp_avg`` if there is a beta1. ``step`` is a
    0-dimensional float32 tensor. Processes that have shards of a DTensor weight step them natively
    too, with the sums over the whole weight: all of them have to call ``step``. The states are
    DTensors then.

    Args:
        params (iterable): iterable of parameters or named_parameters to optimize
            or iterable of dicts defining parameter groups
        lr (float, Tensor, optional): upper bound of the relative step size; with
            ``relative_step=False`` the step size itself, before it is scaled. Relative steps of
            transformers' variant do not read it: schedules only show numbers there (default: 1e-2)
        beta2_decay (float, optional): exponent of the decay of the second moments, at most 0;
            transformers' ``decay_rate`` (default: -0.8)
        eps (tuple[float | None, float], optional): eps1, and the least value that counts as the
            root mean square of a weight. None is the epsilon of the weight's dtype, float32's
            if the weight keeps a float32 value (``master_weights``, ``rounding``), and 1e-30 with
            transformers (default: (None, 1e-3))
        d (float, optional): largest root mean square of an update; transformers'
            ``clip_threshold`` (default: 1.0)
        weight_decay (float, optional): decoupled weight decay (default: 0)
        clip_threshold (float, optional): another name for d
        decay_rate (float, optional): another name for beta2_decay
        beta1 (float, optional): coefficient of a running average of the updates, for which the
            state ``exp_avg`` is kept; None averages nothing (default: None)
        scale_parameter (bool, optional): multiply the step size by the root mean square of the
            weight (default: True)
        relative_step (bool, optional): the step size is at most ``1 / sqrt(t)`` (default: True)
        warmup_init (bool, optional): with relative_step, 1e-6 times ``t`` is the upper bound
            (default: False)
        max_relative_step (float, optional): upper bound of the relative step size of transformers'
            variant, in place of lr (default: 1e-2)
        variant (str, optional): "torch" or "transformers"; None is the latter if an option is given
            that only transformers' class has (default: None)

    Example::

        >>> optimizer = optim.Adafactor(model.parameters(), lr=1e-2)
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()

    .. _Adafactor\: Adaptive Learning Rates with Sublinear Memory Cost:
        https://arxiv.org/abs/1804.04235
    """

    _rule = "adafactor"
    _rule_values = FACTORED_RULE
    _strategy_class = FactoredSteps
    _preset = "variant"
    _unread_states = frozenset({"RMS"})  # transformers' class keeps it
    _writes_grads = False
    _state_kinds: ClassVar[States] = {
        **factored_states(*TORCHS, needs=is_torchs, keepdim=True, is_spread=True),
        **factored_states(*TRANSFORMERS, needs=is_transformers, is_spread=True),
        "exp_avg": State(
            needs=averages, shape=same_shape, placements=placements_of_weight, takes_codes=False
        ),
        **COUNT,
    }
    _elementwise = False
    _allocates_first = True
    _composite = True
    _plan_takes_norm = False
    _torch_fuses = False
    _option_kinds: ClassVar[Options] = ADAFACTOR

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | None = LR,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        fused: bool | None = None,
        master_weights: bool | str = False,
        rounding: str | None = None,
        seed: int = 0,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        clip_threshold: float | None = None,
        decay_rate: float | None = None,
        beta1: float | None = None,
        scale_parameter: bool | None = None,
        relative_step: bool | None = None,
        warmup_init: bool | None = None,
        max_relative_step: float | None = None,
        variant: Literal["torch", "transformers"] | None = None,
    ) -> None:
        options = {k: v for k, v in locals().items() if k not in ("self", "params", "__class__")}
        options = of_a_variant(options)
        check_given_lr(options)
        super().__init__(params, as_set(options))

    def _check(self, options: dict[str, Any]) -> None:
        check_adafactor_options(options)
        super()._check(options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(by_torchs_names(param_group))

    def _check_group(self, index: int, group: dict[str, Any]) -> None:
        check_adafactor_options(group)
        for place, weight in enumerate(group["params"]):
            _check_weight(weight, name_of(group, index, place))

    def _in_own_words(self, group: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        # Under torch's names only a variant that is written down is transformers'.
        group = {"variant": "torch"} | group if "d" in group else group
        return as_set(of_a_variant(group), self.defaults | own)

    def _get_lr(self, param_group: dict[str, Any], param_state: dict[str, Any]) -> float:
        """The size of the last step of a weight, which transformers' AdafactorSchedule shows."""
        if is_torchs(param_group):
            raise RuntimeError(
                "AdafactorSchedule shows the size of steps in lr, which variant='torch' reads: "
                "make the optimizer with variant='transformers'"
            )
        if not param_state:  # which has not been stepped
            return float(param_group["lr"])
        size = size_at(param_group, float(param_state["step"]))
        if not option_of(param_group, "scale_parameter"):
            return size
        weights = param_group["params"]
        weight = next(each for each in weights if self._state.get(each) is param_state)
        return size * max(param_group["eps"][1], rms(whole(weight.detach()).double()).item())

    def _formula(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        numbers = numbers_of(group, weight, state)
        length = length_of(numbers, weight)
        update = factored_update(group, numbers, grad, state, length)
        if group["weight_decay"] != 0:
            decay = numbers["decay"] * (length if numbers["decays_by_length"] else 1)
            weight = weight * (1 - decay)
        return weight - update


def _is_sharded(weight: Tensor) -> bool:
    return is_dtensor(weight) and not all(each.is_replicate() for each in weight.placements)


def _check_weight(weight: Tensor, name: str) -> None:
    if weight.is_complex():
        raise RuntimeError(f"Adafactor does not support complex parameters: {name} is one")
    if is_dtensor(weight) and any(place.is_partial() for place in weight.placements):
        raise RuntimeError(
            f"Adafactor does not support DTensor parameters that are sums: {name} has the "
            f"placements {weight.placements}"
        )
