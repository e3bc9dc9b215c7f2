"""The optimizers that there are: the classes of the package, and objects by a name."""

from __future__ import annotations

import itertools
import weakref

from fusedstep._step.owner import Owner

#: The classes of the package.
classes: list[type[Owner]] = []

#: Every optimizer by a name that a compiled graph knows it by.
by_name: weakref.WeakValueDictionary[str, Owner] = weakref.WeakValueDictionary()
_names = map(str, itertools.count())


def register(optimizer: Owner) -> str:
    """Returns the name that the optimizer has from now on."""
    name = next(_names)
    by_name[name] = optimizer
    return name
