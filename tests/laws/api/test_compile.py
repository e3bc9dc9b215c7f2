"""Law: a compiled step is the step, to the bit, in one graph."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters

from support.allocations import LAYOUTS, SMALL, allocated_bytes, optimizer_with_gradients
from support.cases import FAMILIES, KINDS, WITH_COUNTS, first_of_each
from support.compiled import (
    BACKEND,
    GRAPHS,
    OPERATORS,
    SHAPES,
    STEPS,
    WITH_AMSGRAD,
    WITH_BETAS,
    Twins,
    graphs,
    params_of,
)
from support.stepping import (
    as_parameters,
    assert_same_bits,
    assert_same_contents,
    contents,
    make_gradients,
    make_weights,
)

pytestmark = pytest.mark.usefixtures("compiler_reset")

# Others are compared as their numbers change, in test_every_number.
UNCHANGED = [case for case in KINDS if case not in OPERATORS or case in FAMILIES]


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
