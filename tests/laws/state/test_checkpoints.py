"""Law: checkpoints are torch's: what is in them, what is made of older ones, what is refused."""

import copy
import io
import pickle

import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fusedstep import optim
from support.peers import ALL, COUNTING, MODES, NAMESAKES, Difference, laws, of, said, without_own
from support.stepping import as_parameters, contents, make_weights, train

SHAPES = ((5, 4), (7,), ())


def weights(dtype=torch.float32):
    return as_parameters(make_weights(SHAPES, dtype))


def trained(build, steps=2, **options):
    params = weights()
    optimizer = build(params, **options)
    train(optimizer, params, range(1, steps + 1))
    return optimizer, params


def through_a_file(dictionary):
    file = io.BytesIO()
    torch.save(dictionary, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(build, dictionary, params, **options):
    """Another optimizer with this dictionary, two steps later."""
    params = as_parameters(params)
    optimizer = build(params, **options)
    optimizer.load_state_dict(dictionary)
    train(optimizer, params, [3, 4])
    return optimizer


# Contents of a dictionary


@of(*NAMESAKES)
def a_state_dict(build):
    params = weights()
    groups = [
        {"params": [("first", params[0])], "lr": 0.5},
        {"params": [("second", params[1]), ("third", params[2])], "weight_decay": 0.1},
    ]
    optimizer = build(groups)
    params[1].grad = torch.ones_like(params[1])  # the others have had no gradient
    optimizer.step()
    dictionary = through_a_file(optimizer.state_dict())
    return dictionary | {"param_groups": without_own(dictionary["param_groups"], build.cls)}


def a_state_dict_is_no_copy(build):
    optimizer, params = trained(build)
    dictionary = optimizer.state_dict()
    pairs = [
        (value, dictionary["state"][index][name])
        for index, param in enumerate(params)
        for name, value in optimizer.state[param].items()
    ]
    return [ours is saved for ours, saved in pairs]


def hooks_of_state_dict(build):
    optimizer, _ = trained(build)
    seen = []

    def replace(self, dictionary):
        seen.append(("post", sorted(dictionary)))
        return {"replaced": dictionary["param_groups"][0]["lr"]}

    def look(self, dictionary):
        seen.append(("last", sorted(dictionary)))

    optimizer.register_state_dict_pre_hook(lambda self: seen.append(self is optimizer))
    first = lambda self: seen.append("first")  # noqa: E731
    handle = optimizer.register_state_dict_pre_hook(first, prepend=True)
    optimizer.register_state_dict_post_hook(look)
    optimizer.register_state_dict_post_hook(replace, prepend=True)
    dictionaries = [optimizer.state_dict()]
    handle.remove()
    dictionaries.append(optimizer.state_dict())
    return seen, dictionaries


def hooks_of_load_state_dict(build):
    optimizer, params = trained(build)
    dictionary = copy.deepcopy(optimizer.state_dict())
    seen = []

    def halve(self, dictionary):
        seen.append(("pre", sorted(dictionary)))
        dictionary["param_groups"] = [g | {"lr": 0.5} for g in dictionary["param_groups"]]

    def clear(self, dictionary):
        return dictionary | {"state": {0: dictionary["state"][0]}}

    def look(self):
        seen.append(("post", len(self.state), self.param_groups[0]["lr"]))
        self.param_groups[0]["lr"] = 0.25

    other = build(params)
    other.register_load_state_dict_pre_hook(clear)
    other.register_load_state_dict_pre_hook(halve, prepend=True)
    other.register_load_state_dict_post_hook(look)
    other.load_state_dict(dictionary)
    return seen, other.param_groups[0]["lr"], contents(other), len(dictionary["state"])


# Loading


def round_trips(build):
    optimizer, params = trained(build, lr=0.1)
    dictionary = through_a_file(optimizer.state_dict())
    return contents(resumed(build, dictionary, params))


def a_tensor_lr_in_a_dictionary(build):
    lr = torch.tensor(0.1)
    optimizer, params = trained(build, lr=lr)
    dictionary = optimizer.state_dict()
    other = resumed(build, dictionary, params)
    group = other.param_groups[0]
    return contents(other), group["lr"], group["lr"] is lr, other.defaults["lr"]


@of(*NAMESAKES)
def dictionaries_without_newer_options(build):
    found = []
    names = (
        "foreach", "maximize", "differentiable", "fused", "capturable", "amsgrad",
        "decoupled_weight_decay",
    )  # fmt: skip
    for missing in (*((name,) for name in names), names):
        optimizer, params = trained(build)
        dictionary = through_a_file(optimizer.state_dict())
        for group in dictionary["param_groups"]:
            for name in missing:
                group.pop(name, None)
        other = resumed(build, dictionary, params)
        groups = without_own(other.state_dict()["param_groups"], build.cls)
        found.append((contents(other), groups))
    return found


@of(*COUNTING)
def dictionaries_with_numbers_for_steps(build):
    optimizer, params = trained(build)
    dictionary = copy.deepcopy(optimizer.state_dict())
    for number, state in zip((2, 2.0, 7), dictionary["state"].values(), strict=True):
        state["step"] = number
    return contents(resumed(build, dictionary, params))


def dictionaries_that_do_not_fit(build):
    optimizer, _ = trained(build)
    (group,) = optimizer.state_dict()["param_groups"]
    dictionaries = [
        {"state": {}, "param_groups": []},
        {"state": {}, "param_groups": [group, group]},
        {"state": {}, "param_groups": [group | {"params": [0]}]},
        {"param_groups": [group]},
        {"state": {}},
        {},
    ]
    before = contents(optimizer)
    return [said(optimizer.load_state_dict, each) for each in dictionaries], [
        before,
        contents(optimizer),
    ]


def dictionaries_with_more_than_torch_knows(build):
    optimizer, params = trained(build)
    dictionary = copy.deepcopy(optimizer.state_dict())
    dictionary["state"][0]["mine"] = torch.ones(2)
    dictionary["state"][1]["mine"] = [7, {"and": torch.ones(1)}]  # of a text torch makes nonsense
    dictionary["state"]["of no weight"] = {"kept": torch.ones(1)}
    dictionary["param_groups"][0]["mine too"] = 3
    other = build(params)
    other.load_state_dict(dictionary)
    train(other, params, [3])
    return (
        [other.state[params[index]]["mine"] for index in (0, 1)],
        other.state["of no weight"],
        other.param_groups[0]["mine too"],
    )


def names_in_dictionaries(build):
    def named(prefix):
        return [(f"{prefix} {index}", param) for index, param in enumerate(weights())]

    found = []
    for source, target in (("old", "new"), ("old", None), (None, "new")):
        optimizer = build(named(source) if source else weights())
        other = build(named(target) if target else weights())
        other.load_state_dict(optimizer.state_dict())
        found.append(other.param_groups[0].get("param_names"))
    return found


def options_come_with_the_dictionary(build):
    decay = {"weight_decay": 0.2} if build.cls.__name__ != "Rprop" else {}  # which has none
    optimizer, params = trained(build, lr=0.3, maximize=True, **decay)
    other = build(params)
    other.load_state_dict(optimizer.state_dict())
    (group,) = without_own(other.param_groups, build.cls)
    names = ("lr", "weight_decay", "maximize", "fused", "foreach")
    return [group[name] for name in names if name in group]


@of(optim.Adam, optim.AdamW)
def amsgrad_between_dictionaries(build):
    """Loads into an optimizer with amsgrad from one without, and the other way."""
    found = []
    for saved, loads in ((True, False), (False, True)):
        optimizer, params = trained(build, amsgrad=saved)
        other = resumed(build, optimizer.state_dict(), params, amsgrad=loads)
        found.append(contents(other))
    return found


def a_loaded_dictionary_afterwards(build):
    """True if the steps of the second optimizer change the dictionary that it was loaded from."""
    optimizer, params = trained(build)
    dictionary = optimizer.state_dict()
    before = copy.deepcopy(dictionary["state"])
    resumed(build, dictionary, params)
    return [
        all(torch.equal(value, dictionary["state"][index][name]) for name, value in state.items())
        for index, state in before.items()
    ]


def params_and_states_swapped_in(build):
    swapped_in = getattr(torch.optim, "swap_in_optimizer_params_and_state", None)
    if swapped_in is None:  # it came with torch 2.15
        return None
    optimizer, params = trained(build)
    saved, others = copy.deepcopy(optimizer.state_dict()), as_parameters(params)
    with swapped_in(optimizer, dict(enumerate(others)), saved):
        train(optimizer, others, [3, 4])
        within = contents(optimizer)
    after = contents(optimizer)
    train(optimizer, params, [3, 4])
    return within, [*saved["state"].values()], after, contents(optimizer)


def distributed_checkpoints(build):
    """The functions of torch.distributed.checkpoint, which make missing states by a step."""
    module = torch.nn.Linear(3, 2)
    for param in module.parameters():
        param.data.fill_(0.5)
    optimizer = build(module.parameters(), lr=0.1)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    dictionary = get_optimizer_state_dict(module, optimizer)
    twin = copy.deepcopy(module)
    for param in twin.parameters():
        param.grad = None
    other = build(twin.parameters(), lr=0.1)
    set_optimizer_state_dict(twin, other, dictionary)
    twin(torch.ones(1, 3)).sum().backward()
    other.step()
    return sorted(dictionary["state"]), contents(other)


# Copies


def copies(build):
    found = []
    for duplicate in (copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))):
        optimizer, params = trained(build)
        optimizer.register_step_post_hook(lambda *_: found.append("a copy has no hooks"))
        for param in params:
            param.grad = None
        copied = duplicate(optimizer)
        copied_params = copied.param_groups[0]["params"]
        train(copied, copied_params, [3, 4])
        found.append((contents(copied), contents(optimizer)))
        found.append(
            [sorted(copied.defaults) == sorted(optimizer.defaults), type(copied) is build.cls]
        )
    return found


DIFFERENCES = [
    Difference(
        "after `load_state_dict`", "a_loaded_dictionary_afterwards", ALL, ("default", "fused")
    ),
    Difference("states of `Adagrad`", "a_state_dict", (optim.Adagrad,), tuple(MODES)),
    Difference(
        "a dictionary of `SGD` without `fused`",
        "dictionaries_without_newer_options",
        (optim.SGD,),
        tuple(MODES),
    ),
]

test_does_as_torch, test_shows_something, test_differences_are_told = laws(globals(), DIFFERENCES)
