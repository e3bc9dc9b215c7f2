"""Checks of hyper-parameters and what goes with them, with torch's texts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter, eq
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import Parameter
from torch.optim.optimizer import _get_capturable_supported_devices

from fusedstep._options.shared import own_option
from fusedstep._sharding.dtensor import local
from fusedstep._state.codes import BLOCKS
from fusedstep._state.storage import check_ways


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question for those of the known names that are nearest to one; no text if none are."""
    found = difflib.get_close_matches(name, list(known))
    return f"did you mean {' or '.join(map(repr, found))}?" if found else ""


def check_state_dtype(state_dtype: torch.dtype | str | None) -> None:
    if state_dtype is not None and state_dtype not in (torch.float32, *BLOCKS):
        kinds = ", ".join(map(repr, BLOCKS))
        raise ValueError(
            f"state_dtype must be None, torch.float32 or one of {kinds}, not {state_dtype!r}"
        )


def check_storage_is_taken(
    name: str, not_taken: Mapping[str, Any], group: Mapping[str, Any]
) -> None:
    """Raises an option of a group that says how states are stored, and that the class lacks.

    ``name``: of the class. ``not_taken``: such options, with their values where they are not set.
    """
    for option, unset in not_taken.items():
        if (value := group.get(option, unset)) != unset:
            raise ValueError(f"{name} has no option {option!r}: {option}={value!r:.40}")


def check_storage(group: Mapping[str, Any]) -> None:
    """Raises options that say how states and 16-bit weights are stored, and say it wrongly."""
    check_state_dtype(own_option(group, "state_dtype"))
    check_ways(group)


def check_operands(weights: list[Tensor], grads: list[Tensor]) -> None:
    """Raises for operands at which torch's operations would broadcast or stop half way."""
    for index, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
        what = f"tensor {index} of the list: the gradient"
        if grad.shape != weight.shape:
            shapes = f"{list(grad.shape)} is not the weight's, {list(weight.shape)}"
            raise RuntimeError(f"{what}'s shape {shapes}")
        if grad.dtype != weight.dtype:
            dtypes = [str(each.dtype).removeprefix("torch.") for each in (grad, weight)]
            raise RuntimeError(f"{what} is {dtypes[0]} but the weight is {dtypes[1]}")
        if grad.device != weight.device:
            raise RuntimeError(f"{what} is on {grad.device} but the weight is on {weight.device}")
        if weight.is_conj():
            raise RuntimeError(
                f"tensor {index} of the list: the weight is a conjugated view; clone() it first"
            )
        plain = type(weight) in (Tensor, Parameter) and weight.layout is torch.strided
        if plain and torch._debug_has_internal_overlap(weight) == 1:
            raise RuntimeError(
                f"tensor {index} of the list: the weight overlaps itself in memory "
                "(an expanded tensor?); clone() it first"
            )


def check_writable(weights: list[Tensor]) -> None:
    """Raises for weights of inference mode, which torch's operations change in that mode alone.

    They would raise themselves, with states that have been changed.
    """
    if torch.is_inference_mode_enabled():
        return
    for index, weight in enumerate(weights):
        if weight.is_inference():
            raise RuntimeError(
                f"tensor {index} of the list: the weight was made in inference mode, outside of "
                "which torch's operations do not change it; clone() it first"
            )


#: What tells how an operand is to be read. No composite steps complex weights.
_FORM: tuple[Callable[[Tensor], Any], ...] = (
    Tensor.data_ptr,
    Tensor.stride,
    Tensor.is_neg,
    attrgetter("shape"),
    attrgetter("dtype"),
    type,
)


class CheckedOperands:
    """Weights without a plan that a step has checked with their gradients and states.

    While these are at the same addresses and in the same form, so is what ``check_operands()``,
    ``check_memory()``, ``check_apart()`` and checks of states find. What follows from that, and
    from options that are the same, hangs here: it is dropped when new operands are checked.
    """

    __slots__ = ("_forms", "_states", "counts", "derived", "weights")

    def __init__(
        self, weights: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
    ) -> None:
        self.weights = frozenset(map(id, weights))
        """By id(): nothing here keeps a weight that has left the groups."""
        self._states = [each for s in states for name, each in s.items() if name != "step"]
        self.counts: list[Tensor | None] = [state.get("step") for state in states]
        self._forms: list[tuple[Any, ...]] = []
        self.derived: Any = None
        """What a class of optimizers makes of the operands once."""
        try:
            forms = list(self._read(weights, grads))
        except (AttributeError, RuntimeError):  # some kinds of tensors have no address
            return
        places = [place for place, *_ in forms]
        begins, others = places[: len(weights)], places[len(weights) :]
        if all(places) and not set(begins).intersection(others):
            self._forms = forms

    def _read(self, weights: list[Tensor], grads: list[Tensor]) -> Iterable[tuple[Any, ...]]:
        operands = list(map(local, (*weights, *grads, *self._states)))
        return zip(*(map(read, operands) for read in _FORM), strict=True)

    @property
    def are_told_by_addresses(self) -> bool:
        """False if some operand has no address, or a gradient begins where a weight does."""
        return bool(self._forms)

    def are(self, weights: list[Tensor], grads: list[Tensor]) -> bool:
        """Returns whether these are the weights and gradients, beside the same states."""
        if len(weights) != len(self.counts):
            return False
        try:
            return all(map(eq, self._read(weights, grads), self._forms))
        except (AttributeError, RuntimeError):
            return False


def check_memory(weights: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]) -> None:
    """Raises for operands in whose memory several operations of torch could not work in turn.

    A gradient may be its own weight, element by element: it is read before the weight is written.
    """
    owners: dict[int, list[int]] = {}  # weights by where their storages begin
    for index, (weight, grad, state) in enumerate(zip(weights, grads, states, strict=True)):
        what = f"tensor {index} of the list: "
        values = [each for name, each in state.items() if name != "step"]
        for kind, tensors in (("weight", [weight]), ("gradient", [grad]), ("state", values)):
            for tensor in filter(_has_memory, tensors):
                if kind != "gradient" and (tensor.is_neg() or tensor._is_zerotensor()):
                    raise RuntimeError(
                        f"{what}the {kind} is a negated view or a zero tensor; clone() it first"
                    )
                if tensor.untyped_storage().nbytes() == 0 and not tensor._is_zerotensor():
                    raise RuntimeError(f"{what}the {kind} has no memory")
        if _has_memory(weight):
            owners.setdefault(weight.untyped_storage().data_ptr(), []).append(index)
    for index, grad in enumerate(grads):
        if not _has_memory(grad) or grad._is_zerotensor():
            continue
        for owner in owners.get(grad.untyped_storage().data_ptr(), ()):
            weight = weights[owner]
            is_same = grad.data_ptr() == weight.data_ptr() and grad.stride() == weight.stride()
            if (owner == index and is_same) or not _ranges_meet(grad, weight):
                continue
            where = (
                "is the memory of its own weight in another layout"
                if owner == index
                else f"shares memory with the weight of tensor {owner} of the list"
            )
            raise RuntimeError(
                f"tensor {index} of the list: the gradient {where}; clone() it first"
            )


def check_apart(weights: list[Tensor], states: list[dict[str, Any]]) -> None:
    """Raises for weights that share memory, which threads could not write at the same time.

    It raises for weights and states that overlap themselves, too. One weight may be there twice.
    """
    # In the place of a weight without memory.
    none = torch.empty(0, dtype=torch.float32, device="cpu")
    own, owned, owners = [], [], []
    seen: set[int] = set()
    for index, (weight, state) in enumerate(zip(weights, states, strict=True)):
        part = none if id(weight) in seen else local(weight)
        seen.add(id(weight))
        own.append(part if _has_memory(part) else none)
        for value in map(local, state.values()):
            if _has_memory(value):
                owned.append(value)
                owners.append(index)
    torch.ops.fusedstep.check_apart.default(own, owned, owners)


def check_number_of_state(index: int, name: str, number: Any, weight: Tensor) -> None:
    """Raises a number beside a weight that no step could take as one; ``index``: of the weight."""
    if not isinstance(number, Tensor):  # torch's text
        raise RuntimeError(
            "API has changed, `state_steps` argument must contain a list of singleton tensors"
        )
    of = ", the step count," if name == "step" else ""
    what = f"tensor {index} of the list: the state {name!r}{of}"
    is_dense = number.layout is torch.strided and (weight.is_meta or not number.is_meta)
    is_real = not number.is_complex() and number.dtype is not torch.bool
    if not (is_dense and is_real and number.numel() == 1):
        raise RuntimeError(
            f"{what} must be one real number, not a tensor of {number.dtype} of the shape "
            f"{list(number.shape)} and the layout {number.layout} on {number.device}"
        )


def is_whole(numbers: Tensor) -> bool:
    """Returns whether all are whole numbers of at least 0."""
    return bool((numbers.isfinite() & (numbers >= 0) & (numbers == numbers.floor())).all())


def check_counts(counts: Iterable[Tensor | None]) -> None:
    """Raises for a step count on the host that is none; fake tensors have no numbers."""
    for index, count in enumerate(counts):
        if count is None or isinstance(count, FakeTensor) or not count.is_cpu:
            continue
        if not count.item() >= 0:
            raise RuntimeError(
                f"tensor {index} of the list: the step count must be at least 0, not "
                f"{count.item():f}"
            )


def _has_memory(tensor: Any) -> bool:
    return (
        isinstance(tensor, Tensor)
        and type(tensor) in (Tensor, Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and tensor.numel() > 0
    )


def _ranges_meet(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors share addresses from their first elements to their last."""

    def ends(tensor: Tensor) -> tuple[int, int]:
        sides = zip(tensor.shape, tensor.stride(), strict=True)
        span = 1 + sum((size - 1) * stride for size, stride in sides)
        return tensor.data_ptr(), tensor.data_ptr() + span * tensor.itemsize

    (first, first_end), (second, second_end) = ends(a), ends(b)
    return first < second_end and second < first_end


def name_of(group: dict[str, Any], index: int, place: int) -> str:
    """Names a parameter in an error: by its name, or else by its place in the group `index`."""
    if names := group.get("param_names"):
        return f"parameter {names[place]!r}"
    return f"parameter {place} of group {index}"


def with_name(
    error: RuntimeError,
    index: int,
    group: dict[str, Any],
    weights: list[Tensor],
) -> RuntimeError:
    """An error with names of parameters, where it tells places in a list of a group's weights.

    ``index``: the number of the group.
    """
    place_in_list = r"tensor (\d+) of the list"
    if not re.match(place_in_list, str(error)):
        return error

    def name(found: re.Match[str]) -> str:
        weight = weights[int(found[1])]
        place = next(i for i, p in enumerate(group["params"]) if p is weight)
        return name_of(group, index, place)

    text = re.sub(place_in_list, name, str(error))
    if re.search("(a|the) state .*is .* but (the weight is|has to be)", text):
        text += (
            ". If the dtype of the model has changed, give the states that of their weights by "
            "optimizer.load_state_dict(optimizer.state_dict()), or make a new optimizer"
        )
    return RuntimeError(text)


def check_capturable(weight: Tensor, step: Tensor, group: dict[str, Any]) -> None:
    devices = _get_capturable_supported_devices(supports_xla=not group["foreach"])
    if weight.device.type != step.device.type or weight.device.type not in devices:
        raise AssertionError(
            f"If capturable=True, params and state_steps must be on supported devices: {devices}."
        )
