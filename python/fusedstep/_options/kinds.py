"""What an optimizer says of its options: a record for each, and the loops over these records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: The value of a record's field that says nothing.
NOTHING: Any = object()

#: The largest number that is usual. A step multiplies two, and divides some by 1 - beta, which is
#: at least 2**-53: the result is a number of float32.
_MOST = 1e9

#: The same for float16, with the least 1 - beta.
_MOST_OF_HALF, _LEAST_OF_HALF = 1.0, 1e-4

_NO_NUMBERS = (bool, str, type(None), torch.dtype)


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option that only the code of its own optimizer checks, and the base of all kinds.

    Attributes:
        before: what dictionaries without the option mean, which were saved before the option was
            known; ``NOTHING`` where all dictionaries have the option.
        unset: what groups without the option mean, where a group has the option only if it was set:
            torch's distributed checkpoints, and the flat ones of torchtitan, ask a checkpoint for
            every key that a group has, and those of torch's optimizers could otherwise not be
            loaded. ``NOTHING`` where every group has the option.
        always_saved: whether all dictionaries of the optimizer have the option, but for one that
            is ``before`` or ``unset``.
        fills_sides: whether the sides of weights have to be a multiple of the option, or of the sum
            of several, or no less.
        moot_elsewhere: whether no value asks a class without the option for another formula: the
            option says how a step runs, or is of a factor that such a class has not.
        against_codes: why states do badly in codes where the option is set, behind the words "the
            class with": a warning; no text where they do not.
    """

    before: Any = NOTHING
    unset: Any = NOTHING
    always_saved: bool = False
    fills_sides: bool = False
    moot_elsewhere: bool = False
    against_codes: str = ""

    def checked(self, name: str, value: Any, tensors: bool) -> Any:
        """Returns the value that a constructor takes; raises if the value is out of range.

        ``tensors``: whether numbers may be tensors in torch operations over lists.
        """
        return value

    def check_kind(self, name: str, value: Any) -> None:
        """Raises a value of another kind; the range may be any."""

    def check_float(self, name: str, value: Any) -> None:
        """Raises if a step cannot take the value as a number, or as several."""

    def plain(self, value: Any) -> Any:
        """Returns the value in types that torch.load() takes."""
        return value

    def is_usual(self, value: Any, half: bool) -> bool:
        """Returns whether no operation of a step can refuse a number that follows from the value.

        ``half``: whether some operations are of float16.
        """
        return True

    def has_text(self, value: Any) -> bool:
        """Returns whether the value is a text, or has one, where none may be."""
        return False


@dataclass(frozen=True, kw_only=True)
class Flag(Option):
    """True or False; some take None too."""

    def check_kind(self, name: str, value: Any) -> None:
        """Raises a value that Python takes for true although the value says something else."""
        if isinstance(value, (str, bytes)):
            raise TypeError(f"{name} must not be a text: {value!r:.60}")
        if isinstance(value, (list, tuple, Mapping, Set)):
            raise TypeError(f"{name} must be a bool, not {value!r:.60}")

    def plain(self, value: Any) -> Any:
        number = _plain_number(value)
        return value if number is value else bool(number)

    def has_text(self, value: Any) -> bool:
        return isinstance(value, str)


@dataclass(frozen=True, kw_only=True)
class Choice(Option):
    """A text, a number or a flag, of which the code of states says what it means."""

    def plain(self, value: Any) -> Any:
        """Returns Python's own value in place of another one, as of numpy."""
        return str(value) if isinstance(value, str) else _plain_number(value)


@dataclass(frozen=True, kw_only=True)
class Number(Option):
    """A number, in a range.

    Attributes:
        least: the least value of the range; None where the number may be any, also a negative one.
        above: whether the number has to be greater than ``least``.
        most: the largest value of the range.
        label: the words of an error for the option, if not the name.
        may_be_none: whether None says that there is no number.
        is_limit: whether the number is only compared with others, and may be infinite.
        usual: the largest value with which no operation can refuse a number.
    """

    always_saved: bool = True
    least: float | None = 0.0
    above: bool = False
    most: float = math.inf
    label: str = ""
    may_be_none: bool = False
    is_limit: bool = False
    usual: float = _MOST

    def checked(self, name: str, value: Any, tensors: bool) -> Any:
        if value is None and self.may_be_none:
            return value
        check_one_number(name, value)
        if self.least is None:
            return value
        fits = value > self.least if self.above else value >= self.least
        if not (fits and value <= self.most):
            raise ValueError(f"Invalid {self.label or name} value: {value}")
        return value

    def check_kind(self, name: str, value: Any) -> None:
        if value is None and self.may_be_none:
            return
        check_one_number(name, value)

    def check_float(self, name: str, value: Any) -> None:
        if not (value is None and self.may_be_none):
            float(value)

    def plain(self, value: Any) -> Any:
        """Returns Python's own number in place of another one, as of numpy, or of a tensor."""
        return _plain_number(value)

    def is_usual(self, value: Any, half: bool) -> bool:
        if self.is_limit:
            return True
        most = min(self.usual, _MOST_OF_HALF if half else _MOST)
        return (-most if self.least is None else 0) <= _as_number(value) <= most

    def has_text(self, value: Any) -> bool:
        return isinstance(value, str)


@dataclass(frozen=True, kw_only=True)
class LearningRate(Number):
    """The learning rate, of one element if a tensor."""

    def checked(self, name: str, value: Any, tensors: bool) -> Any:
        check_number(name, value)
        if isinstance(value, Tensor):
            if not tensors:
                raise ValueError(
                    f"{name} as a Tensor is not supported for capturable=False and foreach=True"
                )
            if value.numel() != 1:
                raise ValueError(f"Tensor {name} must be 1-element")
        if not value >= 0.0:
            raise ValueError(f"Invalid learning rate: {value}")
        return value

    def plain(self, value: Any) -> Any:
        """Returns Python's own number in place of another one; a tensor stays, as in torch."""
        return value if isinstance(value, Tensor) else _plain_number(value)


@dataclass(frozen=True, kw_only=True)
class Count(Number):
    """A whole number of something, which no operation on a tensor takes."""

    def is_usual(self, value: Any, half: bool) -> bool:
        return type(value) is int or super().is_usual(value, half)


@dataclass(frozen=True, kw_only=True)
class NumberTuple(Option):
    """Several numbers, in whatever sequence.

    Attributes:
        count: how many numbers there have to be; None where the optimizer checks that itself.
        any_sign: whether negative numbers are usual.
    """

    always_saved: bool = True
    count: int | None = 2
    any_sign: bool = False

    def checked(self, name: str, value: Any, tensors: bool) -> Any:
        self.check_kind(name, value)
        return value

    def check_kind(self, name: str, value: Any) -> None:
        if self.count is not None:
            check_pair(name, value)

    def check_float(self, name: str, value: Any) -> None:
        self.check_kind(name, value)

    def plain(self, value: Any) -> Any:
        """Returns a tuple of numbers in place of another sequence."""
        if value is None or isinstance(value, str) or _is_one_number(value):
            return value
        numbers = tuple(map(self._plain_part, value))
        is_plain = isinstance(value, (list, tuple))
        return value if is_plain and [*map(type, value)] == [*map(type, numbers)] else numbers

    def _plain_part(self, value: Any) -> Any:
        return _plain(value)

    def is_usual(self, value: Any, half: bool) -> bool:
        most = _MOST_OF_HALF if half else _MOST
        values = value if isinstance(value, (list, tuple)) else (value,)
        return all((-most if self.any_sign else 0) <= _as_number(each) <= most for each in values)

    def has_text(self, value: Any) -> bool:
        if isinstance(value, str):
            return self.count is not None
        return isinstance(value, (list, tuple)) and str in map(type, value)


@dataclass(frozen=True, kw_only=True)
class Counts(NumberTuple):
    """Several whole numbers of something, which no operation on a tensor takes; None for none."""

    count: int | None = None

    def is_usual(self, value: Any, half: bool) -> bool:
        return True

    def has_text(self, value: Any) -> bool:
        return isinstance(value, str) or super().has_text(value)


@dataclass(frozen=True, kw_only=True)
class Betas(NumberTuple):
    """The coefficients of running averages."""

    def checked(self, name: str, value: Any, tensors: bool) -> Any:
        """Returns the betas, tensors of one element among them without dimensions."""
        betas = self._as_tuple(name, value)
        for index, beta in enumerate(betas[: self.count]):
            check_number(f"{name}[{index}]", beta)
            if isinstance(beta, Tensor) and beta.numel() != 1:
                raise ValueError(f"Tensor {name}[{index}] must be 1-element")
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        self._check_count(name, betas)
        is_tensor = [isinstance(beta, Tensor) for beta in betas[:2]]
        if any(is_tensor) and not all(is_tensor):
            raise ValueError(f"{name} must be either both floats or both Tensors")
        if any(is_tensor) and not tensors:
            raise ValueError(
                f"{name}[0] as a Tensor is not supported for capturable=False and foreach=True"
            )
        return tuple(map(as_number, betas))

    def check_kind(self, name: str, value: Any) -> None:
        betas = self._as_tuple(name, value)
        for index, beta in enumerate(betas):
            check_number(f"{name}[{index}]", beta)
        self._check_count(name, betas)

    def check_float(self, name: str, value: Any) -> None:
        self.floats(name, value)

    def _plain_part(self, value: Any) -> Any:
        """Leaves tensors, which torch takes for betas."""
        return value if isinstance(value, Tensor) else _plain(value)

    def floats(self, name: str, betas: Iterable[float | Tensor]) -> list[float]:
        """Returns the betas as numbers; raises if there are too many or too few."""
        numbers = list(map(float, betas))
        self._check_count(name, numbers)
        return numbers

    def is_usual(self, value: Any, half: bool) -> bool:
        values = value if isinstance(value, (list, tuple)) else (value,)
        return all(
            0 <= _as_number(beta) < 1 and not (half and 1 - beta < _LEAST_OF_HALF)
            for beta in values
        )

    def _form(self) -> str:
        return f"({', '.join(f'beta{i + 1}' for i in range(self.count or 0))})"

    def _as_tuple(self, name: str, betas: Any) -> tuple[Any, ...]:
        try:
            if not isinstance(betas, (str, bytes)):
                return tuple(betas)
        except TypeError:
            pass
        raise TypeError(f"{name} must be {self._form()}, not {betas!r}")

    def _check_count(self, name: str, betas: Iterable[Any]) -> None:
        found = tuple(betas)
        if len(found) != self.count:
            others = "Adan has three" if self.count == 2 else "other optimizers have two"
            raise ValueError(f"{name} must be {self._form()}, not {found!r}; {others}")


#: What an optimizer says of all of its options, by their names.
Options = Mapping[str, Option]


def named_values(options: Options, field: str) -> dict[str, Any]:
    """Returns the values that a field of the records has, by the options' names."""
    values = {name: getattr(option, field) for name, option in options.items()}
    return {name: value for name, value in values.items() if value is not NOTHING}


def always_saved(options: Options) -> set[str]:
    """Returns the names of the options that no dictionary of the optimizer lacks."""
    return {
        name
        for name, option in options.items()
        if option.always_saved and option.before is NOTHING and option.unset is NOTHING
    }


def check_ranges(options: Options, values: dict[str, Any], tensors: bool) -> None:
    """Raises the first option of a constructor that is out of range, with torch's texts.

    Betas become numbers, or tensors without dimensions, in ``values``.
    """
    for name, value in values.items():
        if name in options:
            values[name] = options[name].checked(name, value, tensors)


def check_kinds(options: Options, group: Mapping[str, Any]) -> None:
    """Raises an option of a group that is of another kind; its range may be any.

    A number given as a text is one: float() would take it.
    """
    for name in options.keys() & group.keys():
        options[name].check_kind(name, group[name])


def check_floats(options: Options, group: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises if an option among ``names`` that is a number cannot be taken as a number."""
    for name in names:
        if name in options and (name in group or options[name].unset is NOTHING):
            options[name].check_float(name, group[name])


def floats(options: Options, group: Mapping[str, Any]) -> list[float]:
    """Returns the betas of a group as numbers; none if its optimizer has no betas."""
    return [
        beta
        for name, option in options.items()
        if isinstance(option, Betas) and name in group
        for beta in option.floats(name, group[name])
    ]


def numeric(options: Options, group: Mapping[str, Any]) -> str:
    """The options of a group that are numbers or should be, for an error's text."""
    return ", ".join(
        f"{name}={value!r}"
        for name, value in group.items()
        if isinstance(options.get(name), (Number, NumberTuple))
    )


def make_plain(options: Options, group: dict[str, Any], *, sequences: bool = True) -> None:
    """Makes numbers and tuples of others, whose types torch.load() or a checkpoint may not take.

    ``sequences``: whether also of sequences that may have no order, as checks tell. All others
    become plain before checks, which look for Python's own numbers.
    """
    for name in options.keys() & group.keys():
        value = group[name]
        if not sequences and isinstance(options[name], NumberTuple) and not _is_ordered(value):
            continue
        plain = options[name].plain(value)
        if plain is not value:
            group[name] = plain


_TEXT_OR_SEQUENCE = frozenset({str, tuple, list})


def has_text(options: Options, group: Mapping[str, Any]) -> bool:
    """Returns whether a group has a text for an option, where none may be. Every step asks."""
    return any(
        type(value) in _TEXT_OR_SEQUENCE and name in options and options[name].has_text(value)
        for name, value in group.items()
    )


def are_usual(options: Options, group: Mapping[str, Any], half: bool) -> bool:
    """Returns whether no operation of a step can refuse a number that follows from the options.

    ``half``: whether some are of float16. Options on a device count as usual: to look at them would
    wait for it.
    """
    return all(
        type(value) in _NO_NUMBERS or name not in options or options[name].is_usual(value, half)
        for name, value in group.items()
    )


# Numbers


def check_number(name: str, value: Any) -> None:
    """Raises if an option is no number: YAML, for one, reads 1e-3 as a text."""
    if not is_number(value):
        text = f"{name} must be a number, not {value!r}"
        raise TypeError(f"{text}: write float({value!r})" if _reads_as_number(value) else text)


def check_one_number(name: str, value: Any) -> None:
    """Raises if an option is no number, or is several."""
    check_number(name, value)
    if math.prod(getattr(value, "shape", ())) != 1:
        kind = "Tensor" if isinstance(value, Tensor) else "Array"
        raise ValueError(f"{kind} {name} must be 1-element")
    if isinstance(value, Tensor) and value.is_complex():
        raise TypeError(f"{name} must be a real number, not {value!r}")


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


def check_pair(name: str, pair: Any) -> None:
    """Raises if an option is not two numbers, in whatever sequence."""
    if not is_pair(pair):
        raise TypeError(f"{name} must be two numbers, not {pair!r}")
    for index, value in enumerate(pair):
        check_number(f"{name}[{index}]", value)


def is_pair(value: Any) -> bool:
    """Returns whether a value has two parts in an order."""
    return _is_ordered(value) and not isinstance(value, Tensor) and len(value) == 2


def as_number(option: float | Tensor) -> float | Tensor:
    """A one-element tensor without dimensions, which would go over to the weight."""
    return option.squeeze() if isinstance(option, Tensor) else option


def _is_ordered(value: Any) -> bool:
    """Returns whether a value may have parts in an order, as lists of configurations have."""
    kind = type(value)
    is_other = isinstance(value, (str, bytes, Mapping, Set))
    return not is_other and hasattr(kind, "__getitem__") and hasattr(kind, "__len__")


def _is_one_number(value: Any) -> bool:
    return is_number(value) and getattr(value, "shape", ()) in ((), (1,))


def _plain(value: Any) -> Any:
    """A number as Python's own, and the numbers of a sequence, or of several in it, in tuples."""
    if not isinstance(value, Iterable) or isinstance(value, str) or _is_one_number(value):
        return _plain_number(value)
    return tuple(map(_plain, value))


def _plain_number(value: Any) -> Any:
    """A number as Python's own; all else as it is, and a tensor that autograd or a graph needs."""
    if type(value) in (int, float, bool) or not _is_one_number(value):
        return value
    if isinstance(value, Tensor):
        is_needed = type(value) is not Tensor or value.requires_grad or value.is_meta
        return value if is_needed else value.item()
    if hasattr(value, "item"):  # of numpy
        return value.item()
    return int(value) if hasattr(type(value), "__index__") else float(value)


def _as_number(value: Any) -> float:
    """An option as a number; zero if it is none, which is for the step to say."""
    if type(value) is float:
        return value
    if not is_number(value) or (isinstance(value, Tensor) and not _is_here(value)):
        return 0
    try:
        # Torch warns where a number of a graph is taken out of it.
        return float(value.detach() if isinstance(value, Tensor) else value)
    except OverflowError:  # an int
        return math.inf
    except (RuntimeError, TypeError, ValueError):
        return 0


def _is_here(number: Tensor) -> bool:
    return number.is_cpu and number.numel() == 1
