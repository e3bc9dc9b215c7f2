"""Row-wise Adagrad: torchrec.optim.RowWiseAdagrad, and FBGEMM's EXACT_ROWWISE_ADAGRAD."""


def rowwise_adagrad(
    weight, grad, total, step, *, lr=1e-2, lr_decay=0.0, weight_decay=0.0, eps=1e-10,
    decoupled_weight_decay=False, maximize=False,
):  # fmt: skip
    """`weight` and `grad`: [rows, columns]. `total`: [rows, 1]. Returns the new ones."""
    gradient = -grad if maximize else grad
    if not decoupled_weight_decay:
        gradient = gradient + weight_decay * weight
    total = total + gradient.square().sum(1, keepdim=True) / gradient.shape[1]
    kept = weight * (1 - lr * weight_decay) if decoupled_weight_decay else weight
    return kept - lr / (1 + (step - 1) * lr_decay) * gradient / (total.sqrt() + eps), total
