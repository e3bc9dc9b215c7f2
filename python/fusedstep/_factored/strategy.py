"""How groups with factored second moments are stepped: by a native plan, or by a program."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedstep._factored.formula import first_eps
from fusedstep._factored.options import check_adafactor_options
from fusedstep._factored.program import FactoredProgram, fuses, operands_of
from fusedstep._options.shared import own_option
from fusedstep._sharding.dtensor import is_dtensor, local
from fusedstep._state.checks import with_name
from fusedstep._state.kinds import Group
from fusedstep._state.storage import way_of
from fusedstep._step.factors import Factors
from fusedstep._step.kernels import may_be_skipped, wants_native
from fusedstep._step.owner import Owner, Place
from fusedstep._step.plan import Work
from fusedstep._step.program import Program
from fusedstep._step.strategy import Strategy
from fusedstep._step.support import why_not_native


class FactoredSteps(Strategy):
    """Steps all groups as composites; native plans take the groups whose weights are whole."""

    takes_complex = False

    def is_composite(self, optimizer: Owner, group: Group) -> bool:
        return True

    def fuses(self, optimizer: Owner, group: Group) -> bool:
        """Returns whether native operations step weights of a group, but for those they cannot."""
        return fuses(optimizer, group)

    def is_native(
        self, optimizer: Owner, group: Group, weights: list[Tensor], grads: Sequence[Tensor] = ()
    ) -> bool:
        super().is_native(optimizer, group, weights, grads)
        reason = why_not_native(weights, grads)
        if reason and own_option(group, "fused"):
            raise RuntimeError(reason)
        return (
            reason is None
            and self.fuses(optimizer, group)
            and len({p.device for p in weights}) == 1
            and all(way_of(group, p) is None and not _is_sharded(p) for p in weights)
            and (weights[0].is_cpu or _host_counts(optimizer, weights))
        )

    def bind(
        self,
        optimizer: Owner,
        place: Place,
        group: Group,
        weights: list[Tensor],
        grads: list[Tensor],
    ) -> Work:
        if torch._C._len_torch_dispatch_stack():  # a mode sees operators, and would see no plan
            optimizer._plans.pop(place, None)
            optimizer._aside.take(weights)
        try:
            return super().bind(optimizer, place, group, weights, grads)
        except RuntimeError:
            if all(optimizer._state.get(p) for p in weights):
                try:
                    # By their names, which no plan knows.
                    self.check_states(optimizer, group, weights)
                except RuntimeError as error:
                    raise with_name(error, place[0], group, weights) from None
            raise

    def check_own(self, group: Group) -> None:
        check_adafactor_options(group)

    def check_operands(
        self,
        optimizer: Owner,
        group: Group,
        weights: list[Tensor],
        grads: list[Tensor],
        is_known: bool = False,
    ) -> None:
        super().check_operands(optimizer, group, weights, grads, is_known)
        operands = optimizer._memory.get(weights[0])
        if is_known and operands and operands.derived:
            if not all(call.read_counts() for call in operands.derived.calls):
                operands.derived = None
        elif wants_native(optimizer, group) and why_not_native(weights, grads) is None:
            torch.ops.fusedstep.factored_check(list(map(local, weights)), list(map(local, grads)))

    def writes_natively(
        self, optimizer: Owner, group: Group, weights: list[Tensor], grads: list[Tensor]
    ) -> bool:
        copied = any(way_of(group, weight) for weight in weights)  # a native operation steps copies
        is_native = self.fuses(optimizer, group) and why_not_native(weights, grads) is None
        return not copied and is_native

    def slots(
        self, optimizer: Owner, group: Group, weights: list[Tensor], states: list[dict[str, Tensor]]
    ) -> list[Tensor]:
        self.check_states(optimizer, group, weights)
        return list(itertools.chain(*operands_of(optimizer, group, weights, states)))

    def program(self, optimizer: Owner, work: list[Work], factors: Factors) -> Program:
        return FactoredProgram(optimizer, work, factors)

    def operands_of_formula(
        self, optimizer: Owner, group: Group, weight: Tensor, state: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        # A plain 16-bit weight has the eps of its own dtype, not that of the maths.
        eps = (first_eps(group, weight), group["eps"][1])
        return super().operands_of_formula(optimizer, group | {"eps": eps}, weight, state)

    def exact_options(self, optimizer: Owner, group: Group) -> dict[str, Any]:
        first, least = group["eps"]
        found = {first_eps(group, weight) for weight in group["params"]}
        return {"eps": (found.pop(), least)} if first is None and len(found) == 1 else {}


def _is_sharded(weight: Tensor) -> bool:
    return is_dtensor(weight) and not all(each.is_replicate() for each in weight.placements)


def _host_counts(optimizer: Owner, weights: list[Tensor]) -> bool:
    """Returns whether the host counts the steps of weights on a device, as the plan needs."""
    counts = (optimizer._state[p]["step"] for p in weights if optimizer._state.get(p))
    return not may_be_skipped(optimizer) and all(
        not isinstance(count, Tensor) or count.is_cpu for count in counts
    )
