from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep._options.kinds import Betas, Flag, Number, Options, as_number, check_number
from fusedstep._options.shared import CAPTURABLE, EPSILON, OF_TORCH
from fusedstep._sharding.dtensor import is_dtensor
from fusedstep._state.counts import read_count, write_count
from fusedstep._state.kinds import COUNT, Group, States, plain
from fusedstep._step.factors import Factors
from fusedstep._step.owner import Owner
from fusedstep._step.plan import Work
from fusedstep._step.program import MOST_COPIES, Program, size_of
from fusedstep._step.strategy import Strategy
from fusedstep._step.undo import numbers_first

__all__ = ["Adan"]


class _InLists(Strategy):
    """Takes a group with ``foreach=False`` weight by weight, and one with it by a program."""

    def launches(
        self, optimizer: Owner, index: int, group: Group, weights: list[Tensor], grads: list[Tensor]
    ) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
        if group["foreach"] is not False:
            return super().launches(optimizer, index, group, weights, grads)
        return [([weight], [grad]) for weight, grad in zip(weights, grads, strict=True)]

    def program(self, optimizer: Owner, work: list[Work], factors: Factors) -> Program:
        return _AdanProgram(optimizer, work, factors)


class Adan(FusedOptimizer):
    r"""Implements the Adan algorithm: Adam with Nesterov momentum, from differences of gradients.

    For a weight ``w`` with gradient ``g``, at step ``t`` = 1, 2, …::

        d = g - previous g                      # 0 at the first step
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * d
        n = beta3 * n + (1 - beta3) * (g + beta2 * d)**2
        u = (m / (1 - beta1**t) + beta2 * v / (1 - beta2**t)) / (sqrt(n / (1 - beta3**t)) + eps)
        w = (w - lr * u) / (1 + lr * weight_decay)

    With ``no_prox`` the last line is ``w = (1 - lr * weight_decay) * w - lr * u``. This is
    algorithm 1 of `Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models`_,
    whose betas are ``1 - beta`` here, with the bias corrections of its authors' code.

    Args:
        lr (float, Tensor, optional): learning rate (default: 1e-3)
        betas (tuple[float | Tensor, float | Tensor, float | Tensor], optional): coefficients of
            the running averages of the gradient, of its differences and of the square
            (default: (0.98, 0.92, 0.99))
        eps (float, optional): term added to the denominator (default: 1e-8)
        weight_decay (float, optional): weight decay, apart from the gradient (default: 0)
        max_grad_norm (float, optional): clips the 2-norm of the gradients, those of all groups
            together, to this for the step; ``.grad`` is not changed by it. It is one number for
            all groups, and 0 clips nothing. ``step(max_norm=...)`` clips before it (default: 0)
        no_prox (bool, optional): True multiplies the weight by ``1 - lr * weight_decay`` before
            the step, as :class:`AdamW` does, False divides it by ``1 + lr * weight_decay``
            after it (default: False)
        foreach (bool, optional): True updates the weights of a group together, False one at a
            time: in a session or launch each, or with ``fused=False`` in operations over lists
            or over tensors (default: True)
        fused (bool, optional): True runs the native kernels, False the same formula
            in plain torch operations. None takes the native kernels if they can
            update every weight of the group and differentiable is not True (default: None)

    Raises:
        ValueError: if a hyper-parameter is out of range, or ``params`` is empty.
        RuntimeError: if ``fused=True`` meets ``differentiable``, weights that are
            not of the dtypes and devices above, or a missing native library; at :meth:`step`,
            before anything is changed, for sparse gradients and weights that overlap themselves in
            memory.

    Example::

        >>> optimizer = optim.Adan(model.parameters(), lr=1e-3, weight_decay=0.02)

    .. _Adan\: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models:
        https://arxiv.org/abs/2208.06677
    """

    _rule = "adan"
    _strategy_class = _InLists
    _no_max_grad_norm = 0.0
    _grad_norm_eps = "eps"
    _state_kinds: ClassVar[States] = {
        **plain("exp_avg", "exp_avg_sq", "exp_avg_diff", "neg_pre_grad"),
        **COUNT,
    }
    _counts_in_groups = True
    _foreach_means_unfused = False
    _allocates_first = True
    _option_kinds: ClassVar[Options] = {
        **OF_TORCH,
        **CAPTURABLE,
        "betas": Betas(count=3),
        "eps": EPSILON,
        "weight_decay": Number(),
        "max_grad_norm": Number(
            before=0.0, unset=None, least=None, may_be_none=True, is_limit=True
        ),
        "no_prox": Flag(before=False),
        "foreach": Flag(before=True),
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor, float | Tensor] = (0.98, 0.92, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        no_prox: bool = False,
        foreach: bool | None = True,
        fused: bool | None = None,
        *,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        state_dtype: torch.dtype | str | None = None,
        master_weights: bool | str = False,
        rounding: str | None = None,
        seed: int = 0,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(params, locals())

    def _check(self, options: dict[str, Any]) -> None:
        # Torch operations over lists take a learning rate and betas that are tensors.
        checked = options | {"foreach": False}
        super()._check(checked)
        options["betas"] = checked["betas"]
        check_number("max_grad_norm", options["max_grad_norm"])
        if not options["max_grad_norm"] >= 0.0:
            raise ValueError(f"Invalid Max grad norm: {options['max_grad_norm']}")

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state.get("param_groups", ()):
            # Its authors' Adan counts the steps of a group there.
            count = group.pop("step", None)
            for p in group["params"] if count is not None else ():
                if p in state["state"]:
                    state["state"][p].setdefault("step", float(count))
        super().__setstate__(state)

    @torch.no_grad()
    def restart_opt(self) -> None:
        """Forget all steps so far: the next one is again a first."""
        for group in self.param_groups:
            for p in group["params"]:
                self._store.restart(group, p)

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        lr, (beta1, beta2, beta3) = float(group["lr"]), map(float, group["betas"])
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        exp_avg_diff, neg_pre_grad = state["exp_avg_diff"], state["neg_pre_grad"]
        step, decay = state["step"].item() + 1, lr * group["weight_decay"]

        # All memory first: without it nothing is written.
        betas, root = (beta1, beta2, beta3), (1 - beta3**step) ** 0.5
        beta1_, beta2_, beta3_, root_, eps, has_last, less, more = numbers_first(
            exp_avg, *betas, root, group["eps"], step > 1, 1 - decay, 1 + decay
        )
        denom = torch.empty_like(exp_avg_sq)

        state["step"].fill_(step)
        difference = neg_pre_grad.add_(grad).mul_(has_last)
        exp_avg.mul_(beta1_).add_(grad, alpha=1 - beta1)
        exp_avg_diff.mul_(beta2_).add_(difference, alpha=1 - beta2)
        ahead = difference.mul_(beta2_).add_(grad)
        exp_avg_sq.mul_(beta3_).addcmul_(ahead, ahead, value=1 - beta3)
        neg_pre_grad.copy_(grad).neg_()

        torch.sqrt(exp_avg_sq, out=denom).div_(root_).add_(eps)
        if group["no_prox"]:
            weight.mul_(less)
        weight.addcdiv_(exp_avg, denom, value=-lr / (1 - beta1**step))
        weight.addcdiv_(exp_avg_diff, denom, value=-lr * beta2 / (1 - beta2**step))
        if not group["no_prox"]:
            weight.div_(more)

    def _imperative_lists(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        grads: list[Tensor],
        states: list[dict[str, Tensor]],
    ) -> None:
        """The same by operations over lists."""
        lr, (beta1, beta2, beta3) = float(group["lr"]), map(float, group["betas"])
        exp_avgs, exp_avg_sqs, exp_avg_diffs, neg_pre_grads = (
            [state[name] for state in states] for name in self._states
        )
        steps = [read_count(state["step"]) + 1 for state in states]
        decay = lr * float(group["weight_decay"])

        # All memory first: without it nothing is written.
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        betas = beta1, beta2, beta3
        beta1_, beta2_, beta3_, eps, none, less, more, *roots = numbers_first(
            exp_avgs[0],
            *betas,
            group["eps"],
            0.0,
            1 - decay,
            1 + decay,
            *[(1 - beta3**t) ** 0.5 for t in steps],
        )
        denoms = torch._foreach_mul(exp_avg_sqs, beta3_)

        for state, step in zip(states, steps, strict=True):
            write_count(state["step"], step)
        torch._foreach_add_(neg_pre_grads, grads)
        for difference, step in zip(neg_pre_grads, steps, strict=True):
            if step == 1:
                difference.mul_(none)
        torch._foreach_mul_(exp_avgs, beta1_)
        torch._foreach_add_(exp_avgs, grads, alpha=1 - beta1)
        torch._foreach_mul_(exp_avg_diffs, beta2_)
        torch._foreach_add_(exp_avg_diffs, neg_pre_grads, alpha=1 - beta2)
        torch._foreach_mul_(neg_pre_grads, beta2_)
        torch._foreach_add_(neg_pre_grads, grads)
        torch._foreach_addcmul_(denoms, neg_pre_grads, neg_pre_grads, value=1 - beta3)
        torch._foreach_copy_(exp_avg_sqs, denoms)
        torch._foreach_copy_(neg_pre_grads, grads)
        torch._foreach_neg_(neg_pre_grads)

        torch._foreach_sqrt_(denoms)
        if len(set(steps)) == 1:
            torch._foreach_div_(denoms, roots[0])
        else:
            torch._foreach_div_(denoms, roots)
        torch._foreach_add_(denoms, [eps] * len(denoms) if denoms[0].is_cpu else eps)
        if group["no_prox"]:
            torch._foreach_mul_(weights, less)
        step_sizes = [-lr / (1 - beta1**step) for step in steps]
        torch._foreach_addcdiv_(weights, exp_avgs, denoms, step_sizes)
        step_sizes = [-lr * beta2 / (1 - beta2**step) for step in steps]
        torch._foreach_addcdiv_(weights, exp_avg_diffs, denoms, step_sizes)
        if not group["no_prox"]:
            torch._foreach_div_(weights, more)

    def _formula(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        beta1, beta2, beta3 = group["betas"]
        step = state["step"].add_(1)
        lr = as_number(group["lr"])

        difference = (step > 1) * (grad + state["neg_pre_grad"])
        ahead = grad + beta2 * difference
        exp_avg = beta1 * state["exp_avg"] + (1 - beta1) * grad
        exp_avg_sq = beta3 * state["exp_avg_sq"] + (1 - beta3) * ahead * ahead
        exp_avg_diff = beta2 * state["exp_avg_diff"] + (1 - beta2) * difference
        new = (exp_avg, exp_avg_sq, exp_avg_diff, -grad)
        state.update(zip(self._states, new, strict=True))

        denom = exp_avg_sq.sqrt() / (1 - beta3**step).sqrt() + group["eps"]
        update = exp_avg / (1 - beta1**step) + beta2 * exp_avg_diff / (1 - beta2**step)
        decay = lr * group["weight_decay"]
        if group["no_prox"]:
            return weight * (1 - decay) - lr * update / denom
        return (weight - lr * update / denom) / (1 + decay)


class _AdanProgram(Program):
    """A program that takes a group by operations over lists, with ``foreach``."""

    optimizer: Adan

    def part_size(self, item: Work) -> int:
        if not item.group["foreach"]:
            return super().part_size(item)
        return MOST_COPIES * sum(map(size_of, item.weights, item.grads))

    def step(self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]) -> None:
        of, store = self.optimizer, self.optimizer._store
        in_lists = group["foreach"] and not (group["differentiable"] or group["capturable"])
        if (
            not in_lists
            or any(p.is_complex() or store.has_wide(group, p) for p in weights)
            or any(store.kind_of(group, p) for p in weights)
            or len(set(map(id, weights))) != len(weights)
            or len({p.dtype == torch.float64 for p in weights}) > 1  # numbers are of one dtype
            or any(map(is_dtensor, weights))  # which has not all operations over lists
        ):
            # It goes by one weight at a time, and so must the errors, which are torch's.
            super().step(group | {"foreach": False}, weights, grads)
            return
        states = [of._state[p] for p in weights]
        step = functools.partial(of._imperative_lists, group, weights, grads, states)
        of._progress.take(weights, step)
