"""Models and optimizers of steps that clip and scale in one pass."""

import copy

from support.stepping import CHUNK, as_parameters, make_gradients, make_weights

SHAPES = ((33, 31), (7,), (2 * CHUNK + 5,), (), (0, 3))


MODES = {
    "fused": {},
    "unfused": {"fused": False},
    "two groups": {"groups": True},
    "mixed groups": {"groups": True, "mixed": True},
}


def build(case, dtype, mode, scale=1.0, shapes=SHAPES):
    """Parameters with gradients, the optimizer, and its twin for the separate calls."""
    options = dict(MODES[mode])
    grouped, mixed = options.pop("groups", False), options.pop("mixed", False)
    params = as_parameters(make_weights(shapes, dtype))
    groups = [{"params": params}]
    if grouped:
        groups = [{"params": params[:2]}, {"params": params[2:], "eps": 1e-6}]
    if mixed:
        groups[1]["fused"] = False
    optimizer = case.build(groups, **options)
    set_gradients(optimizer, dtype, 1, scale)
    optimizer.step()
    set_gradients(optimizer, dtype, 2, scale)
    twin = copy.deepcopy(optimizer)
    set_gradients(twin, dtype, 2, scale)
    return optimizer, twin


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def set_gradients(optimizer, dtype, step, scale=1.0):
    params = params_of(optimizer)
    gradients = make_gradients([param.shape for param in params], dtype, step)
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient * scale
