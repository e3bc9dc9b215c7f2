"""Checkpoints that a death while writing does not spoil, by one process or several (torchrun).

A checkpoint has its name only when all of it is on the disk. What a process that died has left is
of another name, and the next run goes on from the last whole one.
"""

import argparse
import os
import shutil
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

import recipe
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fusedstep import optim

KEPT = 2


def save(folder: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Writes a checkpoint under another name first. All processes call it."""
    partial, whole = folder / f"partial-{step:08d}", folder / f"step-{step:08d}"
    weights, states = get_state_dict(model, optimizer)
    states = {"model": weights, "optimizer": states}
    # It returns when all processes have written, and flushed, their parts.
    dcp.save(states, checkpoint_id=partial, no_dist=not dist.is_initialized())
    if not dist.is_initialized() or dist.get_rank() == 0:
        partial.rename(whole)
        flush(folder)
        for old in sorted(folder.glob("step-*"))[:-KEPT]:
            shutil.rmtree(old)


def flush(folder: Path) -> None:
    """Writes the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def load(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the last whole checkpoint. Returns the steps that it has behind it."""
    whole = max(folder.glob("step-*"), default=None)
    if whole is None:
        return 0
    weights, states = get_state_dict(model, optimizer)
    states = {"model": weights, "optimizer": states}
    dcp.load(states, checkpoint_id=whole, no_dist=not dist.is_initialized())
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    return int(whole.name.removeprefix("step-"))


def train(args: argparse.Namespace) -> recipe.Run | None:
    """Trains from the last checkpoint on. All processes call it."""
    model = recipe.LanguageModel().to(args.device)
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh(args.device, (dist.get_world_size(),)))
    optimizer = optim.AdamW8bit(model.parameters(), lr=3e-3)
    done = load(args.folder, model, optimizer)
    if done >= args.steps:
        print(f"{args.folder} has {done} steps: --steps {done + args.every} would go on")
        return None
    with recipe.Run(args.device, args.steps - done) as run:
        data = recipe.batches(args.steps, args.batch, args.device)
        for step, tokens in enumerate(islice(data, done, None), done + 1):
            loss = model.loss(tokens)
            loss.backward()
            optimizer.step(max_norm=1.0, zero_grad="none")
            run.add(loss, len(tokens))
            if step % args.every == 0:
                save(args.folder, step, model, optimizer)
    return run


def main(argv: list[str] | None = None) -> recipe.Run | None:
    parser = recipe.arguments(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--every", type=int, default=10, help="steps from checkpoint to checkpoint")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    with recipe.processes(args.device) if "RANK" in os.environ else nullcontext():  # by torchrun
        return train(args)


if __name__ == "__main__":
    main()
    recipe.leave()
