"""The states of weights: which there are, and where a step finds them fastest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor

from fusedstep._options.shared import own_option
from fusedstep._sharding import dtensor
from fusedstep._state import codes as _codes
from fusedstep._state.checks import check_number_of_state, check_state_dtype
from fusedstep._state.codes import absmax_of, is_codes
from fusedstep._state.counts import new_count, read_count, with_memory, write_count
from fusedstep._state.forked import in_pieces
from fusedstep._state.kinds import States
from fusedstep._state.slots import SIXTEEN_BITS, Slot, Slots, zeros
from fusedstep._state.storage import BESIDE, LOW, MASTER, has_master, start_beside, value_of, way_of

#: Steps without a read of the state after which a step looks whether anybody still holds it. That
#: takes as long as some steps: code that reads the state at every step is not to pay for it.
_STEPS_BEFORE_A_LOOK = 16


class StateStore:
    """The states of an optimizer's weights; it makes them.

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
                number = _new_number(weight, group, bool(state))
            self._counts[weight] = kept if _is_like(kept := state.get("step"), number) else number
        return self._counts[weight]

    def forget_counts(self, kept: set[int]) -> None:
        """Forgets the counts of weights that have no state and are not among these, by id()."""
        for p in [p for p in self._counts if id(p) not in kept and p not in self.by_weight]:
            del self._counts[p]

    @torch.inference_mode(False)  # tensors of which would be refused outside of it ever after
    @torch.no_grad()
    def create(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        native: bool,
        groups: list[dict[str, Any]],
    ) -> None:
        """Gives a state to those weights that have none, and the codes that options ask for.

        ``groups``: those of the optimizer.
        """
        check_state_dtype(own_option(group, "state_dtype"))
        if self.was_read:  # else nobody has given it states
            self.make_ordinary(weights)
        for p, change in [(p, self._conversion(group, p)) for p in weights]:
            self._change(p, change)
        slots_of = self._slots(group)
        lacking = [p for p in weights if not self._has_all(group, p, slots_of.names(p))]
        states = {p: self.by_weight.get(p, {}) for p in lacking}
        made = {p: self._new_numbers(group, p) for p in lacking}
        slots = {p: slots_of.of(p, states[p]) for p in lacking}
        for slot, name, tensor in zeros([(slots[p], states[p]) for p in lacking], native):
            state, new = states[slot.weight], made[slot.weight]
            if name not in state:
                new[name] = tensor
            elif has_master(group, slot.weight):  # which came later: no state is narrower than it
                new[name] = state[name].to(tensor.dtype)
        for p in lacking:
            for slot in slots[p]:
                if slot.name not in states[p]:
                    self._start(groups, group, slot, made[p])
        counts = {} if "step" in self._numbers else self._counts_beside(group, made, slots_of)
        in_states = [p for p in counts if self.keeps_count(group, p) or "step" in states[p]]
        for p in in_states:
            made[p]["step"] = counts.pop(p)
        for p, new in made.items():  # all at once: memory may run out before all are there
            self.by_weight[p].update(new)
        self._counts.update(counts)
        for p in in_states:  # a count ends with its state
            self._counts.pop(p, None)
        for p in weights:
            self._drop_beside(group, p)
            if "step" in (state := self.by_weight.get(p, {})):
                state["step"] = with_memory(state["step"])

    def create_later(
        self, group: dict[str, Any], weights: list[Tensor], groups: list[dict[str, Any]]
    ) -> None:
        """Makes the states that older dictionaries lack, when weights have got states of these."""
        later = [(name, record) for name, record in self._tensors if record.is_later]
        older = [
            p
            for p in weights
            if any(n not in self.by_weight[p] and each.is_of(group, p.shape) for n, each in later)
        ]
        if older:
            self.create(group, older, False, groups)

    def _new_numbers(self, group: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
        """The numbers that a weight's state lacks, by their names."""
        lacking = [n for n in self._numbers if n not in self.by_weight.get(weight, {})]
        return {n: _new_number(weight, group, self._states[n].first_value(group)) for n in lacking}

    def _start(
        self,
        groups: list[dict[str, Any]],
        group: dict[str, Any],
        slot: Slot,
        new: dict[str, Tensor],
    ) -> None:
        """Sets the elements of a new state, which are zero, to their first values."""
        record, weight = slot.record, slot.weight
        if record is None:
            self._start_beside(group, weight, new[slot.name])
        elif callable(record.start):
            numbers = record.start(groups, group, weight)
            for element, number in zip(dtensor.local(new[slot.name]), numbers, strict=True):
                element.fill_(number)
        elif value := record.first_value(group):
            slot.fill(new, complex(value, value) if weight.is_complex() else value)

    def _counts_beside(
        self, group: dict[str, Any], made: dict[Tensor, dict[str, Tensor]], slots: Slots
    ) -> dict[Tensor, Tensor]:
        """The counts of weights whose states are being made: moments and counts begin together.

        A count that dictionaries have goes on. Of others a copy knows nothing: these begin anew.
        """
        counts = {}
        for p in made:
            state, names = self.by_weight.get(p, {}), slots.shapes(p)
            goes_on = any(name in state for name in names) or not names
            if not (goes_on and "step" in state):
                counts[p] = _new_number(p, group, goes_on and bool(state))
        return counts

    def _start_beside(self, group: dict[str, Any], weight: Tensor, beside: Tensor) -> None:
        """Sets what a weight keeps beside it, so that its value is what it was in another way."""
        way, state = way_of(group, weight), self.by_weight.get(weight, {})
        before = [each for each, name in BESIDE.items() if name in state and each != way]
        if before and way is not None:
            value = value_of(before[0], weight, state)
            dtensor.local(beside).copy_(start_beside(way, weight, value))
        elif way == "float32":  # sparse gradients do not reach every row of it
            in_pieces(Tensor.copy_, beside, weight)

    def _drop_beside(self, group: dict[str, Any], weight: Tensor) -> None:
        """Removes what the weight kept beside it in another way: it is of no value any more."""
        way, state = way_of(group, weight), self.by_weight.get(weight, {})
        for each, name in BESIDE.items():
            if name in state and each != way and (way is not None or name != MASTER):
                del state[name]

    def restart(self, group: dict[str, Any], weight: Tensor) -> None:
        """Sets the numbers and states of a weight to their first values, in place.

        What it keeps beside it stays: that is of its value.
        """
        state = self.by_weight.get(weight, {})
        for name in state.keys() & {"step", *self._numbers}:
            record = self._states.get(name)
            state[name].fill_(record.first_value(group) if record else 0.0)
        for slot in self.slots_of(group, weight):
            if slot.record and slot.name in state:
                slot.fill(state, slot.record.first_value(group))

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

    @torch.no_grad()
    def make_ordinary(self, weights: list[Tensor]) -> None:
        """Copies states that were made in inference mode: torch changes none outside of it."""
        for p in weights:
            state = self.by_weight.get(p, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.is_inference():
                    state[name] = value.clone()

    def tidy(self, group: dict[str, Any]) -> None:
        """Makes tensors of numbers that come from elsewhere, and removes what is None."""
        for p in group["params"]:
            state = self.by_weight.get(p, {})
            for name in [name for name, value in state.items() if value is None]:
                del state[name]  # torch's SGD has had such: it is missing
            for name in (numbers := self._numbers_of(group, p)):
                if isinstance(state.get(name), (int, float)):
                    state[name] = _new_number(p, group, state[name])
            if "step" not in numbers:
                self._count_of(group, p)

    def keep_wide(self, group: dict[str, Any], weight: Tensor, saved: dict[str, Any]) -> None:
        """Takes from a saved state what has been cast to the weight's dtype, and numbers."""
        for name in dict.fromkeys((*self.names_of(group, weight), *BESIDE.values())):
            value, device = saved.get(name), weight.device
            if name == LOW and isinstance(value, Tensor):
                self.by_weight[weight][name] = value.to(device, torch.int16)
            elif is_codes(value):
                like, absmax = self.slot_of(group, weight, name).like, saved[absmax_of(name)]
                kind = _codes.kind_of(value, like)
                if kind == "int4":
                    value = _codes.in_form(value, like, 2)
                absmax = _codes.in_form(absmax, like, _codes.BLOCKS[kind])
                self.by_weight[weight][name] = value.to(device)
                self.by_weight[weight][absmax_of(name)] = absmax.to(device, torch.float32)
            elif isinstance(value, Tensor) and value.itemsize > 2 and weight.dtype in SIXTEEN_BITS:
                self.by_weight[weight][name] = value.to(device, torch.float32)
        for name in set(self._numbers) - {"step"}:  # which torch casts to any dtype
            if isinstance(saved.get(name), Tensor):
                number, new = saved[name].detach().reshape(()), _new_number(weight, group)
                is_kept = number.is_cpu and number.is_shared() and _is_like(number, new)
                self.by_weight[weight][name] = number if is_kept else new.copy_(number)

    @torch.no_grad()
    def place(self, group: dict[str, Any], weights: list[Tensor], *, from_dictionary: bool) -> None:
        """Moves states that come from elsewhere to where the native kernels find them fastest.

        States that other processes share stay where they are. ``from_dictionary``: whether the
        states are those of a caller's dictionary, which a step must not change on a device.
        """
        slots = self._slots(group)
        weights = [p for p in weights if self._is_whole(group, p, slots)]

        def stays(value: Tensor) -> bool:
            value = dtensor.local(value)
            return value.is_shared() and (value.is_cpu or not from_dictionary)

        for p in weights:
            state = self.by_weight[p]
            for name in self._numbers_of(group, p):
                number = state[name].reshape(())  # older ones have the shape [1]
                new = _new_number(p, group)
                if stays(number) and _is_like(number, new):
                    new = number
                elif name == "step" and number.is_cpu:
                    write_count(new, read_count(number))
                else:
                    new.copy_(number)
                state[name] = new
        states = [self.by_weight[p] for p in weights]
        found = zip(self.slots_of_each(group, weights), states, strict=True)
        moved = [
            (own, state)
            for own, state in found
            if not all(stays(state[name]) for slot in own for name in slot.names_in(state))
        ]
        for slot, name, tensor in zeros(moved, native=True):
            old = self.by_weight[slot.weight][name]
            if not stays(old):
                self.by_weight[slot.weight][name] = in_pieces(Tensor.copy_, tensor, old)

    @torch.no_grad()
    def convert(self, group: dict[str, Any], weight: Tensor) -> None:
        """Makes a state's numbers codes, or codes numbers, as the options of its group ask."""
        self._change(weight, self._conversion(group, weight))

    def _change(self, weight: Tensor, change: dict[str, Tensor | None]) -> None:
        """Replaces tensors of a weight's state, or removes them for None."""
        for name, value in change.items():
            if value is None:
                del self.by_weight[weight][name]
            else:
                self.by_weight[weight][name] = value

    def _conversion(self, group: dict[str, Any], weight: Tensor) -> dict[str, Tensor | None]:
        """What makes a state's numbers codes, or codes numbers."""
        state, new = self.by_weight.get(weight, {}), dict[str, Tensor | None]()
        asked = own_option(group, "state_dtype")
        if not (isinstance(asked, str) or any(map(is_codes, state.values()))):
            return new
        for slot in self.slots_of(group, weight):
            name, kind, like = slot.name, slot.codes, slot.like
            if not slot.takes_codes or name not in state or slot.kind_in(state) == kind:
                continue
            if not slot.fits(state):
                continue  # an error will say so
            numbers = slot.decode(state) if is_codes(state[name]) else state[name]
            if kind is not None:
                found, absmax = _codes.encode(numbers, kind, slot.is_signed)
                new[name] = _codes.spread_codes(like, found, kind)
                new[absmax_of(name)] = _codes.spread_absmax(like, absmax, kind)
            else:
                is_wide = has_master(group, weight) or asked is not None
                is_wide = is_wide or slot.own_shape is not None
                new[name] = numbers if is_wide else numbers.to(weight.dtype)
                new[absmax_of(name)] = None
        return new

    def _is_whole(self, group: dict[str, Any], p: Tensor, slots: Slots) -> bool:
        """Returns whether a weight has all of its state, in the right shapes."""
        state = self.by_weight.get(p, {})
        return self._has_all(group, p, slots.names(p)) and all(
            is_codes(state[slot.name]) or state[slot.name].shape == slot.shape
            for slot in slots.of(p, state)
        )

    def _has_all(self, group: dict[str, Any], p: Tensor, names: tuple[str, ...]) -> bool:
        state = self.by_weight.get(p, {})
        absmax = [absmax_of(name) for name in names if is_codes(state.get(name))]
        if not state.keys() >= {*self._numbers_of(group, p), *names, *absmax}:
            return False
        if p.dtype not in SIXTEEN_BITS:
            return True
        # Without anything beside the weight: that its value is wide shows in its states.
        narrow = any(state[name].dtype in SIXTEEN_BITS for name in names)
        return not (narrow and way_of(group, p) == "stochastic")


def _is_like(value: Any, number: Tensor) -> TypeGuard[Tensor]:
    """Returns whether a value is a number as _new_number() makes them."""
    return isinstance(value, Tensor) and (value.dtype, value.shape, value.device) == (
        number.dtype,
        number.shape,
        number.device,
    )


def _new_number(weight: Tensor, group: dict[str, Any], value: float = 0.0) -> Tensor:
    """A number beside a weight, on the host unless a device graph counts the steps."""
    device = weight.device if group.get("capturable") else "cpu"
    return new_count(value, device)
