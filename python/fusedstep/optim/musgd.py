from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusedstep._api.base import FusedOptimizer
from fusedstep._matrix.muon_groups import MUON_OWN, check_muon_options, is_of_muon, uses_muon
from fusedstep._matrix.muon_optimizer import MuonOptimizer
from fusedstep._matrix.muon_steps import MuonSteps
from fusedstep._matrix.operands import Moving
from fusedstep._matrix.second_step import Operands, SecondSteps
from fusedstep._options.kinds import (
    Counts,
    Flag,
    Number,
    Option,
    Options,
    check_ranges,
    named_values,
)
from fusedstep._options.shared import SHARED, own_option
from fusedstep._sharding.dtensor import local
from fusedstep._state.kinds import Group, State, States
from fusedstep._step.owner import Owner
from fusedstep._step.support import why_not_native
from fusedstep.optim.sgd import SGD

__all__ = ["MuSGD"]

#: Options that a group has only where they were set.
_UNSET: Options = {
    "muon": Number(unset=0.5),
    "sgd": Number(unset=0.5),
    "split_sizes": Counts(unset=None, fills_sides=True),
    "ns_dtype": Option(unset=None),
    "maximize": Flag(unset=False),
}

_MUSGD_OWN = named_values(_UNSET, "unset")

#: Muon's options that are always the same here. A group may have keys of these names that are the
#: user's own.
_FIXED: dict[str, Any] = {
    **{name: value for name, value in MUON_OWN.items() if name not in {"use_muon", *_UNSET}},
    "ns_coefficients": "quintic",
    "ns_steps": 5,
    "eps": 1e-7,
    "adds_eps": True,
    "adjust_lr_fn": None,
    "stacked": False,
}

_SGD_BUFFER = "momentum_buffer_SGD"


def _has_average(group: dict[str, Any]) -> bool:
    return uses_muon(group) or bool(group.get("momentum"))


class _MuSGDSteps(MuonSteps):
    """Steps groups with ``use_muon`` by both parts."""

    def __init__(self) -> None:
        super().__init__()
        self.second_steps = SecondSteps(SGD._rule, "momentum_buffer")

    def sparse_error(self, optimizer: Owner, group: Group) -> str | None:
        if uses_muon(group):
            return "MuSGD does not support sparse gradients in groups with use_muon=True"
        return super().sparse_error(optimizer, group)

    def is_native(
        self,
        optimizer: Owner,
        group: Group,
        weights: list[Tensor],
        grads: Sequence[Tensor] = (),
    ) -> bool:
        asks = uses_muon(group) and own_option(group, "fused")
        if asks and (reason := why_not_native(weights)):
            raise RuntimeError(reason)
        return super().is_native(optimizer, group, weights, grads)

    def takes_batches(self, weights: list[Tensor], grads: list[Tensor]) -> bool:
        is_other = any(map(is_traceable_wrapper_subclass, grads))
        return not is_other and why_not_native(weights) is None

    def second_step(
        self, optimizer: Owner, group: Group, moving: list[Moving]
    ) -> Callable[[], None]:
        operands = Operands(
            [each.value for each in moving],
            [_kept_apart(each.grad, each.value) for each in moving],
            [local(each.state[_SGD_BUFFER]) for each in moving] if group["momentum"] else [],
            [each.average for each in moving],
            all(map(_is_in_place, moving)),
        )
        numbers = optimizer._options(_as_sgd(group))
        return self.second_steps.prepare(operands, numbers, self.scratch)


class MuSGD(MuonOptimizer, SGD):
    """Implements the MuSGD algorithm, in signature and states that of Ultralytics.

    For a matrix ``w`` with gradient ``g`` in a group with ``use_muon``::

        m = momentum * m + (1 - momentum) * g
        u = momentum * m + (1 - momentum) * g if nesterov else m
        x = newton_schulz(u / (norm(u) + 1e-7))         (as Muon, 5 steps)
        w = w - lr * muon * sqrt(max(1, w.shape[-2] / w.shape[-1])) * x
        d = g + weight_decay * w
        b = momentum * b + d
        e = d + momentum * b if nesterov else b
        w = w - lr * sgd * e

    This is the optimizer of `Ultralytics`_, with Keller Jordan's `Muon`_. All other groups are
    stepped by :class:`SGD`, with ``lr`` itself.

    Weights of a group with ``use_muon`` have two dimensions or more. All but the first are
    flattened: a convolution is a matrix [out, rest], but has the factor of its last two dimensions,
    which are the filter's. They may have any strides, and be float32, float64, bfloat16 or float16
    on any device. ``momentum_buffer`` (m) and ``momentum_buffer_SGD`` (b) have the weight's dtype
    and dimension order; without ``momentum`` there is no b, and no state of other groups. Matrices
    of one shape go through the iteration together, in memory that the optimizer keeps; the native
    rule of SGD then steps them all. A gradient with a NaN makes NaN of its own matrix, and of no
    other. Of sharded DTensors each matrix is gathered to one process, which computes it for all.

    Args:
        params (iterable): iterable of parameters or named_parameters to optimize
            or iterable of dicts defining parameter groups
        lr (float, Tensor, optional): learning rate (default: 1e-3)
        momentum (float, optional): momentum factor of both parts (default: 0)
        weight_decay (float, optional): weight decay (L2 penalty) of the part of SGD (default: 0)
        nesterov (bool, optional): Nesterov momentum of both parts (default: False)
        use_muon (bool, optional): True has a group stepped by both, False by SGD alone
            (default: False)
        muon (float, optional): factor of ``lr`` of Muon's part (default: 0.5)
        sgd (float, optional): factor of ``lr`` of SGD's part, in groups with ``use_muon``
            (default: 0.5)
        split_sizes (tuple[int, ...], optional): numbers of rows that are orthogonalised separately,
            each with a factor of its own: those of query, key and value in one weight. Their sum is
            the weight's number of rows (default: None)
        ns_dtype (torch.dtype, optional): of the products: torch.bfloat16, torch.float16,
            torch.float32 or torch.float64; None is float16 on GPUs of compute capability 9.0,
            float32 on CPUs without instructions for bfloat16, and bfloat16 elsewhere
            (default: None)
        fused (bool, optional): False steps weight by weight in plain torch operations; True and
            None take matrices together and the native rule of SGD. Where there is none for a
            weight, None takes torch operations, and True is an error (default: None)

    Raises:
        ValueError: if a hyper-parameter is out of range, ``params`` is empty, or a group with
            ``use_muon`` has a weight of fewer than two dimensions, one that is complex, one whose
            first dimension is not the sum of ``split_sizes``, or a DTensor that is no shard along
            one dimension of a mesh.
        RuntimeError: at :meth:`step`, before anything is changed, for sparse gradients of groups
            with ``use_muon``, weights that overlap themselves in memory, and shards with a gradient
            in some processes only.

    Example::

        >>> groups = optim.groups(model, for_="musgd")
        >>> optimizer = optim.MuSGD(
        ...     groups, lr=0.01, momentum=0.9, nesterov=True, muon=0.2, sgd=1.0
        ... )
        >>> optimizer.zero_grad()
        >>> loss_fn(model(input), target).backward()
        >>> optimizer.step()

    .. _Ultralytics:
        https://docs.ultralytics.com/reference/optim/muon/
    .. _Muon:
        https://kellerjordan.github.io/posts/muon/
    """

    _state_kinds: ClassVar[States] = {
        "momentum_buffer": State(needs=_has_average, lasts=uses_muon, is_signed=True),
        _SGD_BUFFER: State(of=is_of_muon, needs="momentum", lasts=uses_muon, is_signed=True),
    }
    _elementwise = False
    _torch_fuses = False
    _allocates_first = False
    _composite = True
    _option_kinds: ClassVar[Options] = {
        **SHARED,
        "momentum": Number(),
        "weight_decay": Number(),
        "nesterov": Flag(before=False),
        "use_muon": Flag(before=False),
        **_UNSET,
    }
    _by_dimensions = ({"use_muon": True}, {})
    _other = "SGD"
    _rule_values: ClassVar[dict[str, Any]] = {"dampening": 0}
    _strategy_class = _MuSGDSteps

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        use_muon: bool = False,
        muon: float = 0.5,
        sgd: float = 0.5,
        *,
        split_sizes: tuple[int, ...] | None = None,
        ns_dtype: torch.dtype | None = None,
        maximize: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | str | None = None,
        master_weights: bool | str = False,
        rounding: str | None = None,
        seed: int = 0,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        FusedOptimizer.__init__(self, params, locals())

    # Options

    def _check(self, options: dict[str, Any]) -> None:
        FusedOptimizer._check(self, options)
        check_muon_options(self._as_muon(options))

    def _check_group(self, index: int, group: dict[str, Any]) -> None:
        super()._check_group(index, group)
        factors = {name: group.get(name, _MUSGD_OWN[name]) for name in ("muon", "sgd")}
        check_ranges(
            self._option_kinds, factors | {"weight_decay": group["weight_decay"]}, tensors=True
        )

    @property
    def muon(self) -> float:
        """The factor of Muon's part. To set it sets that of all groups."""
        return float(self.defaults.get("muon", _MUSGD_OWN["muon"]))

    @muon.setter
    def muon(self, factor: float) -> None:
        self._set_factor("muon", factor)

    @property
    def sgd(self) -> float:
        """The factor of SGD's part. To set it sets that of all groups."""
        return float(self.defaults.get("sgd", _MUSGD_OWN["sgd"]))

    @sgd.setter
    def sgd(self, factor: float) -> None:
        self._set_factor("sgd", factor)

    def _set_factor(self, name: str, factor: float) -> None:
        check_ranges(self._option_kinds, {name: factor}, tensors=True)
        for options in (self.defaults, *self._groups):
            options[name] = factor

    def _as_muon(self, group: dict[str, Any]) -> dict[str, Any]:
        """A group with Muon's options. Only the part of SGD decays weights."""
        decay = group["weight_decay"]
        return group | _FIXED | {"weight_decay": 0.0, "sgd_weight_decay": decay}

    def _as_other(self, group: dict[str, Any]) -> dict[str, Any]:
        return group | {"dampening": 0}

    def _ratio(self, group: dict[str, Any], shape: Sequence[int]) -> float:
        muon = float(group.get("muon", _MUSGD_OWN["muon"]))
        return muon * math.sqrt(max(1, shape[-2] / max(shape[-1], 1)))

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        if not uses_muon(group):
            super()._imperative(group, weight, grad, state)
            return
        part, own_grad = local(weight), _kept_apart(local(grad), local(weight))
        of_muon = {name: each for name, each in state.items() if name != _SGD_BUFFER}
        super()._imperative(group, weight, grad, of_muon)
        of_sgd = {"step": state["step"]}
        if _SGD_BUFFER in state:
            of_sgd["momentum_buffer"] = local(state[_SGD_BUFFER])
        SGD._imperative(self, _as_sgd(self._as_muon(group)), part, own_grad, of_sgd)


def _as_sgd(group: dict[str, Any]) -> dict[str, Any]:
    """The options of SGD's part, of a group as ``_as_muon`` returns it."""
    return group | {
        "use_muon": False,
        "lr": float(group["lr"]) * float(group.get("sgd", _MUSGD_OWN["sgd"])),
        "weight_decay": group["sgd_weight_decay"],
        "dampening": 0,
        "maximize": False,  # gradients have been negated
    }


def _kept_apart(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient, or a copy of one that is its own weight: it is read when that has moved."""
    is_weight = not grad.is_meta and grad.is_set_to(weight)
    return grad.clone() if is_weight else grad


def _is_in_place(moving: Moving) -> bool:
    """Returns whether a step writes to the weight and its states, and not to copies of them."""
    kept, state = (each.get(_SGD_BUFFER) for each in (moving.kept, moving.state))
    return moving.wide is moving.weight and kept is state
