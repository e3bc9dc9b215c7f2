"""Works of two processes that step matrices of which each has a part: by Muon.

What they are compared with: one process that has all of them.
"""

import contextlib
import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fusedstep import optim
from fusedstep._matrix import arrangement, newton_schulz, rows
from fusedstep._sharding import exchange as _sharded_matrices
from fusedstep._sharding.dtensor import is_dtensor, local
from support.stepping import assert_same_bits
from support.two_processes import PROCESSES, folder_of_both, like, part_of, shards_of

#: Shapes, how they are cut, and options of their group.
ROWS = {
    "rows": ([(24, 8), (8, 24), (24, 8), (8, 8)], Shard(0), {}),
    "columns": ([(24, 8), (8, 24), (24, 8)], Shard(1), {}),
    "a row more for the first process": ([(9, 4), (7, 40)], Shard(0), {}),
    "one row, and none": ([(1, 12), (12, 1)], Shard(0), {}),
    "one column, and none": ([(12, 1)], Shard(1), {}),
    "nothing": ([(0, 4), (6, 4)], Shard(0), {}),
    "a stack": ([(3, 8, 12), (1, 8, 12)], Shard(0), {}),
    "rows of a stack": ([(3, 9, 12)], Shard(1), {}),
    "columns of a stack": ([(3, 8, 11)], Shard(2), {}),
    "a flattened stack": ([(3, 8, 12)], Shard(0), {"stacked": False}),
    "filters": ([(6, 3, 2, 2)], Shard(0), {}),
    "channels": ([(6, 3, 2, 2)], Shard(1), {}),
    "places of filters": ([(6, 3, 5, 2)], Shard(2), {}),
    "stacks": ([(2, 3, 8, 5)], Shard(1), {"stacked": True}),
    "heads": ([(24, 8), (15, 8)], Shard(0), {"split_heads": 3}),
    "columns of heads": ([(24, 8)], Shard(1), {"split_heads": 3}),
    "heads of a stack": ([(3, 12, 8)], Shard(1), {"split_heads": 2}),
    "parts": ([(24, 8), (24, 30)], Shard(0), {"split_sizes": (14, 6, 4)}),
    "columns of parts": ([(24, 8), (24, 5)], Shard(1), {"split_sizes": (14, 6, 4)}),
    "parts of a stack": ([(3, 12, 8), (1, 12, 8)], Shard(1), {"split_sizes": (8, 2, 2)}),
    "stacks of parts": ([(3, 12, 8), (1, 12, 8)], Shard(0), {"split_sizes": (8, 2, 2)}),
    "heads of parts": ([(24, 8)], Shard(0), {"split_sizes": (12, 12), "split_heads": 3}),
    "parts of filters": ([(6, 3, 2, 2)], Shard(0), {"split_sizes": [4, 1, 1]}),
    "almost orthogonal": ([(8, 24), (24, 9), (3, 8, 12)], Shard(0), {"ns_start": "aol"}),
    "chosen rows": ([(8, 24), (12, 12), (9, 40)], Shard(0), {"rank_fraction": 0.25}),
    "chosen rows in columns": ([(8, 24), (12, 13)], Shard(1), {"rank_fraction": 0.25}),
    "chosen columns": ([(24, 8), (13, 12)], Shard(0), {"rank_fraction": 0.5}),
    "chosen columns in columns": ([(24, 9), (12, 1)], Shard(1), {"rank_fraction": 0.5}),
    "chosen rows of a stack": ([(3, 8, 12)], Shard(1), {"rank_fraction": 0.25}),
    "stacks of chosen rows": ([(3, 8, 12), (1, 8, 12)], Shard(0), {"rank_fraction": 0.25}),
    "chosen filters": ([(6, 3, 2, 2), (6, 3, 2, 2)], Shard(0), {"rank_fraction": 0.5}),
    "chosen channels": ([(20, 3, 2, 2), (6, 3, 2, 2)], Shard(1), {"rank_fraction": 0.5}),
    "chosen rows of parts": (
        [(24, 8), (24, 30)],
        Shard(0),
        {"split_sizes": (14, 6, 4), "rank_fraction": 0.5},
    ),
    "copies": ([(24, 8), (3, 8, 12)], Replicate(), {}),
}

OPTIONS = (
    {},
    {"nesterov": False, "momentum": 0.8, "adjust_lr_fn": "match_rms_adamw"},
    {"maximize": True, "cautious_decay": True, "weight_decay": 5.0},
    {"fused": False},
    {"fused": False, "cautious_decay": True, "weight_decay": 5.0},
)


def weights_of(shapes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


class Subjects:
    """Whole weights and their shards, with an optimizer of each."""

    def __init__(self, here, rows, dtype=torch.float64, mesh=None, make=optim.Muon, **options):
        self.here, groups, self.of_shards, self.of_wholes = here, [], [], []
        self.make = make
        mesh = mesh or here.mesh()
        for seed, (shapes, *placements, own) in enumerate(rows):
            wholes = [weight.to(here.device) for weight in weights_of(shapes, dtype, seed)]
            self.of_wholes.append([torch.nn.Parameter(weight.clone()) for weight in wholes])
            shards = [shards_of(weight, mesh, placements) for weight in wholes]
            self.of_shards.append([torch.nn.Parameter(shard) for shard in shards])
            groups.append(own)
        self.whole, self.sharded = (
            self.built(
                [own | {"params": each} for own, each in zip(groups, params, strict=True)],
                dtype,
                options,
            )
            for params in (self.of_wholes, self.of_shards)
        )

    def built(self, groups, dtype, options):
        return self.make(groups, **{"lr": 0.02, "ns_dtype": dtype} | options)

    def pairs(self):
        for wholes, shards in zip(self.of_wholes, self.of_shards, strict=True):
            yield from zip(wholes, shards, strict=True)

    def take_gradients(self, step, change=lambda gradient: gradient):
        generator = torch.Generator().manual_seed(100 + step)
        for whole, shard in self.pairs():
            gradient = change(torch.randn(whole.shape, generator=generator, dtype=torch.float64))
            whole.grad = gradient.to(whole.device, whole.dtype)
            shard.grad = like(whole.grad, shard)

    def step(self, steps=(0, 1), **options):
        for step in steps:
            self.take_gradients(step)
            self.whole.step(**options)
            self.sharded.step(**options)
        return self

    def assert_alike(self, what, rtol, atol, averages=None):
        """``averages``: how the states are compared, if not by their bits."""
        for whole, shard in self.pairs():
            found, part = local(shard).detach(), part_of(whole, shard)
            torch.testing.assert_close(
                found, part, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}"
            )
            for name, expected in self.whole.state[whole].items():
                state = self.sharded.state[shard][name]
                assert is_dtensor(state)
                assert (state.placements, state.shape) == (shard.placements, shard.shape)
                found, part = local(state), part_of(expected, state)
                if averages is None:
                    assert_same_bits(found, part, f"{what}, {name}")
                else:
                    torch.testing.assert_close(found, part, **averages)


@contextlib.contextmanager
def batches_of_elements(count):
    """Has no batch more elements for a process than this, or than a weight has."""
    with (
        mock.patch.dict(arrangement._AT_ONCE, {"cpu": count}),
        mock.patch.object(arrangement, "_AT_ONCE_ELSEWHERE", count),
    ):
        yield


def matrices_are_stepped_as_the_whole(here):
    for options in OPTIONS:
        for count in (1, 150, 1 << 20):
            with batches_of_elements(count):
                found = Subjects(here, ROWS.values(), **options).step()
            found.assert_alike(f"{options}, {count}", rtol=1e-11, atol=1e-12)
            if options.get("fused") is False:
                break


def each_kind_of_cut_is_stepped_alone(here):
    """No weight hides the collectives of another."""
    for name, row in ROWS.items():
        Subjects(here, [row]).step((0,)).assert_alike(name, rtol=1e-11, atol=1e-12)


def the_same_products_give_the_same_bits(here):
    """Each process has a matrix of its own shape, as a batch of the unsharded step has."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for products in (torch.float32, torch.bfloat16):
            rows = [([(64, 48), (40, 56)], Shard(0), {}), ([(64, 48)], Shard(1), {})]
            found = Subjects(here, rows, dtype, ns_dtype=products).step()
            for whole, shard in found.pairs():
                bits = local(shard).detach(), part_of(whole, shard)
                assert_same_bits(*bits, f"{dtype}, {products}")


def products_of_few_bits_are_within_their_errors(here):
    rows = [
        ROWS[name]
        for name in ("rows", "columns", "heads", "parts", "a row more for the first process")
    ]
    for products, bound in ((torch.float32, 1e-5), (torch.bfloat16, 3e-3)):
        found = Subjects(here, rows, torch.float32, ns_dtype=products, weight_decay=0.0)
        found.step((0,)).assert_alike(f"{products}", rtol=0, atol=bound)


def a_mesh_with_copies_takes_shards(here):
    for sizes in ((PROCESSES, 1), (1, PROCESSES)):
        mesh = here.mesh(*sizes)
        for cut in (Shard(0), Shard(1)):
            rows = [([(24, 8), (9, 5)], Replicate(), cut, {})]
            found = Subjects(here, rows, mesh=mesh).step()
            found.assert_alike(f"{sizes}, {cut}", rtol=1e-11, atol=1e-12)


def each_matrix_is_computed_once(here):
    shapes = [(24, 8)] * 5 + [(8, 24)] * 2 + [(16, 16)] * 3
    found = Subjects(here, [(shapes, Shard(0), {}), ([(24, 8)], Shard(0), {"split_heads": 3})])
    found.take_gradients(0)
    computed = []

    def counted(x, *args):
        computed.extend([x.shape[1:]] * len(x))
        return newton_schulz.orthogonalize(x, *args)

    with mock.patch.object(rows, "orthogonalize", counted), batches_of_elements(300):
        found.sharded.step()
    counts = [None, None]
    dist.all_gather_object(counts, len(computed))
    assert sum(counts) == len(shapes) + 3
    assert abs(counts[0] - counts[1]) <= 1


def transfers_are_beside_products_of_another_batch(here):
    """The next gather has begun, and the scatter before is not waited for, as products begin.

    A batch takes its memory when the gather of the batch before has begun.
    """
    exchange, order = _sharded_matrices.Exchange, []
    transfer, wholes, take = exchange._transfer, exchange.wholes, exchange.__init__

    def takes(self, cut, batch, number, *memory):
        order.append(("memory", number))
        take(self, cut, batch, number, *memory)

    class Transfer:
        def __init__(self, what, number, work):
            self._what, self._number, self._work = what, number, work

        def wait(self):
            order.append((f"{self._what} waited for", self._number))
            return self._work.wait()

    def transfers(self, *buffers):
        what = "scatter" if ("gather", self._number) in order else "gather"
        order.append((what, self._number))
        return Transfer(what, self._number, transfer(self, *buffers))

    def computes(self):
        order.append(("products", self._number))
        yield from wholes(self)

    found = Subjects(here, [([(24, 8)] * 8, Shard(0), {})])
    found.take_gradients(0)
    with (
        mock.patch.multiple(exchange, __init__=takes, _transfer=transfers, wholes=computes),
        batches_of_elements(200),
    ):
        found.sharded.step()
    last = max(number for _, number in order)
    assert last >= 2
    for number in range(last):
        gathered = order.index(("gather waited for", number))
        assert order.index(("gather", number + 1)) < gathered
        assert gathered < order.index(("products", number))
        products = order.index(("products", number + 1))
        assert products < order.index(("scatter waited for", number))
        assert order.index(("memory", number + 1)) > order.index(("gather", number))


def memory_of_transfers_is_kept(here):
    found = Subjects(here, [ROWS["rows"], ROWS["columns"]], torch.float32)
    with batches_of_elements(200):
        found.step()
        scratch = [each.data_ptr() for each in found.sharded._group_strategy.scratch.tensors()]
        found.step((2,))
    assert [each.data_ptr() for each in found.sharded._group_strategy.scratch.tensors()] == scratch


def musgd_is_stepped_as_the_whole(here):
    """The part of SGD is each process's own, and all of it has moved by Muon's before."""
    rows = [
        (shapes, *placements, own | {"use_muon": True})
        for shapes, *placements, own in ROWS.values()
        if not own
    ]
    rows += [([(9, 4), (5,)], Shard(0), {})]
    for place in (0, 1):
        own = {"use_muon": True, "split_sizes": (14, 6, 4)}
        rows += [([(24, 8), (24, 2, 3, 5)], Shard(place), own)]
    usual = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.3, "muon": 0.2, "sgd": 1.0}
    bounds = {"rtol": 1e-11, "atol": 1e-12}
    bounds |= {"averages": dict(bounds)}  # those of SGD have the decay of what products moved
    for options in ({}, {"maximize": True}, {"momentum": 0.0}, {"fused": False}):
        for count in (150, 1 << 20):
            with batches_of_elements(count):
                found = Subjects(here, rows, make=optim.MuSGD, **(usual | options)).step()
            found.assert_alike(f"{options}, {count}", **bounds)
            if not options:
                found.step((2,), max_norm=0.5).assert_alike("clipped", **bounds)


def values_of_musgd_of_few_bytes_are_kept(here):
    rows = [([(64, 80), (80, 64)], Shard(0), {"use_muon": True})]
    usual = {"make": optim.MuSGD, "ns_dtype": torch.float32, "momentum": 0.9}
    for dtype, options in (
        (torch.bfloat16, {"master_weights": True}),
        (torch.bfloat16, {"rounding": "stochastic"}),
        (torch.float32, {"state_dtype": "int8"}),
    ):
        found = Subjects(here, rows, dtype, **usual, **options).step()
        for whole, shard in found.pairs():
            state, expected = found.sharded.state[shard], found.whole.state[whole]
            assert state.keys() == expected.keys()
            assert "momentum_buffer_SGD" in state
            torch.testing.assert_close(
                local(shard).detach(), part_of(whole, shard), rtol=2e-2, atol=1e-3
            )


def placements_that_musgd_cannot_gather_are_refused_by_name(here):
    mesh = here.mesh()
    weight = torch.nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    with pytest.raises(ValueError, match=r"'w' is a DTensor .*use_muon=False has SGD step it"):
        optim.MuSGD([("w", weight)], use_muon=True)


def values_and_states_of_few_bytes_are_kept(here):
    rows = [([(64, 80), (80, 64)], Shard(0), {})]
    bounds = {"rtol": 1e-5, "atol": 1e-5}
    for dtype, options in (
        (torch.bfloat16, {"master_weights": True}),
        (torch.bfloat16, {"master_weights": "split"}),
        (torch.bfloat16, {"master_weights": "split", "fused": False}),
        (torch.bfloat16, {"rounding": "kahan"}),
        (torch.bfloat16, {"state_dtype": torch.float32}),
        (torch.float32, {"fused": False}),
    ):
        found = Subjects(here, rows, dtype, ns_dtype=torch.float32, **options).step()
        for whole, shard in found.pairs():
            average = found.sharded.state[shard]["momentum_buffer"]
            expected = part_of(found.whole.state[whole]["momentum_buffer"], average)
            assert_same_bits(local(average), expected, f"{options}")
            value, expected = (
                p.detach().float() + state[name].float()
                if (name := "compensation") in state
                else state.get("master_param", p.detach()).float()
                for p, state in (
                    (shard, found.sharded.state[shard]),
                    (whole, found.whole.state[whole]),
                )
            )
            rtol = 1e-2 if options.get("state_dtype") or "split" in options.values() else 1e-4
            expected = part_of(expected, value)
            torch.testing.assert_close(local(value), expected, rtol=rtol, atol=1e-4)
    found = Subjects(here, rows, torch.float32, ns_dtype=torch.float32, state_dtype="int8").step()
    for whole, shard in found.pairs():
        codes = found.sharded.state[shard]["momentum_buffer"]
        expected = part_of(found.whole.state[whole]["momentum_buffer"], codes)
        assert_same_bits(local(codes), expected, "codes")
        torch.testing.assert_close(local(shard).detach(), part_of(whole, shard), **bounds)
    random = Subjects(here, rows, torch.bfloat16, ns_dtype=torch.float32, rounding="stochastic")
    for whole, shard in random.step().pairs():
        torch.testing.assert_close(
            local(shard).detach(), part_of(whole, shard), rtol=2e-2, atol=1e-3
        )


def groups_of_adamw_step_beside_matrices(here):
    rows = [
        ROWS["rows"],
        ([(9, 4), (5,), (40, 50)], Shard(0), {"use_muon": False}),
        ROWS["columns"],
        ([(7,)], Replicate(), {"use_muon": False}),
    ]
    for options in ({}, {"max_norm": 0.5}, {"zero_grad": True}):
        found = Subjects(here, rows).step(**options)
        assert found.sharded._plans
        for place, (whole, shard) in enumerate(found.pairs()):
            pair = local(shard).detach(), part_of(whole, shard)
            torch.testing.assert_close(*pair, rtol=1e-11, atol=1e-12)
            if whole.ndim == 1 and not options:
                assert_same_bits(*pair, f"weight {place}")


def what_is_not_a_number_stays_in_its_matrix(here):
    found = Subjects(here, [([(12, 8)] * 3, Shard(0), {})])
    found.take_gradients(0)
    bad = found.of_shards[0][1]
    if here.rank == 1:
        local(bad.grad)[2, 3] = float("nan")
    found.sharded.step()
    for shard in found.of_shards[0]:
        assert local(shard).detach().isnan().all() == (shard is bad)


def gradients_of_other_placements_are_refused_by_name(here):
    found = Subjects(here, [ROWS["rows"]])
    found.take_gradients(0)
    for whole, shard in found.pairs():
        shard.grad = here.spread(whole.grad, Replicate())
    with pytest.raises(RuntimeError, match="same mesh and placements"):
        found.sharded.step()
    for whole, shard in found.pairs():
        assert_same_bits(local(shard).detach(), part_of(whole, shard), "weight")


def placements_without_matrices_are_refused_by_name(here):
    mesh = here.mesh()
    weight = torch.nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    fine = torch.nn.Parameter(here.spread(torch.ones(4, 4), Shard(0)))
    with pytest.raises(ValueError, match=r"'w' is a DTensor with the placements \(Partial\(sum\)"):
        optim.Muon([("fine", fine), ("w", weight)])
    optimizer = optim.Muon([("fine", fine)])
    with pytest.raises(ValueError, match=r"'w' is a DTensor with the placements"):
        optimizer.add_param_group({"params": [("w", weight)]})
    assert len(optimizer.param_groups) == 1


# Checkpoints


class Trained:
    """Weights of one process, or shards of two, and an optimizer in the middle of a run."""

    def __init__(self, here, sharded):
        from torch.distributed.fsdp import fully_shard

        self.sharded = sharded
        shapes = [(24, 8), (7, 40), (3, 9, 4), (5,)]
        self.model = torch.nn.Module()
        self.model.weights = torch.nn.ParameterList(weights_of(shapes))
        self.model.to(here.device)
        if sharded:
            fully_shard(self.model, mesh=here.mesh())
        self.weights = list(self.model.weights)
        self.optimizer = self.built(self.weights)

    def built(self, weights):
        groups = [{"params": weights[:3]}, {"params": weights[3:], "use_muon": False}]
        return optim.Muon(groups, lr=0.02, ns_dtype=torch.float64)

    def step(self, *steps):
        for step in steps:
            generator = torch.Generator().manual_seed(100 + step)
            for weight in self.weights:
                grad = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                grad = grad.to(weight.device)
                weight.grad = like(grad, weight)
            self.optimizer.step()
        return self

    def whole(self):
        weights = [weight.detach() for weight in self.weights]
        return [weight.full_tensor() if self.sharded else weight for weight in weights]

    def dictionary(self):
        return {
            "weights": self.model.state_dict(),
            "states": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def save(self, folder):
        if self.sharded or dist.get_rank() == 0:
            dcp.save(self.dictionary(), checkpoint_id=folder, no_dist=not self.sharded)
        dist.barrier()

    def load(self, folder):
        kept = self.dictionary()
        dcp.load(kept, checkpoint_id=folder, no_dist=not self.sharded)
        self.model.load_state_dict(kept["weights"])
        set_optimizer_state_dict(self.model, self.optimizer, kept["states"])
        return self

    @classmethod
    def assert_resumed(cls, here, steps):
        """Saved after so many steps, a run goes on as if nothing had been."""
        straight = cls(here, False).step(*range(steps + 2))
        for first, second in ((True, False), (False, True), (True, True)):
            resumed = cls(here, second).step(7)
            with folder_of_both() as folder:
                cls(here, first).step(*range(steps)).save(folder)
                resumed.load(folder)
            resumed.step(steps, steps + 1)
            for found, expected in zip(resumed.whole(), straight.whole(), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def states_are_saved_and_resharded(here):
    Trained.assert_resumed(here, steps=2)


def averages_of_shards_are_loaded(here):
    found = Subjects(here, [ROWS["rows"], ROWS["columns"], ROWS["a stack"]]).step()
    saved = copy.deepcopy(found.sharded.state_dict())
    found.sharded.load_state_dict(saved)
    found.step((2,)).assert_alike("loaded", rtol=1e-11, atol=1e-12)


WORKS = (
    matrices_are_stepped_as_the_whole,
    each_kind_of_cut_is_stepped_alone,
    the_same_products_give_the_same_bits,
    products_of_few_bits_are_within_their_errors,
    a_mesh_with_copies_takes_shards,
    each_matrix_is_computed_once,
    transfers_are_beside_products_of_another_batch,
    memory_of_transfers_is_kept,
    musgd_is_stepped_as_the_whole,
    values_of_musgd_of_few_bytes_are_kept,
    placements_that_musgd_cannot_gather_are_refused_by_name,
    values_and_states_of_few_bytes_are_kept,
    groups_of_adamw_step_beside_matrices,
    what_is_not_a_number_stays_in_its_matrix,
    gradients_of_other_placements_are_refused_by_name,
    placements_without_matrices_are_refused_by_name,
    states_are_saved_and_resharded,
    averages_of_shards_are_loaded,
)
