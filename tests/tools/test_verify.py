"""Law: verify() finds native steps right, finds every injected fault, and leaves no trace."""

import copy
import gc
import math

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import fusedstep
from fusedstep import optim
from support.cases import (
    CASES,
    DTYPES,
    KINDS,
    LOW_PRECISION,
    NUMBERS,
    PLAIN,
    PRODUCTS,
    WITH_COUNTS,
    WITH_NAMESAKE,
    WITH_STATES,
    thinned,
)
from support.stepping import (
    CHUNK,
    as_parameters,
    assert_same_bits,
    assert_same_contents,
    contents,
    make_gradients,
    make_weights,
    run,
    train,
)

SHAPES = ((), (33, 31), (CHUNK + 5,), (0,))
FAULTY = 2
"""The parameter that faults are injected into."""


def closure_of(params, first=1):
    """Gives the gradients of one seeded step after the other."""
    shapes, step = [tuple(param.shape) for param in params], iter(range(first, 100))

    def closure():
        gradients = make_gradients(shapes, params[0].dtype, next(step))
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        return torch.zeros(())

    return closure


def verified(params, optimizer, steps=3, **options):
    return fusedstep.verify(optimizer, closure_of(params), steps=steps, **options)


def build(case, dtype=torch.float32, optimizer=None, **options):
    params = as_parameters(make_weights(SHAPES, dtype))
    options = {"fused": True} | case.options | case.modes | options
    return params, (optimizer or case.optimizer)(params, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_native_steps_agree(case, dtype):
    report = verified(*build(case, dtype))
    assert report.ok, report
    assert (report.steps, report.isa) == (3, fusedstep.isa())
    assert [row.shape for row in report.rows] == list(SHAPES)
    for row in report.rows:
        assert row.ulp.keys() == {"weight", *case.numbers, *case.states}
        assert row.ulp.get("step", 0) == 0
    assert 0 < report.speedup < math.inf


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_states_agree(case, dtype):
    report = verified(*build(case, dtype, state_dtype=torch.float32))
    assert report.ok, report
    for row in report.rows:
        assert row.allowed["weight"] < 0.51
        assert all(row.allowed[name] == 16.5 for name in case.states)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_any_layout_agrees(case):
    wide = make_weights([(40, 60)], torch.float32)[0]
    params = [torch.nn.Parameter(view) for view in (wide.t(), wide.clone()[:, ::2])]
    optimizer = case.build(params)

    def closure():
        params[0].grad = make_gradients([(60, 40)], torch.float32, 1)[0]
        params[1].grad = torch.full((1, 1), 0.5).expand(40, 30)

    report = fusedstep.verify(optimizer, closure)
    assert report.ok, report


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_training_goes_on_as_if_nobody_had_looked(case, dtype):
    plain_params, plain = run(case, SHAPES, dtype, steps=5)
    params, optimizer = run(case, SHAPES, dtype, steps=1)
    fusedstep.verify(optimizer, closure_of(params, first=2))
    for param in params:  # what a step leaves in the gradients is from the last one in both runs
        param.grad = param.grad.clone()
    train(optimizer, params, [5])
    assert_same_contents(contents(optimizer), contents(plain))
    for param, plain_param in zip(params, plain_params, strict=True):
        assert_same_bits(param.grad, plain_param.grad, "gradient")


# Faults. Each is given an optimizer and the function that takes its right step.


def no_fault(optimizer, step):
    step()


def wrong_weight(optimizer, step):
    step()
    param = optimizer.param_groups[0]["params"][FAULTY]
    with torch.no_grad():
        param[param.abs().argmax()] *= 1.02


def wrong_last_element(optimizer, step):
    step()
    with torch.no_grad():
        optimizer.param_groups[0]["params"][FAULTY][-1] += 0.1


def wrong_state(optimizer, step):
    step()
    param = optimizer.param_groups[0]["params"][FAULTY]
    *_, state = (s for name, s in optimizer.state[param].items() if name not in NUMBERS)
    state.view(-1)[state.abs().argmax()] *= 1.02


def wrong_count(optimizer, step):
    step()
    optimizer.state[optimizer.param_groups[0]["params"][FAULTY]]["step"] += 1


def lost_state(optimizer, step):
    step()
    optimizer.state[optimizer.param_groups[0]["params"][FAULTY]].popitem()


def skipped_parameter(optimizer, step):
    param = optimizer.param_groups[0]["params"][FAULTY]
    gradient, param.grad = param.grad, None
    step()
    param.grad = gradient


def skipped_weight(optimizer, step):
    param = optimizer.param_groups[0]["params"][FAULTY]
    before = param.detach().clone()
    step()
    with torch.no_grad():
        param.copy_(before)


def not_a_number(optimizer, step):
    step()
    with torch.no_grad():
        optimizer.param_groups[0]["params"][FAULTY].view(-1)[7] = math.nan


def one_percent_of_lr(optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] *= 1.01
    step()
    for group in optimizer.param_groups:
        group["lr"] /= 1.01


def stale_gradient(optimizer, step):
    param = optimizer.param_groups[0]["params"][FAULTY]
    gradient, param.grad = param.grad, param.grad.roll(1)
    step()
    param.grad = gradient


FAULTS = [
    wrong_weight,
    wrong_last_element,
    skipped_parameter,
    skipped_weight,
    not_a_number,
    one_percent_of_lr,
    stale_gradient,
]


def with_fault(cls, fault):
    """A subclass whose native step has a fault."""

    class Faulty(cls):
        def step(self, closure=None):
            loss = closure() if closure else None
            if self.param_groups[0]["fused"]:
                fault(self, super().step)
            else:
                super().step()
            return loss

    return Faulty


@pytest.mark.parametrize(
    ("case", "fault", "dtype"),
    [
        *thinned(PLAIN, FAULTS, DTYPES),
        *thinned(WITH_STATES, [wrong_state, lost_state], DTYPES),
        *thinned(WITH_COUNTS, [wrong_count], DTYPES),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_catches(case, fault, dtype):
    params, optimizer = build(case, dtype, with_fault(case.optimizer, fault))
    report = verified(params, optimizer)
    assert not report.ok, report
    others = [row for row in report.differing if row is not report.rows[FAULTY]]
    assert report.rows[FAULTY] in report.differing
    assert not others or fault is one_percent_of_lr
    assert "differ by more than rounding" in str(report)


WHOLE = PRODUCTS | {
    "Adafactor": (optim.Adafactor, {}, {}),
    "CAME": (optim.CAME, {}, {}),
}


def of_whole_matrices(name, dtype, faulty=None, fused=None):
    cls, of_group, options = WHOLE[name]
    params = as_parameters(make_weights([(16, 40), (24, 9), (16, 16)], dtype))
    cls = with_fault(cls, faulty) if faulty else cls
    return params, cls([{"params": params} | of_group], lr=0.1, fused=fused, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WHOLE)
def test_steps_of_whole_matrices_agree(name, dtype):
    params, optimizer = of_whole_matrices(name, dtype)
    report = verified(params, optimizer)
    assert report.ok, report
    assert report.isa == fusedstep.isa()


@pytest.mark.parametrize("master_weights", [False, "split"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adafactors_epsilon_is_that_of_the_weights(dtype, master_weights):
    """Not that of the reference's float64, with which small gradients count."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = optim.Adafactor([weight], master_weights=master_weights)
    weight.grad = torch.tensor([1e-2, 1e-9, 1e-2], dtype=dtype)
    report = fusedstep.verify(optimizer, steps=1)
    optimizer.step()
    assert report.ok, report


def test_steps_in_the_backward_pass_are_not_compared():
    layer = torch.nn.Linear(64, 64)
    optimizer = optim.AdamW(layer.parameters())
    fusedstep.verify(optimizer, steps=1)
    handle = fusedstep.step_in_backward(optimizer)
    layer(torch.ones(4, 64)).square().mean().backward()
    with pytest.raises(RuntimeError, match="is stepped in the backward pass already"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="is stepped in the backward pass already"):
        fusedstep.verify(optimizer)
    handle.remove()
    fusedstep.verify(optimizer)


@pytest.mark.parametrize("ns_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_directions_that_roundings_make_agree(ns_dtype):
    """A gradient of rank one has no other directions than those that roundings make."""
    weight = torch.nn.Parameter(make_weights([(32, 24)], torch.float32)[0])
    optimizer = optim.Muon([{"params": [weight], "ns_dtype": ns_dtype}], lr=0.1)
    weight.grad = torch.outer(torch.arange(1.0, 33), torch.arange(1.0, 25))
    report = fusedstep.verify(optimizer, lambda: 0.0)
    assert report.ok, report


def ten_percent_of_lr(optimizer, step):
    (group,) = optimizer.param_groups
    rate = group["lr"]
    group["lr"] = 1.1 * rate
    step()
    group["lr"] = rate


@pytest.mark.parametrize(
    "fault",
    [ten_percent_of_lr, skipped_weight, not_a_number, stale_gradient],
    ids=lambda fault: fault.__name__,
)
@pytest.mark.parametrize("name", WHOLE)
def test_catches_faults_of_whole_matrices(name, fault):
    params, optimizer = of_whole_matrices(name, torch.float32, fault, fused=True)
    report = verified(params, optimizer)
    assert report.rows[FAULTY] in report.differing, report


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_finds_a_subclass_without_fault_right(case):
    """The control of the test above."""
    report = verified(*build(case, optimizer=with_fault(case.optimizer, no_fault)))
    assert report.ok, report
    assert report.steps == 3


# In a loop of the user's own


def test_watches_the_next_steps_of_a_loop(capsys):
    params, optimizer = build(PLAIN[0])
    report = fusedstep.verify(optimizer, steps=2)
    assert (report.steps, report.ok) == (0, False)
    assert str(report) == "Lamb, 0 of 2 steps"
    train(optimizer, params, [1])
    assert (report.steps, report.ok) == (1, False)
    assert not capsys.readouterr().out
    train(optimizer, params, [2])
    assert report.ok
    assert capsys.readouterr().out == f"{report}\n"
    found = copy.deepcopy(report)
    train(optimizer, params, [3])
    assert report == found
    assert not capsys.readouterr().out


def test_catches_a_fault_of_a_later_step():
    faults = iter([no_fault, wrong_weight])
    faulty = with_fault(optim.Lamb, lambda optimizer, step: next(faults)(optimizer, step))
    params, optimizer = build(PLAIN[0], optimizer=faulty)
    report = fusedstep.verify(optimizer, steps=2)
    train(optimizer, params, [1])
    assert not report.differing
    train(optimizer, params, [2])
    assert report.differing == [report.rows[FAULTY]]


@pytest.mark.parametrize("zero_grad", [False, True, "none"])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_clipping_and_clearing_in_the_step_agree(case, zero_grad):
    found = []
    for verifies in (True, False):
        params, optimizer = build(case)
        closure = closure_of(params)
        if verifies:
            report = fusedstep.verify(optimizer)
        norms = []
        for _ in range(3):
            closure()
            norms.append(optimizer.step(max_norm=0.5, zero_grad=zero_grad))
        found.append((contents(optimizer), norms, [param.grad for param in params]))
    assert report.ok, report
    (looked, *others), (plain, *expected) = found
    assert_same_contents(looked, plain)
    torch.testing.assert_close(others, expected, rtol=0, atol=0)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_steps_of_a_grad_scaler_agree(case):
    params, optimizer = build(case)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    report, closure = fusedstep.verify(optimizer), closure_of(params)
    for overflows in (False, True, False):
        scaler.scale(torch.zeros(()))  # which starts it
        closure()
        if overflows:
            params[1].grad[2, 3] = math.inf
        before = contents(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if overflows:
            assert_same_contents(contents(optimizer), before)
    assert report.ok, report


def test_hooks_of_the_user_are_no_part_of_the_step():
    params, optimizer = build(PLAIN[0])

    def halve_gradients(optimizer, args, kwargs):
        for param in params:
            param.grad.mul_(0.5)

    def scale_weights(optimizer, args, kwargs):
        with torch.no_grad():
            for param in params:
                param.mul_(1.5)

    optimizer.register_step_pre_hook(halve_gradients)
    optimizer.register_step_post_hook(scale_weights)
    before = [param.detach().clone() for param in params]
    report = fusedstep.verify(optimizer)
    train(optimizer, params, [1, 2, 3])
    assert report.ok, report
    assert (params[1] / before[1]).nanmedian() > 3  # the hooks ran


def test_hooks_of_the_process_see_the_optimizer_only():
    params, optimizer = build(PLAIN[0])
    seen = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        verified(params, optimizer, steps=2)
    finally:
        handle.remove()
    assert seen == [optimizer, optimizer]


def test_the_closure_form_steps_with_a_scheduler():
    params, optimizer = build(PLAIN[0])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    assert verified(params, optimizer).ok
    scheduler.step()
    assert verified(params, optimizer).ok


def test_a_closure_that_fails_ends_it():
    params, optimizer = build(PLAIN[0])

    def failing():
        raise ArithmeticError("no loss")

    with pytest.raises(ArithmeticError, match="no loss"):
        fusedstep.verify(optimizer, failing)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert verified(params, optimizer).ok


def test_a_step_that_runs_no_closure_is_not_compared():
    class Deaf(optim.Lamb):
        def step(self, closure=None):
            return None

    params, optimizer = build(PLAIN[0], optimizer=Deaf)
    report = verified(params, optimizer)
    assert (report.steps, report.ok) == (0, False)


def test_a_closure_that_is_called_after_its_step_is_not_compared():
    class Late(optim.Lamb):
        def step(self, closure=None):
            self.closure = closure

    params, optimizer = build(PLAIN[0], optimizer=Late)
    report = verified(params, optimizer)
    optimizer.closure()
    assert (report.steps, report.ok) == (0, False)


def test_goes_on_after_a_step_that_failed():
    params, optimizer = build(PLAIN[0])
    report = fusedstep.verify(optimizer, steps=1)
    params[1].grad = torch.ones_like(params[1]).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    train(optimizer, params, [1])
    assert report.ok, report


def test_copies_are_freed():
    def alive():
        gc.collect()
        return sum(type(each) in (torch.Tensor, torch.nn.Parameter) for each in gc.get_objects())

    _, optimizer = run(PLAIN[0], SHAPES, torch.float32, steps=1)
    before = alive()
    report = fusedstep.verify(optimizer, steps=1)
    optimizer.step()
    assert report.ok
    assert alive() == before


# Reports


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_parameters_without_gradients(case):
    params, optimizer = build(case)

    def closure():
        train(optimizer, params, [])
        params[1].grad = make_gradients([(33, 31)], torch.float32, 1)[0]

    report = fusedstep.verify(optimizer, closure)
    assert report.ok, report
    assert report.rows[FAULTY].ulp["weight"] == 0


def test_a_weight_without_gradient_that_moves_is_caught():
    params, optimizer = build(PLAIN[0], optimizer=with_fault(optim.Lamb, wrong_weight))

    def closure():
        params[1].grad = make_gradients([(33, 31)], torch.float32, 1)[0]

    assert fusedstep.verify(optimizer, closure).differing


@pytest.mark.parametrize(
    ("case", "value"), thinned(PLAIN, [math.nan, math.inf, -math.inf, 1e15, 1e-30]), ids=str
)
def test_extreme_gradients_agree(case, value):
    params, optimizer = build(case)
    closure = closure_of(params)

    def extreme():
        closure()
        params[1].grad[3, 4] = value

    report = fusedstep.verify(optimizer, extreme, steps=2)
    assert report.ok, report


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_flushing_to_zero_is_no_difference(case):
    params, optimizer = build(case)
    closure = closure_of(params)

    def small():
        closure()
        for param in params:
            param.grad *= 1e-20

    torch.set_flush_denormal(True)
    report = fusedstep.verify(optimizer, small, steps=2)
    assert report.ok, report


@pytest.mark.parametrize("decay", [0.02, 0.05])  # one rounds down in float32, one up
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        case
        for case in WITH_NAMESAKE
        if case.has("weight_decay") and case.option("weight_decay") and not case.decoupled
    ],
    ids=str,
)
def test_cancellation_is_no_difference(case, clips, decay):
    """Gradient and decay cancel but for their rounding, which the step then scales up."""
    params = as_parameters([torch.linspace(-1000, 1000, 10_000)] * 2)
    optimizer = case.build(params, maximize=False, weight_decay=decay)
    report = fusedstep.verify(optimizer, steps=2)
    for _ in range(2):
        for param in params:
            param.grad = param.detach() * -decay
        if clips:
            norm = torch.cat([param.grad for param in params]).norm(dtype=torch.float64)
            for param in params:
                param.grad *= 2
            optimizer.step(max_norm=norm.item())
        else:
            optimizer.step()
    assert report.ok, report


def test_complex_weights_and_sparse_gradients():
    weight = torch.nn.Parameter(torch.randn(50, dtype=torch.complex64))
    table = torch.nn.Parameter(torch.randn(50, 4))

    def closure():
        weight.grad = torch.randn(50, dtype=torch.complex64)
        table.grad = torch.ones(50, 4).to_sparse(1)

    with torch.sparse.check_sparse_tensor_invariants():
        optimizer = optim.Adagrad([{"params": [weight]}, {"params": [table]}])
        report = fusedstep.verify(optimizer, closure)
    assert report.steps == 3
    assert not report.differing


def test_sums_of_the_reference_in_float64():
    """torch adds half a million squares with an error of some hundred units."""
    weight = torch.nn.Parameter(torch.linspace(-0.04, 0.04, 1 << 19, dtype=torch.float64))

    def closure():
        weight.grad = torch.linspace(1, 2, 1 << 19, dtype=torch.float64)

    report = fusedstep.verify(optim.Lamb([weight]), closure, steps=2)
    assert report.ok, report
    assert report.rows[0].allowed["weight"] == 16.5 + 2**9.5


def test_groups_and_names():
    weights = as_parameters(make_weights([(4, 5)] * 3, torch.float32))
    groups = [
        {"params": [("first", weights[0]), ("second", weights[1])]},
        {"params": [("third", weights[2])], "lr": 0.5},
    ]
    report = verified(weights, optim.Adam(groups))
    assert [row.name for row in report.rows] == ["first", "second", "third"]
    groups = [{"params": weights[:2]}, {"params": weights[2:], "lr": 0.5}]
    report = verified(weights, optim.Adam(groups))
    assert [row.name for row in report.rows] == ["group 0, 0", "group 0, 1", "group 1, 0"]
    assert report.ok, report


def test_the_report_names_the_worst():
    count = 13
    weights = as_parameters(make_weights([(60,)] * count, torch.float32))
    named = [(f"layer.{i}", weight) for i, weight in enumerate(weights)]
    report = verified(weights, with_fault(optim.Adam, wrong_weight)(named, fused=True))
    assert report.worst.name == f"layer.{FAULTY}"
    assert report.worst.largest == "weight"
    title, header, first, *others = str(report).splitlines()
    assert title == "Adam, 3 of 3 steps, largest errors in ulp:".replace("Adam", "Faulty")
    assert header.split() == ["parameter", "shape", "weight", "step", "exp_avg", "exp_avg_sq"]
    assert first.split()[:2] == [f"layer.{FAULTY}", "[60]"]
    assert first.endswith("differs")
    assert f"and {count - 10} more" in others
    assert others[-2].startswith(f"1 of {count} parameters differ by more than rounding: at most")
    assert others[-2].endswith(f" ulp in weight of layer.{FAULTY}.")
    assert "with fused=False, in torch operations, " in others[-1]


def test_a_step_without_native_kernels_is_no_proof():
    report = verified(*build(PLAIN[0], fused=False))
    assert not report.ok
    assert not report.differing
    assert "No native kernels ran" in str(report)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"foreach": True, "fused": None}, "foreach=True"), ({"fused": False}, "fused=False")],
    ids=str,
)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_the_report_says_why_torch_operations_step_a_group(case, options, reason):
    params, optimizer = build(case)
    assert not verified(params, optimizer, steps=1).by_torch
    optimizer.param_groups[0].update(options)
    report = verified(params, optimizer, steps=1)
    expected = [f"Torch operations step group 0: {reason}."]
    if "foreach" in options and not optimizer._foreach_means_unfused:
        expected = []
    assert report.by_torch == expected
    assert all(line in str(report).splitlines() for line in expected)


def test_weights_without_kernels_are_a_reason():
    param = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    report = verified([param], optim.AdamW([param]), steps=1)
    (line,) = report.by_torch
    assert line.startswith("Torch operations step group 0: ")
    assert "complex64" in line


def test_tolerance():
    """An error of a hundred units is one of a hundred units."""

    def hundred_units(optimizer, step):
        step()
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].fill_(1 + 100 * torch.finfo(torch.float32).eps)

    def closure():
        with torch.no_grad():
            weight.fill_(1.0)
        weight.grad = torch.zeros(5)

    weight = torch.nn.Parameter(torch.ones(5))
    optimizer = with_fault(optim.Adam, hundred_units)([weight], fused=True)
    report = fusedstep.verify(optimizer, closure, steps=1)
    assert report.rows[0].ulp["weight"] == 100
    assert report.rows[0].allowed["weight"] == 16.5
    assert not report.ok
    assert fusedstep.verify(optimizer, closure, steps=1, tolerance=99.5).ok


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"optimizer": torch.optim.Adam([torch.ones(1)])}, TypeError, "optimizer must be one of"),
        ({"steps": 0}, ValueError, "steps must be at least 1, not 0"),
    ],
)
def test_errors(arguments, error, text):
    _, optimizer = build(PLAIN[0])
    with pytest.raises(error, match=text):
        fusedstep.verify(**({"optimizer": optimizer} | arguments))


@pytest.mark.parametrize("cls", [optim.CAME, optim.Adafactor], ids=lambda cls: cls.__name__)
def test_means_over_long_sides_are_right(cls):
    """Rounding of sums over thousands of elements is no fault."""
    params = [torch.nn.Parameter(0.02 * torch.randn(2048, 64)) for _ in range(2)]
    params[1].data = params[1].data.t().contiguous()
    optimizer = cls(params, lr=1e-3)
    generator = torch.Generator().manual_seed(3)

    def closure():
        for param in params:
            noise = torch.randn(param.shape, generator=generator)
            param.grad = noise.sign() * (6 * noise.abs()).exp() * 1e-6  # of all sizes
        return torch.zeros(())

    optimizer.step(closure)
    report = fusedstep.verify(optimizer, closure, steps=2)
    assert report.ok, report
