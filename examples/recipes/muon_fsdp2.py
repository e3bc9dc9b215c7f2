"""Muon on FSDP2, its momentum in 8 bits, all shards offloaded; AdamW for all other weights.

By one process or several: torchrun --nproc-per-node 2 muon_fsdp2.py
"""

import argparse
import os
from itertools import islice
from pathlib import Path

import recipe
import resume
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from fusedstep import optim


def sharded(device: torch.device) -> recipe.LanguageModel:
    """Returns a model whose shards, with their gradients and states, are in the host's memory."""
    model = recipe.LanguageModel()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh, offload_policy=policy)
    return model


def train(args: argparse.Namespace, device: torch.device) -> recipe.Run | None:
    """Trains from the last checkpoint on. All processes call it."""
    rank, count = dist.get_rank(), dist.get_world_size()
    model = sharded(device)
    # AdamW's states stay float32: a block of codes may not cross the border of two shards where
    # another number of processes is to read them.
    others = {"lr": 3e-3, "state_dtype": torch.float32}
    optimizer = optim.create(
        "muon", model, lr=0.02, weight_decay=0.01, state_dtype="int8", others=others
    )
    done = resume.load(args.folder, model, optimizer)
    if done >= args.steps:
        if rank == 0:
            print(f"{args.folder} has {done} steps: --steps {done + args.every} would go on")
        return None
    with recipe.Run(args.device, args.steps - done, quiet=rank > 0) as run:
        data = recipe.batches(args.steps, args.batch, device)
        for step, tokens in enumerate(islice(data, done, None), done + 1):
            loss = model.loss(tokens[rank::count])
            loss.backward()
            optimizer.step(max_norm=1.0, zero_grad="none")
            run.add(loss, len(tokens))
            if step % args.every == 0:
                resume.save(args.folder, step, model, optimizer)
    return run


def main(argv: list[str] | None = None) -> recipe.Run | None:
    parser = recipe.arguments(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--every", type=int, default=50, help="steps from checkpoint to checkpoint")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    with recipe.processes(args.device):
        return train(args, device)


if __name__ == "__main__":
    main()
    recipe.leave()
