"""Steps the matrices of a group in batches of one shape, or of near ones.

A batch goes through Newton–Schulz at one go, in memory that is kept. Of DTensors each matrix is
gathered to one process. What is Muon's alone, and what another class does in the same step, are
methods that a class overrides.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusedstep._matrix.arrangement import (
    MOST_BYTES,
    Arrangement,
    Memory,
    arrange,
    most_at_once,
    takes_batches_of_group,
)
from fusedstep._matrix.chained import (
    ChainedBatches,
    takes_batches_of,
    updates_dtype,
)
from fusedstep._matrix.chosen import (
    Chosen,
    has_choice,
    largest,
    norms_of,
    side_of,
    takes_rows,
)
from fusedstep._matrix.chosen_batches import ChosenBatches
from fusedstep._matrix.muon_groups import (
    beta2_of,
    form_of,
    keeps_range,
    norm_dtype,
    ns_dtype_of,
    ratio_of,
    starts_aol,
    to_divisors,
)
from fusedstep._matrix.newton_schulz import (
    Scratch,
    coefficients_of,
    fits_engine,
    normalize_rows,
    orthogonalize,
)
from fusedstep._matrix.passes import (
    advance_and_move,
    are_taken,
    average_into,
    decay_and_add,
    has_pass,
    have_passes,
    in_order,
    normalize_into,
    take_sums,
)
from fusedstep._matrix.together import (
    Moving,
    Together,
    keep_moments,
    moments_of,
    parts_of_batches,
)
from fusedstep._sharding.dtensor import is_dtensor, local
from fusedstep._sharding.exchange import (
    Batch,
    Cut,
    Exchange,
    Form,
    Share,
    Unit,
    batches_over,
    transfer_device,
)
from fusedstep._state.counts import count_steps
from fusedstep._state.storage import seed_of, way_of
from fusedstep._step.owner import Owner
from fusedstep._step.plan import Work, same
from fusedstep._step.program import Pass, add_up, run
from fusedstep._step.undo import numbers_first, undone_on_error
from fusedstep._torch_ops.imperative import MOST_COPIES, size_of


class MatrixBatches(Owner):
    """Steps the matrices of a group batch by batch."""

    # Steps that a class may take otherwise

    def _ratio(self, group: dict[str, Any], shape: Sequence[int]) -> float:
        """The factor of the learning rate for a matrix: its rows, and all other dimensions."""
        return ratio_of(group, shape[0], math.prod(shape[1:]))

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
        arranged = self._last_arrangement(group, weights)
        if arranged is None and len(set(weights)) < len(weights):  # one of them moves twice
            self._imperative_steps(group, weights, grads)
            return
        grads = list(map(local, grads))
        if arranged is None:
            options = self._passed_options(group)
            arranged = arrange(self._store, self._begin, group, weights, options)
            if operands := self._memory.get(weights[0]):
                can_last = arranged.options is not None and not arranged.cut_alike
                operands.derived = arranged if can_last else None
        for batches, memory in arranged.chained:
            if self._takes_chain(group, batches, memory, grads):
                some = [p for batch in batches for p in batch.weights]
                step: Callable[[], None]
                if isinstance(memory, ChosenBatches):
                    step = functools.partial(self._step_chosen, group, batches, memory, grads)
                else:
                    step = functools.partial(self._step_chain, group, batches, memory, grads)
                self._progress.take(some, step)
            else:
                self._take_batches(group, batches, grads)
        self._take_batches(group, arranged.batches, grads)
        for (cut, *_), places in arranged.cut_alike.items():
            some, found = ([each[i] for i in places] for each in (weights, grads))
            forms = [form_of(group, p) for p in some]
            self._step_cut(group, cut, some, _ascending(group, found), forms)

    def _take_batches(
        self, group: dict[str, Any], batches: list[Together], grads: list[Tensor]
    ) -> None:
        """Steps one batch after another; ``grads``: of all weights of the step."""
        for batch in batches:
            some = [grads[i] for i in batch.places]
            step = functools.partial(self._step_or_undo, group, batch, some)
            self._progress.take(batch.weights, step)

    def _last_arrangement(self, group: dict[str, Any], weights: list[Tensor]) -> Arrangement | None:
        """The arrangement of the last step, if nothing has changed since but floats."""
        operands = self._memory.get(weights[0])
        known: Arrangement | None = operands.derived if operands else None
        if known and known.options is self._passed_options(group) and same(weights, known.weights):
            return known
        return None

    def _passed_options(self, group: dict[str, Any]) -> list[Any] | None:
        """The options that have passed checks: another object if one has changed."""
        return self._passed.get(id(group["params"]))

    def _takes_chain(
        self,
        group: dict[str, Any],
        batches: list[Together],
        memory: Memory,
        grads: list[Tensor],
    ) -> bool:
        """Returns whether the native engine and passes take these dtypes and layouts."""
        some = [grads[i] for batch in batches for i in batch.places]
        if isinstance(memory, ChosenBatches):
            first = memory.weights[0]
            return self._takes_kind(group, first) and memory.fits(group, some)
        weights = parts_of_batches(batches, [p for batch in batches for p in batch.weights])
        averages = [each.average for batch in batches for each in batch.moving]
        return self._takes_kind(group, weights[0]) and have_passes(weights, averages, some)

    @staticmethod
    def _takes_kind(group: dict[str, Any], weight: Tensor) -> bool:
        """Returns whether the native engine takes weights of a dtype by the options of a group.

        These and the instruction set may have changed since the batches were made.
        """
        takes_updates = updates_dtype(weight.dtype, group.get("ns_dtype")) is not None
        return takes_updates and takes_batches_of_group(group, weight.device, weight.dtype)

    def _step_chain(
        self,
        group: dict[str, Any],
        batches: list[Together],
        memory: ChainedBatches,
        grads: list[Tensor],
    ) -> None:
        """Steps batches together; ``grads``: of all weights of the step."""
        taken = in_order([grads[i] for batch in batches for i in batch.places])
        ordered = _ascending(group, taken)
        known = [each for batch in batches for each in batch.moving]
        moving = self._begin(group, [each.weight for each in known], ordered, known)
        values = parts_of_batches(batches, [each.value for each in moving])
        first = values[0]
        updates = updates_dtype(first.dtype, group.get("ns_dtype"))
        assert updates is not None
        steps = coefficients_of(group["ns_coefficients"], group["ns_steps"])
        products = ns_dtype_of(group, first.device)
        memory.take(self._scratch, updates, products, steps, starts_aol(group))
        rooms = self._rooms(group, values, is_native=True)
        momentum = float(group["momentum"])
        lead = momentum if group["nesterov"] else 1.0
        averages = parts_of_batches(batches, [each.average for each in moving])
        ordered = parts_of_batches(batches, ordered)
        memory.update(averages, ordered, 1 - momentum, lead)
        directions = memory.orthogonalize(float(group["eps"]), bool(group.get("adds_eps")))
        take_second = self._second_step(group, moving)
        alike = self._alike(group, batches)
        if first.is_cpu:
            factors = _factors(group, alike, len(values))
            keep = 1 - float(group["lr"]) * float(group["weight_decay"])
            advance_and_move(averages, ordered, values, directions, 1 - momentum, keep, factors)
        else:
            self._move(group, values, directions, alike, rooms, is_native=True)
        take_second()

    def _step_chosen(
        self,
        group: dict[str, Any],
        batches: list[Together],
        memory: ChosenBatches,
        grads: list[Tensor],
    ) -> None:
        """As ``_step_chain``, of the rows or columns that are chosen."""
        taken = in_order([grads[i] for batch in batches for i in batch.places])
        first, ordered = memory.weights[0], parts_of_batches(batches, taken)
        updates = updates_dtype(first.dtype, group.get("ns_dtype"))
        assert updates is not None
        steps = coefficients_of(group["ns_coefficients"], group["ns_steps"])
        memory.take(
            self._scratch, updates, ns_dtype_of(group, first.device), steps, starts_aol(group)
        )
        choice = float(group["momentum"]), bool(group.get("maximize"))
        memory.choose(ordered, *choice)
        directions = memory.orthogonalize(float(group["eps"]), bool(group.get("adds_eps")))
        known = [each for batch in batches for each in batch.moving]
        moving = self._begin(group, [each.weight for each in known], taken, known)
        take_second = self._second_step(group, moving)
        factors = _factors(group, self._alike(group, batches), len(ordered))
        keep = 1 - float(group["lr"]) * float(group["weight_decay"])
        memory.move(ordered, directions, *choice, keep, factors)
        take_second()

    def _alike(
        self, group: dict[str, Any], batches: list[Together]
    ) -> list[tuple[float, list[int]]]:
        """Factors of the learning rate, and the places of the parts of batches that have them."""
        alike, begin = [], 0
        for batch in batches:
            for shape, indices in batch.alike.items():
                alike.append((self._ratio(group, shape), [begin + index for index in indices]))
            begin += sum(len(share.parts) for share in batch.shares)
        return alike

    def _part_size(self, item: Work) -> int:
        """That of a batch, if the group has batches."""
        sizes = list(map(size_of, item.weights, item.grads))
        batch = min(sum(sizes), MOST_BYTES) if self._is_composite(item.group) else 0
        return MOST_COPIES * max(batch, *sizes)

    def _step_or_undo(self, group: dict[str, Any], batch: Together, grads: list[Tensor]) -> None:
        """Steps a batch, or changes nothing if memory runs out."""
        grads = _ascending(group, grads)
        if batch.moving:  # as it is, and what is written last allocates nothing
            self._step_batch(group, batch, grads)
            return
        coded = [p for p in batch.weights if way_of(group, p) or self._store.kind_of(group, p)]
        kept = [self._store.with_count(group, p).values() for p in coded]
        with undone_on_error([*coded, *itertools.chain.from_iterable(kept)]):
            self._step_batch(group, batch, grads)

    def _step_batch(self, group: dict[str, Any], batch: Together, grads: list[Tensor]) -> None:
        """Steps weights of one dtype, of which this process has whole matrices of near shapes."""
        moving = self._begin(group, batch.weights, grads, batch.moving)
        values = batch.parts([each.value for each in moving])
        averages = batch.parts([each.average for each in moving])
        grads = batch.parts([each.grad for each in moving])
        is_native = not batch.is_padded and are_taken(values, averages, grads)
        directions_of = self._directions_of_chosen if has_choice(group) else self._directions
        directions, write = directions_of(group, batch, moving, averages, grads, is_native)
        rooms = self._rooms(group, values, is_native)
        take_second = self._second_step(group, moving)
        write()
        alike = [(self._ratio(group, shape), indices) for shape, indices in batch.alike.items()]
        self._move(group, values, batch.parts_in(directions), alike, rooms, is_native)
        take_second()
        if not batch.moving:
            self._finish(group, moving)

    def _directions(
        self,
        group: dict[str, Any],
        batch: Together,
        moving: list[Moving],
        averages: list[Tensor],
        grads: list[Tensor],
        is_native: bool,
    ) -> tuple[list[Tensor], Callable[[], None]]:
        """The orthogonalized updates of each share, and what writes the states that are not yet.

        On a CPU products may lack memory: nothing is written before they are there.
        """
        dtype, device, shares = averages[0].dtype, averages[0].device, batch.shares
        shapes = [share.shape for share in shares]
        products = ns_dtype_of(group, device)
        narrow = products
        if not (is_native and keeps_range(products) and has_pass(dtype, products)):
            narrow = dtype
        updates = self._memory_of("update", shapes, narrow, device)
        if batch.is_padded:
            updates[0].zero_()
        is_last = device.type == "cpu" and not is_native
        momentum = float(group["momentum"])
        if is_native:
            lead = momentum if group["nesterov"] else 1.0
            average_into(averages, grads, batch.parts_in(updates), 1 - momentum, lead)
        else:
            if not is_last:
                self._advance(group, moving)
            for part, average, grad in zip(batch.parts_in(updates), averages, grads, strict=True):
                if is_last:
                    average = torch.lerp(average, grad, 1 - momentum, out=part)
                _write_update(group, grad, average, part)
        moves_along = _moves_along(group, dtype, products, is_native)
        stays = moves_along or products is dtype
        to = updates
        if not (moves_along or narrow is dtype):
            to = self._memory_of("update", shapes, dtype, device)
        directions = []
        for update, own in zip(updates, to, strict=True):
            x = self._orthogonal(group, update)
            directions.append(x if stays and len(shares) == 1 else own.copy_(x))
        moments = moments_of(group, shares, moving)
        for x, new in zip(directions, moments, strict=False):
            normalize_rows(x, new, beta2_of(group))

        def write() -> None:
            if is_last:
                self._advance(group, moving)
            keep_moments(shares, moving, moments)

        return directions, write

    def _directions_of_chosen(
        self,
        group: dict[str, Any],
        batch: Together,
        moving: list[Moving],
        averages: list[Tensor],
        grads: list[Tensor],
        is_native: bool,
    ) -> tuple[list[Tensor], Callable[[], None]]:
        """As ``_directions``: those of the rows or columns that are chosen, zeros of all others."""
        dtype, device, shares = averages[0].dtype, averages[0].device, batch.shares
        shapes = [share.shape for share in shares]
        sums = self._memory_of("gathered sums", shapes, dtype, device)
        for part, average, grad in zip(batch.parts_in(sums), averages, grads, strict=True):
            torch.add(average, grad, out=part)
        products = ns_dtype_of(group, device)
        kind = products if _moves_along(group, dtype, products, is_native) else dtype
        chosen = [Chosen.among(group, x) for x in sums]
        found = self._orthogonal_chosen(group, sums, chosen, kind)
        moments = moments_of(group, shares, moving)
        for x, each, new in zip(found, chosen, moments, strict=False):
            own = each.take(new)
            normalize_rows(x, own, beta2_of(group))
            each.put(new, own)
        directions = self._memory_of("direction", shapes, kind, device)
        for out, each, x in zip(directions, chosen, found, strict=True):
            each.put(out.zero_(), x)

        def write() -> None:
            torch._foreach_copy_(averages, list(batch.parts_in(sums)))
            keep_moments(shares, moving, moments)

        return directions, write

    def _orthogonal_chosen(
        self,
        group: dict[str, Any],
        sums: list[Tensor],
        chosen: list[Chosen],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """The orthogonalized rows or columns that are chosen, in a dtype; decays them in place."""
        shapes = [each.shape(x.shape) for each, x in zip(chosen, sums, strict=True)]
        wide, device = sums[0].dtype, sums[0].device
        taken = self._memory_of("chosen", shapes, wide, device)
        decayed = self._memory_of("decayed", shapes, wide, device)
        for x, each, own, new in zip(sums, chosen, taken, decayed, strict=True):
            each.take(x, own)
            each.put(x, torch.mul(own, float(group["momentum"]), out=new))
        return [x.to(dtype) for x in self._orthogonal_together(group, taken)]

    def _orthogonal_together(self, group: dict[str, Any], updates: list[Tensor]) -> list[Tensor]:
        """As ``_orthogonal``: by one chain of products where the native engine takes all."""
        first, asked = updates[0], group.get("ns_dtype")
        products, narrow = ns_dtype_of(group, first.device), updates_dtype(first.dtype, asked)
        fits = first.is_cpu or all(fits_engine(*x.shape[1:]) for x in updates)
        if not (fits and narrow and takes_batches_of(first.device, first.dtype, asked, products)):
            return [update.copy_(self._orthogonal(group, update)) for update in updates]
        shapes = [(len(x), *x.shape[1:]) for x in updates]
        chain = ChainedBatches(shapes, [[shape] for shape in shapes], first.device)
        steps = coefficients_of(group["ns_coefficients"], group["ns_steps"])
        chain.take(self._scratch, narrow, products, steps, starts_aol(group))
        chain.copy(updates)
        return chain.orthogonalize(float(group["eps"]), bool(group.get("adds_eps")))

    def _memory_of(
        self,
        use: str,
        shapes: list[tuple[int, int, int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> list[Tensor]:
        sizes = list(map(math.prod, shapes))
        flat = self._scratch.take(use, (sum(sizes),), dtype, device)
        return [x.view(shape) for shape, x in zip(shapes, flat.split(sizes), strict=True)]

    def _step_cut(
        self,
        group: dict[str, Any],
        cut: Cut,
        weights: list[Tensor],
        grads: list[Tensor],
        forms: list[Form],
    ) -> None:
        """Steps weights of one dtype, of whose matrices processes have parts."""
        device = weights[0].device
        there = transfer_device(cut, device)
        wide = torch.float32 if self._store.has_wide(group, weights[0]) else weights[0].dtype
        products = ns_dtype_of(group, there)
        narrow = products if products.itemsize < wide.itemsize else wide
        batches = batches_over(cut, forms, most_at_once(there))
        places = self._choose(group, cut, batches, weights, grads) if has_choice(group) else {}

        def computed(share: Share, whole: Tensor) -> Tensor:
            if not places:
                return self._orthogonal(group, whole)
            index = torch.stack([places[unit] for unit in share.units]).to(there)
            chosen = Chosen.of(index, takes_rows(group, *share.matrix))
            direction = self._scratch.take("direction", whole.shape, whole.dtype, there).zero_()
            (x,) = self._orthogonal_chosen(group, [whole], [chosen], whole.dtype)
            return chosen.put(direction, x)

        def step(number: int, batch: Batch) -> Pass:
            """Steps the weights of a batch."""
            exchange = Exchange(cut, batch, number, self._scratch.take, device, wide, narrow)
            some, own = ([each[i] for i in batch.weights] for each in (weights, grads))
            moving = self._begin(group, some, own)
            self._advance(group, moving)
            by_place = dict(zip(batch.weights, moving, strict=True))
            for unit, part in zip(batch.units, exchange.parts, strict=True):
                of = by_place[unit.weight]
                grad, average = (batch.part_of_shard(unit, x) for x in (of.grad, of.average))
                _write_update(group, grad, average, part)
                if places:
                    self._decay_chosen(group, batch, unit, places[unit], average)
            yield from exchange.gather()
            parts = yield from exchange.scatter(computed)
            values = [batch.part_of_shard(x, by_place[x.weight].value) for x in batch.units]
            alike = [(self._ratio(group, x.shape), [index]) for index, x in enumerate(batch.units)]
            take_second = self._second_step(group, moving)
            if values:
                self._move(group, values, parts, alike, self._rooms(group, values))
            take_second()
            self._finish(group, moving)

        run(itertools.starmap(step, enumerate(batches)))

    def _choose(
        self,
        group: dict[str, Any],
        cut: Cut,
        batches: Sequence[Batch],
        weights: list[Tensor],
        grads: list[Tensor],
    ) -> dict[Unit, Tensor]:
        """The places of the rows or columns that are chosen of each matrix, in all processes."""
        units = [unit for batch in batches for unit in batch.all_units]
        sides = [side_of(group, *unit.matrix) for unit in units]
        flat = torch.zeros(sum(sides), dtype=torch.float64, device=weights[0].device)
        norms = dict(zip(units, flat.split(sides), strict=True))
        for batch in batches:
            some, own = ([each[i] for i in batch.weights] for each in (weights, grads))
            moving = dict(zip(batch.weights, self._begin(group, some, own), strict=True))
            for unit in batch.units:
                of, of_rows = moving[unit.weight], takes_rows(group, *unit.matrix)
                average, grad = (batch.part_of_shard(unit, x) for x in (of.average, of.grad))
                x = torch.add(average, grad)
                found = norms_of(x.reshape(1, len(x), -1), of_rows)
                to = batch.part_of_numbers(unit, norms[unit], of_rows)
                to.copy_(found.view(to.shape))
        run([add_up([(cut, flat)])])
        return {unit: largest(group, each) for unit, each in norms.items()}

    @staticmethod
    def _decay_chosen(
        group: dict[str, Any], batch: Batch, unit: Unit, places: Tensor, average: Tensor
    ) -> None:
        """Decays the rows or columns that are chosen of a matrix in this process's part of it."""
        of_rows, side = takes_rows(group, *unit.matrix), side_of(group, *unit.matrix)
        factors = average.new_ones(side).index_fill_(0, places, float(group["momentum"]))
        own = batch.part_of_numbers(unit, factors, of_rows)
        average.mul_(own.view(-1, *[1] * (average.ndim - 1)) if of_rows else own)

    # The parts of a step

    def _begin(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        grads: list[Tensor],
        known: Sequence[Moving] = (),
    ) -> list[Moving]:
        """The operands of what this process has of weights of one dtype.

        ``known``: those of an earlier step, if they are the same but for the gradients.
        """
        if known:
            return [Moving(*each[:-1], grad) for each, grad in zip(known, grads, strict=True)]
        moving = []
        for p, grad in zip(weights, grads, strict=True):
            kept = self._store.with_count(group, p)
            state = self._store.decoded(group, p, kept)
            wide = self._widened(group, p, state)
            value, average = local(wide), local(state["momentum_buffer"])
            moving.append(Moving(p, kept, state, wide, value, average, grad.to(wide.dtype)))
        return moving

    @staticmethod
    def _advance(group: dict[str, Any], moving: list[Moving]) -> None:
        """Takes gradients into the averages."""
        averages, grads = [each.average for each in moving], [each.grad for each in moving]
        if has_choice(group):
            torch._foreach_add_(averages, grads)
        else:
            torch._foreach_lerp_(averages, grads, 1 - float(group["momentum"]))

    def _orthogonal(self, group: dict[str, Any], update: Tensor) -> Tensor:
        """Iterates on updates [count, rows, columns], in the products' dtype; overwrites them."""
        device, dtype = update.device, ns_dtype_of(group, update.device)

        def narrowed() -> Tensor:
            if dtype is update.dtype:
                return update
            return self._scratch.take("matrices", update.shape, dtype, device).copy_(update)

        steps = coefficients_of(group["ns_coefficients"], group["ns_steps"])
        kinds, is_aol = (update.dtype, None, dtype), starts_aol(group)
        if type(update) is Tensor and update.is_cpu and takes_batches_of(device, *kinds):
            x = narrowed()  # as in a step of batches together
            if x.numel():
                eps, adds_eps = float(group["eps"]), bool(group.get("adds_eps"))
                normalize_into([x], [x], take_sums([x], self._scratch), eps, adds_eps)
            return orthogonalize(x, steps, self._scratch, is_aol)

        # Norms and quotients of narrow numbers take half the bytes; a CPU would widen them.
        is_wide = update.is_cpu or update.dtype is torch.float64 or not keeps_range(dtype)
        x = update if is_wide else narrowed()
        of = None if is_wide else torch.float32
        norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=norm_dtype(x) or of)
        x.div_(to_divisors(group, norms))
        x = narrowed() if is_wide else x
        return orthogonalize(x, steps, self._scratch, is_aol)

    def _rooms(
        self, group: dict[str, Any], values: list[Tensor], is_native: bool = False
    ) -> tuple[Tensor, ...]:
        """Operands of a move: what decay leaves of a value, zero, and memory to find where.

        None for a native pass that decays all elements.
        """
        if is_native and not group.get("cautious_decay"):
            return ()
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
        directions: Sequence[Tensor],
        alike: list[tuple[float, list[int]]],
        rooms: tuple[Tensor, ...],
        is_native: bool = False,
    ) -> None:
        """Decays and moves values of weights, or parts of them, and allocates nothing.

        ``alike``: factors of the learning rate, and the places of the values that have them.
        ``is_native``: whether a native pass takes them.
        """
        lr = float(group["lr"])
        decay = lr * float(group["weight_decay"])
        if decay and group.get("cautious_decay"):
            _, zero, room, told = rooms
            for value, direction in zip(values, directions, strict=True):
                share, is_same = (x[: value.numel()].view(value.shape) for x in (room, told))
                torch.ge(torch.mul(value, direction, out=share), zero, out=is_same)
                value.addcmul_(share.copy_(is_same), value, value=-decay)
            decay = 0.0
        if is_native:
            decay_and_add(values, directions, 1 - decay, _factors(group, alike, len(values)))
            return
        if decay:
            torch._foreach_mul_(values, rooms[0])
        by_ratio: dict[float, list[int]] = {}
        for ratio, indices in alike:
            by_ratio.setdefault(ratio, []).extend(indices)
        for ratio, indices in by_ratio.items():
            pairs = ([each[i] for i in indices] for each in (values, directions))
            torch._foreach_add_(*pairs, alpha=-lr * ratio)

    def _finish(self, group: dict[str, Any], moving: list[Moving]) -> None:
        """Puts moved values, and averages, where weights and states keep them."""
        for each in moving:
            if seed_of(group, each.weight) is not None:
                count_steps([each.state["step"]])
            self._write_back(group, each.weight, each.wide, each.state)
            self._store.encode(group, each.weight, each.kept, each.state)
        if any(map(is_dtensor, (each.weight for each in moving))):  # by way of their shards
            increment_version([each.weight for each in moving])


def _ascending(group: dict[str, Any], grads: list[Tensor]) -> list[Tensor]:
    """The gradients of a step, negated where it maximizes."""
    return list(torch._foreach_neg(grads)) if group.get("maximize") else grads


def _moves_along(
    group: dict[str, Any], weights: torch.dtype, products: torch.dtype, is_native: bool
) -> bool:
    """Returns whether a native pass moves weights by directions in the dtype of the products."""
    return is_native and has_pass(weights, products) and not group.get("normuon")


def _write_update(group: dict[str, Any], grad: Tensor, average: Tensor, out: Tensor) -> None:
    if group["nesterov"] and not has_choice(group):
        torch.lerp(grad, average, float(group["momentum"]), out=out)
    else:
        out.copy_(average)


def _factors(
    group: dict[str, Any], alike: list[tuple[float, list[int]]], count: int
) -> list[float]:
    """The factor of each direction of a move; ``alike``: as ``_move`` has it."""
    factors = [0.0] * count
    for ratio, indices in alike:
        for index in indices:
            factors[index] = -float(group["lr"]) * ratio
    return factors
