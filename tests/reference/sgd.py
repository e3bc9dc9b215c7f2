"""SGD, from the algorithm box of torch.optim.SGD; Sutskever et al. 2013."""


def sgd(
    weight, grad, state, step, *, lr=1e-3, momentum=0.0, dampening=0.0, weight_decay=0.0,
    nesterov=False, maximize=False,
):  # fmt: skip
    gradient = -grad if maximize else grad
    gradient = gradient + weight_decay * weight
    if momentum == 0:
        return weight - lr * gradient, {}
    if "momentum_buffer" in state:
        buffer = momentum * state["momentum_buffer"] + (1 - dampening) * gradient
    else:
        buffer = gradient
    direction = gradient + momentum * buffer if nesterov else buffer
    return weight - lr * direction, {"momentum_buffer": buffer}
