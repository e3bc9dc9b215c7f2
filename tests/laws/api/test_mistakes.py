"""Law: what users get wrong is an error that names it and says what to write instead.

Nothing has changed by then: options, states, counts and weights are as they were.
"""

import copy
import inspect
import pickle
import re

import pytest
import torch

import fusedstep
from fusedstep import optim
from fusedstep._api.foreign import FOREIGN
from support.cases import PLAIN
from support.mistakes import EACH, EACH_WITH_STATES, MODES, SHAPES, Unchanged, trained
from support.stepping import as_parameters, assert_same_contents, contents, make_weights


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
    with pytest.raises(error, match=r"Invalid options of group 0, .*betas="):
        optimizer.step()
    unchanged.check()


@pytest.mark.parametrize("fused", [True, False])
def test_an_option_that_is_none_is_told_with_the_number_of_its_group(fused):
    params = as_parameters(make_weights(SHAPES, torch.float32))
    optimizer = optim.AdamW([{"params": params[:1]}, {"params": params[1:]}], fused=fused)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.param_groups[1]["lr"] = [1]
    with pytest.raises(TypeError, match=r"Invalid options of group 1, .*lr=\[1\]"):
        optimizer.step()


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


def flags_of(cls):
    parameters = parameters_of(cls).values()
    return [p.name for p in parameters if p.annotation in ("bool", "bool | None")]


EVERY_CLASS = sorted({case.optimizer for case in PLAIN} | {optim.Muon, optim.MuSGD}, key=str)


@pytest.mark.parametrize("cls", EVERY_CLASS)
def test_names_for_a_flag(cls):
    """As in ``use_muon=("bias", "norm")``, which Python takes for true."""
    needed = {"momentum": 0.9} if "momentum" in parameters_of(cls) else {}
    for name in flags_of(cls):
        for value in (("bias", "norm"), ["bias"], {"bias": 1}):
            with pytest.raises(TypeError, match=f"{name} must be a bool, not "):
                cls([torch.zeros(2, 2)], **needed | {name: value})
            optimizer = cls([torch.zeros(2, 2)], **needed)
            with pytest.raises(TypeError, match=f"{name} must be a bool, not "):
                optimizer.add_param_group({"params": [torch.zeros(2, 2)], name: value})
            assert len(optimizer.param_groups) == 1


TYPOS = {"weigth_decay": "weight_decay", "use_moun": "use_muon", "LR": "lr", "betsa": "betas"}
TYPOS |= {"rnak": "rank", "maximise": "maximize", "momentums": "momentum"}
#: Keys that others leave in groups, or that users read in a loop of their own.
OF_OTHERS = ("lr_scale", "lr_mult", "wd_mult", "initial_lr", "is_expert_parallel", "name", "role")
OF_OTHERS += ("weight_decay_end", "momentum_schedule", "use_muon_after", "apply_lr", "group_index")


@pytest.mark.parametrize("cls", [*EVERY_CLASS, optim.GaLoreAdamW, optim.AdamW8bit])
def test_keys_of_a_group_with_a_typo(cls):
    for typo, option in TYPOS.items():
        if option not in parameters_of(cls):
            continue
        optimizer = cls([torch.zeros(2, 2)])
        group = {"params": [torch.zeros(2, 2)], typo: 0}
        with pytest.raises(ValueError, match=f"'{typo}' of a group .* did you mean '{option}'"):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
        with pytest.raises(ValueError, match=f"'{typo}' of a group"):
            cls([group])
    own = dict.fromkeys(OF_OTHERS, 3) | {"what is this": "kept", 5: 6}
    optimizer = cls([{"params": [torch.zeros(2, 2)]} | own])
    assert own.items() <= optimizer.param_groups[0].items()


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
        advice = r"leave it out|write .* instead|has no counterpart"
        torchs = rf"unexpected keyword argument '{name}'$"
        with pytest.raises(TypeError, match=advice if FOREIGN[name].is_advised else torchs):
            case.optimizer([torch.zeros(2)], **{name: 3})
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'no_such_option'$"):
        case.optimizer([torch.zeros(2)], no_such_option=3)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_an_option_of_the_constructor_in_step_and_the_other_way(case):
    params, optimizer = trained(case)
    unchanged = Unchanged(optimizer)
    given = {
        "skip_nonfinite": "it is an option of the constructor and of groups, skip_nonfinite=True",
        "max_grad_norm": "write max_norm=True instead",
        "lr": "it is an option of the constructor and of groups, lr=True",
        "max_norn": "did you mean 'max_norm'?",
        "speed": "its options are max_norm, zero_grad, error_if_nonfinite",
    }
    for name, text in given.items():
        with pytest.raises(TypeError, match=re.escape(".step() got an unexpected ke")) as error:
            optimizer.step(**{name: True})
        assert f"{name!r}: {text}" in str(error.value)
    unchanged.check()
    given = {
        "max_norm": "write max_grad_norm=1.0 instead, or step(max_norm=1.0)",
        "error_if_nonfinite": "it is an option of step(), step(error_if_nonfinite=1.0)",
        "zero_grad": "it is an option of step(), step(zero_grad=1.0)",
        "maximise": "did you mean 'maximize'?",
    }
    for name, text in given.items():
        with pytest.raises(TypeError, match=re.escape(f"{name!r}: {text}")):
            case.build(params, **{name: 1.0})


def test_an_offloaded_step_says_so_too():
    optimizer = fusedstep.offload(optim.AdamW([torch.nn.Parameter(torch.ones(3))]))
    for name in ("skip_nonfinite", "betas"):
        with pytest.raises(TypeError, match=f"{name!r}: it is an option of the constructor"):
            optimizer.step(**{name: True})
    with pytest.raises(TypeError, match="'zero_grad': its options are max_norm, error_if_nonfin"):
        optimizer.step(zero_grad=True)


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
    with pytest.raises(TypeError, match=r"Wrapper, which wraps .* give its \.optimizer"):
        function(Wrapper(optim.AdamW([torch.zeros(2)])))


def test_a_wrapper_of_the_class_that_it_wraps():
    wrapper = WrapperOfItsClass(optim.AdamW([torch.zeros(2)]))
    with pytest.raises(TypeError, match=r"WrapperOfItsClass, .* give its \.optimizer"):
        fusedstep.convert(wrapper)
    fusedstep.verify(wrapper)
    fusedstep.import_state_dict(wrapper, optim.AdamW([torch.zeros(2)]).state_dict())


def test_what_convert_says_of_a_foreign_optimizer():
    with pytest.raises(TypeError) as error:
        fusedstep.convert(torch.optim.LBFGS([torch.zeros(2)]))
    assert "would be lost" not in str(error.value)
    assert "torch.optim.Optimizer" not in str(error.value)
