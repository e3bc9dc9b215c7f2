"""Law: a compiled step is the step, to the bit; in one graph, which holds as options change."""

import copy
import functools
import gc

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from fusedstep._native import ops
from support.allocations import LAYOUTS, SMALL, allocated_bytes, optimizer_with_gradients
from support.cases import FAMILIES, KINDS, PLAIN, WITH_COUNTS, first_of_each
from support.stepping import (
    as_parameters,
    assert_same_bits,
    assert_same_contents,
    contents,
    make_gradients,
    make_weights,
)

SHAPES = ((), (0,), (7,), (33, 31))
STEPS = range(1, 6)
# One plain row for each operator: AdamW has Adam's.
OPERATORS = first_of_each(lambda case: case.optimizer._rule, PLAIN)
# One of each kind of operands: a graph knows nothing of a rule's maths.
GRAPHS = first_of_each(lambda case: (case.elementwise, len(case.states), case.numbers), OPERATORS)
# Others are compared as their numbers change, in test_every_number.
UNCHANGED = [case for case in KINDS if case not in OPERATORS or case in FAMILIES]
# One that leaves gradients as they are: a second step takes them again.
WITH_BETAS = next(case for case in OPERATORS if case.has("betas") and case.elementwise)
WITH_AMSGRAD = next(case for case in OPERATORS if case.has("amsgrad"))
BACKEND = "aot_eager"
"""Traces and makes the operators functional as inductor does, without its code."""


@pytest.fixture(autouse=True)
def _compiler_reset(monkeypatch):
    # It flushes the CPU's caches for each graph, 50 ms of a CPU, to log how long guards take.
    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: 0.0)
    torch._dynamo.reset()
    counters.clear()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


class Twins:
    """Two optimizers alike: `compiled`, whose step is, and `plain`, whose step is not."""

    def __init__(self, case, shapes=SHAPES, dtype=torch.float32, fullgraph=True, **options):
        weights = make_weights(shapes, dtype)
        self.compiled = case.build(as_parameters(weights), **copy.deepcopy(options))
        self.plain = case.build(as_parameters(weights), **copy.deepcopy(options))
        self.both = (self.compiled, self.plain)
        self.step = torch.compile(self.compiled.step, backend=BACKEND, fullgraph=fullgraph)

    def add(self, weight, **options):
        """Adds a weight: to the last group, or with options as a group of its own."""
        for optimizer in self.both:
            if options:
                optimizer.add_param_group({"params": as_parameters([weight]), **options})
            else:
                optimizer.param_groups[-1]["params"] += as_parameters([weight])

    def set_grads(self, number, absent=()):
        for optimizer in self.both:
            params = params_of(optimizer)
            grads = make_gradients([tuple(p.shape) for p in params], params[0].dtype, number)
            for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
                param.grad = None if i in absent else grad

    def take_step(self, number, absent=(), **arguments):
        self.set_grads(number, absent)
        results = self.step(**arguments), self.plain.step(**arguments)
        self.check()
        return results

    def check(self):
        assert_same_contents(contents(self.compiled), contents(self.plain))


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


class TestBits:
    @pytest.mark.parametrize("case", UNCHANGED, ids=str)
    def test_a_compiled_step_is_the_step(self, case):
        twins = Twins(case)
        for number in STEPS:
            twins.take_step(number)
        assert graphs() == 1
        assert not counters["graph_break"]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("case", FAMILIES, ids=str)
    def test_of_other_dtypes(self, case, dtype):
        twins = Twins(case, dtype=dtype, state_dtype=torch.float32)
        for number in STEPS:
            twins.take_step(number)
        assert graphs() == 1

    @pytest.mark.parametrize("case", GRAPHS, ids=str)
    def test_inductor_copies_no_weight(self, case, tmp_path):
        twins = [optimizer_with_gradients(case, LAYOUTS) for _ in range(2)]
        for param, other in zip(*map(params_of, twins), strict=True):
            param.grad = other.grad.clone()
        twins[0].step = torch.compile(twins[0].step, fullgraph=True)
        for optimizer in twins:
            optimizer.step()
        assert_same_contents(*map(contents, twins))
        assert allocated_bytes(twins[0], tmp_path / "trace.json") < SMALL

    @pytest.mark.parametrize("case", GRAPHS, ids=str)
    def test_gradients_are_left_alone(self, case):
        twins = Twins(case)
        twins.set_grads(1)
        twins.step()
        grads = [param.grad for param in params_of(twins.compiled)]
        for grad, expected in zip(grads, make_gradients(SHAPES, torch.float32, 1), strict=True):
            assert_same_bits(grad, expected, "gradient")
            assert grad._version == 0

    @pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
    @pytest.mark.parametrize("case", FAMILIES, ids=str)
    def test_autograd_hears_of_it(self, case, backend):
        (param,) = as_parameters(make_weights([(10,)], torch.float32))
        loss = (param**2).sum()
        param.grad = torch.ones_like(param)
        torch.compile(case.build([param]).step, backend=backend)()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class TestOptionsWithoutRecompiling:
    """Each option of a number may change: the graph reads it when it runs."""

    @pytest.mark.parametrize("case", GRAPHS, ids=str)
    def test_lr_as_a_tensor(self, case):
        twins = Twins(case, lr=torch.tensor(0.1))
        for number in STEPS:
            for optimizer in twins.both:
                optimizer.param_groups[0]["lr"].fill_(0.01 / number)
            twins.take_step(number)
        assert graphs() == 1

    def test_lr_of_another_kind(self):
        twins = Twins(OPERATORS[0])
        kinds = [0.1, torch.tensor(0.2), torch.tensor([0.3], dtype=torch.float64), 1]
        for number, lr in enumerate(kinds):
            for optimizer in twins.both:
                optimizer.param_groups[0]["lr"] = lr
            twins.take_step(number)
        assert graphs() == 1

    @pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
    @pytest.mark.parametrize(
        "schedule",
        [lambda o: CosineAnnealingLR(o, 5), lambda o: OneCycleLR(o, 0.1, total_steps=9)],
        ids=["cosine", "lr and momentum"],
    )
    def test_a_scheduler(self, schedule, lr):
        twins = Twins(WITH_BETAS, lr=lr)
        schedulers = [schedule(optimizer) for optimizer in twins.both]
        # A scheduler wraps the step, and its wrapper is nothing that torch compiles.
        twins.step = torch.compile(twins.compiled.step, backend=BACKEND)
        for number in STEPS:
            twins.take_step(number)
            for scheduler in schedulers:
                scheduler.step()
        assert graphs() == 1

    @pytest.mark.parametrize("case", OPERATORS, ids=str)
    def test_every_number(self, case):
        twins = Twins(case)
        group = twins.plain.param_groups[0]
        for number in STEPS:
            changed = {
                name: value / 2 + 0.01
                for name, value in group.items()
                # A step that clips is in no graph: see test_a_clip_of_the_optimizers_own.
                # Without momentum there is no state for it: that makes another graph.
                if isinstance(value, float) and name not in ("max_grad_norm", "momentum")
            }
            if "betas" in group:
                changed["betas"] = tuple(beta - 0.01 for beta in group["betas"])
            for optimizer in twins.both:
                optimizer.param_groups[0] |= changed | {"maximize": not group["maximize"]}
            twins.take_step(number)
        assert graphs() == 1

    def test_by_compiled_code(self):
        """The graph has the old options until it has run, so the step comes after it."""
        twins = Twins(OPERATORS[0])

        def train(optimizer, factor):
            optimizer.param_groups[0]["lr"] *= factor
            optimizer.step()

        compiled = torch.compile(train, backend=BACKEND)
        for number in STEPS:
            twins.set_grads(number)
            compiled(twins.compiled, 0.5)
            train(twins.plain, 0.5)
            twins.check()

    def test_by_a_hook(self):
        twins = Twins(OPERATORS[0], fullgraph=False)
        for optimizer in twins.both:
            optimizer.register_step_pre_hook(halve_lr)
        for number in STEPS:
            twins.take_step(number)

    def test_a_tensor_written_in_the_graph(self):
        twins = Twins(OPERATORS[0], lr=torch.tensor(0.1))

        def train(optimizer):
            optimizer.param_groups[0]["lr"].mul_(0.5)
            optimizer.step()

        compiled = torch.compile(train, backend=BACKEND, fullgraph=True)
        for number in STEPS:
            twins.set_grads(number)
            compiled(twins.compiled)
            train(twins.plain)
            twins.check()
        assert graphs() == 1


def halve_lr(optimizer, args, kwargs):
    optimizer.param_groups[0]["lr"] *= 0.5


class TestRecompiling:
    """Changes that a graph is made anew for."""

    def test_gradients_that_come_and_go(self):
        twins = Twins(OPERATORS[0])
        all_of_them = (0, 1, 2, 3)
        for number, absent in enumerate([(1, 2), (2,), all_of_them, (), (1, 2)]):
            twins.take_step(number, absent)
            assert len(twins.compiled.state) == len(twins.plain.state)
        made = graphs()
        for number, absent in enumerate([(1, 2), (), all_of_them, (1, 2)]):
            twins.take_step(number, absent)
        assert graphs() == made

    @pytest.mark.parametrize("case", FAMILIES, ids=str)
    def test_groups_and_weights_added_later(self, case):
        twins = Twins(case)
        twins.take_step(1)
        twins.add(torch.ones(5), lr=0.5)
        twins.take_step(2)
        twins.add(torch.ones(6))
        twins.take_step(3)
        twins.take_step(4)
        assert graphs() == 3

    def test_amsgrad_switched_on(self):
        twins = Twins(WITH_AMSGRAD)
        for number in STEPS:
            for optimizer in twins.both:
                optimizer.param_groups[0]["amsgrad"] = number > 2
            twins.take_step(number)
        assert "max_exp_avg_sq" in twins.compiled.state[params_of(twins.compiled)[0]]
        assert graphs() == 2

    def test_states_that_go(self):
        twins = Twins(OPERATORS[0])
        for number in STEPS:
            twins.take_step(number)
            if number == 2:
                for optimizer in twins.both:
                    optimizer.state.clear()

    def test_another_optimizer(self):
        """Two of a class through one function: each reads its own options."""
        step = torch.compile(lambda optimizer: optimizer.step(), backend=BACKEND, fullgraph=True)
        pairs = [Twins(OPERATORS[0], lr=lr) for lr in (0.1, 0.2)]
        for number in STEPS:
            for twins in pairs:
                twins.set_grads(number)
                step(twins.compiled)
                twins.plain.step()
                twins.check()

    def test_a_copy(self):
        twins = Twins(OPERATORS[0])
        twins.take_step(1)
        twins.compiled = copy.deepcopy(twins.compiled)
        twins.both = (twins.compiled, twins.plain)
        twins.step = torch.compile(twins.compiled.step, backend=BACKEND, fullgraph=True)
        for optimizer in twins.both:
            optimizer.param_groups[0]["lr"] = 0.5
        twins.take_step(2)


@pytest.mark.parametrize("case", GRAPHS, ids=str)
def test_state_dicts_go_both_ways(case):
    twins = Twins(case)
    for number in (1, 2):
        twins.take_step(number)
    made = copy.deepcopy(twins.compiled.state_dict())
    twins.compiled.load_state_dict(copy.deepcopy(twins.plain.state_dict()))
    twins.plain.load_state_dict(made)
    for number in (3, 4):
        twins.take_step(number)
    assert graphs() == 1


class TestTrainingLoop:
    @pytest.mark.parametrize("case", FAMILIES, ids=str)
    def test_forward_backward_and_step(self, case):
        def train(model, optimizer, batch):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        self.check(case, train, fullgraph=False)
        assert graphs() == 2
        (reason,) = counters["graph_break"]
        assert "Tensor.backward()" in reason

    @pytest.mark.parametrize("case", FAMILIES, ids=str)
    def test_in_one_graph(self, case):
        def train(model, optimizer, batch):
            params = list(model.parameters())
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
                param.grad = grad
            optimizer.step()
            return loss.detach()

        with torch._dynamo.config.patch(trace_autograd_ops=True):
            self.check(case, train, fullgraph=True)

    def check(self, case, train, fullgraph):
        weights, losses = [], []
        for compiled in (True, False):
            torch.manual_seed(0)
            model = torch.nn.Sequential(
                torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
            )
            optimizer = case.build(model.parameters())
            step = torch.compile(train, backend=BACKEND, fullgraph=fullgraph) if compiled else train
            for _ in STEPS:
                losses.append(step(model, optimizer, torch.randn(3, 4)))
                optimizer.param_groups[0]["lr"] *= 0.9
            weights.append(contents(optimizer))
        assert_same_contents(*weights)
        assert losses[: len(STEPS)] == losses[len(STEPS) :]

    def test_two_steps_in_one_graph(self):
        twins = Twins(WITH_BETAS)

        def train(optimizer):
            optimizer.step()
            optimizer.step()

        compiled = torch.compile(train, backend=BACKEND, fullgraph=True)
        for number in STEPS:
            twins.set_grads(number)
            compiled(twins.compiled)
            train(twins.plain)
            twins.check()

    @pytest.mark.parametrize("case", FAMILIES, ids=str)
    def test_a_closure(self, case):
        twins = Twins(case, fullgraph=False)

        def train(optimizer):
            def closure():
                optimizer.zero_grad()
                loss = sum((param**2).sum() for param in params_of(optimizer))
                loss.backward()
                return loss

            return optimizer.step(closure)

        compiled = torch.compile(train, backend=BACKEND)
        for _ in STEPS:
            assert compiled(twins.compiled) == train(twins.plain)
            twins.check()


class TestGraphBreaks:
    """Requests that the graph has no operator for: the step runs as without a compiler."""

    @pytest.mark.parametrize(
        "arguments", [{"max_norm": 0.1}, {"zero_grad": True}, {"zero_grad": "none"}], ids=str
    )
    def test_arguments_of_the_step(self, arguments):
        twins = Twins(OPERATORS[0], fullgraph=False)
        for number in STEPS:
            norms = twins.take_step(number, **arguments)
            assert norms[0] == norms[1]
        for ours, plain in zip(*map(params_of, twins.both), strict=True):
            assert (ours.grad is None) == (plain.grad is None)
            if plain.grad is not None:
                assert_same_bits(ours.grad, plain.grad, "gradient")

    @pytest.mark.parametrize("case", FAMILIES, ids=str)
    def test_the_imperative_twin(self, case):
        twins = Twins(case, fullgraph=False, fused=False)
        for number in STEPS:
            twins.take_step(number)

    def test_weights_without_kernels(self):
        twins = Twins(WITH_AMSGRAD, dtype=torch.complex64, fullgraph=False, fused=None)
        for number in STEPS:
            twins.take_step(number)

    @pytest.mark.parametrize("case", FAMILIES, ids=str)
    def test_a_clip_of_the_optimizers_own(self, case):
        """Also one that comes later."""
        twins, none = Twins(case, fullgraph=False), case.option("max_grad_norm")
        for number, max_grad_norm in enumerate([none, 0.5, 0.25, none]):
            for optimizer in twins.both:
                optimizer.param_groups[0]["max_grad_norm"] = max_grad_norm
            twins.take_step(number)

    def test_betas_as_tensors(self):
        """The graph may write them, and reads none but the learning rate before it has run."""
        twins = Twins(WITH_AMSGRAD, betas=(torch.tensor(0.9), torch.tensor(0.99)))

        def train(optimizer):
            optimizer.param_groups[0]["betas"][0].mul_(0.9)
            optimizer.step()

        compiled = torch.compile(train, backend=BACKEND)
        for number in STEPS:
            twins.set_grads(number)
            compiled(twins.compiled)
            train(twins.plain)
            twins.check()

    def test_a_scaler(self):
        twins = Twins(OPERATORS[0], fullgraph=False)
        twins.compiled.step = twins.step
        for number, scale in enumerate([8.0, 4.0]):
            twins.set_grads(number)
            for optimizer in twins.both:
                scaler = torch.amp.GradScaler("cpu", init_scale=scale)
                scaler.scale(torch.ones(()))
                scaler.step(optimizer)
            twins.check()

    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")
    @pytest.mark.parametrize("case", first_of_each(lambda case: case.sparse, OPERATORS), ids=str)
    def test_sparse_gradients(self, case):
        """Taken or refused as without a compiler."""
        outcomes = []
        for backend in (BACKEND, None):
            (param,) = as_parameters([torch.ones(4, 3)])
            param.grad = torch.eye(4)[:, :3].to_sparse()
            optimizer = case.build([param], fused=None)
            step = torch.compile(optimizer.step, backend=backend) if backend else optimizer.step
            try:
                step()
                outcomes.append(param.tolist())
            except RuntimeError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda o: o.param_groups[0].update(foreach=True), "cannot be `True` together"),
        (lambda o: o.state[params_of(o)[0]].update(step=1), "state_steps"),
    ],
    ids=["options", "step count"],
)
def test_errors_are_those_of_the_step(spoil, text):
    twins = Twins(WITH_COUNTS[0], fullgraph=False)
    twins.take_step(1)
    for optimizer in twins.both:
        spoil(optimizer)
        with pytest.raises(RuntimeError, match=text):
            (twins.step if optimizer is twins.compiled else optimizer.step)()


def list_arguments(case):
    """The arguments of the operator over lists for a row's optimizer."""
    params = as_parameters(make_weights(SHAPES, torch.float32))
    for param, grad in zip(params, make_gradients(SHAPES, torch.float32, 1), strict=True):
        param.grad = grad
    optimizer = case.build(params)
    torch.compile(optimizer.step, backend="eager")()  # defines the operator that reads options
    weights = [param.detach() for param in params]
    states = [optimizer.state[param][name] for name in case.states for param in params]
    (group,) = optimizer.param_groups
    store = optimizer._store
    steps = [store.with_count(group, p)[name] for name in store.numbers for p in params]
    count = len(optimizer._options(group))
    options = torch.ops.fusedstep.options(steps[0], None, optimizer._name, 0, count)
    grads = [param.grad for param in params]
    rule = ops.rule_index[optimizer._rule]
    return optimizer, (weights, grads, states, steps, options, rule)


@functools.cache
def kept_arguments(case):
    """The same for calls that change nothing."""
    return list_arguments(case)


@pytest.mark.parametrize("case", OPERATORS, ids=str)
def test_operators_are_as_declared(case):
    """torch's own checks: schemas, shapes without memory, autograd, tracing."""
    optimizer, arguments = list_arguments(case)
    torch.library.opcheck(torch.ops.fusedstep.step.default, arguments)
    steps, count = arguments[3], len(arguments[4])
    for lr in (None, torch.tensor(0.1)):
        torch.library.opcheck(
            torch.ops.fusedstep.options.default, (steps[0], lr, optimizer._name, 0, count)
        )


def test_a_graphs_text_has_the_shapes():
    """Inductor finds the code of an older process, and of an older version, by the text alone."""
    with FakeTensorMode():
        options = torch.ops.fusedstep.options(torch.zeros(()), None, "of another process", 0, 8)
    assert options.shape == (8,)


def test_operators_for_plans_are_as_declared():
    """No graph has these: a plan notes addresses, and states are made beforehand."""
    _, (weights, grads, states, steps, *_) = list_arguments(WITH_BETAS)
    plan = torch.ops.fusedstep.plan_new(weights, states, steps)
    for name, arguments in {
        "new_states": (weights, 2, True),
        "plan_new": (weights, states, steps),
        "plan_bind": (plan, weights, grads),
    }.items():
        operator = getattr(torch.ops.fusedstep, name).default
        torch.library.opcheck(operator, arguments, test_utils="test_schema")
    torch.ops.fusedstep.plan_delete(plan)


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_a_graph_notes_nothing_of_a_plan_that_goes_as_it_is_traced(pre_dispatch):
    """Weights may be collected at any time."""
    optimizers = [optimizer_with_gradients(OPERATORS[0], LAYOUTS)]
    handle = next(iter(optimizers[0]._plans.values())).handle
    assert torch.ops.fusedstep.plan_isa(handle)

    def traced(number):
        optimizers.clear()
        gc.collect()
        return number + 1

    graph = make_fx(traced, pre_dispatch=pre_dispatch)(torch.ones(3)).graph
    assert [node.op for node in graph.nodes] == ["placeholder", "call_function", "output"]
    with pytest.raises(RuntimeError, match="plan"):
        torch.ops.fusedstep.plan_isa(handle)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("options", torch.ones(3, dtype=torch.float64)),
        ("options", torch.ones(8)),
        ("states", []),
        ("states", [torch.ones(3)]),
        ("steps", []),
        ("grads", []),
        ("rule", -1),
    ],
)
@pytest.mark.parametrize("case", OPERATORS, ids=str)
def test_operators_name_bad_arguments(case, argument, value):
    _, arguments = kept_arguments(case)
    if argument == "states" and value == arguments[2]:
        pytest.skip("none are the right ones")
    names = ("weights", "grads", "states", "steps", "options", "rule")
    named = dict(zip(names, arguments, strict=True)) | {argument: value}
    before = [tensor.clone() for tensor in (*arguments[0], *arguments[2], *arguments[3])]
    with pytest.raises(RuntimeError, match=argument):
        torch.ops.fusedstep.step(**named)
    after = (*arguments[0], *arguments[2], *arguments[3])
    for tensor, expected in zip(after, before, strict=True):
        assert_same_bits(tensor, expected, "operand")


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_step_of_fake_tensors_as_with_torch(case):
    """Tools that estimate memory take it."""
    with FakeTensorMode():
        param = torch.nn.Parameter(torch.zeros(5))
        param.grad = torch.zeros(5)
        optimizer = case.build([param], fused=None)
        for _ in range(2):
            optimizer.step()
    assert optimizer.state.get(param, {}).keys() == {*case.numbers, *case.states}
