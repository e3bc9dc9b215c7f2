"""APOLLO: Zhu et al. 2024, algorithm 1, and the published apollo_torch 1.0.3."""

from reference.galore import adamw
from reference.low_rank_bases import side_of


def apollo(
    weight, grad, state, step, *, basis, lr=1e-3, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0,
    correct_bias=True, scale_front=False, disable_nl=False, scale_type="channel", scale=1.0,
    proj_type="std", maximize=False,
):  # fmt: skip
    """``basis``: [rank, columns] from the right, [rows, rank] from the left; or None."""
    g = -grad if maximize else grad
    options = {"lr": lr, "betas": betas, "eps": eps, "correct_bias": correct_bias}
    if basis is None:
        new, state = adamw(weight, g, state, step, **options)
        return new - lr * weight_decay * new, state
    is_right = side_of(proj_type, *g.shape) == "right"
    low = g @ basis.T if is_right else basis.T @ g
    norms = []

    def back(u):
        dims = (0, 1) if scale_type == "tensor" else (int(is_right),)
        a, b = (x.square().sum(dims, keepdim=True).sqrt() for x in (u, low))
        scaled = g * (a / (b + 1e-8)) * (scale**0.5 if scale_front else 1)
        norm, last = scaled.square().sum().sqrt(), state.get("norm")
        if last is not None and not disable_nl and norm > 1.01 * (last + 1e-8):
            scaled = scaled * (1.01 * (last + 1e-8) / norm)
        norms.append(scaled.square().sum().sqrt())
        return scaled * (1 if scale_front else scale**0.5)

    new, new_state = adamw(weight, low, state, step, **options, back=back)
    return new - lr * weight_decay * new, new_state | {"norm": norms[0]}
