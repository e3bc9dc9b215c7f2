from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep._options.kinds import Flag, Number, Option, Options, as_number
from fusedstep._options.shared import CAPTURABLE, OF_ADAM, OF_TORCH
from fusedstep._sharding.dtensor import is_dtensor, local, whole
from fusedstep._state.kinds import COUNT, States, plain
from fusedstep._step.factors import Factors
from fusedstep._step.owner import Owner
from fusedstep._step.plan import Work
from fusedstep._step.program import Pass, Program, Sums
from fusedstep._step.strategy import Strategy
from fusedstep._step.sums import norm2
from fusedstep._step.undo import numbers_first
from fusedstep._torch_ops.imperative import widened, write_back

__all__ = ["Lamb"]

_PAPER = {
    "eps": 1e-8,
    "weight_decay": 0,
    "debias": True,
    "decoupled_decay": False,
    "always_adapt": True,
    "max_grad_norm": math.inf,
    "max_weight_norm": math.inf,
    "min_ratio": 0.0,
    "max_ratio": math.inf,
}
_APEX = _PAPER | {"eps": 1e-6, "weight_decay": 0.01, "always_adapt": False, "max_grad_norm": 1.0}

#: The options that differ between variants; docs/optimizers/lamb.md has the same table.
VARIANTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "paper": _PAPER,
        "apex": _APEX,
        "nvlamb": _APEX | {"always_adapt": True},
        "timm": _APEX,
        "deepspeed": _PAPER | {"debias": "lr", "min_ratio": 0.01, "max_ratio": 10.0},
        "cybertron": _PAPER | {"eps": 1e-6, "debias": False, "max_weight_norm": 10.0},
    }
)


class _InPhases(Strategy):
    """Steps shards in phases, natively and by a program."""

    def program(self, optimizer: Owner, work: list[Work], factors: Factors) -> Program:
        return _LambProgram(optimizer, work, factors)


def _debiases_moments(group: dict[str, Any]) -> bool:
    return bool(group["debias"]) and group["debias"] != "lr"


class Lamb(FusedOptimizer):
    r"""Implements the LAMB algorithm: Adam's direction, scaled for each weight by a trust ratio.

    After a step ``.grad`` holds the update, by default; ``keep_grad=True`` leaves it as it was.

    For a weight ``w`` with gradient ``g``, at step ``t`` = 1, 2, …::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        u = m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps) + weight_decay * w
        w = w - lr * norm(w) / norm(u) * u      # the ratio is 1 where either norm is 0

    This is algorithm 2 of `Large Batch Optimization for Deep Learning: Training BERT in 76
    minutes`_, with the norm of the weight as it is.

    Other libraries compute something else under the name of LAMB. ``variant`` names one of them and
    stands for a set of options: ``"paper"`` is the formula above, ``"apex"`` and ``"nvlamb"`` are
    NVIDIA's without and with ``use_nvlamb``, ``"timm"``, ``"deepspeed"`` and ``"cybertron"`` those
    of the libraries so called. An option given beside it is taken in its place; the groups hold
    the options, not the name.

    .. note::
        The native step keeps ``u`` in the gradient's memory, and so leaves it in ``.grad``.
        ``keep_grad=True`` leaves ``.grad`` as it was, and computes ``u`` twice. Gradients
        that cannot hold it (expanded, sharing memory, bfloat16 or float16) are always left alone.

    Args:
        lr (float, Tensor, optional): learning rate (default: 1e-3)
        betas (tuple[float | Tensor, float | Tensor], optional): coefficients of the
            running averages of the gradient and its square (default: (0.9, 0.999))
        eps (float, optional): term added to the denominator (default: 1e-8; 1e-6 with the
            variants apex, nvlamb, timm and cybertron)
        weight_decay (float, optional): weight decay, as part of the update whose norm
            is taken (default: 0; 0.01 with the variants apex, nvlamb and timm)
        variant (str, optional): "paper", "apex", "nvlamb", "timm", "deepspeed" or "cybertron":
            what eps, weight_decay and the options down to max_ratio are where they are None
            (default: "paper")
        debias (bool or "lr", optional): True corrects the bias of the running averages, "lr"
            multiplies the learning rate by what that would come to but for eps, False does
            neither (default: True; "lr" with deepspeed, False with cybertron)
        decoupled_decay (bool, optional): the decay multiplies the weight by
            ``1 - lr * weight_decay`` before its norm is taken, and is no part of the update
            (default: False)
        always_adapt (bool, optional): False leaves the ratio at 1 in groups without weight decay
            (default: True; False with apex and timm)
        max_grad_norm (float, optional): clips the 2-norm of the gradients, those of all groups
            together, to this for the step; ``.grad`` is not changed by it. It is one number for
            all groups, and ``math.inf`` clips nothing and takes no norm:
            ``step(max_norm=math.inf)`` takes it. ``step(max_norm=...)`` clips before it
            (default: inf; 1 with apex, nvlamb and timm)
        max_weight_norm (float, optional): a weight's norm counts as no more than this in the
            ratio (default: inf; 10 with cybertron)
        min_ratio (float, optional): lower bound of the ratio where neither norm is 0
            (default: 0; 0.01 with deepspeed)
        max_ratio (float, optional): upper bound of the ratio where neither norm is 0; timm's
            ``trust_clip`` is ``max_ratio=1`` (default: inf; 10 with deepspeed)
        keep_grad (bool, optional): leave ``.grad`` as it was (default: False)

    Example::

        >>> optimizer = optim.Lamb(model.parameters(), lr=1e-2)

    .. _Large Batch Optimization for Deep Learning\: Training BERT in 76 minutes:
        https://arxiv.org/abs/1904.00962
    """

    _rule = "lamb"
    _rule_values: ClassVar[dict[str, Any]] = {
        "debias": _debiases_moments,
        "debias_lr": lambda group: group["debias"] == "lr",
    }
    _strategy_class = _InPhases
    _preset = "variant"
    _keeps_grads_by = "keep_grad"
    _no_max_grad_norm = math.inf
    _grad_norm_eps = 0.0
    _state_kinds: ClassVar[States] = {**plain("exp_avg", "exp_avg_sq"), **COUNT}
    _elementwise = False
    _in_phases = True
    _allocates_first = True
    _option_kinds: ClassVar[Options] = {
        **OF_TORCH,
        **CAPTURABLE,
        **OF_ADAM,
        "debias": Option(before=_PAPER["debias"]),
        "decoupled_decay": Flag(before=_PAPER["decoupled_decay"]),
        "always_adapt": Flag(before=_PAPER["always_adapt"], moot_elsewhere=True),
        "max_grad_norm": Number(
            before=_PAPER["max_grad_norm"],
            unset=None,
            above=True,
            may_be_none=True,
            is_limit=True,
        ),
        "max_weight_norm": Number(
            before=_PAPER["max_weight_norm"], is_limit=True, moot_elsewhere=True
        ),
        "min_ratio": Number(before=_PAPER["min_ratio"], moot_elsewhere=True),
        "max_ratio": Number(
            before=_PAPER["max_ratio"], least=None, is_limit=True, moot_elsewhere=True
        ),
        "keep_grad": Flag(before=False, moot_elsewhere=True),
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float | None = None,
        weight_decay: float | None = None,
        *,
        variant: Literal["paper", "apex", "nvlamb", "timm", "deepspeed", "cybertron"] = "paper",
        debias: bool | Literal["lr"] | None = None,
        decoupled_decay: bool | None = None,
        always_adapt: bool | None = None,
        max_grad_norm: float | None = None,
        max_weight_norm: float | None = None,
        min_ratio: float | None = None,
        max_ratio: float | None = None,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        keep_grad: bool = False,
        state_dtype: torch.dtype | str | None = None,
        master_weights: bool | str = False,
        rounding: str | None = None,
        seed: int = 0,
        skip_nonfinite: bool = False,
    ) -> None:
        if variant not in VARIANTS:
            raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, not {variant!r}")
        given = {
            "eps": eps,
            "weight_decay": weight_decay,
            "debias": debias,
            "decoupled_decay": decoupled_decay,
            "always_adapt": always_adapt,
            "max_grad_norm": max_grad_norm,
            "max_weight_norm": max_weight_norm,
            "min_ratio": min_ratio,
            "max_ratio": max_ratio,
        }
        usual = VARIANTS[variant]
        options = {k: usual[k] if value is None else value for k, value in given.items()}

        if options["debias"] not in (True, False, "lr"):
            raise ValueError(f'debias must be True, False or "lr", not {debias!r}')
        options |= {
            "lr": lr,
            "betas": betas,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "keep_grad": keep_grad,
            "state_dtype": state_dtype,
            "master_weights": master_weights,
            "rounding": rounding,
            "seed": seed,
            "skip_nonfinite": skip_nonfinite,
        }
        super().__init__(params, options)

    def _check(self, options: dict[str, Any]) -> None:
        super()._check(options)
        if not options["max_ratio"] >= options["min_ratio"]:
            raise ValueError(
                f"Invalid max_ratio value: {options['max_ratio']}, below min_ratio, "
                f"{options['min_ratio']}"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "variant" in param_group:
            raise ValueError("variant is for all groups: give a group the options it stands for")
        super().add_param_group(param_group)
        if any(map(_is_part_of_flat, self.param_groups[-1]["params"])):
            _warn(
                "Lamb got weights of FSDP1, which are parts of a flat parameter: the trust ratio "
                "is then that of a process's part, not of a weight. fully_shard keeps weights."
            )

    def _phases(self, group: dict[str, Any], weight: Tensor, grad: Tensor) -> Pass:
        """Steps a weight, with norms over the processes between the direction and the move."""
        state = self._store.decoded(group, weight, self._state[weight])
        wide = widened(self, group, weight, state)
        grad = (-grad if group["maximize"] else grad).to(wide.dtype)
        update, lr, _ = self._direction(group, wide, grad, state)
        self._store.encode(group, weight, self._state[weight], state)
        norms2 = torch.stack([norm2(local(wide)), norm2(local(update))]).view(1, 2)
        (norms2,) = yield Sums([([weight], norms2)])
        _apply(group, wide, update, lr, *norms2.sqrt().flatten().tolist())
        write_back(self, group, weight, wide, self._state[weight])

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        room = weight.new_empty(())
        update, lr, spare = self._direction(group, weight, grad, state)
        norms = 1.0, 1.0
        if _adapts(group):
            dense = spare.copy_(weight) if _lies_apart(weight) else weight
            norms = _norm(dense, room, spare), _norm(update, room, spare)
        _apply(group, weight, update, lr, *norms)

    def _direction(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> tuple[Tensor, float, Tensor]:
        """The update, its learning rate but for the trust ratio, and memory of their shape."""
        beta1, beta2 = map(float, group["betas"])
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
        step, decay = state["step"].item() + 1, group["weight_decay"]
        bias1, bias2 = 1 - beta1**step, 1 - beta2**step
        lr = float(group["lr"])

        # All memory first: without it nothing is written.
        beta1_, beta2_, bias1_, bias2_, eps, keep = numbers_first(
            exp_avg, beta1, beta2, bias1, bias2, group["eps"], 1 - lr * decay
        )
        update, denom = torch.empty_like(exp_avg), torch.empty_like(exp_avg_sq)

        state["step"].fill_(step)
        exp_avg.mul_(beta1_).add_(grad, alpha=1 - beta1)
        exp_avg_sq.mul_(beta2_).addcmul_(grad, grad, value=1 - beta2)
        if _debiases_moments(group):
            torch.div(exp_avg_sq, bias2_, out=denom).sqrt_()
            torch.div(exp_avg, bias1_, out=update)
        else:
            torch.sqrt(exp_avg_sq, out=denom)
            update.copy_(exp_avg)
        update.div_(denom.add_(eps))
        if decay != 0:
            if group["decoupled_decay"]:
                weight.mul_(keep)
            else:
                update.add_(weight, alpha=decay)

        if group["debias"] == "lr":
            lr *= math.sqrt(bias2) / bias1
        return update, lr, denom

    def _formula(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        beta1, beta2 = group["betas"]
        step = state["step"].add_(1)
        bias1, bias2 = 1 - beta1**step, 1 - beta2**step
        lr = as_number(group["lr"])

        exp_avg = state["exp_avg"] = beta1 * state["exp_avg"] + (1 - beta1) * grad
        exp_avg_sq = state["exp_avg_sq"] = beta2 * state["exp_avg_sq"] + (1 - beta2) * grad * grad
        if _debiases_moments(group):
            update = exp_avg / bias1 / ((exp_avg_sq / bias2).sqrt() + group["eps"])
        else:
            update = exp_avg / (exp_avg_sq.sqrt() + group["eps"])
        if group["weight_decay"] != 0:
            if group["decoupled_decay"]:
                weight = weight * (1 - lr * group["weight_decay"])
            else:
                update = update + group["weight_decay"] * weight

        if _adapts(group):
            weight_norm, update_norm = weight.norm(), update.norm()
            trust_ratio = weight_norm.clamp(max=group["max_weight_norm"]) / update_norm
            trust_ratio = trust_ratio.clamp(group["min_ratio"], group["max_ratio"])
            is_zero = (weight_norm == 0) | (update_norm == 0)
            update = update * torch.where(is_zero, 1.0, trust_ratio)
        if group["debias"] == "lr":
            lr = lr * bias2.sqrt() / bias1
        return weight - lr * update


class _LambProgram(Program):
    """A program that steps shards in phases, with norms over the processes in between."""

    optimizer: Lamb

    def run(self, work: list[Work]) -> list[Pass]:
        in_phases: list[Work] = []
        others: list[Work] = []
        for item in work:
            is_spread = any(map(is_dtensor, item.weights))
            is_plain = not (item.group["differentiable"] or item.group["capturable"])
            is_real = not any(weight.is_complex() for weight in item.weights)
            (in_phases if is_spread and is_plain and is_real else others).append(item)
        passes = [self.optimizer._phases(i.group, *pair) for i in in_phases for pair in i.pairs()]
        return passes + super().run(others)


@functools.cache
def _warn(text: str) -> None:
    """Says it once in a process."""
    warnings.warn(text, stacklevel=2)


def _is_part_of_flat(weight: Tensor) -> bool:
    """Tells FSDP1's flat parameters, and the parameters that are views of them."""
    return getattr(weight, "_is_flat_param", False) or getattr(weight, "_fsdp_flattened", False)


def _lies_apart(tensor: Tensor) -> bool:
    """Returns whether there is memory between elements.

    Torch adds such elements one to another in float32: the norm of four million, every second
    column of a matrix, is a thousandth off.
    """
    extent = 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return extent > tensor.numel() > 0 and not is_dtensor(tensor)


def _norm(tensor: Tensor, room: Tensor, spare: Tensor) -> float:
    """The norm of a tensor whose elements do not lie apart.

    Of a tensor that is not spread it allocates nothing: `room` is memory for a number, `spare` for
    as many as the tensor has.
    """
    is_spread = is_dtensor(tensor)
    found = whole(torch.linalg.vector_norm(tensor, out=None if is_spread else room))
    # Tools that estimate memory step tensors that have shapes and no numbers.
    is_empty = isinstance(found, FakeTensor) or found.is_meta
    norm = 1.0 if is_empty else found.item()
    if 1e-16 < norm < 1e18 or not tensor.numel():
        return norm
    # Squares may have left the range of float32.
    if is_spread:
        return whole(torch.linalg.vector_norm(tensor, dtype=torch.float64)).item()
    largest = torch.linalg.vector_norm(tensor, math.inf, out=room).item()
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * torch.linalg.vector_norm(torch.div(tensor, room, out=spare), out=room).item()


def _apply(
    group: dict[str, Any],
    weight: Tensor,
    update: Tensor,
    lr: float,
    weight_norm: float,
    update_norm: float,
) -> None:
    trust_ratio = 1.0
    if _adapts(group) and weight_norm and update_norm:
        trust_ratio = min(weight_norm, group["max_weight_norm"]) / update_norm
        trust_ratio = max(min(trust_ratio, group["max_ratio"]), group["min_ratio"])
    most = torch.finfo(weight.dtype).max
    factor = -lr * trust_ratio
    if math.isfinite(trust_ratio) and math.isfinite(lr):
        factor = max(min(factor, most), -most)  # infinity times an update of zero is NaN
    weight.add_(update, alpha=factor)


def _adapts(group: dict[str, Any]) -> bool:
    return bool(group["always_adapt"] or group["weight_decay"] != 0)
