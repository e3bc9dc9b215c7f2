"""Law: a step works in a child of fork(), and in several threads at a time."""

import copy
import subprocess
import sys
import threading

import pytest
import torch

from fusedstep._native import ops
from support.cases import KINDS, PLAIN
from support.stepping import (
    CHUNK,
    TEAM,
    as_parameters,
    assert_counts,
    assert_same_bits,
    assert_same_contents,
    contents,
    make_gradients,
    make_weights,
    run,
    train,
)
from support.stepping import threads as torch_threads

FORK_PROGRAM = """
import os
import torch
from support.cases import PLAIN
from support.stepping import assert_same_contents, contents, run, train

# No tensor is so large that torch's own operations start threads: in a child of fork() these hang.
SHAPES = ((33,), *[(60, 100)] * 30)
torch.set_num_threads(3)
expected = {}
for case in PLAIN:
    _, optimizer = run(case, SHAPES, torch.float32, steps=4)
    expected[case.name] = contents(optimizer)

def check(case, params, optimizer):
    train(optimizer, params, [3, 4])
    assert_same_contents(contents(optimizer), expected[case.name])

begun = [(case, *run(case, SHAPES, torch.float32, steps=2)) for case in PLAIN]
child = os.fork()
for each in begun:
    check(*each)
for case in PLAIN:
    check(case, *run(case, SHAPES, torch.float32, steps=2))
if child == 0:
    os._exit(0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
for case in PLAIN:
    check(case, *run(case, SHAPES, torch.float32, steps=2))
print("both are right")
"""


def test_a_child_of_fork_steps_and_so_does_its_parent(subprocess_environment):
    """The child steps with the parent's plans, whose OpenMP threads it does not have."""
    result = run_program(FORK_PROGRAM, subprocess_environment)
    assert result.stdout.strip() == "both are right", result.stderr


MANY_FORKS_PROGRAM = """
import os, signal, sys, threading
import torch
from support.cases import PLAIN
from fusedstep import optim

torch.set_num_threads(1)
params = [torch.nn.Parameter(torch.ones(4)) for _ in range(30)]
for param in params:
    param.grad = torch.ones(4)
optimizer = optim.Adam([{"params": [param]} for param in params])
optimizer.step()
plan = next(iter(optimizer._plans.values())).handle

forking = threading.Event()  # elsewhere the threads would take a CPU from the children

def step(**options):
    while forking.wait():
        optimizer.step(**options)

def ask():  # of all that takes the registry's lock the most of the time
    while forking.wait():
        torch.ops.fusedstep.plan_isa(plan)

def build_and_step():
    signal.alarm(60)
    param = torch.nn.Parameter(torch.ones(4))
    mine = PLAIN[0].build([param])
    for _ in range(3):
        param.grad = torch.ones(4)
        mine.step()
    del mine

sys.setswitchinterval(1e-4)
for work in (step, ask, ask):
    threading.Thread(target=work, daemon=True).start()
for index in range(100):
    children = []
    forking.set()
    for _ in range(10):
        children.append(os.fork())
        if children[-1] == 0:
            build_and_step()
            os._exit(0)
    forking.clear()
    for child in children:
        _, status = os.waitpid(child, 0)
        assert status == 0, (index, child, status)
print("none hangs", flush=True)
os._exit(0)
"""


def run_program(program, environment):
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_children_of_fork_step_whatever_other_threads_did(subprocess_environment):
    """A thread of the parent may have held any lock when it forked."""
    result = run_program(MANY_FORKS_PROGRAM, subprocess_environment)
    assert result.stdout == "none hangs\n", result.stderr


# Steps in a child, which does not have the threads that torch shares work among.
IN_A_CHILD_PROGRAM = """
import os, signal
import torch
from support.cases import FAMILIES, KINDS, PLAIN

def new(build, grads, steps=2):
    params = [torch.nn.Parameter(torch.ones(300, 300)) for _ in range(3)]
    for param, grad in zip(params, grads()):
        param.grad = grad
    optimizer = build(params)
    for _ in range(steps):
        optimizer.step()
    return params, optimizer

def own():
    return [torch.full((300, 300), 0.5) for _ in range(3)]

def shared():
    return 3 * [torch.full((300, 300), 0.5)]

def expanded():
    return 3 * [torch.full((), 0.5).expand(300, 300)]

def load(optimizer, params):
    optimizer.load_state_dict(STATE)
    optimizer.step()

def clip(optimizer, params):
    optimizer.step(max_norm=1.0)

def clear(optimizer, params):
    optimizer.step(zero_grad=True)

def step(optimizer, params):
    optimizer.step()

def masters_of(case):
    def build(params):
        for param in params:
            param.data, param.grad = param.data.bfloat16(), param.grad.bfloat16()
        return case.build(params, master_weights=True)

    return build

torch.set_num_threads(3)
CALLS = [(case.build, own, load, 2) for case in PLAIN]
CALLS += [(case.build, grads, call, 2) for case in FAMILIES
    for grads in (shared, expanded) for call in (clip, clear)]
CALLS += [(case.build, own, step, 0) for case in KINDS if case.initial]
CALLS += [(masters_of(case), own, step, 0) for case in PLAIN]
for index, (build, grads, call, steps) in enumerate(CALLS):
    STATE = new(build, own, 1)[1].state_dict()
    params, optimizer = new(build, grads, steps)
    others, expected = new(build, grads, steps)
    call(expected, others)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        call(optimizer, params)
        for a, b in zip(params, others):  # in parts, for comparing is shared as well
            for mine, theirs in ((a, b), (a.grad, b.grad)):
                assert all(map(torch.equal, mine.split(50), theirs.split(50)))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, (index, call, status)
print("none hangs")
"""


def test_a_child_of_fork_loads_clips_and_clears(subprocess_environment):
    result = run_program(IN_A_CHILD_PROGRAM, subprocess_environment)
    assert result.stdout == "none hangs\n", result.stderr


@pytest.mark.parametrize("case", KINDS, ids=str)
def test_two_optimizers_in_two_threads(case):
    shapes = ((33,), (TEAM + CHUNK + 5,), (61, 67))
    _, expected = run(case, shapes, torch.float32, steps=6)
    start = threading.Barrier(2)
    results = [None, None]

    def work(index):
        params = as_parameters(make_weights(shapes, torch.float32))
        optimizer = case.build(params)
        start.wait()
        train(optimizer, params, range(1, 7))
        results[index] = contents(optimizer)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for result in results:
        assert_same_contents(result, contents(expected))


def step_in_a_thread(optimizer, done, errors):
    """Starts a step, and returns as soon as it lets go of Python's lock.

    The thread gives it up in the step only: of its own accord it would have to wait for an hour.
    """

    def work():
        try:
            optimizer.step()
            done.append(1)
        except RuntimeError as error:
            errors.append(str(error))

    worker, interval = threading.Thread(target=work), sys.getswitchinterval()
    sys.setswitchinterval(3600)
    try:
        worker.start()
    finally:
        sys.setswitchinterval(interval)
    return worker


def large(case):
    """An optimizer whose steps last longer than a thread takes to be run again."""
    param = torch.nn.Parameter(torch.ones(1 << 23))
    param.grad = torch.ones_like(param)
    optimizer = case.build([param])
    optimizer.step()
    return param, optimizer


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_two_threads_that_step_one_optimizer_are_told(case, repeated, monkeypatch):
    """The second gets an error, and nothing of its step is done."""
    if not repeated:
        monkeypatch.setattr(ops.bind, "repeat", lambda *_: False)
    param, optimizer = large(case)
    done, errors = [1], []
    for _ in range(20):
        worker = step_in_a_thread(optimizer, done, errors)
        try:
            optimizer.step()
            done.append(1)
        except RuntimeError as error:
            errors.append(str(error))
        worker.join()
        if errors:
            break
    assert errors
    assert all("another thread is stepping this optimizer" in error for error in errors)
    optimizer.step()
    assert_counts(case, optimizer, [param], [len(done) + 1])


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_step_during_a_load_is_an_error(case):
    params, optimizer = run(case, ((33,),), torch.float32, steps=3)
    saved, errors = copy.deepcopy(optimizer.state_dict()), []

    def step():
        try:
            optimizer.step()
        except RuntimeError as error:
            errors.append(str(error))

    def step_elsewhere(*_):
        worker = threading.Thread(target=step)
        worker.start()
        worker.join()

    hook = optimizer.register_load_state_dict_pre_hook(step_elsewhere)
    before = [param.detach().clone() for param in params]
    optimizer.load_state_dict(saved)
    hook.remove()
    assert errors == ["another thread is loading this optimizer's state"]
    for param, values in zip(params, before, strict=True):
        assert_same_bits(param.detach(), values, "weight")
    optimizer.step()
    assert_counts(case, optimizer, params, [4])


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_load_during_a_step_is_an_error(case):
    _, optimizer = large(case)
    saved, errors = optimizer.state_dict(), []
    for _ in range(20):
        optimizer.step()  # the next one repeats it, and lets go of the lock as it begins
        worker = step_in_a_thread(optimizer, [], [])
        try:
            optimizer.load_state_dict(saved)
        except RuntimeError as error:
            errors.append(str(error))
        worker.join()
        if errors:
            break
    assert errors == ["another thread is stepping this optimizer"]
    optimizer.load_state_dict(saved)
    optimizer.step()


@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_other_threads_run_python_while_a_step_runs(case, repeated, monkeypatch):
    """A step has to let them run: by Python's switch interval they would wait for an hour."""
    if not repeated:
        monkeypatch.setattr(ops.bind, "repeat", lambda *_: False)
    param = torch.nn.Parameter(torch.ones(1 << 23))
    param.grad = torch.ones_like(param)
    optimizer = case.build([param])
    optimizer.step()
    gate, seen, interval = threading.Lock(), [], sys.getswitchinterval()

    def look():
        with gate:
            seen.append(True)

    gate.acquire()
    worker = threading.Thread(target=look)
    worker.start()
    sys.setswitchinterval(3600)
    try:
        gate.release()
        for _ in range(300):
            optimizer.step()
            if seen:
                break
        was_seen = bool(seen)
    finally:
        sys.setswitchinterval(interval)
        worker.join()
    assert was_seen


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_one_optimizer_moves_to_another_thread(case):
    """OpenMP's own defaults are others there; a plan made here has to work as before."""
    shapes = ((TEAM + CHUNK + 5,), (61, 67))
    _, expected = run(case, shapes, torch.float32, steps=4)
    with torch_threads(3):
        params, optimizer = run(case, shapes, torch.float32, steps=2)
        worker = threading.Thread(target=train, args=(optimizer, params, [3, 4]))
        worker.start()
        worker.join()
    assert_same_contents(contents(optimizer), contents(expected))


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_step_inside_of_backward(case):
    """A hook steps in autograd's thread as soon as a gradient has been accumulated."""
    shape = (TEAM + CHUNK + 5,)
    weights = make_weights([shape], torch.float32)
    (param,), (other,) = as_parameters(weights), as_parameters(weights)
    optimizer, expected = case.build([param]), case.build([other])
    param.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    for step in range(1, 3):
        (gradient,) = make_gradients([shape], torch.float32, step)
        param.grad, other.grad = None, gradient.clone()
        (param * gradient).sum().backward()
        expected.step()
    assert_same_bits(param, other, "weight")
