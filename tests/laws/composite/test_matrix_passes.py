"""The passes of Muon's step around its products: one native pass each on a GPU."""

import pytest
import torch

from fusedstep import optim
from fusedstep._matrix import batches

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPES = [(64, 64), (64, 64), (160, 64), (33, 65), (4, 40, 24)]


def lerp(start, end, share):
    """torch's, in the dtype of the operands, by an element at a time."""
    return torch.stack([torch.lerp(a, b, share) for a, b in zip(start, end, strict=True)])


@pytest.fixture
def passes(monkeypatch):
    """Has torch's operations in place of the native passes, as these are described; their calls."""
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

    monkeypatch.setattr(batches, "are_taken", lambda *_: True)
    monkeypatch.setattr(batches, "average_into", average_into)
    monkeypatch.setattr(batches, "decay_and_add", decay_and_add)
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
    monkeypatch.setattr(batches, "_CALLS", {"cpu": 1 << 40})
    asked = []
    monkeypatch.setattr(batches, "are_taken", lambda *_: asked.append(1))
    trained(steps=1)
    assert len(asked) < len(SHAPES) - 1


@NEEDS_GPU
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
def test_native_passes_have_the_bits_of_torchs_operations(dtype, product, nesterov):
    def made(seed):
        torch.manual_seed(seed)
        sizes = [0, 1, 5, 4096, 4099, 100_000] * 20  # more than one launch has room for
        return [torch.randn(size, device="cuda").to(dtype) for size in sizes]

    averages, grads, weights = made(1), made(2), made(3)
    lead = 0.95 if nesterov else 1.0
    expected = [each.clone() for each in averages]
    torch._foreach_lerp_(expected, grads, 0.05)
    updates = [
        torch.lerp(grad, average, lead) if nesterov else average
        for grad, average in zip(grads, expected, strict=True)
    ]
    found = [torch.empty_like(each, dtype=product) for each in updates]
    torch.ops.fusedstep.average_into(averages, grads, found, 0.05, lead, nesterov)
    for a, b in zip(averages, expected, strict=True):
        assert a.equal(b)
    for a, b in zip(found, updates, strict=True):
        assert a.equal(b.to(product))

    expected = [each.clone() for each in weights]
    torch._foreach_mul_(expected, 0.998)
    torch._foreach_add_(expected, [each.to(dtype) for each in found], alpha=-0.02)
    torch.ops.fusedstep.decay_and_add(weights, found, 0.998, [-0.02] * len(weights))
    for a, b in zip(weights, expected, strict=True):
        assert a.equal(b)


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
