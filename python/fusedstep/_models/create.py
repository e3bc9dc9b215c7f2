"""Makes an optimizer by its name, with the groups that it wants."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedstep._api.base import FusedOptimizer
from fusedstep._api.foreign import FOREIGN
from fusedstep._api.names import find
from fusedstep._models.groups import DECIDING, Grouping, NoDecay, Rules, part_of
from fusedstep._models.patterns import as_patterns, check_patterns, matches
from fusedstep._models.presets import preset_of
from fusedstep._state.checks import did_you_mean


def create(
    name: str,
    params: torch.nn.Module | ParamsT,
    *,
    preset: str | None = None,
    no_decay: NoDecay | None = None,
    others: Mapping[str, Any] | None = None,
    rules: Rules | None = None,
    **options: Any,
) -> FusedOptimizer:
    """Returns the optimizer of a name for a model or parameters.

    >>> optimizer = optim.create("adamw", model, lr=1e-3, no_decay="auto")
    >>> optimizer = optim.create("muon", model, lr=0.02, others={"lr": 3e-4})

    The weights of a model come into the groups that :func:`groups` makes for the optimizer: Muon's
    and AdamW's, those with a rank, embeddings with float32 states beside states in codes, and those
    with and without weight decay.

    Weights that ``no_decay`` matches have a group of their own, whose ``weight_decay`` is 0. A
    pattern matches a weight if a part of its name, between dots, contains it; so ``"norm"`` matches
    ``layers.0.norm1.weight`` and ``final_layernorm.bias``. A pattern with a dot is searched in the
    whole name. If ``params`` is a model, the class of the module that holds the weight counts as a
    part too: ``"norm"`` matches the weights of a ``LayerNorm`` whatever their names. Case does not
    matter. Shapes do not either.

    A preset is what a paper has published; options that are given replace its own. The learning
    rate is that of the paper's model and batch, and the schedule is left to you:

    ==============  ============  ================================================================
    ``preset``      optimizer     numbers, and their source
    ==============  ============  ================================================================
    ``gpt``         AdamW         lr 6e-4 (125 M parameters, 0.5 M tokens a batch): `GPT-3`_,
                                  table 2.1; betas (0.9, 0.95), eps 1e-8, decay 0.1, norm 1: its
                                  appendix B
    ``llama``       AdamW         lr 3e-4 (7 B), betas (0.9, 0.95), eps 1e-5, decay 0.1, norm 1:
                                  `Llama 2`_, table 1 and section 2.2
    ``bert``        AdamW         lr 1e-4 (batch 256), betas (0.9, 0.999), decay 0.01: `BERT`_,
                                  appendix A.2; eps 1e-6, norm 1: its `code`_, whose
                                  moments have no bias correction
    ``finetune``    AdamW         lr 2e-5, the lowest of the three that `BERT`_ advises in appendix
                                  A.3 for batches of 16 and 32; others as in ``bert``
    ``vit``         AdamW         lr 1e-3 (5e-4 for a batch of 512), decay 0.05, no clipping:
                                  `DeiT`_, table 9, with its batch of 1,024
    ``bert-lamb``   Lamb          lr 6.25e-4 (batch 512): `LAMB`_, table 4 in its appendix; betas
                                  (0.9, 0.999): its section 4; decay 0.01: Google's LAMB for
                                  `ALBERT`_, which also has eps 1e-6 and norm 1
    ``resnet``      SGD           lr 0.1 (batch 256), Nesterov's momentum 0.9, decay 1e-4, none of
                                  batch norms: `ImageNet in 1 Hour`_, section 5.1
    ``gpt``         Muon          lr 0.02, momentum 0.95, decay 0.01, and lr 3e-4 with betas (0.9,
                                  0.95) in groups of AdamW: the README of its `authors`_, who
                                  decay vectors too
    ``llama``       GaLoreAdamW   lr 0.01, a basis every 200 steps, scale 0.25, no decay, batch 512:
                                  the README of its `authors of GaLore`_, and their scripts for 60 M
                                  to 350 M parameters; for 7 B they have lr 5e-3, a basis every 500
                                  steps, and norm 1
    ==============  ============  ================================================================

    Norm is ``max_grad_norm``. A class with states in codes has the presets of its base. With a
    preset ``no_decay`` of a model is ``"auto"`` unless it is given.

    Args:
        name (str): one of :func:`names`. Case, ``_`` and ``-`` do not matter: ``"AdamW_8bit"`` is
            ``"adamw8bit"``
        params (Module or iterable): a model, or what the class takes: parameters, named parameters
            or dicts that define groups. Weights of a model are named in errors and in groups
            (``param_names``)
        preset (str, optional): a name of the table above (default: none)
        no_decay (sequence of str or "auto", optional): patterns of names of weights without weight
            decay, which need names: a model or named parameters. ``"auto"``, for a model: those of
            :func:`groups`. None is ``"auto"`` in Muon, MuSGD, GaLore and APOLLO and with a preset,
            else ``()`` (default: None)
        others, rules: of :func:`groups`, for a model
        options: of the class; an option that it lacks is an error that names the nearest

    Raises:
        TypeError: an option that the class lacks; ``name`` or a pattern is no text; ``others``,
            ``rules`` or ``no_decay="auto"`` without a model.
        ValueError: the name is none of an optimizer; ``no_decay`` with weights without names, or
            with a pattern that no weight matches; the optimizer has no such preset; what
            :func:`groups` and the class raise.

    .. _GPT-3:
        https://arxiv.org/abs/2005.14165
    .. _Llama 2:
        https://arxiv.org/abs/2307.09288
    .. _BERT:
        https://arxiv.org/abs/1810.04805
    .. _code:
        https://github.com/google-research/bert/blob/master/optimization.py
    .. _DeiT:
        https://arxiv.org/abs/2012.12877
    .. _LAMB:
        https://arxiv.org/abs/1904.00962
    .. _ALBERT:
        https://github.com/google-research/albert/blob/master/optimization.py
    .. _ImageNet in 1 Hour:
        https://arxiv.org/abs/1706.02677
    .. _authors:
        https://github.com/KellerJordan/Muon
    .. _authors of GaLore:
        https://github.com/jiaweizzhao/GaLore
    """
    cls = find(name)
    if preset is not None:
        published = preset_of(cls, preset)
        options, others = published.options | options, published.others | dict(others or {})
    accepted = inspect.signature(cls).parameters
    for option in options.keys() - accepted.keys() - FOREIGN.keys():
        near = did_you_mean(option, accepted)
        raise TypeError(f"{cls.__name__} has no option {option!r}{near and f': {near}'}")
    if isinstance(params, torch.nn.Module):
        if no_decay is None:
            no_decay = "auto" if part_of(cls) or preset is not None else ()
        deciding = {each: options[each] for each in DECIDING if each in options}
        params = Grouping(cls, no_decay, others, rules, deciding).of(params)
    elif others or rules or no_decay == "auto":
        raise TypeError("others, rules and no_decay='auto' need a model: pass it for params")
    elif patterns := as_patterns(no_decay or ()):
        groups = _groups(params)
        check_patterns(patterns, [([each], []) for group in groups for each in _names_of(group)])
        params = [half for group in groups for half in _halves(group, patterns)]
    return cls(params, **options)


def _groups(params: ParamsT) -> list[dict[str, Any]]:
    """Groups whose members are lists."""
    listed: list[Any] = list(params)
    if not (listed and isinstance(listed[0], dict)):
        return [{"params": listed}]
    return [
        group | {"params": [members] if isinstance(members, Tensor) else list(members)}
        for group in listed
        for members in [group["params"]]
    ]


def _names_of(group: dict[str, Any]) -> list[str]:
    if any(isinstance(member, Tensor) for member in group["params"]):
        raise ValueError("no_decay needs names: pass a model, or its named_parameters()")
    return [name for name, _ in group["params"]]


def _halves(group: dict[str, Any], patterns: tuple[str, ...]) -> list[dict[str, Any]]:
    """Returns those of a group with weight decay, and those without; no group is empty."""
    halves: tuple[list[Any], list[Any]] = [], []
    for member in group["params"]:
        halves[matches([member[0]], [], patterns)].append(member)
    with_decay, without = halves
    both = group | {"params": with_decay}, group | {"params": without, "weight_decay": 0.0}
    return [half for half in both if half["params"]]
