"""functools.cache, as type checkers should see it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])


def cached(function: _Function) -> _Function:
    """Keeps what a function has returned. The type of its arguments is that of the function.

    That of functools.cache is Hashable, which mypy does not find in classes of optimizers.
    """
    return cast(_Function, functools.cache(function))
