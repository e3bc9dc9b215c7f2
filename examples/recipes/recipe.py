"""Parts that the recipes share: arguments, a small language model, its data, the closing line."""

from __future__ import annotations

import argparse
import functools
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

LENGTH = 64


def arguments(about: str, *, steps: int = 100, batch: int = 16) -> argparse.ArgumentParser:
    """Returns a parser with the options of every recipe."""
    parser = argparse.ArgumentParser(description=about)
    for name, default, about in (
        ("steps", steps, "steps of the optimizer"),
        ("batch", batch, "samples a step"),
    ):
        parser.add_argument(
            f"--{name}", type=count, default=default, help=f"{about} (default: {default})"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help=f"cpu or cuda (default: {device})")
    return parser


def count(word: str) -> int:
    """Reads an argument that is a number of things, of which there is at least one."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1: {word}")
    return number


def text() -> str:
    """Returns tiny Shakespeare if FUSEDSTEP_DATA has shakespeare/input.txt, else sums."""
    file = Path(os.environ.get("FUSEDSTEP_DATA", "data"), "shakespeare", "input.txt")
    if file.exists():
        return file.read_text()
    numbers = random.Random(0)
    pairs = ((numbers.randrange(1000), numbers.randrange(1000)) for _ in range(20_000))
    return "".join(f"{a}+{b}={a + b}\n" for a, b in pairs)


@functools.cache
def encoded() -> tuple[Tensor, int]:
    """Returns the text as numbers of its characters, and how many different ones there are."""
    characters = text()
    symbols = {symbol: i for i, symbol in enumerate(sorted(set(characters)))}
    return torch.tensor([symbols[each] for each in characters]), len(symbols)


def batches(steps: int, batch: int, device: str, length: int = LENGTH) -> Iterator[Tensor]:
    """Yields random pieces of the text, of one character more than ``length``."""
    tokens, _ = encoded()
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - length, (batch, 1), generator=generator)
        yield tokens[starts + torch.arange(length + 1)].to(device)


@contextmanager
def processes(device: str) -> Iterator[None]:
    """Lets the processes that torchrun has started communicate, or one process alone."""
    # For a GPU's tensors alone, torch would choose no library for those in the host's memory.
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **alone)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def leave() -> NoReturn:
    """Ends a process that has communicated, without the end of the interpreter.

    Caches of DTensor keep the process group, and with it gloo's threads. One of them may still hold
    the tensors of the last collective. If it frees them while the interpreter ends, it aborts the
    process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class LanguageModel(nn.Module):
    """A small transformer that predicts the next character."""

    def __init__(
        self,
        *,
        width: int = 64,
        layers: int = 2,
        length: int = LENGTH,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        _, symbols = encoded()
        self.checkpointing = checkpointing
        self.tokens, self.places = nn.Embedding(symbols, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        x = self.tokens(tokens) + self.places.weight[:length]
        for layer in self.layers:
            if self.checkpointing:
                x = checkpoint(layer, x, later, use_reentrant=False)
            else:
                x = layer(x, later)
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor) -> Tensor:
        scores = self(tokens[:, :-1]).float()
        return F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


class Run:
    """Measures training, from ``with`` on, and prints the closing line at its end, if not quiet.

    On a terminal a run that takes longer than two seconds shows the step that it has come to.
    """

    def __init__(self, device: str, steps: int, *, quiet: bool = False) -> None:
        self.steps, self.quiet = steps, quiet
        self.cuda = torch.device(device).type == "cuda"
        self.losses: list[Tensor | float] = []
        self.samples, self.seconds, self.memory = 0, 0.0, 0

    def __enter__(self) -> Run:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        self._start = self._now()
        self._next = self._start + 2
        return self

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def add(self, loss: Tensor | float, samples: int) -> None:
        """Counts a step."""
        self.losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        self.samples += samples
        if time.perf_counter() > self._next:
            step = f"step {len(self.losses)} of {self.steps}, loss {float(self.losses[-1]):.3f}"
            self._show(step)
            self._next = time.perf_counter() + 0.5

    def _show(self, line: str) -> None:
        """Writes over the last line of a terminal."""
        if not self.quiet and sys.stderr.isatty():
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._show("")
        if error is not None:
            return
        self.seconds = self._now() - self._start
        self.memory = torch.cuda.max_memory_allocated() if self.cuda else resident()
        if self.quiet:
            return
        first, last = float(self.losses[0]), float(self.losses[-1])
        kind = "on the device" if self.cuda else "resident, torch included"
        print(
            f"{self.seconds:.2f} s, {self.samples / self.seconds:,.0f} samples/s, "
            f"{self.memory / 2**20:,.0f} MiB {kind}; loss {first:.3f} to {last:.3f}"
        )


def resident() -> int:
    """Returns the most memory, in bytes, that the process has had.

    Not by ``getrusage``, whose peak is at first that of the process which started this one.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)[1])
