"""Megatron-Core: ``--optimizer adam`` and ``sgd`` make optimizers of this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fusedstep import optim
from fusedstep.integrations._replaced import Replaced

_replaced = Replaced()


class _Adam(optim.Adam, is_alias=True):
    """Adam with the arguments of the class that Megatron-Core takes from Transformer Engine.

    Dictionaries have a step count in each group, where Megatron's checkpoints keep it.
    """

    def __init__(self, params: Any, *, adam_w_mode: bool = True, **options: Any) -> None:
        dtypes = {name: options.pop(name, None) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")}
        if any(dtype is not None for dtype in dtypes.values()):
            raise ValueError(
                "fusedstep's Adam does not support use_precision_aware_optimizer of Megatron-Core: "
                "leave it out, or unregister()"
            )
        if not options.pop("bias_correction", True):
            raise ValueError("fusedstep's Adam does not support bias_correction=False")
        super().__init__(params, decoupled_weight_decay=adam_w_mode, **options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a dictionary, and give states the counts that only their groups have.

        Megatron gives the states of a new optimizer with groups of its checkpoint: then the count
        of a group is that of its states. Before the first step there is none: it is 0.
        """
        states, groups = dict(state_dict["state"]), []
        for group in state_dict["param_groups"]:
            own = {key: states[key] for key in group["params"] if states.get(key)}
            counts = [state["step"] for state in own.values() if "step" in state]
            count = group.get("step", max(counts, default=0))
            if len(counts) < len(own) or (counts and max(counts) != count):
                states |= {key: state | {"step": count} for key, state in own.items()}
            groups.append({name: value for name, value in group.items() if name != "step"})
        super().load_state_dict(state_dict | {"state": states, "param_groups": groups})

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        for group in saved["param_groups"]:
            counts = [saved["state"].get(place, {}).get("step") for place in group["params"]]
            counts = [int(count) for count in counts if count is not None]
            if counts:
                group["step"] = max(counts)
        return saved


class _CPUAdam(_Adam, is_alias=True):
    """The same on the CPU: Megatron-Core keeps states there of every optimizer of this class."""


class _CPUSGD(optim.SGD, is_alias=True):
    """SGD on the CPU, told apart from that on a GPU as :class:`_CPUAdam` is."""


def _sets_tensors(theirs: Callable[..., None]) -> Callable[..., None]:
    """Returns a method of DistributedOptimizer that leaves the counts of states as they are.

    Megatron's copies every entry of a state, and has loaded counts before, from groups. Transformer
    Engine's class has none in its states; those among the tensors are a new optimizer's.
    """

    def set_tensors(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        is_ours = isinstance(self.optimizer, _Adam)
        if is_ours or hasattr(self.optimizer, "sub_optimizers"):
            tensors = {name: tensor for name, tensor in tensors.items() if name != "step"}
        if is_ours:
            group, place = self.model_param_group_index_map[model_param]
            state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
            tensors |= {name: value for name, value in state.items() if name == "step"}
        theirs(self, model_param, tensors)

    return set_tensors


def _loads_masters(theirs: Callable[..., None]) -> Callable[..., None]:
    """Returns a method of DistributedOptimizer that gives what it loads to offloaded optimizers.

    Megatron's own does so for its other formats.
    """

    def load(self: Any, state_dict: dict[str, Any]) -> None:
        theirs(self, state_dict)
        if hasattr(self.optimizer, "sub_optimizers"):
            self.optimizer._sync_hdo_state_to_sub_optimizers()

    return load


def _saves_counts(theirs: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Returns a method of DistributedOptimizer that saves the count of steps of offloaded states.

    Megatron's looks for it in the states of optimizers that are torch's.
    """

    def state_dict(self: Any) -> dict[str, Any]:
        saved = theirs(self)
        states = self.optimizer.state.values()
        counts = [int(state["step"]) for state in states if "step" in state]
        for group in saved["optimizer"]["param_groups"] if counts else ():
            group.setdefault("step", max(counts))
        return saved

    return state_dict


def register() -> None:
    """Puts classes of this package in the place of those that Megatron-Core steps with.

    ``get_megatron_optimizer`` knows its optimizers by name alone and takes no class. After this
    ``optimizer="adam"`` is an :class:`~fusedstep.optim.Adam`, with ``decoupled_weight_decay`` as
    Megatron's configuration has it, and ``"sgd"`` a :class:`~fusedstep.optim.SGD`; so are the
    optimizers on the CPU of ``optimizer_cpu_offload``. Learning rates, betas, eps, weight decay and
    momentum are Megatron's. Its ``use_precision_aware_optimizer`` is an error unless states are
    offloaded: those of 16 and 8 bits are of Transformer Engine's class.
    """
    if _replaced:
        return
    from megatron.core import optimizer as core
    from megatron.core.optimizer import distrib_optimizer

    distributed = distrib_optimizer.DistributedOptimizer
    setting = "_set_main_param_and_optimizer_states"
    loading = "load_parameter_state_from_dp_reshardable"
    _replaced.put(
        (core, "Adam", _Adam),
        (core, "SGD", optim.SGD),
        (core, "CPUAdam", _CPUAdam),
        (core, "CPUSGD", _CPUSGD),
        (core, "USING_PYTORCH_OPTIMIZER", False),  # else torch's classes are taken by name
        (distrib_optimizer, "Adam", (distrib_optimizer.Adam, optim.Adam)),  # those that it takes
        (distributed, "state_dict", _saves_counts(distributed.state_dict)),
        (distributed, setting, _sets_tensors(getattr(distributed, setting))),
        (distributed, loading, _loads_masters(getattr(distributed, loading))),
    )


def unregister() -> None:
    """Puts the classes back that were there before."""
    _replaced.put_back()
