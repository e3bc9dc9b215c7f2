"""Optimizers with groups that Muon steps, and groups that a rule of the library steps.

This has which groups these are, and the program of their step. Subclasses have the other rule
beside Muon's, as their base.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fusedstep._matrix.arrangement import MOST_BYTES, arrange, last_arrangement, takes_native
from fusedstep._matrix.gathered_stages import Shards
from fusedstep._matrix.local_stages import LocalStages
from fusedstep._matrix.muon_formula import formula
from fusedstep._matrix.muon_groups import (
    check_muon_options,
    form_of,
    ns_dtype_of,
    ratio_of,
    uses_muon,
    why_no_matrix,
)
from fusedstep._matrix.muon_step import Stages, step
from fusedstep._matrix.native_batches import ChosenStages, NativeStages
from fusedstep._matrix.newton_schulz import Scratch
from fusedstep._matrix.operands import Moving
from fusedstep._matrix.step_options import StepOptions
from fusedstep._matrix.together import Together
from fusedstep._sharding.dtensor import local
from fusedstep._sharding.exchange import cut_of, is_gathered, step_whole, transfer_device
from fusedstep._state.checks import name_of
from fusedstep._step.factors import Factors
from fusedstep._step.owner import Owner
from fusedstep._step.plan import Work
from fusedstep._step.program import MOST_COPIES, Pass, Program, run, size_of
from fusedstep._step.strategy import Strategy, strategy_of
from fusedstep._step.sums import of_each


class MuonSteps(Owner):
    """Steps groups with ``use_muon`` by Muon, and all others as the next class does."""

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

    def _takes_batches(self, weights: list[Tensor], grads: list[Tensor]) -> bool:
        """Returns whether weights of a composite group are stepped in batches, not one by one."""
        return len(set(weights)) == len(weights)  # else one of them moves twice

    def _second_step(self, group: dict[str, Any], moving: list[Moving]) -> Callable[[], None]:
        """Prepares a step that weights take when Muon has moved them, and returns what takes it.

        Nothing is written before, and nothing can fail on a CPU from then on.
        """
        return lambda: None

    # Which groups

    def _check_group(self, index: int, group: dict[str, Any]) -> None:
        check_muon_options(self._as_muon(group))
        if not uses_muon(group):
            return
        for place, weight in enumerate(group["params"]):
            if reason := why_no_matrix(self._as_muon(group), weight, self._other):
                raise ValueError(f"{name_of(group, index, place)} {reason}")

    def _rule_options(self, group: dict[str, Any]) -> dict[str, Any]:
        return super()._rule_options(self._as_other(group))

    # The step

    @functools.cached_property
    def _scratch(self) -> Scratch:
        return Scratch()

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


class MuonStrategy(Strategy):
    """Steps groups with ``use_muon`` in batches of matrices, and all others as the next class."""

    def is_composite(self, optimizer: Owner, group: dict[str, Any]) -> bool:
        return uses_muon(group) and optimizer._wants_native(group)

    def exchanges(self, optimizer: Owner, group: dict[str, Any]) -> bool:
        return uses_muon(group)

    def check_options(self, optimizer: Owner, item: Work) -> None:
        of, group = cast("MuonSteps", optimizer), item.group
        has_all = len(group["params"]) == len(item.weights)
        if has_all and last_arrangement(of, group, item.weights):  # weights have been looked at
            check_muon_options(of._as_muon(group))
        else:
            of._check_group(item.number, group)

    def program(self, optimizer: Owner, work: list[Work], factors: Factors) -> Program:
        return MuonProgram(optimizer, work, factors)

    def products_dtype(
        self, optimizer: Owner, group: dict[str, Any], weight: Tensor
    ) -> torch.dtype | None:
        if not uses_muon(group):
            return None
        products = ns_dtype_of(group, weight.device)
        if group.get("ns_dtype") is None and products is torch.float16:
            products = torch.bfloat16  # updates are rounded to it before products in float16
        return max(products, weight.dtype, key=lambda dtype: torch.finfo(dtype).eps)

    def exact_options(self, optimizer: Owner, group: dict[str, Any]) -> dict[str, Any]:
        return {"ns_dtype": torch.float64} if uses_muon(group) else {}


class MuonProgram(Program):
    """Steps the matrices of groups batch by batch, and all other weights one by one."""

    optimizer: MuonSteps

    def run(self, work: list[Work]) -> list[Pass]:
        # Before anything is changed: transfers that some processes take no part in would not end.
        weights = [p for item in work if uses_muon(item.group) for p in item.weights]
        self.optimizer._spread_weights().sums_of_rows(of_each(0), weights, [[] for _ in weights])
        strategy = strategy_of(self.optimizer)
        for group, some, grads, *_ in work:
            is_composite = strategy.is_composite(self.optimizer, group)
            if not (is_composite and self._step(group, some, grads)):
                self.step(group, some, grads)
        return []

    def part_size(self, item: Work) -> int:
        """That of a batch, if the group has batches."""
        sizes = list(map(size_of, item.weights, item.grads))
        is_composite = strategy_of(self.optimizer).is_composite(self.optimizer, item.group)
        batch = min(sum(sizes), MOST_BYTES) if is_composite else 0
        return MOST_COPIES * max(batch, *sizes)

    def _step(self, own: dict[str, Any], weights: list[Tensor], grads: list[Tensor]) -> bool:
        """Steps the weights of a group, or returns False if batches do not take them."""
        optimizer, grads = self.optimizer, list(map(local, grads))
        group, scratch = optimizer._as_muon(own), optimizer._scratch
        arranged = last_arrangement(optimizer, group, weights)
        if arranged is None:
            if not optimizer._takes_batches(weights, grads):
                return False
            arranged = arrange(optimizer, group, weights)
        for native in arranged.native:
            some = [grads[i] for batch in native.batches for i in batch.places]
            options = StepOptions(group, native.device, optimizer._ratio)
            if takes_native(group, native.values[0]) and native.fits(options, some):
                stages = ChosenStages if options.has_choice else NativeStages
                make = functools.partial(stages, options, scratch, native, some)
                self._take([p for batch in native.batches for p in batch.weights], group, make)
            else:
                self._take_batches(group, native.batches, grads)
        self._take_batches(group, arranged.batches, grads)
        for (cut, *_), places in arranged.cut_alike.items():
            some, found = ([each[i] for i in places] for each in (weights, grads))
            there = transfer_device(cut, some[0].device)
            options = StepOptions(group, there, optimizer._ratio)
            shards = Shards(optimizer, options, scratch, cut, some, found)
            second = functools.partial(optimizer._second_step, group)
            run(step(stages, second) for stages in shards.stages())
        return True

    def _take_batches(
        self, group: dict[str, Any], batches: list[Together], grads: list[Tensor]
    ) -> None:
        """Steps one batch after another; ``grads``: of all weights of the step."""
        optimizer, scratch = self.optimizer, self.optimizer._scratch
        for batch in batches:
            options = StepOptions(group, batch.weights[0].device, optimizer._ratio)
            some = [grads[i] for i in batch.places]
            make = functools.partial(LocalStages, optimizer, options, scratch, batch, some)
            self._take(batch.weights, group, make)

    def _take(
        self, weights: list[Tensor], group: dict[str, Any], make: Callable[[], Stages]
    ) -> None:
        """Steps some weights, or changes nothing if memory runs out. ``make``: makes the stages."""
        second = functools.partial(self.optimizer._second_step, group)
        self.optimizer._progress.take(weights, lambda: run([step(make(), second)]))
