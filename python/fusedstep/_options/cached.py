"""functools.cache, as type checkers should see it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])


def cached(function: _Function) -> _Function:
    """Returns a function that remembers its results by its arguments, as functools.cache does.

    The returned function keeps the types of the arguments. functools.cache declares all arguments
    Hashable, and mypy does not see that classes of optimizers are hashable.
    """
    return cast(_Function, functools.cache(function))
