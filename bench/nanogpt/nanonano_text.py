"""The text that is trained on, as numbers of its characters: tiny Shakespeare."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

REPOSITORY = Path(__file__).resolve().parents[2]
NAME = Path("shakespeare", "input.txt")
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


@dataclass(frozen=True)
class Text:
    train: Tensor
    """int64: the first nine tenths of the characters."""
    characters: int
    symbols: int


def find(data: str = "") -> Path:
    """Returns the file in the folder that is named, by `data` or else by FUSEDSTEP_DATA.

    Without a name it is looked for in `data/` of the current folder and of the repository, and in
    `shared/data/` beside the repository.

    Raises:
        FileNotFoundError: it is nowhere. A folder that is named is never passed over.
    """
    named = data or os.environ.get("FUSEDSTEP_DATA")
    folders = (Path("data"), REPOSITORY / "data", REPOSITORY.parent / "shared" / "data")
    for folder in [Path(named)] if named else folders:
        if (folder / NAME).is_file():
            return folder / NAME
    where = f"{'data' if data else 'FUSEDSTEP_DATA'}: {named}" if named else "data/"
    raise FileNotFoundError(f"{where} has no {NAME}. It is {URL}")


def read(file: Path) -> Text:
    """Raises ValueError if the text is empty."""
    characters = file.read_text(encoding="utf-8")
    if not characters:
        raise ValueError(f"{file} is empty")
    numbers = {symbol: number for number, symbol in enumerate(sorted(set(characters)))}
    encoded = torch.tensor([numbers[each] for each in characters])
    return Text(encoded[: int(0.9 * len(encoded))], len(encoded), len(numbers))


def starts(seed: int, iteration: int, shape: tuple[int, ...], most: int) -> Tensor:
    """Returns where the sequences of an iteration begin: the same ones at each call."""
    # The generator takes 32 bits of a seed.
    generator = torch.Generator().manual_seed((1_000_003 * seed + iteration) % 2**32)
    return torch.randint(most, shape, generator=generator)
