"""A step of all groups, or of a bucket: its parts in their order."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fusedstep._api.repeat import last_step
from fusedstep._native import ops
from fusedstep._step.binding import bind_groups, checked_options, spread_weights
from fusedstep._step.clip import Asked, factors_of, norm_of
from fusedstep._step.factors import PLAIN, Factors, is_one
from fusedstep._step.gradients import cut_off, treat_grads
from fusedstep._step.limits import max_grad_norm, needs_whole_norm, skips_nonfinite
from fusedstep._step.nonfinite import check_norm
from fusedstep._step.owner import Owner
from fusedstep._step.plan import Bucket, GradUse, Work
from fusedstep._step.step import take
from fusedstep._step.strategy import strategy_of
from fusedstep._step.undo import NO_RESERVE, Progress


def update_all(
    optimizer: Owner,
    max_norm: float | None,
    zero_grad: bool | Literal["none"],
    error_if_nonfinite: bool = False,
) -> Tensor | None:
    _begin_step(optimizer)
    own_max_norm, work = max_grad_norm(optimizer), bind_groups(optimizer)
    scaler = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    eps = 0.0 if own_max_norm is None else optimizer._grad_norm_eps
    if isinstance(eps, str):
        eps = float(optimizer._groups[-1][eps])
    skips = skips_nonfinite(optimizer)
    asked = Asked(max_norm, own_max_norm, eps, error_if_nonfinite, skips)
    spread = spread_weights(optimizer) if asked.is_norm else None
    factors = factors_of(work, scaler, asked, spread)
    if error_if_nonfinite and spread is not None:
        check_norm(factors, work, spread, optimizer._groups)
    norm: Tensor | None = None
    if max_norm is not None:  # before anything is changed: there may be no memory for it
        if isinstance(factors.norm, Tensor):
            norm = factors.norm
        else:
            norm = torch.tensor(factors.norm, dtype=torch.float64, device="cpu")
    of_others = 0.0 if zero_grad else factors.of_others
    if not isinstance(of_others, Tensor) and of_others not in (0, 1):
        of_others = torch.tensor(of_others, dtype=torch.float64, device="cpu")  # here as well
    if factors.is_skipped:
        untreated = [pair for item in work for pair in item.pairs()]
    else:
        untreated = _update_groups(optimizer, work, factors, zero_grad)
    if asked.is_norm:
        optimizer._norm = factors.norm
    if skips:
        optimizer._skipped.add(factors)
    if zero_grad == "none":
        for item in work:
            for weight in item.weights:
                weight.grad = None
    else:
        treat_grads(untreated, of_others)
        if zero_grad:
            cut_off([grad for item in work for grad in item.grads])
    return norm


def _begin_step(optimizer: Owner) -> None:
    if "_loading" in optimizer.__dict__:
        raise RuntimeError("another thread is loading this optimizer's state")
    optimizer._last_step = None


def update_bucket(optimizer: Owner, bucket: Bucket, clip: float | Tensor | None) -> float | Tensor:
    """Steps those weights of a bucket that have gradients, which are None then.

    ``clip``: a factor of the gradients; their norm without it is returned, else inf.
    """
    _begin_step(optimizer)
    if name := needs_whole_norm(optimizer):
        raise RuntimeError(
            f"{name} needs the gradients of all weights, of which a step in the backward "
            "pass has a bucket"
        )
    work, factors = bind_groups(optimizer, bucket), PLAIN
    if clip is not None:
        factors = Factors(clip=clip, norm=norm_of(work, spread_weights(optimizer)))
    _update_groups(optimizer, work, factors, "none")
    for item in work:
        for weight in item.weights:
            weight.grad = None
    return factors.norm


def _update_groups(
    optimizer: Owner, work: list[Work], factors: Factors, zero_grad: bool | Literal["none"]
) -> list[tuple[Tensor, Tensor]]:
    """Steps all groups, as take() does; notes how, for a next step that is like this one."""
    if factors is not PLAIN and any(item.queue is None for item in work):
        factors = factors.waited()
    work = [
        item._replace(
            use=_grad_use(optimizer, item.group, factors, zero_grad),
            options=checked_options(optimizer, item, factors),
        )
        for item in work
    ]
    spread = None if optimizer._elementwise else spread_weights(optimizer)
    others = [item for item in work if not item.plan]
    with strategy_of(optimizer).program(optimizer, others, factors) as program:
        program.prepare()
        is_single = len(work) == 1 and len(work[0].weights) == 1
        optimizer._progress = Progress(work, NO_RESERVE if is_single else program.reserve())
        with optimizer._progress:
            untreated = take(
                optimizer._rule,
                work,
                factors,
                program,
                optimizer._accessed_states,
                spread=spread,
                in_phases=optimizer._in_phases,
                stepped=optimizer._progress.stepped,
            )
    if zero_grad is True and not optimizer._writes_grads:
        untreated = [pair for item in work for pair in item.pairs()]
    # One that communicates has more to do than its kernels.
    is_alone = not (spread and spread.places)
    is_plain = factors is PLAIN and not zero_grad
    if ops.bind and is_plain and is_alone and optimizer._seen is not None:
        optimizer._last_step = last_step(
            optimizer._rule,
            optimizer._groups,
            work,
            (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks),
            optimizer._seen.values,
            optimizer._accessed_states if optimizer._store.was_read else lambda weights: None,
        )
    return untreated


def _grad_use(
    optimizer: Owner, group: dict[str, Any], factors: Factors, zero_grad: bool | Literal["none"]
) -> GradUse:
    if not optimizer._writes_grads:
        return GradUse.LEAVE
    if zero_grad is True:
        return GradUse.CLEAR
    if optimizer._keeps_grads_by and not group[optimizer._keeps_grads_by]:
        return GradUse.SCRATCH
    # The kernel would leave the gradient as it took it: clipped too.
    if is_one(factors.grad) or not is_one(factors.clip) or zero_grad:
        return GradUse.LEAVE
    return GradUse.SCALE
