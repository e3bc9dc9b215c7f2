"""What the parts of an optimizer know of the whole: names and types, and no code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from torch import Tensor
from torch.optim import Optimizer

from fusedstep._options.kinds import Options
from fusedstep._state.kinds import States
from fusedstep._state.states import StateStore
from fusedstep._step.factors import Factors
from fusedstep._step.plan import Work


class PartRecord(Protocol):
    """What the last step did for a group."""

    states: list[Tensor] | None


class StepRecord(Protocol):
    """A record of the last step, for ``_bind.repeat`` to compare with."""

    parts: tuple[PartRecord, ...]

    def _replace(self, *, empty: tuple[dict[int, Any], ...]) -> StepRecord: ...


class Owner(Optimizer):
    """An optimizer of this package, as modules see it that the module of its class imports.

    The base of all optimizers, and these, say what the attributes are. A type checker compares.
    """

    _rule: ClassVar[str]
    _state_kinds: ClassVar[States]
    _states: ClassVar[tuple[str, ...]]
    _numbers: ClassVar[tuple[str, ...]]
    _foreach_means_unfused: ClassVar[bool]
    _composite: ClassVar[bool]
    _elementwise: ClassVar[bool]
    _plan_takes_norm: ClassVar[bool]
    _queues_factors: ClassVar[bool]
    _native_devices: ClassVar[tuple[str, ...] | None]
    _steps_shards_natively: ClassVar[bool]
    _allocates_first: ClassVar[bool]
    _counts_in_groups: ClassVar[bool]
    _learns_in_int4: ClassVar[bool]
    _foreign_states: ClassVar[frozenset[str]]
    _option_kinds: ClassVar[Options]
    _own_options: ClassVar[dict[str, Any]]
    _preset: ClassVar[str | None]
    _unread_states: ClassVar[frozenset[str]]
    _later_options: ClassVar[dict[str, Any]]

    _name: str
    _groups: list[dict[str, Any]]
    _state: defaultdict[Tensor, dict[str, Any]]
    _store: StateStore
    _last_step: StepRecord | None
    _loading: dict[str, Any]

    if TYPE_CHECKING:

        @property
        def _passed(self) -> dict[int, list[Any]]: ...
        def _new_store(self, by_weight: dict[Tensor, dict[str, Any]]) -> StateStore: ...

        def _check(self, options: dict[str, Any]) -> None: ...

        def _check_kinds(self, group: Mapping[str, Any]) -> None: ...

        def _check_group(self, index: int, group: dict[str, Any]) -> None: ...

        def _check_states(self, group: dict[str, Any], weights: list[Tensor]) -> None: ...

        def _sparse_error(self, group: dict[str, Any]) -> str | None: ...

        def _rule_options(self, group: dict[str, Any]) -> dict[str, Any]: ...

        def _options(
            self, group: dict[str, Any], lr: float | Tensor | None = None
        ) -> tuple[Any, ...]: ...

        def _checked_options(self, item: Work, factors: Factors) -> tuple[float, ...]: ...

        def _has_passed(self, group: dict[str, Any]) -> bool: ...

        def _wants_native(self, group: dict[str, Any]) -> bool: ...

        def _is_native(
            self, group: dict[str, Any], weights: list[Tensor], grads: Sequence[Tensor] = ()
        ) -> bool: ...

        def _why_not_native(
            self, weights: list[Tensor], grads: Iterable[Tensor] = ()
        ) -> str | None: ...

        def _is_composite(self, group: dict[str, Any]) -> bool: ...

        def _skips_nonfinite(self) -> bool: ...

        def _needs_whole_norm(self) -> str | None: ...

        def _launches(
            self, index: int, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
        ) -> Iterable[tuple[list[Tensor], list[Tensor]]]: ...

        def _accessed_states(self, weights: list[Tensor]) -> list[Tensor]: ...

        def _look_for_holders(self) -> Literal[True]: ...

        def _rehearse(
            self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
        ) -> None: ...

        def _formula(
            self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
        ) -> Tensor: ...

        def _imperative(
            self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
        ) -> None: ...

        def _begin_step(self) -> None: ...

        def _update_all(
            self,
            max_norm: float | None,
            zero_grad: bool | Literal["none"],
            error_if_nonfinite: bool = False,
        ) -> Tensor | None: ...

        def _update_groups(
            self, work: list[Work], factors: Factors, zero_grad: bool | Literal["none"]
        ) -> list[tuple[Tensor, Tensor]]: ...
