"""CAME: algorithm 2 of Luo et al. 2023, with its sums, for each matrix of a stack."""

import torch


def approximated(sums, squares, beta):
    """New sums of rows and columns, and the matrix R C / sum(R) that they stand for."""
    rows, columns = sums or (torch.zeros(len(squares)), torch.zeros(squares.shape[1]))
    ones = [torch.ones(size, dtype=squares.dtype) for size in squares.shape]
    rows = beta * rows + (1 - beta) * squares @ ones[1]
    columns = beta * columns + (1 - beta) * ones[0] @ squares
    return (rows, columns), torch.outer(rows, columns) / rows.sum()


def came(
    weight, grad, state, *, lr=2e-4, eps=(1e-30, 1e-16), clip_threshold=1.0,
    betas=(0.9, 0.999, 0.9999), weight_decay=0.0, maximize=False,
):  # fmt: skip
    """`state`: "average", and "moments" and "residuals": sums of each matrix, or all elements."""
    gradient = -grad if maximize else grad
    matrices, new = gradient.dim() >= 2, {}

    def denominator(name, squares, beta):
        if not matrices:
            new[name] = beta * state.get(name, 0.0) + (1 - beta) * squares
            return new[name].sqrt()
        stack = squares.reshape(-1, *squares.shape[-2:])
        kept = state.get(name, [None] * len(stack))
        pairs = [approximated(sums, each, beta) for sums, each in zip(kept, stack, strict=True)]
        new[name] = [sums for sums, _ in pairs]
        return torch.stack([matrix for _, matrix in pairs]).sqrt().reshape(squares.shape)

    update = gradient / denominator("moments", gradient**2 + eps[0], betas[1])
    update = update / max(1.0, update.square().mean().sqrt() / clip_threshold)
    average = new["average"] = betas[0] * state.get("average", 0.0) + (1 - betas[0]) * update
    residuals = (update - average) ** 2 + eps[1]
    step = average / denominator("residuals", residuals, betas[2]) if matrices else average
    return (1 - lr * weight_decay) * weight - lr * step, new
