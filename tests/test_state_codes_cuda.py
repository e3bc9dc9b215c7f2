"""States in codes on a CUDA device: the CPU's bits, for every row and kind of codes."""

import copy

import pytest
import torch

from cases import CASES, KINDS, PLAIN
from stepping import assert_same_bits, make_gradients
from test_cuda import assert_same, needs_cuda, set_gradients, subjects

pytestmark = needs_cuda

CODED = pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
ELEMENTWISE = [case for case in CASES if case.elementwise]

#: Too small for codes; ends within a block, a byte, a part and a chunk; one of several chunks.
SHAPES = ((129,), (4096,), (65, 67), (4097,), (300, 500), (3, 5, 7))


@CODED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ELEMENTWISE, ids=str)
def test_the_bits_of_the_cpu(case, dtype, kind):
    optimizer, params, twin, twins = subjects(case, dtype, SHAPES, state_dtype=kind)
    for step in range(1, 5):
        set_gradients(params, twins, step)
        optimizer.step()
        twin.step()
        assert_same(optimizer, params, twin, twins, f"step {step}")


@CODED
@pytest.mark.parametrize("case", [c for c in KINDS if c.elementwise], ids=str)
def test_master_weights_clipping_and_cleared_gradients(case, kind):
    options = {"state_dtype": kind, "master_weights": True}
    optimizer, params, twin, twins = subjects(case, torch.bfloat16, SHAPES, **options)
    for step in range(1, 4):
        set_gradients(params, twins, step)
        optimizer.step(max_norm=0.5, zero_grad=step > 1)
        twin.step(max_norm=0.5, zero_grad=step > 1)
        assert_same(optimizer, params, twin, twins, f"step {step}")
        for param, other in zip(params, twins, strict=True):
            assert_same_bits(other.grad.cpu(), param.grad, "gradient")


@CODED
@pytest.mark.parametrize("case", [c for c in PLAIN if c.elementwise], ids=str)
def test_unaligned_operands(case, kind):
    optimizer, params, twin, twins = subjects(case, torch.float32, ((4099,),), state_dtype=kind)
    memory = torch.zeros(5000, device="cuda")
    twins[0].data = memory[3 : 3 + 4099].copy_(twins[0].detach())
    for step in range(1, 4):
        set_gradients(params, twins, step)
        twins[0].grad = torch.zeros(5000, device="cuda")[1 : 1 + 4099].copy_(twins[0].grad)
        optimizer.step()
        twin.step()
        assert_same(optimizer, params, twin, twins, f"step {step}")
    assert torch.all(memory[:3] == 0)
    assert torch.all(memory[3 + 4099 :] == 0)


@CODED
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", [c for c in PLAIN if c.elementwise], ids=str)
def test_a_number_that_is_none(case, bad, kind):
    optimizer, params, twin, twins = subjects(case, torch.float32, ((8192,),), state_dtype=kind)
    for step in range(1, 4):
        set_gradients(params, twins, step)
        if step == 2:
            params[0].grad[5000] = twins[0].grad[5000] = bad
        optimizer.step()
        twin.step()
    weight, other = params[0].detach(), twins[0].detach().cpu()
    assert torch.equal(weight.isnan(), other.isnan())
    finite = ~weight.isnan()
    assert_same_bits(other[finite], weight[finite], "weight")


@CODED
@pytest.mark.parametrize("case", [c for c in PLAIN if c.elementwise and c.counts], ids=str)
def test_a_skipped_step_changes_nothing(case, kind):
    *_, twin, twins = subjects(case, torch.float32, SHAPES, state_dtype=kind)
    gradients = make_gradients(SHAPES, torch.float32, 1)
    for param, grad in zip(twins, gradients, strict=True):
        param.grad = grad.cuda()
    twin.step()
    before = copy.deepcopy(twin.state_dict()["state"]), [p.detach().clone() for p in twins]
    twin.found_inf = torch.ones((), device="cuda")
    twin.step()
    for index, param in enumerate(twins):
        assert_same_bits(param, before[1][index], "weight")
        for name, value in before[0][index].items():
            now = twin.state[param][name]
            assert_same_bits(now.cpu(), value.cpu(), name)


@CODED
@pytest.mark.parametrize(
    "case", [c for c in PLAIN if c.elementwise and c.has("capturable")], ids=str
)
def test_a_captured_graph(case, kind):
    *_, twin, twins = subjects(case, torch.float32, SHAPES, state_dtype=kind, capturable=True)
    *_, eager, others = subjects(case, torch.float32, SHAPES, state_dtype=kind, capturable=True)
    gradients = [grad.cuda() for grad in make_gradients(SHAPES, torch.float32, 1)]
    for params in (twins, others):
        for param, grad in zip(params, gradients, strict=True):
            param.grad = grad.clone()
    twin.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        twin.step()
    graph.replay()
    graph.replay()
    for _ in range(3):
        eager.step()
    for param, other in zip(twins, others, strict=True):
        assert_same_bits(param, other, "weight")


@CODED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if not c.elementwise], ids=str)
def test_rules_with_norms(case, dtype, kind):
    optimizer, params, twin, twins = subjects(case, dtype, SHAPES, state_dtype=kind)
    for step in range(1, 4):
        set_gradients(params, twins, step)
        optimizer.step(zero_grad=step == 2)
        twin.step(zero_grad=step == 2)
        assert_same(optimizer, params, twin, twins, f"step {step}")


@CODED
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_gradients_and_weights_in_other_layouts(case, kind):
    optimizer, params, twin, twins = subjects(case, torch.float32, ((100, 70),), state_dtype=kind)
    for param in (*params, *twins):
        param.data = param.detach().t().contiguous().t()
    for step in range(1, 4):
        set_gradients(params, twins, step)
        optimizer.step()
        twin.step()
        assert_same(optimizer, params, twin, twins, f"step {step}")
