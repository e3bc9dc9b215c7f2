"""Base of all optimizers: torch's face, and the parts of a step in their order."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import compress
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedstep._api.foreign import not_of_step, with_advice
from fusedstep._api.init_group import init_group
from fusedstep._api.loading import load_state_dict, set_state_of_copy
from fusedstep._api.registry import classes, register
from fusedstep._api.state import accessed_states, get_state, look_for_holders, set_state, state_dict
from fusedstep._api.unknown import check_keys, options_of
from fusedstep._api.update import update_all, update_bucket
from fusedstep._native import ops
from fusedstep._options.docs import complete
from fusedstep._options.kinds import (
    Choice,
    check_kinds,
    check_one_number,
    check_ranges,
    floats,
    make_plain,
    named_values,
)
from fusedstep._options.shared import own_option, without_unset
from fusedstep._state import storage
from fusedstep._state.checks import check_storage, check_storage_is_taken
from fusedstep._state.codes import OF_INT4, warn_of_codes
from fusedstep._state.states import StateStore
from fusedstep._step.hooks import is_compiling, outside_graphs, with_hooks
from fusedstep._step.kernels import wants_native
from fusedstep._step.limits import needs_whole_norm
from fusedstep._step.nonfinite import SkippedSteps
from fusedstep._step.owner import Owner
from fusedstep._step.plans import forget_plans
from fusedstep._step.strategy import Strategy, strategy_of
from fusedstep._step.support import why_not_native
from fusedstep._torch_ops.imperative import (
    imperative_steps,
    rehearse,
)

#: A closure's result.
_Loss = TypeVar("_Loss")


class FusedOptimizer(Owner):
    """Base of all optimizers: updates a group natively or, weight by weight, by torch operations.

    A subclass says what is its own: the constructor, the names of its states, the native rule, and
    the imperative twin.
    """

    _strategy_class = Strategy

    def __init_subclass__(cls, *, is_alias: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        kinds = cls._state_kinds
        cls._states = tuple([name for name in kinds if not kinds[name].is_number])
        always = [kind.is_number and kind.of is None for kind in kinds.values()]
        cls._numbers = tuple(compress(kinds, always))
        cls._own_options = named_values(cls._option_kinds, "unset")
        cls._later_options = named_values(cls._option_kinds, "before")
        if is_alias:  # another name for a class, with an option
            return
        if cls.__module__.startswith("fusedstep."):
            classes.append(cls)
            taken = inspect.signature(cls).parameters
            cls._storage_not_taken = {
                name: kind.unset
                for name, kind in cls._option_kinds.items()
                if isinstance(kind, Choice) and name not in taken
            }
        if "__init__" in vars(cls):
            always = [kind.of is None and not kind.is_number for kind in kinds.values()]
            complete(cls, tuple(compress(kinds, always)), cls._numbers)
            cls.__init__ = with_advice(cls.__init__)  # type: ignore[method-assign]  # the same

    def __init__(self, params: ParamsT, arguments: dict[str, Any]) -> None:
        """Arguments: the ``locals()`` of a subclass's constructor, or its options."""
        options = {k: v for k, v in arguments.items() if k not in ("self", "params", "__class__")}
        make_plain(self._option_kinds, options, sequences=False)
        self._check(options)
        make_plain(self._option_kinds, options)
        if isinstance(params, torch.nn.Module) and not isinstance(params, Iterable):
            name = type(params).__name__
            raise TypeError(f"{name!r} object is not iterable: pass its parameters()")
        self._forget_plans()
        # Here, and not first where the state is set: a repeated step takes 7% less.
        self._store = self._new_store({})
        self._name = register(self)
        super().__init__(params, without_unset(options, self._torch_fuses, self._own_options))

    def _new_store(self, by_weight: dict[Tensor, dict[str, Any]]) -> StateStore:
        signed = ops.signed_states.get(self._rule, frozenset()) | {
            name for name, kind in self._state_kinds.items() if kind.is_signed
        }
        return StateStore(by_weight, type(self), signed)

    # A subclass overrides these

    def _check(self, options: dict[str, Any]) -> None:
        """Raises what is wrong with a constructor's options, and makes numbers of its betas."""
        lists = self._torch_fuses and options["foreach"] and not options.get("capturable", True)
        check_ranges(self._option_kinds, options, tensors=not lists)
        check_storage(options)

    def _check_kinds(self, group: Mapping[str, Any]) -> None:
        """Raises an option of a group that is of another kind; its range may be any."""
        check_storage_is_taken(type(self).__name__, self._storage_not_taken, group)
        check_kinds(self._option_kinds, group)
        check_storage(group)

    def _in_form(
        self, group: dict[str, Any], weight: Tensor, state: dict[str, Any]
    ) -> dict[str, Any]:
        """A state of another library's optimizer with objects in it made tensors of ours."""
        return state

    def _check_group(self, index: int, group: dict[str, Any]) -> None:
        """Raises what is wrong with a group, beyond what _check_kinds() does."""

    def _in_own_words(self, group: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        """The options of a dictionary's group by this class's names; ``own``: those it replaces."""
        return group

    def _rule_options(self, group: dict[str, Any]) -> dict[str, Any]:
        """The hyper-parameters of the native rule by its names for them, and others."""
        betas = floats(self._option_kinds, group)
        named = {f"beta{i}": beta for i, beta in enumerate(betas, 1)}
        own = {
            name: value(group) if callable(value) else value
            for name, value in self._rule_values.items()
        }
        return group | named | own

    def _options(self, group: dict[str, Any], lr: float | Tensor | None = None) -> tuple[Any, ...]:
        """The hyper-parameters in the rule's order and, last, whether to maximize."""
        values = self._rule_options(group)
        values["lr"] = float(group["lr"] if lr is None else lr)
        return *map(values.__getitem__, ops.rule_options[self._rule]), group.get("maximize", False)

    def _warn_of_codes(self, group: dict[str, Any], kind: str) -> None:
        """Warns, once for each class, of a new group whose states do not do well in codes."""
        if kind == "int4" and not self._learns_in_int4:
            warn_of_codes(type(self).__name__, OF_INT4)
        for name, option in self._option_kinds.items():
            if option.against_codes and group.get(name):
                warn_of_codes(type(self).__name__, option.against_codes)

    def _formula(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        """Returns the new weight by torch operations that autograd or a device graph can follow.

        The new states are in ``state`` then. Weight and states may be overwritten.
        """
        raise NotImplementedError

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        """Updates a weight and its state in place: with ``fused=False``, for one.

        By the formula, unless a class has a form of it that takes less time.
        """
        new_state = dict(state)
        new = self._formula(group, weight, grad, new_state)
        if new is not weight:
            weight.copy_(new)
        for name, tensor in new_state.items():
            if tensor is not state[name]:
                state[name].copy_(tensor)

    # Functions over an optimizer

    _update_all = update_all
    _update_bucket = update_bucket
    _accessed_states = accessed_states
    _look_for_holders = look_for_holders
    _forget_plans = forget_plans
    _rehearse = rehearse
    _imperative_steps = imperative_steps

    # Groups and states

    @classmethod
    def _grouped(cls, weights: list[Tensor]) -> list[Any]:
        """Returns weights, or groups of them, as the class takes them if nobody says more."""
        if cls._by_dimensions is None:
            return weights
        matrices = [p for p in weights if p.ndim >= 2]
        others = [p for p in weights if p.ndim < 2]
        pairs = zip((matrices, others), cls._by_dimensions, strict=True)
        return [{"params": some, **options} for some, options in pairs if some]

    def __repr__(self) -> str:
        """torch's text, and options that change nothing."""
        notes = [
            f"Group {index}: {note}\n"
            for index, group in enumerate(self._groups)
            if (note := storage.note_of(group))
        ]
        return f"{super().__repr__().removesuffix(')')}{''.join(notes)})"

    @property
    def state(self) -> defaultdict[Tensor, dict[str, Any]]:
        return get_state(self)

    @state.setter
    def state(self, state: defaultdict[Tensor, dict[str, Any]]) -> None:
        set_state(self, state)

    def state_dict(self) -> dict[str, Any]:
        return state_dict(self, super().state_dict)

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer state, as torch does, but for float32 states of 16-bit weights.

        They stay float32. torch casts them to the weight's dtype. Nothing has changed after an
        error. Another thread must not step meanwhile: who comes second gets an error.
        """
        load_state_dict(self, state_dict, super().load_state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        set_state_of_copy(self, state, super().__setstate__)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        # torch.compile reads everything in an attribute of the name param_groups, learning rates
        # included, and compiles anew when any of it changes. Code to be compiled goes by _groups.
        self._groups = groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            check_keys(type(self), param_group)
        outside_graphs(super().add_param_group)(param_group)
        group = self.param_groups[-1]
        # Weights on the meta device may be given memory before the first step, which looks again.
        weights = [p for p in group["params"] if not p.is_meta]
        try:
            make_plain(self._option_kinds, group, sequences=False)
            self._check_kinds(group)
            make_plain(self._option_kinds, group)
            self._check_group(len(self.param_groups) - 1, group)
            strategy_of(self).is_native(self, group, weights)
            needs_whole_norm(self)
        except (RuntimeError, TypeError, ValueError):
            self.param_groups.pop()
            raise
        kind = own_option(group, "state_dtype")
        if isinstance(kind, str):
            self._warn_of_codes(group, kind)
        for kind in {p.device.type for p in group["params"]}.intersection(ops.DEVICES):
            if wants_native(self, group) and ops.missing_on(kind):
                ops.warn_missing(kind)

    # The step

    _init_group = init_group

    @overload
    def step(
        self,
        closure: None = None,
        *,
        max_norm: None = None,
        zero_grad: bool | Literal["none"] = False,
        error_if_nonfinite: bool = False,
    ) -> None: ...

    @overload
    def step(
        self,
        closure: None = None,
        *,
        max_norm: float,
        zero_grad: bool | Literal["none"] = False,
        error_if_nonfinite: bool = False,
    ) -> Tensor: ...

    @overload
    def step(
        self,
        closure: Callable[[], _Loss],
        *,
        max_norm: float | None = None,
        zero_grad: bool | Literal["none"] = False,
        error_if_nonfinite: bool = False,
    ) -> _Loss: ...

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        max_norm: float | None = None,
        zero_grad: bool | Literal["none"] = False,
        error_if_nonfinite: bool = False,
        **unknown: Any,
    ) -> Any:
        """Perform a single optimization step.

        With ``max_norm`` and ``zero_grad`` it does in two passes over memory what ``unscale_``,
        ``clip_grad_norm_``, ``step`` and ``zero_grad`` do in four or more.

        Args:
            closure (Callable, optional): A closure that reevaluates the model
                and returns the loss.
            max_norm (float, optional): clips the gradients, those of all groups together, to
                this 2-norm first, as :func:`torch.nn.utils.clip_grad_norm_` does. ``.grad`` then
                holds the clipped gradients, unless ``zero_grad`` is given or the step uses it.
                ``math.inf`` takes the norm and clips nothing.
            zero_grad (bool or "none", optional): True zeroes the gradients of the step in place,
                ``"none"`` sets them to None.
            error_if_nonfinite (bool, optional): raises an error, before anything is changed, if
                the 2-norm of the gradients is NaN or infinite, with ``max_norm`` or without. It
                waits for a device.
            unknown: any other option is an error, which says where the option belongs

        Returns:
            With a closure what it returned; otherwise with ``max_norm`` the norm before clipping,
            a 0-dimensional float64 tensor: on the weights' device if all groups step there, else
            on the CPU; otherwise None.

        Raises:
            TypeError: for an option of the constructor, and any other unknown one.
            ValueError: if ``max_norm`` is negative or NaN, or ``zero_grad`` is neither a bool nor
                ``"none"``.
            RuntimeError: with ``error_if_nonfinite``, for gradients whose norm is not finite. The
                error names the first weight that has such a gradient.
        """
        if unknown:
            raise not_of_step(self, unknown, options_of(type(self)) | self._own_options.keys())
        if max_norm is not None:
            check_one_number("max_norm", max_norm)
            max_norm = float(max_norm)
            if not max_norm >= 0:
                raise ValueError(f"Invalid max_norm value: {max_norm}")
        if zero_grad not in (False, True, "none"):
            raise ValueError(f'zero_grad must be True, False or "none", not {zero_grad!r}')
        zero_grad = zero_grad if zero_grad == "none" else bool(zero_grad)  # of numpy, perhaps
        with torch.set_grad_enabled(self.defaults.get("differentiable", False)):
            if "capturable" in self.defaults and not self._is_on_host():
                self._accelerator_graph_capture_health_check()
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            # Seen as operators over lists by a compiler, and by a mode for what runs under it.
            is_seen = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
            if is_seen and max_norm is None and not (zero_grad or error_if_nonfinite):
                from fusedstep._api import compiled  # here, for it loads torch's compiler

                if compiled.trace_update(self):
                    return loss
            update = self._update_outside_graphs if is_compiling() else self._update
            norm = update(max_norm, zero_grad, bool(error_if_nonfinite))
            return norm if closure is None else loss

    profile_hook_step = staticmethod(functools.partial(with_hooks, own=step))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Tells a GradScaler that the step divides by the scale, in ``grad_scale``, itself.

        Native steps can. As with torch's classes they do only where ``fused=True`` asks for it:
        Lightning refuses to clip the gradients of an optimizer that says so, and Accelerate does
        not notice that it skipped a step.
        """
        return not self._host_counts_steps and all(
            own_option(group, "fused") and strategy_of(self).is_native(self, group, group["params"])
            for group in self.param_groups
        )

    def _takes_operations(self, group: dict[str, Any]) -> bool:
        """Returns whether native operations without a plan step the weights of a group."""
        weights, is_composite = group["params"], strategy_of(self).is_composite(self, group)
        is_asked = is_composite and wants_native(self, group)
        return bool(weights) and is_asked and why_not_native(weights) is None

    def _isa(self) -> str:
        """Name of the instruction set whose code ran the last native step.

        Raises:
            RuntimeError: if the last step was not a native one.
        """
        names = {torch.ops.fusedstep.plan_isa(plan.handle) for plan in self._plans.values()}
        for group in filter(self._takes_operations, self._groups):
            device = group["params"][0].device.type
            names.add(ops.isa() if device == "cpu" else device)
        if len(names) > 1:
            names.discard("")  # that of weights without elements, for which no code has to run
        if len(names) != 1:
            raise RuntimeError(f"the optimizer has no one instruction set: {sorted(names)}")
        return names.pop()

    def _is_on_host(self) -> bool:
        # To ask an accelerator about graph capture starts it, which fails in a child of fork().
        return all(p.is_cpu for group in self._groups for p in group["params"][:1])

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not (torch.compiler.is_compiling() and set_to_none):
            outside_graphs(super().zero_grad)(set_to_none)
            return
        for group in self._groups:
            for p in group["params"]:
                p.grad = None

    def _update(
        self,
        max_norm: float | None,
        zero_grad: bool | Literal["none"],
        error_if_nonfinite: bool,
    ) -> Tensor | None:
        strategy = strategy_of(self)
        me = object() if any(strategy.is_composite(self, each) for each in self._groups) else None
        if me and vars(self).setdefault("_stepping", me) is not me:
            raise RuntimeError(ops.IS_STEPPED)  # a plan would say so in other steps
        try:
            return self._update_all(max_norm, zero_grad, error_if_nonfinite)
        except RuntimeError as error:
            ops.raise_memory_error(error)
            raise
        finally:
            if me:
                del self._stepping

    _update_outside_graphs = torch._disable_dynamo(_update)

    @property
    def grad_norm(self) -> Tensor | None:
        """The 2-norm of all gradients at the last step that took it, before it was clipped.

        A 0-dimensional float64 tensor, where ``step(max_norm=...)`` returns it: to make it waits
        for nothing. Steps with ``max_norm``, ``max_grad_norm``, ``skip_nonfinite`` or
        ``error_if_nonfinite`` take it, and steps in the backward pass with ``max_previous_norm``;
        None before the first of them.
        """
        if self._norm is None or isinstance(self._norm, Tensor):
            return self._norm
        return torch.tensor(self._norm, dtype=torch.float64, device="cpu")

    @functools.cached_property
    def _skipped(self) -> SkippedSteps:
        return SkippedSteps()

    @property
    def skipped_steps(self) -> int:
        """The steps that ``skip_nonfinite=True`` has left out since this optimizer was made.

        Of them are those that a GradScaler has the optimizer leave out, by ``fused=True``. A device
        counts its own, and reading the number waits for it. No dictionary holds the number.
        """
        return self._skipped.count()

    @functools.cached_property
    def _passed(self) -> dict[int, list[Any]]:
        """The options of groups that a step has checked, by the id of their lists of weights."""
        return {}
