"""SparseAdam, from the code box of torch.optim.SparseAdam: Adam for rows that have entries."""


def sparse_adam(
    weight, rows, grad, state, step, *, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
    maximize=False,
):  # fmt: skip
    """`rows`: each once. `grad`: the sums of their entries. States are changed in place."""
    gradient = -grad if maximize else grad
    m, v = state["exp_avg"], state["exp_avg_sq"]
    m[rows] = betas[0] * m[rows] + (1 - betas[0]) * gradient
    v[rows] = betas[1] * v[rows] + (1 - betas[1]) * gradient**2
    length = lr * (1 - betas[1] ** step) ** 0.5 / (1 - betas[0] ** step)
    new = weight.clone()
    new[rows] -= lr * weight_decay * weight[rows] + length * m[rows] / (v[rows].sqrt() + eps)
    return new
