"""What each weight of a model is for: a matrix, an embedding, the head, a norm, …

Classes of modules and models' own methods say so for most weights. Names and shapes are guesses,
which a note tells.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor, nn

#: Each with its weights. Muon steps those of ``HIDDEN``; nothing decays those of ``UNDECAYED``.
ROLES: dict[str, str] = {
    "matrix": "of a linear layer",
    "fused qkv": "query, key and value in one weight",
    "fused kv": "key and value in one weight",
    "fused gate": "gate and value of a gated layer in one weight",
    "recurrent": "the gates of an LSTM or GRU in one weight",
    "experts": "of experts, one by one or in one stack",
    "stack": "three dimensions, in no module that is known",
    "convolution": "filters",
    "depthwise convolution": "one filter for each channel",
    "first convolution": "patch embeddings, and the layer that reads the image",
    "embedding": "rows that are looked up",
    "tied embedding": "an embedding that is the head too",
    "position": "tokens and positions that are parameters of a module",
    "head": "the last layer",
    "router": "chooses experts",
    "LoRA": "low-rank weights of an adapter",
    "norm": "of norms",
    "bias": "biases",
    "vector": "other weights that are no matrix: numbers, one long side, logarithms",
}

HIDDEN = frozenset(
    {"matrix", "fused qkv", "fused kv", "fused gate", "recurrent", "experts", "stack"}
    | {"convolution"}
)
#: The equal blocks of rows of weights that are given such a role.
PARTS = {"fused qkv": 3, "fused kv": 2, "fused gate": 2}
UNDECAYED = frozenset({"norm", "bias", "vector", "position"})
EMBEDDINGS = frozenset({"embedding", "tied embedding"})


class Weight(NamedTuple):
    """A weight of a model, and what it is for."""

    name: str
    weight: Tensor
    modules: tuple[nn.Module, ...]
    """That hold it: several, if it is tied."""
    names: tuple[str, ...]
    """In these modules, the first one first."""
    role: str
    parts: int = 1
    """Of how many equal blocks of rows its matrices are, each a matrix of its own."""
    guess: str = ""
    """Why it has its role, where that was guessed."""
    layout: str = ""
    """What its blocks are, where that was guessed or is not seen to."""


class _Found(NamedTuple):
    role: str
    parts: int = 1
    guess: str = ""
    layout: str = ""


class _Place(NamedTuple):
    """Where a weight is."""

    path: tuple[str, ...]
    """The parts of its module's name, without those that adapters put in."""
    own: str
    """Its name in the module."""
    module: nn.Module


#: Parts of names that peft, torch.compile and DDP put in.
_WRAPPING = frozenset({"base_layer", "base_model", "modules_to_save", "original_module"}) | {
    *("_orig_mod", "default", "module")
}

#: Names of last layers, in the order of preference.
_HEADS = (
    *("lm_head", "embed_out", "head", "heads", "classifier", "score", "qa_outputs", "fc", "fc_out"),
    *("output_layer", "output", "out"),
)

_IS_POSITION = re.compile("embed|position|pos_|token|latent|prompt|register")
_IS_ROUTER = re.compile("^(gate|gating|wg)$|router|expert_gate$")
_IS_LOGARITHM = re.compile("(^|_)log$")
_IS_QKV = re.compile("qkv|^c_attn$|^query_key_value$", re.IGNORECASE)
#: Names that say of nothing else in the weight, as ``qkvz`` and ``qkv_mlp`` do.
_IS_QKV_ALONE = re.compile("(qkv(_?(proj|linear|layer))?|in_proj_weight|c_attn)$", re.IGNORECASE)
_IS_KV = re.compile("^(kv|to_kv|w_?kv|kv_proj)$", re.IGNORECASE)
_IS_GATE = re.compile("gate_up|^(w12|w13|fc1|wi)$", re.IGNORECASE)
_AFTER_GATE = re.compile("^(down_proj|w2|w3|fc2|wo)$", re.IGNORECASE)
_AFTER_QKV = re.compile("^(o|o_proj|out_proj|proj|c_proj|dense|wo|to_out|out)$", re.IGNORECASE)

_IN_OUT = "[in, out]: the ratio of rows to columns is the inverse"

_GATES: dict[str, int] = {"LSTM": 4, "GRU": 3}


def roles_of(model: nn.Module) -> list[Weight]:
    """Returns the weights of a model with their roles, in the order of ``named_parameters()``."""
    places: dict[int, list[_Place]] = {}
    names: dict[int, list[str]] = {}
    by_path = dict(model.named_modules())
    for prefix, module in by_path.items():
        for own, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(weight), []).append(_place_of(weight, prefix, own, by_path))
            names.setdefault(id(weight), []).append(f"{prefix}.{own}" if prefix else own)
    judge = _Judge(model, places)
    found = []
    for name, weight in model.named_parameters():
        of = judge.role_of(weight)
        modules = tuple(place.module for place in places[id(weight)])
        held = tuple(names[id(weight)])
        found.append(Weight(name, weight, modules, held, *of))
    return found


def embeddings(model: nn.Module) -> set[int]:
    """The id() of each weight that is an embedding, or tied to one."""
    return {id(each.weight) for each in roles_of(model) if each.role in EMBEDDINGS}


def _place_of(weight: Tensor, prefix: str, own: str, modules: Mapping[str, nn.Module]) -> _Place:
    """The place that a weight had before a norm or a mask took the weight apart."""
    module, path = modules[prefix], prefix.split(".")
    if own.startswith("original") and path[-2:-1] == ["parametrizations"]:
        own = own if _has_one_side(weight) else path[-1]
        path = path[:-2]
        module = modules[".".join(path)]
    elif own in ("weight_v", "weight_orig"):
        own = "weight"
    return _Place(tuple(part for part in path if part and part not in _WRAPPING), own, module)


class _Judge:
    """Finds roles; of neighbours it asks names and shapes."""

    def __init__(self, model: nn.Module, places: Mapping[int, list[_Place]]) -> None:
        self._places = places
        weights = {id(weight): weight for weight in model.parameters()}
        #: The sides (outputs, inputs) of linear layers and of stacks of experts, by path.
        self._sides: dict[tuple[str, ...], tuple[int, int]] = {}
        for key, at in places.items():
            for path, own, module in at:
                if weights[key].ndim in (2, 3) and "lora" not in own:
                    path = path if own == "weight" else (*path, own)
                    self._sides.setdefault(path, _sides_of(module, weights[key]))
        self._in_out = _stacks_of_columns(self._sides)
        self._sides |= {path: self._sides[path][::-1] for path in self._in_out}
        #: The layers below a module, by what comes after its path, with their inputs.
        self._below: dict[tuple[str, ...], dict[tuple[str, ...], int]] = {}
        for path, (_, inputs) in self._sides.items():
            for depth in (1, 2)[: len(path)]:
                self._below.setdefault(path[:-depth], {})[path[-depth:]] = inputs
        self._has_experts = {
            path[:cut]
            for at in places.values()
            for path, own, _ in at
            for cut, part in enumerate((*path, own))
            if "expert" in part and "gate" not in part
        }
        self._first = next(
            (id(each.weight) for each in model.modules() if _is_convolution(each)), None
        )
        self._heads, self._guessed_head = _heads_of(model)

    def role_of(self, weight: Tensor) -> _Found:
        at = self._places[id(weight)]
        path, own, module = at[0]
        if "norm" in type(module).__name__.lower() and not _is_linear(module):
            return _Found("norm")
        if weight.ndim < 2:
            return _Found("bias" if "bias" in own else "vector")
        if any("lora_" in part for part in (*path, own)):
            return _Found("LoRA")
        if own != "weight" and _IS_POSITION.search(own):
            return _Found("position")
        if own != "weight" and "bias" in own:
            return _Found("bias")
        if own != "weight" and (_has_one_side(weight) or _IS_LOGARITHM.search(own)):
            return _Found("vector")
        if any(_is_embedding(place.module) for place in at if place.own == "weight"):
            is_tied = id(weight) in self._heads or any(_is_linear(place.module) for place in at)
            return _Found("tied embedding" if is_tied else "embedding")
        if id(weight) in self._heads:
            guess = "guessed: the last linear layer outside of repeated blocks"
            return _Found("head", guess=guess if self._guessed_head else "")
        if isinstance(module, nn.modules.conv._ConvNd):
            return self._of_convolution(path, module, weight)
        if isinstance(module, nn.RNNBase):
            return _Found("recurrent", _GATES.get(module.mode, 1))
        if isinstance(module, nn.MultiheadAttention) and own == "in_proj_weight":
            return _Found("fused qkv", 3)
        return self._of_matrix(path if own == "weight" else (*path, own), module, weight)

    def _of_convolution(self, path: tuple[str, ...], module: Any, weight: Tensor) -> _Found:
        if module.groups > 1 and weight.shape[1] == 1:
            return _Found("depthwise convolution")
        if any("patch_embed" in part for part in path):
            return _Found("first convolution")
        if id(weight) == self._first:
            return _Found("first convolution", guess="guessed: the first of the model")
        return _Found("convolution", module.groups)

    def _of_matrix(self, path: tuple[str, ...], module: nn.Module, weight: Tensor) -> _Found:
        last = path[-1] if path else ""
        is_router = any(map(_IS_ROUTER.search, (*path[-2:], type(module).__name__.lower())))
        if weight.ndim == 2 and is_router and {path[:-1], path[:-2]} & self._has_experts:
            return _Found("router")
        is_expert = any("expert" in part for part in path)
        if weight.ndim > 3:
            return _Found(
                "convolution", guess="guessed: all dimensions but the first are flattened"
            )
        has_columns = _has_columns(module, weight) or path in self._in_out
        fused = self._fused(path, last, has_columns)
        layout = _IN_OUT if has_columns else ""
        if is_expert:
            return (fused or _Found("experts", layout=layout))._replace(role="experts")
        if weight.ndim == 3:
            return _Found("stack", guess="guessed: matrices of the last two dimensions")
        if fused:
            return fused
        if layout:
            return _Found("matrix", layout=layout)
        guess = f"guessed: a parameter of {type(module).__name__}"
        return _Found("matrix", guess="" if _is_linear(module) else guess)

    def _fused(self, path: tuple[str, ...], last: str, in_columns: bool) -> _Found | None:
        """What a weight is that several layers are in, by its name and its neighbours' shapes."""
        outputs, inputs = self._sides.get(path, (0, 0))
        if _IS_KV.search(last) and outputs % 2 == 0:
            return _blocks("fused kv", 2, "k and v", in_columns, "by its name")
        if _IS_GATE.search(last):
            after, width = self._after(path, _AFTER_GATE)
            if width and outputs == 2 * width:
                why = f"by the {width} inputs of {after}"
                return _blocks("fused gate", 2, "gate and value", in_columns, why)
            return None
        if not _IS_QKV.search(last):
            return None
        if last == "query_key_value":
            return _Found("fused qkv", layout="rows of q, k and v may alternate: one matrix")
        after, width = self._after(path, _AFTER_QKV)
        if not _IS_QKV_ALONE.search(last):
            inputs = width = 0
        if outputs == 3 * (width or inputs):
            why = f"by the {width} inputs of {after}" if width else "by its sides"
            return _blocks("fused qkv", 3, "q, k and v", in_columns, why)
        if width and outputs > width and (outputs - width) % 2 == 0:
            other = (outputs - width) // 2
            rows = f"{width}, {other} and {other} rows"
            layout = f"guessed by the {width} inputs of {after}: q, k, v of {rows} are one matrix"
            if not in_columns:
                layout += f", and three with split_sizes={width, other, other}"
            return _Found("fused qkv", layout=layout)
        return _Found(
            "fused qkv",
            layout="guessed by its name: one matrix, since nothing tells whose rows are whose",
        )

    def _after(self, path: tuple[str, ...], names: re.Pattern[str]) -> tuple[str, int]:
        """The layer of such a name beside another one, and its inputs."""
        for parent in (path[:-1], path[:-2]):
            for below, inputs in self._below.get(parent, {}).items():
                if (*parent, *below) != path and any(map(names.search, below)):
                    return ".".join(below), inputs
        return "", 0


def _blocks(role: str, parts: int, what: str, in_columns: bool, why: str) -> _Found:
    if in_columns:
        return _Found(role, layout=f"guessed {why}: {what} lie along columns, and are one matrix")
    return _Found(role, parts, layout=f"guessed {why}: {what} are equal blocks of rows")


def _is_embedding(module: nn.Module) -> bool:
    is_torchs = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    return is_torchs or "embedding" in type(module).__name__.lower()


def _is_linear(module: nn.Module) -> bool:
    is_torchs = isinstance(module, (nn.Linear, nn.MultiheadAttention))
    return is_torchs or "linear" in type(module).__name__.lower()


def _has_columns(module: nn.Module, weight: Tensor) -> bool:
    """Returns whether a weight is [in, out], as in transformers' Conv1D."""
    return weight.ndim == 2 and type(module).__name__ == "Conv1D"


def _sides_of(module: nn.Module, weight: Tensor) -> tuple[int, int]:
    *_, rows, columns = weight.shape
    return (columns, rows) if _has_columns(module, weight) else (rows, columns)


def _has_one_side(weight: Tensor) -> bool:
    return sum(side > 1 for side in weight.shape) < 2


def _stacks_of_columns(sides: Mapping[tuple[str, ...], tuple[int, int]]) -> set[tuple[str, ...]]:
    """The stacks of experts that are [E, in, out], as the shapes of gate and next layer tell."""
    found = set[tuple[str, ...]]()
    stacks = [path for path in sides if path[-2:-1] == ("experts",)]
    gates = [path for path in stacks if _IS_GATE.search(path[-1])]
    for gate in gates:
        rows, columns = sides[gate]
        for path in stacks:
            inputs, outputs = sides[path]
            is_next = path[:-1] == gate[:-1] and _AFTER_GATE.search(path[-1])
            if is_next and (rows, columns) == (outputs, 2 * inputs):
                found |= {gate, path}
    return found


def _is_convolution(module: nn.Module) -> bool:
    """Returns whether it may be the first one: not one of each channel alone."""
    return isinstance(module, nn.modules.conv._ConvNd) and module.groups == 1


def _heads_of(model: nn.Module) -> tuple[set[int], bool]:
    """The id() of each weight of the last layer, and whether it was guessed."""
    found, is_told = set(), False
    for module in model.modules():
        for name in ("get_output_embeddings", "get_classifier"):
            method = getattr(module, name, None)
            if callable(method):
                is_told = True
                found |= {id(weight) for weight in _weights_of(method) if weight.ndim >= 2}
    if found:
        return found, False
    blocks = set(_repeated(model))
    linear = {
        ".".join(part for part in path.split(".") if part not in _WRAPPING): module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and blocks.isdisjoint(_with_parents(path))
    }
    for name in _HEADS:
        named = [path for path in linear if path.rpartition(".")[2] == name]
        if named:
            return _matrices_of(linear[named[-1]]), False
    if is_told or not linear:
        return set(), False
    return _matrices_of([*linear.values()][-1]), True


def _matrices_of(module: nn.Module) -> set[int]:
    """The id() of each matrix of a module. A weight norm splits one matrix into two weights."""
    return {id(weight) for weight in module.parameters() if weight.ndim >= 2}


def _weights_of(method: Callable[[], Any]) -> Iterable[Tensor]:
    """The weights of the modules that a method of a model returns."""
    try:
        returned = method()
    except (AttributeError, NotImplementedError, TypeError):  # it has none, or wants arguments
        return []
    modules = returned if isinstance(returned, (list, tuple)) else [returned]
    return [
        weight
        for module in modules
        if isinstance(module, nn.Module)
        for weight in module.parameters()
    ]


def _with_parents(path: str) -> Iterable[str]:
    """The names of a module's parents from the outermost on, and its own."""
    return accumulate(path.split("."), "{}.{}".format)


def _repeated(model: nn.Module) -> Iterable[str]:
    """The names of blocks that repeat: a parent has several modules of one class, or a list."""
    for prefix, module in model.named_modules():
        children = [each for each in module.named_children() if any(each[1].children())]
        count = Counter(type(child) for _, child in children)
        for name, child in children:
            if count[type(child)] > 1 or isinstance(module, nn.ModuleList):
                yield f"{prefix}.{name}" if prefix else name


def why_no_roles(model: nn.Module) -> str:
    """Says why the shapes of a model's weights tell nothing; no text if they do."""
    if any(type(each).__name__ == "FullyShardedDataParallel" for each in model.modules()):
        return "FSDP1 has flattened the weights: FSDP2 (fully_shard) keeps their shapes"
    if any(hasattr(weight, "ds_shape") for weight in model.parameters()):
        return "ZeRO-3 has taken the weights apart: make the groups before deepspeed.initialize()"
    return ""


def own_undecayed(model: nn.Module) -> set[str]:
    """The names of weights that a model itself wants not to decay, as those of timm say."""
    found = set()
    for prefix, module in model.named_modules():
        method = getattr(module, "no_weight_decay", None)
        told = method() if callable(method) else ()
        found |= {f"{prefix}.{name}" if prefix else name for name in told if isinstance(name, str)}
    return found


def is_flat(weight: Tensor, modules: Iterable[nn.Module]) -> bool:
    """Returns whether a weight of three dimensions is one matrix: filters along one dimension."""
    return weight.ndim == 3 and any(isinstance(each, nn.modules.conv._ConvNd) for each in modules)
