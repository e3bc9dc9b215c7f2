"""torch's FSDP2 and distributed checkpoints (DCP): two processes, and one beside them."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import fusedstep
from fusedstep import optim
from fusedstep._torch_ops.imperative import MASTER
from support import two_processes
from support.cases import PLAIN, WITH_NAMESAKE, thinned
from support.pages import run_page
from support.small import (
    assert_native,
    assert_same_losses,
    batches,
    loss_of,
    network,
    ours,
    reference,
)
from support.two_processes import PROCESSES, folder_of_both

ON_SHARDS = [case for case in PLAIN if case.optimizer is not optim.Rprop]
"""The rows of optimizers that torch steps on shards too."""
NAMESAKES = [case for case in ON_SHARDS if case in WITH_NAMESAKE]
OWN = (
    {},
    {"state_dtype": torch.float32, "max_grad_norm": 0.5},
    {"master_weights": True},
)
"""Options that torch's optimizers do not have."""
SIZE = 4
"""Samples that a process takes at a time."""


def shard(model, here, **options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(here.device.type, (PROCESSES,))
    for layer in (*(layer for layer in model if list(layer.parameters())), model):
        fully_shard(layer, mesh=mesh, **options)
    return model


class Training:
    """Trains a network that is sharded, or whole in one process."""

    def __init__(self, here, kind, sharded=True, dtype=torch.float32, **options):
        self.part = slice(here.rank * SIZE, (here.rank + 1) * SIZE) if sharded else slice(None)
        self.sharded, self.dtype = sharded, dtype
        model = network().to(here.device, dtype)
        self.model = shard(model, here, **options) if sharded else model
        cls, its_options = kind
        self.optimizer = cls(self.model.parameters(), **its_options)

    def train(self, data, clips=False):
        losses = []
        for inputs, labels in data:
            loss = loss_of(self.model, (inputs[self.part].to(self.dtype), labels[self.part]))
            loss.backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
            mean = loss.detach().float()
            if self.sharded:
                dist.all_reduce(mean)
                mean /= PROCESSES
            losses.append(mean.item())
        return losses

    def state(self, **options):
        options = StateDictOptions(**options)
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=options),
        }

    def save(self, path, **options):
        dcp.save(self.state(**options), checkpoint_id=path, no_dist=not self.sharded)

    def load(self, path, **options):
        state = self.state(**options)
        dcp.load(state, checkpoint_id=path, no_dist=not self.sharded)
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(
            self.model, self.optimizer, state["optimizer"], options=StateDictOptions(**options)
        )
        return self


DATA = batches(4, SIZE * PROCESSES)


def sharded_weights_train_as_whole_ones(here):
    for case in PLAIN:
        for clips in (False, True):
            training = Training(here, ours(case))
            losses = training.train(DATA, clips)
            assert_same_losses(losses, Training(here, reference(case), False).train(DATA, clips))
            if case.elementwise:
                assert_native(training.optimizer)
        cls, options = ours(case)
        clipped = Training(here, (cls, options | {"max_grad_norm": 0.5}))
        assert_same_losses(clipped.train(DATA), losses)


def bfloat16_is_a_policy_of_fsdp2(here):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    for case in ON_SHARDS:
        losses = Training(here, ours(case), **policy).train(DATA)
        assert_same_losses(losses, Training(here, reference(case), **policy).train(DATA), 2e-3)


def weights_are_offloaded(here):
    from torch.distributed.fsdp import CPUOffloadPolicy

    policy = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    for case in PLAIN:
        training = Training(here, ours(case), **policy)
        assert_same_losses(training.train(DATA), Training(here, reference(case), False).train(DATA))


def models_with_steps_in_the_backward_pass_are_moved(here):
    """torch swaps the shards then."""
    losses = []
    for in_backward in (False, True):
        training = Training(here, (optim.AdamW, {"lr": 1e-2}))
        if in_backward:
            fusedstep.step_in_backward(training.optimizer)
        training.model.to(torch.float64).to(torch.float32)
        losses.append(training.train(DATA[:2]))
        training.model.cpu()
        losses[-1] += training.train(DATA[2:])
    assert losses[0] == losses[1]


@functools.lru_cache(maxsize=8)  # of a row: ways to save and load begin alike
def trained(here, cls, options, sharded, dtype, steps):
    """A training after some steps, and its losses. Nobody takes it further."""
    training = Training(here, (cls, dict(options)), sharded, dtype)
    return training, tuple(training.train(DATA[:steps]))


def continues_as_from_the_start(here, first, second, way, dtype):
    """Two steps by the first kind of optimizer, a checkpoint, and two by the second."""
    saves_sharded, loads_sharded, flat = way
    options = {"flatten_optimizer_state_dict": flat}

    def trained_by(kind, steps):
        cls, its_options = kind
        return trained(here, cls, tuple(its_options.items()), saves_sharded, dtype, steps)

    begun, losses = trained_by(first, 2)
    resumed = Training(here, second, loads_sharded, dtype)
    with folder_of_both() as path:
        if saves_sharded or here.rank == 0:
            begun.save(path, **options)
        dist.barrier()
        resumed.load(path, **options)
    torch.testing.assert_close(states(resumed), states(begun), rtol=0, atol=0)
    losses = [*losses, *resumed.train(DATA[2:])]
    _, straight = trained_by(second, len(DATA))
    assert_same_losses(losses, straight, 1e-5 if dtype is torch.float32 else 2e-2)
    return resumed.optimizer


def states(training):
    """States of every weight, whole."""
    return [
        {name: value.full_tensor() if is_sharded(value) else value for name, value in state.items()}
        for state in (training.optimizer.state.get(p, {}) for p in training.model.parameters())
    ]


def is_sharded(tensor):
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


WAYS = ((True, True, False), (True, True, True), (True, False, False), (False, True, False))
"""(two processes save, two processes load, states are flattened); if False, one process does."""


def checkpoints_of_torchs_and_ours_are_exchanged(here):
    for case, way in itertools.product(NAMESAKES, WAYS):
        for first, second in itertools.permutations((reference(case), ours(case))):
            continues_as_from_the_start(here, first, second, way, torch.float32)


def our_checkpoints_are_loaded_whatever_is_set(here):
    for case, way, own in thinned(PLAIN, WAYS, OWN):
        cls, options = ours(case)
        kind = cls, options | own
        optimizer = continues_as_from_the_start(here, kind, kind, way, torch.bfloat16)
        default = cls(network().parameters()).defaults.get("max_grad_norm")
        for group in optimizer.param_groups:
            assert group.get("max_grad_norm") == own.get("max_grad_norm", default)
        for state in optimizer.state.values():
            wide = {"state_dtype", "master_weights"} & own.keys()
            for name in case.states:
                assert state[name].dtype is (torch.float32 if wide else torch.bfloat16)
            assert (MASTER in state) == ("master_weights" in own)


def the_page_on_fsdp2_is_right(here):
    inputs, labels = DATA[0]
    part = slice(here.rank * SIZE, (here.rank + 1) * SIZE)
    names = run_page(
        "fsdp2", model=network(), batches=[(inputs[part], labels[part])], loss_of=loss_of
    )
    assert_native(names["optimizer"])


def the_page_on_dcp_is_right(here):
    training = Training(here, (torch.optim.AdamW, {"foreach": False}))
    losses = training.train(DATA[:2])
    with folder_of_both() as folder:
        given = {"model": training.model, "optimizer": training.optimizer, "folder": folder}
        names = run_page("dcp", **given)
    training.optimizer = names["optimizer"]
    assert type(training.optimizer) is optim.AdamW
    losses += training.train(DATA[2:])
    assert_same_losses(losses, Training(here, (torch.optim.AdamW, {})).train(DATA))


WORKS = (
    sharded_weights_train_as_whole_ones,
    bfloat16_is_a_policy_of_fsdp2,
    weights_are_offloaded,
    models_with_steps_in_the_backward_pass_are_moved,
    checkpoints_of_torchs_and_ours_are_exchanged,
    our_checkpoints_are_loaded_whatever_is_set,
    the_page_on_fsdp2_is_right,
    the_page_on_dcp_is_right,
)


@pytest.fixture(scope="module")
def failures():
    return two_processes.failures_by_name("gloo", WORKS)


@pytest.mark.parametrize("name", [work.__name__ for work in WORKS])
def test_fsdp2(failures, name):
    if name in failures:
        pytest.fail(failures[name], pytrace=False)
