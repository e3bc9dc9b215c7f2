"""Works of two processes with states of few bytes: codes, masters, and what 16-bit weights keep."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fusedstep import optim
from fusedstep._sharding.dtensor import is_dtensor, local
from fusedstep._state.codes import CODES
from support.stepping import assert_same_bits
from support.two_processes import PROCESSES, folder_of_both, like, part_of, shards_of

KINDS = ("int8", "int4", "fp8")

BETWEEN = {
    "rows of whole blocks": (90, 256),
    "a row more for the first process": (31, 256),
    "shards of whole blocks": (64, 80),
    "a vector": (8192,),
    "three dimensions": (6, 8, 128),
    "one row, and none": (1, 4096),
    "shards below the size that decides": (128, 40),
    "whole below the size that decides": (60, 60),
}
"""Shapes of weights whose shards have borders between two blocks."""

INSIDE = (190, 80)
"""One with a border inside of a block."""


def assert_same_state(found, whole, what):
    assert found.keys() == whole.keys(), what
    for name, value in whole.items():
        assert_same_bits(local(found[name]), part_of(value, found[name]), f"{what}, {name}")


class Weights(torch.nn.Module):
    """A model of nothing but weights."""

    def __init__(self, shapes, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        self.weights = torch.nn.ParameterList(weights)


def take_gradients(weights, step):
    generator = torch.Generator().manual_seed(100 + step)
    for weight in weights:
        gradient = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        weight.grad = like(gradient.to(weight.device), weight)


def codes_follow_from_whole_weights(here):
    from torch.distributed.tensor import Replicate, Shard

    mesh = here.mesh()
    rows = {name: (shape, Shard(0)) for name, shape in BETWEEN.items()}
    cuts = rows | {"columns": ((16, 1024), Shard(1)), "copies": (INSIDE, Replicate())}
    for kind in KINDS:
        model = Weights([shape for shape, _ in cuts.values()]).to(here.device)
        shards = [
            torch.nn.Parameter(shards_of(weight, mesh, [placement]))
            for weight, (_, placement) in zip(model.weights, cuts.values(), strict=True)
        ]
        optimizer = optim.AdamW(model.weights, lr=0.1, state_dtype=kind)
        of_shards = optim.AdamW(shards, lr=0.1, state_dtype=kind)
        for step in range(3):
            take_gradients(model.weights, step)
            for weight, shard in zip(model.weights, shards, strict=True):
                shard.grad = like(weight.grad, shard)
            optimizer.step()
            of_shards.step()
        for name, weight, shard in zip(cuts, model.weights, shards, strict=True):
            what = f"{kind}, {name}"
            assert_same_bits(local(shard).detach(), part_of(weight, shard), what)
            assert_same_state(of_shards.state[shard], optimizer.state[weight], what)
            is_coded = optimizer.state[weight]["exp_avg"].dtype in CODES
            assert is_coded == (name != "whole below the size that decides"), what


def blocks_begin_where_shards_do(here):
    from torch.distributed.tensor import Shard

    mesh = here.mesh()
    for kind in KINDS:
        for native in (True, False):
            model = Weights([INSIDE]).to(here.device)
            shard = torch.nn.Parameter(shards_of(model.weights[0], mesh, [Shard(0)]))
            alone = torch.nn.Parameter(local(shard).detach().clone())
            optimizers = [
                optim.AdamW([weight], lr=0.1, state_dtype=kind, fused=native)
                for weight in (shard, alone)
            ]
            for step in range(2):
                take_gradients(model.weights, step)
                shard.grad = like(model.weights[0].grad, shard)
                alone.grad = local(shard.grad)
                for optimizer in optimizers:
                    optimizer.step()
            assert_same_bits(local(shard).detach(), alone.detach(), kind)


def shards_are_rounded_by_numbers_of_their_own(here):
    """But for the first along rows, whose elements are the first of the whole weight."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = here.mesh()
    for native in (True, False):
        for placement in (Shard(0), Replicate()):
            whole = torch.ones(2 if placement == Replicate() else 200, 100, dtype=torch.bfloat16)
            weight = torch.nn.Parameter(shards_of(whole.to(here.device), mesh, [placement]))
            optimizer = optim.SGD([weight], lr=1e-3, rounding="stochastic", fused=native)
            weight.grad = shards_of(torch.ones_like(whole, device=here.device), mesh, [placement])
            optimizer.step()
            found = weight.detach().full_tensor()
            if placement == Shard(0):
                assert not torch.equal(found[:100], found[100:])
                alone = torch.nn.Parameter(whole.to(here.device))
                alone.grad = torch.ones_like(alone)
                optim.SGD([alone], lr=1e-3, rounding="stochastic", fused=native).step()
                expected = alone.detach()
                assert_same_bits(found[:100], expected[:100], "the first shard")
                assert not torch.equal(found[100:], expected[100:])
                assert (found.view(torch.int16) - expected.view(torch.int16)).abs().max() == 1
            else:
                assert_all_have([found], "a copy")


def weights_that_all_have_are_rounded_alike(here):
    """Beside shards too; by the seed, which says the same in each run."""
    from torch.distributed.tensor import Shard

    mesh = here.mesh()

    def stepped(seed, fused):
        weights = [
            torch.nn.Parameter(torch.ones(40, 100, dtype=torch.bfloat16, device=here.device))
            for _ in range(3)
        ]
        weights[1] = torch.nn.Parameter(shards_of(weights[1].detach(), mesh, [Shard(0)]))
        groups = [{"params": weights[1:]}, {"params": weights[:1], "lr": 2e-3}]
        options = {"lr": 1e-3, "rounding": "stochastic", "seed": seed, "fused": fused}
        optimizer = optim.AdamW(groups, **options)
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            for weight in weights:
                grad = torch.randn(40, 100, generator=generator).to(here.device, torch.bfloat16)
                weight.grad = like(grad, weight)
            optimizer.step()
        return [weights[0].detach(), weights[2].detach()]

    for fused in (True, False):
        found = stepped(3, fused)
        assert_all_have(found, fused)
        for again, once in zip(stepped(3, fused), found, strict=True):
            assert_same_bits(again, once, f"again, {fused}")
        for other, once in zip(stepped(4, fused), found, strict=True):
            assert not torch.equal(other, once)


def weights_shared_out_by_zero_are_rounded_by_their_owner(here):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    options = {"lr": 1e-3, "rounding": "stochastic", "seed": 5}

    def subjects():
        shapes = (40, 100), (30, 7), (200,), (50, 60)
        ones = [torch.ones(shape, dtype=torch.bfloat16, device=here.device) for shape in shapes]
        return [torch.nn.Parameter(one) for one in ones]

    def take_gradients(weights, step):
        generator = torch.Generator().manual_seed(step)
        for weight in weights:
            grad = torch.randn(weight.shape, generator=generator)
            weight.grad = grad.to(here.device, torch.bfloat16)

    for fused in (True, False):
        weights, twins = subjects(), subjects()
        optimizer = ZeroRedundancyOptimizer(weights, optim.AdamW, fused=fused, **options)
        owned = optimizer._partition_parameters()  # by rank, groups of parameters
        places = {id(weight): place for place, weight in enumerate(weights)}
        owners = [
            optim.AdamW([twins[places[id(p)]] for p in groups[0]["params"]], fused=fused, **options)
            for groups in owned
        ]
        for step in range(3):
            take_gradients(weights, step)
            take_gradients(twins, step)
            for each in (optimizer, *owners):
                each.step()
        assert_all_have([weight.detach() for weight in weights], fused)
        for weight, twin in zip(weights, twins, strict=True):
            assert_same_bits(weight.detach(), twin.detach(), f"{fused}")


def assert_all_have(tensors, what):
    """The same bits."""
    for found in tensors:
        others = [torch.empty_like(found) for _ in range(PROCESSES)]
        dist.all_gather(others, found)
        assert_same_bits(*others, what)


# Checkpoints


KEPT = (
    *((torch.float32, {"state_dtype": kind}) for kind in KINDS),
    (torch.bfloat16, {"master_weights": True}),
    (torch.bfloat16, {"master_weights": "split", "state_dtype": "int8"}),
    (torch.bfloat16, {"rounding": "kahan"}),
)
"""Dtypes of weights, and how a group of them keeps values and states."""

WAYS = (("FSDP2", "one"), ("one", "FSDP2"), ("FSDP2", "DDP"), ("DDP", "FSDP2"))


class Training:
    """Steps of weights that one process has, two have (DDP), or of which two have shards."""

    def __init__(self, here, way, shapes, kept=KEPT, make=optim.AdamW):
        from torch.distributed.fsdp import fully_shard

        layers = [Weights(shapes, dtype) for dtype, _ in kept]
        self.model = torch.nn.ModuleList(layers).to(here.device)
        if way == "FSDP2":
            for layer in self.model:
                fully_shard(layer, mesh=here.mesh())
        groups = [
            {"params": list(layer.weights), **options}
            for layer, (_, options) in zip(self.model, kept, strict=True)
        ]
        self.weights = [weight for group in groups for weight in group["params"]]
        self.optimizer = make(groups, lr=0.1)
        self.is_alone = way == "one"
        if way == "DDP":
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)

    def step(self, *steps):
        for step in steps:
            take_gradients(self.weights, step)
            self.optimizer.step()
        return self

    def convert(self, dtype):
        saved = self.optimizer.state_dict()
        for group in saved["param_groups"]:
            group["state_dtype"] = dtype
        self.optimizer.load_state_dict(saved)

    def states(self, **options):
        options = StateDictOptions(**options)
        return get_optimizer_state_dict(self.model, self.optimizer, options=options)

    def save(self, folder):
        if not self.is_alone or dist.get_rank() == 0:
            dcp.save({"states": self.states()}, checkpoint_id=folder, no_dist=self.is_alone)
        dist.barrier()

    def load(self, folder):
        states = {"states": self.states()}
        dcp.load(states, checkpoint_id=folder, no_dist=self.is_alone)
        self.take(states["states"])

    def take(self, states, **options):
        options = StateDictOptions(**options)
        set_optimizer_state_dict(self.model, self.optimizer, states, options=options)


def small_states_are_saved_and_resharded(here):
    names = ("a row more for the first process", "shards of whole blocks", "one row, and none")
    shapes = [BETWEEN[name] for name in names]
    straight = Training(here, "one", shapes).step(0, 1)
    weights = [weight.detach().clone() for weight in straight.weights]
    states = [
        {name: value.clone() for name, value in straight.optimizer.state[weight].items()}
        for weight in straight.weights
    ]
    straight.step(2)
    for first, second in WAYS:
        resumed = Training(here, second, shapes)
        with folder_of_both() as folder:
            Training(here, first, shapes).step(0, 1).save(folder)
            resumed.load(folder)
        for place, (weight, whole, state) in enumerate(
            zip(resumed.weights, weights, states, strict=True)
        ):
            what = f"{first} to {second}, weight {place}"
            assert_same_state(resumed.optimizer.state[weight], state, what)
            with torch.no_grad():
                weight.copy_(like(whole, weight))
        resumed.step(2)
        for weight, whole in zip(resumed.weights, straight.weights, strict=True):
            what = f"{first} to {second}, and a step"
            assert_same_bits(local(weight).detach(), part_of(whole, weight), what)


def whole_dictionaries_are_gathered_and_spread(here):
    shapes, kept = list(BETWEEN.values()), KEPT[:2]  # gloo knows no float8
    begun = Training(here, "FSDP2", shapes, kept).step(0, 1)
    whole = begun.states(full_state_dict=True, cpu_offload=True)
    resumed = Training(here, "FSDP2", shapes, kept)
    resumed.take(whole if here.rank == 0 else {}, full_state_dict=True, broadcast_from_rank0=True)
    for weight, twin in zip(begun.weights, resumed.weights, strict=True):
        for name, value in begun.optimizer.state[weight].items():
            assert_same_bits(local(resumed.optimizer.state[twin][name]), local(value), name)


def blocks_of_other_shards_are_refused_by_name(here):
    kept = KEPT[:3]
    for first, second in (*WAYS, ("FSDP2", "FSDP2")):
        begun = Training(here, first, [INSIDE], kept).step(0, 1)
        resumed = Training(here, second, [INSIDE], kept)
        with folder_of_both() as folder:
            begun.save(folder)
            if first != second:
                with pytest.raises((CheckpointException, ValueError), match="exp_avg_absmax"):
                    resumed.load(folder)
                continue
            resumed.load(folder)
        for weight, twin in zip(begun.weights, resumed.weights, strict=True):
            for name, value in begun.optimizer.state[weight].items():
                assert_same_bits(local(resumed.optimizer.state[twin][name]), local(value), name)


def blocks_of_other_shards_go_by_float32(here):
    kept = KEPT[:3]
    begun = Training(here, "FSDP2", [INSIDE], kept).step(0)
    alone = Training(here, "one", [INSIDE], kept)
    part = Training(here, "FSDP2", [INSIDE], kept[:2]).step(0)  # gloo knows no float8
    whole = part.states(full_state_dict=True)
    other = Training(here, "one", [INSIDE], kept[:2])
    with pytest.raises(ValueError, match=r"the absmax of exp_avg .* of the shape \[2, 1, "):
        other.take(whole, full_state_dict=True)
    numbers = [
        {
            name: value.full_tensor() if is_dtensor(value) else value
            for name, value in begun.optimizer._store.decoded(group, weight, state).items()
        }
        for group in begun.optimizer.param_groups
        for weight in group["params"]
        for state in [begun.optimizer.state[weight]]
    ]
    for training in (begun, alone):
        training.convert(torch.float32)
    with folder_of_both() as folder:
        begun.save(folder)
        alone.load(folder)
    for weight, state in zip(alone.weights, numbers, strict=True):
        assert_same_state(alone.optimizer.state[weight], state, "float32")
    alone.convert("int8")
    assert alone.optimizer.state[alone.weights[0]]["exp_avg"].dtype is torch.uint8


def codes_are_not_taken_for_numbers(here):
    """DCP casts what it loads, and asks for no absmax that the new optimizer has not."""
    for place, kind in ((0, "int8"), (2, "fp8")):
        plain = Training(here, "FSDP2", [(64, 256)], ((torch.float32, {}),))
        with folder_of_both() as folder:
            Training(here, "FSDP2", [(64, 256)], (KEPT[place],)).step(0, 1).save(folder)
            with pytest.raises(ValueError, match=f"exp_avg.* has the codes of {kind} states"):
                plain.load(folder)


WORKS = (
    codes_follow_from_whole_weights,
    blocks_begin_where_shards_do,
    shards_are_rounded_by_numbers_of_their_own,
    weights_that_all_have_are_rounded_alike,
    weights_shared_out_by_zero_are_rounded_by_their_owner,
    small_states_are_saved_and_resharded,
    whole_dictionaries_are_gathered_and_spread,
    blocks_of_other_shards_are_refused_by_name,
    blocks_of_other_shards_go_by_float32,
    codes_are_not_taken_for_numbers,
)
