"""Optimizers under the names that they have where states of 8 and 4 bits come from.

Each is the class that its name begins with, with ``state_dtype`` set: see
:class:`~fusedstep.optim.AdamW`. Recipes pass ``fused`` and ``foreach`` to every optimizer; here
``foreach`` changes nothing.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from fusedstep.optim._base import FusedOptimizer
from fusedstep.optim.adagrad import Adagrad
from fusedstep.optim.adam import Adam
from fusedstep.optim.adamw import AdamW
from fusedstep.optim.lamb import Lamb
from fusedstep.optim.lion import Lion
from fusedstep.optim.rmsprop import RMSprop
from fusedstep.optim.sgd import SGD

_Class = TypeVar("_Class", bound=type[FusedOptimizer])


def _named(name: str, base: _Class, kind: str) -> _Class:
    @functools.wraps(base.__init__)
    def constructor(self: Any, *args: Any, foreach: bool | None = None, **options: Any) -> None:
        base.__init__(self, *args, **({"state_dtype": kind} | options))

    doc = f"""{base.__name__} with states in codes: ``state_dtype="{kind}"``.

    Arguments are those of :class:`{base.__name__}`. ``foreach`` is taken and changes nothing.
    """
    members = {"__init__": constructor, "__doc__": doc, "__module__": __name__}
    return type(base)(name, (base,), members, is_alias=True)


Adagrad8bit = _named("Adagrad8bit", Adagrad, "int8")
Adam8bit = _named("Adam8bit", Adam, "int8")
AdamW8bit = _named("AdamW8bit", AdamW, "int8")
Lamb8bit = _named("Lamb8bit", Lamb, "int8")
Lion8bit = _named("Lion8bit", Lion, "int8")
RMSprop8bit = _named("RMSprop8bit", RMSprop, "int8")
SGD8bit = _named("SGD8bit", SGD, "int8")
Adam4bit = _named("Adam4bit", Adam, "int4")
AdamW4bit = _named("AdamW4bit", AdamW, "int4")
AdamFp8 = _named("AdamFp8", Adam, "fp8")
AdamWFp8 = _named("AdamWFp8", AdamW, "fp8")
