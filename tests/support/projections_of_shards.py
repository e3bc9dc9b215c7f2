"""Works of two processes that step shards through projections: by GaLore and APOLLO.

What they are compared with: one process that has all of each weight.
"""

import copy
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from fusedstep import optim
from fusedstep._matrix import galore, sharded_projections
from fusedstep._sharding.dtensor import is_dtensor, local
from support.matrices_of_shards import Subjects, Trained
from support.stepping import assert_same_bits
from support.two_processes import PROCESSES, part_of

#: Shapes, and how they are cut. A shard of rows or columns may be one longer, or empty.
ROWS = {
    "rows": ([(24, 8), (8, 24), (12, 12)], Shard(0)),
    "columns": ([(24, 8), (8, 24), (12, 12)], Shard(1)),
    "a row more for the first process": ([(9, 4), (7, 40)], Shard(0)),
    "a column more for the first process": ([(4, 9), (40, 7)], Shard(1)),
    "one row, and none": ([(1, 12)], Shard(0)),
    "one column, and none": ([(12, 1)], Shard(1)),
    "filters": ([(7, 3, 2, 2)], Shard(0)),
    "copies": ([(24, 8), (8, 24)], Replicate()),
}

#: Steps with refreshes at the first, the third and the fifth.
STEPS, GAP = range(5), 2

PROJECTIONS = [
    (optim.GaLoreAdamW, {"proj_type": each}) for each in ("std", "reverse_std", "left", "full")
]
PROJECTIONS += [
    (optim.GaLoreAdamW, {"svd": each, "stagger": True}) for each in ("randomized", "power", "lazy")
]
PROJECTIONS += [
    (optim.APOLLOAdamW, {"proj": proj, "scale_type": scale, "proj_type": side})
    for proj, scale, side in itertools.product(
        ("random", "svd"), ("channel", "tensor"), ("std", "reverse_std")
    )
]
PROJECTIONS += [(optim.APOLLOAdamW, {"scale_front": True, "scale": 4.0})]

#: Projections that follow from the place of a weight.
PLACED = [(optim.GaLoreAdamW, {"svd": "lazy", "stagger": True}), (optim.APOLLOAdamW, {})]
PLACED += [(optim.GaLoreAdamW, {"svd": "randomized"}), (optim.GaLoreAdamW, {"stagger": True})]

BOUNDS = {"rtol": 1e-9, "atol": 1e-11}


class Projected(Subjects):
    def __init__(self, here, rows, cls, dtype=torch.float64, rank=3, mesh=None, **options):
        self.cls = cls
        rows = [
            (shapes, *placements, {"rank": min([rank, *map(smallest_side, shapes)])})
            for shapes, *placements in rows
        ]
        super().__init__(here, rows, dtype, mesh, **options)

    def built(self, groups, dtype, options):
        defaults = {"lr": 0.02, "weight_decay": 0.1, "update_proj_gap": GAP}
        return self.cls(groups, **defaults | options)

    def assert_alike(self, what, rtol=BOUNDS["rtol"], atol=BOUNDS["atol"]):
        for whole, shard in self.pairs():
            states = self.whole.state[whole]
            assert self.sharded.state[shard].keys() == states.keys()
            pairs = [(shard.detach(), whole.detach(), "weight")]
            pairs += [(self.sharded.state[shard][name], states[name], name) for name in states]
            for found, expected, name in pairs:
                assert is_dtensor(found) == bool(expected.dim()), name
                torch.testing.assert_close(
                    local(found),
                    part_of(expected, found),
                    rtol=rtol,
                    atol=atol,
                    msg=lambda text, name=name: f"{what}, {name}: {text}",
                )

    def tensors(self):
        states = self.sharded.state.values()
        values = [value for state in states for value in state.values()]
        weights = itertools.chain.from_iterable(self.of_shards)
        return [local(each).detach().clone() for each in (*weights, *values)]


def smallest_side(shape):
    return min(shape[0], torch.Size(shape[1:]).numel())


def projected_shards_are_stepped_as_the_whole(here):
    for number, (cls, options) in enumerate(PROJECTIONS):
        # Torch's operations between the collectives are the same for any projection.
        for fused in (None, False) if number % 4 == 0 else (None,):
            found = Projected(here, ROWS.values(), cls, fused=fused, **options).step(STEPS)
            assert bool(found.sharded._group_strategy.scratch) == (fused is None)
            found.assert_alike(f"{cls.__name__}, {options}, {fused}")


def each_kind_of_projected_cut_is_stepped_alone(here):
    """No weight hides the collectives of another. Each row has projections of each kind."""
    for number, (name, row) in enumerate(ROWS.items()):
        for cls, options in PROJECTIONS[number % 4 :: 4]:
            found = Projected(here, [row], cls, **options).step(range(3))
            found.assert_alike(f"{name}, {cls.__name__}, {options}")


def options_of_a_projected_step_are_those_of_the_whole(here):
    for cls in (optim.GaLoreAdamW, optim.APOLLOAdamW):
        for options in ({"maximize": True}, {"correct_bias": False}, {"max_grad_norm": 0.3}):
            found = Projected(here, ROWS.values(), cls, **options).step(STEPS)
            found.assert_alike(f"{cls.__name__}, {options}")
        for options in ({"max_norm": 0.3}, {"zero_grad": True}):
            found = Projected(here, ROWS.values(), cls).step(STEPS, **options)
            found.assert_alike(f"{cls.__name__}, {options}")


def projected_shards_of_few_bytes_are_near_the_whole(here):
    rows = [([(24, 40), (40, 24)], Shard(0)), ([(24, 40), (40, 24)], Shard(1))]
    split = {"master_weights": "split"}
    kept = ({"master_weights": True}, split, split | {"fused": False}, {"rounding": "kahan"}, {})
    for cls in (optim.GaLoreAdamW, optim.APOLLOAdamW):
        for dtype, bound, ways in (
            (torch.float32, 1e-5, ({},)),
            (torch.bfloat16, 2e-2, (*kept, {"rounding": "stochastic"})),
        ):
            for options in ways:
                found = Projected(here, rows, cls, dtype, lr=1e-3, **options).step(range(2))
                for whole, shard in found.pairs():
                    torch.testing.assert_close(
                        local(shard).detach(), part_of(whole, shard), rtol=bound, atol=bound
                    )


def projected_shards_without_elements_are_stepped_in_high_precision(here):
    rows = [([(1, 12), (12, 8)], Shard(0)), ([(12, 1), (12, 8)], Shard(1)), ([(1, 7)], Shard(0))]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        for cls in (optim.GaLoreAdamW, optim.APOLLOAdamW):
            for side in ("left", "right"):
                found = Projected(here, rows, cls, torch.float32, proj_type=side).step(STEPS)
                found.assert_alike(f"{cls.__name__}, {side}", 1e-2, 1e-2)
    finally:
        torch.set_float32_matmul_precision(before)


def a_mesh_with_copies_takes_projected_shards(here):
    for sizes in ((PROCESSES, 1), (1, PROCESSES)):
        mesh = here.mesh(*sizes)
        for cut in (Shard(0), Shard(1)):
            rows = [([(24, 8), (9, 15)], Replicate(), cut)]
            for cls in (optim.GaLoreAdamW, optim.APOLLOAdamW):
                found = Projected(here, rows, cls, mesh=mesh).step(STEPS)
                found.assert_alike(f"{sizes}, {cut}")


def each_basis_is_made_once(here):
    found = Projected(here, [([(24, 8)] * 6 + [(8, 24)] * 3, Shard(0))], optim.GaLoreAdamW)
    found.take_gradients(0)
    made = []

    def counted(*args):
        made.append(args[0].shape)
        return bases_of(*args)

    bases_of = galore.bases_of
    with mock.patch.object(galore, "bases_of", counted):
        found.sharded.step()
    counts = [None, None]
    dist.all_gather_object(counts, len(made))
    assert sum(counts) == 9
    assert abs(counts[0] - counts[1]) <= 1


def memory_of_moments_is_shared_out(here):
    """The moments of a low-rank gradient with parts of the longer side are parts too."""
    found = Projected(here, [([(24, 8)], Shard(0)), ([(8, 24)], Shard(0))], optim.GaLoreAdamW)
    found.step((0,))
    shapes = [local(found.sharded.state[shards[0]]["exp_avg"]).shape for shards in found.of_shards]
    assert shapes == [(24 // PROCESSES, 3), (3, 24)]


def a_gradient_that_is_not_finite_is_named_by_all(here):
    for cls, fused, steps in itertools.product(
        (optim.GaLoreAdamW, optim.APOLLOAdamW), (None, False), (0, 1)
    ):
        for placement in (Shard(0), Shard(1)):
            rows = [([(12, 8), (8, 12)], placement)]
            found = Projected(here, rows, cls, fused=fused).step(range(steps))
            found.take_gradients(steps)
            if here.rank == 1:
                local(found.of_shards[0][1].grad)[2, 3] = float("nan")
            before = found.tensors()
            with pytest.raises(RuntimeError, match="parameter 1 of group 0 has elements that are"):
                found.sharded.step()
            after = found.tensors()
            for now, then in zip(after, before, strict=False):
                assert_same_bits(now, then, "tensor")
            if not steps:  # states are new, and begin at zero but for the place of a weight
                states = found.sharded.state.values()
                new = [x for state in states for name, x in state.items() if name != "place"]
                assert new
                assert not any(local(x).any() for x in new)
            found.step(range(steps, 4)).assert_alike(f"{cls}, {fused}, {steps}")


def a_gradient_of_no_shard_that_is_not_finite_stops_all(here):
    """In the process that has it by name; nobody is left waiting in a collective."""
    for cls, fused, steps in itertools.product(
        (optim.GaLoreAdamW, optim.APOLLOAdamW), (None, False), (0, 1)
    ):
        rows = [([(12, 8), (8, 12)], Shard(0)), ([(12, 8), (8, 12)], Replicate())]
        found = Projected(here, rows, cls, fused=fused).step(range(steps))
        found.take_gradients(steps)
        if here.rank == 1:
            local(found.of_shards[1][0].grad)[2, 3] = float("nan")
        before = found.tensors()
        by_name = "parameter 0 of group 1 has elements that are"
        with pytest.raises(RuntimeError, match=by_name if here.rank == 1 else "another process"):
            found.sharded.step()
        for now, then in zip(found.tensors(), before, strict=False):
            assert_same_bits(now, then, "tensor")
        found.step(range(steps, 4)).assert_alike(f"{cls}, {fused}, {steps}")


def a_projected_gradient_of_one_process_is_named_by_all(here):
    for fused in (None, False):
        found = Projected(here, [ROWS["rows"]], optim.GaLoreAdamW, fused=fused)
        found.take_gradients(0)
        if here.rank == 1:
            found.of_shards[0][2].grad = None
        with pytest.raises(RuntimeError, match="parameter 2 of group 0 has a gradient in some"):
            found.sharded.step()
        for whole, shard in found.pairs():
            assert_same_bits(local(shard).detach(), part_of(whole, shard), "weight")
        found.step((0,)).assert_alike(fused)


def a_basis_that_fails_in_one_process_stops_all(here):
    found = Projected(here, [([(24, 8)] * 2, Shard(0))], optim.GaLoreAdamW)
    found.take_gradients(0)

    def failing(*args):
        if here.rank == 1:
            raise RuntimeError("no decomposition")
        return bases_of(*args)

    bases_of = galore.bases_of
    with mock.patch.object(galore, "bases_of", failing):
        expected = "no decomposition" if here.rank == 1 else "another process could not make"
        with pytest.raises(RuntimeError, match=expected):
            found.sharded.step()
    for whole, shard in found.pairs():
        assert_same_bits(local(shard).detach(), part_of(whole, shard), "weight")
    found.step(range(3)).assert_alike("after it")


def all_wait_for_a_gradient_that_is_not_zero(here):
    """Not the process alone whose part is not, and again after a load."""

    def zeros(gradient):
        return gradient * 0

    def zeros_but_in_a_corner(gradient):
        found = gradient * 0
        found[-1, -1] = gradient[-1, -1]
        return found

    changes = (zeros, zeros, zeros_but_in_a_corner, torch.clone, zeros, zeros, torch.clone)
    ways = [{"svd": each} for each in ("exact", "randomized", "power", "lazy")]
    ways = [(optim.GaLoreAdamW, each) for each in (*ways, {"proj_type": "full"})]
    for number, (cls, options) in enumerate((*ways, (optim.APOLLOAdamW, {"proj": "svd"}))):
        for fused in (None, False) if number % 2 == 0 else (None,):
            rows = (ROWS["rows"], ROWS["columns"], ROWS["copies"], ROWS["filters"])
            found = Projected(here, rows, cls, fused=fused, **options)
            for step, change in enumerate(changes):
                found.take_gradients(step, change)
                if step in (2, 5):
                    saved = copy.deepcopy(found.sharded.state_dict())
                    found.sharded.load_state_dict(saved)
                found.whole.step()
                found.sharded.step()
                found.assert_alike(f"{cls.__name__}, {options}, {fused}, {step}")


def bases_of_shards_follow_their_weight(here):
    """Shards in other groups, and in another order there, over a load too."""
    for number, (cls, options) in enumerate(PLACED):
        found = Projected(here, ROWS.values(), cls, fused=(None, False)[number % 2], **options)
        found.step(range(3))
        groups = found.sharded.param_groups
        groups.reverse()
        for group in groups:
            group["params"].reverse()
        found.step((3, 4)).assert_alike(f"{cls.__name__}, {options}")
        found.sharded.load_state_dict(copy.deepcopy(found.sharded.state_dict()))
        found.step((5, 6, 7)).assert_alike(f"{cls.__name__}, {options}, loaded")


def norms_take_one_collective_before_the_step_of_moments_and_one_behind(here):
    shapes = [(24, 8), (8, 24)]  # of low-rank gradients there are parts, and terms
    found = Projected(here, [(shapes, Shard(0))] * 2, optim.APOLLOAdamW)
    found.sharded.param_groups[1]["scale_type"] = "tensor"
    found.whole.param_groups[1]["scale_type"] = "tensor"
    found.step((0,)).assert_alike("two ways to scale")
    found.take_gradients(1)
    with CommDebugMode() as counted:
        found.sharded.step()
    # Beside those: which gradients there are, sums of low-rank gradients, and NaN among these.
    assert counted.get_total_counts() == 5


def gradients_of_zeros_are_not_gathered(here):
    found = Projected(here, [ROWS["rows"]], optim.GaLoreAdamW)
    found.take_gradients(0, torch.zeros_like)
    with mock.patch.object(sharded_projections, "_gather", None):
        found.sharded.step()
        found.sharded.step()


def what_cannot_be_projected_is_refused_by_name(here):
    mesh = here.mesh()
    partial = torch.nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    plane = torch.nn.Parameter(here.spread(torch.ones(4, 4), Shard(0)))
    filters = torch.nn.Parameter(here.spread(torch.ones(4, 4, 2), Shard(1)))
    for build, weight, text in (
        (optim.GaLoreAdamW, partial, r"is a DTensor with the placements \(Partial\(sum\)"),
        (optim.APOLLOAdamW, filters, r"has 3 dimensions, and is a DTensor that is cut along"),
        (optim.GaLoreAdafactor, plane, "is a DTensor: GaLoreAdafactor does not project shards"),
        (optim.GaLoreAdamW8bit, plane, "is a DTensor: low-rank moments of shards are not kept"),
    ):
        with pytest.raises(ValueError, match=f"'w' {text}"):
            build([{"params": [("w", weight)], "rank": 2}])


# Checkpoints


class TrainedByProjection(Trained):
    def built(self, weights):
        groups = [{"params": weights[:3], "rank": 3}, {"params": weights[3:]}]
        return self.cls(groups, lr=0.02, update_proj_gap=GAP, **self.options)


def projected_states_are_saved_and_resharded(here):
    for cls, options in (
        (optim.GaLoreAdamW, {"svd": "lazy", "stagger": True}),
        (optim.GaLoreAdamW, {"proj_type": "full"}),
        (optim.APOLLOAdamW, {}),
        (optim.APOLLOAdamW, {"proj": "svd"}),
    ):
        named = {"cls": cls, "options": options}
        kind = type("Named", (TrainedByProjection,), named)
        kind.assert_resumed(here, steps=3)


def states_of_projected_shards_are_loaded(here):
    for cls in (optim.GaLoreAdamW, optim.APOLLOAdamW):
        found = Projected(here, ROWS.values(), cls).step(range(3))
        saved = copy.deepcopy(found.sharded.state_dict())
        found.sharded.load_state_dict(saved)
        found.step(range(3, 6)).assert_alike("loaded")


WORKS = (
    projected_shards_are_stepped_as_the_whole,
    each_kind_of_projected_cut_is_stepped_alone,
    options_of_a_projected_step_are_those_of_the_whole,
    projected_shards_of_few_bytes_are_near_the_whole,
    projected_shards_without_elements_are_stepped_in_high_precision,
    a_mesh_with_copies_takes_projected_shards,
    each_basis_is_made_once,
    memory_of_moments_is_shared_out,
    a_gradient_that_is_not_finite_is_named_by_all,
    a_gradient_of_no_shard_that_is_not_finite_stops_all,
    a_basis_that_fails_in_one_process_stops_all,
    all_wait_for_a_gradient_that_is_not_zero,
    bases_of_shards_follow_their_weight,
    gradients_of_zeros_are_not_gathered,
    norms_take_one_collective_before_the_step_of_moments_and_one_behind,
    what_cannot_be_projected_is_refused_by_name,
    projected_states_are_saved_and_resharded,
    states_of_projected_shards_are_loaded,
)

#: On GPUs an assertion of the device says so, after which a process can use it no more.
ON_THE_CPU = (a_projected_gradient_of_one_process_is_named_by_all,)
