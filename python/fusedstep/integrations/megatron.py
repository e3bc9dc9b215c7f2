"""Megatron-Core: ``--optimizer adam`` and ``sgd`` make optimizers of this package."""

from __future__ import annotations

from typing import Any

from fusedstep import optim
from fusedstep.integrations._replaced import Replaced

_replaced = Replaced()


class _Adam(optim.Adam, is_alias=True):
    """Adam with the arguments of the class that Megatron-Core takes from Transformer Engine.

    Dictionaries have a step count in each group, where Megatron's checkpoints keep it.
    """

    _counts_in_groups = True

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

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            count = group.pop("step", None)
            for p in group["params"] if count is not None else ():
                if state["state"].get(p):
                    state["state"][p].setdefault("step", float(count))
        super().__setstate__(state)

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        for group in saved["param_groups"]:
            counts = [saved["state"].get(place, {}).get("step") for place in group["params"]]
            counts = [int(count) for count in counts if count is not None]
            if counts:
                group["step"] = max(counts)
        return saved


def register() -> None:
    """Puts classes of this package in the place of those that Megatron-Core steps with.

    ``get_megatron_optimizer`` knows its optimizers by name alone and takes no class. After this
    ``optimizer="adam"`` is an :class:`~fusedstep.optim.Adam`, with ``decoupled_weight_decay`` as
    Megatron's configuration has it, and ``"sgd"`` a :class:`~fusedstep.optim.SGD`; so are the
    optimizers on the CPU of ``optimizer_cpu_offload``. Learning rates, betas, eps, weight decay and
    momentum are Megatron's. Its ``use_precision_aware_optimizer`` is an error: states of 16 and 8
    bits are those of Transformer Engine's class.
    """
    if _replaced:
        return
    from megatron.core import optimizer as core
    from megatron.core.optimizer import distrib_optimizer

    _replaced.put(
        (core, "Adam", _Adam),
        (core, "SGD", optim.SGD),
        (core, "CPUAdam", _Adam),
        (core, "CPUSGD", optim.SGD),
        (core, "USING_PYTORCH_OPTIMIZER", False),  # else torch's classes are taken by name
        (distrib_optimizer, "Adam", (distrib_optimizer.Adam, optim.Adam)),  # those that it takes
    )


def unregister() -> None:
    """Puts the classes back that were there before."""
    _replaced.put_back()
