"""The states of weights: which there are, and where a step finds them fastest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle, product
from typing import Any, TypeGuard

import torch
from torch import Tensor

from fusedstep._options.shared import own_option
from fusedstep._sharding import dtensor
from fusedstep._state import codes as _codes
from fusedstep._state.checks import check_state_dtype
from fusedstep._state.codes import absmax_of, is_codes
from fusedstep._state.counts import new_count, read_count, with_memory, write_count
from fusedstep._state.forked import in_pieces
from fusedstep._state.storage import BESIDE, LOW, MASTER, has_master, start_beside, value_of, way_of

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)

#: Steps without a read of the state after which a step looks whether anybody still holds it. That
#: takes as long as some steps: code that reads the state at every step is not to pay for it.
_STEPS_BEFORE_A_LOOK = 16

#: A state of a weight, what it is to have, and the names of what it has no more.
_Change = tuple[dict[str, Any], dict[str, Tensor], list[str]]


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
        self._state_kinds = optimizer._state_kinds
        self._names_in_group = optimizer._state_names
        self._shapes, self._placements = optimizer._state_shapes, optimizer._state_placements
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
        names, way = self._names(group, weight), way_of(group, weight)
        return (*names, BESIDE[way]) if way in BESIDE else names

    def _names(self, group: dict[str, Any], weight: Tensor) -> tuple[str, ...]:
        """Names of these states but for what a weight keeps beside it."""
        shapes = self._shapes(group, weight)
        return self._names_in_group(group, weight) if shapes is None else tuple(shapes)

    def has_wide(self, group: dict[str, Any], weight: Tensor) -> bool:
        """Returns whether a 16-bit weight's states are float32: by its own, else by options."""
        if weight.dtype not in _SIXTEEN_BITS or has_master(group, weight):
            return weight.dtype in _SIXTEEN_BITS
        state = self.by_weight.get(weight, {})
        if self._shapes(group, weight) is not None:
            return True
        dtypes = [state[name].dtype for name in self._names(group, weight) if name in state]
        if dtypes:
            return dtypes[0] in (torch.float32, *_codes.CODES)
        return own_option(group, "state_dtype") is not None

    def kind_of(self, group: dict[str, Any], weight: Tensor) -> str | None:
        """The kind of codes that a weight's states are in, by its own, else by options."""
        return next(iter(self._kinds(group, weight).values()), None)

    def _kinds(self, group: dict[str, Any], weight: Tensor) -> dict[str, str | None]:
        """The kind of codes that each state is in which may be in codes, by its name."""
        state, found = self.by_weight.get(weight, {}), {}
        for name in self._names_in_group(group, weight):
            if not self._state_kinds[name].takes_codes:
                continue
            like = self._like(group, weight, name)
            if name not in state:
                found[name] = self._asked_kind(group, weight, name)
            else:
                codes = state[name]
                found[name] = _codes.kind_of(codes, like) if is_codes(codes) else None
        return found

    def _asked_kind(self, group: dict[str, Any], weight: Tensor, name: str) -> str | None:
        """The kind of codes that options ask for; states of shards with other shapes have none."""
        if self._shapes(group, weight) is not None and dtensor.is_dtensor(weight):
            return None
        return _codes.asked_kind(group, self._like(group, weight, name))

    def _like(self, group: dict[str, Any], weight: Tensor, name: str) -> Tensor:
        """The weight, or a tensor of the shape of a state that has another one."""
        return _codes.of_shape(weight, (self._shapes(group, weight) or {}).get(name))

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
        if not any(map(is_codes, state.values())):
            return dict(state)
        coded = {name for name, value in state.items() if is_codes(value)}
        left_out = set(map(absmax_of, coded))
        return {
            name: self._decode(name, self._like(group, weight, name), state)
            if name in coded
            else value
            for name, value in state.items()
            if name not in left_out
        }

    def _decode(self, name: str, like: Tensor, state: dict[str, Tensor]) -> Tensor:
        return _codes.decode(state[name], state[absmax_of(name)], like, name in self._signed)

    def encode(
        self,
        group: dict[str, Any],
        weight: Tensor,
        state: dict[str, Tensor],
        numbers: dict[str, Tensor],
    ) -> None:
        """Puts the numbers after a step into those parts of a state that are in codes."""
        coded = [name for name, value in state.items() if is_codes(value)]
        step = (
            int(read_count(state["step"])) if coded and self._rounds_by_step(group, weight) else 0
        )
        for name in coded:
            like = self._like(group, weight, name)
            kind = _codes.kind_of(state[name], like)
            kept = _codes.parts(state[name], state[absmax_of(name)], like)
            found = _codes.encode(numbers[name], kind, name in self._signed, step)
            for part, new in zip(kept, found, strict=True):
                part.copy_(new)

    def _rounds_by_step(self, group: dict[str, Any], weight: Tensor) -> bool:
        """Returns whether a step rounds codes of a weight by the number of the step.

        Such a weight has a count of its steps and a state that is never negative.
        """
        return self._counts_steps(group, weight) and not self._signed.issuperset(
            self._names_in_group(group, weight)
        )

    def _counts_steps(self, group: dict[str, Any], weight: Tensor) -> bool:
        """Returns whether the optimizer counts the steps of a weight in its state."""
        count = self._state_kinds.get("step")
        return count is not None and count.is_of(group, weight.shape)

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
        for change in [self._conversion(group, p) for p in weights]:
            _replace(*change)
        all_weights = weights
        weights = [p for p in weights if not self._has_all(group, p)]
        made: dict[Tensor, dict[str, Tensor]] = {p: {} for p in weights}
        for p, name, tensor in self._zeros(group, weights, native):
            state, new = self.by_weight.get(p, {}), made[p]
            for number in self._numbers:
                if not (number in state or number in new):
                    new[number] = _new_number(p, group, self._first_value(group, number))
            if name not in state:
                if name in BESIDE.values():
                    self._start_beside(group, p, tensor)
                elif numbers := self._first_values(groups, group, p, name):
                    for element, number in zip(dtensor.local(tensor), numbers, strict=True):
                        element.fill_(number)
                elif value := self._first_value(group, _state_of(name)):
                    self._fill(tensor, name, complex(value, value) if p.is_complex() else value, p)
                new[name] = tensor
            elif has_master(group, p):  # which came later: no state is narrower than it
                new[name] = state[name].to(tensor.dtype)
        counts = {} if "step" in self._numbers else self._counts_beside(group, made)
        in_states = [p for p in counts if self.keeps_count(group, p)]
        for p in in_states:
            made[p]["step"] = counts.pop(p)
        for p, new in made.items():  # all at once: memory may run out before all are there
            self.by_weight[p].update(new)
        self._counts.update(counts)
        for p in in_states:  # a count ends with its state
            self._counts.pop(p, None)
        for p in all_weights:
            self._drop_beside(group, p)
            if "step" in (state := self.by_weight.get(p, {})):
                state["step"] = with_memory(state["step"])

    def _counts_beside(
        self, group: dict[str, Any], made: dict[Tensor, dict[str, Tensor]]
    ) -> dict[Tensor, Tensor]:
        """The counts of weights whose states are being made: moments and counts begin together."""
        counts = {}
        for p in made:
            state, names = self.by_weight.get(p, {}), self._names(group, p)
            has_moments = any(name in state for name in names)
            goes_on = self.keeps_count(group, p) and (has_moments or not names)
            if not (goes_on and "step" in state):
                counts[p] = self._count_of(group, p) if goes_on else _new_number(p, group)
        return counts

    def _first_value(self, group: dict[str, Any], name: str) -> float:
        """Returns the value of a number, or of every element of a state, before the first step."""
        kind = self._state_kinds.get(name)
        return kind.first_value(group) if kind else 0.0

    def _first_values(
        self, groups: list[dict[str, Any]], group: dict[str, Any], weight: Tensor, name: str
    ) -> Sequence[float]:
        """Returns the values of the elements of a state, if these are different."""
        kind = self._state_kinds.get(name)
        return kind.start(groups, group, weight) if kind and callable(kind.start) else ()

    def create_later(
        self, group: dict[str, Any], weights: list[Tensor], groups: list[dict[str, Any]]
    ) -> None:
        """Makes the states that older dictionaries lack, when weights have got states of these."""
        later = {name: kind for name, kind in self._state_kinds.items() if kind.is_later}
        older = [
            p
            for p in weights
            if any(
                name not in self.by_weight[p] and kind.is_of(group, p.shape)
                for name, kind in later.items()
            )
        ]
        if older:
            self.create(group, older, False, groups)

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

    def _fill(self, tensor: Tensor, name: str, value: complex, weight: Tensor) -> None:
        """Sets all elements of a state, or its codes, or their absmax, to a first value."""
        of = _state_of(name)
        if of != name or is_codes(tensor):
            kind = _codes.kind_of(tensor, weight)  # any kind has the same absmax
            two = torch.full([2], value, dtype=torch.float32, device="cpu")
            codes, absmax = _codes.encode(two, kind, of in self._signed)
            tensor = dtensor.local(tensor)
            tensor = tensor.view(torch.uint8) if is_codes(tensor) else tensor
            value = (absmax if of != name else codes.view(torch.uint8))[0].item()
        in_pieces(lambda part: part.fill_(value), tensor)

    def restart(self, group: dict[str, Any], weight: Tensor) -> None:
        """Sets the numbers and states of a weight to their first values, in place.

        What it keeps beside it stays: that is of its value.
        """
        state = self.by_weight.get(weight, {})
        for number in state.keys() & {"step", *self._numbers}:
            state[number].fill_(self._first_value(group, number))
        names = self._names(group, weight)
        for name in (*names, *map(absmax_of, names)):
            if name in state:
                self._fill(state[name], name, self._first_value(group, _state_of(name)), weight)

    def operands(self, group: dict[str, Any], weights: list[Tensor]) -> list[dict[str, Tensor]]:
        """The states of weights as a step takes them: with counts, and all numbers as tensors."""
        states = [self.with_count(group, p) for p in weights]
        if not all(isinstance(state[name], Tensor) for state in states for name in self.numbers):
            raise RuntimeError(
                "API has changed, `state_steps` argument must contain a list of singleton tensors"
            )
        return states

    def check(
        self, group: dict[str, Any], weights: list[Tensor], *, any_dtype: bool = False
    ) -> None:
        """Raises if a state is not as its weight needs it: torch operations would stop half way.

        ``any_dtype``: these operations take numbers of every dtype.
        """
        for index, p in enumerate(weights):
            state, shapes = self.by_weight[p], self._shapes(group, p)
            for name in self._names(group, p):
                found = state[name]
                if is_codes(found):
                    like, absmax = self._like(group, p, name), state.get(absmax_of(name))
                    try:
                        _codes.check_codes(f"the state {name}", found, absmax, like)
                    except ValueError as error:
                        raise RuntimeError(f"tensor {index} of the list: {error}") from None
                    continue
                shape = p.shape if shapes is None else shapes[name]
                narrow = p.dtype in _SIXTEEN_BITS
                dtypes = [torch.float32 if narrow and shapes is not None else p.dtype]
                dtypes += [torch.float32] if narrow else []
                if found.shape != shape or not (any_dtype or found.dtype in dtypes):
                    raise RuntimeError(
                        f"tensor {index} of the list: the state {name} is {found.dtype} of the "
                        f"shape {list(found.shape)}, but has to be {dtypes[0]} of {list(shape)}"
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
            for name in self._numbers:
                if isinstance(state.get(name), (int, float)):
                    state[name] = _new_number(p, group, state[name])
            if "step" not in self._numbers:
                if not self.keeps_count(group, p):
                    self._count_of(group, p)
                elif isinstance(state.get("step"), (int, float)):
                    state["step"] = _new_number(p, group, state["step"])

    def keep_wide(self, group: dict[str, Any], weight: Tensor, saved: dict[str, Any]) -> None:
        """Takes from a saved state what has been cast to the weight's dtype, and numbers."""
        for name in dict.fromkeys((*self.names_of(group, weight), *BESIDE.values())):
            value, device = saved.get(name), weight.device
            if name == LOW and isinstance(value, Tensor):
                self.by_weight[weight][name] = value.to(device, torch.int16)
            elif is_codes(value):
                like, absmax = self._like(group, weight, name), saved[absmax_of(name)]
                kind = _codes.kind_of(value, like)
                if kind == "int4":
                    value = _codes.in_form(value, like, 2)
                absmax = _codes.in_form(absmax, like, _codes.BLOCKS[kind])
                self.by_weight[weight][name] = value.to(device)
                self.by_weight[weight][absmax_of(name)] = absmax.to(device, torch.float32)
            elif isinstance(value, Tensor) and value.itemsize > 2 and weight.dtype in _SIXTEEN_BITS:
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
        weights = [p for p in weights if self._has_all(group, p) and self._has_shapes(group, p)]

        def stays(value: Tensor) -> bool:
            value = dtensor.local(value)
            return value.is_shared() and (value.is_cpu or not from_dictionary)

        for p in weights:
            state, count = self.by_weight[p], ("step",) if self.keeps_count(group, p) else ()
            for name in dict.fromkeys((*self._numbers, *count)):
                number = state[name].reshape(())  # older ones have the shape [1]
                new = _new_number(p, group)
                if stays(number) and _is_like(number, new):
                    new = number
                elif name == "step" and number.is_cpu:
                    write_count(new, read_count(number))
                else:
                    new.copy_(number)
                state[name] = new
        moved = [p for p in weights if not all(map(stays, self._of_elements(group, p)))]
        for p, name, tensor in self._zeros(group, moved, native=True):
            old = self.by_weight[p][name]
            if not stays(old):
                self.by_weight[p][name] = in_pieces(Tensor.copy_, tensor, old)

    def _of_elements(self, group: dict[str, Any], weight: Tensor) -> list[Tensor]:
        """The states of a weight that are no numbers, with the absmax of those in codes."""
        state, names = self.by_weight[weight], self.names_of(group, weight)
        absmax = [absmax_of(name) for name in names if is_codes(state[name])]
        return [state[name] for name in (*names, *absmax)]

    @torch.no_grad()
    def convert(self, group: dict[str, Any], weight: Tensor) -> None:
        """Makes a state's numbers codes, or codes numbers, as the options of its group ask."""
        _replace(*self._conversion(group, weight))

    def _conversion(self, group: dict[str, Any], weight: Tensor) -> _Change:
        state, new = self.by_weight.get(weight, {}), dict[str, Tensor]()
        gone: list[str] = []
        may_differ = isinstance(own_option(group, "state_dtype"), str)
        if not (may_differ or any(map(is_codes, state.values()))):
            return state, new, gone
        for name, kind_now in self._kinds(group, weight).items():
            like = self._like(group, weight, name)
            kind = self._asked_kind(group, weight, name)
            if name not in state or kind_now == kind:
                continue
            value, codes = state[name], is_codes(state[name])
            fits = _codes.are_codes_of(value, state.get(absmax_of(name)), like)
            if not (fits if codes else value.shape == like.shape):
                continue  # an error will say so
            numbers = self._decode(name, like, state) if codes else value
            if kind is not None:
                found, absmax = _codes.encode(numbers, kind, name in self._signed)
                new[name] = _codes.spread_codes(like, found, kind)
                new[absmax_of(name)] = _codes.spread_absmax(like, absmax, kind)
            else:
                new[name] = numbers if self._is_wide_by(group, weight) else numbers.to(weight.dtype)
                gone.append(absmax_of(name))
        return state, new, gone

    def _is_wide_by(self, group: dict[str, Any], weight: Tensor) -> bool:
        """Returns whether options ask for float32 states, or a class always has them."""
        return (
            has_master(group, weight)
            or own_option(group, "state_dtype") is not None
            or self._shapes(group, weight) is not None
        )

    def _has_shapes(self, group: dict[str, Any], p: Tensor) -> bool:
        shapes, names = self._shapes(group, p) or {}, self.names_of(group, p)
        states = {name: self.by_weight[p][name] for name in names}
        return all(
            is_codes(state) or state.shape == shapes.get(name, p.shape)
            for name, state in states.items()
        )

    def _has_all(self, group: dict[str, Any], p: Tensor) -> bool:
        state, names = self.by_weight.get(p, {}), self.names_of(group, p)
        absmax = [absmax_of(name) for name in names if is_codes(state.get(name))]
        count = ("step",) if self.keeps_count(group, p) else ()
        if not state.keys() >= {*self._numbers, *count, *names, *absmax}:
            return False
        if p.dtype not in _SIXTEEN_BITS:
            return True
        # Without anything beside the weight: that its value is wide shows in its states.
        narrow = [n for n in self._names(group, p) if state[n].dtype in _SIXTEEN_BITS]
        return not (narrow and way_of(group, p) == "stochastic")

    def _zeros(
        self, group: dict[str, Any], weights: list[Tensor], native: bool
    ) -> Iterable[tuple[Tensor, str, Tensor]]:
        """A zeroed tensor for each state of each weight, and for the absmax of codes."""
        alike: dict[tuple[bool, str | None, tuple[str, ...]], list[Tensor]] = {}
        for p in weights:
            kind, names, kinds = None, self.names_of(group, p), self._kinds(group, p)
            shapes = self._shapes(group, p)
            if shapes is None:
                kind, shapes = self.kind_of(group, p), {}
            names = names[len(shapes) :]
            placements = (self._placements(group, p) if shapes else None) or {}
            for name, shape in shapes.items():
                if (kind_of_it := kinds.get(name)) is not None:
                    like = [self._like(group, p, name)]
                    for _, what, codes in self._zero_codes(kind_of_it, (name,), like, False):
                        yield p, what, codes
                    continue
                dtype = torch.float32 if p.dtype in _SIXTEEN_BITS else p.dtype
                spread = placements.get(name)
                part = dtensor.part_shape(p, shape, spread) if spread else shape
                tensor = torch.zeros(part, dtype=dtype, device=p.device)
                if spread:
                    tensor = dtensor.spread_as(p, tensor, shape, spread)
                yield p, name, tensor
            alike.setdefault((self.has_wide(group, p), kind, names), []).append(p)
        for (wide, kind, names), some in alike.items():
            if kind is not None:
                own = self._names_in_group(group, some[0])
                yield from self._zero_codes(kind, own, some, native)
                names = names[len(own) :]
            narrow = [name for name in names if name in BESIDE.values() and name != MASTER]
            names = tuple(name for name in names if name not in narrow)
            yield from self._zero_numbers(names, some, wide, native)
            for p, name, tensor in self._zero_numbers(tuple(narrow), some, False, native):
                yield p, name, _as_low(p, tensor) if name == LOW else tensor

    @staticmethod
    def _zero_numbers(
        names: tuple[str, ...], weights: list[Tensor], wide: bool, native: bool
    ) -> Iterable[tuple[Tensor, str, Tensor]]:
        if native:
            shards = [dtensor.local(p) for p in weights]
            tensors = torch.ops.fusedstep.new_states(shards, len(names), wide)
            tensors = map(dtensor.spread_like, cycle(weights), tensors)
        else:
            dtype = torch.float32 if wide else None
            tensors = [torch.zeros_like(p, dtype=dtype) for _ in names for p in weights]
        for (name, p), tensor in zip(product(names, weights), tensors, strict=True):
            yield p, name, tensor

    def _zero_codes(
        self, kind: str, names: tuple[str, ...], weights: list[Tensor], native: bool
    ) -> Iterable[tuple[Tensor, str, Tensor]]:
        signed = [name in self._signed for name in names]
        new = torch.ops.fusedstep.new_codes if native else _codes.new_codes
        made = new(list(map(dtensor.local, weights)), kind, signed)
        absmax = made[len(names) * len(weights) :]
        for (name, p), tensor in zip(product(names, weights), made, strict=False):
            yield p, name, _codes.spread_codes(p, tensor, kind)
        for (name, p), tensor in zip(product(names, weights), absmax, strict=True):
            yield p, absmax_of(name), _codes.spread_absmax(p, tensor, kind)


def _replace(state: dict[str, Any], new: dict[str, Tensor], gone: list[str]) -> None:
    state.update(new)
    for name in gone:
        del state[name]


def _state_of(name: str) -> str:
    """The state that a name is of, which may be that of its absmax."""
    return name.removesuffix(absmax_of(""))


def _as_low(weight: Tensor, tensor: Tensor) -> Tensor:
    """The memory of a 16-bit tensor as int16."""
    return dtensor.spread_like(weight, dtensor.local(tensor).view(torch.int16))


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
