"""Runs of optimizers with groups of a rank, beside the same runs by a reference in float64."""

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Groups = list[dict[str, Any]]


def as_params(
    groups: list[tuple[dict[str, Any], list[tuple[int, ...]]]], dtype: torch.dtype
) -> Groups:
    """Groups with weights of these shapes, by number and group."""
    generator = torch.Generator().manual_seed(3)
    return [
        options
        | {
            "params": [
                torch.nn.Parameter(
                    torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)
                )
                for s in shapes
            ]
        }
        for options, shapes in groups
    ]


def gradient(like: Tensor, step: int, place: int) -> Tensor:
    """A gradient with few large singular values, which a low rank captures most of."""
    generator = torch.Generator().manual_seed(1000 * step + place)
    found = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    if like.dim() > 1:
        u, s, vh = torch.linalg.svd(found.flatten(1), full_matrices=False)
        found = (u * (s * 0.7 ** torch.arange(len(s)))) @ vh
    return found.view(like.shape).to(like.dtype)


def run(
    optimizer: torch.optim.Optimizer, steps: range, skips: Callable[[int, int], bool] | None = None
) -> list[Tensor]:
    """Takes steps; ``skips(step, place)`` tells which weights have no gradient at one."""
    for step in steps:
        set_gradients(optimizer, step, skips)
        optimizer.step()
    return weights_of(optimizer)


def set_gradients(optimizer, step, skips=None) -> None:
    for place, p in enumerate(weights_of(optimizer)):
        skipped = skips is not None and skips(step, place)
        p.grad = None if skipped else gradient(p, step, place)


def weights_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def by_reference(
    formula: Callable[..., tuple[Tensor, dict[str, Any]]],
    groups: Groups,
    steps: range,
    skips: Callable[[int, int], bool] | None = None,
    more: Callable[[dict[str, Any], Tensor, int], dict[str, Any]] | None = None,
    **options: Any,
) -> list[Tensor]:
    """The weights after steps by a formula; ``more`` gives it arguments for a weight's step."""
    found, place = [], 0
    for group in groups:
        own = options | {name: value for name, value in group.items() if name != "params"}
        for p in group["params"]:
            weight, state, count = p.detach().double(), {}, 0
            for step in steps:
                if skips is not None and skips(step, place):
                    continue
                count += 1
                extra = more(group, p, count) if more else {}
                grad = gradient(p, step, place).double()
                weight, state = formula(weight, grad, state, count, **own, **extra)
            found.append(weight)
            place += 1
    return found


# ---- Of GaLore and APOLLO ------------------------------------------------------------------------

OPTIONS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1}
#: Tall, wide, square, and of more dimensions.
SHAPES = [(12, 7), (6, 15), (8, 8), (5, 4, 3)]
PLAIN = ({"betas": (0.7, 0.9), "weight_decay": 0.3, "lr": 0.05}, [(9,), (), (3, 4)])


def projected(**options):
    return {"rank": 3, "update_proj_gap": 3, "scale": 0.5} | options


def groups(dtype=torch.float64, shapes=SHAPES, **options):
    return as_params([PLAIN, (projected(**options), shapes)], dtype)


def saved(optimizer):
    """A state dictionary as a file gives it back."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def tensors_of(optimizer):
    """All that a step may change."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [t.detach().clone() for t in (*weights_of(optimizer), *states)]


def assert_same(a, b):
    assert len(a) == len(b)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


#: Matrices whose low-rank moments, of half the smaller side, are as many as codes need.
CODED_SHAPES = [(160, 96), (96, 160), (32, 8)]


def coded_groups(dtype=torch.float32, **options):
    """Groups of a rank with moments that may be in codes, and some that are too few."""
    generous = {"rank": 48} | options
    return as_params(
        [(projected(**generous), CODED_SHAPES[:2]), (projected(rank=4), CODED_SHAPES[2:])], dtype
    )


def allocated(optimizer):
    """The largest piece of memory that torch hands out during a step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(
        activities=activities, profile_memory=True, acc_events=True
    ) as profile:
        optimizer.step()
    return max(event.self_cpu_memory_usage for event in profile.events())
