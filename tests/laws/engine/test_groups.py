"""Law: groups, options and states are what torch makes of them, changed between steps as well."""

from collections import defaultdict

import torch

from fusedstep import optim
from support.peers import (
    COUNTING,
    MODES,
    NAMESAKES,
    ROWS,
    STATEFUL,
    WITH_FOREACH,
    WITHOUT_FUSED,
    Difference,
    having,
    laws,
    of,
    own_options,
    said,
)
from support.stepping import as_parameters, contents, make_weights, train

ADAMS = (optim.Adam, optim.AdamW)
SHAPES = ((5, 4), (7,), ())


def weights(shapes=SHAPES):
    return as_parameters(make_weights(shapes, torch.float32))


# Groups


def groups_with_options_of_their_own(build):
    params = weights()
    optimizer = build(
        [
            {"params": params[0], "lr": 0.5},
            {"params": params[1:2], "weight_decay": 0.3, "maximize": True},
            {"params": iter(params[2:]), "eps": 1e-2, "what is this": "kept"},
        ],
        lr=0.01,
    )
    train(optimizer, params, [1, 2, 3])
    return contents(optimizer), optimizer.param_groups[2]["what is this"]


def a_group_added_later(build):
    params, late = weights(), weights([(3, 3)])
    optimizer = build(params, lr=0.1)
    train(optimizer, params, [1, 2])
    optimizer.add_param_group({"params": late, "lr": 0.5})
    text = said(train, optimizer, [*params, *late], [3, 4])
    return text, contents(optimizer)


def groups_that_are_refused(build):
    def attempt(group):
        optimizer = build(weights())
        return said(optimizer.add_param_group, group), len(optimizer.param_groups)

    (param,) = weights([(2,)])
    groups = [
        [param], {"params": {param}}, {"params": [1]}, {}, {"params": [param * 2]},
        {"params": [("named", param)]}, {"params": []}, {"params": param},
    ]  # fmt: skip
    return [attempt(group) for group in groups]


def named_parameters(build):
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    for index, param in enumerate(module.parameters()):
        param.data.fill_(index)
    optimizer = build(module.named_parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    named = [
        {"params": list(module[0].named_parameters()), "lr": 0.1},
        {"params": list(module[1].named_parameters())},
    ]
    groups = build(named).param_groups
    return contents(optimizer), [
        group["param_names"] for group in (*optimizer.param_groups, *groups)
    ]


def options_changed_between_steps(build):
    params = weights()
    optimizer = build(params)
    for step, lr in enumerate((0.1, 0, 0.5, 1), start=1):
        optimizer.param_groups[0].update(lr=lr, weight_decay=0.1 * step, maximize=step > 2)
        train(optimizer, params, [step])
    return contents(optimizer)


def weights_in_a_tuple(build):
    params = weights()
    optimizer = build(params)
    train(optimizer, params, [1])
    optimizer.param_groups[0]["params"] = tuple(params)
    train(optimizer, params, [2, 3])
    return contents(optimizer)


def weights_added_and_removed_by_hand(build):
    params = weights()
    optimizer = build(params[:2])
    train(optimizer, params[:2], [1])
    optimizer.param_groups[0]["params"] = params[1:]
    text = said(train, optimizer, params[1:], [2])
    optimizer.param_groups[0]["params"].clear()
    optimizer.step()
    return text, len(optimizer.state)


# Learning rates that are tensors


def a_tensor_lr_changed_in_place(build):
    params = weights()
    lr = torch.tensor(0.1)
    optimizer = build(params, lr=lr)
    for step in range(1, 5):
        lr.mul_(0.5)
        train(optimizer, params, [step])
    return contents(optimizer), optimizer.param_groups[0]["lr"] is lr, optimizer.defaults["lr"]


def tensor_lrs_of_other_shapes_and_types(build):
    found = []
    for lr in (torch.tensor([0.1]), torch.tensor([[0.1]], dtype=torch.float64), torch.tensor(1)):
        params = weights()
        optimizer = build(params, lr=lr)
        train(optimizer, params, [1, 2])
        found.append((contents(optimizer), optimizer.param_groups[0]["lr"]))
    return found


def a_tensor_lr_in_a_foreach_group(build):
    (param,) = weights([(3,)])
    param.grad = torch.ones(3)
    group = {"params": [param], "lr": torch.tensor(0.1), "foreach": True}
    return said(lambda: build([group]).step()), param.detach()


# Printed groups


@of(*NAMESAKES)
def printed(build):
    optimizer = build([{"params": weights(), "lr": 0.5}, {"params": weights()}])
    lines = repr(optimizer).splitlines()
    own = own_options(build.cls)
    return [line for line in lines if line.strip().partition(":")[0] not in own]


def kinds_of_things(build):
    params = weights()
    optimizer = build(params)
    train(optimizer, params, [1])
    return {
        "optimizer": isinstance(optimizer, torch.optim.Optimizer),
        "state": isinstance(optimizer.state, defaultdict),
        "missing state": optimizer.state["missing"],
        "keys": [list(optimizer.state[param]) for param in params],
        "types": [
            (type(v), v.dtype, v.shape, v.requires_grad, v.is_contiguous(), v.device.type)
            for param in params
            for v in optimizer.state[param].values()
        ],
    }


def types_where_doubles_are_the_default(build):
    torch.set_default_dtype(torch.float64)
    try:
        params = weights()
        optimizer = build(params)
        train(optimizer, params, [1])
    finally:
        torch.set_default_dtype(torch.float32)
    return [[v.dtype for v in optimizer.state[param].values()] for param in params]


# States changed by hand


@of(*STATEFUL)
def states_taken_away(build):
    """The first, and the last."""
    found = []
    for lost in (0, -1):
        params = weights()
        optimizer = build(params)
        train(optimizer, params, [1])
        del optimizer.state[params[0]][list(optimizer.state[params[0]])[lost]]
        found.append(said(train, optimizer, params, [2]))
    return found


def all_states_taken_away(build):
    params = weights()
    optimizer = build(params)
    train(optimizer, params, [1, 2])
    optimizer.state.clear()
    return said(train, optimizer, params, [3]), contents(optimizer)


@of(*COUNTING)
def a_number_for_a_step(build):
    """As in old dictionaries, but loading one makes tensors of them."""
    params = weights()
    optimizer = build(params)
    train(optimizer, params, [1])
    before = contents(optimizer)
    optimizer.state[params[1]]["step"] = 3
    text = said(train, optimizer, params, [2])
    optimizer.state[params[1]]["step"] = torch.tensor(1.0)
    return text, before, contents(optimizer)


@of(*COUNTING)
def a_double_for_a_step(build):
    params = weights()
    optimizer = build(params)
    train(optimizer, params, [1])
    optimizer.state[params[1]]["step"] = torch.tensor(5.0, dtype=torch.float64)
    return said(train, optimizer, params, [2])


@of(*ADAMS)
def amsgrad_switched_on(build):
    params = weights()
    optimizer = build(params)
    train(optimizer, params, [1])
    optimizer.param_groups[0]["amsgrad"] = True
    return said(train, optimizer, params, [2])


def states_of_the_users_own(build):
    params = weights()
    optimizer = build(params)
    train(optimizer, params, [1])
    optimizer.state[params[0]]["mine"] = "kept"
    optimizer.state["mine too"] = {"any": "thing"}
    train(optimizer, params, [2])
    return optimizer.state[params[0]]["mine"], optimizer.state["mine too"]


@of(optim.Adagrad)
def an_accumulator_of_one_group(build):
    (param,) = weights([(3,)])
    optimizer = build([{"params": [param], "initial_accumulator_value": 0.5}])
    param.grad = torch.ones(3)
    optimizer.step()
    return param.detach()


# Without one of several states torch's step is a KeyError.
SEVERAL = tuple(cls for cls in STATEFUL if len(ROWS[cls].states + ROWS[cls].numbers) > 1)
DIFFERENCES = [
    Difference(
        "options that exclude each other",
        "a_tensor_lr_in_a_foreach_group",
        WITH_FOREACH,
        ("fused",),
    ),
    Difference(
        "a tensor `lr` with `foreach=True`",
        "a_tensor_lr_in_a_foreach_group",
        tuple(cls for cls in having("capturable") if cls in {*WITH_FOREACH} - {*WITHOUT_FUSED}),
        ("default", "unfused", "foreach"),
    ),
    Difference(
        "`step`",
        "types_where_doubles_are_the_default",
        COUNTING,
        ("default", "unfused", "foreach"),
    ),
    Difference("`step`", "types_where_doubles_are_the_default", WITHOUT_FUSED, ("fused",)),
    Difference("a step count of `ASGD`", "a_number_for_a_step", (optim.ASGD,), tuple(MODES)),
    Difference("`step`", "a_double_for_a_step", COUNTING, ("default", "fused")),
    Difference("`amsgrad` switched on", "amsgrad_switched_on", ADAMS, tuple(MODES)),
    Difference("a state, or a part of it", "states_taken_away", SEVERAL, tuple(MODES)),
    *(
        Difference("a state, or a part of it", name, (optim.Adagrad,), tuple(MODES), until="2.12")
        for name in (
            "a_group_added_later",
            "all_states_taken_away",
            "weights_added_and_removed_by_hand",
        )
    ),
    *(
        Difference("a weight without `momentum_buffer`", name, (optim.SGD,), ("fused",))
        for name in ("states_taken_away", "weights_added_and_removed_by_hand")
    ),
    Difference(
        "`initial_accumulator_value` in one",
        "an_accumulator_of_one_group",
        (optim.Adagrad,),
        tuple(MODES),
    ),
]

test_does_as_torch, test_shows_something, test_differences_are_told = laws(globals(), DIFFERENCES)
