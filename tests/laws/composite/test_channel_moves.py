"""Moves of weights along their gradients by channels: native passes over all weights of a plan."""

import itertools

import pytest
import torch

from fusedstep import optim
from fusedstep._matrix.channel_moves import ChannelMoves, Channels
from fusedstep._native import ops
from fusedstep._step.plan import Plan

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]

#: Channels of one segment, of several, with tails, and without elements.
SHAPES = [(5, 7), (40, 132), (1, 9000), (300, 33), (300, 200), (2, 4200), (0, 3), (3, 0)]
DTYPES = [
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
]
GROWTH, EPSILON, FACTOR, ROOT, TIMES, KEEP = 1.01, 1e-8, 0.25, 1.5, -0.02, 0.99


def laid_out(values, layout):
    """A matrix of these values: in order, in rows that lie apart, turned, or of every third one."""
    rows, columns = values.shape
    memory = {
        "in order": lambda: values.clone(),
        "apart": lambda: values.new_zeros(rows, columns + 3)[:, :columns],
        "turned": lambda: values.new_zeros(columns, rows).t(),
        "strided": lambda: values.new_zeros(rows, 3 * columns)[:, ::3],
    }[layout]()
    return memory.copy_(values)


class Operands:
    """The operands of a step, on a device."""

    def __init__(self, device, weight=torch.float32, grad=None, layout="in order"):
        torch.manual_seed(0)
        self.wide = torch.float64 if weight is torch.float64 else torch.float32
        self.channels = list(itertools.islice(itertools.cycle(Channels), len(SHAPES) * 3))
        shapes = [shape for shape in SHAPES for _ in Channels]
        low = [self._low(*each) for each in zip(shapes, self.channels, strict=True)]

        def made(shapes, dtype, layout="in order"):
            values = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
            return [laid_out(each, layout) for each in values]

        self.lows, self.updates = made(low, self.wide), made(low, self.wide)
        self.weights = made(shapes, weight, layout)
        self.grads = made(shapes, grad or weight, layout)
        self.lasts = [
            torch.tensor(0.3 * (i % 3), dtype=self.wide, device=device) for i in range(24)
        ]
        self.lengths = [0.5 + index for index in range(len(shapes))]

    @staticmethod
    def _low(shape, channels):
        return (2, shape[1]) if channels is Channels.COLUMNS else (shape[0], 2)

    def expected(self, in_front, limits):
        """New weights and norms in float64, by torch's operations."""
        weights, lasts = [], []
        for i, channels in enumerate(self.channels):
            low, update, grad = (x[i].double() for x in (self.lows, self.updates, self.grads))
            dim = (0, 1) if channels is Channels.WHOLE else channels.reduced
            a, b = (x.square().sum(dim, keepdim=True).sqrt() for x in (update, low))
            scaled = a / self.lengths[i] * FACTOR / (b + EPSILON) * grad
            scaled *= ROOT if in_front else 1
            norm, last = scaled.square().sum().sqrt(), self.lasts[i].double()
            if limits:
                limit = (norm / (last + EPSILON)).clamp(min=GROWTH) / GROWTH if last > 0 else 1
                scaled, last = scaled / limit, norm / limit
            scaled *= 1 if in_front else ROOT
            move = self.lengths[i] * TIMES * scaled
            weights.append(KEEP * self.weights[i].double() + move)
            lasts.append(last)
        return weights, lasts

    def step(self, in_front=False, limits=True):
        steps = [{"step": torch.zeros(())} for _ in self.weights]
        plan = Plan(self.updates, [], steps, (), ("step",), False, False)
        moves = ChannelMoves(plan.handle, self.lows, self.updates, self.channels)
        moves.bind(self.weights, self.grads, self.lasts, self.lengths)
        moves.sum_gradients()
        moves.sum_updates()
        moves.scale(FACTOR, EPSILON)
        moves.limit(limits, in_front, ROOT, GROWTH, EPSILON, TIMES)
        moves.move(0, self.weights[:10], KEEP)
        for index in range(10, 20):
            moves.move_onto(index, self.weights[index], KEEP)
        moves.move(20, self.weights[20:], KEEP)
        return self


@pytest.fixture(params=[*ops.isas()[:-1], "base"])
def isa(request):
    ops.force_isa(request.param)
    yield
    ops.force_isa(None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["in order", "apart", "turned", "strided"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_moves_are_those_of_the_formula(device, dtypes, layout, isa):
    bound = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtypes[0], 2e-2)
    for in_front, limits in ((False, True), (True, True), (True, False)):
        found = Operands(device, *dtypes, layout)
        weights, lasts = found.expected(in_front, limits)
        found.step(in_front, limits)
        for a, b in zip(found.weights, weights, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=bound, atol=bound)
        bound_of_norms = 1e-12 if dtypes[0] is torch.float64 else 1e-6
        for a, b in zip(found.lasts, lasts, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=bound_of_norms, atol=bound_of_norms)


@pytest.mark.parametrize("dtypes", DTYPES[:3], ids=str)
def test_bits_depend_neither_on_threads_nor_on_the_instruction_set(dtypes):
    expected, threads = Operands("cpu", *dtypes).step(), torch.get_num_threads()
    for isa, count in [("base", 1), *((isa, 3) for isa in ops.isas())]:
        ops.force_isa(isa)
        torch.set_num_threads(count)
        found = Operands("cpu", *dtypes).step()
        torch.set_num_threads(threads)
        ops.force_isa(None)
        for a, b in zip(
            found.weights + found.lasts, expected.weights + expected.lasts, strict=True
        ):
            assert a.equal(b)


def test_only_elements_of_a_weight_are_written():
    found = Operands("cpu")
    memory = [torch.full((w.shape[0] + 2, w.shape[1] + 4), 9.0) for w in found.weights]
    for i, (all_of_it, w) in enumerate(zip(memory, found.weights, strict=True)):
        found.weights[i] = all_of_it[1:-1, 2:-2].copy_(w)
    found.step()
    for all_of_it in memory:
        all_of_it[1:-1, 2:-2] = 9.0
        assert (all_of_it == 9).all()


def test_squares_have_the_range_of_float64():
    found = Operands("cpu")
    for tensors in (found.lows, found.updates, found.grads):
        for tensor, factor in zip(tensors, itertools.cycle((1e-30, 1e30))):
            tensor.mul_(factor)
    weights, _ = found.expected(False, False)
    found.step(False, False)
    for a, b in zip(found.weights, weights, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_a_step_counts_versions_of_weights():
    p = torch.nn.Parameter(torch.ones(6, 5))
    p.grad = torch.ones(6, 5)
    optimizer = optim.APOLLOAdamW([p], rank=2)
    for _ in range(3):
        before = p._version
        optimizer.step()
        assert p._version > before


def test_a_step_has_as_many_operators_for_any_number_of_weights():
    """But for the products."""
    counts = []
    for number in (2, 6):
        params = [torch.nn.Parameter(torch.ones(6, 5)) for _ in range(number)]
        for p in params:
            p.grad = torch.ones(6, 5)
        optimizer = optim.APOLLOAdamW(params, rank=2, weight_decay=0.1, fused=True)
        optimizer.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            optimizer.step()
        names = [event.name for event in profile.events() if event.name.startswith("fusedstep::")]
        counts.append(sorted(names))
    assert counts[0] == counts[1]
    assert "fusedstep::channels_move" in counts[0]


def test_operands_that_do_not_fit_are_refused():
    def bound(**given):
        found = Operands("cpu")
        operands = {
            "weights": found.weights,
            "grads": found.grads,
            "last_norms": found.lasts,
            "lengths": found.lengths,
        }
        steps = [{"step": torch.zeros(())} for _ in found.weights]
        plan = Plan(found.updates, [], steps, (), ("step",), False, False)
        moves = ChannelMoves(plan.handle, found.lows, found.updates, found.channels)
        changed = {name: change(operands[name]) for name, change in given.items()}
        moves.bind(**operands | changed)
        return moves, plan

    with pytest.raises(RuntimeError, match="gradients must be matrices of one dtype"):
        bound(grads=lambda grads: grads[::-1])
    with pytest.raises(RuntimeError, match="weights must be matrices of one dtype"):
        bound(weights=lambda weights: [weights[0].double(), *weights[1:]])
    with pytest.raises(RuntimeError, match="no pass moves bfloat16 along float32"):
        bound(weights=lambda weights: [w.bfloat16() for w in weights])
    with pytest.raises(RuntimeError, match="tensor 1 of the list: the weight shares memory"):
        bound(weights=lambda weights: [weights[0], weights[0], *weights[2:]])
    with pytest.raises(RuntimeError, match="tensor 0 of the list: the weight overlaps itself"):
        bound(weights=lambda weights: [weights[0][:1].expand(5, 7), *weights[1:]])
    with pytest.raises(RuntimeError, match="one number of the updates' dtype"):
        bound(last_norms=lambda norms: [norms[0].double(), *norms[1:]])
    with pytest.raises(RuntimeError, match="an entry for each weight"):
        bound(lengths=lambda lengths: lengths[1:])
    moves, plan = bound()
    with pytest.raises(RuntimeError, match="memory must be contiguous float64"):
        torch.ops.fusedstep.channels_sum_gradients(plan.handle, torch.zeros(3))
    moves.sum_gradients()
    with pytest.raises(RuntimeError, match="there are no such weights"):
        torch.ops.fusedstep.channels_move(plan.handle, 20, 5, 1.0)
    with pytest.raises(RuntimeError, match="the shape of the weight"):
        moves.move_onto(0, torch.ones(4, 7), 1.0)
