"""Law: tails and seams. Every size around a vector, a virtual register and a chunk is right."""

import pytest
import torch

from fusedstep._native import ops
from support.cases import CASES, DTYPES, PLAIN
from support.layouts import Layout
from support.stepping import (
    CHUNK,
    ISAS,
    TEAM,
    Reference,
    as_parameters,
    assert_same_bits,
    forced_isa,
    make_gradients,
    make_weights,
)

SIZES = (
    *range(34), 63, 64, 65, 127, 128, 129, 1023, 1024, 1025,
    CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5,
)  # fmt: skip
# With them a step is one thread's or a team's; norms are summed in groups of chunks.
ALONE = (1, CHUNK - 1, CHUNK, CHUNK + 1, TEAM - 1, TEAM, TEAM + 1, 5 * TEAM + 3)
STEPS = 3


def test_the_sizes_are_around_those_of_the_library():
    facts = ops.capabilities()
    chunk, team = int(facts["chunk"]), int(facts["serial_elements"])
    assert 1024 < chunk < team
    assert {chunk - 1, chunk, chunk + 1, 2 * chunk + 5} <= set(SIZES)
    assert {chunk - 1, chunk, chunk + 1, team - 1, team, team + 1} <= set(ALONE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_size_matches_the_reference_within_its_bytes(case, dtype):
    shapes = [(size,) for size in SIZES]
    values = make_weights(shapes, dtype)
    flat = Layout("flat", (1,), (1,))
    weights = [flat.place(value) for value in values]
    references = [Reference(case, value) for value in values]
    params = [weight.view.requires_grad_() for weight in weights]
    optimizer = case.build(params)
    for step in range(1, STEPS + 1):
        gradients = make_gradients(shapes, dtype, step)
        placed = [flat.place(gradient) for gradient in gradients]
        for param, reference, place, gradient in zip(
            params, references, placed, gradients, strict=True
        ):
            param.grad = place.view
            reference.step(gradient)
        optimizer.step()
        for place in placed:
            place.assert_outside_untouched("gradient")
    for size, weight, param, reference in zip(SIZES, weights, params, references, strict=True):
        reference.check(param, optimizer.state[param], f"size {size}")
        weight.assert_outside_untouched(f"weight of size {size}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.elementwise], ids=str)
def test_a_tail_has_the_bits_of_a_body(case, dtype, isa):
    """An elementwise rule's update of an element does not depend on how many come after it."""
    longest = max(SIZES)
    params = as_parameters(make_weights([(longest,)], dtype) * len(SIZES))
    for index, size in enumerate(SIZES):
        params[index].data = params[index].data[:size].clone()
    params += as_parameters(make_weights([(longest,)], dtype))
    with forced_isa(isa):
        optimizer = case.build(params)
        for step in range(1, STEPS + 1):
            (gradient,) = make_gradients([(longest,)], dtype, step)
            for param in params:
                param.grad = gradient[: len(param)].clone()
            optimizer.step()
    *shorter, whole = params
    for param in shorter:
        assert_same_bits(param, whole[: len(param)], f"weight of size {len(param)}")
        for name in case.states:
            assert_same_bits(
                optimizer.state[param][name],
                optimizer.state[whole][name][: len(param)],
                f"{name} of size {len(param)}",
            )


@pytest.mark.parametrize("case", PLAIN, ids=str)
@pytest.mark.parametrize("size", ALONE)
def test_one_tensor_alone(case, size):
    values = make_weights([(size,)], torch.float32)
    reference = Reference(case, values[0])
    params = as_parameters(values)
    optimizer = case.build(params)
    for step in range(1, STEPS + 1):
        (params[0].grad,) = make_gradients([(size,)], torch.float32, step)
        reference.step(params[0].grad)
        optimizer.step()
    reference.check(params[0], optimizer.state[params[0]], f"size {size}")
