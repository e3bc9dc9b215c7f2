"""Steps whose gradients hold NaN or infinity: an error that names the weight, or no step."""

import copy
import functools
import math

import pytest
import torch

import fusedstep
from fusedstep import optim
from fusedstep._api.registry import classes
from fusedstep._step.limits import max_grad_norm
from support.cases import PLAIN, thinned
from support.composites import ROWS, stepped
from support.one_pass import MODES, build, params_of
from support.stepping import assert_same_bits, assert_same_contents, contents

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

BAD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def spoil(optimizer, place, value):
    """Writes a number into the gradient of a weight, which may be sparse."""
    grad = params_of(optimizer)[place].grad
    (grad._values() if grad.is_sparse else grad).view(-1)[-1] = value


def subjects():
    """Every class in every mode after a step, with its next gradients: rows, and composites."""
    for case, mode in thinned(PLAIN, MODES):
        yield pytest.param(
            lambda c=case, m=mode: build(c, torch.float32, m)[0], id=f"{case}-{mode}"
        )
    for row in ROWS:
        for fused in (None, False):
            make = functools.partial(stepped, row, 2, 3, fused=fused)
            yield pytest.param(lambda make=make: make()[1], id=f"{row}-{fused}")


EACH = pytest.mark.parametrize("make", list(subjects()))


def grads_of(optimizer):
    return [param.grad.clone() for param in params_of(optimizer)]


def assert_grads(optimizer, before):
    for param, grad in zip(params_of(optimizer), before, strict=True):
        values = [each._values() if each.is_sparse else each for each in (param.grad, grad)]
        assert_same_bits(*values, "gradient")


@EACH
def test_the_error_names_the_first_weight_and_changes_nothing(make):
    for arguments in ({}, {"max_norm": 1.0}, {"max_norm": 1.0, "zero_grad": True}):
        for value in BAD.values():
            optimizer = make()
            for place in (2, 1):
                spoil(optimizer, place, value)
            before, grads = contents(optimizer), grads_of(optimizer)
            with pytest.raises(RuntimeError, match="of parameter 1 of group 0 is not finite"):
                optimizer.step(**arguments, error_if_nonfinite=True)
            assert_same_contents(contents(optimizer), before)
            assert_grads(optimizer, grads)


@EACH
def test_a_step_with_finite_gradients_is_the_same_with_the_check(make):
    expected, optimizer = make(), make()
    norm = optimizer.step(max_norm=0.5, error_if_nonfinite=True)
    assert_same_bits(norm, expected.step(max_norm=0.5), "norm")
    assert_same_contents(contents(optimizer), contents(expected))
    assert optimizer.step(error_if_nonfinite=True) is None


def test_the_error_has_the_name_of_a_weight_that_has_one():
    model = torch.nn.Linear(3, 2)
    optimizer = optim.AdamW(model.named_parameters())
    model.weight.grad, model.bias.grad = torch.ones(2, 3), torch.full((2,), math.inf)
    with pytest.raises(RuntimeError, match=r"gradient of parameter 'bias' is not finite"):
        optimizer.step(error_if_nonfinite=True)


@pytest.mark.parametrize("fused", [True, False])
def test_a_norm_may_overflow_while_gradients_do_not(fused):
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    param.grad = torch.full_like(param, 1e200)
    with pytest.raises(RuntimeError, match=r"^the norm of all gradients is inf"):
        optim.SGD([param], fused=fused).step(error_if_nonfinite=True)
    assert (param == 1).all()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_other_dtypes(dtype, fused):
    if dtype.is_complex and fused:
        return
    param = torch.nn.Parameter(torch.ones(40, dtype=dtype))
    param.grad = torch.full_like(param, 60000)  # its square is beyond float16
    optimizer = optim.AdamW([param], fused=fused)
    optimizer.step(max_norm=1.0, error_if_nonfinite=True)
    param.grad[7] = math.nan
    with pytest.raises(RuntimeError, match="parameter 0 of group 0 is not finite"):
        optimizer.step(max_norm=1.0, error_if_nonfinite=True)


def test_steps_in_the_backward_pass_and_overlapping_ones_refuse_the_check():
    model = torch.nn.Linear(3, 2)
    optimizer = optim.AdamW(model.parameters())
    with (
        fusedstep.step_in_backward(optimizer),
        pytest.raises(RuntimeError, match=r"step\(error_if_nonfinite=True\) comes after"),
    ):
        optimizer.step(error_if_nonfinite=True)
    with pytest.raises(RuntimeError, match=r"step\(error_if_nonfinite=…\) needs all gradients"):
        fusedstep.offload(optim.AdamW(model.parameters())).step(error_if_nonfinite=True)


def test_an_offloaded_optimizer_names_the_weight():
    model = torch.nn.Linear(3, 2)
    optimizer = fusedstep.offload(optim.AdamW(model.named_parameters()), overlap=False)
    before = copy.deepcopy(model.state_dict())
    model(torch.full((1, 3), math.nan)).sum().backward()
    with pytest.raises(RuntimeError, match=r"gradient of parameter 'weight' is not finite"):
        optimizer.step(error_if_nonfinite=True)
    assert_same_contents(model.state_dict(), before)


# ---- skip_nonfinite ------------------------------------------------------------------------------


def skipping(make, skips=True):
    """The optimizer of a subject, with the option."""
    optimizer = make()
    for group in optimizer.param_groups:
        group["skip_nonfinite"] = skips
    return optimizer


@EACH
@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
def test_a_step_that_is_skipped_writes_nothing_and_is_counted(make, value):
    optimizer = skipping(make)
    spoil(optimizer, 1, value)
    before, grads = contents(optimizer), grads_of(optimizer)
    optimizer.step()
    assert_same_contents(contents(optimizer), before)
    assert_grads(optimizer, grads)
    assert optimizer.step(max_norm=1.0).isnan() == math.isnan(value)
    assert_grads(optimizer, grads)
    optimizer.step(zero_grad="none")
    assert all(param.grad is None for param in params_of(optimizer))
    assert_same_contents(contents(optimizer), before)
    assert optimizer.skipped_steps == 3


@EACH
def test_other_steps_are_as_without_the_option(make):
    expected, optimizer = make(), skipping(make)
    grads = grads_of(optimizer)
    spoil(optimizer, 2, math.nan)
    optimizer.step()
    for arguments in ({}, {"max_norm": 0.5}, {}):
        for each in (expected, optimizer):
            for param, grad in zip(params_of(each), grads, strict=True):
                param.grad = grad.clone()
            each.step(**arguments)
        assert_same_contents(contents(optimizer), contents(expected))
    assert (optimizer.skipped_steps, expected.skipped_steps) == (1, 0)


@pytest.mark.parametrize("cls", classes, ids=lambda cls: cls.__name__)
def test_every_class_takes_the_option(cls):
    assert cls([torch.ones(4, 4)], skip_nonfinite=True).param_groups[0]["skip_nonfinite"] is True


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_the_option_is_one_for_all_groups_and_is_saved_if_it_was_set(case):
    params = [torch.nn.Parameter(torch.ones(3, 3)) for _ in range(2)]
    plain = case.build(params)
    assert "skip_nonfinite" not in plain.param_groups[0]
    assert "skip_nonfinite" not in plain.state_dict()["param_groups"][0]
    groups = [{"params": params[:1], "skip_nonfinite": True}, {"params": params[1:]}]
    with pytest.raises(ValueError, match="skip_nonfinite must be the same in all groups"):
        case.build(groups)
    optimizer = case.build(params, skip_nonfinite=True)
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["skip_nonfinite"] is True
    optimizer.load_state_dict(plain.state_dict())  # which has no such key
    assert optimizer.param_groups[0]["skip_nonfinite"] is True
    plain.load_state_dict(saved)
    assert plain.param_groups[0]["skip_nonfinite"] is True
    if case.namesake is not None:
        case.build_namesake(params).load_state_dict(saved)


@pytest.mark.parametrize("fused", [True, None, False])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_beside_a_scaler(case, fused):
    optimizer = skipping(lambda: build(case, torch.float32, "fused")[0])
    for group in optimizer.param_groups:
        group["fused"] = fused
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    spoil(optimizer, 2, math.inf)
    before = contents(optimizer)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    assert_same_contents(contents(optimizer), before)
    assert scaler.get_scale() == 2.0
    # Without fused=True the scaler does not call the step.
    assert optimizer.skipped_steps == int(optimizer._step_supports_amp_scaling)
    spoil(optimizer, 2, 1.0)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    assert contents(optimizer).keys() == before.keys()
    assert any(not torch.equal(value, before[name]) for name, value in contents(optimizer).items())


@pytest.mark.parametrize(
    "options",
    [{"master_weights": True}, {"rounding": "stochastic"}, {"state_dtype": "int8"}],
    ids=str,
)
def test_master_copies_codes_and_compensations_stay(options):
    param = torch.nn.Parameter(torch.ones(5000, dtype=torch.bfloat16))
    optimizer = optim.AdamW([param], skip_nonfinite=True, **options)
    param.grad = torch.ones_like(param)
    optimizer.step()
    before = {name: torch.as_tensor(value).clone() for name, value in contents(optimizer).items()}
    param.grad[4321] = math.nan
    optimizer.step()
    assert_same_contents(contents(optimizer), before)
    assert optimizer.skipped_steps == 1


def test_an_offloaded_optimizer_skips():
    model = torch.nn.Linear(3, 2)
    inner = optim.AdamW(model.parameters(), skip_nonfinite=True)
    optimizer = fusedstep.offload(inner, overlap=False)
    before = copy.deepcopy(model.state_dict())
    model(torch.full((1, 3), math.nan)).sum().backward()
    optimizer.step()
    assert_same_contents(model.state_dict(), before)
    assert optimizer.skipped_steps == 1


@pytest.mark.parametrize("compiler", ["eager"])
def test_a_compiled_step_skips(compiler):
    param = torch.nn.Parameter(torch.ones(5))
    optimizer = optim.AdamW([param], skip_nonfinite=True)
    step = torch.compile(optimizer.step, backend=compiler)
    for value, skipped in ((1.0, 0), (math.nan, 1), (1.0, 1)):
        param.grad = torch.full_like(param, value)
        step()
        assert optimizer.skipped_steps == skipped
    assert param.isfinite().all()
    assert optimizer.state[param]["step"] == 2


# ---- grad_norm -----------------------------------------------------------------------------------


@EACH
def test_the_norm_of_a_step_that_took_it_can_be_read(make):
    optimizer = make()
    is_clipping = any(group.get("max_grad_norm") for group in optimizer.param_groups)
    assert is_clipping or optimizer.grad_norm is None
    norm = optimizer.step(max_norm=0.5)
    assert_same_bits(optimizer.grad_norm, norm, "norm")
    optimizer.step()  # takes none
    assert_same_bits(optimizer.grad_norm, norm, "norm")
    for name, value in (("max_grad_norm", 0.25), ("skip_nonfinite", True)):
        other = make()
        expected = make().step(max_norm=1.0)
        for group in other.param_groups:
            group[name] = value
        other.step()
        assert_same_bits(other.grad_norm, expected, name)


@EACH
def test_an_infinite_limit_takes_the_norm_and_clips_nothing(make):
    expected = make().step(max_norm=1.0)
    plain = make()
    clips_itself = max_grad_norm(plain) is not None
    plain.step()
    optimizer = make()
    assert_same_bits(optimizer.step(max_norm=math.inf), expected, "norm")
    assert_same_bits(optimizer.grad_norm, expected, "norm")
    assert_same_contents(contents(optimizer), contents(plain))
    if clips_itself or isinstance(optimizer, optim.Lamb):  # whose default is infinite
        return
    optimizer = make()
    for group in optimizer.param_groups:
        group["max_grad_norm"] = math.inf
    optimizer.step()
    assert_same_bits(optimizer.grad_norm, expected, "norm")
    assert_same_contents(contents(optimizer), contents(plain))


def test_a_step_that_raises_leaves_the_norm_of_the_last_one():
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = optim.AdamW([param])
    param.grad = torch.ones(4)
    optimizer.step(max_norm=1.0)
    param.grad[2] = math.nan
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.step(error_if_nonfinite=True)
    assert optimizer.grad_norm == 2


@pytest.mark.parametrize("fused", [True, None])
def test_the_norm_of_scaled_gradients_is_that_of_the_unscaled(fused):
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = optim.AdamW([param], fused=fused, max_grad_norm=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    param.grad = torch.full((4,), 8.0)
    scaler.step(optimizer)
    assert optimizer.grad_norm == 2


def test_the_norm_of_an_iteration_of_steps_in_the_backward_pass():
    def trained(wrap):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Linear(8, 2))
        optimizer = optim.SGD(model.parameters(), lr=0.0)
        found = wrap(optimizer)
        optimizer = found if isinstance(found, torch.optim.Optimizer) else optimizer
        model(torch.ones(4, 3)).square().sum().backward()
        return optimizer

    expected = trained(lambda optimizer: None).step(max_norm=0.5)
    previous = {"max_previous_norm": 0.5}
    for wrap, arguments in (
        (lambda each: fusedstep.step_in_backward(each, bucket_cap_mb=0, **previous), {}),
        (lambda each: fusedstep.offload(each, bucket_cap_mb=0, **previous), {}),
        (lambda each: fusedstep.offload(each, overlap=False), {"max_norm": 0.5}),
    ):
        optimizer = trained(wrap)
        assert optimizer.grad_norm is None
        optimizer.step(**arguments)
        torch.testing.assert_close(optimizer.grad_norm, expected, rtol=1e-6, atol=0)
