"""Law: the same bits on every instruction set, with any number of threads, and from run to run."""

import contextlib
import ctypes
import functools
import math

import pytest
import torch

import fusedstep
from support.cases import CASES, DTYPES, FAMILIES, KINDS, PLAIN
from support.layouts import Layout
from support.stepping import (
    CHUNK,
    ISAS,
    TEAM,
    as_parameters,
    assert_same_bits,
    assert_same_contents,
    contents,
    forced_isa,
    make_gradients,
    make_weights,
    run,
    threads,
)

STEPS = 3
THREADS = (1, 2, 3, 7, 64)

# Dense tensors of less than a vector to several chunks, then views that go the engine's other ways.
# Together they have fewer chunks than the largest number of threads.
SHAPES = ((), (0,), (1,), (33,), (1025,), *((61, 3),) * 20, (2 * CHUNK + 5,), (65, 300))
VIEWS = (
    Layout("sliced columns", (67, 130), (150, 1)),
    Layout("every second column", (67, 130), (260, 2)),
    Layout("transposed", (67, 130), (1, 67)),
)


def test_the_shapes_are_work_for_a_team():
    """For a rule that waits between its phases only what has several chunks counts."""
    sizes = [math.prod(shape) for shape in (*SHAPES, *(view.shape for view in VIEWS))]
    assert sum(size for size in sizes if size > CHUNK) > TEAM
    assert sum(-(-size // CHUNK) for size in sizes) < max(THREADS)


def trajectory(case, dtype):
    """Weights and states after some steps; every view also has an expanded gradient once."""
    shapes = [*SHAPES, *(view.shape for view in VIEWS)]
    values = make_weights(shapes, dtype)
    params = as_parameters(values[: len(SHAPES)])
    placed = [view.place(value) for view, value in zip(VIEWS, values[-3:], strict=True)]
    params += [place.view.requires_grad_() for place in placed]
    optimizer = case.build(params)
    for step in range(1, STEPS + 1):
        for param, gradient in zip(params, make_gradients(shapes, dtype, step), strict=True):
            param.grad = gradient
        if step == STEPS:
            for param in params[-3:]:
                param.grad = param.grad[:1].expand(param.shape)
        optimizer.step()
    return contents(optimizer)


@functools.cache
def one_thread_on_base(case, dtype):
    with threads(1), forced_isa("base"):
        return trajectory(case, dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_isa_and_any_threads(case, dtype, isa):
    expected = one_thread_on_base(case, dtype)
    with forced_isa(isa):
        # All combinations for the first row of a family. That of one thread on base is there.
        counts = THREADS if isa == fusedstep.isas()[0] else (1, 7)
        if case not in FAMILIES:
            counts = (2, 64) if isa == "base" else (7,)
        for count in counts:
            with threads(count):
                assert_same_contents(trajectory(case, dtype), expected, f"{isa}, {count} threads:")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_run_to_run(case, dtype):
    with threads(3):
        assert_same_contents(trajectory(case, dtype), trajectory(case, dtype))


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_threads_changed_between_steps(case):
    shapes = ((TEAM + CHUNK + 1,), (5, 7))
    _, optimizer = run(case, shapes, torch.float32, steps=4)
    params = as_parameters(make_weights(shapes, torch.float32))
    changing = case.build(params)
    for step, count in enumerate((1, 7, 2, 64), start=1):
        with threads(count):
            for param, gradient in zip(
                params, make_gradients(shapes, torch.float32, step), strict=True
            ):
                param.grad = gradient
            changing.step()
    assert_same_contents(contents(changing), contents(optimizer))


@contextlib.contextmanager
def rounding(mode):
    """The direction in which this thread rounds; x86 numbers the four."""
    libm = ctypes.CDLL("libm.so.6")
    assert libm.fesetround(mode) == 0
    try:
        yield
    finally:
        libm.fesetround(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", KINDS, ids=str)
def test_threads_round_as_the_caller_does(case, dtype):
    """Two steps: the first of some optimizers moves no weight."""
    results, shape = {}, (TEAM + CHUNK + 5,)
    for mode in (0x000, 0x800):  # to nearest, upward
        for isa in fusedstep.isas():
            for count in (1, 3):
                params = as_parameters(make_weights([shape], dtype))
                optimizer = case.build(params)
                gradients = [make_gradients([shape], dtype, step)[0] for step in (1, 2)]
                with threads(count, started=True), rounding(mode), forced_isa(isa):
                    for gradient in gradients:
                        params[0].grad = gradient
                        optimizer.step()
                expected = results.setdefault(mode, contents(optimizer))
                what = f"mode {mode:x}, {isa}, {count} threads:"
                assert_same_contents(contents(optimizer), expected, what)
    nearest, upward = (result["weight 0"] for result in results.values())
    assert not torch.equal(nearest, upward)


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_neighbours_do_not_matter(case):
    """A tensor's result is the same alone and in company, and in any order.

    Alone each is stepped by one thread, together by a team.
    """
    shapes = ((7,), (TEAM - 1,), (33, 31), (CHUNK,))
    together, optimizer = run(case, shapes, torch.float32, STEPS)
    weights = make_weights(shapes, torch.float32)
    for order in ((0,), (1,), (2,), (3,), (3, 1, 2, 0)):
        params = as_parameters([weights[i] for i in order])
        alone = case.build(params)
        for step in range(1, STEPS + 1):
            gradients = make_gradients(shapes, torch.float32, step)
            for param, index in zip(params, order, strict=True):
                param.grad = gradients[index]
            alone.step()
        for param, index in zip(params, order, strict=True):
            assert_same_bits(param, together[index], f"weight {index} of {order}")
            for name in case.states:
                assert_same_bits(
                    alone.state[param][name],
                    optimizer.state[together[index]][name],
                    f"{name} {index} of {order}",
                )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", [case for case in PLAIN if case.has("keep_grad")], ids=str)
def test_keep_grad_gives_the_same_bits(case, isa, dtype):
    shapes = ((), (33,), (131, 257), (3 * CHUNK + 1,))
    with forced_isa(isa):
        for options in ({}, {"weight_decay": 0.02}, {"maximize": True}):
            _, keeping = run(case, shapes, dtype, STEPS, keep_grad=True, **options)
            _, storing = run(case, shapes, dtype, STEPS, keep_grad=False, **options)
            assert_same_contents(contents(keeping), contents(storing), str(options))
