"""A step that stops half way: part of it is undone, or taken again with memory kept for that.

Where this does not help, an error names what has been stepped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from fusedstep._sharding.dtensor import local
from fusedstep._state.checks import name_of
from fusedstep._step.plan import Work

#: Names that an error lists; it counts the others.
_MOST_NAMES = 20


class Saved:
    """The values that tensors have now; with ``rows`` those at these indices of dimension 0.

    Of a DTensor they are those of this process's part.
    """

    def __init__(self, tensors: Iterable[Tensor], rows: Tensor | None = None) -> None:
        self._values = []
        for tensor in map(local, tensors):
            of = rows if tensor.numel() > 1 else None  # a count may have the shape [1]
            values = tensor.detach().clone() if of is None else tensor.detach()[of]
            self._values.append((tensor, of, values))

    @torch.no_grad()
    def put_back(self) -> None:
        """Gives the tensors their values back, and allocates nothing."""
        for tensor, rows, values in self._values:
            if rows is None:
                tensor.copy_(values)
            else:
                tensor.index_copy_(0, rows, values)


@contextmanager
def undone_on_error(tensors: Iterable[Tensor], rows: Tensor | None = None) -> Iterator[None]:
    """Gives tensors back the values that they have now, if the CPU's memory runs out.

    With ``rows`` nothing else is written. On devices nothing is kept: copies would take longer
    there than the step.
    """
    written = list(tensors)
    saved = Saved(written if all(tensor.is_cpu for tensor in written) else (), rows)
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            saved.put_back()
        raise


class Reserve:
    """Memory that is kept aside while a step goes on part by part, each of which is all or nothing.

    A part that finds none after others have been taken is taken again, with this given back. The
    memory is never touched: it takes address space alone.
    """

    def __init__(self, size: int) -> None:
        """``size``: the bytes that the largest part may allocate; 0 takes no part again."""
        self._size = size
        self._held = torch.UntypedStorage(size, device="cpu") if size else None

    def take(self, part: Callable[[], None], is_first: bool) -> None:
        """Takes a part; one that is the first may fail: nothing has happened then."""
        if is_first or self._held is None:
            part()
            return
        try:
            part()
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        else:
            return
        self._held = None
        part()
        with suppress(MemoryError, RuntimeError):  # else the error of a next part names this one
            self._held = torch.UntypedStorage(self._size, device="cpu")


#: For steps whose parts are not taken again.
NO_RESERVE = Reserve(0)


def numbers_first(like: Tensor, *numbers: float) -> tuple[Tensor, ...]:
    """Numbers of operations on a tensor, as tensors that these would make of them one by one.

    Nobody writes to them: the weights of a step share them.
    """
    is_narrow = like.is_floating_point() and like.dtype is not torch.float64
    dtype = torch.float32 if is_narrow else like.dtype
    # Under a dispatch mode they may be tensors of its own.
    make = _made_tensors if torch._C._len_torch_dispatch_stack() else _kept_tensors
    return make(dtype, numbers)


def _made_tensors(dtype: torch.dtype, numbers: tuple[float, ...]) -> tuple[Tensor, ...]:
    return torch.tensor(numbers, dtype=dtype, device="cpu").unbind()


_kept_tensors = functools.lru_cache(maxsize=64)(_made_tensors)


def is_out_of_memory(error: Exception) -> bool:
    texts = ("bad_alloc", "there is no memory", "can't allocate memory", "out of memory")
    return isinstance(error, MemoryError) or any(text in str(error) for text in texts)


def interrupted(error: Exception, work: list[Work], stepped: list[Tensor]) -> Exception:
    """The error of a step whose memory ran out: it names the weights that have been stepped.

    It has them as ``stepped``. Any other error, and one before the first weight, is returned as it
    is.
    """
    if not (stepped and is_out_of_memory(error)):
        return error
    done = set(map(id, stepped))
    names, total = [], 0
    for item in work:
        places = {id(p): place for place, p in enumerate(item.group["params"])}
        names += [
            name_of(item.group, item.number, places[id(p)]) for p in item.weights if id(p) in done
        ]
        total += len(item.weights)
    listed = ", ".join(names[:_MOST_NAMES])
    others = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    found = MemoryError(
        f"memory ran out in a step of {total} weights. Stepped: {listed}{others}. The other "
        f"{total - len(names)} and their states are as they were: with the gradients of those that "
        f"have been stepped set to None, step() takes them. {error}"
    )
    found.stepped = stepped  # type: ignore[attr-defined]  # Python's error has it added
    return found


class Progress:
    """A step under way: the weights that it has stepped, and the memory that parts are taken with.

    As a context it has an error name these weights, if memory runs out.
    """

    def __init__(self, work: list[Work], reserve: Reserve = NO_RESERVE) -> None:
        self._work, self._reserve = work, reserve
        self.stepped: list[Tensor] = []

    def take(self, weights: list[Tensor], part: Callable[[], None]) -> None:
        """Takes the step of some weights, which is all or nothing."""
        self._reserve.take(part, is_first=not self.stepped)
        self.stepped += weights

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        work, stepped = self._work, self.stepped
        self._work, self._reserve, self.stepped = [], NO_RESERVE, []
        if isinstance(error, (MemoryError, RuntimeError)):
            found = interrupted(error, work, stepped)
            if found is not error:
                raise found from error
