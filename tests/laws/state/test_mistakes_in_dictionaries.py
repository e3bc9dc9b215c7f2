"""Law: a dictionary that does not fit is an error that names what does not, and changes nothing."""

import copy
import functools
import re

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import fusedstep
from fusedstep import optim
from fusedstep._state.states import StateStore
from support.cases import PLAIN, WITH_COUNTS, WITH_STATES
from support.mistakes import (
    EACH,
    EACH_WITH_COUNTS,
    EACH_WITH_STATES,
    MODES,
    SHAPES,
    Unchanged,
    trained,
)
from support.stepping import (
    as_parameters,
    assert_counts,
    assert_same_contents,
    contents,
    make_weights,
    train,
)


def of_state(name, value):
    def edit(case, dictionary):
        state = dictionary["state"][1]
        key = case.states[0] if name == "moment" else name
        state[key] = value(state[key]) if callable(value) else value

    return edit


def without(name):
    def edit(case, dictionary):
        del dictionary["state"][1][case.states[0] if name == "moment" else name]

    return edit


def rows_with(what):
    """Rows with the part that an edit's name begins with: states, the count, or an option."""
    plain = [case for case in PLAIN if case.states]  # their states are there with any options
    if what == "moment None":
        return plain
    if what == "no moment":  # of one that is left: without any there is no state yet
        return [case for case in plain if len(case.states + case.numbers) > 1]
    what = what.removeprefix("no ").split()[0]
    if what in ("state", "moment"):
        return WITH_STATES
    return WITH_COUNTS if what == "step" else [case for case in PLAIN if case.has(what)]


def each_edited(edits):
    return pytest.mark.parametrize(
        ("case", "name"),
        [
            pytest.param(case, name, id=f"{case}-{name}")
            for name in edits
            for case in rows_with(name)
        ],
    )


def whole(value):
    def edit(case, dictionary):
        dictionary["state"][1] = value

    return edit


def option(**options):
    def edit(case, dictionary):
        dictionary["param_groups"][1] |= options

    return edit


def sparse(tensor):
    return torch.sparse_coo_tensor(size=tensor.shape, check_invariants=True)


PARAMETER = "parameter 'second'"
MOMENT = "{} of " + PARAMETER
COUNT = f"step of {PARAMETER} must be"
A_NUMBER = f"{COUNT} an int, a float or a tensor of one element, not"
DICTIONARIES = {
    "state None": (whole(None), f"the state of {PARAMETER} must be a dict, not None"),
    "state text": (whole("text"), f"the state of {PARAMETER} must be a dict, not 'text'"),
    "state tensor": (whole(torch.ones(2)), "must be a dict, not a tensor of the shape"),
    "moment None": (of_state("moment", None), MOMENT + " must be a dense tensor .* not None"),
    "moment text": (of_state("moment", "text"), MOMENT + " must be .* not 'text'"),
    "moment numpy": (
        of_state("moment", lambda moment: moment.numpy()),
        MOMENT + " must be .* not a numpy.ndarray",
    ),
    "moment sparse": (of_state("moment", sparse), MOMENT + " must be .* layout torch.sparse_coo"),
    "moment meta": (of_state("moment", lambda moment: moment.to("meta")), MOMENT + ".* on meta"),
    "moment shape": (
        of_state("moment", lambda moment: moment[:-1]),
        MOMENT + r" has the shape \[6\], but the weight has \[7\]",
    ),
    "moment number": (
        of_state("moment", lambda moment: moment.sum()),
        MOMENT + r" has the shape \[\], but the weight has \[7\]",
    ),
    "moment complex": (
        of_state("moment", lambda moment: moment.to(torch.complex64)),
        MOMENT + " is torch.complex64 but the weight is torch.float32",
    ),
    "no moment": (without("moment"), f"the state of {PARAMETER} has no {{}}: it is not one of"),
    "step text": (of_state("step", "3"), f"{A_NUMBER} '3'"),
    "step numpy": (of_state("step", lambda step: step.numpy()), f"{A_NUMBER} a numpy"),
    "step sparse": (of_state("step", sparse), f"{A_NUMBER} a tensor of layout"),
    "step meta": (of_state("step", lambda step: step.to("meta")), f"{A_NUMBER} .* on meta"),
    "step of two": (of_state("step", torch.ones(2)), f"{A_NUMBER} a tensor of the shape .2."),
    "step of none": (of_state("step", torch.ones(0)), f"{A_NUMBER} a tensor of the shape .0."),
    "step complex": (of_state("step", torch.tensor(1j)), f"{A_NUMBER} a tensor of torch.complex64"),
    "step a complex": (of_state("step", 1j), f"{A_NUMBER} a complex"),
    "step bool": (of_state("step", torch.tensor(True)), f"{A_NUMBER} a tensor of torch.bool"),
    "step negative": (of_state("step", torch.tensor(-1.0)), f"{COUNT} finite .* 0, not -1"),
    "step -5": (of_state("step", -5), f"{COUNT} finite and at least 0, not -5"),
    "step nan": (of_state("step", float("nan")), f"{COUNT} finite and at least 0, not nan"),
    "step inf": (of_state("step", torch.tensor(torch.inf)), f"{COUNT} finite .* not inf"),
    "eps None": (option(eps=None), "group 1 of the dictionary: eps must be a number, not None"),
    "lr of two": (option(lr=torch.ones(2)), "group 1 of the dictionary: Tensor lr must be 1-elem"),
    "fused with differentiable": (
        option(fused=True, differentiable=True),
        "`fused` does not support `differentiable`",
    ),
}  # fmt: skip
COUNTS = {
    "no step": (without("step"), f"the state of {PARAMETER} has no step"),
    "step None": (of_state("step", None), f"{A_NUMBER} None"),
}


def in_two_groups(case, **options):
    """An optimizer, and a dictionary that differs from it in all that it holds."""
    params = as_parameters(make_weights(SHAPES, torch.float32))
    groups = [{"params": [pair]} for pair in zip(("first", "second"), params, strict=True)]
    optimizer = case.build(groups, **options)
    train(optimizer, params, [1, 2])
    dictionary = copy.deepcopy(optimizer.state_dict())
    dictionary["param_groups"][0]["lr"] = 7.0
    for name, value in dictionary["state"].get(0, {}).items():
        value += 40 if name == "step" else 1
    return params, optimizer, dictionary


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@MODES
@each_edited(DICTIONARIES | COUNTS)
def test_load_state_dict_takes_all_or_nothing(case, name, fused):
    edit, text = (DICTIONARIES | COUNTS)[name]
    _, optimizer, dictionary = in_two_groups(case, fused=fused)
    edit(case, dictionary)
    unchanged = Unchanged(optimizer)
    text = text.format(*case.states[:1])
    with pytest.raises((RuntimeError, TypeError, ValueError), match=text):
        optimizer.load_state_dict(dictionary)
    unchanged.check()
    optimizer.step()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@MODES
@each_edited({name: edit for name, edit in DICTIONARIES.items() if "fused" not in name})
def test_import_state_dict_takes_all_or_nothing(case, name, fused):
    edit, text = DICTIONARIES[name]
    _, optimizer, dictionary = in_two_groups(case, fused=fused)
    edit(case, dictionary)
    unchanged = Unchanged(optimizer)
    with pytest.raises((TypeError, ValueError), match=text.format(*case.states[:1])):
        fusedstep.import_state_dict(optimizer, dictionary)
    unchanged.check()
    optimizer.step()


@pytest.mark.parametrize("load", [lambda o, d: o.load_state_dict(d), fusedstep.import_state_dict])
@EACH_WITH_STATES
def test_nothing_changes_when_memory_runs_out(case, load, monkeypatch):
    _, optimizer, dictionary = in_two_groups(case)
    unchanged, calls = Unchanged(optimizer), []
    place = StateStore.place

    def runs_out_at_the_second(self, group, weights, **options):
        calls.append(group)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        place(self, group, weights, **options)

    monkeypatch.setattr(StateStore, "place", runs_out_at_the_second)
    with pytest.raises(RuntimeError, match="out of memory"):
        load(optimizer, dictionary)
    unchanged.check()


@pytest.mark.parametrize("hook", ["pre", "post"])
@EACH_WITH_STATES
def test_hooks_of_load_state_dict_see_what_they_see_in_torch(case, hook):
    """A dictionary is checked as they leave it. An error of a later hook finds it loaded."""
    params, optimizer, dictionary = in_two_groups(case)
    name = case.states[0]
    whole_state = dictionary["state"][1].pop(name)

    def mend(optimizer, dictionary):
        dictionary["state"][1][name] = whole_state

    def fail(optimizer):
        raise KeyError("mine")

    optimizer.register_load_state_dict_pre_hook(mend)
    if hook == "pre":
        optimizer.load_state_dict(dictionary)
    else:
        optimizer.register_load_state_dict_post_hook(fail)
        with pytest.raises(KeyError, match="mine"):
            optimizer.load_state_dict(dictionary)
    assert optimizer.param_groups[0]["lr"] == 7.0
    assert torch.equal(optimizer.state[params[0]][name], dictionary["state"][0][name])
    assert_counts(case, optimizer, params, [42, 2])


@MODES
@EACH_WITH_COUNTS
def test_a_count_of_the_shape_1(case, fused):
    """torch wrote such with capturable=True for some time."""
    params, optimizer, dictionary = in_two_groups(case, fused=fused)
    dictionary["state"][1]["step"] = torch.full((1,), 5.0)
    for load in (optimizer.load_state_dict, lambda d: fusedstep.import_state_dict(optimizer, d)):
        load(copy.deepcopy(dictionary))
        optimizer.step()
        assert optimizer.state[params[1]]["step"].item() == 6


def options_of(case):
    return case.build([torch.zeros(2)]).defaults.keys()


def could_be_older(source, case):
    """Its options are those of `case`, or of a dictionary of `case` from before some came."""
    lacking = options_of(case) - options_of(source)
    fits = options_of(source) <= options_of(case)
    return fits and lacking <= case.optimizer._later_options.keys()


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("source", PLAIN, ids=str)
@EACH
def test_dictionaries_of_other_optimizers(case, source, steps):
    _, other = trained(source, steps=steps)
    _, optimizer = trained(case)
    dictionary = other.state_dict()
    alike = [each for each in PLAIN if options_of(each) == options_of(source)]
    likely = " or ".join(sorted(each.optimizer.__name__ for each in alike))
    text = f"not one of {case.optimizer.__name__}, but looks like one of {likely}\\."
    if could_be_older(source, case):
        if len(source.betas) != len(case.betas):
            text = "betas must be "
        elif steps == 0 or source.states == case.states:
            optimizer.load_state_dict(dictionary)
            return
    unchanged = Unchanged(optimizer)
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(dictionary)
    unchanged.check()


def test_states_of_other_optimizers():
    """With options that fit, as by hand."""
    _, adam = trained(next(case for case in PLAIN if case.optimizer is optim.AdamW))
    _, adan = trained(next(case for case in PLAIN if case.optimizer is optim.Adan))
    dictionary = adan.state_dict() | {"state": adam.state_dict()["state"]}
    with pytest.raises(
        ValueError,
        match="has no exp_avg_diff, neg_pre_grad: it is not one of Adan, but looks like one of "
        "Adam or AdamW or ADOPT or Lamb or RAdam",
    ):
        adan.load_state_dict(dictionary)
    with pytest.raises(ValueError, match="has no betas, eps: it is not one of AdamW"):
        adam.load_state_dict(torch.optim.SGD(adam.param_groups[0]["params"]).state_dict())


@pytest.mark.parametrize("name", ["Lion", "SGD", "MuSGD", "RowWiseAdagrad"])
def test_states_of_torchs_adamw_are_named_where_a_class_keeps_fewer(name):
    weight = torch.nn.Parameter(torch.ones(3, 2))
    theirs = torch.optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    theirs.step()
    optimizer = getattr(optim, name)([weight], lr=1e-3)
    text = f"keep: it is not one of {name}, but looks like one of Adam or AdamW"
    unchanged = Unchanged(optimizer)
    with pytest.raises(ValueError, match=text):
        fusedstep.import_state_dict(optimizer, theirs.state_dict())
    unchanged.check()


def test_an_optimizer_can_be_changed_by_import():
    """As the error of load_state_dict says; what it saves then is its own."""
    params, adamw = trained(next(case for case in PLAIN if case.optimizer is optim.AdamW))
    lamb = optim.Lamb(params, lr=0.5)
    own = lamb.param_groups[0].keys()
    fusedstep.import_state_dict(lamb, adamw.state_dict())
    assert lamb.param_groups[0].keys() == own
    lamb.load_state_dict(lamb.state_dict())
    back = optim.AdamW(params, fused=True)
    fusedstep.import_state_dict(back, lamb.state_dict())
    assert back.param_groups[0] == adamw.param_groups[0]
    back.load_state_dict(back.state_dict())
    with pytest.raises(ValueError, match="has no sum: it is not one of Adagrad, but looks like"):
        fusedstep.import_state_dict(optim.Adagrad(params), adamw.state_dict())


# Keys of states


def renamed(to):
    def edit(states):
        return {to(key): state for key, state in states.items()}

    return edit


KEYS = {
    "a name": (renamed(lambda key: f"layer.{key}"), "'layer.0', 'layer.1'"),
    "another number": (renamed(lambda key: key + 1), "2"),
    "one more": (lambda states: states | {7: states[0]}, "7"),
    "names of many": (lambda states: states | {f"w{i}": states[0] for i in range(9)}, ".*'w4', …"),
}


@pytest.mark.parametrize("name", KEYS)
@EACH_WITH_STATES
@pytest.mark.parametrize("door", ["load_state_dict", "import_state_dict"])
def test_a_state_of_no_parameter(door, case, name):
    edit, text = KEYS[name]
    _, optimizer, dictionary = in_two_groups(case)
    dictionary["state"] = edit(dictionary["state"])
    unchanged = Unchanged(optimizer)
    load = getattr(fusedstep, door, None) or getattr(type(optimizer), door)
    with pytest.raises(ValueError, match=f"has (states of )?{text}, which 'params' of no group"):
        load(optimizer, dictionary)
    unchanged.check()


@EACH_WITH_STATES
def test_keys_that_went_through_json(case):
    _, optimizer, _ = in_two_groups(case)
    dictionary = optimizer.state_dict()
    dictionary["state"] = renamed(str)(dictionary["state"])
    _, other, _ = in_two_groups(case)
    other.state.clear()
    fusedstep.import_state_dict(other, dictionary)
    assert_same_contents(contents(other), contents(optimizer))
    with pytest.raises(ValueError, match=r"'0', '1', .*import_state_dict loads .*JSON"):
        optimizer.load_state_dict(dictionary)


# Options and states of other libraries


def of_group(drop=(), **options):
    """Puts options into the second group, and takes those away that only our classes have."""

    def edit(case, dictionary):
        group = dictionary["param_groups"][1]
        for name in ("differentiable", "maximize", "foreach", *drop):
            group.pop(name, None)
        group |= options

    return edit


def of_weight(**state):
    def edit(case, dictionary):
        of_group()(case, dictionary)
        dictionary["state"][1] |= state

    return edit


BOTH = ["load_state_dict", "import_state_dict"]
UNKNOWN = {
    "option": (of_group(d0=1e-6, decouple=True), "d0=1e-06, decouple=True have no counterpart"),
    "option of a library": (of_group(d_coef=1.0), "d_coef=1.0 has no .* is one of prodigyopt"),
    "tensor": (of_group(prev_lr=torch.tensor(0.5)), r"prev_lr=tensor\(0.5"),
    "pair": (of_group(betas_1d=[0.9, 0.99]), r"betas_1d=\[0.9, 0.99\] has no counterpart"),
    "dtype": (of_group(momentum_dtype=torch.half), "momentum_dtype=torch.float16 has no counter"),
    "infinity": (of_group(growth_rate=float("inf")), "growth_rate=inf has no counterpart"),
    "betas apart": (of_group(drop=["betas"], beta2=0.9, beta=0.5), "beta=0.5|has no betas|beta2="),
    "caution": (of_group(caution=True), "caution=True has no counterpart"),
    "RMSpropTF": (of_group(lr_in_momentum=False), "lr_in_momentum=False has no counterpart"),
    "state": (of_weight(z=torch.ones(7), s=1), "has z, s, which .* does not keep"),
    "nested state": (of_weight(**{"0": {"step": 1}}), "has 0, which .* does not keep"),
}


@pytest.mark.parametrize("name", UNKNOWN)
@EACH_WITH_STATES
@pytest.mark.parametrize("door", BOTH)
def test_options_and_states_of_other_libraries(door, case, name):
    edit, text = UNKNOWN[name]
    _, optimizer, dictionary = in_two_groups(case)
    edit(case, dictionary)
    unchanged = Unchanged(optimizer)
    load = getattr(fusedstep, door, None) or getattr(type(optimizer), door)
    with pytest.raises(ValueError, match=text):
        load(optimizer, dictionary)
    unchanged.check()


@EACH_WITH_STATES
@pytest.mark.parametrize("door", BOTH)
def test_what_asks_for_no_formula_is_taken(door, case):
    """Notes of schedulers and of the user, options that are off, states that are None."""
    _, optimizer, dictionary = in_two_groups(case)
    of_group(initial_lr=0.5, max_lr=1.0, label="mine", mars=False, ecc=None, caution=False)(
        case, dictionary
    )
    dictionary["param_groups"][1]["max_lr_snapshot"] = 0.25
    dictionary["param_groups"][1]["my own"] = 3
    dictionary["state"][1]["kahan_comp"] = None
    optimizer.param_groups[1]["my own"] = 2
    load = getattr(fusedstep, door, None) or getattr(type(optimizer), door)
    load(optimizer, dictionary)
    group = optimizer.param_groups[1]
    assert (group["initial_lr"], group["label"], group["my own"]) == (0.5, "mine", 3)


@pytest.mark.parametrize("door", BOTH)
def test_dictionaries_that_only_look_like_ours(door):
    """timm's NAdamW has other steps, and SGDW another decay; neither says so."""
    case = next(case for case in PLAIN if case.optimizer is optim.AdamW)
    _, optimizer, dictionary = in_two_groups(case)
    group = dictionary["param_groups"][1]
    for name in ("amsgrad", "differentiable", "fused", "decoupled_weight_decay"):
        del group[name]
    load = getattr(fusedstep, door, None) or getattr(type(optimizer), door)
    with pytest.raises(ValueError, match=r"one of timm's NAdamW|has no amsgrad"):
        load(optimizer, dictionary)
    sgd = optim.SGD([torch.ones(2)], momentum=0.5, weight_decay=0.5)
    dictionary = sgd.state_dict()
    dictionary["param_groups"][0]["caution"] = False
    del dictionary["param_groups"][0]["fused"]
    with pytest.raises(ValueError, match="one of timm's SGDW"):
        (getattr(fusedstep, door, None) or getattr(type(sgd), door))(sgd, dictionary)


# Groups without weights


@EACH_WITH_STATES
def test_a_group_without_weights_keeps_its_options(case):
    """torch's distributed checkpoints leave them out, unless the group is the last one."""

    def made(lr):
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(make_weights(SHAPES, torch.float32)[0])
        groups = [{"params": [], "lr": lr, "label": "none yet"}, {"params": [model.weight]}]
        return model, case.build(groups)

    model, optimizer = made(0.5)
    train(optimizer, [model.weight], [1])
    dictionary = get_optimizer_state_dict(model, optimizer)
    other, resumed = made(0.25)
    expected = {**resumed.param_groups[0]}
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, resumed, dictionary)
    assert resumed.param_groups[0] == expected
    assert_same_contents(contents(resumed), contents(optimizer))
    train(resumed, [other.weight], [2])


#: Checkpoints around an optimizer's dictionary, and what to pass of them.
WHOLE = {
    "a script's": (lambda own: {"model": {}, "optimizer": own, "epoch": 3}, "['optimizer']"),
    "Lightning's": (lambda own: {"state_dict": {}, "optimizer_states": [own]}, "_states'][0]"),
    "in two folders": (lambda own: {"run": {"optim": own}}, "['run']['optim']"),
    "several": (lambda own: {"a": own, "b": own}, "['a'] or state_dict['b']"),
    "a list": (lambda own: [{"optimizer": own}], "pass state_dict[0]['optimizer']"),
}


@pytest.mark.parametrize("name", WHOLE)
@EACH
def test_a_whole_checkpoint_is_an_error_that_names_the_key(case, name):
    wrap, text = WHOLE[name]
    _, optimizer = trained(case)
    unchanged, whole = Unchanged(optimizer), wrap(copy.deepcopy(optimizer.state_dict()))
    for load in (
        optimizer.load_state_dict,
        functools.partial(fusedstep.import_state_dict, optimizer),
    ):
        with pytest.raises(ValueError, match=f"{re.escape(text)}$"):
            load(whole)
        unchanged.check()
    with pytest.raises(TypeError, match="must be the dictionary of an optimizer, not list"):
        fusedstep.import_state_dict(optimizer, [3])


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("cls", [optim.Adafactor, optim.CAME])
def test_so_it_is_where_other_words_are_read(cls, name):
    wrap, text = WHOLE[name]
    optimizer = cls(as_parameters(make_weights(SHAPES, torch.float32)))
    with pytest.raises(ValueError, match=f"{re.escape(text)}$"):
        optimizer.load_state_dict(wrap(optimizer.state_dict()))
