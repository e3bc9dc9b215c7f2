"""What an optimizer is, as the parts of a step know it: data, names and types, and no code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from torch import Tensor
from torch.optim import Optimizer

from fusedstep._options.kinds import Options, named_values
from fusedstep._options.shared import OF_TORCH, OWN
from fusedstep._state.checks import CheckedOperands
from fusedstep._state.kinds import COUNT, States
from fusedstep._state.states import StateStore
from fusedstep._step.clip import EPSILON
from fusedstep._step.nonfinite import SkippedSteps
from fusedstep._step.plan import Plan, PlansAside, Snapshot
from fusedstep._step.sums import SpreadWeights
from fusedstep._step.undo import Progress

#: The index of a group, that of a launch among those that update it, and of a bucket if it is one.
Place = tuple[int, ...]


class PartRecord(Protocol):
    """What the last step did for a group."""

    states: list[Tensor] | None


class StepRecord(Protocol):
    """A record of the last step, for ``_bind.repeat`` to compare with."""

    parts: tuple[PartRecord, ...]

    def _replace(self, *, empty: tuple[dict[int, Any], ...]) -> StepRecord: ...


class Owner(Optimizer):
    """An optimizer of this package, as modules see it that the module of its class imports.

    Class variables say what a class is, as data. Methods are those of the base of all optimizers: a
    type checker compares.
    """

    #: Name of the native rule, which owns the order of its hyper-parameters.
    _rule: ClassVar[str]
    #: Hyper-parameters of the native rule that are no options of the class by the same names: their
    #: values, or functions that compute these from a group.
    _rule_values: ClassVar[dict[str, Any]] = {}
    #: What there is to know of each state of a weight. Without a step count among them the native
    #: step has one, which no dictionary holds.
    _state_kinds: ClassVar[States] = COUNT
    #: Names of the states that are tensors, in the order of the native rule.
    _states: ClassVar[tuple[str, ...]]
    #: Names of the states that are numbers, of all weights.
    _numbers: ClassVar[tuple[str, ...]]
    #: True if an element's update depends on no other element: shards can then be stepped alone. Of
    #: others a step of shards is two phases, with norms over all processes in between.
    _elementwise: ClassVar[bool] = True
    #: True if the native step of shards is these two phases.
    _in_phases: ClassVar[bool] = False
    #: True if ``foreach=True`` asks for torch operations, as torch's does.
    _foreach_means_unfused: ClassVar[bool] = True
    #: False if torch has the class without the option ``fused``. If true, every group has it, and
    #: ``foreach`` takes no tensors for numbers.
    _torch_fuses: ClassVar[bool] = True
    #: The class of its strategy.
    _strategy_class: ClassVar[type[object]]
    #: True if groups may be composites. Such a step is never part of a graph of torch.compile.
    _composite: ClassVar[bool] = False
    #: True if a step in torch operations allocates nothing once it has written a dense weight or a
    #: state of it. Otherwise copies are kept, and put back if there is no memory half way.
    _allocates_first: ClassVar[bool] = False
    #: True if a training with int4 states ends near one with float32 states, as measured in
    #: docs/small_states.md. Otherwise int4 is warned of.
    _learns_in_int4: ClassVar[bool] = False
    #: The codes of a class's states unless ``state_dtype`` is given.
    _usual_codes: ClassVar[str | None] = None
    #: False if norms of gradients are added up in the order of these, whatever that of a native
    #: plan is.
    _plan_takes_norm: ClassVar[bool] = True
    #: True if composite steps on a GPU take a factor of gradients that the GPU knows, and the host
    #: does not wait for.
    _queues_factors: ClassVar[bool] = False
    #: The option by which a native step leaves gradients as they are. Without it the step may leave
    #: anything in them. None if it leaves nothing there anyway.
    _keeps_grads_by: ClassVar[str | None] = None
    #: False if no native step scales or zeroes gradients.
    _writes_grads: ClassVar[bool] = True
    #: The ``max_grad_norm`` that does not even take the norm of gradients.
    _no_max_grad_norm: ClassVar[float | None] = None
    #: What the norm of gradients is raised by before the division that clips them, as by
    #: clip_grad_norm_: a number, or the option that has it.
    _grad_norm_eps: ClassVar[float | str] = EPSILON
    #: The devices that have native kernels of the class; None if all do for which there are any.
    _native_devices: ClassVar[tuple[str, ...] | None] = None
    #: False if no native step takes a part of a weight that other processes have other parts of.
    _steps_shards_natively: ClassVar[bool] = True
    #: The error for a sparse gradient, with the name of the class; None where a step updates the
    #: rows of the gradient, if these options are 0.
    _against_sparse: ClassVar[str | None] = "{name} does not support sparse gradients"
    _zero_with_sparse: ClassVar[tuple[str, ...]] = ()
    #: True if the host has to know step counts, so that no device may tell that a step is skipped.
    _host_counts_steps: ClassVar[bool] = False
    #: False if all gradients have to be sparse.
    _takes_dense: ClassVar[bool] = True
    #: True if dictionaries may hold a step count for a whole group.
    _counts_in_groups: ClassVar[bool] = False

    #: False for an optimizer that tries a step of another one.
    _rehearses = True
    #: States of other libraries' dictionaries that no step reads: they are dropped.
    _unread_states: ClassVar[frozenset[str]] = frozenset()
    #: States that _in_form() reads, beyond those that a weight has.
    _foreign_states: ClassVar[frozenset[str]] = frozenset()

    #: What there is to know of each option of a group.
    _option_kinds: ClassVar[Options] = OF_TORCH
    #: Options that a group has only where they were set, with their values where it has not.
    _own_options: ClassVar[dict[str, Any]] = OWN
    #: Options that older dictionaries lack, with the values that mean what was done then.
    _later_options: ClassVar[dict[str, Any]] = named_values(OF_TORCH, "before")
    #: Options of how states are stored that the constructor does not take, with the values that
    #: groups without the options have.
    _storage_not_taken: ClassVar[dict[str, Any]] = {}
    #: Options of a group of all matrices, and of a group of all other weights; None where a class
    #: steps both alike.
    _by_dimensions: ClassVar[tuple[dict[str, Any], dict[str, Any]] | None] = None
    #: The argument of the constructor that chooses values of other options, if there is one.
    _preset: ClassVar[str | None] = None

    _name: str
    _groups: list[dict[str, Any]]
    _state: defaultdict[Tensor, dict[str, Any]]
    _store: StateStore
    _last_step: StepRecord | None
    _loading: dict[str, Any]
    #: Known of a step of composites that is under way: a second one at once is an error.
    _stepping: object
    #: The norm of the gradients at the last step that took it.
    _norm: float | Tensor | None = None

    _plans: dict[Place, Plan]
    _aside: PlansAside[Plan]
    #: Of composites, by the first weight.
    _memory: dict[Tensor, CheckedOperands | None]
    #: The state that the plans were made for.
    _seen: Snapshot | None
    _spread: SpreadWeights | None
    #: How the optimizer steps its groups: ``strategy_of()`` has the type.
    _group_strategy: object
    #: The step under way.
    _progress: Progress

    if TYPE_CHECKING:

        @property
        def _passed(self) -> dict[int, list[Any]]: ...
        def _new_store(self, by_weight: dict[Tensor, dict[str, Any]]) -> StateStore: ...

        def _in_own_words(self, group: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]: ...

        def _check(self, options: dict[str, Any]) -> None: ...

        def _check_kinds(self, group: Mapping[str, Any]) -> None: ...

        def _check_group(self, index: int, group: dict[str, Any]) -> None: ...

        def _rule_options(self, group: dict[str, Any]) -> dict[str, Any]: ...

        def _options(
            self, group: dict[str, Any], lr: float | Tensor | None = None
        ) -> tuple[Any, ...]: ...

        @property
        def _skipped(self) -> SkippedSteps: ...

        def _accessed_states(self, weights: list[Tensor]) -> list[Tensor]: ...

        def _look_for_holders(self) -> Literal[True]: ...

        def _rehearse(
            self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
        ) -> None: ...

        def _forget_plans(self) -> None: ...

        def _imperative_steps(
            self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
        ) -> None: ...

        def _formula(
            self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
        ) -> Tensor: ...

        def _imperative(
            self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
        ) -> None: ...

        def _update_all(
            self,
            max_norm: float | None,
            zero_grad: bool | Literal["none"],
            error_if_nonfinite: bool = False,
        ) -> Tensor | None: ...
