"""Optimizers of other libraries, which are not installed.

These have the layout of their groups and states, as read from their sources, and the values of ours
or torch's.
"""

import torch


def dressed(source, package, name, options, with_states, **attributes):
    """An optimizer of another library, in the middle of the training of a source."""
    cls = type(name, (torch.optim.Optimizer,), {"__module__": f"{package}.optimizers.made_up"})
    groups = [
        {
            "params": list(group["params"]),
            **{key: group[key] for key in ("lr", "eps", "weight_decay")},
        }
        for group in source.param_groups
    ]
    if "betas" in source.defaults:
        for group, original in zip(groups, source.param_groups, strict=True):
            group["betas"] = original["betas"]
    other = cls(groups, options)
    for key, value in attributes.items():
        setattr(other, key, value)
    for group in other.param_groups:
        states = [{**source.state[p]} for p in group["params"]]
        with_states(group, states)
        for p, state in zip(group["params"], states, strict=True):
            other.state[p] = state
    return other


def count_in_the_group(group, states):
    """apex. Adan's authors do the same."""
    group["step"] = int(max(state.pop("step") for state in states))


def count_in_the_group_as_a_tensor(group, states):
    """apex with capturable=True."""
    count_in_the_group(group, states)
    group["step"] = torch.tensor([group["step"]], dtype=torch.int32)


def count_as_integers(group, states):
    """DeepSpeed on the CPU."""
    for state in states:
        state["step"] = int(state["step"])


def count_in_the_last(group, states):
    """DeepSpeed's FusedAdam."""
    count_as_integers(group, states)
    group["step"] = 0
    for state in states[:-1]:
        state["step"] = 0


def no_count(group, states):
    """apex's FusedAdagrad."""
    for state in states:
        del state["step"]


def sum_by_another_name(group, states):
    """DeepSpeedCPUAdagrad."""
    count_as_integers(group, states)
    for state in states:
        state["exp_avg_sq"] = state.pop("sum")
