"""Steps the matrices of a group in batches of one shape, or of near ones.

A batch goes through Newton–Schulz at one go, in memory that is kept. Of DTensors each matrix is
gathered to one process. What is Muon's alone, and what another class does in the same step, are
methods that a class overrides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusedstep.optim._dtensor import is_dtensor, local
from fusedstep.optim._muon_groups import (
    beta2_of,
    form_of,
    matrices_of,
    ns_dtype_of,
    ratio_of,
    to_divisors,
)
from fusedstep.optim._near_shapes import Shape, joined, newton_schulz_operations
from fusedstep.optim._newton_schulz import (
    Scratch,
    coefficients_of,
    normalize_rows,
    orthogonalize,
    takes_gram_form,
)
from fusedstep.optim._sharded_matrices import (
    Batch,
    Cut,
    Exchange,
    Form,
    batches_of,
    cut_of,
    is_gathered,
    order_of,
    transfer_device,
)
from fusedstep.optim._undo import numbers_first, undone_on_error
from fusedstep.optim._weights import seed_of, way_of

#: Elements that go through the products together at most. More do not fill a device better, and
#: their copies would have to be kept: on a CPU they leave its caches as well.
_AT_ONCE = {"cpu": 1 << 22}
_AT_ONCE_ELSEWHERE = 1 << 25

#: Operations that take as long as the calls of one more batch, which on a GPU the host is busy with
#: (0.25 ms on an H100). Shapes are joined where padding adds fewer.
_CALLS = {"cpu": 1 << 26}
_CALLS_ELSEWHERE = 1 << 35


class MatrixBatches:
    """Steps the matrices of a group batch by batch."""

    # Steps that a class may take otherwise

    def _ratio(self, group: dict[str, Any], shape: Sequence[int], matrix: Shape) -> float:
        """The factor of the learning rate for a matrix; ``shape``: of the weight that it is of."""
        return ratio_of(group, (1, *matrix))

    def _second_step(self, group: dict[str, Any], moving: list[Moving]) -> Callable[[], None]:
        """Prepares what steps weights once more when they have moved, and returns what takes it.

        Nothing is written before, and nothing can fail on a CPU from then on.
        """
        return lambda: None

    # The step

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

        is_plain = all(value.shape == shape[1:] for value in values)

        def parts(of: Tensor) -> Sequence[Tensor]:
            if is_plain:
                return of.unbind()  # in one call: the host is what a GPU waits for
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
        take_second = self._second_step(group, moving)
        if is_last:
            self._advance(group, moving)
        new_moments = moments.split(counts) if kept_moments else ()
        for each, new in zip(kept_moments, new_moments, strict=True):
            each.copy_(new.view(each.shape))
        pairs = zip(weights, forms, strict=True)
        ratios = [self._ratio(group, p.shape, matrix) for p, (_, *matrix) in pairs]
        self._move(group, values, directions, ratios, rooms)
        take_second()
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
        under_way: dict[Batch, dict[int, Moving]] = {}

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
            ratios = [self._ratio(group, forms[x.weight].shape, x.matrix) for x in batch.units]
            moving = list(by_place.values())
            take_second = self._second_step(group, moving)
            if values:
                self._move(group, values, parts, ratios, self._rooms(group, values))
            take_second()
            self._finish(group, moving)

        exchange = Exchange(cut, self._scratch.take, device, wide, narrow)
        exchange.run(batches, pack, lambda _, update: self._orthogonal(group, update), unpack)

    # The parts of a step

    def _begin(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> list[Moving]:
        """The operands of what this process has of weights of one dtype."""
        moving = []
        for p, grad in zip(weights, grads, strict=True):
            kept = self._store.with_count(group, p)
            state = self._store.decoded(group, p, kept)
            wide = self._widened(group, p, state)
            value, average = local(wide), local(state["momentum_buffer"])
            moving.append(Moving(p, kept, state, wide, value, grad.to(wide.dtype), average))
        return moving

    @staticmethod
    def _advance(group: dict[str, Any], moving: list[Moving]) -> None:
        """Takes gradients into the averages."""
        averages, grads = [each.average for each in moving], [each.grad for each in moving]
        torch._foreach_lerp_(averages, grads, 1 - float(group["momentum"]))

    def _orthogonal(self, group: dict[str, Any], update: Tensor) -> Tensor:
        """Iterates on updates [count, rows, columns], in the products' dtype; overwrites them."""
        norms = torch.linalg.vector_norm(update, dim=(1, 2), keepdim=True)
        update.div_(to_divisors(group, norms))
        x, ns_dtype = update, ns_dtype_of(group, update.device)
        if ns_dtype is not update.dtype:
            x = self._scratch.take("matrices", update.shape, ns_dtype, update.device).copy_(update)
        steps = coefficients_of(group["ns_coefficients"], group["ns_steps"])
        return orthogonalize(x, steps, self._scratch)

    def _rooms(self, group: dict[str, Any], values: list[Tensor]) -> tuple[Tensor, ...]:
        """Operands of a move: what decay leaves of a value, zero, and memory to find where."""
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

    def _finish(self, group: dict[str, Any], moving: list[Moving]) -> None:
        """Puts moved values, and averages, where weights and states keep them."""
        for each in moving:
            if seed_of(group, each.weight) is not None:
                each.state["step"] += 1
            self._write_back(group, each.weight, each.wide, each.state)
            self._store.encode(group, each.weight, each.kept, each.state)
        if any(map(is_dtensor, (each.weight for each in moving))):  # by way of their shards
            increment_version([each.weight for each in moving])


class Moving(NamedTuple):
    """A weight in the middle of its step, and what this process has of it."""

    weight: Tensor
    kept: dict[str, Tensor]
    state: dict[str, Tensor]
    """The states of ``kept``, with numbers in place of codes."""
    wide: Tensor
    """The tensor that is updated for the weight."""
    value: Tensor
    """This process's part of that."""
    grad: Tensor
    average: Tensor


def _write_update(group: dict[str, Any], grad: Tensor, average: Tensor, out: Tensor) -> None:
    if group["nesterov"]:
        torch.lerp(grad, average, float(group["momentum"]), out=out)
    else:
        out.copy_(average)


def _most_at_once(device: torch.device) -> int:
    return _AT_ONCE.get(device.type, _AT_ONCE_ELSEWHERE)
