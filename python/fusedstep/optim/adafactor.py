from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep._api.saved import check_is_dictionary, own_of
from fusedstep._factored.formula import (
    factored_update,
    first_eps,
    length_of,
    numbers_at,
    numbers_of,
    shapes_of,
    size_at,
)
from fusedstep._factored.moments import rms, without_rms
from fusedstep._factored.options import (
    ADAFACTOR,
    LR,
    as_set,
    by_torchs_names,
    check_adafactor_options,
    check_given_lr,
    is_torchs,
    of_a_variant,
    option_of,
)
from fusedstep._factored.steps import Call, native_parts, part_by_torch, step_parts
from fusedstep._options.kinds import Options
from fusedstep._options.shared import own_option
from fusedstep._sharding.dtensor import (
    is_dtensor,
    local,
    local_pairs,
    placements_without,
    spread_of,
    whole,
)
from fusedstep._state.checks import name_of, with_name
from fusedstep._state.counts import count_steps
from fusedstep._state.kinds import COUNT, States, plain
from fusedstep._state.storage import way_of
from fusedstep._step.factors import PLAIN, Factors
from fusedstep._step.gradients import with_gradients
from fusedstep._step.plan import GradUse, Plan, Snapshot, Work, same
from fusedstep._step.program import Pass
from fusedstep._step.sums import place_of
from fusedstep._step.support import why_not_native
from fusedstep._step.undo import NO_RESERVE, Progress, interrupted, undone_on_error

__all__ = ["Adafactor"]

#: A first eps in the place of that of the weight's dtype, for the native rule.
_OF_DTYPE = -1.0


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
    _state_kinds: ClassVar[States] = {
        **plain("row_var", "col_var", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg"),
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

    @classmethod
    def _state_names(cls, group: dict[str, Any]) -> tuple[str, ...]:
        return ()

    @classmethod
    def _state_shapes(cls, group: dict[str, Any], weight: Tensor) -> dict[str, torch.Size] | None:
        return shapes_of(group, weight.shape)

    @classmethod
    def _state_placements(cls, group: dict[str, Any], weight: Tensor) -> dict[str, Any] | None:
        if not is_dtensor(weight):
            return None
        found = dict.fromkeys(cls._state_shapes(group, weight) or (), spread_of(weight)[1])
        if weight.dim() > 1:
            for name, dim in zip(list(found)[:2], (-1, -2), strict=True):
                found[name] = placements_without(weight, dim, keepdim=is_torchs(group))
        return found

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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer state, of this class, torch's or transformers'."""
        state_dict = own_of(state_dict)
        check_is_dictionary(state_dict)
        groups = [self._in_own_words(group, {}) for group in state_dict["param_groups"]]
        super().load_state_dict(without_rms({**state_dict, "param_groups": groups}))

    def _checked_options(self, item: Work, factors: Factors) -> tuple[float, ...]:
        try:
            check_adafactor_options(item.group)
        except (TypeError, ValueError) as error:
            raise self._option_error(item, error) from error
        pairs = [pair for pair in item.pairs() if pair[0].numel()]
        if (
            pairs
            and not item.plan
            and self._wants_native(item.group)
            and _why_not_fused(item.weights, item.grads) is None
        ):
            try:
                operands = _of_process(*map(list, zip(*pairs, strict=True)))
                torch.ops.fusedstep.factored_check(*operands)
            except RuntimeError as error:
                weights = [weight for weight, _ in pairs]
                raise with_name(error, item.number, item.group, weights) from None
        return super()._checked_options(item, factors)

    def _is_composite(self, group: dict[str, Any]) -> bool:
        return True

    def _is_native(
        self, group: dict[str, Any], weights: list[Tensor], grads: Sequence[Tensor] = ()
    ) -> bool:
        super()._is_native(group, weights, grads)
        reason = _why_not_fused(weights, grads)
        if reason and own_option(group, "fused"):
            raise RuntimeError(reason)
        return self._fuses(group, weights, grads)[1] and all(
            p.is_cpu and way_of(group, p) is None and not _is_sharded(p) for p in weights
        )

    def _plan_at(
        self, place: tuple[int, ...], group: dict[str, Any], weights: list[Tensor]
    ) -> Plan | None:
        is_seen = torch._C._len_torch_dispatch_stack() > 0  # by a mode, operator by operator
        return None if is_seen else super()._plan_at(place, group, weights)

    def _bind(
        self,
        place: tuple[int, ...],
        group: dict[str, Any],
        weights: list[Tensor],
        grads: list[Tensor],
    ) -> Work:
        try:
            return super()._bind(place, group, weights, grads)
        except RuntimeError:
            if all(self._state.get(p) for p in weights):
                try:
                    self._check_states(group, weights)  # by their names, which no plan knows
                except RuntimeError as error:
                    raise with_name(error, place[0], group, weights) from None
            raise

    def _slots(
        self, group: dict[str, Any], weights: list[Tensor], states: list[dict[str, Tensor]]
    ) -> list[Tensor]:
        self._check_states(group, weights)
        return list(itertools.chain(*self._operands(group, weights, states)))

    def _operands(
        self, group: dict[str, Any], weights: list[Tensor], states: list[dict[str, Tensor]]
    ) -> list[list[Tensor]]:
        """Moments of rows and of columns, and first moments: a list of each that there are."""
        rows, columns = [], []
        for weight, state in zip(weights, states, strict=True):
            names = list(self._state_shapes(group, weight) or ())
            # A vector is one row, with a column for each element.
            columns.append(local(state[names[1 if weight.dim() > 1 else 0]]))
            rows.append(local(state[names[0]]) if weight.dim() > 1 else columns[-1].new_empty(0))
        if option_of(group, "beta1") is None:
            return [rows, columns]
        return [rows, columns, [local(state["exp_avg"]) for state in states]]

    def _rule_options(self, group: dict[str, Any]) -> dict[str, Any]:
        is_torch, beta1 = is_torchs(group), option_of(group, "beta1")
        eps1, eps2 = group["eps"]
        if eps1 is None:
            eps1 = _OF_DTYPE if is_torch else 1e-30
        beyond = ("scale_parameter", "relative_step", "warmup_init", "max_relative_step")
        own = {
            "eps1": eps1,
            "eps2": eps2,
            "beta1": beta1 or 0.0,
            "averages": beta1 is not None,
            "is_torchs": is_torch,
        }
        return group | own | {name: option_of(group, name) for name in beyond}

    def _grad_use(
        self, group: dict[str, Any], factors: Factors, zero_grad: bool | Literal["none"]
    ) -> GradUse:
        return GradUse.LEAVE

    def _update_groups(
        self, work: list[Work], factors: Factors, zero_grad: bool | Literal["none"]
    ) -> list[tuple[Tensor, Tensor]]:
        untreated = super()._update_groups(work, factors, zero_grad)
        if zero_grad is True:  # which no step does
            return [pair for item in work for pair in item.pairs()]
        return untreated

    def _check_composite(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        grads: list[Tensor],
        is_known: bool = False,
    ) -> None:
        _of_process(weights, grads)
        super()._check_composite(group, weights, grads, is_known)

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

    # The step: natively if it can be, in torch operations for other weights. One that is like the
    # last but for gradients and options' numbers takes the operations that were noted then. Where
    # weights are spread, each process decides so alone: both ways have the same collectives.

    def _forget_plans(self) -> None:
        super()._forget_plans()
        self._noted: list[_Noted] | None = None  # all of the last step
        self._noted_state: Snapshot | None = None
        # Factors that native operations read gradients with, of groups by id() of their weights.
        self._read_with: dict[int, float] = {}

    _noting: list[_Noted] | None = None  # those of the step under way, if it can be repeated

    def _update_all(
        self,
        max_norm: float | None,
        zero_grad: bool | Literal["none"],
        error_if_nonfinite: bool = False,
    ) -> Tensor | None:
        is_plain = max_norm is None and not (zero_grad or error_if_nonfinite)
        if is_plain and self._takes_noted():
            return None
        self._noting = []
        norm = super()._update_all(max_norm, zero_grad, error_if_nonfinite)
        noted, self._noting = self._noting, None
        if noted and len(noted) == sum(bool(each["params"]) for each in self.param_groups):
            self._noted, self._noted_state = noted, Snapshot(self._state)
        return norm

    def _takes_noted(self) -> bool:
        """Steps as the last time; returns False, and changes nothing, where that may be wrong."""
        noted = self._noted
        groups = [(i, group) for i, group in enumerate(self.param_groups) if group["params"]]
        if (
            noted is None
            or len(groups) != len(noted)
            or "_loading" in self.__dict__
            or torch._C._len_torch_dispatch_stack()
            or self._needs_whole_norm()
            or any(getattr(self, name, None) is not None for name in ("found_inf", "grad_scale"))
            or self._noted_state is None
            or not self._noted_state.is_of(self._state)
        ):
            return False
        calls, work, parts, spread = [], [], [], self._spread_weights()
        for (index, group), last in zip(groups, noted, strict=True):
            weights, grads = with_gradients(group["params"])
            work.append(Work(group, weights, grads, None, index))
            if (
                not same(weights, last.weights)
                or not self._is_memory_known(weights, grads)
                or _choices(group) != last.choices
            ):
                return False
            try:
                if spread.places:
                    _, grads = local_pairs(weights, grads)
                if any(map(_is_special, grads)):
                    return False
                check_adafactor_options(group)
                super()._checked_options(work[-1], PLAIN)
            except (RuntimeError, TypeError, ValueError):
                return False  # and is raised by those who name the group
            for call in last.calls:
                steps = {count.item() for count in call.counts}
                if len(steps) != 1:
                    return False
                numbers = numbers_at(group, steps.pop() + 1, call.eps)
                calls.append((call, [grads[place] for place in call.places], numbers))
                if spread.places:
                    put = functools.partial(self._put_part, group, call)
                    parts.append(native_parts(*calls[-1], put))
        if len(calls) > 1 and any(call.forms != call.forms_now() for call, *_ in calls):
            return False
        if spread.places:
            self._progress = Progress(work)
            with self._progress:
                step_parts(parts, spread)
            return True
        taken: list[Call] = []
        try:
            reserve = self._reserved(work) if len(calls) > 1 else NO_RESERVE
            if len(calls) > 1:  # else the operation itself is the check
                for call, grads, _ in calls:
                    torch.ops.fusedstep.factored_check(call.weights, grads)
            for call, grads, numbers in calls:
                reserve.take(functools.partial(call, grads, numbers), is_first=not taken)
                taken.append(call)
        except (MemoryError, RuntimeError) as error:
            if not taken:
                return False
            stepped = [weight for call in taken for weight in call.weights]
            raise interrupted(error, work, stepped) from error
        finally:
            for call in taken:
                self._account_for(call.weights, call.counts)
        return True

    def _account_for(self, weights: list[Tensor], counts: list[Tensor]) -> None:
        """Counts a step that has been taken. On a device it may still be at work."""
        count_steps(counts)
        increment_version(weights)
        increment_version(self._accessed_states(weights))

    def _imperative_groups(
        self, groups: list[tuple[dict[str, Any], list[Tensor], list[Tensor]]]
    ) -> list[Pass]:
        """As ever, but for weights spread over processes: phase by phase, those of all groups."""
        spread = self._spread_weights()
        if spread.places:
            noting, self._noting = self._noting, None
            parts, wholes, noted = [], [], []
            for group, weights, grads in groups:
                of_parts: tuple[list[Tensor], list[Tensor]] = [], []
                whole: tuple[list[Tensor], list[Tensor]] = [], []
                for weight, grad in zip(weights, grads, strict=True):
                    weights_there, grads_there = of_parts if place_of(weight) else whole
                    weights_there.append(weight)
                    grads_there.append(grad)
                made, calls = self._parts(group, *of_parts)
                noted.append(_Noted(weights, _choices(group), calls))
                parts += made
                wholes.append((group, *whole))
            step_parts(parts, spread)
            groups = [each for each in wholes if each[1]]
            if noting is not None and not groups and all(each.calls for each in noted):
                self._noting = noted
                return []
        return super()._imperative_groups(groups)

    def _parts(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> tuple[list[Pass], list[Call]]:
        """Passes of parts of weights, and native calls if these do all, and in place."""
        together, alone = self._together(group, weights, grads)
        parts = [self._part(group, weights[place], grads[place]) for place in alone]
        calls = []
        for (step, eps, _), places in together.items():
            alike: dict[Any, list[int]] = {}
            for place in places:
                weight = weights[place]
                key = place_of(weight), weight.dtype is torch.float64
                alike.setdefault(key, []).append(place)
            for some in alike.values():
                call = self._call(group, weights, some, eps)
                found = [local(grads[place]) for place in some]
                put = functools.partial(self._put_part, group, call)
                parts.append(native_parts(call, found, self._numbers_at(group, step, eps), put))
                calls.append(call)
        is_plain = not alone and all(call.weights is call.values for call in calls)
        return parts, calls if is_plain else []

    def _part(self, group: dict[str, Any], weight: Tensor, grad: Tensor) -> Pass:
        state = self._state[weight]
        *moments, average = (state[name] for name in self._state_shapes(group, weight) or ())
        if option_of(group, "beta1") is None:
            moments, average = [*moments, average], None
        numbers = numbers_at(group, state["step"].item() + 1, first_eps(group, weight))

        def put(wide: Tensor) -> None:
            self._account_for([weight], [state["step"]])
            self._write_back(group, weight, wide, state)

        widened = functools.partial(self._widened, group, weight, state)
        return part_by_torch(weight, widened, put, grad, moments, average, numbers)

    def _fuses(
        self, group: dict[str, Any], weights: list[Tensor], grads: Sequence[Tensor]
    ) -> tuple[bool, bool]:
        """Returns whether native operations step weights of a group, and whether all of these."""
        is_seen = torch._C._len_torch_dispatch_stack() > 0  # by a mode, operator by operator
        fuses = self._wants_native(group) and not is_seen
        return fuses, fuses and _why_not_fused(weights, grads) is None

    def _writes_natively(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> bool:
        copied = any(way_of(group, weight) for weight in weights)  # a native operation steps copies
        return not copied and self._fuses(group, weights, grads)[1]

    def _with_factor(self, work: list[Work], factors: Factors) -> list[Work]:
        """Multiplies gradients that torch operations take; native ones do so as they read."""
        self._read_with = {}
        if factors.on_host == 1:
            return work
        by_torch = {
            id(item.group["params"])
            for item in work
            if not self._fuses(item.group, item.weights, item.grads)[1]
        }
        multiplied = []
        for item in work:
            key = id(item.group["params"])
            if key in by_torch:
                multiplied += super()._with_factor([item], factors)
            else:
                self._read_with[key] = factors.on_host
                multiplied.append(item)
        return multiplied

    def _numbers_at(self, group: dict[str, Any], step: float, eps: float) -> dict[str, Any]:
        numbers = numbers_at(group, step, eps)
        numbers["grad_factor"] *= self._read_with.get(id(group["params"]), 1.0)
        return numbers

    def _together(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> tuple[dict[tuple[float, float, torch.device], list[int]], list[int]]:
        """The places of weights that native operations step, by operation, and of the others."""
        fuses, fuses_all = self._fuses(group, weights, grads)
        together: dict[tuple[float, float, torch.device], list[int]] = {}
        alone = []
        for place, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
            fuses_one = fuses_all or (fuses and _why_not_fused([weight], [grad]) is None)
            if fuses_one and local(weight).numel() > 0:
                step = self._state[weight]["step"].item() + 1
                together.setdefault((step, first_eps(group, weight), weight.device), []).append(
                    place
                )
            else:
                alone.append(place)
        return together, alone

    def _composite_steps(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> None:
        together, alone = self._together(group, weights, grads)
        for place in alone:
            step = functools.partial(self._imperative_step, group, weights[place], grads[place])
            self._progress.take([weights[place]], step)
            self._noting = None
        noted = _Noted(weights, _choices(group), [])
        for (count, eps, _), places in together.items():
            found = [local(grads[i]) for i in places]
            numbers = self._numbers_at(group, count, eps)

            def take(
                places: list[int] = places,
                eps: float = eps,
                found: list[Tensor] = found,
                numbers: dict[str, Any] = numbers,
            ) -> None:
                call = self._call(group, weights, places, eps)
                if call.weights is not call.values:
                    self._noting = None
                self._put_call(group, call, functools.partial(call, found, numbers))
                noted.calls.append(call)

            self._progress.take([weights[i] for i in places], take)
        if self._noting is not None:
            self._noting.append(noted)

    def _put_part(self, group: dict[str, Any], call: Call, take: Callable[[], None]) -> None:
        self._put_call(group, call, take)
        self._progress.stepped += call.weights

    def _put_call(self, group: dict[str, Any], call: Call, take: Callable[[], None]) -> None:
        """Takes the step of a call, and puts the new values of its weights where they are kept.

        Changes nothing if memory runs out.
        """
        written = []
        if call.weights is not call.values:  # else all is one operation
            states = [self._state[weight].values() for weight in call.weights]
            written = [*call.weights, *itertools.chain(*states)]
        with undone_on_error(written):
            take()
            self._account_for(call.weights, call.counts)
            for weight, value in zip(call.weights, call.values, strict=True):
                self._write_back(group, weight, value, self._state[weight])

    def _call(
        self, group: dict[str, Any], among: list[Tensor], places: list[int], eps: float
    ) -> Call:
        weights = [among[place] for place in places]
        states = [self._state[weight] for weight in weights]
        values = weights
        ways = [way_of(group, weight) for weight in weights]
        if any(ways):
            values = [
                weight if way is None else self._widened(group, weight, state)
                for weight, state, way in zip(weights, states, ways, strict=True)
            ]
        rows, columns, *moments = self._operands(group, weights, states)
        counts = [state["step"] for state in states]
        return Call(
            places, eps, weights, values, rows, columns, moments[0] if moments else [], counts
        )

    def _exact_options(self, group: dict[str, Any]) -> dict[str, Any]:
        first, least = group["eps"]
        found = {first_eps(group, weight) for weight in group["params"]}
        return {"eps": (found.pop(), least)} if first is None and len(found) == 1 else {}

    def _step_on_numbers(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        # A plain 16-bit weight has the eps of its own dtype, not that of the maths.
        eps = (first_eps(group, weight), group["eps"][1])
        super()._step_on_numbers(group | {"eps": eps}, weight, grad, state)

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


class _Noted(NamedTuple):
    """The native part of a step of a group: all of its weights that have a gradient."""

    weights: list[Tensor]
    choices: dict[str, Any]
    calls: list[Call]


def _choices(group: dict[str, Any]) -> dict[str, Any]:
    """The options that choose operations and states; others are numbers of these."""
    names = ("eps", "beta1", "variant", "fused", "foreach", "differentiable", "capturable")
    ways = ("master_weights", "rounding", "seed")
    return {name: group.get(name) for name in (*names, *ways)}


def _why_not_fused(weights: Iterable[Tensor], grads: Iterable[Tensor] = ()) -> str | None:
    """Returns why the native operation cannot step these weights, or None if it can."""
    return why_not_native(list(weights), grads)


def _of_process(weights: list[Tensor], grads: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """This process's parts of weights and gradients; raises where these are of others."""
    are_spread = list(map(is_dtensor, weights))
    if not any(are_spread):
        return weights, grads
    if all(are_spread):
        return local_pairs(weights, grads)
    found: tuple[list[Tensor], list[Tensor]] = [], []
    for weight, grad, is_spread in zip(weights, grads, are_spread, strict=True):
        parts = local_pairs([weight], [grad]) if is_spread else ([weight], [grad])
        for all_parts, part in zip(found, parts, strict=True):
            all_parts += part
    return found


def _is_sharded(weight: Tensor) -> bool:
    return is_dtensor(weight) and not all(each.is_replicate() for each in weight.placements)


def _is_special(grad: Tensor) -> bool:
    """Returns whether the memory of a gradient might not hold its values."""
    return type(grad) is not Tensor or grad.is_neg() or grad._is_zerotensor()


def _check_weight(weight: Tensor, name: str) -> None:
    if weight.is_complex():
        raise RuntimeError(f"Adafactor does not support complex parameters: {name} is one")
    if is_dtensor(weight) and any(place.is_partial() for place in weight.placements):
        raise RuntimeError(
            f"Adafactor does not support DTensor parameters that are sums: {name} has the "
            f"placements {weight.placements}"
        )
