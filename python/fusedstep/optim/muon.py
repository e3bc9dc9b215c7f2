from __future__ import annotations

import functools
from collections.abc import Iterable
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import ParamsT

from fusedstep.optim._base import FusedOptimizer
from fusedstep.optim._checks import (
    check_betas,
    check_eps,
    check_ranges,
    name_of,
)
from fusedstep.optim._dtensor import is_dtensor, local
from fusedstep.optim._factors import Factors
from fusedstep.optim._muon_groups import (
    MUON_OWN,
    as_adamw,
    beta2_of,
    check_muon_options,
    form_of,
    matrices_of,
    ns_dtype_of,
    ratio_of,
    rows_shape,
    uses_muon,
    why_no_matrix,
)
from fusedstep.optim._near_shapes import Shape, joined, newton_schulz_operations
from fusedstep.optim._newton_schulz import (
    Scratch,
    coefficients_of,
    normalize_rows,
    orthogonalize,
    takes_gram_form,
)
from fusedstep.optim._options import OWN, own_option
from fusedstep.optim._plan import Work
from fusedstep.optim._sharded_matrices import (
    Batch,
    Cut,
    Exchange,
    Form,
    batches_of,
    cut_of,
    is_gathered,
    order_of,
    part_of,
    transfer_device,
    whole_of,
)
from fusedstep.optim._support import why_not_native
from fusedstep.optim._undo import numbers_first, undone_on_error
from fusedstep.optim._weights import seed_of, way_of
from fusedstep.optim.adam import Adam

__all__ = ["Muon"]

#: Options that check_ranges() does not know.
_OF_MUON = (
    *("ns_coefficients", "ns_steps", "adjust_lr_fn"),
    *("use_muon", "split_heads", "stacked", "ns_dtype", "cautious_decay", "normuon", "beta2"),
)

#: Elements that go through the products together at most. More do not fill a device better, and
#: their copies would have to be kept: on a CPU they leave its caches as well.
_AT_ONCE = {"cpu": 1 << 22}
_AT_ONCE_ELSEWHERE = 1 << 25

#: Operations that take as long as the calls of one more batch, which on a GPU the host is busy with
#: (0.25 ms on an H100). Shapes are joined where padding adds fewer.
_CALLS = {"cpu": 1 << 26}
_CALLS_ELSEWHERE = 1 << 35


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
    its own matrix, and of no other. Of sharded DTensors each matrix is gathered to one process,
    which computes it for all.

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
        normuon (bool, optional): give the rows of an update one size, as `NorMuon`_ does: each is
            divided by the root of a running average of its mean square, which is kept in the state
            ``second_momentum_buffer``, and the matrix is given its norm of before. States are
            float32 then beside 16-bit weights (default: False)
        beta2 (float, optional): coefficient of that average (default: 0.95)
        betas (tuple[float, float], optional): of AdamW (default: (0.9, 0.999))
        adamw_eps (float, optional): eps of groups with ``use_muon=False`` that have none of their
            own (default: 1e-8)
        fused (bool, optional): False steps matrix by matrix in plain torch operations; True and
            None take matrices together, and native kernels for groups of AdamW (default: None)

    Raises:
        ValueError: if a hyper-parameter is out of range, ``params`` is empty, or a group of Muon
            has a weight of fewer than two dimensions, one that is complex, one whose first
            dimension ``split_heads`` does not divide, or a DTensor that is no shard along one
            dimension of a mesh.
        RuntimeError: at :meth:`step`, before anything is changed, for sparse gradients, weights
            that overlap themselves in memory, and shards with a gradient in some processes only.

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
    .. _NorMuon:
        https://arxiv.org/abs/2510.05491
    .. _Cautious Weight Decay:
        https://arxiv.org/abs/2510.12402
    """

    _states = ("momentum_buffer", "second_momentum_buffer", "exp_avg", "exp_avg_sq")
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
        normuon: bool = False,
        beta2: float = 0.95,
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
        if not uses_muon(group):
            return cls._states[2:]
        return cls._states[: 2 if group.get("normuon") else 1]

    def _state_shapes(self, group: dict[str, Any], weight: Tensor) -> dict[str, torch.Size] | None:
        if not (uses_muon(group) and group.get("normuon")):
            return None
        shapes = weight.shape, rows_shape(group, weight)
        return dict(zip(self._state_names(group), shapes, strict=True))

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

    def _imperative_update(self, work: list[Work], factors: Factors) -> None:
        # Before anything is changed; transfers that some processes take no part in would not end.
        weights = [p for item in work if uses_muon(item.group) for p in item.weights]
        self._spread_weights().check_gradients(weights)
        super()._imperative_update(work, factors)

    def _is_native(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor] = ()
    ) -> bool:
        on_meta = [p for p in weights if p.is_meta]
        if on_meta and uses_muon(group) and own_option(group, "fused"):
            raise RuntimeError(why_not_native(on_meta))
        return super()._is_native(group, weights, grads)

    # Matrix by matrix

    def _imperative(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        if not uses_muon(group):
            super()._imperative(as_adamw(group), weight, grad, state)
        elif is_dtensor(weight):
            self._imperative_shard(group, weight, grad, state)
        else:
            FusedOptimizer._imperative(self, group, weight, grad, state)

    def _imperative_shard(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Tensor]
    ) -> None:
        """Steps what this process has of a weight: by the whole, where others have other parts."""
        cut = cut_of(weight) if is_gathered(form_of(group, weight), cut_of(weight)) else None
        take = whole_of if cut else local
        average = state["momentum_buffer"]
        new_state = {"momentum_buffer": take(average)}
        new = self._formula(group, take(weight), take(grad), new_state)
        for target, found in ((weight, new), (average, new_state["momentum_buffer"])):
            local(target).copy_(part_of(found, cut) if cut else found)

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
            x = matrix.to(ns_dtype_of(group, weight.device))
            x = x.T if shape[1] > shape[2] else x
            x = x / x.norm().clamp(min=group["eps"])
            for a, b, c in steps:
                gram = x @ x.T
                x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
            orthogonal[place].copy_(x.T if shape[1] > shape[2] else x)
        if group.get("normuon"):
            moments = state["second_momentum_buffer"]
            means, beta2 = orthogonal.square().mean(-1, keepdim=True), beta2_of(group)
            averages = moments.view(means.shape).lerp(means, 1 - beta2)
            state["second_momentum_buffer"] = averages.view(moments.shape)
            norm = orthogonal.norm(dim=(1, 2), keepdim=True)
            orthogonal /= averages.sqrt() + 1e-10
            orthogonal *= norm / (orthogonal.norm(dim=(1, 2), keepdim=True) + 1e-10)
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
        grads = list(map(local, grads))
        if group.get("maximize"):
            grads = torch._foreach_neg(grads)
        forms, cuts = [form_of(group, p) for p in weights], list(map(cut_of, weights))
        alone, cut_alike = [], {}
        for place, (form, cut, p) in enumerate(zip(forms, cuts, weights, strict=True)):
            if is_gathered(form, cut):
                key = cut, p.dtype, self._store.has_wide(group, p)
                if p.numel():
                    cut_alike.setdefault(key, []).append(place)
            else:
                alone.append(place)
        for batch in self._batches(group, weights, alone):
            some = [weights[i] for i in batch]
            coded = [p for p in some if way_of(group, p) or self._store.kind_of(group, p)]
            kept = [self._store.with_count(group, p).values() for p in coded]
            with undone_on_error([*coded, *chain.from_iterable(kept)]):
                self._step_batch(group, some, [grads[i] for i in batch])
            self._stepped += some
        for (cut, *_), places in cut_alike.items():
            some = [[each[i] for i in places] for each in (weights, grads, forms)]
            self._step_cut(group, cut, *some)

    def _batches(
        self, group: dict[str, Any], weights: list[Tensor], places: list[int]
    ) -> Iterable[list[int]]:
        """Places of weights that are stepped together: of one dtype, of one shape or near ones."""
        alike: dict[Any, dict[Shape, list[int]]] = {}
        for place in places:
            p = weights[place]
            if (shard := local(p)).numel():
                kind = p.device, p.dtype, self._store.has_wide(group, p)
                shape = matrices_of(group, shard)[1:]
                alike.setdefault(kind, {}).setdefault(shape, []).append(place)
        for (device, *_), by_shape in alike.items():
            at_once = _most_at_once(device)
            for shapes in self._joined(group, device, weights, by_shape):
                together = [place for shape in shapes for place in by_shape[shape]]
                first = local(weights[together[0]])
                # Joined shapes are no more than that.
                most = max(at_once // first.numel(), 1) if len(shapes) == 1 else len(together)
                yield from (together[i : i + most] for i in range(0, len(together), most))

    def _joined(
        self,
        group: dict[str, Any],
        device: torch.device,
        weights: list[Tensor],
        by_shape: dict[Shape, list[int]],
    ) -> list[list[Shape]]:
        """Shapes that go through products together, padded to the largest sides among them."""
        if len(by_shape) == 1 or group.get("normuon") or group.get("split_heads", 1) > 1:
            return [[shape] for shape in by_shape]
        steps, dtype = int(group["ns_steps"]), ns_dtype_of(group, device)
        return joined(
            {
                shape: sum(matrices_of(group, local(weights[i]))[0] for i in places)
                for shape, places in by_shape.items()
            },
            _most_at_once(device),
            _CALLS.get(device.type, _CALLS_ELSEWHERE),
            lambda shape: newton_schulz_operations(shape, steps),
            lambda shape: takes_gram_form(shape, dtype, steps),
        )

    def _step_batch(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> None:
        """Steps weights of one dtype, of which this process has whole matrices of near shapes."""
        moving = self._begin(group, weights, grads)
        values = [each.value for each in moving]
        dtype, device = values[0].dtype, values[0].device
        forms = [matrices_of(group, value) for value in values]
        counts, rows, columns = zip(*forms, strict=True)
        shape = sum(counts), max(rows), max(columns)
        update = self._scratch.take("update", shape, dtype, device)
        if len({form[1:] for form in forms}) > 1:
            update.zero_()

        def parts(of: Tensor) -> list[Tensor]:
            pieces = zip(of.split(counts), forms, values, strict=True)
            return [x[:, : form[1], : form[2]].view(value.shape) for x, form, value in pieces]

        # On a CPU products may lack memory: nothing is written before they are there.
        is_last = device.type == "cpu"
        if not is_last:
            self._advance(group, moving)
        share = 1 - float(group["momentum"])
        for part, each in zip(parts(update), moving, strict=True):
            average = each.average
            if is_last:
                average = torch.lerp(average, each.grad, share, out=part)
            _write_update(group, each.grad, average, part)
        x = self._orthogonal(group, update)
        x = x if x.dtype is dtype else update.copy_(x)
        kept_moments, moments = [], None
        if group.get("normuon"):
            kept_moments = [each.state["second_momentum_buffer"] for each in moving]
            moments = torch.cat([each.view(-1, shape[1], 1) for each in kept_moments])
            normalize_rows(x, moments, beta2_of(group))
        directions = parts(x)
        rooms = self._rooms(group, values)
        if is_last:
            self._advance(group, moving)
        new_moments = moments.split(counts) if kept_moments else ()
        for each, new in zip(kept_moments, new_moments, strict=True):
            each.copy_(new.view(each.shape))
        self._move(group, values, directions, [ratio_of(group, form) for form in forms], rooms)
        self._finish(group, moving)

    def _step_cut(
        self,
        group: dict[str, Any],
        cut: Cut,
        weights: list[Tensor],
        grads: list[Tensor],
        forms: list[Form],
    ) -> None:
        """Steps weights of one dtype, of whose matrices processes have parts."""
        order, device = order_of(cut.mesh, cut.axis), weights[0].device
        there = transfer_device(cut, device)
        number = cut.mesh.get_local_rank(cut.axis)
        batches = batches_of(
            tuple(forms), cut.dim, order, order.index(number), _most_at_once(there)
        )
        wide = torch.float32 if self._store.has_wide(group, weights[0]) else weights[0].dtype
        products = ns_dtype_of(group, there)
        narrow = products if products.itemsize < wide.itemsize else wide
        under_way: dict[Batch, dict[int, _Moving]] = {}

        def pack(batch: Batch, parts: list[Tensor]) -> None:
            places = batch.weights
            moving = self._begin(group, *([each[i] for i in places] for each in (weights, grads)))
            self._advance(group, moving)
            by_place = under_way[batch] = dict(zip(places, moving, strict=True))
            for unit, part in zip(batch.units, parts, strict=True):
                each = by_place[unit.weight]
                whole = each.grad, each.average
                _write_update(group, *(batch.part_of_shard(unit, x) for x in whole), part)

        def unpack(batch: Batch, parts: list[Tensor]) -> None:
            by_place = under_way.pop(batch)
            values = [batch.part_of_shard(x, by_place[x.weight].value) for x in batch.units]
            ratios = [ratio_of(group, (1, *unit.matrix)) for unit in batch.units]
            if values:
                self._move(group, values, parts, ratios, self._rooms(group, values))
            self._finish(group, list(by_place.values()))

        exchange = Exchange(cut, self._scratch.take, device, wide, narrow)
        exchange.run(batches, pack, lambda _, update: self._orthogonal(group, update), unpack)

    # The parts of a step

    def _begin(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> list[_Moving]:
        """The operands of what this process has of weights of one dtype."""
        moving = []
        for p, grad in zip(weights, grads, strict=True):
            kept = self._store.with_count(group, p)
            state = self._store.decoded(group, p, kept)
            wide = self._widened(group, p, state)
            value, average = local(wide), local(state["momentum_buffer"])
            moving.append(_Moving(p, kept, state, wide, value, grad.to(wide.dtype), average))
        return moving

    @staticmethod
    def _advance(group: dict[str, Any], moving: list[_Moving]) -> None:
        """Takes gradients into the averages."""
        averages, grads = [each.average for each in moving], [each.grad for each in moving]
        torch._foreach_lerp_(averages, grads, 1 - float(group["momentum"]))

    def _orthogonal(self, group: dict[str, Any], update: Tensor) -> Tensor:
        """Iterates on updates [count, rows, columns], in the products' dtype; overwrites them."""
        norms = torch.linalg.vector_norm(update, dim=(1, 2), keepdim=True)
        update.div_(norms.clamp_(min=group["eps"]))
        x, ns_dtype = update, ns_dtype_of(group, update.device)
        if ns_dtype is not update.dtype:
            x = self._scratch.take("matrices", update.shape, ns_dtype, update.device).copy_(update)
        steps = coefficients_of(group["ns_coefficients"], group["ns_steps"])
        return orthogonalize(x, steps, self._scratch)

    def _rooms(self, group: dict[str, Any], values: list[Tensor]) -> tuple[Tensor, ...]:
        """What a move needs: what decay leaves of a value, zero, and memory to find where."""
        like, most = values[0], max(map(Tensor.numel, values))
        keep = 1 - float(group["lr"]) * float(group["weight_decay"])
        shape = (most if group.get("cautious_decay") else 0,)
        rooms = [
            self._scratch.take("share", shape, x, like.device) for x in (like.dtype, torch.bool)
        ]
        return *numbers_first(like, keep, 0.0), *rooms

    def _move(
        self,
        group: dict[str, Any],
        values: list[Tensor],
        directions: list[Tensor],
        ratios: list[float],
        rooms: tuple[Tensor, ...],
    ) -> None:
        """Decays and moves values of weights, or parts of them, and allocates nothing."""
        lr = float(group["lr"])
        decay, (keep, zero, room, told) = lr * float(group["weight_decay"]), rooms
        if decay and group.get("cautious_decay"):
            for value, direction in zip(values, directions, strict=True):
                share, is_same = (x[: value.numel()].view(value.shape) for x in (room, told))
                torch.ge(torch.mul(value, direction, out=share), zero, out=is_same)
                value.addcmul_(share.copy_(is_same), value, value=-decay)
        elif decay:
            torch._foreach_mul_(values, keep)
        alike: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        for ratio, *pair in zip(ratios, values, directions, strict=True):
            for each, tensor in zip(alike.setdefault(ratio, ([], [])), pair, strict=True):
                each.append(tensor)
        for ratio, (some, along) in alike.items():
            torch._foreach_add_(some, along, alpha=-lr * ratio)

    def _finish(self, group: dict[str, Any], moving: list[_Moving]) -> None:
        """Puts moved values, and averages, where weights and states keep them."""
        for each in moving:
            if seed_of(group, each.weight) is not None:
                each.state["step"] += 1
            self._write_back(group, each.weight, each.wide, each.state)
            self._store.encode(group, each.weight, each.kept, each.state)
        if any(map(is_dtensor, (each.weight for each in moving))):  # by way of their shards
            increment_version([each.weight for each in moving])


class _Moving(NamedTuple):
    """A weight in the middle of its step, and what this process has of it."""

    weight: Tensor
    kept: dict[str, Tensor]
    state: dict[str, Tensor]
    """That of ``kept``, with numbers in place of codes."""
    wide: Tensor
    """The tensor that is updated for the weight."""
    value: Tensor
    """What this process has of that."""
    grad: Tensor
    average: Tensor


def _write_update(group: dict[str, Any], grad: Tensor, average: Tensor, out: Tensor) -> None:
    if group["nesterov"]:
        torch.lerp(grad, average, float(group["momentum"]), out=out)
    else:
        out.copy_(average)


def _most_at_once(device: torch.device) -> int:
    return _AT_ONCE.get(device.type, _AT_ONCE_ELSEWHERE)
