"""Muon's products by CUDA graphs: the same bits as without, on a GPU and by graphs of a fake."""

import contextlib

import pytest
import torch

from fusedstep import optim
from fusedstep.optim import _graphs

SHAPES = ((24, 8), (8, 24), (8, 8), (24, 8), (5, 40))

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Records(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps what would be written, and does not write it."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self.calls.append((func, args, kwargs))
            return kwargs.get("out", args[0])
        assert func.is_view, f"{func} allocates, where a graph may not"
        return func(*args, **kwargs)


class Graph:
    """A graph on the CPU."""

    made, launches, fails = 0, 0, False

    def capture_begin(self, capture_error_mode):
        Graph.made += 1
        if Graph.fails:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        assert capture_error_mode == "thread_local"
        self._records = Records()
        self._records.__enter__()

    def capture_end(self):
        self._records.__exit__(None, None, None)

    def replay(self):
        Graph.launches += 1
        for func, args, kwargs in self._records.calls:
            func(*args, **kwargs)


@pytest.fixture
def _faked(monkeypatch):
    for name in ("made", "launches", "fails"):
        monkeypatch.setattr(Graph, name, 0)
    monkeypatch.setattr(_graphs, "are_taken", lambda device: True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())


def trained(device, change=None, shapes=SHAPES, steps=6):
    generator = torch.Generator().manual_seed(0)

    def normal(shape):
        return torch.randn(shape, generator=generator).to(device)

    params = [torch.nn.Parameter(normal(shape)) for shape in shapes]
    optimizer = optim.Muon(params, lr=0.02, ns_dtype=torch.bfloat16)
    for number in range(steps):
        if change is not None:
            change(optimizer, number)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = normal(p.shape)
        optimizer.step()
    return [p.detach() for group in optimizer.param_groups for p in group["params"]]


def grows(optimizer, number):
    """Larger matrices come, so that all memory is made anew."""
    if number == 3:
        weight = torch.zeros(40, 16, device=optimizer.param_groups[0]["params"][0].device)
        optimizer.add_param_group({"params": [torch.nn.Parameter(weight)]})


def turns(optimizer, number):
    """Other products, and then those of before."""
    names = {2: "polar_express", 4: "quintic"}
    for group in optimizer.param_groups:
        group["ns_coefficients"] = names.get(number, group["ns_coefficients"])


CHANGES = pytest.mark.parametrize("change", [None, grows, turns])


def same(found, expected):
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@CHANGES
@pytest.mark.usefixtures("_faked")
def test_steps_by_graphs_have_the_same_bits(change, monkeypatch):
    found = trained("cpu", change)
    assert Graph.made > 0
    assert Graph.launches > Graph.made
    monkeypatch.setattr(_graphs, "are_taken", lambda device: False)
    same(found, trained("cpu", change))


@pytest.mark.usefixtures("_faked")
def test_the_second_time_is_captured_and_all_that_follow_are_launched():
    trained("cpu", shapes=[(24, 8)] * 3, steps=6)
    assert (Graph.made, Graph.launches) == (1, 5)


@pytest.mark.usefixtures("_faked")
def test_what_cannot_be_captured_is_done_without(monkeypatch):
    monkeypatch.setattr(Graph, "fails", True)
    found = trained("cpu", shapes=[(24, 8)] * 3)
    assert (Graph.made, Graph.launches) == (1, 0)
    monkeypatch.setattr(_graphs, "are_taken", lambda device: False)
    same(found, trained("cpu", shapes=[(24, 8)] * 3))


def test_a_cpu_has_no_graphs():
    assert not _graphs.are_taken(torch.device("cpu"))


@needs_gpu
@CHANGES
def test_a_gpu_has_the_same_bits(change, monkeypatch):
    launches, captured = [], _graphs.Graphs._captured

    def counting(self, device, work):
        run = captured(self, device, work)
        assert run is not work, "it was not captured"
        return lambda: launches.append(1) or run()

    monkeypatch.setattr(_graphs.Graphs, "_captured", counting)
    shapes = [(256, 64), (64, 256), (64, 64), (256, 64), (768, 768), (768, 768)]
    found = trained("cuda", change, shapes)
    assert launches
    monkeypatch.setattr(_graphs, "are_taken", lambda device: False)
    same(found, trained("cuda", change, shapes))


@needs_gpu
def test_two_optimizers_take_turns_on_a_gpu(monkeypatch):
    def run():
        return [trained("cuda", shapes=[(64, 64)] * 4), trained("cuda", shapes=[(64, 64)] * 4)]

    first, second = run()
    monkeypatch.setattr(_graphs, "are_taken", lambda device: False)
    same(first, second)
    same(first, run()[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_weights_of_another_gpu_than_the_current_one():
    same([x.cpu() for x in trained("cuda:1")], [x.cpu() for x in trained("cuda:0")])


@needs_gpu
def test_a_graph_of_the_caller_has_the_operations_themselves():
    assert _graphs.are_taken(torch.device("cuda"))
    graph, found = torch.cuda.CUDAGraph(), []
    room = torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        room.add_(1)
        found.append(_graphs.are_taken(torch.device("cuda")))
    assert found == [False]


@needs_gpu
def test_a_dispatch_mode_sees_the_operations_of_a_gpu():
    with Records():
        assert not _graphs.are_taken(torch.device("cuda"))
