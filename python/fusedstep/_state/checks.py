"""Checks of hyper-parameters and what goes with them, with torch's texts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import _get_capturable_supported_devices

from fusedstep._options.extras import OWN
from fusedstep._sharding.dtensor import local
from fusedstep._state.codes import BLOCKS
from fusedstep._state.storage import check_ways


def check_number(name: str, value: Any) -> None:
    """Raises if an option is no number: YAML, for one, reads 1e-3 as a text."""
    if not is_number(value):
        text = f"{name} must be a number, not {value!r}"
        raise TypeError(f"{text}: write float({value!r})" if _reads_as_number(value) else text)


def is_number(value: Any) -> bool:
    if isinstance(value, (str, bytes)):
        return False
    return isinstance(value, Tensor) or hasattr(type(value), "__float__")


def _reads_as_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question for those of the known names that are nearest to one; no text if none are."""
    found = difflib.get_close_matches(name, list(known))
    return f"did you mean {' or '.join(map(repr, found))}?" if found else ""


def check_lr(lr: float | Tensor, *, foreach: bool | None = None, capturable: bool = True) -> None:
    check_number("lr", lr)
    if isinstance(lr, Tensor):
        if foreach and not capturable:
            raise ValueError(
                "lr as a Tensor is not supported for capturable=False and foreach=True"
            )
        if lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")


def check_eps(eps: float) -> None:
    check_number("eps", eps)
    if not eps >= 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}")


def check_state_dtype(state_dtype: torch.dtype | str | None) -> None:
    if state_dtype is not None and state_dtype not in (torch.float32, *BLOCKS):
        kinds = ", ".join(map(repr, BLOCKS))
        raise ValueError(
            f"state_dtype must be None, torch.float32 or one of {kinds}, not {state_dtype!r}"
        )


def check_max_grad_norm(max_grad_norm: float | None) -> None:
    if max_grad_norm is None:
        return
    check_number("max_grad_norm", max_grad_norm)
    if not max_grad_norm > 0.0:
        raise ValueError(f"Invalid max_grad_norm value: {max_grad_norm}")


def check_at_least_zero(name: str, value: Any) -> None:
    check_number(name, value)
    if not value >= 0.0:
        raise ValueError(f"Invalid {name} value: {value}")


def check_beta(index: int, beta: float | Tensor) -> None:
    check_number(f"betas[{index}]", beta)
    if isinstance(beta, Tensor) and beta.numel() != 1:
        raise ValueError(f"Tensor betas[{index}] must be 1-element")
    if not 0.0 <= beta < 1.0:
        raise ValueError(f"Invalid beta parameter at index {index}: {beta}")


def check_betas(
    betas: tuple[float | Tensor, ...],
    *,
    foreach: bool | None,
    capturable: bool,
    count: int = 2,
) -> tuple[float | Tensor, ...]:
    """Returns the betas, one-element tensors among them as 0-dimensional ones."""
    betas = _as_tuple(betas, count)
    for i, beta in enumerate(betas[:count]):
        check_beta(i, beta)
    check_count(betas, count)
    beta1, beta2, *others = betas
    rest = map(as_number, others)
    tensors = sum(isinstance(beta, Tensor) for beta in (beta1, beta2))
    if tensors == 0:
        return beta1, beta2, *rest
    if tensors == 1:
        raise ValueError("betas must be either both floats or both Tensors")
    if foreach and not capturable:
        raise ValueError(
            "betas[0] as a Tensor is not supported for capturable=False and foreach=True"
        )
    return as_number(beta1), as_number(beta2), *rest


#: By their number.
_FORMS_OF_BETAS = {2: "(beta1, beta2)", 3: "(beta1, beta2, beta3)"}


def _as_tuple(betas: Any, count: int) -> tuple[Any, ...]:
    try:
        if not isinstance(betas, (str, bytes)):
            return tuple(betas)
    except TypeError:
        pass
    raise TypeError(f"betas must be {_FORMS_OF_BETAS[count]}, not {betas!r}")


def check_count(betas: tuple[Any, ...], count: int) -> None:
    if len(betas) != count:
        others = "Adan has three" if count == 2 else "other optimizers have two"
        raise ValueError(f"betas must be {_FORMS_OF_BETAS[count]}, not {betas!r}; {others}")


def check_pair(name: str, pair: Any) -> None:
    """Raises if an option is not two numbers, in whatever sequence."""
    if not is_pair(pair):
        raise TypeError(f"{name} must be two numbers, not {pair!r}")
    for index, value in enumerate(pair):
        check_number(f"{name}[{index}]", value)


def is_pair(value: Any) -> bool:
    """Returns whether a value has two parts in an order: of configurations there are own lists."""
    if isinstance(value, (str, bytes, Mapping, Set, Tensor)):
        return False
    return (
        hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__") and len(value) == 2
    )


#: Options that are two numbers.
_PAIRS = ("etas", "step_sizes")


def make_tuples(options: dict[str, Any]) -> None:
    """Makes tuples of numbers of other sequences, whose types torch.load() may not take."""
    for name in ("betas", "eps", *_PAIRS, "ns_coefficients"):
        value = options.get(name)
        if value is None or isinstance(value, str) or _is_one_number(value):
            continue
        numbers = tuple(map(_plain, value))
        is_plain = isinstance(value, (list, tuple))
        if not is_plain or list(map(type, value)) != list(map(type, numbers)):
            options[name] = numbers


def _is_one_number(value: Any) -> bool:
    return is_number(value) and getattr(value, "shape", ()) in ((), (1,))


def _plain(value: Any) -> Any:
    """A number as Python's own, and the numbers of a sequence, or of several in it, in tuples."""
    if not isinstance(value, Iterable) or isinstance(value, str) or _is_one_number(value):
        return float(value) if isinstance(value, float) else value
    return tuple(map(_plain, value))


#: Options that are numbers and have a range of their own, or any.
_ANY_RANGE = frozenset({"dampening", "max_ratio", "t0"})


def check_ranges(options: dict[str, Any], betas: int, foreach: bool | None) -> None:
    """Raises the first option of a constructor that is out of range, with torch's texts.

    ``betas``: how many there have to be. They become numbers, or tensors without dimensions.
    ``foreach``: true where no number may be a tensor, unless capturable.
    """
    capturable = options.get("capturable", True)
    for name, value in options.items():
        if name == "lr":
            check_lr(value, foreach=foreach, capturable=capturable)
        elif name == "betas":
            options[name] = check_betas(value, count=betas, foreach=foreach, capturable=capturable)
        elif name == "eps":
            check_eps(value)
        elif name == "state_dtype":
            check_state_dtype(value)
        elif name in _OF_WAYS:
            check_ways(options)
        elif name == "max_grad_norm":
            check_max_grad_norm(value)
        elif name == "rho":
            check_number(name, value)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"Invalid rho value: {value}")
        elif name in _ANY_RANGE:
            check_number(name, value)
        elif name in _PAIRS:
            check_pair(name, value)
            if name == "etas" and not 0.0 < value[0] < 1.0 < value[1]:
                raise ValueError(f"Invalid eta values: {value[0]}, {value[1]}")
        elif name not in _NO_NUMBERS and name != "debias":
            check_at_least_zero(name, value)


def check_options(group: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Raises an option of a group that is of another kind than the default; its range may be any.

    A number given as a text is one: float() would take it. ``defaults``: those of all options.
    """
    for name in defaults.keys() & group.keys():
        value, default = group[name], defaults[name]
        if name in _NONE_IS_NONE and value is None:
            continue
        if name == "betas":
            betas = _as_tuple(value, len(default))
            for index, beta in enumerate(betas):
                check_number(f"betas[{index}]", beta)
            check_count(betas, len(default))
        elif name in _PAIRS:
            check_pair(name, value)
        elif name == "state_dtype":
            check_state_dtype(value)
        elif name in _OF_WAYS:
            check_ways(group)
        elif name == "max_grad_norm" or (is_number(default) and not isinstance(default, bool)):
            check_number(name, value)
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(f"Tensor {name} must be 1-element")
        elif name in _NO_NUMBERS:
            check_flag(name, value)


def check_flag(name: str, value: Any) -> None:
    """Raises a value that Python takes for true although it says something else."""
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name} must not be a text: {value!r:.60}")
    if isinstance(value, (list, tuple, Mapping, Set)):
        raise TypeError(f"{name} must be a bool, not {value!r:.60}")


def check_floats(group: dict[str, Any], defaults: dict[str, Any], betas: int) -> None:
    """Raises if an option whose default is a number, or several, cannot be taken as such."""
    for name, default in defaults.items():
        is_none = name in _NONE_IS_NONE and group[name] is None
        if name in _PAIRS:
            check_pair(name, group[name])
        elif name not in OWN and is_number(default) and not (isinstance(default, bool) or is_none):
            float(group[name])
    floats(group.get("betas", ()), betas if "betas" in group else 0)


def floats(betas: tuple[float | Tensor, ...], count: int) -> list[float]:
    """The betas as numbers, of which there have to be so many."""
    numbers = list(map(float, betas))
    check_count(betas, count)
    return numbers


def has_text(group: dict[str, Any]) -> bool:
    """Tells whether a group has a text for an option, where none may be. Every step asks."""
    if str not in map(type, group.values()):
        pairs = map(group.get, ("betas", *_PAIRS))
        return any(isinstance(each, (list, tuple)) and str in map(type, each) for each in pairs)
    return any(type(value) is str for name, value in group.items() if name not in _TEXTS)


#: Options that tell how the value of a weight is kept.
_OF_WAYS = ("master_weights", "rounding", "seed")

#: Options of which None says that there is none.
_NONE_IS_NONE = ("beta1", "max_grad_norm", "rank")

#: Options that may be texts.
_TEXTS = (
    "debias",
    "proj",
    "proj_type",
    "scale_type",
    "state_dtype",
    "svd",
    "variant",
    *_OF_WAYS,
)

#: Options that are no numbers, and to which a text is never right, though Python takes it for true.
_NO_NUMBERS = frozenset(
    {
        "always_adapt",
        "amsgrad",
        "capturable",
        "centered",
        "decoupled_decay",
        "decoupled_weight_decay",
        "differentiable",
        "foreach",
        "fused",
        "keep_grad",
        "maximize",
        "nesterov",
        "no_prox",
        "skip_nonfinite",
        "state_dtype",
    }
)


def as_number(option: float | Tensor) -> float | Tensor:
    """A one-element tensor without dimensions, which would go over to the weight."""
    return option.squeeze() if isinstance(option, Tensor) else option


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


def memory_of(
    weights: list[Tensor], grads: list[Tensor], states: list[dict[str, Any]]
) -> tuple[list[Any], ...] | None:
    """The addresses of operands, and how they are to be read.

    While it is the same, so is what check_memory() and checks of states find. None if it cannot
    tell: there is none, or a gradient begins where a weight does.
    """
    values = [each for state in states for name, each in state.items() if name != "step"]
    operands = list(map(local, (*weights, *grads, *values)))
    try:
        places = [each.data_ptr() for each in operands]
        forms = [(each.is_neg(), each.shape, each.dtype) for each in operands]
    except (AttributeError, RuntimeError):  # some kinds of tensors have no address
        return None
    begins, others = places[: len(weights)], places[len(weights) :]
    told = all(places) and not set(begins).intersection(others)
    return (places, forms) if told else None


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


def check_counts(states: list[dict[str, Any]]) -> None:
    """Raises for a step count on the host that is none."""
    for index, state in enumerate(states):
        count = state.get("step")
        if count is not None and count.is_cpu and not count.item() >= 0:
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
    groups: list[dict[str, Any]],
    group: dict[str, Any],
    weights: list[Tensor],
) -> RuntimeError:
    """An error with names of parameters, where it tells places in a list of a group's weights."""
    place_in_list = r"tensor (\d+) of the list"
    if not re.match(place_in_list, str(error)):
        return error
    (index,) = (i for i, each in enumerate(groups) if each is group)

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


def numeric(group: dict[str, Any]) -> str:
    """The options of a group that are numbers or should be, for an error's text."""
    others = {"params", "param_names", "foreach", "fused", *_TEXTS}
    return ", ".join(
        f"{name}={value!r}"
        for name, value in group.items()
        if name not in others and not isinstance(value, bool)
    )


def check_capturable(weight: Tensor, step: Tensor, group: dict[str, Any]) -> None:
    devices = _get_capturable_supported_devices(supports_xla=not group["foreach"])
    if weight.device.type != step.device.type or weight.device.type not in devices:
        raise AssertionError(
            f"If capturable=True, params and state_steps must be on supported devices: {devices}."
        )
