"""States in codes on a CUDA device: the CPU's bits, for every row and kind of codes."""

import pytest
import torch

from support.cases import CASES, PLAIN
from support.cuda_device import assert_same, needs_cuda, set_gradients, subjects

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
