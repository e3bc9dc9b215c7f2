"""The optimizers that are compared over the sizes of GPT-2."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fusedstep import optim

#: Many steps, from random gradients, keep weights near where they are.
LR = 1e-7


@dataclass(frozen=True)
class Contestant:
    title: str
    build: Callable[[Iterable[Tensor]], torch.optim.Optimizer]
    exists: Callable[[torch.device], bool] = lambda device: True


def _adam(**options: bool) -> Callable[[Iterable[Tensor]], torch.optim.Optimizer]:
    return lambda params: torch.optim.Adam(params, lr=LR, **options)


def _adan(**options: bool) -> Callable[[Iterable[Tensor]], torch.optim.Optimizer]:
    return lambda params: optim.Adan(params, lr=LR, **options)


def _authors(**options: bool) -> Callable[[Iterable[Tensor]], torch.optim.Optimizer]:
    def build(params: Iterable[Tensor]) -> torch.optim.Optimizer:
        from adan import Adan

        return Adan(params, lr=LR, fused=True, **options)

    return build


def has_authors(device: torch.device) -> bool:
    """Whether the authors' package is there with its kernels, which know no CPU."""
    packages = ("adan", "fused_adan")
    return device.type == "cuda" and all(map(importlib.util.find_spec, packages))


CONTESTANTS = {
    "adam_for_loop": Contestant("Adam, for-loop", _adam(foreach=False, fused=False)),
    "adam_foreach": Contestant("Adam, foreach", _adam(foreach=True)),
    "adam_fused": Contestant("Adam, fused", _adam(fused=True)),
    "adan_for_loop": Contestant("Adan, for-loop", _adan(foreach=False, fused=False)),
    "adan_foreach": Contestant("Adan, foreach", _adan(foreach=True, fused=False)),
    "adan_single": Contestant("Adan, fused single", _adan(foreach=False, fused=True)),
    "adan_multi": Contestant("Adan, fused multi", _adan(foreach=True, fused=True)),
    "authors_single": Contestant("authors' fused single", _authors(foreach=False), has_authors),
    "authors_multi": Contestant("authors' fused multi", _authors(foreach=True), has_authors),
}


def present(device: torch.device) -> list[str]:
    return [name for name, contestant in CONTESTANTS.items() if contestant.exists(device)]


def problem(error: Exception) -> dict[str, str]:
    """What stands in the results in place of figures."""
    told = str(error).split("\n")[0].split(". ")[0]
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        return {"out of memory": told}
    return {"failed": told}
