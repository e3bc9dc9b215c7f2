"""The step in a graph that torch.compile makes, and under a dispatch mode.

There each group is updated by the operator that has all it reads and writes among its arguments:
a plan is nothing that a compiler could follow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_leaves

from fusedstep._api.registry import by_name
from fusedstep._native import ops
from fusedstep._options.shared import own_option
from fusedstep._sharding.dtensor import is_dtensor
from fusedstep._state.storage import way_of
from fusedstep._step.kernels import wants_native, why_no_kernels
from fusedstep._step.limits import needs_whole_norm
from fusedstep._step.owner import Owner
from fusedstep._step.strategy import strategy_of
from fusedstep._step.support import why_not_readable


def trace_update(optimizer: Owner) -> bool:
    """Adds an update to the graph that is being made; returns False if it cannot be there."""
    if optimizer._composite:
        return False
    if any(getattr(optimizer, name, None) is not None for name in ("found_inf", "grad_scale")):
        return False
    if needs_whole_norm(optimizer):
        return False
    name, work = optimizer._name, []
    compiles = torch.compiler.is_compiling()
    for index, group in enumerate(optimizer._groups):
        present = [i for i, p in enumerate(group["params"]) if p.grad is not None]
        weights = [group["params"][i] for i in present]
        own_option(group, "state_dtype")  # another value makes another graph
        if not (wants_native(optimizer, group) and _make_ready(name, index, present, compiles)):
            return False
        if not (compiles or _can_be_listed([p.grad for p in weights])):
            return False
        if present:
            work.append((index, group, weights))
    for index, group, weights in work:
        grads = [p.grad for p in weights]
        states = [optimizer._store.with_count(group, p) for p in weights]
        names = optimizer._store.names_of(group, weights[0])
        slots = optimizer._store.slots(names, weights, states)
        steps = [state[name] for name in optimizer._store.numbers for state in states]
        lr = group["lr"] if _has_tensor_lr(name, index) else None
        count = _count_options(name, index)
        options = torch.ops.fusedstep.options(steps[0], lr, name, index, count)
        rule = ops.rule_index[optimizer._rule]
        torch.ops.fusedstep.step(weights, grads, slots, steps, options, rule)
        increment_version(weights)  # for compilers that leave the operator as it is
    return True


@torch.library.custom_op("fusedstep::options", mutates_args=())
def options(step: Tensor, lr: Tensor | None, optimizer: str, group: int, count: int) -> Tensor:
    """Returns the ``count`` options that a group has when the graph runs, for the next operator.

    Were the options read when the graph is made they would be its constants, and other values
    another graph. A learning rate that is a tensor may be written by the graph, and is passed.
    ``step`` makes this a function of the graph's inputs: compilers may evaluate other functions
    beforehand. ``count`` makes the shape a function of the graph's text: by that text compilers
    find code that they made earlier, in a process with another version of this library too.
    """
    owner = by_name[optimizer]
    values = owner._options(owner._groups[group], lr)
    return torch.tensor(values, dtype=torch.float64, device="cpu")


@options.register_fake
def _(step: Tensor, lr: Tensor | None, optimizer: str, group: int, count: int) -> Tensor:
    return torch.empty(count, dtype=torch.float64, device="cpu")


# These run when the graph is made, not in the graph, and look at the optimizer itself.


@torch.compiler.assume_constant_result
def _make_ready(optimizer: str, index: int, present: list[int], compiles: bool) -> bool:
    """Makes missing states of a group; returns False if its update cannot be in the graph."""
    owner = by_name[optimizer]
    group = owner._groups[index]
    weights = [group["params"][i] for i in present]
    others = [value for name, value in group.items() if name not in ("params", "lr")]
    if any(map(torch.is_tensor, tree_leaves(others))):  # the graph may write them
        return False
    # On a CUDA device the operator would make its tables anew at every step.
    if not all(p.is_cpu for p in weights):
        return False
    if strategy_of(owner).is_composite(owner, group):
        return False
    if any(name in group for name in owner._storage_not_taken):  # an error, perhaps
        return False
    if why_no_kernels(owner, weights) or any(map(is_dtensor, weights)):
        return False
    if compiles and _is_edited_in_graph(group):
        return False
    ways = {way_of(group, p) for p in weights}
    if len(ways) > 1 or "stochastic" in ways:  # of whose random numbers the operator does not know
        return False
    owner._store.create(group, weights, True, owner._groups)
    if why_not_readable(owner._accessed_states(weights), "states"):
        return False
    states = [owner._store.with_count(group, p) for p in weights]
    return all(torch.is_tensor(s[name]) for s in states for name in owner._store.numbers)


@torch.compiler.assume_constant_result
def _has_tensor_lr(optimizer: str, index: int) -> bool:
    return torch.is_tensor(by_name[optimizer]._groups[index]["lr"])


@torch.compiler.assume_constant_result
def _count_options(optimizer: str, index: int) -> int:
    owner = by_name[optimizer]
    return len(owner._options(owner._groups[index], 0.0))


def _can_be_listed(grads: list[Tensor]) -> bool:
    return (
        all(grad.layout is torch.strided for grad in grads)
        and why_not_readable(grads, "gradients") is None
    )


def _is_edited_in_graph(group: dict[str, Any]) -> bool:
    """Returns whether code of the graph that is being made changes the group.

    The group itself is changed when the graph has run: before that it has the old values.
    """
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        effects = InstructionTranslator.current_tx().output.side_effects
        return effects.is_modified(effects.id_to_variable[id(group)])
    except (ImportError, AttributeError, KeyError):
        return True  # it cannot be told
