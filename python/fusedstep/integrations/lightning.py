"""Lightning: ``--optimizer AdamW`` of a ``LightningCLI`` makes an optimizer of this package."""

from __future__ import annotations

import functools
from typing import Any

from torch.optim import Optimizer

from fusedstep import optim
from fusedstep.integrations._replaced import Replaced

_replaced = Replaced()


def register() -> None:
    """Makes ``--optimizer NAME`` look up the classes of this package first.

    ``LightningCLI`` knows a class by its path, or by its name alone if no other subclass of
    ``torch.optim.Optimizer`` has the name. As soon as this package is imported there are two
    ``AdamW``, and the name is an error. After this it is ours. Names that no class of this package
    has, and paths such as ``torch.optim.AdamW``, select what they select without it; so does a
    command line that offers some classes only. All arguments are set as those of other classes:
    ``--optimizer.betas "[0.9, 0.95]"``.

    It counts for a ``LightningCLI`` that is made after the call.
    """
    if _replaced:
        return
    from lightning.pytorch.cli import LightningArgumentParser

    theirs = LightningArgumentParser.add_optimizer_args

    @functools.wraps(theirs)
    def add_optimizer_args(
        self: Any, optimizer_class: Any = (Optimizer,), *args: Any, **options: Any
    ) -> None:
        if _replaced and isinstance(optimizer_class, tuple) and Optimizer in optimizer_class:
            optimizer_class = (optim.FusedOptimizer, *optimizer_class)
        theirs(self, optimizer_class, *args, **options)

    _replaced.put((LightningArgumentParser, "add_optimizer_args", add_optimizer_args))


def unregister() -> None:
    """Makes names select classes as Lightning does by itself."""
    _replaced.put_back()
