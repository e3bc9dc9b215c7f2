"""Works of four processes: meshes of two dimensions, uneven shards, and a process that dies."""

import functools
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fusedstep import optim
from fusedstep._sharding.dtensor import local
from support.cases import KINDS
from support.stepping import as_parameters, assert_same_bits, make_gradients, make_weights
from support.two_processes import Process, part_of, shards_of

PROCESSES = 4

#: A prime number of rows, fewer rows than processes, and more columns than rows.
SHAPES = ((13, 8), (3, 8), (1, 12), (17, 40))

#: Optimizers whose steps of shards exchange something, and how far a weight may be off.
EXCHANGING = {
    "Lamb": (functools.partial(optim.Lamb, lr=0.01, weight_decay=0.1), 2e-6),
    "Adafactor": (functools.partial(optim.Adafactor, lr=0.01), 2e-6),
    "Muon": (functools.partial(optim.Muon, lr=0.01), 2e-5),
    "Dion2": (functools.partial(optim.Muon, lr=0.01, rank_fraction=0.5), 2e-5),
    "GaLoreAdamW": (
        lambda params: optim.GaLoreAdamW([{"params": params, "rank": 1}], lr=0.01),
        2e-5,
    ),
    "APOLLOAdamW": (
        lambda params: optim.APOLLOAdamW([{"params": params, "rank": 1}], lr=0.01),
        2e-5,
    ),
}


def meshes(here):
    """Meshes of four, with placements, by name."""
    from torch.distributed.tensor import Replicate, Shard

    return {
        "rows": (here.mesh(4), [Shard(0)]),
        "columns": (here.mesh(4), [Shard(1)]),
        "HSDP": (here.mesh(2, 2), [Replicate(), Shard(0)]),
        "HSDP of columns": (here.mesh(2, 2), [Replicate(), Shard(1)]),
        "rows and columns": (here.mesh(2, 2), [Shard(0), Shard(1)]),
    }


def stepped(here, build, mesh, placements, **arguments):
    """Returns whole weights, and shards of the same weights, after two steps."""
    weights = [weight.to(here.device) for weight in make_weights(SHAPES, torch.float32)]
    shards = [torch.nn.Parameter(shards_of(weight, mesh, placements)) for weight in weights]
    params = as_parameters(weights)
    ours, theirs = build(params), build(shards)
    for step in (1, 2):
        gradients = make_gradients(SHAPES, torch.float32, step)
        for param, shard, gradient in zip(params, shards, gradients, strict=True):
            param.grad = gradient.to(here.device)
            shard.grad = shards_of(param.grad, mesh, placements)
        norms = ours.step(**arguments), theirs.step(**arguments)
        if arguments:
            torch.testing.assert_close(norms[1], norms[0], rtol=1e-12, atol=0)
    return params, shards


def elementwise_steps_have_the_bits_of_the_whole(here):
    for name, (mesh, placements) in meshes(here).items():
        for case in KINDS:
            if case.elementwise:
                params, shards = stepped(here, case.build, mesh, placements)
                for param, shard in zip(params, shards, strict=True):
                    found, expected = local(shard).detach(), part_of(param, shard)
                    assert_same_bits(found, expected, f"{case}, {name}")


def steps_that_exchange_are_those_of_the_whole(here):
    for name, (mesh, placements) in meshes(here).items():
        for optimizer, (build, most) in EXCHANGING.items():
            if name == "rows and columns" and optimizer not in ("Lamb", "Adafactor"):
                continue  # refused by name
            params, shards = stepped(here, build, mesh, placements)
            for param, shard in zip(params, shards, strict=True):
                torch.testing.assert_close(
                    local(shard).detach(),
                    part_of(param, shard),
                    rtol=most,
                    atol=most,
                    msg=lambda text, what=f"{optimizer}, {name}": f"{what}: {text}",
                )


def max_norm_counts_copies_once(here):
    for name, (mesh, placements) in meshes(here).items():
        build = functools.partial(optim.AdamW, lr=0.01)
        params, shards = stepped(here, build, mesh, placements, max_norm=0.5)
        for param, shard in zip(params, shards, strict=True):
            found, expected = local(shard).detach(), part_of(param, shard)
            torch.testing.assert_close(found, expected, msg=f"max_norm, {name}")


#: All but a death, which ends the processes.
WORKS = (
    elementwise_steps_have_the_bits_of_the_whole,
    steps_that_exchange_are_those_of_the_whole,
    max_norm_counts_copies_once,
)


def dies_in_a_step(folder: Path, rank: int, optimizer: str, collective: str) -> None:
    """The third of four processes dies in its second step, where the step begins a collective.

    Each other process notes the error, and whether its weights are as before the step.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=PROCESSES)
    mesh, placements = meshes(Process(rank, torch.device("cpu")))["rows"]
    shards = as_parameters(make_weights(SHAPES, torch.float32))
    shards = [torch.nn.Parameter(shards_of(each, mesh, placements)) for each in shards]
    build, _ = EXCHANGING[optimizer]
    stepped = build(shards)
    for step in (1, 2):
        for shard, gradient in zip(
            shards, make_gradients(SHAPES, torch.float32, step), strict=True
        ):
            shard.grad = shards_of(gradient, mesh, placements)
        if step == 1:
            stepped.step()
    before = [local(shard).detach().clone() for shard in shards]
    if rank == 2:
        setattr(dist, collective, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError) as error:
        stepped.step()
    for shard, kept in zip(shards, before, strict=True):
        assert_same_bits(local(shard).detach(), kept, f"process {rank}")
    (folder / f"error-{rank}").write_text(str(error.value))
    os._exit(0)
