from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedstep.optim._base import FusedOptimizer
from fusedstep.optim._checks import (
    check_betas,
    check_eps,
    check_ranges,
    name_of,
)
from fusedstep.optim._factors import Factors
from fusedstep.optim._muon_groups import (
    MUON_OWN,
    as_adamw,
    check_muon_options,
    matrices_of,
    ns_dtype_of,
    ratio_of,
    uses_muon,
    why_no_matrix,
)
from fusedstep.optim._newton_schulz import Scratch, coefficients_of, orthogonalize
from fusedstep.optim._options import OWN
from fusedstep.optim._plan import Work
from fusedstep.optim._weights import seed_of
from fusedstep.optim.adam import Adam

__all__ = ["Muon"]

#: Options that check_ranges() does not know.
_OF_MUON = (
    *("ns_coefficients", "ns_steps", "adjust_lr_fn"),
    *("use_muon", "split_heads", "stacked", "ns_dtype", "cautious_decay"),
)

#: Elements that go through the products together at most. More do not fill a device better, and
#: their copies would have to be kept: on a CPU they leave its caches as well.
_AT_ONCE = {"cpu": 1 << 22}
_AT_ONCE_ELSEWHERE = 1 << 25


class Muon(Adam):
    r"""Implements the Muon algorithm, in signature and states :class:`torch.optim.Muon`.

    For a matrix ``w`` with gradient ``g``::

        m = momentum * m + (1 - momentum) * g
        u = momentum * m + (1 - momentum) * g           (m itself without nesterov)
        x = u / max(norm(u), eps)
        x = a * x + b * (x x') x + c * (x x')**2 x      (ns_steps times)
        w = (1 - lr * weight_decay) * w
        w = w - lr * sqrt(max(1, rows / columns)) * x

    In the usual notation

    .. math::
        \begin{aligned}
            M_t      &= \mu M_{t-1} + (1 - \mu) G_t                                           \\
            U_t      &= \mu M_t + (1 - \mu) G_t                                               \\
            X_0      &= U_t / \max(\lVert U_t \rVert_F, \epsilon)                             \\
            X_k      &= a X_{k-1} + b\, X_{k-1} X_{k-1}^\top X_{k-1}
                        + c\, (X_{k-1} X_{k-1}^\top)^2 X_{k-1}                                \\
            \theta_t &= (1 - \gamma \lambda) \theta_{t-1}
                        - \gamma \sqrt{\max(1, A / B)} \, X_K
        \end{aligned}

    with gradient :math:`G_t` (negated if maximizing), ``lr`` :math:`\gamma`, ``momentum``
    :math:`\mu`, ``weight_decay`` :math:`\lambda`, ``eps`` :math:`\epsilon`, ``ns_steps`` :math:`K`,
    ``ns_coefficients`` :math:`a, b, c`, and a matrix of :math:`A` rows and :math:`B` columns. The
    iteration takes all singular values to the neighbourhood of 1. This is Keller Jordan's `Muon`_;
    ``adjust_lr_fn="match_rms_adamw"`` has the factor :math:`0.2 \sqrt{\max(A, B)}` of equation 4 of
    `Muon is Scalable for LLM Training`_ in place of the root.

    Groups with ``use_muon=False`` are stepped by :class:`AdamW`, natively, in the same step:
    embeddings, the last layer, biases and the weights of norms. They take ``betas``, and have the
    states ``exp_avg``, ``exp_avg_sq`` and ``step``; ``lr``, ``weight_decay`` and ``eps`` mean
    AdamW's there.

    Weights have two dimensions or more. Those of three are stacks of matrices, [experts, M, N];
    those of more, as of convolutions, are flattened to [out, rest]: ``stacked`` says otherwise.
    They may have any strides, and be float32, float64, bfloat16 or float16 on any device;
    ``momentum_buffer`` has the weight's dtype and dimension order. Matrices of one shape go through
    the iteration together, in memory that the optimizer keeps. A gradient with a NaN makes NaN of
    its own matrix, and of no other.

    Args:
        params (iterable): iterable of parameters or named_parameters to optimize
            or iterable of dicts defining parameter groups
        lr (float, Tensor, optional): learning rate (default: 1e-3)
        weight_decay (float, optional): decoupled weight decay (default: 0.1)
        momentum (float, optional): coefficient of the running average of the gradient
            (default: 0.95)
        nesterov (bool, optional): the update is the average after the gradient was added once
            more; False takes the average itself (default: True)
        ns_coefficients (tuple or str, optional): a, b and c of all steps, a tuple of such triples,
            of which the last is repeated, or a name: ``"quintic"``, which is the default, or
            ``"polar_express"``, those of `The Polar Express`_
            (default: (3.4445, -4.775, 2.0315))
        eps (float, optional): lower bound of the norm that the update is divided by; in groups of
            AdamW the term added to the denominator, there ``adamw_eps`` by default (default: 1e-7)
        ns_steps (int, optional): steps of the iteration, below 100 (default: 5)
        adjust_lr_fn (str, optional): "original" or "match_rms_adamw": the factor of the learning
            rate; None is "original" (default: None)
        use_muon (bool, optional): False makes a group AdamW's (default: True)
        split_heads (int, optional): of how many blocks along the first dimension each matrix is,
            that are orthogonalised apart: 3 for the weight of a layer that computes query, key and
            value (default: 1)
        stacked (bool, optional): True takes the last two dimensions for those of a matrix, False
            flattens all but the first; None is True for weights of three dimensions alone
            (default: None)
        ns_dtype (torch.dtype, optional): of the products: torch.bfloat16, torch.float16,
            torch.float32 or torch.float64; None is bfloat16, or float32 on a CPU without
            instructions for it (default: None)
        cautious_decay (bool, optional): decay only elements that the update makes smaller, as
            `Cautious Weight Decay`_ does (default: False)
        betas (tuple[float, float], optional): of AdamW (default: (0.9, 0.999))
        adamw_eps (float, optional): eps of groups with ``use_muon=False`` that have none of their
            own (default: 1e-8)
        fused (bool, optional): False steps matrix by matrix in plain torch operations; True and
            None take matrices together, and native kernels for groups of AdamW (default: None)

    Raises:
        ValueError: if a hyper-parameter is out of range, ``params`` is empty, or a group of Muon
            has a weight of fewer than two dimensions, one that is complex, one whose first
            dimension ``split_heads`` does not divide, or a sharded DTensor.
        RuntimeError: at :meth:`step`, before anything is changed, for sparse gradients and weights
            that overlap themselves in memory.

    Example::

        >>> matrices = [w for w in model.layers.parameters() if w.ndim == 2]
        >>> others = [*model.embedding.parameters(), *model.head.parameters()]
        >>> groups = [
        ...     {"params": matrices, "lr": 0.02},
        ...     {"params": others, "use_muon": False, "lr": 3e-4},
        ... ]
        >>> optimizer = optim.Muon(groups)
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()

    .. _Muon:
        https://kellerjordan.github.io/posts/muon/
    .. _Muon is Scalable for LLM Training:
        https://arxiv.org/abs/2502.16982
    .. _The Polar Express:
        https://arxiv.org/abs/2505.16932
    .. _Cautious Weight Decay:
        https://arxiv.org/abs/2510.12402
    """

    _states = ("momentum_buffer", "exp_avg", "exp_avg_sq")
    _signed = frozenset({"momentum_buffer"})
    _needs: ClassVar[dict[str, str]] = {}
    _numbers: ClassVar[dict[str, float]] = {}
    _elementwise = False
    _torch_fuses = False
    _own_options = OWN | MUON_OWN
    _later_options: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Any = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        use_muon: bool = True,
        split_heads: int = 1,
        stacked: bool | None = None,
        ns_dtype: torch.dtype | None = None,
        cautious_decay: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        maximize: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | str | None = None,
        master_weights: bool | str = False,
        rounding: str | None = None,
        seed: int = 0,
        max_grad_norm: float | None = None,
    ) -> None:
        FusedOptimizer.__init__(self, params, locals())

    # Options

    def _check(self, options: dict[str, Any]) -> None:
        others = {name: value for name, value in options.items() if name not in _OF_MUON}
        check_ranges(others, self._betas, None)
        options |= others
        check_muon_options(options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        of = self._own_options | self.defaults
        if not param_group.get("use_muon", of["use_muon"]):
            param_group = {"betas": of["betas"], "eps": of["adamw_eps"]} | param_group
        super().add_param_group(param_group)

    @classmethod
    def _grouped(cls, weights: list[Tensor]) -> list[Any]:
        matrices = [p for p in weights if p.ndim >= 2]
        others = [p for p in weights if p.ndim < 2]
        groups = [{"params": matrices}, {"params": others, "use_muon": False}]
        return [group for group in groups if group["params"]]

    def _check_group(self, index: int, group: dict[str, Any]) -> None:
        check_muon_options(group)
        if not uses_muon(group):
            check_betas(group.get("betas", MUON_OWN["betas"]), foreach=None, capturable=True)
            check_eps(group["eps"])
            return
        for place, weight in enumerate(group["params"]):
            if reason := why_no_matrix(group, weight):
                raise ValueError(f"{name_of(group, index, place)} {reason}")

    def _checked_options(self, item: Work, factors: Factors) -> tuple[float, ...]:
        index = next(i for i, group in enumerate(self._groups) if group is item.group)
        self._check_group(index, item.group)
        return super()._checked_options(item, factors)

    def _rule_options(self, group: dict[str, Any]) -> dict[str, Any]:
        return super()._rule_options(as_adamw(group))

    @classmethod
    def _state_names(cls, group: dict[str, Any]) -> tuple[str, ...]:
        return cls._states[:1] if uses_muon(group) else cls._states[1:]

    @classmethod
    def _lasting_names(cls, group: dict[str, Any]) -> tuple[str, ...]:
        return cls._state_names(group)

    @classmethod
    def _counts_steps(cls, group: dict[str, Any]) -> bool:
        return not uses_muon(group)

    def _sparse_error(self, group: dict[str, Any]) -> str | None:
        return "Muon does not support sparse gradients"

    def _is_composite(self, group: dict[str, Any]) -> bool:
        return uses_muon(group) and self._wants_native(group)

    # Matrix by matrix

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        if uses_muon(group):
            FusedOptimizer._imperative(self, group, weight, grad, state)
        else:
            super()._imperative(as_adamw(group), weight, grad, state)

    def _formula(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> Tensor:
        lr, momentum = float(group["lr"]), float(group["momentum"])
        average = state["momentum_buffer"].lerp(grad, 1 - momentum)
        state["momentum_buffer"] = average
        update = grad.lerp(average, momentum) if group["nesterov"] else average

        shape = matrices_of(group, weight)
        steps = coefficients_of(group["ns_coefficients"], group["ns_steps"])
        orthogonal = torch.empty_like(update, memory_format=torch.contiguous_format).view(shape)
        for place, matrix in enumerate(update.reshape(shape)):
            x = matrix.to(ns_dtype_of(group, weight))
            x = x.T if shape[1] > shape[2] else x
            x = x / x.norm().clamp(min=group["eps"])
            for a, b, c in steps:
                gram = x @ x.T
                x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
            orthogonal[place].copy_(x.T if shape[1] > shape[2] else x)
        orthogonal = orthogonal.view(weight.shape)

        decay = lr * group["weight_decay"]
        if group.get("cautious_decay"):
            decay = decay * (orthogonal * weight >= 0)
        return weight * (1 - decay) - lr * ratio_of(group, shape) * orthogonal

    # Matrices of one shape at a time

    @functools.cached_property
    def _scratch(self) -> Scratch:
        return Scratch()

    def _composite_steps(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> None:
        if group.get("maximize"):
            grads = torch._foreach_neg(grads)
        for batch in self._batches(group, weights):
            self._step_batch(group, [weights[i] for i in batch], [grads[i] for i in batch])

    def _batches(self, group: dict[str, Any], weights: list[Tensor]) -> Iterable[list[int]]:
        """Places of weights that are stepped together: of one dtype, with matrices of one shape."""
        alike: dict[Any, list[int]] = {}
        for place, p in enumerate(weights):
            if p.numel():
                dtypes = p.dtype, self._store.has_wide(group, p)
                alike.setdefault((*matrices_of(group, p)[1:], p.device, dtypes), []).append(place)
        for places in alike.values():
            device = weights[places[0]].device.type
            most = max(_AT_ONCE.get(device, _AT_ONCE_ELSEWHERE) // weights[places[0]].numel(), 1)
            yield from (places[i : i + most] for i in range(0, len(places), most))

    def _step_batch(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> None:
        """Steps weights of one dtype whose matrices have one shape."""
        lr, momentum = float(group["lr"]), float(group["momentum"])
        kept = [self._store.with_count(group, p) for p in weights]
        states = [self._store.decoded(p, each) for p, each in zip(weights, kept, strict=True)]
        wides = [self._widened(group, p, each) for p, each in zip(weights, states, strict=True)]
        grads = [grad.to(wide.dtype) for grad, wide in zip(grads, wides, strict=True)]
        averages = [state["momentum_buffer"] for state in states]
        torch._foreach_lerp_(averages, grads, 1 - momentum)

        dtype, device = wides[0].dtype, wides[0].device
        counts = [matrices_of(group, p)[0] for p in weights]
        shape = sum(counts), *matrices_of(group, weights[0])[1:]
        update = self._scratch.take("update", shape, dtype, device)

        def parts(of: Tensor) -> list[Tensor]:
            return [x.view(p.shape) for x, p in zip(of.split(counts), weights, strict=True)]

        for part, grad, average in zip(parts(update), grads, averages, strict=True):
            if group["nesterov"]:
                torch.lerp(grad, average, momentum, out=part)
            else:
                part.copy_(average)
        norms = torch.linalg.vector_norm(update, dim=(1, 2), keepdim=True)
        update.div_(norms.clamp_(min=group["eps"]))

        x, ns_dtype = update, ns_dtype_of(group, wides[0])
        if ns_dtype is not dtype:
            x = self._scratch.take("matrices", shape, ns_dtype, device).copy_(update)
        steps = coefficients_of(group["ns_coefficients"], group["ns_steps"])
        x = orthogonalize(x, steps, self._scratch)
        directions = parts(x if ns_dtype is dtype else update.copy_(x))

        decay = lr * float(group["weight_decay"])
        if decay and group.get("cautious_decay"):
            for wide, direction in zip(wides, directions, strict=True):
                share = self._scratch.take("share", wide.shape, dtype, device)
                torch.ge(torch.mul(wide, direction, out=share), 0, out=share)
                wide.addcmul_(share, wide, value=-decay)
        elif decay:
            torch._foreach_mul_(wides, 1 - decay)
        torch._foreach_add_(wides, directions, alpha=-lr * ratio_of(group, shape))

        for p, wide, state, each in zip(weights, wides, states, kept, strict=True):
            if seed_of(group, p) is not None:
                state["step"] += 1
            self._write_back(group, p, wide, state)
            self._store.encode(p, each, state)
