"""The passes of Muon's step around its products: one native pass each."""

import pytest
import torch

from fusedstep import optim
from fusedstep._matrix import arrangement, local_stages, moves, rows
from fusedstep._matrix.native_batches import NativeStages
from fusedstep._native import ops

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NEEDS_PRODUCTS = pytest.mark.skipif(not ops.product_isas(), reason="CPU without native products")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]

SHAPES = [(64, 64), (64, 64), (160, 64), (33, 65), (4, 40, 24)]


def lerp(start, end, share):
    """torch's, in the dtype of the operands, by an element at a time."""
    return torch.stack([torch.lerp(a, b, share) for a, b in zip(start, end, strict=True)])


@pytest.fixture
def passes(monkeypatch):
    """Has torch's operations in place of the native passes, as these are described; their calls.

    Batches go through them one by one.
    """
    calls = []

    def average_into(averages, grads, updates, share, lead):
        calls.append(("average", [each.dtype for each in updates]))
        for average, grad, update in zip(averages, grads, updates, strict=True):
            average.copy_(lerp(average, grad, share))
            update.copy_(lerp(grad, average, lead))

    def decay_and_add(weights, directions, keep, factors):
        calls.append(("move", [each.dtype for each in directions]))
        for weight, direction, factor in zip(weights, directions, factors, strict=True):
            weight.mul_(keep).add_(direction.to(weight.dtype), alpha=factor)

    for module in (arrangement, rows):
        monkeypatch.setattr(module, "takes_batches_of", lambda *_: False)
    monkeypatch.setattr(local_stages, "are_taken", lambda *_: True)
    monkeypatch.setattr(rows, "average_into", average_into)
    monkeypatch.setattr(moves, "decay_and_add", decay_and_add)
    return calls


def trained(device="cpu", dtype=torch.float32, steps=3, cls=optim.Muon, **options):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape).to(device, dtype)) for shape in SHAPES]
    optimizer = cls(params, **{"lr": 0.02} | options)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape).to(device, dtype)
        optimizer.step()
    averages = [optimizer.state[p]["momentum_buffer"] for p in params if steps]
    return [p.detach() for p in params], averages


OPTIONS = [
    {},
    {"nesterov": False},
    {"weight_decay": 0.0},
    {"cautious_decay": True},
    {"normuon": True},
    {"ns_dtype": torch.float32},
    {"adjust_lr_fn": "match_rms_adamw"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_step_by_passes_is_the_step(passes, options, monkeypatch):
    options = {"ns_dtype": torch.bfloat16} | options
    found, averages = trained(**options)
    narrow = {torch.bfloat16: torch.bfloat16}.get(options["ns_dtype"], torch.float32)
    along = torch.float32 if options.get("normuon") else narrow
    assert {(name, *dtypes) for name, dtypes in passes} >= {("average", *[narrow] * 2)}
    assert {dtype for name, dtypes in passes if name == "move" for dtype in dtypes} == {along}
    monkeypatch.undo()
    expected, expected_averages = trained(fused=False, **options)
    start, _ = trained(steps=0)
    bound = 0.05 if narrow is torch.bfloat16 else 1e-4
    if options.get("cautious_decay"):  # of an element near 0 one decays and the other does not
        bound *= 2
    for a, b, p in zip(found, expected, start, strict=True):
        assert (a - b).norm() <= bound * (b - p).norm()
    for a, b in zip(averages, expected_averages, strict=True):
        assert a.equal(b)


@pytest.mark.parametrize("cls", [optim.Muon, optim.MuSGD])
@pytest.mark.parametrize("options", [{"master_weights": True}, {"state_dtype": "int8"}], ids=str)
def test_values_of_16_bit_weights_go_through_passes(passes, options, cls, monkeypatch):
    # Moves are large beside the rounding of weights.
    options = {"use_muon": True, "ns_dtype": torch.bfloat16, "lr": 0.5} | options
    found, _ = trained(dtype=torch.bfloat16, cls=cls, **options)
    assert ("average", [torch.bfloat16] * 2) in passes
    monkeypatch.undo()
    expected, _ = trained(dtype=torch.bfloat16, cls=cls, fused=False, **options)
    start, _ = trained(dtype=torch.bfloat16, cls=cls, steps=0)
    for a, b, p in zip(found, expected, start, strict=True):
        assert (a - b).float().norm() <= 0.1 * (b - p).float().norm()


def test_passes_take_no_padded_batches(monkeypatch):
    """Zeros lie between their matrices."""
    for module in (arrangement, rows):
        monkeypatch.setattr(module, "takes_batches_of", lambda *_: False)
    monkeypatch.setattr(arrangement, "_CALLS", {"cpu": 1 << 40})
    asked = []
    monkeypatch.setattr(local_stages, "are_taken", lambda *_: asked.append(1))
    trained(steps=1)
    assert len(asked) < len(SHAPES) - 1


@pytest.fixture(params=[*ops.isas()[:-1], "base"])
def isa(request):
    ops.force_isa(request.param)
    yield
    ops.force_isa(None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("dtype", "product"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
    ids=str,
)
def test_native_passes_have_the_bits_of_torchs_operations(device, dtype, product, nesterov, isa):
    def made(seed):
        torch.manual_seed(seed)
        sizes = [0, 1, 5, 4096, 4099, 100_000] * 20  # more than one launch has room for
        return [torch.randn(size, device=device).to(dtype) for size in sizes]

    averages, grads, weights = made(1), made(2), made(3)
    lead = 0.95 if nesterov else 1.0
    expected = [each.clone() for each in averages]
    torch._foreach_lerp_(expected, grads, 0.05)
    updates = [
        torch.lerp(grad, average, lead) if nesterov else average
        for grad, average in zip(grads, expected, strict=True)
    ]
    found = [torch.empty_like(each, dtype=product) for each in updates]
    before = [each.clone() for each in averages]
    if device == "cpu":  # averages are written with the weights
        torch.ops.fusedstep.updates_into(averages, grads, found, 0.05, lead, nesterov)
        assert all(a.equal(b) for a, b in zip(averages, before, strict=True))
    else:
        torch.ops.fusedstep.average_into(averages, grads, found, 0.05, lead, nesterov)
    new_averages = expected
    for a, b in zip(found, updates, strict=True):
        assert a.equal(b.to(product))

    expected = [each.clone() for each in weights]
    keep = torch.tensor(0.998, dtype=torch.promote_types(dtype, torch.float32))
    torch._foreach_mul_(expected, keep if device == "cpu" else 0.998)
    factor, directions = -0.02, [each.to(dtype) for each in found]
    if device == "cpu" and dtype.itemsize == 2:
        # As a CPU's operations but for the last elements of a thread, whose products they round.
        factor = torch.tensor(factor, dtype=dtype).item()
        expected, directions = ([each.float() for each in x] for x in (expected, directions))
    torch._foreach_add_(expected, directions, alpha=factor)
    move, factors = torch.ops.fusedstep, [-0.02] * len(weights)
    if device == "cpu":
        move.advance_and_move(averages, grads, weights, found, 0.05, 0.998, factors)
    else:
        move.decay_and_add(weights, found, 0.998, factors)
    for a, b in zip(averages, new_averages, strict=True):
        assert a.equal(b)
    for a, b in zip(weights, expected, strict=True):
        assert a.equal(b.to(dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("adds_eps", [True, False])
@pytest.mark.parametrize(
    ("dtype", "quotient"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.float16),
        (torch.float32, torch.float16),
    ],
    ids=str,
)
def test_quotients_are_those_of_norms_in_float32(device, dtype, quotient, adds_eps, isa):
    """A NaN stays in its matrix, and zeros are divided by eps."""
    torch.manual_seed(0)
    shapes = [(3, 5, 7), (2, 40, 30), (2, 200, 301), (1, 1, 1)]
    x = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    x[0][1], x[2][0, 7, 8] = 0, float("nan")
    found = [torch.empty_like(each, dtype=quotient) for each in x]
    size = torch.ops.fusedstep.normalize_sums(x)
    sums = torch.empty(size, device=device)
    torch.ops.fusedstep.normalize_into(x, found, sums, 1e-3, adds_eps)
    for a, b in zip(x, found, strict=True):
        norms = torch.linalg.vector_norm(a.double(), dim=(1, 2), keepdim=True)
        divisors = norms + 1e-3 if adds_eps else norms.clamp(min=1e-3)
        bound = torch.finfo(quotient).eps
        torch.testing.assert_close(
            b.double(), a.double() / divisors, rtol=bound, atol=1e-7, equal_nan=True
        )
    again = [torch.empty_like(each) for each in found]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.ops.fusedstep.normalize_into(x, again, sums, 1e-3, adds_eps)
    torch.set_num_threads(threads)
    for a, b in zip(found, again, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_step_on_a_gpu_is_the_step(options, dtype):
    if options.get("normuon") and dtype is torch.bfloat16:
        pytest.skip("its states are float32, and the step takes copies")
    options = {"lr": 0.5 if dtype is torch.bfloat16 else 0.02} | options
    found, averages = trained("cuda", dtype, **options)
    expected, expected_averages = trained("cuda", dtype, fused=False, **options)
    start, _ = trained("cuda", dtype, steps=0)
    bound = 1e-4 if options.get("ns_dtype") and dtype is torch.float32 else 0.1
    for a, b, p in zip(found, expected, start, strict=True):
        assert (a - b).float().norm() <= bound * (b - p).float().norm()
    for a, b in zip(averages, expected_averages, strict=True):
        torch.testing.assert_close(a, b)


def chains(monkeypatch):
    """The shapes of weights in each list of batches that are stepped together."""
    seen, begin = [], NativeStages.begin

    def noted(self):
        seen.append([tuple(p.shape) for batch in self._native.batches for p in batch.weights])
        return begin(self)

    monkeypatch.setattr(NativeStages, "begin", noted)
    return seen


@NEEDS_PRODUCTS
@pytest.mark.parametrize("cls", [optim.Muon, optim.MuSGD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": False}, {"weight_decay": 0.3}, {"maximize": True}],
    ids=str,
)
def test_batches_of_a_cpu_are_stepped_together(cls, options, dtype, monkeypatch):
    options = {"use_muon": True, "ns_dtype": torch.bfloat16} | options
    options["lr"] = 0.5 if dtype is torch.bfloat16 else 0.02  # large beside the rounding of weights
    seen = chains(monkeypatch)
    found, averages = trained(dtype=dtype, cls=cls, **options)
    assert [sorted(shapes) for shapes in seen] == [sorted(SHAPES)] * 3
    expected, expected_averages = trained(dtype=dtype, cls=cls, fused=False, **options)
    start, _ = trained(dtype=dtype, cls=cls, steps=0)
    for a, b, p in zip(found, expected, start, strict=True):
        assert (a - b).float().norm() <= 0.1 * (b - p).float().norm()
    for a, b in zip(averages, expected_averages, strict=True):
        assert a.equal(b)


@NEEDS_PRODUCTS
def test_steps_together_do_not_depend_on_threads():
    threads = torch.get_num_threads()
    expected, _ = trained()
    torch.set_num_threads(1)
    found, _ = trained()
    torch.set_num_threads(threads)
    for a, b in zip(found, expected, strict=True):
        assert a.equal(b)


@NEEDS_PRODUCTS
def test_steps_together_are_of_what_the_engine_takes(monkeypatch):
    seen = chains(monkeypatch)
    others = [{"ns_dtype": torch.float32}, {"normuon": True}, {"cautious_decay": True}]
    for options in (*others, {"dtype": torch.float16}):
        trained(**options)
    level = ops.product_isa()
    ops.force_isa("avx512")
    trained()
    ops.force_isa(None)
    assert (seen, ops.product_isa()) == ([], level)


@NEEDS_PRODUCTS
def test_another_instruction_set_between_steps(monkeypatch):
    seen = chains(monkeypatch)
    p = torch.nn.Parameter(torch.randn(32, 32))
    optimizer = optim.Muon([p])
    for isa in (None, "avx512", None):
        ops.force_isa(isa)
        p.grad = torch.randn(32, 32)
        optimizer.step()
    assert len(seen) == 2


@NEEDS_PRODUCTS
def test_weights_of_other_layouts_are_stepped_one_by_one(monkeypatch):
    seen = chains(monkeypatch)
    torch.manual_seed(0)
    start, grad = torch.randn(24, 40), torch.randn(24, 40)
    found = []
    turned = lambda x: x.T.contiguous().T  # noqa: E731
    for weight, of_weight in (
        (start.clone(), turned(grad)),
        (start.clone(), grad),
        (turned(start), grad),
    ):
        p = torch.nn.Parameter(weight)
        p.grad = of_weight
        optim.Muon([p], lr=0.02).step()
        found.append(p.detach())
    assert len(seen) == 2
    assert found[0].equal(found[1])
    assert (found[0] - found[2]).norm() <= 0.05 * (found[0] - start).norm()


@NEEDS_PRODUCTS
def test_steps_together_count_versions():
    p = torch.nn.Parameter(torch.randn(32, 32))
    p.grad = torch.randn(32, 32)
    optimizer = optim.Muon([p])
    optimizer.step()
    average = optimizer.state[p]["momentum_buffer"]
    before = p._version, average._version
    optimizer.step()
    assert p._version > before[0]
    assert average._version > before[1]


@NEEDS_GPU
def test_operands_that_do_not_fit_are_refused():
    ones = [torch.ones(4, 6, device="cuda")]
    average = torch.ops.fusedstep.average_into
    move = torch.ops.fusedstep.decay_and_add
    with pytest.raises(RuntimeError, match="contiguous"):
        average([ones[0].T], ones, ones, 0.1, 0.9, True)
    with pytest.raises(RuntimeError, match="as many elements"):
        average(ones, [ones[0][:2]], ones, 0.1, 0.9, True)
    with pytest.raises(RuntimeError, match="no pass takes float64 with float16"):
        move([ones[0].double()], [ones[0].half()], 1.0, [1.0])
    with pytest.raises(RuntimeError, match="a factor for each"):
        move(ones, ones, 1.0, [])


def test_operands_on_a_cpu_that_do_not_fit_are_refused():
    ones = [torch.ones(4, 6)]
    wide = [ones[0].double()]
    update = torch.ops.fusedstep.updates_into
    move = torch.ops.fusedstep.advance_and_move
    with pytest.raises(RuntimeError, match="contiguous"):
        update([ones[0].T], ones, ones, 0.1, 0.9, True)
    with pytest.raises(RuntimeError, match="as many elements"):
        update(ones, [ones[0][:2]], ones, 0.1, 0.9, True)
    with pytest.raises(RuntimeError, match="no pass takes float64 with float16"):
        move(wide, wide, wide, [ones[0].half()], 0.1, 1.0, [1.0])
    with pytest.raises(RuntimeError, match="must have one dtype"):
        move(ones, wide, ones, ones, 0.1, 1.0, [1.0])
    with pytest.raises(RuntimeError, match="as many elements"):
        move(ones, ones, ones, [ones[0][:2]], 0.1, 1.0, [1.0])
    with pytest.raises(RuntimeError, match="a factor for each"):
        move(ones, ones, ones, ones, 0.1, 1.0, [])
    for numbers in ((1e300, 1.0, [1.0]), (0.1, 1e300, [1.0]), (0.1, 1.0, [-1e300])):
        with pytest.raises(RuntimeError, match="without overflow"):
            move(ones, ones, ones, ones, *numbers)
    with pytest.raises(RuntimeError, match="without overflow"):
        update(ones, ones, ones, 0.1, 1e300, True)
