"""How groups of Muon are stepped: in batches of matrices, by a program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from fusedstep._matrix.arrangement import MOST_BYTES, arrange, last_arrangement, takes_native
from fusedstep._matrix.gathered_stages import Shards
from fusedstep._matrix.local_stages import LocalStages
from fusedstep._matrix.muon_groups import check_muon_options, ns_dtype_of, uses_muon
from fusedstep._matrix.muon_optimizer import MuonOptimizer
from fusedstep._matrix.muon_step import Stages, step
from fusedstep._matrix.native_batches import ChosenStages, NativeStages
from fusedstep._matrix.newton_schulz import Scratch
from fusedstep._matrix.operands import Moving
from fusedstep._matrix.step_options import StepOptions
from fusedstep._matrix.together import Together
from fusedstep._sharding.dtensor import local
from fusedstep._sharding.exchange import transfer_device
from fusedstep._state.kinds import Group
from fusedstep._step.binding import spread_weights
from fusedstep._step.factors import Factors
from fusedstep._step.kernels import wants_native
from fusedstep._step.owner import Owner
from fusedstep._step.plan import Work
from fusedstep._step.program import MOST_COPIES, Pass, Program, run, size_of
from fusedstep._step.strategy import Strategy
from fusedstep._step.sums import of_each


class MuonSteps(Strategy):
    """Steps groups with ``use_muon`` in batches of matrices, and all others as the next class."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = Scratch()
        """Memory of batches."""

    def is_composite(self, optimizer: Owner, group: Group) -> bool:
        return uses_muon(group) and wants_native(optimizer, group)

    def exchanges(self, optimizer: Owner, group: Group) -> bool:
        return uses_muon(group)

    def check_options(self, optimizer: Owner, item: Work) -> None:
        of, group = cast("MuonOptimizer", optimizer), item.group
        has_all = len(group["params"]) == len(item.weights)
        if has_all and last_arrangement(of, group, item.weights):  # weights have been looked at
            check_muon_options(of._as_muon(group))
        else:
            of._check_group(item.number, group)

    def program(self, optimizer: Owner, work: list[Work], factors: Factors) -> Program:
        return MuonProgram(optimizer, work, factors, self)

    def products_dtype(self, optimizer: Owner, group: Group, weight: Tensor) -> torch.dtype | None:
        if not uses_muon(group):
            return None
        products = ns_dtype_of(group, weight.device)
        if group.get("ns_dtype") is None and products is torch.float16:
            products = torch.bfloat16  # updates are rounded to it before products in float16
        return max(products, weight.dtype, key=lambda dtype: torch.finfo(dtype).eps)

    def exact_options(self, optimizer: Owner, group: Group) -> dict[str, Any]:
        return {"ns_dtype": torch.float64} if uses_muon(group) else {}

    # What another class does in the same step

    def takes_batches(self, weights: list[Tensor], grads: list[Tensor]) -> bool:
        """Returns whether weights of a composite group are stepped in batches, not one by one."""
        return len(set(weights)) == len(weights)  # else one of them moves twice

    def second_step(
        self, optimizer: Owner, group: Group, moving: list[Moving]
    ) -> Callable[[], None]:
        """Prepares a step that weights take when Muon has moved them, and returns what takes it.

        Nothing is written before, and nothing can fail on a CPU from then on.
        """
        return lambda: None


class MuonProgram(Program):
    """Steps the matrices of groups batch by batch, and all other weights one by one."""

    optimizer: MuonOptimizer

    def __init__(
        self, optimizer: Owner, work: list[Work], factors: Factors, strategy: MuonSteps
    ) -> None:
        """``work``: that without a plan. ``strategy``: that of the optimizer."""
        super().__init__(optimizer, work, factors)
        self._strategy = strategy

    def run(self, work: list[Work]) -> list[Pass]:
        # Before anything is changed: transfers that some processes take no part in would not end.
        weights = [p for item in work if uses_muon(item.group) for p in item.weights]
        spread_weights(self.optimizer).sums_of_rows(of_each(0), weights, [[] for _ in weights])
        for group, some, grads, *_ in work:
            is_composite = self._strategy.is_composite(self.optimizer, group)
            if not (is_composite and self._step(group, some, grads)):
                self.step(group, some, grads)
        return []

    def part_size(self, item: Work) -> int:
        """That of a batch, if the group has batches."""
        sizes = list(map(size_of, item.weights, item.grads))
        is_composite = self._strategy.is_composite(self.optimizer, item.group)
        batch = min(sum(sizes), MOST_BYTES) if is_composite else 0
        return MOST_COPIES * max(batch, *sizes)

    def _step(self, own: dict[str, Any], weights: list[Tensor], grads: list[Tensor]) -> bool:
        """Steps the weights of a group, or returns False if batches do not take them."""
        optimizer, grads = self.optimizer, list(map(local, grads))
        group, scratch = optimizer._as_muon(own), self._strategy.scratch
        arranged = last_arrangement(optimizer, group, weights)
        if arranged is None:
            if not self._strategy.takes_batches(weights, grads):
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
            second = functools.partial(self._strategy.second_step, optimizer, group)
            run(step(stages, second) for stages in shards.stages())
        return True

    def _take_batches(
        self, group: dict[str, Any], batches: list[Together], grads: list[Tensor]
    ) -> None:
        """Steps one batch after another; ``grads``: of all weights of the step."""
        optimizer, scratch = self.optimizer, self._strategy.scratch
        for batch in batches:
            options = StepOptions(group, batch.weights[0].device, optimizer._ratio)
            some = [grads[i] for i in batch.places]
            make = functools.partial(LocalStages, optimizer, options, scratch, batch, some)
            self._take(batch.weights, group, make)

    def _take(
        self, weights: list[Tensor], group: dict[str, Any], make: Callable[[], Stages]
    ) -> None:
        """Steps some weights, or changes nothing if memory runs out. ``make``: makes the stages."""
        second = functools.partial(self._strategy.second_step, self.optimizer, group)
        self.optimizer._progress.take(weights, lambda: run([step(make(), second)]))
