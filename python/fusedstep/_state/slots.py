"""Slots: the tensors of a weight's state, each with all that its group asks of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedstep._options.shared import own_option
from fusedstep._sharding import dtensor
from fusedstep._state import codes as _codes
from fusedstep._state.codes import UNSIGNED, absmax_of, is_codes
from fusedstep._state.forked import in_pieces
from fusedstep._state.kinds import Group, State, States, shapes_of
from fusedstep._state.storage import BESIDE, BESIDE_STORAGE, SIXTEEN_BITS, has_master, way_of

#: A tensor for a state, or for the absmax of its codes: its slot, its name and itself.
New = tuple["Slot", str, Tensor]


class Slot(NamedTuple):
    """A tensor of a weight's state. In codes it has a companion, their absmax."""

    name: str
    weight: Tensor
    storage: str = "weight"
    """That of numbers: ``"weight"`` or a key of ``codes.NUMBERS``."""
    record: State | None = None
    """None for a state that is of the weight's value."""
    own_shape: torch.Size | None = None
    """None for a state that is laid out as the weight."""
    placements: tuple[Any, ...] | None = None
    """Those of a state with its own shape beside a DTensor; None for a tensor of torch."""
    codes: str | None = None
    """The kind of codes that options ask for."""
    is_signed: bool = True

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape if self.own_shape is None else self.own_shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of numbers."""
        return _codes.NUMBERS.get(self.storage, self.weight.dtype)

    @property
    def like(self) -> Tensor:
        """The weight, or a tensor without memory of the state's own shape."""
        return _codes.of_shape(self.weight, self.own_shape)

    @property
    def takes_codes(self) -> bool:
        return self.record is not None and self.record.takes_codes

    def names_in(self, state: dict[str, Any]) -> tuple[str, ...]:
        """The names of what a state has in the slot: with codes there is their absmax."""
        return (self.name, absmax_of(self.name)) if is_codes(state[self.name]) else (self.name,)

    def kind_in(self, state: dict[str, Any]) -> str | None:
        """The kind of codes that a state has in the slot, or is to have if the slot is empty."""
        if self.name not in state:
            return self.codes
        return _codes.kind_of(state[self.name], self.like) if is_codes(state[self.name]) else None

    def storage_in(self, state: dict[str, Any]) -> str:
        """The storage of a state in the slot, or of the one to come, as new_states() takes it."""
        kind = self.kind_in(state) if self.record else None
        return self.storage if kind is None else kind if self.is_signed else UNSIGNED + kind

    def fits(self, state: dict[str, Any]) -> bool:
        """Returns whether what a state has in the slot is of the slot's shape."""
        value = state[self.name]
        if is_codes(value):
            return _codes.are_codes_of(value, state.get(absmax_of(self.name)), self.like)
        return value.shape == self.shape

    def decode(self, state: dict[str, Any]) -> Tensor:
        """The numbers of a state's codes."""
        absmax = state[absmax_of(self.name)]
        return _codes.decode(state[self.name], absmax, self.like, self.is_signed)

    def encode(self, state: dict[str, Any], numbers: Tensor, step: int) -> None:
        """Puts numbers into the codes of a state. ``step``: as for ``codes.encode``."""
        like, kind = self.like, _codes.kind_of(state[self.name], self.like)
        kept = _codes.parts(state[self.name], state[absmax_of(self.name)], like)
        for part, new in zip(kept, _codes.encode(numbers, kind, self.is_signed, step), strict=True):
            part.copy_(new)

    def fill(self, state: dict[str, Any], value: complex) -> None:
        """Sets all elements of what a state has in the slot, in place."""
        tensors, elements = [state[name] for name in self.names_in(state)], [value]
        if is_codes(state[self.name]):
            two = torch.full([2], value, dtype=torch.float32, device="cpu")
            codes, absmax = map(dtensor.local, tensors)
            found = _codes.encode(two, _codes.kind_of(tensors[0], self.like), self.is_signed)
            tensors = [codes.view(torch.uint8), absmax]
            elements = [found[0].view(torch.uint8)[0].item(), found[1][0].item()]
        for tensor, element in zip(tensors, elements, strict=True):
            in_pieces(functools.partial(_fill, element), tensor)


def _fill(value: complex, part: Tensor) -> Tensor:
    return part.fill_(value)


class Slots:
    """The slots of weights of a group. What follows from the shape of a weight is found once.

    ``signed``: the names of the states that may be negative.
    """

    def __init__(self, states: States, signed: frozenset[str], group: Group) -> None:
        self._states, self._signed, self._group = states, signed, group
        self._shapes: dict[torch.Size, dict[str, torch.Size | None]] = {}
        self._may_be_coded = isinstance(own_option(group, "state_dtype"), str)

    def shapes(self, weight: Tensor) -> dict[str, torch.Size | None]:
        """As ``shapes_of``: names are in the order of a plan."""
        shape = weight.shape
        if shape not in self._shapes:
            self._shapes[shape] = shapes_of(self._states, self._group, shape)
        return self._shapes[shape]

    def of(self, weight: Tensor, state: dict[str, Any]) -> list[Slot]:
        """The slots of a weight, in the same order; the dtype of numbers in its state stays."""
        storage = "float32" if self.has_wide(weight, state) else "weight"
        signed, slots = self._signed, []
        for name, shape in self.shapes(weight).items():
            record, placements, kind = self._states[name], None, None
            is_spread = shape is not None and dtensor.is_dtensor(weight)
            if is_spread and record.placements:
                placements = record.placements(self._group, weight)
            if self._may_be_coded and record.takes_codes and not is_spread:
                kind = _codes.asked_kind(self._group, _codes.of_shape(weight, shape))
            own = shape, placements, kind, name in signed
            slots.append(Slot(name, weight, storage, record, *own))
        way = way_of(self._group, weight)
        if way in BESIDE:
            slots.append(Slot(BESIDE[way], weight, BESIDE_STORAGE[way]))
        return slots

    def named(self, weight: Tensor, state: dict[str, Any], name: str) -> Slot:
        """The slot of a name, also if the options of the group no longer ask for the state."""
        slots = (slot for slot in self.of(weight, state) if slot.name == name)
        return next(slots, Slot(name, weight, is_signed=name in self._signed))

    def has_wide(self, weight: Tensor, state: dict[str, Any]) -> bool:
        """Returns whether a 16-bit weight's states are float32: by its own, else by options."""
        if weight.dtype not in SIXTEEN_BITS or has_master(self._group, weight):
            return weight.dtype in SIXTEEN_BITS
        shapes = self.shapes(weight)
        if any(shape is not None for shape in shapes.values()):
            return True
        dtypes = [state[name].dtype for name in shapes if name in state]
        if dtypes:
            return dtypes[0] in (torch.float32, *_codes.CODES)
        return own_option(self._group, "state_dtype") is not None


def zeros(weights: Sequence[tuple[list[Slot], dict[str, Any]]], native: bool) -> Iterable[New]:
    """Makes a zeroed tensor for each slot of weights, and for the absmax of codes.

    ``weights``: the slots of each, and its state. Weights whose slots are stored alike get their
    tensors together.
    """
    alike: dict[tuple[str, ...], list[list[Slot]]] = {}
    for slots, state in weights:
        rest = []
        for slot in slots:
            if slot.own_shape is None:
                rest.append(slot)
            elif slot.kind_in(state) is not None:
                yield from _zeros_alike([[slot]], [slot.storage_in(state)], _codes.new_states)
            else:
                yield slot, slot.name, _own_zeros(slot)
        if rest:
            alike.setdefault(tuple(slot.storage_in(state) for slot in rest), []).append(rest)
    new_states = torch.ops.fusedstep.new_states if native else _codes.new_states
    for storages, found in alike.items():
        yield from _zeros_alike(found, list(storages), new_states)


def _own_zeros(slot: Slot) -> Tensor:
    weight, shape, spread = slot.weight, slot.shape, slot.placements
    part = dtensor.part_shape(weight, shape, spread) if spread else shape
    tensor = torch.zeros(part, dtype=slot.dtype, device=weight.device)
    return dtensor.spread_as(weight, tensor, shape, spread) if spread else tensor


def _zeros_alike(
    weights: list[list[Slot]], storages: list[str], new_states: Callable[..., list[Tensor]]
) -> Iterable[New]:
    """``weights``: the slots of each, which have these storages."""
    made = new_states([dtensor.local(slots[0].like) for slots in weights], storages)
    kinds = [storage.removeprefix(_codes.UNSIGNED) for storage in storages]
    new = [(slots[k], kind) for k, kind in enumerate(kinds) for slots in weights]
    for (slot, kind), tensor in zip(new, made, strict=False):
        yield slot, slot.name, _codes.spread_codes(slot.like, tensor, kind)
    coded = [(slot, kind) for slot, kind in new if kind in _codes.BLOCKS]
    for (slot, kind), tensor in zip(coded, made[len(new) :], strict=True):
        yield slot, absmax_of(slot.name), _codes.spread_absmax(slot.like, tensor, kind)
