"""Law: nothing is made on, or in the dtype of, the defaults of a process."""

import ast
import contextlib
import copy
import functools
import itertools
import sys
from typing import NamedTuple

import pytest
import torch

import fusedstep
from fusedstep import optim
from fusedstep.galore import kernels
from fusedstep.memory.activations import trace
from support.cases import COMPOSITES, PLAIN, WITH_NAMESAKE
from support.foreign_codes import CLASSES, bitsandbytes_dictionary, numbers_of
from support.foreign_codes import SHAPES as SHAPES_OF_CODES
from support.pages import ROOT
from support.small import network
from support.stepping import (
    as_parameters,
    assert_same_contents,
    contents,
    make_gradients,
    make_weights,
    train,
)
from support.subjects import FIRST, OF_COMPOSITES, SUBJECTS, Subject, built, steps, values

PACKAGE = ROOT / "python" / "fusedstep"

#: Functions of torch that make a tensor, and have no tensor to take its dtype and device from.
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full"),
    *("linspace", "logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "range"),
    *("scalar_tensor", "sparse_coo_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}


def is_factory(node):
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in FACTORIES
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
    )


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_factories_are_told_the_dtype_and_the_device(path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    dictionaries = {
        ast.unparse(node.targets[0]): {key.value for key in node.value.keys}
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        if all(isinstance(key, ast.Constant) for key in node.value.keys)
    }
    for node in filter(is_factory, nodes):
        told = {keyword.arg for keyword in node.keywords}
        for keyword in node.keywords:
            if keyword.arg is None:  # **options
                told |= dictionaries.get(ast.unparse(keyword.value), set())
        assert {"dtype", "device"} <= told, f"{path.name}:{node.lineno}: {ast.unparse(node)}"


class Default(NamedTuple):
    """The defaults of a process, and the device of the weights."""

    dtype: torch.dtype
    device: str | None
    weights: str = "cpu"

    def __str__(self):
        return f"{self.dtype}-{self.device}-{self.weights}".replace("torch.", "")


DEFAULTS = (
    Default(torch.float64, None),
    Default(torch.bfloat16, "meta"),
    Default(torch.float16, "meta"),
)
ON_GPU = (Default(torch.float64, "cuda"), Default(torch.bfloat16, "cuda", "cuda"))
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@contextlib.contextmanager
def process_of(default):
    before = torch.get_default_dtype()
    torch.set_default_dtype(default.dtype)
    torch.set_default_device(default.device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


def under(some, defaults=None):
    """Subjects under the defaults, or under one of them in turn; on a GPU under all."""
    turns = itertools.cycle(DEFAULTS)
    marks = dict.fromkeys(ON_GPU, NEEDS_GPU)
    cases = [
        pytest.param(subject, default, marks=marks.get(default, ()), id=f"{subject} {default}")
        for subject in some
        for default in (*(defaults or [next(turns)]), *ON_GPU)
    ]
    return pytest.mark.parametrize(("subject", "default"), cases)


def test_every_composite_is_a_subject():
    assert OF_COMPOSITES.keys() == COMPOSITES.keys()


def loss_of(subject, params, number):
    """A loss that has the numbers as its gradients."""
    pairs = zip(params, values(subject.dtype, number), strict=True)
    return sum((param * value.to(param.device)).sum() for param, value in pairs)


# Roads: each returns what an optimizer has at its end


def resumed(subject, device):
    """Loads a dictionary into another optimizer."""
    params, optimizer = built(subject, device)
    steps(subject, optimizer, params, (1, 2, 3))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer = subject.build(params)
    optimizer.load_state_dict(saved)
    steps(subject, optimizer, params, (4, 5))
    optimizer.step(max_norm=1.0)
    return contents(optimizer)


def converted(subject, device):
    params, optimizer = built(subject, device)
    steps(subject, optimizer, params, (1,))
    optimizer = fusedstep.convert(optimizer)
    steps(subject, optimizer, params, (2, 3))
    return contents(optimizer)


def in_backward(subject, device):
    """Clips by the norm of the iteration before."""
    params, optimizer = built(subject, device)
    fusedstep.step_in_backward(optimizer, max_previous_norm=1.0)
    for number in (1, 2, 3):
        loss_of(subject, params, number).backward()
        optimizer.step()
    return contents(optimizer)


def offloaded(subject, device):
    params, optimizer = built(subject, device)
    optimizer = fusedstep.offload(optimizer, overlap=False)
    for number in (1, 2, 3):
        loss_of(subject, params, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {str(index): param.detach() for index, param in enumerate(params)}


def verified(subject, device):
    params, optimizer = built(subject, device)
    numbers = iter((1, 2, 3))

    def closure():
        for param, value in zip(params, values(subject.dtype, next(numbers)), strict=True):
            param.grad = value.to(param.device, copy=True)
        return params[0].detach().sum()

    fusedstep.verify(optimizer, closure, steps=2)
    return contents(optimizer)


def compiled(subject, device):
    params, optimizer = built(subject, device)
    torch.compiler.reset()
    step = torch.compile(optimizer.step, backend="aot_eager")
    for number in (1, 2, 3):
        for param, value in zip(params, values(subject.dtype, number), strict=True):
            param.grad = value.to(param.device, copy=True)
        step()
    return contents(optimizer)


ROADS = pytest.mark.parametrize(
    "road", [converted, in_backward, offloaded, verified], ids=lambda road: road.__name__
)


def forget_tensors():
    """Empties what the package keeps for later, which may have been made under other defaults."""
    for name, module in list(sys.modules.items()):
        for key, value in vars(module).items() if name.startswith("fusedstep") else ():
            if hasattr(value, "cache_clear") and "warn" not in key:
                value.cache_clear()


def check(road, default):
    right = road(default.weights)
    forget_tensors()
    with process_of(default):
        found = road(default.weights)
    assert_same_contents(found, right)


@under(SUBJECTS)
def test_steps_and_resumes(subject, default):
    check(functools.partial(resumed, subject), default)


@under(FIRST, DEFAULTS)
def test_steps_and_resumes_of_each_class(subject, default):
    check(functools.partial(resumed, subject), default)


@under([each for each in FIRST if each.optimizer is not optim.SparseAdam])
@ROADS
def test_other_roads(road, subject, default):
    check(functools.partial(road, subject), default)


@under([each for each in FIRST if each.optimizer is optim.AdamW])
def test_graphs(subject, default):
    check(functools.partial(compiled, subject), default)


OF_DEFAULTS = pytest.mark.parametrize("default", DEFAULTS, ids=str)


@OF_DEFAULTS
@pytest.mark.parametrize("case", [case for case in WITH_NAMESAKE if case in PLAIN], ids=str)
def test_dictionaries_of_torch(case, default):
    subject = Subject(case.optimizer, case.options, {})
    params = as_parameters(values(torch.float32, 0))
    namesake = case.build_namesake(params)
    steps(subject, namesake, params, (1, 2))
    saved = namesake.state_dict()

    def imported(device):
        params, optimizer = built(subject, device)
        fusedstep.import_state_dict(optimizer, saved)
        steps(subject, optimizer, params, (3, 4))
        return contents(optimizer)

    check(imported, default)


@OF_DEFAULTS
@pytest.mark.parametrize("state_dtype", [None, "int8"])
@pytest.mark.parametrize("name", CLASSES)
def test_codes_of_bitsandbytes(name, state_dtype, default):
    cls, states, _, _ = CLASSES[name]
    saved = bitsandbytes_dictionary(name, numbers_of(states))
    start = make_weights(SHAPES_OF_CODES, torch.float32)
    for step in (4, 5):
        make_gradients(SHAPES_OF_CODES, torch.float32, step)

    def imported(device):
        params = as_parameters(start)
        optimizer = cls(params, state_dtype=state_dtype)
        fusedstep.import_state_dict(optimizer, saved)
        train(optimizer, params, (4, 5))
        return contents(optimizer)

    check(imported, default)


@OF_DEFAULTS
@pytest.mark.parametrize("kernel", ["torch", "hybrid", "parts"])
def test_the_command_of_galore(kernel, default):
    def errors():
        return kernels.errors(kernels.problem(48, 32, 4, torch.float32, "cpu"), kernel)

    right = errors()
    with process_of(default):
        assert errors() == right


@OF_DEFAULTS
def test_needs_of_memory(default):
    def needs():
        return trace(network, (8, 6), tokens=False)

    right = needs()
    with process_of(default):
        assert needs() == right
