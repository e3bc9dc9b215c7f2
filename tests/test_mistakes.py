"""Law: what users get wrong is an error that names it and says what to write instead.

Nothing has changed by then: options, states, counts and weights are as they were.
"""

import copy
import inspect
import pickle

import pytest
import torch

import fusedstep
from cases import PLAIN, WITH_COUNTS, WITH_STATES
from fusedstep import optim
from fusedstep.optim._foreign import FOREIGN
from fusedstep.optim._states import StateStore
from stepping import (
    as_parameters,
    assert_counts,
    assert_same_contents,
    contents,
    make_weights,
    train,
)

SHAPES = ((4, 5), (7,))
MODES = pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
EACH = pytest.mark.parametrize("case", PLAIN, ids=str)
EACH_WITH_STATES = pytest.mark.parametrize("case", WITH_STATES, ids=str)
EACH_WITH_COUNTS = pytest.mark.parametrize("case", WITH_COUNTS, ids=str)


def parameters_of(cls):
    return inspect.signature(cls).parameters


def numbers_of(cls):
    """The options that are single numbers."""
    parameters = parameters_of(cls).values()
    return [p.name for p in parameters if p.annotation.startswith("float")]


NUMBERS = [
    pytest.param(case, name, id=f"{case}-{name}")
    for case in PLAIN
    for name in numbers_of(case.optimizer)
]


def trained(case, steps=2, names=None, dtype=torch.float32, **options):
    params = as_parameters(make_weights(SHAPES, dtype))
    optimizer = case.build(list(zip(names, params, strict=True)) if names else params, **options)
    train(optimizer, params, range(1, steps + 1))
    return params, optimizer


class Unchanged:
    """Looks at an optimizer before a mistake and after it."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.before = self.look()

    def look(self):
        options = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        return contents(self.optimizer), copy.deepcopy(options)

    def check(self):
        found, options = self.look()
        assert_same_contents(found, self.before[0])
        assert options == self.before[1]


# Betas


BETAS = [
    ((0.9,), ValueError, r"betas must be \(beta1, beta2{}\), not \(0\.9,\)"),
    ((0.9, 0.99, 0.999, 0.9), ValueError, r"betas must be \(beta1, beta2{}\), not \(0\.9, 0\.99"),
    (0.9, TypeError, r"betas must be \(beta1, beta2{}\), not 0\.9"),
    (None, TypeError, r"betas must be \(beta1, beta2{}\), not None"),
    ("0.9", TypeError, r"betas must be \(beta1, beta2{}\), not '0\.9'"),
    (("0.9", 0.999), TypeError, r"betas\[0\] must be a number, not '0\.9': write float\('0\.9'\)"),
    ((0.9, None), TypeError, r"betas\[1\] must be a number, not None"),
]


@pytest.mark.parametrize(("betas", "error", "text"), BETAS, ids=[str(row[0]) for row in BETAS])
@pytest.mark.parametrize("case", [case for case in PLAIN if case.has("betas")], ids=str)
def test_betas(case, betas, error, text):
    text = text.format(", beta3" if len(case.betas) == 3 else "")
    with pytest.raises(error, match=text):
        case.build(as_parameters(make_weights(SHAPES, torch.float32)), betas=betas)
    _, optimizer = trained(case)
    unchanged = Unchanged(optimizer)
    with pytest.raises(error, match=text):
        optimizer.add_param_group({"params": [torch.zeros(2)], "betas": betas})
    dictionary = copy.deepcopy(optimizer.state_dict())
    dictionary["param_groups"][0] |= {"betas": betas, "lr": 7.0}
    with pytest.raises(error, match=f"group 0 of the dictionary: {text}"):
        optimizer.load_state_dict(dictionary)
    unchanged.check()
    optimizer.param_groups[0]["betas"] = betas
    unchanged = Unchanged(optimizer)
    with pytest.raises(error, match=r"Invalid options of a group, .*betas="):
        optimizer.step()
    unchanged.check()


def test_betas_of_others():
    params = [torch.zeros(2)]
    with pytest.raises(ValueError, match=r"\(beta1, beta2\), not .*; Adan has three"):
        optim.AdamW(params, betas=(0.98, 0.92, 0.99))
    with pytest.raises(ValueError, match=r"\(beta1, beta2, beta3\), not .*; other optimizers"):
        optim.Adan(params, betas=(0.9, 0.999))


# Numbers given as texts


@pytest.mark.parametrize(("case", "name"), NUMBERS)
def test_a_text_for_a_number(case, name):
    text = rf"{name} must be a number, not '1e-3': write float\('1e-3'\)"
    params = as_parameters(make_weights(SHAPES, torch.float32))
    with pytest.raises(TypeError, match=text):
        case.build(params, **{name: "1e-3"})
    with pytest.raises(TypeError, match=text):
        case.build([{"params": params, name: "1e-3"}])
    optimizer = case.build(params[:1])
    with pytest.raises(TypeError, match=text):
        optimizer.add_param_group({"params": params[1:], name: "1e-3"})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(("case", "name"), NUMBERS)
def test_a_text_for_a_number_in_a_dictionary(case, name):
    _, optimizer = trained(case)
    dictionary = copy.deepcopy(optimizer.state_dict())
    dictionary["param_groups"][0] |= {"lr": 7.0, name: "1e-3"}
    unchanged = Unchanged(optimizer)
    for load in (optimizer.load_state_dict, lambda d: fusedstep.import_state_dict(optimizer, d)):
        with pytest.raises(TypeError, match=rf"group 0 .*{name} must be a number, not '1e-3'"):
            load(dictionary)
        unchanged.check()


@MODES
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(("case", "name"), NUMBERS)
def test_a_text_for_a_number_of_a_group_in_use(case, name, steps, fused):
    _, optimizer = trained(case, steps=steps, fused=fused)
    optimizer.param_groups[0][name] = "1e-3"
    unchanged = Unchanged(optimizer)
    with pytest.raises(TypeError, match=rf"{name} must be a number, not '1e-3'"):
        optimizer.step()
    unchanged.check()


@pytest.mark.parametrize("text", ["true", "False", "None"])
@EACH
def test_a_text_for_a_flag(case, text):
    """Python takes each of them for true."""
    _, optimizer = trained(case)
    unchanged = Unchanged(optimizer)
    for name in ("fused", "foreach", "maximize"):
        dictionary = copy.deepcopy(optimizer.state_dict())
        dictionary["param_groups"][0][name] = text
        with pytest.raises(TypeError, match=f"{name} must not be a text: '{text}'"):
            optimizer.load_state_dict(dictionary)
    unchanged.check()


@pytest.mark.parametrize(("case", "name"), NUMBERS)
def test_no_number_at_all(case, name):
    if parameters_of(case.optimizer)[name].annotation == "float | None":
        pytest.skip("None stands for the default")
    with pytest.raises(TypeError, match=f"{name} must be a number, not None"):
        case.build(as_parameters(make_weights(SHAPES, torch.float32)), **{name: None})


# Names of options


NAMES = [
    (optim.Lamb, "trust_clip", True, r"write max_ratio=1\.0 instead"),
    (optim.Lamb, "trust_clip", False, "write max_ratio=inf instead"),
    (optim.Lamb, "use_nvlamb", True, "write variant='nvlamb' instead"),
    (optim.Lamb, "use_nvlamb", False, "write variant='apex' instead"),
    (optim.Lamb, "bias_correction", False, "write debias=False instead"),
    (optim.Lamb, "bias_correction", True, "leave it out, for Lamb does what"),
    (optim.Lamb, "max_coeff", 10.0, r"write max_ratio=10\.0 instead"),
    (optim.Lamb, "min_coeff", 0.01, r"write min_ratio=0\.01 instead"),
    (optim.Lamb, "adam_w_mode", True, "leave it out"),
    (optim.Lamb, "adam_w_mode", False, "adam_w_mode=False has no counterpart in Lamb"),
    (optim.Lamb, "grad_averaging", False, "grad_averaging=False has no counterpart in Lamb"),
    (optim.Lamb, "caution", True, "caution=True has no counterpart in Lamb"),
    (optim.Lamb, "eps_inside_sqrt", True, "no counterpart"),
    (optim.Lamb, "adam", False, "leave it out"),
    (optim.Adam, "adam_w_mode", True, "write decoupled_weight_decay=True instead"),
    (optim.Adam, "adam_w_mode", False, "write decoupled_weight_decay=False instead"),
    (optim.AdamW, "adamw_mode", True, "leave it out"),
    (optim.AdamW, "adam_w_mode", False, "no counterpart in AdamW"),
    (optim.AdamW, "bias_correction", True, "leave it out"),
    (optim.AdamW, "bias_correction", False, "no counterpart in AdamW"),
    (optim.AdamW, "optim_bits", 8, "write state_dtype='int8' instead"),
    (optim.AdamW, "optim_bits", 4, "no counterpart in AdamW"),
    (optim.AdamW, "bf16_stochastic_round", True, "write rounding='stochastic' instead"),
    (optim.AdamW, "bf16_stochastic_round", False, "leave it out"),
    (optim.AdamW, "optim_bits", 32, "leave it out"),
    (optim.AdamW, "learning_rate", 0.1, r"write lr=0\.1 instead"),
    (optim.Adam, "fp32_optimizer_states", True, r"write state_dtype=torch\.float32 instead"),
    (optim.Adagrad, "adagrad_w_mode", True, "no counterpart in Adagrad"),
    (optim.Adagrad, "weight_decouple", True, "no counterpart in Adagrad"),
    (optim.Adan, "weight_decouple", True, "leave it out"),
]


@pytest.mark.parametrize(
    ("cls", "name", "value", "text"), NAMES, ids=[f"{c.__name__}-{n}-{v}" for c, n, v, _ in NAMES]
)
def test_names_of_other_libraries(cls, name, value, text):
    params = [torch.zeros(2)]
    start = rf"{cls.__name__}.__init__\(\) got an unexpected keyword argument '{name}': .*"
    with pytest.raises(TypeError, match=start + text):
        cls(params, **{name: value})
    if "write " in text and "variant" not in text:
        options = FOREIGN[name].ours(value)
        assert options.items() <= cls(params, **options).defaults.items(), "what it says to write"


@EACH
def test_each_name_has_advice(case):
    own = parameters_of(case.optimizer)
    for name in FOREIGN.keys() - own.keys():
        with pytest.raises(TypeError, match=r"leave it out|write .* instead|has no counterpart"):
            case.optimizer([torch.zeros(2)], **{name: 3})
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'no_such_option'$"):
        case.optimizer([torch.zeros(2)], no_such_option=3)


class WithAConstructor(optim.AdamW):
    def __init__(self, params, trust_clip):
        super().__init__(params)
        self.trust_clip = trust_clip


class PassesOn(optim.Lamb):
    def __init__(self, params, **options):
        super().__init__(params, **options)


def test_subclasses_have_options_of_their_own():
    assert WithAConstructor([torch.zeros(2)], trust_clip=True).trust_clip
    assert list(parameters_of(WithAConstructor)) == ["params", "trust_clip"]
    with pytest.raises(TypeError, match=r"Lamb.__init__\(\) .* write max_ratio=1\.0 instead"):
        PassesOn([torch.zeros(2)], trust_clip=True)


@EACH
def test_constructors_are_still_what_they_look_like(case):
    assert "lr" in parameters_of(case.optimizer)
    assert case.optimizer.__init__.__qualname__ == f"{case.optimizer.__name__}.__init__"
    _, optimizer = trained(case)
    assert_same_contents(contents(pickle.loads(pickle.dumps(optimizer))), contents(optimizer))


@EACH
def test_a_model_is_no_list_of_parameters(case):
    with pytest.raises(TypeError, match=r"'Linear' .* not iterable: pass its parameters\(\)"):
        case.build(torch.nn.Linear(2, 2))
    case.build(torch.nn.ParameterList([torch.zeros(2)]))  # which is one


# A model whose dtype has changed


@pytest.mark.parametrize("named", [True, False])
@EACH_WITH_STATES
def test_a_model_that_has_become_double(case, named):
    params, optimizer = trained(case, names=("body.weight", "body.bias") if named else None)
    optimizer.add_param_group({"params": [("head", torch.zeros(3))] if named else [torch.zeros(3)]})
    params[1].data = params[1].data.double()
    for param in params:
        param.grad = torch.ones_like(param)
    unchanged = Unchanged(optimizer)
    name = "parameter 'body.bias'" if named else "parameter 1 of group 0"
    with pytest.raises(RuntimeError, match=f"^{name}: a state is float32 but the weight is"):
        optimizer.step()
    unchanged.check()
    with pytest.raises(RuntimeError, match=r"optimizer\.load_state_dict\(optimizer\.state_dict"):
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())  # as it says
    optimizer.step()
    assert optimizer.state[params[1]][case.states[0]].dtype is torch.float64


@MODES
@EACH
def test_errors_name_the_parameter_of_a_gradient(case, fused):
    params, optimizer = trained(case, names=("body.weight", "body.bias"), fused=fused)
    params[0].grad = None  # the first of the native side's list is now the second
    params[1].data = torch.zeros(9)
    params[1].grad = torch.zeros(9)
    params[1].data = torch.zeros(7)
    with pytest.raises(RuntimeError, match=r"^parameter 'body\.bias': the gradient's shape"):
        optimizer.step()


# Dictionaries


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
    "no moment": (without("moment"), f"the state of {PARAMETER} has no {{}}: it is not one of"),
    "step text": (of_state("step", "3"), f"{A_NUMBER} '3'"),
    "step numpy": (of_state("step", lambda step: step.numpy()), f"{A_NUMBER} a numpy"),
    "step sparse": (of_state("step", sparse), f"{A_NUMBER} a tensor of layout"),
    "step meta": (of_state("step", lambda step: step.to("meta")), f"{A_NUMBER} .* on meta"),
    "step of two": (of_state("step", torch.ones(2)), f"{A_NUMBER} a tensor of the shape .2."),
    "step of none": (of_state("step", torch.ones(0)), f"{A_NUMBER} a tensor of the shape .0."),
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

    def runs_out_at_the_second(self, group, weights):
        calls.append(group)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        place(self, group, weights)

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
        "Adam or AdamW or Lamb",
    ):
        adan.load_state_dict(dictionary)
    with pytest.raises(ValueError, match="has no betas, eps: it is not one of AdamW"):
        adam.load_state_dict(torch.optim.SGD(adam.param_groups[0]["params"]).state_dict())


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


# Optimizers that others have wrapped


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: an optimizer by its type, which holds another."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


class WrapperOfItsClass(optim.AdamW):
    """As Lightning's: of the class that it wraps as well, so that verify() takes it."""

    def __init__(self, optimizer):
        vars(self).update(vars(optimizer))
        self.optimizer = optimizer


@pytest.mark.parametrize(
    "function", [fusedstep.verify, fusedstep.convert, lambda o: fusedstep.import_state_dict(o, {})]
)
def test_a_wrapped_optimizer(function):
    with pytest.raises(TypeError, match=r"Wrapper, .* in its attribute \.optimizer: give that"):
        function(Wrapper(optim.AdamW([torch.zeros(2)])))


def test_a_wrapper_of_the_class_that_it_wraps():
    wrapper = WrapperOfItsClass(optim.AdamW([torch.zeros(2)]))
    with pytest.raises(TypeError, match=r"WrapperOfItsClass, .* in its attribute \.optimizer"):
        fusedstep.convert(wrapper)
    fusedstep.verify(wrapper)
    fusedstep.import_state_dict(wrapper, optim.AdamW([torch.zeros(2)]).state_dict())


def test_what_convert_says_of_a_foreign_optimizer():
    with pytest.raises(TypeError) as error:
        fusedstep.convert(torch.optim.LBFGS([torch.zeros(2)]))
    assert "would be lost" not in str(error.value)
    assert "torch.optim.Optimizer" not in str(error.value)
