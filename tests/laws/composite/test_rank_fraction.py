"""Dion2: a step of Muon that orthogonalizes the rows or columns with the largest norms alone."""

import copy
import functools
import io
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusedstep import optim
from fusedstep._matrix import arrangement
from fusedstep._matrix.chosen import Chosen, largest, norms_of
from fusedstep._matrix.local_stages import LocalStages
from fusedstep._matrix.native_batches import ChosenStages
from fusedstep._matrix.newton_schulz import has_engine
from fusedstep._native import ops
from reference.dion2 import dion2
from reference.orthogonal import iterated
from support.matrices import assert_moved_alike, error, largest_allocation, parameters, step
from support.stepping import WAYS

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NEEDS_ENGINE = pytest.mark.skipif(
    not (torch.cuda.is_available() and has_engine(torch.device("cuda"))),
    reason="needs a GPU with native products",
)
NEEDS_PRODUCTS = pytest.mark.skipif(not ops.product_isas(), reason="CPU without native products")
DEVICES = ("cpu", pytest.param("cuda", marks=NEEDS_GPU))
FUSED = pytest.mark.parametrize("fused", [None, False], ids=["together", "one by one"])

#: Wide, tall and square, a convolution, and a stack; each with its matrices.
SHAPES = {
    (10, 24): lambda w: [w],
    (24, 10): lambda w: [w],
    (12, 12): lambda w: [w],
    (8, 3, 2, 2): lambda w: [w.view(8, 12)],
    (3, 8, 12): list,
}


def trained(shapes=SHAPES, dtype=torch.float32, steps=4, device="cpu", **options):
    params = [torch.nn.Parameter(p.detach().to(device)) for p in parameters(shapes, dtype)]
    options = {"lr": 0.02, "rank_fraction": 0.25, "ns_dtype": torch.float32} | options
    optimizer = optim.Muon(params, **options)
    for number in range(steps):
        generator = torch.Generator().manual_seed(100 + number)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(device, dtype)
        optimizer.step()
    return params, optimizer


def by_reference(shapes=SHAPES, steps=4, sign=1, **options):
    """Weights and averages after steps in float64."""
    weights = [p.detach().double() for p in parameters(shapes)]
    averages = list(map(torch.zeros_like, weights))
    states = [[{} for _ in blocks(w)] for w, blocks in zip(weights, shapes.values(), strict=True)]
    options = {"lr": 0.02, "fraction": 0.25} | options
    for number in range(steps):
        generator = torch.Generator().manual_seed(100 + number)
        for i, (weight, blocks) in enumerate(zip(weights, shapes.values(), strict=True)):
            grad = sign * torch.randn(weight.shape, generator=generator).double()
            for j, parts in enumerate(zip(*map(blocks, (weight, grad, averages[i])), strict=True)):
                block, g, average = parts
                new, states[i][j] = dion2(block, g, states[i][j], **options)
                block.copy_(new)
                average.copy_(states[i][j]["momentum_buffer"])
    return weights, averages


@FUSED
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({}, {}),
        ({"rank_fraction": 0.5, "momentum": 0.6}, {"fraction": 0.5, "momentum": 0.6}),
        ({"rank_fraction": 1}, {"fraction": 1}),
        ({"rank_fraction": 1e-9}, {"fraction": 1e-9}),
        ({"nesterov": False, "weight_decay": 0.0}, {"weight_decay": 0.0}),
        ({"adjust_lr_fn": "match_rms_adamw"}, {"adjust": "rms"}),
        ({"adjust_lr_fn": "spectral_unclamped"}, {"adjust": "spectral"}),
        ({"cautious_decay": True, "weight_decay": 5.0}, {"cautious": True, "weight_decay": 5.0}),
        ({"maximize": True}, {"sign": -1}),
        ({"normuon": True}, {"beta2": 0.95}),
        ({"normuon": True, "beta2": 0.6, "rank_fraction": 0.5}, {"beta2": 0.6, "fraction": 0.5}),
        ({"ns_start": "aol"}, {"iterate": functools.partial(iterated, start="aol")}),
    ],
    ids=lambda options: ", ".join(map(str, options)) or "defaults",
)
def test_steps_as_the_reference(options, reference, device, fused):
    found, optimizer = trained(device=device, fused=fused, **options)
    expected, averages = by_reference(**reference)
    assert_moved_alike([p.cpu() for p in found], expected, parameters(SHAPES), 1e-4)
    for p, average in zip(found, averages, strict=True):
        state = optimizer.state[p]["momentum_buffer"].cpu().double()
        torch.testing.assert_close(state, average, rtol=1e-5, atol=1e-5)


@FUSED
@pytest.mark.parametrize(
    ("shape", "option", "blocks"),
    [
        ((24, 8), {"split_heads": 3}, lambda w: w.split(8)),
        ((24, 20), {"split_sizes": (12, 8, 4)}, lambda w: w.split((12, 8, 4))),
        (
            (2, 12, 8),
            {"split_sizes": (8, 2, 2)},
            lambda w: [block for each in w for block in each.split((8, 2, 2))],
        ),
        ((1, 12, 8), {"split_sizes": (8, 2, 2)}, lambda w: w[0].split((8, 2, 2))),
        ((3, 8, 12), {"stacked": False}, lambda w: [w.view(3, 96)]),
    ],
    ids=["heads", "sizes", "sizes of a stack", "sizes of a stack of one", "flattened"],
)
@pytest.mark.parametrize("normuon", [False, True])
def test_rows_are_those_of_each_matrix(shape, option, blocks, normuon, fused):
    shapes = {shape: blocks}
    found, _ = trained(shapes, fused=fused, normuon=normuon, **option)
    expected, _ = by_reference(shapes, beta2=0.95 if normuon else None)
    assert_moved_alike(found, expected, parameters(shapes), 1e-4)


def test_products_in_double_are_exact():
    found, _ = trained(dtype=torch.float64, ns_dtype=torch.float64)
    assert_moved_alike(found, by_reference()[0], parameters(SHAPES), 1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("products", [torch.bfloat16, torch.float16, None], ids=str)
def test_products_of_16_bits_are_within_their_errors(dtype, products, device):
    """As ``fused=False`` steps them: large moves beside the rounding of weights."""
    options = {"dtype": dtype, "ns_dtype": products, "lr": 0.5, "device": device}
    found, _ = trained(**options)
    expected, _ = trained(fused=False, **options)
    start = [p.to(device) for p in parameters(SHAPES, dtype)]
    assert_moved_alike(found, expected, start, 0.1)


@pytest.mark.parametrize("most", [1 << 20, 400, 1])
@pytest.mark.parametrize("options", [{}, {"ns_dtype": torch.bfloat16}, {"normuon": True}], ids=str)
def test_weights_of_all_shapes_in_one_batch_step_as_in_several(options, most, monkeypatch):
    """As a GPU takes these, where torch's operations choose."""
    monkeypatch.setattr(arrangement, "takes_batches_of_group", lambda *_: False)
    expected, _ = trained(**options)
    seen, begin = [], LocalStages.begin

    def noted(self):
        seen.append(self._batch.matrices)
        return begin(self)

    monkeypatch.setattr(LocalStages, "begin", noted)
    monkeypatch.setattr(arrangement, "_takes_all_shapes", lambda *_: True)
    monkeypatch.setattr(arrangement, "_most_together", lambda _: most)
    found, _ = trained(**options)
    # Of the convolution and of the stack matrices have one shape.
    all_shapes = [(1, 10, 24), (1, 24, 10), (1, 12, 12), (4, 8, 12)]
    if most == 1 << 20:
        assert seen == [all_shapes] * 4
    for p, q in zip(found, expected, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@FUSED
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(8, 12), (12, 8)], ids=["rows", "columns"])
def test_of_equal_norms_the_first_are_chosen(shape, device, fused):
    weight = torch.nn.Parameter(torch.zeros(shape, device=device))
    optimizer = optim.Muon([weight], rank_fraction=0.25, weight_decay=0.0, fused=fused)
    grad = torch.eye(12)[:8]  # all rows have a norm of 1
    weight.grad = (grad if shape == (8, 12) else grad.T.contiguous()).to(device)
    chosen = []
    for _ in range(3):
        before = weight.detach().clone()
        optimizer.step()
        moved = (weight - before).abs().sum(int(shape == (8, 12)))
        chosen.append(moved.nonzero().flatten().tolist())
    # The averages of rows that have been chosen are behind by the decay.
    assert chosen == [[0, 1], [2, 3], [4, 5]]


@FUSED
def test_other_rows_decay_and_gather_gradients(fused):
    weight = torch.nn.Parameter(torch.ones(8, 12))
    options = {"lr": 0.5, "weight_decay": 0.5, "momentum": 0.75, "rank_fraction": 0.25}
    optimizer = optim.Muon([weight], fused=fused, **options)
    weight.grad = torch.ones(8, 12)
    weight.grad[[2, 5]] = 3.0
    optimizer.step()
    others = [0, 1, 3, 4, 6, 7]
    assert (weight[others] == 0.75).all()
    assert (weight[[2, 5]] != 0.75).all()
    average = optimizer.state[weight]["momentum_buffer"]
    assert (average[others] == 1).all()
    assert (average[[2, 5]] == 2.25).all()


@FUSED
def test_what_is_not_a_number_stays_in_its_matrix(fused):
    params, optimizer = trained({(8, 12): list}, fused=fused, steps=1)
    params.append(torch.nn.Parameter(torch.ones(8, 12)))
    optimizer = optim.Muon(params, rank_fraction=0.25, fused=fused)
    for p in params:
        p.grad = torch.ones_like(p)
    params[0].grad[3, 4] = torch.nan
    optimizer.step()
    assert params[0][3].isnan().all()
    assert not params[1].isnan().any()


@FUSED
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_values_of_bfloat16_weights_are_kept(options, fused):
    """As float32 weights step, from the same values and gradients."""
    shapes = {(12, 20): list, (20, 12): list}
    start = [p.detach().sign() for p in parameters(shapes)]
    moved = {}
    for dtype in (torch.bfloat16, torch.float32):
        params = [torch.nn.Parameter(p.to(dtype, copy=True)) for p in start]
        own = options if dtype is torch.bfloat16 else {}
        usual = {"lr": 2e-3, "ns_dtype": torch.float32, "weight_decay": 0.0}
        optimizer = optim.Muon(params, rank_fraction=0.5, fused=fused, **usual, **own)
        for _ in range(100):
            for p in params:
                p.grad = torch.ones_like(p).tril_()
            optimizer.step()
        moved[dtype] = [p.detach().float() for p in params]
    bound = 0.4 if "seed" in options else 0.1
    assert_moved_alike(moved[torch.bfloat16], moved[torch.float32], start, bound)


def chains(monkeypatch):
    """The shapes of weights of which native passes choose rows, at each call."""
    seen, begin = [], ChosenStages.begin

    def noted(self):
        seen.append([tuple(p.shape) for batch in self._native.batches for p in batch.weights])
        return begin(self)

    monkeypatch.setattr(ChosenStages, "begin", noted)
    return seen


#: What the native engine of a GPU takes a quarter of: wide, tall and square, with norms of several
#: segments, and weights that have several matrices.
NATIVE = dict.fromkeys(
    [(8, 32), (32, 32), (64, 32), (8, 4104), (304, 32), (8, 4, 2, 2), (3, 16, 24), (1, 8)], list
)
#: That of a CPU takes all others, too.
ON_CPU = NATIVE | dict.fromkeys(
    [(7, 5), (5, 7), (1, 1), (33, 2050), (2050, 33), (1, 9), (9, 1), (3, 12, 7)], list
)
#: Devices with native products of chosen rows, the dtype of products, and shapes.
ENGINES = pytest.mark.parametrize(
    ("device", "products", "shapes"),
    [
        pytest.param("cpu", torch.bfloat16, ON_CPU, marks=NEEDS_PRODUCTS, id="cpu"),
        pytest.param("cuda", None, NATIVE, marks=NEEDS_ENGINE, id="cuda"),
    ],
)


@pytest.fixture
def by_torch(monkeypatch):
    """Steps as ``trained``, with torch's operations for the choice and around the products."""

    def run(*args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(arrangement, "takes_batches_of_group", lambda *_: False)
            return trained(*args, **options)

    return run


@ENGINES
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"maximize": True},
        {"rank_fraction": 1e-9},
        {"rank_fraction": 1},
        {"momentum": 0.5},
        {"weight_decay": 0.0},
        {"weight_decay": 3.0},
        {"adjust_lr_fn": "match_rms_adamw", "ns_coefficients": "polar_express"},
        {"ns_start": "aol", "ns_steps": 4},
    ],
    ids=str,
)
def test_native_passes_have_the_bits_of_torchs_operations(
    device, products, shapes, options, monkeypatch, by_torch
):
    if device == "cuda" and options.get("rank_fraction") == 1e-9:
        shapes = {shape: list for shape in shapes if shape[0] == 8}  # one column is no word
    options = {"ns_dtype": products, "device": device} | options
    seen = chains(monkeypatch)
    found, first = trained(shapes, **options)
    assert [set(each) for each in seen] == [set(shapes)] * 4
    expected, second = by_torch(shapes, **options)
    assert len(seen) == 4
    for p, q in zip(found, expected, strict=True):
        average, other = (x.state[w]["momentum_buffer"] for x, w in ((first, p), (second, q)))
        assert average.equal(other)
        assert p.equal(q)


@ENGINES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("asked", [torch.bfloat16, torch.float16, None], ids=str)
def test_native_passes_step_16_bit_weights(
    device, products, shapes, dtype, asked, monkeypatch, by_torch
):
    """A CPU's operations round products of the last elements of a thread, and passes do not."""
    pair = dtype, asked or products
    kind = {"ns_dtype": pair[1], "device": device, "dtype": dtype, "lr": 0.5}
    seen = chains(monkeypatch)
    found, first = trained(shapes, **kind)
    if device == "cpu":
        assert bool(seen) == (pair == (torch.bfloat16, torch.bfloat16))
    else:
        assert bool(seen) == (pair != (torch.float16, torch.bfloat16))
    expected, second = by_torch(shapes, **kind)
    start = [p.to(device) for p in parameters(shapes, dtype)]
    for p, q, before in zip(found, expected, start, strict=True):
        average, other = (x.state[w]["momentum_buffer"] for x, w in ((first, p), (second, q)))
        assert average.equal(other)
        assert p.equal(q) or (device == "cpu" and error(p - before, q - before) < 0.02)


@ENGINES
@pytest.mark.parametrize(
    ("shape", "option"),
    [((24, 16), {"split_heads": 3}), ((48, 16), {"split_sizes": (16, 16, 8, 8)})],
    ids=["heads", "sizes"],
)
def test_native_passes_choose_rows_of_each_part(
    device, products, shapes, shape, option, monkeypatch, by_torch
):
    options = {"ns_dtype": products, "device": device, "rank_fraction": 0.5} | option
    seen = chains(monkeypatch)
    found, _ = trained({shape: list}, **options)
    assert seen == [[shape]] * 4
    expected, _ = by_torch({shape: list}, **options)
    assert all(map(torch.equal, found, expected))


@ENGINES
@pytest.mark.parametrize("shape", [(32, 64), (64, 32)], ids=["rows", "columns"])
@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_native_passes_choose_what_is_not_a_number(
    device, products, shapes, shape, special, monkeypatch
):
    """As the largest norm, and of equal norms the first."""
    found = []
    for is_native in (True, False):
        if not is_native:
            monkeypatch.setattr(arrangement, "takes_batches_of_group", lambda *_: False)
        params = [torch.nn.Parameter(torch.ones(shape, device=device)) for _ in "ab"]
        optimizer = optim.Muon(params, rank_fraction=0.25, ns_dtype=products)
        for p in params:
            p.grad = torch.ones_like(p)
        params[0].grad[5, 7] = special
        params[0].grad[9, 4] = special
        optimizer.step()
        assert params[0].isnan().any()
        assert not params[1].isnan().any()
        found.append([*params, *(optimizer.state[p]["momentum_buffer"] for p in params)])
    for each, expected in zip(*found, strict=True):
        torch.testing.assert_close(each, expected, rtol=0, atol=0, equal_nan=True)


@ENGINES
def test_native_passes_are_of_what_they_take(device, products, shapes, monkeypatch):
    seen = chains(monkeypatch)
    kind = {"ns_dtype": products, "device": device}
    for options in ({"normuon": True}, {"cautious_decay": True}, {"ns_dtype": torch.float32}):
        trained({(8, 32): list}, **kind | options)
    trained({(8, 32): list}, dtype=torch.float64, **kind)
    trained({(64, 80): list}, state_dtype="int8", **kind)
    if device == "cuda":
        trained({(8, 30): list, (8, 32): list}, **kind)
        trained({(64, 20): list}, **kind)  # of 5 columns
    assert seen == []
    trained({(64, 32): list, (0, 8): list}, **kind)
    assert seen == [[(64, 32)]] * 4


@ENGINES
def test_a_fraction_may_change_between_native_steps(device, products, shapes, monkeypatch):
    seen = chains(monkeypatch)
    params, optimizer = trained({(64, 32): list}, ns_dtype=products, device=device, steps=1)
    for fraction, is_native in ((0.5, True), (0.1, device == "cpu"), (None, False), (0.25, True)):
        optimizer.param_groups[0]["rank_fraction"] = fraction
        twin = copy.deepcopy(optimizer)
        (other,) = twin.param_groups[0]["params"]
        other.grad = params[0].grad
        seen.clear()
        for each in (optimizer, twin):
            each.step()
        assert len(seen) == 2 * is_native
        assert params[0].equal(other)


@ENGINES
def test_gradients_of_other_layouts(device, products, shapes, monkeypatch):
    """A CPU's passes take copies, torch's operations step a GPU's: the bits are the same."""
    seen, found = chains(monkeypatch), []
    grad = torch.randn(32, 64, device=device)
    for each in (grad, grad.T.contiguous().T):
        p = torch.nn.Parameter(torch.ones(32, 64, device=device))
        p.grad = each
        optim.Muon([p], rank_fraction=0.25, ns_dtype=products).step()
        found.append(p.detach())
    assert len(seen) == (2 if device == "cpu" else 1)
    assert found[0].equal(found[1])


@ENGINES
def test_native_steps_repeat_their_bits_and_count_versions(device, products, shapes, monkeypatch):
    seen, threads = chains(monkeypatch), torch.get_num_threads()
    first, optimizer = trained(shapes, ns_dtype=products, device=device)
    torch.set_num_threads(1)
    second, _ = trained(shapes, ns_dtype=products, device=device)
    torch.set_num_threads(threads)
    assert len(seen) == 8
    assert all(map(torch.equal, first, second))
    average = optimizer.state[first[0]]["momentum_buffer"]
    before = first[0]._version, average._version
    optimizer.step()
    assert first[0]._version > before[0]
    assert average._version > before[1]


class Through(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@NEEDS_ENGINE
def test_torchs_operations_step_a_gpu_under_a_dispatch_mode_alone(monkeypatch):
    seen = chains(monkeypatch)
    _, optimizer = trained(NATIVE, ns_dtype=None, device="cuda", steps=1)
    with Through():
        optimizer.step()
    optimizer.step()
    assert len(seen) == 2


@NEEDS_ENGINE
def test_a_native_step_waits_for_nothing_and_allocates_nothing():
    _, optimizer = trained(NATIVE, ns_dtype=None, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        optimizer.step()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    finally:
        torch.cuda.set_sync_debug_mode("default")


@ENGINES
@pytest.mark.parametrize("begin", [4, 7, 8])
def test_weights_of_one_memory_are_stepped_natively_where_they_share_none(
    device, products, shapes, begin, monkeypatch
):
    seen = chains(monkeypatch)
    whole = torch.ones(16, 32, device=device)
    params = [torch.nn.Parameter(each) for each in (whole[begin : begin + 8], whole[:8])]
    optimizer = optim.Muon(params, rank_fraction=0.25, ns_dtype=products)
    for p in params:
        p.grad = torch.ones_like(p)
    if begin == 8:
        optimizer.step()
        assert seen
    else:
        with pytest.raises(RuntimeError, match="the weight shares memory with another weight"):
            optimizer.step()
        assert not seen
        assert whole.eq(1).all()


@ENGINES
@pytest.mark.parametrize("begin", [0, 4, 7, 8])
def test_states_that_share_memory_are_stepped_by_torch(
    device, products, shapes, begin, monkeypatch
):
    params = [torch.nn.Parameter(torch.ones(8, 32, device=device)) for _ in range(2)]
    optimizer = optim.Muon(params, rank_fraction=0.25, ns_dtype=products)
    whole = torch.ones(16, 32, device=device)
    for p, buffer in zip(params, (whole[begin : begin + 8], whole[:8]), strict=True):
        optimizer.state[p]["momentum_buffer"] = buffer
        p.grad = torch.ones_like(p)
    seen = chains(monkeypatch)
    optimizer.step()
    assert bool(seen) == (begin == 8)


@pytest.fixture(params=[*ops.isas()[:-1], "base"])
def isa(request):
    ops.force_isa(request.param)
    yield
    ops.force_isa(None)


@pytest.mark.parametrize("maximizes", [False, True])
@pytest.mark.parametrize(
    ("dtype", "product"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ],
    ids=str,
)
def test_passes_of_a_cpu_are_their_formulas(dtype, product, maximizes, isa):
    """On every instruction set: norms with ties, sides of 1, and longer than a tile."""
    forms = [(1, 1, 1, 1, 1), (3, 8, 12, 3, 1), (2, 12, 8, 3, 0), (1, 5, 4099, 2, 1)]
    forms += [(1, 300, 7, 4, 0), (2, 9, 130, 9, 1), (1, 3, 20_000, 5_000, 0), (1, 200, 1030, 40, 0)]

    def made(seed, shapes, kind):
        torch.manual_seed(seed)
        return [torch.randint(-8, 9, shape).to(kind) / 8 for shape in shapes]

    shapes = [form[:3] for form in forms]
    taken = [(n, k, c) if of_rows else (n, r, k) for n, r, c, k, of_rows in forms]
    averages, grads, weights = (made(seed, shapes, dtype) for seed in (1, 2, 3))
    before = [[x.clone() for x in each] for each in (averages, weights)]
    numbers = [number for form in forms for number in form]
    memory = torch.empty(torch.ops.fusedstep.choice_memory(numbers), dtype=torch.float64)
    sizes = [math.prod(shape) for shape in taken]
    updates = torch.empty(sum(sizes), dtype=product)
    passes = torch.ops.fusedstep
    passes.chosen_updates_into(averages, grads, updates, memory, numbers, maximizes)
    assert all(map(torch.equal, averages, before[0]))
    directions = made(4, taken, product)
    options = 0.75, maximizes, 0.5, [-0.25] * len(forms)
    operands = averages, grads, weights, directions, memory, numbers
    passes.advance_and_move_chosen(*operands, *options)
    found = updates.split(sizes)
    for i, (*_, of_rows) in enumerate(forms):
        x = before[0][i] + (-grads[i] if maximizes else grads[i])
        count = {"rank_fraction": (forms[i][3] - 0.5) / x.shape[1 if of_rows else 2]}
        chosen = Chosen.of(largest(count, norms_of(x, bool(of_rows))), bool(of_rows))
        own = chosen.take(x)
        assert found[i].equal(own.to(product).flatten())
        assert averages[i].equal(chosen.put(x, own * 0.75))
        kept = before[1][i] * 0.5
        moves = chosen.put(torch.zeros_like(x), directions[i].to(dtype))
        assert weights[i].equal((kept.double() - 0.25 * moves.double()).to(dtype))


@pytest.mark.parametrize("count", [1, 2, 7, 30, 31])
def test_of_equal_norms_and_what_is_not_a_number_a_cpu_chooses_the_first(count):
    grads = torch.ones(1, 31, 4)
    grads[0, :, 0] = torch.arange(31) % 3
    grads[0, 5::10, 1], grads[0, 9, 2] = torch.nan, torch.inf
    sums, forms = [torch.zeros_like(grads)], [1, 31, 4, count, 1]
    memory = torch.empty(torch.ops.fusedstep.choice_memory(forms), dtype=torch.float64)
    updates = torch.empty(4 * count)
    torch.ops.fusedstep.chosen_updates_into(sums, [grads], updates, memory, forms, False)
    places = largest({"rank_fraction": (count - 0.5) / 31}, norms_of(grads, True))
    expected = Chosen.of(places, True).take(grads)
    torch.testing.assert_close(updates.view(1, count, 4), expected, rtol=0, atol=0, equal_nan=True)


@NEEDS_GPU
def test_operands_that_do_not_fit_are_refused():
    x, narrow = torch.ones(8, 16, device="cuda"), torch.ones(2, 16, device="cuda").half()
    forms = [1, 8, 16, 2, 1]
    size = torch.ops.fusedstep.choice_memory(forms)
    memory = torch.empty(size, dtype=torch.float64, device="cuda")
    choose, move = torch.ops.fusedstep.choose_into, torch.ops.fusedstep.move_chosen
    choose([x], [x.clone()], narrow, memory, forms, 0.9, False)
    with pytest.raises(RuntimeError, match="contiguous"):
        choose([x.T], [x], narrow, memory, forms, 0.9, False)
    with pytest.raises(RuntimeError, match="contiguous"):
        choose([x], [x], narrow.T, memory, forms, 0.9, False)
    with pytest.raises(RuntimeError, match="as many elements"):
        choose([x], [x[:2]], narrow, memory, forms, 0.9, False)
    with pytest.raises(RuntimeError, match="the elements that forms say"):
        choose([x], [x], narrow[:1], memory, forms, 0.9, False)
    with pytest.raises(RuntimeError, match="must have one dtype"):
        choose([x], [x.half()], narrow, memory, forms, 0.9, False)
    with pytest.raises(RuntimeError, match="as much as choice_memory says"):
        choose([x], [x], narrow, memory[1:], forms, 0.9, False)
    with pytest.raises(RuntimeError, match="no pass takes float64"):
        choose([x.double()], [x.double()], narrow, memory, forms, 0.9, False)
    with pytest.raises(RuntimeError, match="a factor for each"):
        move([x], [narrow], memory, forms, 1.0, [])
    with pytest.raises(RuntimeError, match="the elements that forms say"):
        move([x], [x], memory, forms, 1.0, [1.0])


@pytest.mark.parametrize(
    "forms", [[1, 2, 3], [0, 8, 8, 1, 1], [1, 8, 9, 9, 1], [1, 9, 8, 9, 0], [1, 8, 1 << 31, 1, 1]]
)
def test_forms_that_are_none_are_refused(forms):
    with pytest.raises(RuntimeError, match="forms must be"):
        torch.ops.fusedstep.choice_memory(forms)


def test_states_in_codes():
    shapes = {(64, 80): list}
    found, optimizer = trained(shapes, state_dtype="int8")
    assert optimizer.state[found[0]]["momentum_buffer"].dtype is torch.uint8
    start = parameters(shapes)[0]
    assert ((found[0] - start * (1 - 0.002) ** 4).abs().sum(1) > 1e-3).sum() >= 16


@FUSED
@pytest.mark.parametrize("normuon", [False, True])
def test_a_run_goes_on_from_its_dictionary(normuon, fused):
    options = {"normuon": normuon, "fused": fused}
    expected, _ = trained(**options)
    params, first = trained(steps=2, **options)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    optimizer = optim.Muon(params, fused=fused)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    assert optimizer.param_groups[0]["rank_fraction"] == 0.25
    for number in (2, 3):
        step(optimizer, params, number)
    assert all(map(torch.equal, params, expected))


def test_a_fraction_of_a_group_may_change():
    """Each step is that of an optimizer that has kept nothing."""
    params, optimizer = trained()
    for number, fraction in enumerate((0.5, None, 0.25)):
        optimizer.param_groups[0]["rank_fraction"] = fraction
        twin = copy.deepcopy(optimizer)
        step(optimizer, params, number)
        step(twin, twin.param_groups[0]["params"], number)
        assert all(map(torch.equal, params, twin.param_groups[0]["params"]))


def test_a_step_allocates_no_more_than_one_matrix_in_double():
    params, optimizer = trained({(96, 32): list} | {(96, 32 + i): list for i in range(8)})
    assert largest_allocation(optimizer.step) <= 96 * 40 * 8
    del params


@pytest.mark.parametrize("value", [0, -0.5, 1.5, float("nan")])
def test_fractions_out_of_range(value):
    with pytest.raises(ValueError, match="Invalid rank_fraction value"):
        optim.Muon(parameters(SHAPES), rank_fraction=value)
    params, optimizer = trained(steps=1)
    before = [p.detach().clone() for p in params]
    optimizer.param_groups[0]["rank_fraction"] = value
    with pytest.raises(ValueError, match="rank_fraction"):
        optimizer.step()
    assert all(map(torch.equal, params, before))


def test_a_fraction_that_is_no_number():
    with pytest.raises(TypeError, match="rank_fraction must be a number, not 'all'"):
        optim.Muon(parameters(SHAPES), rank_fraction="all")
