"""Law: in a training script, the classes here do what torch's classes of the same name do.

Each experiment is run with torch's class and with ours, in every mode, and has to give the same.
"""

import inspect
import math

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fusedstep import optim
from support.peers import ALL, MODES, NAMESAKES, WITHOUT_FUSED, Difference, laws, of, said
from support.stepping import as_parameters, contents, make_gradients, make_weights, train

ADAMS = (optim.Adam, optim.AdamW)
SHAPES = ((5, 4), (7,), ())


def weights(shapes=SHAPES, dtype=torch.float32):
    return as_parameters(make_weights(shapes, dtype))


# Calling step


def closures(build):
    params = weights()
    optimizer = build(params)
    seen = []

    def closure():
        seen.append((torch.is_grad_enabled(), len(seen)))
        optimizer.zero_grad()
        loss = sum((param**2).sum() for param in params)
        loss.backward()
        return loss

    with torch.no_grad():
        losses = [optimizer.step(closure)]
    losses.append(optimizer.step(closure=closure))
    return seen, losses, contents(optimizer)


def a_closure_that_fails(build):
    params = weights()
    optimizer = build(params)
    train(optimizer, params, [1])
    before = contents(optimizer)

    def closure():
        raise ZeroDivisionError("in the closure")

    text = said(optimizer.step, closure)
    return text, torch.is_grad_enabled(), [before, contents(optimizer)]


def steps_where_gradients_are_off(build):
    params = weights()
    optimizer = build(params)
    with torch.no_grad():
        train(optimizer, params, [1])
        inside = torch.is_grad_enabled()
    train(optimizer, params, [2])
    return inside, torch.is_grad_enabled(), [p.requires_grad for p in params], contents(optimizer)


def step_hooks(build):
    """Global hooks run first before the step and last after it."""
    params = weights()
    optimizer, other = build(params), build(weights([(3,)]))
    seen = []

    def hook(name):
        def note(self, args, kwargs):
            seen.append((name, self is optimizer, args == (self,), kwargs, params[0].sum().item()))

        return note

    handles = [
        optimizer.register_step_post_hook(hook("post")),
        register_optimizer_step_post_hook(hook("global post")),
        register_optimizer_step_pre_hook(hook("global pre")),
        optimizer.register_step_pre_hook(hook("pre")),
    ]
    train(optimizer, params, [1])
    other.step()
    for handle in handles:
        handle.remove()
    train(optimizer, params, [2])
    return seen


def step_hooks_change_arguments(build):
    params = weights()
    optimizer = build(params)
    replaced = lambda self, args, kwargs: ((self, lambda: "the hook's closure"), {})  # noqa: E731
    handle = optimizer.register_step_pre_hook(replaced)
    returned = optimizer.step(lambda: "the caller's closure")
    handle.remove()
    optimizer.register_step_pre_hook(lambda self, args, kwargs: "neither None nor a pair")
    return returned, "must return None or a tuple" in said(optimizer.step)


def a_subclass_of_the_users(build):
    # torch wraps a class's step when the class is first built: hooks are called by it from then on.
    build(weights())

    class Mine(build.cls):
        calls = 0

        def step(self, closure=None):
            self.calls += 1
            return super().step(closure)

    params = weights()
    optimizer = Mine(params, **build.mode)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    train(optimizer, params, [1, 2])
    return optimizer.calls, len(seen), contents(optimizer)


def names_in_a_profile(build):
    params = weights()
    optimizer = build(params)
    with torch.autograd.profiler.profile() as profile:
        train(optimizer, params, [1])
        optimizer.zero_grad()
    return sorted({e.name for e in profile.function_events if e.name.startswith("Optimizer.")})


# Gradients


def zero_grad(build):
    found = []
    for set_to_none in (True, False):
        params = weights()
        params.append(torch.nn.Parameter(torch.ones(2)))  # without gradient
        optimizer = build(params)
        params[0].grad = (torch.ones_like(params[0], requires_grad=True) * 2).clone()
        params[1].grad = torch.ones_like(params[1], requires_grad=True)
        params[2].grad = torch.ones_like(params[2])
        before = [param.grad for param in params]
        optimizer.zero_grad(set_to_none=set_to_none)
        after = [param.grad for param in params]
        found.append([now is old for now, old in zip(after, before, strict=True)])
        found.append([now if now is None else (now, now.requires_grad) for now in after])
    return found


def no_gradient_at_all(build):
    params = weights()
    optimizer = build(params)
    optimizer.step()
    return [param.detach() for param in params]


def gradients_that_come_and_go(build):
    params = weights()
    optimizer = build(params)
    for step in range(1, 6):
        for index, gradient in enumerate(make_gradients(SHAPES, torch.float32, step)):
            params[index].grad = None if (step + index) % 3 == 0 else gradient
        optimizer.step()
    return contents(optimizer)


@of(*NAMESAKES)
def a_gradient_scaler(build):
    """The gradients are unscaled after the step; a step with inf is left out."""
    params = weights()
    optimizer = build(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    found = []
    for step in range(1, 6):
        optimizer.zero_grad()
        loss = sum((param**2).sum() for param in params) * (math.inf if step == 3 else step)
        scaler.scale(loss).backward()
        if step == 4:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, 0.5)
        found.append(scaler.step(optimizer))
        scaler.update()
        found.append([param.grad if step != 3 else None for param in params])
        found.append((scaler.get_scale(), contents(optimizer)))
    return found, said(scaler.step, optimizer)


def gradients_of_zeros(build):
    params = weights()
    optimizer = build(params)
    for _ in range(2):
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
    return contents(optimizer)


def gradients_with_a_graph(build):
    """As after backward(create_graph=True)."""
    params = weights()
    optimizer = build(params)
    for param in params:
        param.grad = torch.ones_like(param, requires_grad=True) * 3
    optimizer.step()
    return contents(optimizer), [param.grad.requires_grad for param in params]


def weights_frozen_and_unfrozen(build):
    params = weights()
    optimizer = build(params)
    found = []
    for step, frozen in enumerate((None, 0, 1, None), start=1):
        optimizer.zero_grad()
        for index, param in enumerate(params):
            param.requires_grad_(index != frozen)
        (sum((param**2).sum() for param in params) * step).backward()
        optimizer.step()
        found.append(contents(optimizer))
    return found


def weights_that_need_no_gradient(build):
    params = [torch.ones(3), torch.ones(2, requires_grad=True), torch.ones(2) * 2]
    kept = torch.ones(4, requires_grad=True) * 2
    kept.retain_grad()
    optimizer = build([*params, kept])
    for param in (*params, kept):
        param.grad = torch.ones_like(param)
    with torch.no_grad():
        optimizer.step()
    return contents(optimizer)


@of(*NAMESAKES)
def sparse_gradients(build):
    (param,) = weights([(4, 5)])
    optimizer = build([param])
    index, value = torch.tensor([[0, 2, 0]]), torch.ones(3, 5)
    param.grad = torch.sparse_coo_tensor(index, value, (4, 5), check_invariants=True)
    return said(optimizer.step), param.detach()


# Weights


def several_dtypes_in_a_group(build):
    params = [*weights(dtype=torch.float64), *weights(dtype=torch.float32)]
    optimizer = build(params)
    for step in (1, 2, 3):
        for param in params:
            (param.grad,) = make_gradients([tuple(param.shape)], param.dtype, step)
        optimizer.step()
    return contents(optimizer)


def complex_weights(build):
    params = [
        torch.nn.Parameter(torch.linspace(-1, 1, 6).add(0.5j)),
        torch.nn.Parameter(torch.ones(2, 3, dtype=torch.complex128)),
        torch.nn.Parameter(torch.ones(4)),
    ]
    decay = {"weight_decay": 0.1} if build.cls.__name__ != "Rprop" else {}  # which has none
    optimizer = build(params, maximize=True, **decay)

    def steps():
        for step in (1, 2, 3):
            for param in params:
                param.grad = torch.full_like(param, 2 - 3j if param.is_complex() else 2) * step
            optimizer.step()

    return said(steps), contents(optimizer)


@of(*NAMESAKES)
def a_weight_twice_in_a_group(build):
    (param,) = weights([(5,)])
    optimizer = build([param, param])
    param.grad = torch.ones(5)
    optimizer.step()
    return contents(optimizer)


def weights_of_a_tensor_subclass(build):
    class Mine(torch.Tensor):
        pass

    param = torch.ones(3).as_subclass(Mine).requires_grad_()
    optimizer = build([param])
    param.grad = torch.ones(3).as_subclass(Mine)
    optimizer.step()
    return param.detach().as_subclass(torch.Tensor)


def weights_that_share_memory(build):
    (whole,) = weights([(8,)])
    params = [whole, torch.nn.Parameter(whole.detach()[4:])]
    optimizer = build(params)
    return said(train, optimizer, params, [1])


@of(*NAMESAKES)
def weights_cast_between_steps(build):
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        (param,) = weights([(5,)])
        optimizer = build([param])
        train(optimizer, [param], [1])
        param.data, param.grad = param.data.to(dtype), None
        found.append(said(train, optimizer, [param], [2]) == "no error")
    return found


# Inference mode


def steps_in_inference_mode(build):
    params = weights()
    optimizer = build(params)
    train(optimizer, params, [1])
    with torch.inference_mode():
        train(optimizer, params, [2, 3])
    train(optimizer, params, [4])
    return contents(optimizer)


def inference_tensors_in_inference_mode(build):
    with torch.inference_mode():
        params = [torch.ones(3), torch.ones(2, 2)]
        optimizer = build(params)
        train(optimizer, params, [1, 2])
        return contents(optimizer)


@of(*NAMESAKES)
def lists_of_a_group(build):
    params = weights()
    optimizer = build(params)
    for param, gradient in zip(params, make_gradients(SHAPES, torch.float32, 1), strict=True):
        param.grad = gradient
    params[1].grad = None
    theirs = getattr(torch.optim, build.cls.__name__)
    lists = [[] for _ in list(inspect.signature(theirs._init_group).parameters)[2:]]
    found = optimizer._init_group(optimizer.param_groups[0], *lists)
    return found, lists


@of(*NAMESAKES)
def inference_tensors_elsewhere(build):
    with torch.inference_mode():
        (param,) = (torch.ones(3),)
        param.grad = torch.ones(3)
    return said(build([param]).step), param.clone()


def states_made_in_inference_mode(build):
    params = weights()
    optimizer = build(params)
    with torch.inference_mode():
        train(optimizer, params, [1])
    return said(train, optimizer, params, [2])


def gradients_made_in_inference_mode(build):
    params = weights()
    optimizer = build(params)
    with torch.inference_mode():
        gradients = make_gradients(SHAPES, torch.float32, 1)
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient.clone()
    optimizer.step()
    return contents(optimizer)


DIFFERENCES = [
    Difference(
        "`foreach=True`",
        "a_weight_twice_in_a_group",
        (optim.ASGD, optim.Adadelta, optim.Adagrad, optim.NAdam, optim.RMSprop, optim.Rprop),
        ("foreach",),
    ),
    Difference("`fused=True` for a weight without kernels", "complex_weights", ALL, ("fused",)),
    Difference("`Adagrad(fused=True)`", "sparse_gradients", (optim.Adagrad,), ("fused",)),
    Difference("`fused=True` with a subclass", "weights_of_a_tensor_subclass", ALL, ("fused",)),
    Difference("`fused=True` with a weight twice", "a_weight_twice_in_a_group", ALL, ("fused",)),
    Difference(
        "a weight twice in a group of `SGD`",
        "a_weight_twice_in_a_group",
        (optim.SGD,),
        ("default", "unfused", "foreach"),
    ),
    Difference("`SGD` with a sparse gradient", "sparse_gradients", (optim.SGD,), tuple(MODES)),
    Difference(
        "a weight without `momentum_buffer`",
        "gradients_that_come_and_go",
        (optim.SGD,),
        ("fused",),
    ),
    Difference("weights that share memory", "weights_that_share_memory", ALL, ("default", "fused")),
    Difference(
        "weights made in inference mode",
        "inference_tensors_elsewhere",
        ALL,
        ("default", "unfused", "foreach"),
    ),
    Difference(
        "weights made in inference mode", "inference_tensors_elsewhere", WITHOUT_FUSED, ("fused",)
    ),
    Difference(
        "states that were made in inference mode",
        "states_made_in_inference_mode",
        tuple(cls for cls in ALL if cls not in (optim.Adagrad, optim.SGD)),
        tuple(MODES),
    ),
    Difference(
        "states that were made in inference mode",
        "states_made_in_inference_mode",
        (optim.SGD,),
        ("default", "unfused", "foreach"),
    ),
    Difference(
        "a weight cast to another",
        "weights_cast_between_steps",
        (*ADAMS, optim.Adamax, optim.NAdam, optim.RAdam),
        tuple(MODES),
    ),
    Difference(
        "a weight cast to another",
        "weights_cast_between_steps",
        (optim.ASGD, optim.Adadelta, optim.Adagrad, optim.RMSprop, optim.Rprop, optim.SGD),
        ("default", "fused"),
    ),
]

test_does_as_torch, test_shows_something, test_differences_are_told = laws(globals(), DIFFERENCES)
