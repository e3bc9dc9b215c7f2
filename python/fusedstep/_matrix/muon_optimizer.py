"""Optimizers with groups that Muon steps, and groups that a rule of the library steps.

This has which groups these are, and the formulas. Subclasses have the other rule beside Muon's, as
their base; ``muon_steps.py`` steps the groups.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedstep._matrix.muon_formula import formula
from fusedstep._matrix.muon_groups import (
    check_muon_options,
    form_of,
    ratio_of,
    uses_muon,
    why_no_matrix,
)
from fusedstep._sharding.dtensor import local
from fusedstep._sharding.exchange import cut_of, is_gathered, step_whole
from fusedstep._state.checks import name_of
from fusedstep._step.owner import Owner


class MuonOptimizer(Owner):
    """Has groups with ``use_muon``, which Muon steps, and groups of the next class."""

    _queues_factors = True

    # A class's own words for its groups

    def _as_muon(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group with Muon's options: those that it has not are what the class does always."""
        return group

    def _as_other(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group without Muon, with the options of the other rule."""
        raise NotImplementedError

    #: The class that steps groups without Muon, in errors.
    _other: str

    def _ratio(self, group: dict[str, Any], shape: Sequence[int]) -> float:
        """The factor of the learning rate for a matrix: its rows, and all other dimensions."""
        return ratio_of(group, shape[0], math.prod(shape[1:]))

    def _check_group(self, index: int, group: dict[str, Any]) -> None:
        check_muon_options(self._as_muon(group))
        if not uses_muon(group):
            return
        for place, weight in enumerate(group["params"]):
            if reason := why_no_matrix(self._as_muon(group), weight, self._other):
                raise ValueError(f"{name_of(group, index, place)} {reason}")

    # Weight by weight

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        if not uses_muon(group):
            super()._imperative(self._as_other(group), weight, grad, state)
            return
        group = self._as_muon(group)
        if is_gathered(form_of(group, weight), cut_of(weight)):
            step_whole(functools.partial(self._formula, group), weight, grad, state)
        else:
            parts = {name: local(each) for name, each in state.items()}
            new = dict(parts)
            local(weight).copy_(self._formula(group, local(weight), local(grad), new))
            for name, each in parts.items():
                if each is not new[name]:
                    each.copy_(new[name])

    def _formula(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        if not uses_muon(group):
            return super()._formula(group, weight, grad, state)
        return formula(group, weight, grad, state, self._ratio)
