"""CAME: algorithm 2 of Luo et al. 2023, with its sums, for each matrix of a stack."""

import torch


def approximated(sums, squares, beta):
    """New sums of rows and columns, and the matrix R C / sum(R) that they stand for."""
    rows = beta * sums[0] + (1 - beta) * squares.sum(-1)
    columns = beta * sums[1] + (1 - beta) * squares.sum(-2)
    total = rows.sum(-1)[..., None, None]
    return (rows, columns), rows[..., :, None] * columns[..., None, :] / total


def came(
    weight, grad, state, *, lr=2e-4, eps=(1e-30, 1e-16), clip_threshold=1.0,
    betas=(0.9, 0.999, 0.9999), weight_decay=0.0, maximize=False,
):  # fmt: skip
    """`state`: "average", and "moments" and "residuals": sums of each matrix, or all elements."""
    gradient = -grad if maximize else grad
    matrices, zero, new = weight.dim() >= 2, torch.zeros(()), {}

    def denominator(name, squares, beta):
        if not matrices:
            new[name] = beta * state.get(name, zero) + (1 - beta) * squares
            return new[name].sqrt()
        new[name], matrix = approximated(state.get(name, (zero, zero)), squares, beta)
        return matrix.sqrt()

    update = gradient / denominator("moments", gradient**2 + eps[0], betas[1])
    update = update / (update.square().mean().sqrt() / clip_threshold).clamp(min=1.0)
    average = new["average"] = betas[0] * state.get("average", zero) + (1 - betas[0]) * update
    residuals = (update - average) ** 2 + eps[1]
    step = average / denominator("residuals", residuals, betas[2]) if matrices else average
    return (1 - lr * weight_decay) * weight - lr * step, new
