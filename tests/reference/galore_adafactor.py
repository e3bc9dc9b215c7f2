"""GaLore with Adafactor: the published galore_torch 1.0, with the Adafactor of transformers."""

import torch

from reference.low_rank_bases import side_of, with_bases


def rms(x):
    return x.square().mean().sqrt()


def galore_adafactor(
    weight, grad, state, step, *, lr=1e-2, eps=(1e-30, 1e-3), clip_threshold=1.0, decay_rate=-0.8,
    beta1=None, weight_decay=0.0, scale_parameter=True, relative_step=True, warmup_init=False,
    max_relative_step=1e-2, maximize=False, rank=None, update_proj_gap=200, scale=0.25,
    proj_type="std",
):  # fmt: skip
    g, back, state = -grad if maximize else grad, lambda u: u, dict(state)
    if rank:
        g = g.reshape(grad.shape[0], -1)
        state = with_bases(state, g, step, rank, update_proj_gap)
        side = side_of(proj_type, *g.shape)
        a = state["A"] if side != "right" else torch.eye(g.shape[0], dtype=g.dtype)
        b = state["B"].T if side != "left" else torch.eye(g.shape[1], dtype=g.dtype)
        g = a.T @ g @ b
        back = lambda u: (scale * a @ u @ b.T).view_as(weight)  # noqa: E731
    new, squares = step**decay_rate, g**2 + eps[0]
    for name, dim in {"row": -1, "column": -2}.items() if g.dim() > 1 else {"all": ()}.items():
        mean = squares.mean(dim, keepdim=True) if dim else squares
        state[name] = (1 - new) * state.get(name, 0) + new * mean
    v = (
        state["row"] * state["column"] / state["row"].mean(-2, True)
        if g.dim() > 1
        else state["all"]
    )
    u = g / v.sqrt()
    length = min(1e-6 * step if warmup_init else max_relative_step, step**-0.5)
    length = length if relative_step else lr
    length *= max(eps[1], rms(weight)) if scale_parameter else 1
    u = length * u / max(1, rms(u) / clip_threshold)
    if beta1 is not None:
        u = state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * u
    return weight * (1 - weight_decay * length) - back(u), state
