"""Groups of a model's weights, as an optimizer wants them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from fusedstep._api.base import FusedOptimizer
from fusedstep._api.names import find
from fusedstep._api.unknown import check_keys
from fusedstep._matrix.low_rank import LowRankOptimizer
from fusedstep._models.patterns import as_patterns, check_patterns, matches
from fusedstep._models.roles import (
    EMBEDDINGS,
    HIDDEN,
    PARTS,
    ROLES,
    UNDECAYED,
    Weight,
    is_flat,
    own_undecayed,
    roles_of,
    why_no_roles,
)
from fusedstep._state.checks import did_you_mean
from fusedstep._state.codes import BLOCKS
from fusedstep.optim.muon import Muon
from fusedstep.optim.musgd import MuSGD

NoDecay = Sequence[str] | Literal["auto"]
Rules = Mapping[str | type[nn.Module], str | Mapping[str, Any]]

#: Options of a constructor that decide what groups there are.
DECIDING = ("rank", "state_dtype", "adjust_lr_fn")

#: The learning rate of groups that AdamW steps in Muon: that of Muon's authors.
_LR_BESIDE_MUON = 3e-4


class Groups(list[dict[str, Any]]):
    """Groups of parameters, which any optimizer takes. ``print`` shows them in a table."""

    def __init__(self, name: str, groups: Iterable[dict[str, Any]], weights: list[_Told]) -> None:
        super().__init__(groups)
        self._name = name
        self._weights = {each.of.name: each for each in weights}
        self._keys = [[key for key in group if key != "params"] for group in self]

    def __repr__(self) -> str:
        """One line for each role of each group: weights, elements, examples, options; and notes."""
        head = ("group", "role", "weights", "elements", "options", "names")
        rows, notes = [], dict[str, list[str]]()
        for index, (group, keys) in enumerate(zip(self, self._keys, strict=False)):
            options = ", ".join(f"{key}={_shown(group[key])}" for key in keys if key in group)
            by_role: dict[str, list[Weight]] = {}
            for name in _names_in(group):
                told = self._weights[name]
                by_role.setdefault(told.of.role, []).append(told.of)
                for note in filter(None, told.notes):
                    notes.setdefault(note, []).append(name)
            for role, weights in by_role.items():
                elements = sum(each.weight.numel() for each in weights)
                if not any(each.weight.requires_grad for each in weights):
                    role += ", frozen"
                names = _few([each.name for each in weights])
                numbers = f"{len(weights):,}", f"{elements:,}"
                rows.append((str(index), role, *numbers, options or "–", names))
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(5)]
        lines = [f"Groups for {self._name}"]
        for row in (head, *rows):
            cells = [
                cell.rjust(width) if column in (2, 3) else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=False))
            ]
            lines.append("  ".join([*cells, row[-1]]))
        lines += [f"  {_few(names)}: {note}" for note, names in notes.items()]
        return "\n".join(lines)


class _Told(NamedTuple):
    """A weight, and what the table tells of it."""

    of: Weight
    notes: tuple[str, ...]


class _Part(NamedTuple):
    """What the class wants for a weight."""

    options: dict[str, Any]
    is_main: bool = True
    """False for a weight that Muon's part does not step, or that has no rank."""
    notes: tuple[str, ...] = ()


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, torch.dtype) else repr(value)


def _few(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2:,} more" if len(names) > 2 else "")


def _names_in(group: Mapping[str, Any]) -> list[str]:
    """The names of a group's weights, also after an optimizer has taken it."""
    return group.get("param_names") or [name for name, _ in group["params"]]


def groups(
    model: nn.Module,
    for_: str,
    *,
    no_decay: NoDecay = "auto",
    others: Mapping[str, Any] | None = None,
    rules: Rules | None = None,
    **options: Any,
) -> Groups:
    """Returns the weights of a model in the groups that an optimizer wants.

    >>> groups = optim.groups(model, for_="muon", others={"lr": 3e-4, "betas": (0.9, 0.95)})
    >>> print(groups)
    >>> optimizer = optim.Muon(groups, lr=0.02)

    Each weight has a role; ``print`` shows one line for each role of a group, with the group's
    options. Roles are ``matrix`` (of a linear layer), ``fused qkv``, ``fused kv`` and
    ``fused gate`` (several layers in one weight), ``recurrent`` (LSTM, GRU), ``experts`` (one by
    one, or in one stack), ``stack`` (other weights of three dimensions), ``convolution``,
    ``depthwise convolution``, ``first convolution`` (patch embeddings, and the layer that reads the
    image), ``embedding``, ``tied embedding`` (it is the head too), ``position`` (tokens and
    positions that are parameters of a module), ``head``, ``router``, ``LoRA``, ``norm``, ``bias``
    and ``vector`` (other weights that are no matrix: numbers, one long side, logarithms). Frozen
    weights have theirs too.

    ========================  ======================================================================
    ``for_``                  groups
    ========================  ======================================================================
    ``muon``                  Muon steps the roles from ``matrix`` to ``convolution``. Fused weights
                              of equal blocks of rows, and grouped convolutions, have
                              ``split_heads``; convolutions in one dimension ``stacked=False``.
                              AdamW steps all others, with ``lr=3e-4``, that of Muon's authors
    ``musgd``                 ``use_muon=True`` for what has two dimensions or more, but for
                              embeddings, positions, norms and stacks
    ``galoreadamw``,          ``rank`` for matrices of the roles from ``matrix`` to ``experts``: the
    ``apolloadamw``, …        one that is given, or a quarter of the shorter side
    states in codes           ``state_dtype=torch.float32`` for embeddings, as the authors of 8-bit
                              states advise
    all                       ``weight_decay=0`` for what ``no_decay`` says
    ========================  ======================================================================

    A layer of query, key and value, or of a gate, is known by its name and by the inputs of the
    layer after it. The last layer is what ``get_output_embeddings()`` or
    ``get_classifier()`` returns, has a usual name, or is the last linear layer outside of repeated
    blocks. What was guessed is told below the table. Unequal blocks, and those along the columns of
    transformers' ``Conv1D``, are told too, and are one matrix.

    Args:
        model (Module): whose weights are grouped
        for_ (str): one of :func:`names`. Case, ``_`` and ``-`` do not matter
        no_decay (sequence of str or "auto", optional): whose ``weight_decay`` is 0. ``"auto"``: the
            roles ``norm``, ``bias``, ``vector`` and ``position``, and what ``no_weight_decay()`` of
            a model of timm returns; else patterns, as :func:`create` has them (default: "auto")
        others (dict, optional): options of the groups without Muon's part, or without a rank
            (default: none)
        rules (dict, optional): for patterns of whole names, as :mod:`fnmatch` has them, or classes
            of modules: a role, or options that replace those of a weight. All that match count, in
            their order (default: none)
        options: of the optimizer, where they decide about groups: ``rank``, ``state_dtype``,
            ``adjust_lr_fn``. The groups have them. With ``adjust_lr_fn="match_rms_adamw"`` one
            ``lr`` is that of all groups

    Warns:
        of a ``rank`` that is larger than the shorter side of every matrix: no weight has it.

    Raises:
        TypeError: ``model`` is no Module; an option that decides nothing; ``others`` for an
            optimizer that has no such groups.
        ValueError: the name is none of an optimizer; a pattern, a class or a role that matches
            nothing; keys of options that are misspelt; weights that FSDP1 or ZeRO-3 has flattened.
    """
    cls = find(for_)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {model!r:.60}")
    for name in options:
        if name not in DECIDING or name not in inspect.signature(cls).parameters:
            known = [each for each in DECIDING if each in inspect.signature(cls).parameters]
            raise TypeError(
                f"{name!r} decides about no groups of {cls.__name__}: "
                f"{did_you_mean(name, known) or f'options are {known}'}"
            )
    return Grouping(cls, no_decay, others, rules, options).of(model)


def _of_muon(weight: Weight, options: Mapping[str, Any]) -> _Part:
    given = {name: options[name] for name in ("adjust_lr_fn",) if name in options}
    if weight.role not in HIDDEN:
        one_lr = given.get("adjust_lr_fn") == "match_rms_adamw"
        own = {} if one_lr else {"lr": _LR_BESIDE_MUON}
        return _Part({"use_muon": False} | own, False, (weight.guess,))
    if weight.parts > 1:
        given["split_heads"] = weight.parts
    if is_flat(weight.weight, weight.modules):
        given["stacked"] = False
    return _Part(given, notes=(weight.guess, weight.layout))


def _of_musgd(weight: Weight, options: Mapping[str, Any]) -> _Part:
    is_row = weight.role in EMBEDDINGS | UNDECAYED | {"stack"}
    is_stack = weight.weight.ndim == 3 and not is_flat(weight.weight, weight.modules)
    if is_row or is_stack or weight.weight.ndim < 2:
        return _Part({}, False)
    return _Part({"use_muon": True})


def _of_low_rank(weight: Weight, options: Mapping[str, Any]) -> _Part:
    if weight.role not in HIDDEN or weight.weight.ndim != 2:
        return _Part({"rank": None}, False, (weight.guess,))
    rank, side = options.get("rank"), min(weight.weight.shape)
    if rank is not None and side < rank:
        return _Part({"rank": None}, False, (f"a side is shorter than the rank of {rank}",))
    return _Part({"rank": max(1, side // 4) if rank is None else rank}, notes=(weight.guess,))


def part_of(cls: type[FusedOptimizer]) -> Callable[[Weight, Mapping[str, Any]], _Part] | None:
    """What a class wants for a weight by its role; None if it steps all in one way."""
    return next((part for base, part in _PARTS.items() if issubclass(cls, base)), None)


_PARTS: dict[type, Callable[[Weight, Mapping[str, Any]], _Part]] = {
    Muon: _of_muon,
    MuSGD: _of_musgd,
    LowRankOptimizer: _of_low_rank,
}


class Grouping:
    """How the weights of a model become groups of a class. The constructor raises what is wrong."""

    def __init__(
        self,
        cls: type[FusedOptimizer],
        no_decay: NoDecay,
        others: Mapping[str, Any] | None,
        rules: Rules | None,
        options: Mapping[str, Any],
    ) -> None:
        self._cls, self._options, self._rules = cls, dict(options), dict(rules or {})
        self._part = part_of(cls)
        self._others = dict(others or {})
        if self._others and self._part is None:
            raise TypeError(f"others={others!r}: {cls.__name__} steps all groups in one way")
        check_keys(cls, self._others)
        self._patterns = as_patterns(no_decay)
        has_decay = "weight_decay" in inspect.signature(cls).parameters
        if not has_decay and self._patterns:
            raise ValueError(f"no_decay={no_decay!r}: {cls.__name__} has no weight_decay")
        self._is_auto = has_decay and no_decay == "auto"
        for key, rule in self._rules.items():
            is_class = isinstance(key, type) and issubclass(key, nn.Module)
            if not (is_class or isinstance(key, str)):
                raise TypeError(f"rules: {key!r:.60} is no pattern, and no class of modules")
            if isinstance(rule, Mapping):
                check_keys(cls, rule)
            elif rule not in ROLES:
                near = did_you_mean(str(rule), ROLES) or f"roles are {', '.join(ROLES)}"
                raise ValueError(f"rules: {rule!r:.60} is no role: {near}")

    def of(self, model: nn.Module) -> Groups:
        if (self._part or self._is_auto) and (reason := why_no_roles(model)):
            raise ValueError(f"roles of weights follow from their shapes, but {reason}")
        weights = [self._by_rule(weight) for weight in roles_of(model)]
        self._check_rules(weights)
        check_patterns(self._patterns, [(each.names, _kinds(each)) for each in weights])
        undecayed = own_undecayed(model) if self._is_auto else set()
        found: dict[tuple[Any, ...], dict[str, Any]] = {}
        told = []
        for weight in weights:
            part = self._part(weight, self._options) if self._part else _Part({})
            options = self._options_of(weight, part, undecayed)
            is_last = not part.is_main, options.get("weight_decay") == 0
            key = (*is_last, *((name, repr(value)) for name, value in options.items()))
            group = found.setdefault(key, {"params": []} | options)
            group["params"].append((weight.name, weight.weight))
            told.append(_Told(weight, part.notes))
        self._check_rank(found.values())
        ordered = [found[key] for key in sorted(found, key=lambda key: key[:2])]
        return Groups(self._cls.__name__, ordered, told)

    def _by_rule(self, weight: Weight) -> Weight:
        """A weight in the role that the rules give it."""
        for key, rule in self._rules.items():
            if isinstance(rule, str) and _is_meant(key, weight):
                weight = weight._replace(role=rule, parts=PARTS.get(rule, 1), guess="", layout="")
        return weight

    def _options_of(self, weight: Weight, part: _Part, undecayed: set[str]) -> dict[str, Any]:
        asked = {k: value for k, value in self._options.items() if k == "state_dtype"}
        options = asked | part.options
        if weight.role in EMBEDDINGS and self._has_codes():
            options["state_dtype"] = torch.float32
        if not part.is_main:
            options |= self._others
        if self._is_auto:
            decays = weight.role not in UNDECAYED and undecayed.isdisjoint(weight.names)
        else:
            decays = not matches(weight.names, _kinds(weight), self._patterns)
        if not decays:
            options["weight_decay"] = 0.0
        for key, rule in self._rules.items():
            if not isinstance(rule, str) and _is_meant(key, weight):
                options |= rule
        return options

    def _has_codes(self) -> bool:
        return self._options.get("state_dtype", self._cls._usual_codes) in BLOCKS

    def _check_rank(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Warns of a rank that no weight has, though it was given."""
        rank = self._options.get("rank")
        if rank is not None and all(group.get("rank") is None for group in groups):
            warnings.warn(
                f"rank={rank} is larger than the shorter side of every matrix of the model: "
                f"{self._cls.__name__} projects no weight, and its states have full size",
                stacklevel=4,
            )

    def _check_rules(self, weights: list[Weight]) -> None:
        for key in self._rules:
            if any(_is_meant(key, weight) for weight in weights):
                continue
            if isinstance(key, str) and any(_is_meant(f"*{key}*", weight) for weight in weights):
                near = f"patterns are of whole names, as {f'*{key}*'!r}"
            elif isinstance(key, str):
                near = did_you_mean(key, [name for weight in weights for name in weight.names])
            else:
                near = did_you_mean(key.__name__, {k for each in weights for k in _kinds(each)})
            raise ValueError(f"rules: no weight matches {key!r}{near and f': {near}'}")


def _is_meant(key: str | type[nn.Module], weight: Weight) -> bool:
    if isinstance(key, str):
        return any(fnmatchcase(name, key) for name in weight.names)
    return any(isinstance(module, key) for module in weight.modules)


def _kinds(weight: Weight) -> tuple[str, ...]:
    return tuple(type(module).__name__ for module in weight.modules)
