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


# States in codes


def encoded(numbers, qmap, block):
    """The nearest places in a map, an element each, and the absmax of each block."""
    flat = numbers.double().flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    absmax = blocks.abs().amax(1).float()
    shares = (blocks / absmax.double().clamp(min=1e-30)[:, None]).flatten()[: len(flat)]
    places = (shares[:, None] - qmap.double()).abs().argmin(1)
    return places.to(torch.uint8), absmax


def bitsandbytes_state(states, qmaps, block=256, nested=True, step=3):
    """The state of a weight: uint8 where there are enough elements, else float32 numbers.

    `states`: one or two tensors, as state1 and state2. `qmaps`: their maps.
    """
    found = {}
    for number, (numbers, qmap) in enumerate(zip(states, qmaps, strict=True), 1):
        if numbers.numel() < 4096:
            found[f"state{number}"] = numbers.float()
            continue
        codes, absmax = encoded(numbers, qmap, block)
        found |= {
            f"state{number}": codes.view(numbers.shape),
            f"qmap{number}": qmap.float(),
            f"absmax{number}": absmax,
        }
    return {"step": step} | ({"__bnb_optimizer_quant_state__": found} if nested else found)


class InCodes(torch.Tensor):
    """As torchao's tensors: of the shape and dtype of numbers, with codes in attributes."""

    @staticmethod
    def __new__(cls, shape, **parts):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    def __init__(self, shape, **parts):
        vars(self).update(parts)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


def torchao_state(numbers, kind, qmap, block):
    """A state of torchao, which has codes where there are enough elements of whole blocks."""
    if numbers.numel() < 4096 or numbers.numel() % block:
        return numbers
    if kind == "fp8":
        scale = numbers.view(-1, block).abs().amax(1).clip(1e-12) / 448
        codes = (numbers.view(-1, block) / scale[:, None]).to(torch.float8_e4m3fn)
        return InCodes(numbers.shape, codes=codes.view(numbers.shape), scale=scale)
    codes, scale = encoded(numbers, qmap, block)
    codes = codes.view(numbers.shape) if kind == "int8" else codes[::2] << 4 | codes[1::2]
    return InCodes(numbers.shape, codes=codes, scale=scale, qmap=qmap.float())
