"""The states of weights: which there are, and what a step takes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusedstep._sharding import dtensor
from fusedstep._state import codes as _codes
from fusedstep._state.checks import check_number_of_state
from fusedstep._state.codes import absmax_of, is_codes
from fusedstep._state.counts import is_like, new_number, read_count
from fusedstep._state.kinds import States
from fusedstep._state.slots import Slot, Slots
from fusedstep._state.storage import BESIDE, SIXTEEN_BITS, way_of

#: Steps without a read of the state after which a step looks whether anybody still holds it. That
#: takes as long as some steps: code that reads the state at every step is not to pay for it.
_STEPS_BEFORE_A_LOOK = 16


class WeightStates:
    """The states of an optimizer's weights.

    ``by_weight``: the optimizer's ``state``. ``optimizer``: its class, which says what a state
    consists of; a wrapper of the optimizer may have another class. ``signed``: names of the states
    that may be negative.
    """

    def __init__(
        self,
        by_weight: dict[Tensor, dict[str, Any]],
        optimizer: type[Any],
        signed: frozenset[str],
    ) -> None:
        self.by_weight = by_weight
        self.optimizer = optimizer
        self._states: States = optimizer._state_kinds
        self._count = self._states.get("step")
        self._tensors = [each for each in self._states.items() if not each[1].is_number]
        self._signed = signed
        self._numbers = optimizer._numbers
        # Those that a native step takes, its count first.
        self.numbers = self._numbers or ("step",)
        self._counts: dict[Tensor, Tensor] = {}  # of steps, where no state is to have them
        self.was_read = False
        """True if code outside of the optimizer may hold the states, or part of them."""

    def note_read(self) -> None:
        """Notes that code outside of the optimizer has been given the states."""
        self.was_read = True
        self._steps_before_a_look = self._steps_between_looks = _STEPS_BEFORE_A_LOOK

    def is_look_due(self) -> bool:
        """Counts a step since the read; returns whether it is to look for holders.

        The next look comes after twice as many steps.
        """
        self._steps_before_a_look -= 1
        if self._steps_before_a_look > 0:
            return False
        self._steps_between_looks *= 2
        self._steps_before_a_look = self._steps_between_looks
        return True

    def names_of(self, group: dict[str, Any], weight: Tensor) -> tuple[str, ...]:
        """Names of the states of a weight that are no numbers, in the order of a plan."""
        shape, way = weight.shape, way_of(group, weight)
        names = [name for name, record in self._tensors if record.is_of(group, shape)]
        return (*names, BESIDE[way]) if way in BESIDE else tuple(names)

    def _slots(self, group: dict[str, Any]) -> Slots:
        return Slots(self._states, self._signed, group)

    def slots_of(self, group: dict[str, Any], weight: Tensor) -> list[Slot]:
        """The slots of a weight's tensors, in the same order."""
        return next(self.slots_of_each(group, [weight]))

    def slots_of_each(self, group: dict[str, Any], weights: list[Tensor]) -> Iterator[list[Slot]]:
        """The slots of each of the weights of a group."""
        slots = self._slots(group)
        return (slots.of(p, self.by_weight.get(p, {})) for p in weights)

    def slot_of(self, group: dict[str, Any], weight: Tensor, name: str) -> Slot:
        """The slot of a name, which the options of the group may no longer ask for."""
        return self._slots(group).named(weight, self.by_weight.get(weight, {}), name)

    def has_wide(self, group: dict[str, Any], weight: Tensor) -> bool:
        """Returns whether a 16-bit weight's states are float32: by its own, else by options."""
        if weight.dtype not in SIXTEEN_BITS:
            return False
        return self._slots(group).has_wide(weight, self.by_weight.get(weight, {}))

    def kind_of(self, group: dict[str, Any], weight: Tensor) -> str | None:
        """The kind of codes that a weight's states are in, by its own, else by options."""
        state, shape = self.by_weight.get(weight, {}), weight.shape
        coded = (n for n, each in self._tensors if each.takes_codes and each.is_of(group, shape))
        name = next(coded, None)
        if name is None or (name in state and not is_codes(state[name])):
            return None
        return self.slot_of(group, weight, name).kind_in(state)

    @staticmethod
    def slots(
        names: tuple[str, ...], weights: list[Tensor], states: list[dict[str, Tensor]]
    ) -> list[Tensor]:
        """States as a plan takes them: slot by slot, and then the absmax of those in codes."""
        slots, absmax = [], []
        for name in names:
            for weight, state in zip(weights, states, strict=True):
                if is_codes(state[name]):
                    codes = _codes.parts(state[name], state[absmax_of(name)], weight)
                    slots.append(codes[0])
                    absmax.append(codes[1])
                else:
                    slots.append(dtensor.local(state[name]))
        return slots + absmax

    def decoded(
        self, group: dict[str, Any], weight: Tensor, state: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """A state with numbers in place of codes."""
        numbers = dict(state)
        for name in [name for name, value in state.items() if is_codes(value)]:
            numbers[name] = self.slot_of(group, weight, name).decode(state)
            del numbers[absmax_of(name)]
        return numbers

    def encode(
        self,
        group: dict[str, Any],
        weight: Tensor,
        state: dict[str, Tensor],
        numbers: dict[str, Tensor],
    ) -> None:
        """Puts the numbers after a step into those parts of a state that are in codes."""
        coded = [name for name, value in state.items() if is_codes(value)]
        by_step = coded and self._rounds_by_step(group, weight)
        step = int(read_count(state["step"])) if by_step else 0
        for name in coded:
            self.slot_of(group, weight, name).encode(state, numbers[name], step)

    def _rounds_by_step(self, group: dict[str, Any], weight: Tensor) -> bool:
        """Returns whether a step rounds codes of a weight by the number of the step.

        Such a weight has a count of its steps and a state that is never negative.
        """
        signed = [slot.is_signed for slot in self.slots_of(group, weight) if slot.takes_codes]
        return self._counts_steps(group, weight) and not all(signed)

    def _counts_steps(self, group: dict[str, Any], weight: Tensor) -> bool:
        """Returns whether the optimizer counts the steps of a weight in its state."""
        return self._count is not None and self._count.is_of(group, weight.shape)

    def with_count(self, group: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
        """The state of a weight, and the count of its steps where that is not part of it."""
        if self.keeps_count(group, weight):
            return self.by_weight[weight]
        # A graph is compiled again when what it reads changes: it reads no state that it needs not.
        state = self.by_weight[weight] if self.names_of(group, weight) else {}
        return state | {"step": self._count_of(group, weight)}

    def plain_parts(self, group: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
        """The numbers of a weight so far, and states of its shape that are not in codes."""
        state = self.by_weight.get(weight, {})
        found = {name: state[name] for name in self.numbers if name in state}
        if weight in self._counts and self._counts[weight].item():
            found.setdefault("step", self._counts[weight])
        for name in self.names_of(group, weight):
            if name in state and state[name].shape == weight.shape and not is_codes(state[name]):
                found[name] = state[name]
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def keeps_count(self, group: dict[str, Any], weight: Tensor) -> bool:
        """Returns whether the count is part of the state: random numbers follow from it."""
        return self._counts_steps(group, weight) or way_of(group, weight) == "stochastic"

    def _numbers_of(self, group: dict[str, Any], weight: Tensor) -> tuple[str, ...]:
        """The names of the numbers that are part of a weight's state."""
        if "step" in self._numbers or not self.keeps_count(group, weight):
            return self._numbers
        return (*self._numbers, "step")

    def _count_of(self, group: dict[str, Any], weight: Tensor) -> Tensor:
        """The count of a weight whose state needs none: it starts at 0, beside states at 1.

        A state that had a count before its options changed has it still.
        """
        if weight not in self._counts:
            state = self.by_weight.get(weight, {})
            with torch.inference_mode(False):  # steps outside of it go on with the count
                number = new_number(weight, group, bool(state))
            self._counts[weight] = kept if is_like(kept := state.get("step"), number) else number
        return self._counts[weight]

    def forget_counts(self, kept: set[int]) -> None:
        """Forgets the counts of weights that have no state and are not among these, by id()."""
        for p in [p for p in self._counts if id(p) not in kept and p not in self.by_weight]:
            del self._counts[p]

    def operands(self, group: dict[str, Any], weights: list[Tensor]) -> list[dict[str, Tensor]]:
        """The states of weights as a step takes them: with counts, and all numbers as tensors."""
        states = [self.with_count(group, p) for p in weights]
        for index, state in enumerate(states):
            for name in self.numbers:
                check_number_of_state(index, name, state[name], weights[index])
        return states

    def check(
        self, group: dict[str, Any], weights: list[Tensor], *, any_dtype: bool = False
    ) -> None:
        """Raises if a state is not as its weight needs it: torch operations would stop half way.

        ``any_dtype``: these operations take numbers of every dtype.
        """
        self.check_are_tensors(weights)
        for index, slots in enumerate(self.slots_of_each(group, weights)):
            p, state = weights[index], self.by_weight[weights[index]]
            for slot in slots:
                if not slot.record:
                    continue
                name, found = slot.name, state[slot.name]
                if is_codes(found):
                    absmax = state.get(absmax_of(name))
                    try:
                        _codes.check_codes(f"the state {name}", found, absmax, slot.like)
                    except ValueError as error:
                        raise RuntimeError(f"tensor {index} of the list: {error}") from None
                    continue
                narrow = p.dtype in SIXTEEN_BITS
                dtype = torch.float32 if narrow and slot.own_shape is not None else p.dtype
                dtypes = (dtype, torch.float32) if narrow else (dtype,)
                if found.shape != slot.shape or not (any_dtype or found.dtype in dtypes):
                    raise RuntimeError(
                        f"tensor {index} of the list: the state {name} is {found.dtype} of the "
                        f"shape {list(found.shape)}, but has to be {dtype} of {list(slot.shape)}"
                    )

    def check_are_tensors(self, weights: list[Tensor]) -> None:
        """Raises a state of a weight that is no tensor; what else scripts keep there may be any."""
        own = {*self.optimizer._states, *BESIDE.values()}
        for index, p in enumerate(weights if self.was_read else ()):
            for name, value in self.by_weight.get(p, {}).items():
                if not isinstance(value, Tensor) and name in own:
                    raise RuntimeError(
                        f"tensor {index} of the list: the state {name!r} is a "
                        f"{torch.typename(value)}, not a tensor"
                    )

    def count_together(
        self, weights: list[Tensor], operands: list[dict[str, Tensor]], may_be_skipped: bool
    ) -> None:
        """Moves the numbers of weights on a device there if the host cannot keep all."""
        numbers = [state[name] for state in operands for name in self.numbers]
        if weights[0].is_cpu or not (may_be_skipped or any(not each.is_cpu for each in numbers)):
            return
        for p, state in zip(weights, operands, strict=True):
            state |= {name: state[name].to(p.device) for name in self.numbers}
            if p in self._counts:
                self._counts[p] = state["step"]
