"""Law: bad input is an error that names the argument, and then nothing has changed.

Where torch has the check, the type and the text are torch's.
"""

import re
from typing import NamedTuple

import pytest
import torch

from fusedstep._native import ops
from support.cases import KINDS, NUMBERS, PLAIN, WITH_NAMESAKE, per_optimizer
from support.peers import PEERS
from support.stepping import (
    as_parameters,
    assert_same_bits,
    assert_same_contents,
    contents,
    make_gradients,
    make_weights,
)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")

NAN = float("nan")


def error_of(build):
    with pytest.raises(Exception) as caught:  # noqa: B017, PT011, RUF100
        build()
    return type(caught.value), str(caught.value)


BAD_PARAMS = {
    "empty list": list,
    "empty group": lambda: iter(()),
    "a tensor": lambda: torch.zeros(3),
    "not a tensor": lambda: [1.0],
    "not a leaf": lambda: [torch.zeros(3, requires_grad=True) * 2],
    "in two groups": lambda: [{"params": [p]} for p in [torch.zeros(3, requires_grad=True)] * 2],
}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("case", [case for case in PLAIN if case.has("betas")], ids=str)
def test_betas_of_several_elements(case, index):
    """torch has this text, but its comparison fails first."""
    betas = [torch.tensor(0.9), torch.tensor(0.999)]
    betas[index] = torch.tensor([0.9, 0.9])
    with pytest.raises(ValueError, match=rf"Tensor betas\[{index}\] must be 1-element"):
        case.optimizer([torch.zeros(3)], betas=tuple(betas))


@pytest.mark.parametrize("name", BAD_PARAMS)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_params_that_torch_refuses(case, name):
    expected = error_of(lambda: PEERS[case.optimizer](BAD_PARAMS[name]()))
    assert error_of(lambda: case.optimizer(BAD_PARAMS[name]())) == expected


NOT_FUSED = (
    "`fused=True` requires all the params to be floating point Tensors of supported devices: "
    r"\['cpu', 'cuda'\] but torch.{} and {}"
)
UNSUPPORTED = {
    "integer": (lambda: torch.zeros(3, dtype=torch.int64), NOT_FUSED.format("int64", "cpu")),
    "bool": (lambda: torch.zeros(3, dtype=torch.bool), NOT_FUSED.format("bool", "cpu")),
    "complex": (lambda: torch.zeros(3, dtype=torch.cfloat), NOT_FUSED.format("complex64", "cpu")),
    "float8": (
        lambda: torch.zeros(3, dtype=torch.float8_e4m3fn),
        NOT_FUSED.format("float8_e4m3fn", "cpu"),
    ),
    "sparse": (
        lambda: torch.sparse_coo_tensor([[0]], [1.0], (3,), check_invariants=True),
        "`fused=True` requires all the params to be dense Tensors",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_weights_that_have_no_kernel(case, name):
    make, text = UNSUPPORTED[name]
    with pytest.raises(RuntimeError, match=text):
        case.build([torch.zeros(2), make()], fused=True)
    case.build([torch.zeros(2), make()], fused=None)  # falls back


def on_meta():
    return [torch.nn.Parameter(torch.ones(3, 2, device="meta"))]


WITHOUT_KERNELS = {
    "complex": lambda: [torch.nn.Parameter(torch.linspace(-1, 1, 6) + 0.5j)],
    "meta": on_meta,
    "meta beside others": lambda: [*on_meta(), torch.nn.Parameter(torch.ones(4))],
    "twice": lambda: [torch.nn.Parameter(torch.ones(4))] * 2,
}


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("name", WITHOUT_KERNELS)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_weights_without_kernels_step_in_torchs_operations_unasked(case, name):
    """`fused` defaults to None in each class, Adan too, and is not given here."""

    def stepped(**options):
        params = WITHOUT_KERNELS[name]()
        optimizer = case.optimizer(params, **case.options, **options)
        for step in (1, 2, 3):
            for param in params:
                value = 2 - 3j if param.is_complex() else 2
                param.grad = torch.full_like(param, value) * step
            optimizer.step()
        # A meta tensor has no values: its shape is compared.
        return {
            name: torch.zeros_like(value, device="cpu") if value.is_meta else value
            for name, value in contents(optimizer).items()
        }

    assert_same_contents(stepped(), stepped(fused=False))


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_weights_on_the_meta_device_are_refused_at_a_step(case):
    """Not before: models are built there, and then given memory by `to_empty`."""
    optimizer = case.build([torch.zeros(2), torch.zeros(3, device="meta")], fused=True)
    weight, empty = optimizer.param_groups[0]["params"]
    weight.grad, empty.grad = torch.ones(2), torch.ones(3, device="meta")
    with pytest.raises(RuntimeError, match=NOT_FUSED.format("float32", "meta")):
        optimizer.step()
    assert not weight.any()

    empty.grad = None
    torch.utils.swap_tensors(empty, torch.zeros(3))
    for _ in range(2):  # the first step of some moves no weight
        weight.grad, empty.grad = torch.ones(2), torch.ones(3)
        optimizer.step()
    assert weight.all()
    assert empty.all()


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_adding_such_weights_leaves_the_groups_as_they_were(case):
    optimizer = case.build([torch.zeros(2)])
    with pytest.raises(RuntimeError, match="`fused=True` requires"):
        optimizer.add_param_group({"params": [torch.zeros(3, dtype=torch.int64)]})
    assert len(optimizer.param_groups) == 1


# Errors at a step. Each row spoils the third of five weights: in the middle of the only group, or
# the first of a second group where nothing is wrong with the first group.


def sparse_gradient(optimizer, param):
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1  # without it some take them
    param.grad = torch.sparse_coo_tensor(
        [[0, 2]], torch.ones(2, 5), param.shape, check_invariants=True
    )


def gradient_of_another_shape(optimizer, param):
    param.data = param.data[:-1].clone()


def gradient_of_as_many_elements(optimizer, param):
    param.data = param.data.reshape(-1).clone()


def gradient_of_another_dtype(optimizer, param):
    param.data = param.data.double()


def expanded_weight(optimizer, param):
    param.data = param.data[0].expand(param.shape)


def overlapping_weight(optimizer, param):
    param.data = torch.zeros(20).as_strided(param.shape, (3, 1))


def a_state(optimizer, param):
    """One of the weight's shape, and its name."""
    state = optimizer.state[param]
    return state, next(name for name in state if name not in NUMBERS)


def state_of_another_shape(optimizer, param):
    state, name = a_state(optimizer, param)
    state[name] = state[name][:-1]


def state_of_another_dtype(optimizer, param):
    state, name = a_state(optimizer, param)
    state[name] = state[name].double()


def overlapping_state(optimizer, param):
    state, name = a_state(optimizer, param)
    state[name] = state[name][0].expand(param.shape)


def step_of_two_elements(optimizer, param):
    optimizer.state[param]["step"] = torch.zeros(2)


def step_of_another_dtype(optimizer, param):
    optimizer.state[param]["step"] = torch.zeros((), dtype=torch.int64)


def weights_that_share_memory(optimizer, param):
    other = optimizer.param_groups[-1]["params"][-1]
    other.data = param.data.view(-1)[4 : 4 + other.numel()].view(other.shape)


class Wrong(NamedTuple):
    spoil: object
    text: str
    is_in: str = "operands"


OVERLAP = "overlaps itself in memory"
WRONG = [
    Wrong(sparse_gradient, "sparse gradients"),
    Wrong(gradient_of_another_shape, r"gradient's shape \[4, 5\] is not the weight's, \[3, 5\]"),
    Wrong(gradient_of_as_many_elements, r"gradient's shape \[4, 5\] is not the weight's, \[20\]"),
    Wrong(gradient_of_another_dtype, "gradient is float32 but the weight is float64"),
    Wrong(expanded_weight, f"weight {OVERLAP}"),
    Wrong(overlapping_weight, f"weight {OVERLAP}"),
    Wrong(weights_that_share_memory, "shares memory with another weight"),
    Wrong(state_of_another_shape, "state's shape", "states"),
    Wrong(state_of_another_dtype, "state is float64 but the weight is float32", "states"),
    Wrong(overlapping_state, f"state {OVERLAP}", "states"),
    Wrong(step_of_two_elements, "step count", "counts"),
    Wrong(step_of_another_dtype, "step count", "counts"),
]


def has_it(case, wrong):
    """True if the row has what is spoilt. Weights updated one at a time may share memory."""
    one_by_one = case.modes.get("foreach") is False
    has = {"operands": True, "states": bool(case.states), "counts": case.counts}
    return has[wrong.is_in] and not (wrong.spoil is weights_that_share_memory and one_by_one)


def each_wrong(rows, wrongs):
    return pytest.mark.parametrize(
        ("case", "wrong"),
        [
            pytest.param(case, wrong, id=f"{case}-{wrong.spoil.__name__}")
            for case in rows
            for wrong in wrongs
            if has_it(case, wrong)
        ],
    )


def check_nothing_changed_by_error(case, wrong, warm, groups, **options):
    shapes = ((7,), (33, 31), (4, 5), (6,), (2, 3))
    params = as_parameters(make_weights(shapes, torch.float32))
    if groups == 2:
        parts = [{"params": params[:2]}, {"params": params[2:], "eps": 1e-4}]
        optimizer = case.build(parts, **options)
    else:
        optimizer = case.build(params, **options)
    gradients = make_gradients(shapes, torch.float32, 1)
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    if warm:
        optimizer.step()
        optimizer.step()
    wrong.spoil(optimizer, params[2])
    before = contents(optimizer)
    gradients = [param.grad.clone() for param in params]
    versions = [param._version for param in params]

    with pytest.raises(RuntimeError, match=wrong.text) as caught:
        optimizer.step()
    assert not re.search(r"/\S+\.(cpp|h):\d+", str(caught.value)), "a path of the build machine"

    after = contents(optimizer)
    for name in before.keys() & after.keys():
        assert_same_bits(after[name], before[name], name)
    for name in after.keys() - before.keys():
        state, _ = name.split()
        assert (after[name] == case.initial.get(state, 0.0)).all(), name
    for index, (param, gradient) in enumerate(zip(params, gradients, strict=True)):
        if gradient.is_sparse:
            assert torch.equal(param.grad.to_dense(), gradient.to_dense())
        else:
            assert_same_bits(param.grad, gradient, f"gradient {index}")
    assert versions == [param._version for param in params]


@pytest.mark.parametrize("groups", [1, 2])
@each_wrong(KINDS, WRONG)
def test_nothing_changes_when_a_later_step_fails(case, wrong, groups):
    check_nothing_changed_by_error(case, wrong, warm=True, groups=groups)


@pytest.mark.parametrize("groups", [1, 2])
@each_wrong(KINDS, [wrong for wrong in WRONG if wrong.is_in == "operands"])
def test_nothing_changes_when_the_first_step_fails(case, wrong, groups):
    check_nothing_changed_by_error(case, wrong, warm=False, groups=groups)


UNFUSED = WRONG[1:5]  # torch's operations would broadcast these, or stop at half way


@pytest.mark.parametrize("groups", [1, 2])
@each_wrong(KINDS, UNFUSED)
def test_nothing_changes_when_an_unfused_step_fails(case, wrong, groups):
    check_nothing_changed_by_error(case, wrong, warm=True, groups=groups, fused=False)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", torch.tensor([0.1, 0.2])),
        ("lr", None),
        ("lr", "a"),
        ("eps", "x"),
        ("weight_decay", "x"),
        ("betas", (0.9,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_nothing_changes_when_a_later_group_has_a_bad_option(case, name, value, fused):
    if name not in case.build(as_parameters(make_weights([(1,)], torch.float32))).defaults:
        pytest.skip("it has no such option")
    params = as_parameters(make_weights([(7,), (33, 31)], torch.float32))
    optimizer = case.build([{"params": params[:1]}, {"params": params[1:]}], fused=fused)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.param_groups[1][name] = value
    before = contents(optimizer)
    with pytest.raises((RuntimeError, TypeError, ValueError), match=f"{name}="):
        optimizer.step()
    assert_same_contents(contents(optimizer), before)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_weight_that_went_to_a_device_without_backend(case):
    """swap_tensors is what Module.to does when it may not change data in place."""
    params = as_parameters(make_weights([(7,), (4, 5)], torch.float32))
    optimizer = case.build(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    before = params[0].detach().clone()
    state = optimizer.state.pop(params[1], {})
    params[1].grad = None
    elsewhere = torch.nn.Parameter(params[1].detach().to("meta"))
    elsewhere.grad = torch.ones_like(elsewhere)
    optimizer.param_groups[0]["params"][1] = elsewhere
    optimizer.state[elsewhere] = state
    with pytest.raises(RuntimeError, match=r"but torch\.float32 and meta"):
        optimizer.step()
    assert_same_bits(params[0], before, "other weight")


@pytest.mark.parametrize("case", per_optimizer(WITH_NAMESAKE), ids=str)
def test_sparse_gradients_have_the_texts_of_torch(case):
    texts = []
    for optimizer_class in (case.optimizer, case.namesake):
        param = torch.nn.Parameter(torch.zeros(4, 5))
        optimizer = optimizer_class([param], **case.options)
        sparse_gradient(optimizer, param)
        texts.append(error_of(optimizer.step))
    ours, theirs = texts
    # SGD has no text of its own: it stops at an operation.
    assert ours == theirs or ("add(sparse, dense)" in theirs[1] and "sparse gradients" in ours[1])


def prepare(plan, rule, use=0):
    """Prepares a step with the rule's defaults, down the gradient."""
    options = [*torch.ops.fusedstep.rule_defaults(rule), 0.0]
    torch.ops.fusedstep.plan_prepare(plan, ops.rule_index.get(rule, -1), options, 1.0, use)


class TestOperators:
    """The operators check what the classes cannot get wrong."""

    @staticmethod
    def subjects():
        weight, grad = torch.ones(4, 5), torch.ones(4, 5)
        states = torch.ops.fusedstep.new_states([weight], ["weight"])
        steps = [torch.zeros(())]
        return weight, grad, states, steps

    def check(self, text, weights=None, grads=None, plan=None):
        weight, grad, states, steps = self.subjects()
        made = torch.ops.fusedstep.plan_new([weight], states, steps)
        with pytest.raises((RuntimeError, NotImplementedError), match=text):
            torch.ops.fusedstep.plan_bind(
                made if plan is None else plan,
                [weight] if weights is None else weights,
                [grad] if grads is None else grads,
            )
        torch.ops.fusedstep.plan_delete(made)
        assert (weight == 1).all()
        assert (grad == 1).all()
        assert (states[0] == 0).all()
        assert steps[0].item() == 0

    def test_gradient_on_another_device(self):
        self.check("device|[Mm]eta", grads=[torch.ones(4, 5, device="meta")])

    def test_weight_on_another_device(self):
        self.check("device|[Mm]eta", weights=[torch.ones(4, 5, device="meta")])

    def test_other_number_of_gradients(self):
        self.check("grads", grads=[])

    def test_other_number_of_weights(self):
        self.check("weights", weights=[torch.ones(4, 5)] * 2, grads=[torch.ones(4, 5)] * 2)

    def test_plan_that_does_not_exist(self):
        self.check("plan", plan=123_456_789)

    def test_gradient_of_another_shape(self):
        self.check("gradient's shape", grads=[torch.ones(5, 4)])

    def test_integer_gradient(self):
        self.check("gradient", grads=[torch.ones(4, 5, dtype=torch.int64)])

    def test_plan_with_too_few_states(self):
        weight, _, states, steps = self.subjects()
        with pytest.raises(RuntimeError, match="states"):
            torch.ops.fusedstep.plan_new([weight, weight.clone()], states, steps * 2)

    def test_plan_with_too_few_steps(self):
        weight, _, states, _ = self.subjects()
        with pytest.raises(RuntimeError, match="steps"):
            torch.ops.fusedstep.plan_new([weight], states, [])

    def test_a_plan_is_for_one_number_of_states(self):
        weight, grad, states, steps = self.subjects()
        plan = torch.ops.fusedstep.plan_new([weight], states, steps)
        torch.ops.fusedstep.plan_bind(plan, [weight], [grad])
        with pytest.raises(RuntimeError, match="state"):
            prepare(plan, "adam")
        torch.ops.fusedstep.plan_delete(plan)
        assert (weight == 1).all()

    def test_a_step_needs_operands(self):
        weight, _, states, steps = self.subjects()
        plan = torch.ops.fusedstep.plan_new([weight], states, steps)
        with pytest.raises(RuntimeError, match="not been bound"):
            prepare(plan, "adagrad")
        torch.ops.fusedstep.plan_delete(plan)
        assert steps[0].item() == 0

    @pytest.mark.parametrize("use", [-1, 4])
    def test_an_unknown_use_of_gradients(self, use):
        weight, grad, states, steps = self.subjects()
        plan = torch.ops.fusedstep.plan_new([weight], states, steps)
        torch.ops.fusedstep.plan_bind(plan, [weight], [grad])
        with pytest.raises(RuntimeError, match="grads must be from 0 to 3"):
            prepare(plan, "adagrad", use=use)
        torch.ops.fusedstep.plan_delete(plan)
        assert steps[0].item() == 0

    def test_deleting_a_plan_twice(self):
        weight, _, states, steps = self.subjects()
        plan = torch.ops.fusedstep.plan_new([weight], states, steps)
        torch.ops.fusedstep.plan_delete(plan)
        with pytest.raises(RuntimeError, match="plan"):
            torch.ops.fusedstep.plan_isa(plan)
