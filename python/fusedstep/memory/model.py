"""The weights of a model: from a parameter count, a config.json, or a function that makes it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fusedstep.memory.activations import stacks

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

#: A bare parameter count is that of a decoder whose width is so many times its depth.
_WIDTH_PER_LAYER = 128


class Model(NamedTuple):
    """A model: its name, weights and buffers, and how it is called."""

    name: str
    trained: tuple[torch.Size, ...]
    """The shapes of the weights that are trained."""
    frozen: int = 0
    """Elements of the weights that are not."""
    buffers: int = 0
    """Elements of the buffers."""
    make: Callable[[], torch.nn.Module] | None = None
    """Makes the model, on whatever device torch then makes tensors. None for a parameter count."""
    adapted: tuple[torch.Size, ...] = ()
    """The shapes of the matrices that adapters are for, of a parameter count."""
    stacks: tuple[str, ...] = ()
    """The names of the lists of blocks."""
    is_transformers: bool = False
    """True for a model that has transformers' gradient_checkpointing_enable()."""

    @property
    def trained_elements(self) -> int:
        return sum(shape.numel() for shape in self.trained)

    @property
    def parameters(self) -> int:
        return self.trained_elements + self.frozen


def load(source: str, attention: str = "flash") -> Model:
    """Returns the model that a text names.

    Args:
        source (str): a parameter count, as ``124439808``, ``124M`` or ``7e9``; the path of a
            Hugging Face ``config.json`` or of its folder; or ``package.module:factory``
        attention (str): ``"eager"`` builds a Hugging Face model with attention matrices

    Raises:
        ValueError: if the text names none of these, or what it names cannot be made.
    """
    if (count := _count(source)) is not None:
        return _of_count(source, count)
    path = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
    if path.suffix == ".json":
        return _of_module(source, _from_config(path, attention))
    if re.fullmatch(r"[\w.]+:[\w.]+", source):
        return _of_module(source, _from_import(source))
    raise ValueError(
        f"MODEL must be a parameter count (124M), a config.json or package.module:factory, "
        f"not {source!r}"
    )


def _count(text: str) -> int | None:
    match = re.fullmatch(r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)([KMBTkmbt]?)", text)
    if not match:
        return None
    number, factor = re.sub("[,_]", "", match[1]), _SUFFIXES[match[2].upper()]
    count = int(number) * factor if number.isdigit() else round(float(number) * factor)
    if count < 1:
        raise ValueError(f"MODEL must have a parameter or more, not {text}")
    return count


def _of_count(name: str, count: int) -> Model:
    """A decoder of so many weights: layers of 12 square matrices, an embedding, and a vector."""
    width = max(64, round((count * _WIDTH_PER_LAYER / 12) ** (1 / 3) / 64) * 64)
    layers, rest = divmod(count, 12 * width**2)
    rows, rest = divmod(rest, width)
    attention = [torch.Size([width, width])] * 4
    shapes = [torch.Size([rows, width])] * bool(rows)
    shapes += [*attention, torch.Size([4 * width, width]), torch.Size([width, 4 * width])] * layers
    shapes += [torch.Size([rest])] * bool(rest)
    matrices = shapes[bool(rows) :][: 6 * layers]
    return Model(name, tuple(shapes), adapted=tuple(matrices))


def with_adapters(model: Model, rank: int) -> Model:
    """The model with LoRA's adapters at all linear layers, the only weights that are trained.

    Raises:
        ValueError: without peft, if it finds no linear layer, or for a model with frozen weights.
    """
    if model.frozen:
        raise ValueError("LoRA is left out: the model has frozen weights, as one with adapters")
    if model.make is None:
        shapes = [torch.Size(each) for o, i in model.adapted for each in ((rank, i), (o, rank))]
        return Model(model.name, tuple(shapes), model.parameters)
    try:
        peft = importlib.import_module("peft")
    except ImportError:
        raise ValueError("LoRA needs peft: pip install peft") from None
    make = model.make

    def adapted() -> torch.nn.Module:
        return peft.get_peft_model(make(), peft.LoraConfig(r=rank, target_modules="all-linear"))

    found = _of_module(model.name, adapted)
    return found._replace(stacks=model.stacks, is_transformers=model.is_transformers)


def _of_module(name: str, make: Callable[[], torch.nn.Module]) -> Model:
    try:
        with torch.device("meta"):
            module = make()
    except Exception as error:  # whatever the model's own code raises
        raise ValueError(f"MODEL {name} cannot be made: {error}") from error
    weights = list(module.parameters())
    return Model(
        name,
        tuple(weight.shape for weight in weights if weight.requires_grad),
        sum(weight.numel() for weight in weights if not weight.requires_grad),
        sum(buffer.numel() for buffer in module.buffers()),
        make,
        stacks=tuple(name for name, _ in stacks(module)),
        is_transformers=hasattr(module, "gradient_checkpointing_enable"),
    )


def _from_config(path: Path, attention: str) -> Callable[[], torch.nn.Module]:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise ValueError(f"MODEL {path} needs transformers: pip install transformers") from None
    if not path.is_file():
        raise ValueError(f"MODEL {path} does not exist")
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"MODEL {path} is no configuration of a model: {error}") from None
    implementation = "eager" if attention == "eager" else "sdpa"
    names = [name for name in config.architectures or () if hasattr(transformers, name)]
    family = getattr(transformers, names[0]) if names else transformers.AutoModel
    build: Any = family.from_config if not names else family._from_config

    def make() -> torch.nn.Module:
        try:
            return build(config, attn_implementation=implementation)
        except ValueError:  # a model without this implementation
            return build(config)

    return make


def _from_import(source: str) -> Callable[[], torch.nn.Module]:
    module, _, names = source.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"MODEL {source} cannot be imported: {error}") from None
    if not callable(found):
        raise ValueError(f"MODEL {source} is not callable")

    def make() -> torch.nn.Module:
        model = found()
        if not isinstance(model, torch.nn.Module):
            raise ValueError(f"it must be a torch.nn.Module, not {type(model).__name__}")
        return model

    return make
