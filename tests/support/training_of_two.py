"""Works of two processes that train a model, each with a half of every batch.

What they are compared with: one process that computes the gradients of both halves.
"""

import copy

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusedstep
from fusedstep import optim
from fusedstep._sharding.dtensor import is_dtensor, local
from support.stepping import assert_same_bits
from support.two_processes import PROCESSES, part_of

STEPS = 3

#: Elements wait for no others in the first and the last. LAMB and Adafactor add up what shards
#: have: sums in double have another order.
OPTIMIZERS = {
    optim.AdamW: {"lr": 0.01, "weight_decay": 0.1},
    optim.Lamb: {"lr": 0.01, "weight_decay": 0.1},
    optim.Adafactor: {"lr": 0.01, "weight_decay": 0.1},
    optim.AdamW8bit: {"lr": 0.01},
}


def muon(weights, fused=None, **options):
    """Muon for matrices, and AdamW for vectors."""
    return optim.Muon(optim.Muon._grouped(list(weights)), fused=fused, **options)


#: Products of other matrices together have other roundings.
ON_SHARDS = OPTIMIZERS | {muon: {"lr": 0.01, "ns_dtype": torch.float32}}


class Layer(torch.nn.Module):
    """A residual layer whose weights have states in codes."""

    def __init__(self, recomputes):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 64)
        )
        self.recomputes = recomputes

    def forward(self, x):
        if self.recomputes:
            return x + checkpoint(self.layers, x, use_reentrant=False)
        return x + self.layers(x)


def network(recomputes=False):
    torch.manual_seed(0)
    return torch.nn.Sequential(Layer(recomputes), Layer(recomputes))


def batch(step, part, rank):
    """The part of a batch that a process takes at a time."""
    generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    return torch.randn(8, 64, generator=generator)


def loss_of(model, inputs, dtype=torch.float32):
    return (model(inputs.to(dtype)).float() - inputs.flip(1)).square().mean()


class Whole:
    """The training of one process: it takes the parts of both."""

    def __init__(self, cls, device, dtype=torch.float32, parts=1):
        self.model, self.dtype, self.parts = network().to(device), dtype, parts
        self.optimizer = cls(self.model.parameters(), **ON_SHARDS[cls])

    def step(self, step):
        weights = list(self.model.parameters())
        means = [torch.zeros_like(weight) for weight in weights]
        for rank in range(PROCESSES):
            # A copy of the dtype that gradients are computed in.
            copied = copy.deepcopy(self.model).to(self.dtype)
            for part in range(self.parts):
                inputs = batch(step, part, rank).to(weights[0].device)
                loss_of(copied, inputs, self.dtype).backward()
            for mean, weight in zip(means, copied.parameters(), strict=True):
                mean += weight.grad.float() / PROCESSES
        for weight, mean in zip(weights, means, strict=True):
            weight.grad = mean
        self.optimizer.step()


class Replicas:
    """Whole weights in each process, by DistributedDataParallel."""

    def __init__(self, cls, here, make=None):
        model = network().to(here.device)
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        make = make or (lambda weights, **options: cls(weights, **options))
        self.optimizer = make(self.model.parameters(), **OPTIMIZERS[cls])
        self.here = here

    def step(self, step):
        loss_of(self.model, batch(step, 0, self.here.rank).to(self.here.device)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


class Shards:
    """Shards of weights, by FSDP2."""

    def __init__(self, cls, here, parts=1, recomputes=False, **policies):
        self.model = network(recomputes).to(here.device)
        mesh = here.mesh()
        for layer in (*self.model, self.model):
            fully_shard(layer, mesh=mesh, **policies)
        self.optimizer = cls(self.model.parameters(), fused=True, **ON_SHARDS[cls])
        self.here, self.parts = here, parts

    def step(self, step):
        for part in range(self.parts):
            self.model.set_requires_gradient_sync(part == self.parts - 1)
            loss_of(self.model, batch(step, part, self.here.rank).to(self.here.device)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def assert_trains_as_whole(training, whole, what):
    for step in range(STEPS):
        training.step(step)
        whole.step(step)
    for weight, expected in zip(training.model.parameters(), whole.model.parameters(), strict=True):
        found, expected = local(weight).detach(), part_of(expected, weight)
        if isinstance(training.optimizer, (optim.Lamb, optim.Adafactor)) and is_dtensor(weight):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, msg=what)
        elif isinstance(training.optimizer, optim.Muon) and weight.ndim == 2:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=what)
        else:
            assert_same_bits(found, expected, what)


def replicas_train_as_one(here):
    for cls in OPTIMIZERS:
        assert_trains_as_whole(Replicas(cls, here), Whole(cls, here.device), f"{cls}")


def states_are_shared_out_by_zero(here):
    for cls in OPTIMIZERS:
        for is_view in (False, True):

            def make(weights, cls=cls, is_view=is_view, **options):
                return ZeroRedundancyOptimizer(
                    weights, cls, parameters_as_bucket_view=is_view, **options
                )

            training, whole = Replicas(cls, here, make), Whole(cls, here.device)
            assert_trains_as_whole(training, whole, f"{cls}, {is_view}")
            training.optimizer.consolidate_state_dict(to=0)
            if here.rank == 0:
                expected = whole.optimizer.state_dict()["state"]
                found = training.optimizer.state_dict()["state"]
                assert found.keys() == expected.keys()
                for index, state in expected.items():
                    for name, value in state.items():
                        there = found[index][name]  # on the CPU
                        assert_same_bits(there, value.to(there.device), f"{cls}, {index}, {name}")


def shards_train_as_one(here):
    for cls in ON_SHARDS:
        assert_trains_as_whole(Shards(cls, here), Whole(cls, here.device), f"{cls}")


def offloaded_shards_train_as_one(here):
    policy = CPUOffloadPolicy(pin_memory=here.device.type == "cuda")
    for cls in ON_SHARDS:
        training = Shards(cls, here, offload_policy=policy)
        assert_trains_as_whole(training, Whole(cls, here.device), f"{cls}")


def shards_of_two_precisions_train_as_one(here):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for cls in ON_SHARDS:
        whole = Whole(cls, here.device, torch.bfloat16)
        assert_trains_as_whole(Shards(cls, here, mp_policy=policy), whole, f"{cls}")


def recomputed_activations_train_as_one(here):
    for cls in ON_SHARDS:
        training = Shards(cls, here, recomputes=True)
        assert_trains_as_whole(training, Whole(cls, here.device), f"{cls}")


def accumulated_gradients_train_as_one(here):
    for cls in ON_SHARDS:
        whole = Whole(cls, here.device, parts=2)
        assert_trains_as_whole(Shards(cls, here, parts=2), whole, f"{cls}")


def shards_are_stepped_in_the_backward_pass(here):
    """FSDP2 calls the hooks when it has reduced the gradients."""
    for cls in (optim.AdamW, optim.AdamW8bit):
        training = Shards(cls, here)
        alive = []
        training.optimizer.register_step_pre_hook(
            lambda optimizer, *_, alive=alive: alive.extend(
                p.grad is not None for p in optimizer.param_groups[0]["params"]
            )
        )
        with fusedstep.step_in_backward(training.optimizer, bucket_cap_mb=0):
            assert_trains_as_whole(training, Whole(cls, here.device), f"{cls}")
        assert len(alive) == STEPS * 8
        assert not any(alive)
    lamb = Shards(optim.Lamb, here).optimizer
    with pytest.raises(RuntimeError, match="parameter 0 of group 0 is a DTensor, and Lamb takes"):
        fusedstep.step_in_backward(lamb)


WORKS = (
    replicas_train_as_one,
    states_are_shared_out_by_zero,
    shards_train_as_one,
    offloaded_shards_train_as_one,
    shards_of_two_precisions_train_as_one,
    recomputed_activations_train_as_one,
    accumulated_gradients_train_as_one,
    shards_are_stepped_in_the_backward_pass,
)
