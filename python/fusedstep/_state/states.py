"""What makes the states of weights: those that are missing, or come from elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedstep._options.shared import own_option
from fusedstep._sharding import dtensor
from fusedstep._state import codes as _codes
from fusedstep._state.checks import check_state_dtype
from fusedstep._state.codes import absmax_of, is_codes
from fusedstep._state.counts import is_like, new_number, read_count, with_memory, write_count
from fusedstep._state.forked import in_pieces
from fusedstep._state.slots import Slot, Slots, zeros
from fusedstep._state.storage import (
    BESIDE,
    LOW,
    MASTER,
    SIXTEEN_BITS,
    has_master,
    start_beside,
    value_of,
    way_of,
)
from fusedstep._state.weight_states import WeightStates


class StateStore(WeightStates):
    """The states of an optimizer's weights; it makes them."""

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
        self.convert(group, weights)
        group_slots = self._slots(group)
        lacking = [p for p in weights if not self._has_all(group, p)]
        states = {p: self.by_weight.get(p, {}) for p in lacking}
        made = {p: self._new_numbers(group, p) for p in lacking}
        slots = {p: group_slots.of(p, states[p]) for p in lacking}
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
        counts = {} if "step" in self._numbers else self._counts_beside(group, made, group_slots)
        in_states = [p for p in counts if self.keeps_count(group, p)]
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
        return {n: new_number(weight, group, self._states[n].first_value(group)) for n in lacking}

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
        """The counts of weights whose states are being made: moments and counts begin together."""
        counts = {}
        for p in made:
            state, names = self.by_weight.get(p, {}), slots.shapes(p)
            has_moments = any(name in state for name in names)
            goes_on = self.keeps_count(group, p) and (has_moments or not names)
            if not (goes_on and "step" in state):
                counts[p] = self._count_of(group, p) if goes_on else new_number(p, group)
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
                    state[name] = new_number(p, group, state[name])
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
                number, new = saved[name].detach().reshape(()), new_number(weight, group)
                is_kept = number.is_cpu and number.is_shared() and is_like(number, new)
                self.by_weight[weight][name] = number if is_kept else new.copy_(number)

    @torch.no_grad()
    def place(self, group: dict[str, Any], weights: list[Tensor], *, from_dictionary: bool) -> None:
        """Moves states that come from elsewhere to where the native kernels find them fastest.

        States that other processes share stay where they are. ``from_dictionary``: whether the
        states are those of a caller's dictionary, which a step must not change on a device.
        """
        group_slots = self._slots(group)
        weights = [p for p in weights if self._has_all(group, p)]
        slots_of = {p: group_slots.of(p, self.by_weight[p]) for p in weights}
        weights = [p for p in weights if _have_shapes(slots_of[p], self.by_weight[p])]

        def stays(value: Tensor) -> bool:
            value = dtensor.local(value)
            return value.is_shared() and (value.is_cpu or not from_dictionary)

        for p in weights:
            state = self.by_weight[p]
            for name in self._numbers_of(group, p):
                number = state[name].reshape(())  # older ones have the shape [1]
                new = new_number(p, group)
                if stays(number) and is_like(number, new):
                    new = number
                elif name == "step" and number.is_cpu:
                    write_count(new, read_count(number))
                else:
                    new.copy_(number)
                state[name] = new
        found = [(slots_of[p], self.by_weight[p]) for p in weights]
        moved = [
            (slots, state)
            for slots, state in found
            if not all(stays(state[name]) for slot in slots for name in slot.names_in(state))
        ]
        for slot, name, tensor in zeros(moved, native=True):
            old = self.by_weight[slot.weight][name]
            if not stays(old):
                self.by_weight[slot.weight][name] = in_pieces(Tensor.copy_, tensor, old)

    @torch.no_grad()
    def convert(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        """Makes numbers of states codes, or codes numbers, as the options of their group ask."""
        for p, new in [(p, self._converted(group, p)) for p in weights]:
            for name, value in new.items():
                if value is None:
                    del self.by_weight[p][name]
                else:
                    self.by_weight[p][name] = value

    def _converted(self, group: dict[str, Any], weight: Tensor) -> dict[str, Tensor | None]:
        """The tensors that take the place of those in a state; None for an absmax that goes."""
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
                is_wide = self._slots(group).has_wide(weight, {})
                new[name] = numbers if is_wide else numbers.to(weight.dtype)
                new[absmax_of(name)] = None
        return new

    def _has_all(self, group: dict[str, Any], p: Tensor) -> bool:
        """Returns whether a weight has all of its state, which need not be of the right shapes."""
        state, names = self.by_weight.get(p, {}), self.names_of(group, p)
        absmax = [absmax_of(name) for name in names if is_codes(state.get(name))]
        if not state.keys() >= {*self._numbers_of(group, p), *names, *absmax}:
            return False
        if p.dtype not in SIXTEEN_BITS:
            return True
        # Without anything beside the weight: that its value is wide shows in its states.
        narrow = any(state[name].dtype in SIXTEEN_BITS for name in names)
        return not (narrow and way_of(group, p) == "stochastic")


def _have_shapes(slots: list[Slot], state: dict[str, Any]) -> bool:
    """Returns whether what a state has in its slots is of their shapes, or in codes."""
    return all(is_codes(state[slot.name]) or state[slot.name].shape == slot.shape for slot in slots)
