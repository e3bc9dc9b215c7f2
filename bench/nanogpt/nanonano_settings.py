"""Settings of a training run: fields of hyper_param.json, each a flag as well."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

ATTENTION = ("naive", "math", "flash_attn", "efficient_attn")
PRECISIONS = ("auto", "bfloat16", "float32")
DATASETS = ("shakespeare_char",)

#: The file beside the scripts.
FILE = Path(__file__).resolve().parent / "hyper_param.json"


class SettingsError(ValueError):
    """A field that is unknown, or whose value is not usable; the text names it."""


@dataclass(frozen=True)
class Settings:
    """A field's metadata has what its flag's help says."""

    compile: bool = field(default=False, metadata={"help": "train a torch.compile'd model"})
    attn_type: str = field(default="flash_attn", metadata={"help": ", ".join(ATTENTION)})
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = False
    dataset: str = "shakespeare_char"
    batch_size: int = 6
    block_size: int = field(default=1024, metadata={"help": "characters of a sequence"})
    gradient_accumulation_steps: int = 5
    optimizer: str = field(
        default="fusedstep:AdamW", metadata={"help": "fusedstep:CLASS or torch:CLASS"}
    )
    optimizer_options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "options of that class beside those here, as JSON"}
    )
    learning_rate: float = 6e-4
    max_iters: int = 500
    weight_decay: float = field(default=1e-2, metadata={"help": "of matrices"})
    beta1: float = 0.9
    beta2: float = 0.95
    decay_lr: bool = field(default=True, metadata={"help": "warm-up, then a cosine to min_lr"})
    warmup_iters: int = 200
    min_lr: float = 6e-5
    out_dir: str = field(default="out", metadata={"help": "the folder of checkpoint.pt"})
    device: str = field(default="auto", metadata={"help": "auto: cuda if there is one, else cpu"})
    dtype: str = field(
        default="auto", metadata={"help": "auto: autocast to bfloat16 where the device has it"}
    )
    data: str = field(
        default="", metadata={"help": "the folder with shakespeare/input.txt; see FUSEDSTEP_DATA"}
    )
    seed: int = 1337
    deterministic: bool = field(
        default=False, metadata={"help": "the same losses in each run on a GPU too, but slower"}
    )
    log_interval: int = field(
        default=10, metadata={"help": "iterations between two losses shown, on a GPU"}
    )
    checkpoint_interval: int = field(default=0, metadata={"help": "iterations; 0: none is written"})
    compile_backend: str = "inductor"

    def __post_init__(self) -> None:
        for name, kind in KINDS.items():
            value = getattr(self, name)
            number = kind is float and type(value) is int
            if type(value) is not kind and not number:
                raise SettingsError(f"{name} must be a {kind.__name__}, not {value!r}")
        self._one_of("attn_type", ATTENTION)
        self._one_of("dtype", PRECISIONS)
        self._one_of("dataset", DATASETS)
        for name in AT_LEAST_ONE:
            self._within(name, 1, math.inf)
        for name in AT_LEAST_ZERO:
            self._within(name, 0, math.inf)
        for name in ("dropout", "beta1", "beta2"):
            self._within(name, 0, math.nextafter(1, 0))
        if self.n_embd % self.n_head:
            raise SettingsError(
                f"n_embd must be a multiple of n_head: {self.n_embd}, {self.n_head}"
            )
        origin, _, name = self.optimizer.partition(":")
        if origin not in ("fusedstep", "torch") or not name:
            raise SettingsError(
                f"optimizer must be fusedstep:CLASS or torch:CLASS, not {self.optimizer!r}"
            )

    def _one_of(self, name: str, known: tuple[str, ...]) -> None:
        if getattr(self, name) not in known:
            raise SettingsError(
                f"{name} must be one of {', '.join(known)}: {getattr(self, name)!r}"
            )

    def _within(self, name: str, least: float, most: float) -> None:
        value = getattr(self, name)
        if not least <= value <= most:
            limit = f"at least {least}" if most == math.inf else f"{least} or more and below 1"
            raise SettingsError(f"{name} must be {limit}, not {value}")

    @property
    def name(self) -> str:
        return f"{self.attn_type}{', compiled' * self.compile}"

    def with_values(self, values: dict[str, Any]) -> Settings:
        """Raises SettingsError for a field that does not exist."""
        for name in values.keys() - KINDS.keys():
            raise SettingsError(f"{name} is no setting: they are {', '.join(KINDS)}")
        return dataclasses.replace(self, **values)

    def learning_rate_at(self, iteration: int) -> float:
        """Linear warm-up over `warmup_iters`, then a cosine that ends with `min_lr`."""
        if not self.decay_lr:
            return self.learning_rate
        if iteration < self.warmup_iters:
            return self.learning_rate * (iteration + 1) / (self.warmup_iters + 1)
        progress = (iteration - self.warmup_iters) / max(1, self.max_iters - self.warmup_iters)
        share = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.min_lr + share * (self.learning_rate - self.min_lr)


#: The type of each field.
KINDS = {
    name: dict if kind not in (bool, int, float, str) else kind
    for name, kind in get_type_hints(Settings).items()
}

AT_LEAST_ONE = (
    "n_layer", "n_head", "n_embd", "batch_size", "block_size", "gradient_accumulation_steps",
    "max_iters", "log_interval",
)  # fmt: skip
AT_LEAST_ZERO = (
    "learning_rate", "weight_decay", "warmup_iters", "min_lr", "seed", "checkpoint_interval",
)  # fmt: skip

#: Options that may differ between a run and the one that goes on with its checkpoint.
FREE_TO_CHANGE = frozenset(
    ("compile", "attn_type", "compile_backend", "out_dir", "device", "data", "deterministic",
     "log_interval", "checkpoint_interval")
)  # fmt: skip


def read(file: Path) -> Settings:
    """Reads a file of settings; those that it lacks have their defaults.

    Raises:
        SettingsError: no JSON object, an unknown field, or a bad value; the text names the file.
        OSError: the file cannot be read.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise SettingsError("it must be a JSON object")
        return Settings().with_values(values)
    except (json.JSONDecodeError, SettingsError) as error:
        raise SettingsError(f"{file}: {error}") from None


def add_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Adds a flag for each field but some: `--attn_type math`, or `--attn-type math`."""
    group = parser.add_argument_group("settings", f"for those of {FILE.name}")
    for each in dataclasses.fields(Settings):
        if each.name in without:
            continue
        names = dict.fromkeys([f"--{each.name}", f"--{each.name.replace('_', '-')}"])
        kind = KINDS[each.name]
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": each.metadata.get("help")}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": json.loads if kind is dict else kind, "metavar": kind.__name__}
        group.add_argument(*names, dest=each.name, **options)


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields that flags were given for."""
    return {name: value for name, value in vars(arguments).items() if name in KINDS}
