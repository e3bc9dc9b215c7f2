"""transformers: ``TrainingArguments(optim=...)`` selects optimizers of this package."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fusedstep import optim
from fusedstep._models.roles import embeddings
from fusedstep._state.checks import did_you_mean
from fusedstep.convert.forms import readable
from fusedstep.integrations._groups import (
    Groups,
    fit_schedule,
    listed,
    made_by,
    take_over,
    weights_of,
    written_as_theirs,
)
from fusedstep.integrations._replaced import Replaced

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

_Class = type[optim.FusedOptimizer]

#: Names of transformers' option, and the classes that they select where there is the class. Paged
#: optimizers stay bitsandbytes': these move states between the GPU and the host.
_NAMES = {
    "adamw_torch": "AdamW",
    "adamw_torch_fused": "AdamW",
    "adamw_torch_8bit": "AdamW8bit",
    "adamw_torch_4bit": "AdamW4bit",
    "adamw_bnb_8bit": "AdamW8bit",
    "adamw_8bit": "AdamW8bit",
    "adafactor": "Adafactor",
    "adagrad": "Adagrad",
    "lion_32bit": "Lion",
    "lion_8bit": "Lion8bit",
    "rmsprop": "RMSprop",
    "rmsprop_bnb": "RMSprop",
    "rmsprop_bnb_32bit": "RMSprop",
    "rmsprop_bnb_8bit": "RMSprop8bit",
    "sgd": "SGD",
    "galore_adamw": "GaLoreAdamW",
    "galore_adamw_8bit": "GaLoreAdamW8bit",
    "galore_adafactor": "GaLoreAdafactor",
    "apollo_adamw": "APOLLOAdamW",
}
#: Names of bitsandbytes' with states of 8 bits. Trainer keeps the embeddings' in 32 bits.
_WITH_WIDE_EMBEDDINGS = frozenset({"adamw_bnb_8bit", "adamw_8bit", "lion_8bit", "rmsprop_bnb_8bit"})
#: Names of torch's classes, whose dictionaries ours load by themselves.
_OF_TORCH = frozenset({"adamw_torch", "adamw_torch_fused", "adagrad", "rmsprop", "sgd"})
#: The libraries of the other names, whose classes load what Trainer saves of ours.
_LIBRARIES = {
    "adafactor": "transformers",
    **dict.fromkeys(("adamw_torch_8bit", "adamw_torch_4bit"), "torchao"),
    **dict.fromkeys(("galore_adamw", "galore_adamw_8bit", "galore_adafactor"), "galore_torch"),
    "apollo_adamw": "apollo_torch",
    **dict.fromkeys(("lion_32bit", "rmsprop_bnb", "rmsprop_bnb_32bit"), "bitsandbytes"),
    **dict.fromkeys(_WITH_WIDE_EMBEDDINGS, "bitsandbytes"),
}
_LAYERWISE = "_layerwise"
#: The options that transformers gives Adafactor.
_ADAFACTOR = {"scale_parameter": False, "relative_step": False}
#: The options of groups of low rank, with transformers' defaults; ``optim_args`` sets them.
_LOW_RANK: dict[str, dict[str, Any]] = {
    "galore": {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"},
    "apollo": {
        "rank": 128,
        "proj": "random",
        "scale_type": "channel",
        "update_proj_gap": 200,
        "scale": 1.0,
        "proj_type": "std",
    },
}

_replaced = Replaced()


def register() -> None:
    """Makes ``TrainingArguments(optim=...)`` select the classes of this package.

    The names are ``adamw_torch``, ``adamw_torch_fused``, ``adamw_bnb_8bit``, ``adamw_8bit``,
    ``adamw_torch_8bit``, ``adamw_torch_4bit``, ``adagrad``, ``lion_32bit``, ``lion_8bit``, ``sgd``,
    ``rmsprop`` and ``rmsprop_bnb`` with their variants; ``adafactor``, ``galore_*`` and
    ``apollo_*`` where :mod:`fusedstep.optim` has the class. All other names remain transformers'.
    Learning rate, betas, eps, and Trainer's groups with and without weight decay are kept, those of
    GaLore as well. ``optim_args`` sets any option of the class:
    ``"master_weights=split, max_grad_norm=1"``.

    A folder that Trainer has saved with its own optimizer of the name is resumed with ours: states
    and options go to the same weights, also where ours has more groups. What Trainer saves with
    ours has the other form inside, so that its own optimizer of the name goes on from it, too.

    Every release of transformers from 4.40 on asks the public method
    ``Trainer.get_optimizer_cls_and_kwargs``, which this replaces. A subclass of ``Trainer`` that
    overrides the method decides by itself.
    """
    if _replaced:
        return
    from transformers import Trainer

    theirs = Trainer.get_optimizer_cls_and_kwargs
    ours = functools.wraps(theirs)(functools.partial(_choose, theirs))
    load, save = Trainer._load_optimizer_and_scheduler, Trainer._save_optimizer_and_scheduler

    @functools.wraps(load)
    def resume(trainer: Trainer, checkpoint: str | None) -> None:
        with readable(_LIBRARIES.get(_name_of(trainer.args), "")):
            load(trainer, checkpoint)
        fit_schedule(trainer.lr_scheduler, trainer.optimizer)

    @functools.wraps(save)
    def store(trainer: Trainer, folder: str) -> None:
        # FSDP and DeepSpeed put together what optimizers return, by the groups that they have.
        is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        with (
            contextlib.nullcontext()
            if is_sharded
            else written_as_theirs(trainer.optimizer, trainer.lr_scheduler)
        ):
            save(trainer, folder)

    _replaced.put(
        (Trainer, "get_optimizer_cls_and_kwargs", staticmethod(ours)),
        (Trainer, "_load_optimizer_and_scheduler", resume),
        (Trainer, "_save_optimizer_and_scheduler", store),
    )


def unregister() -> None:
    """Makes the names select transformers' classes again."""
    _replaced.put_back()


def _choose(
    theirs: Callable[..., tuple[Any, dict[str, Any]]],
    args: TrainingArguments,
    model: nn.Module | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Returns a class and its options, as ``Trainer.get_optimizer_cls_and_kwargs`` does."""
    name = _name_of(args)
    plain = name.removesuffix(_LAYERWISE)
    cls: _Class | None = getattr(optim, _NAMES.get(plain, ""), None)
    if cls is None or not _replaced:
        return theirs(args, model)
    library = _LIBRARIES.get(name)  # Trainer saves nothing of its layerwise optimizers
    given = _parsed(args.optim_args)
    low_rank = _LOW_RANK.get(plain.partition("_")[0], {})
    ranks = {option: given.pop(option, default) for option, default in low_rank.items()}
    _check(cls, given, [*low_rank])
    options = _options(cls, args) | given
    if low_rank:
        cls = _with_group(cls, _targets(name, args, model), ranks, library, model)
    elif name in _WITH_WIDE_EMBEDDINGS and model is not None:
        cls = _with_group(cls, embeddings(model), {"state_dtype": torch.float32}, library)
    elif name not in _OF_TORCH:
        cls = _with_group(cls, set(), {}, library)
    if name != plain:
        if "max_grad_norm" in given:
            raise ValueError(f"optim={name!r} does not support max_grad_norm")
        cls = _layerwise(cls, name, args)
    return cls, options


def _name_of(args: TrainingArguments) -> str:
    return str(getattr(args.optim, "value", args.optim))


def _options(cls: _Class, args: TrainingArguments) -> dict[str, Any]:
    """Returns the options of a class that the arguments set."""
    accepted = inspect.signature(cls).parameters
    options: dict[str, Any] = {"lr": args.learning_rate}
    if "betas" in accepted:
        options["betas"] = args.adam_beta1, args.adam_beta2
        if "eps" in accepted:
            options["eps"] = args.adam_epsilon
    return options | (_ADAFACTOR if cls.__name__.endswith("Adafactor") else {})


def _parsed(text: str | None) -> dict[str, Any]:
    """Returns the options of ``optim_args``: ``"momentum=0.9, nesterov=True"``."""
    options = {}
    for pair in filter(None, (text or "").replace(" ", "").split(",")):
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise ValueError(f"optim_args must be 'name=value, name=value', not {text!r}")
        options[name] = _value(value)
    return options


def _value(text: str) -> Any:
    known = {"true": True, "yes": True, "false": False, "no": False, "none": None}
    if text.lower() in known:
        return known[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _check(cls: _Class, options: Iterable[str], of_groups: list[str]) -> None:
    accepted = inspect.signature(cls).parameters.keys() - {"params"}
    for option in options:
        if option not in accepted:
            near = did_you_mean(option, [*accepted, *of_groups])
            raise ValueError(
                f"optim_args: {cls.__name__} has no option {option!r}{near and f': {near}'}"
            )


def _with_group(
    cls: _Class,
    chosen: set[int],
    options: dict[str, Any],
    library: str | None,
    model: nn.Module | None = None,
) -> _Class:
    """Returns a class that makes a ``cls`` of groups that are split: chosen weights have options.

    It loads what Trainer's own class has saved, whose groups are those that Trainer makes; with a
    ``model`` all other weights of that, and the chosen ones. Trainer saves it in the form that the
    class of the ``library`` loads.
    """

    def make(params: Iterable[Any], **others: Any) -> optim.FusedOptimizer:
        groups = listed(params)
        optimizer = cls(_split(groups, chosen, options), **others)
        theirs = weights_of(groups)
        if model is not None:
            theirs = [
                [weight for weight in model.parameters() if (id(weight) in chosen) is is_chosen]
                for is_chosen in (False, True)
            ]
        take_over(optimizer, theirs, library)
        return optimizer

    return made_by(cls, make)


def _split(groups: Groups, chosen: set[int], options: dict[str, Any]) -> Groups:
    halves = []
    for group in groups:
        taken = [weight for weight in group["params"] if id(weight) in chosen]
        others = [weight for weight in group["params"] if id(weight) not in chosen]
        halves += [group | {"params": others}, group | options | {"params": taken}]
    return [half for half in halves if half["params"]]


def _targets(name: str, args: TrainingArguments, model: nn.Module | None) -> set[int]:
    """Returns the weights of linear layers that ``optim_target_modules`` names."""
    from transformers.trainer_utils import check_target_module_exists

    wanted = args.optim_target_modules
    if wanted is None:
        raise ValueError(f"optim={name!r} needs optim_target_modules: names, or 'all-linear'")
    if model is None:
        raise ValueError(f"optim={name!r} needs the model")
    every = isinstance(wanted, str) and wanted.replace("_", "-") == "all-linear"
    found = {
        id(module.weight)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and (every or check_target_module_exists(wanted, path))
    }
    if not found:
        raise ValueError(f"optim_target_modules={wanted!r} names no linear layer of the model")
    return found


def _layerwise(cls: _Class, name: str, args: TrainingArguments) -> _Class:
    """Returns a class whose optimizers step each weight during backward, and free its gradient.

    Trainer's own call of ``step()`` finds no gradients then.
    """
    from transformers.training_args import ParallelMode

    if args.gradient_accumulation_steps != 1:
        raise ValueError(f"optim={name!r} does not support gradient_accumulation_steps above 1")
    if args.parallel_mode == ParallelMode.DISTRIBUTED:
        raise NotImplementedError(f"optim={name!r} does not support DDP")

    def make(groups: Iterable[dict[str, Any]], **options: Any) -> optim.FusedOptimizer:
        optimizer = cls(groups, **options)

        def step(_: torch.Tensor) -> None:
            optimizer.step()  # of one weight: no other has a gradient
            optimizer.zero_grad()

        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.requires_grad:
                    weight.register_post_accumulate_grad_hook(step)
        return optimizer

    return made_by(cls, make)
