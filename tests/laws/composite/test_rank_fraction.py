"""Dion2: a step of Muon that orthogonalizes the rows or columns with the largest norms alone."""

import copy
import io

import pytest
import torch

from fusedstep import optim
from fusedstep._matrix import batches
from fusedstep._matrix.newton_schulz import has_engine
from reference.dion2 import dion2
from support.matrices import assert_moved_alike, largest_allocation, parameters, step
from support.stepping import WAYS

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NEEDS_ENGINE = pytest.mark.skipif(
    not (torch.cuda.is_available() and has_engine(torch.device("cuda"))),
    reason="needs a GPU with native products",
)
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
    """As a GPU takes these."""
    expected, _ = trained(**options)
    seen, step = [], batches.MatrixBatches._step_batch

    def noted(self, group, batch, grads):
        seen.append([share.shape for share in batch.shares])
        step(self, group, batch, grads)

    monkeypatch.setattr(batches.MatrixBatches, "_step_batch", noted)
    monkeypatch.setattr(batches, "_takes_all_shapes", lambda *_: True)
    monkeypatch.setattr(batches, "_most_together", lambda _: most)
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
    seen, step = [], batches.MatrixBatches._step_chosen

    def noted(self, group, some, *rest):
        seen.append([tuple(p.shape) for batch in some for p in batch.weights])
        step(self, group, some, *rest)

    monkeypatch.setattr(batches.MatrixBatches, "_step_chosen", noted)
    return seen


#: What the native engine of a GPU takes a quarter of: wide, tall and square, with channels of
#: several segments of a norm, and of weights that have several matrices.
NATIVE = dict.fromkeys(
    [(8, 32), (32, 32), (64, 32), (8, 4104), (304, 32), (8, 4, 2, 2), (3, 16, 24), (1, 8)], list
)

#: An option that no native pass of chosen rows has, and that changes nothing without decay.
BY_TORCH = {"cautious_decay": True, "weight_decay": 0.0}


@NEEDS_ENGINE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"maximize": True},
        {"rank_fraction": 1e-9},
        {"rank_fraction": 1},
        {"momentum": 0.5},
        {"ns_dtype": torch.bfloat16},
        {"ns_dtype": torch.float16},
        {"adjust_lr_fn": "match_rms_adamw", "ns_coefficients": "polar_express"},
    ],
    ids=str,
)
def test_native_passes_have_the_bits_of_torchs_operations(options, dtype, monkeypatch):
    if dtype is torch.float16 and options.get("ns_dtype") is torch.bfloat16:
        pytest.skip("the engine has no such products")
    # A single row is no multiple of 8 columns, nor are the columns of a tall matrix.
    shapes = {
        shape: list for shape in NATIVE if options.get("rank_fraction") != 1e-9 or shape[0] == 8
    }
    options = {"ns_dtype": None, "weight_decay": 0.0, "device": "cuda", "dtype": dtype} | options
    seen = chains(monkeypatch)
    found, first = trained(shapes, **options)
    assert [set(each) for each in seen] == [set(shapes)] * 4
    expected, second = trained(shapes, **options | BY_TORCH)
    assert len(seen) == 4
    for p, q in zip(found, expected, strict=True):
        average, other = (x.state[w]["momentum_buffer"] for x, w in ((first, p), (second, q)))
        assert average.equal(other)
        assert p.equal(q)


@NEEDS_ENGINE
@pytest.mark.parametrize("decay", [0.1, 3.0])
def test_native_passes_decay_as_torchs_operations(decay, monkeypatch):
    options = {"ns_dtype": None, "weight_decay": decay, "device": "cuda"}
    seen = chains(monkeypatch)
    found, _ = trained(NATIVE, **options)
    assert len(seen) == 4
    monkeypatch.setattr(batches, "_takes_batches_of", lambda *_: False)
    expected, _ = trained(NATIVE, **options)
    assert len(seen) == 4
    assert all(map(torch.equal, found, expected))


@NEEDS_ENGINE
@pytest.mark.parametrize(
    ("shape", "option"),
    [((24, 16), {"split_heads": 3}), ((48, 16), {"split_sizes": (16, 16, 8, 8)})],
    ids=["heads", "sizes"],
)
def test_native_passes_choose_rows_of_each_part(shape, option, monkeypatch):
    options = {"ns_dtype": None, "device": "cuda", "rank_fraction": 0.5} | option
    seen = chains(monkeypatch)
    found, _ = trained({shape: list}, **options)
    assert seen == [[shape]] * 4
    monkeypatch.setattr(batches, "_takes_batches_of", lambda *_: False)
    expected, _ = trained({shape: list}, **options)
    assert all(map(torch.equal, found, expected))


@NEEDS_ENGINE
@pytest.mark.parametrize("shape", [(32, 64), (64, 32)], ids=["rows", "columns"])
@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_native_passes_choose_what_is_not_a_number(shape, special, monkeypatch):
    """As the largest norm, and of equal norms the first."""
    weights = {}
    for is_native in (True, False):
        if not is_native:
            monkeypatch.setattr(batches, "_takes_batches_of", lambda *_: False)
        weights[is_native] = [torch.nn.Parameter(torch.ones(shape, device="cuda")) for _ in "ab"]
        optimizer = optim.Muon(weights[is_native], rank_fraction=0.25)
        for p in weights[is_native]:
            p.grad = torch.ones_like(p)
        weights[is_native][0].grad[5, 7] = special
        weights[is_native][0].grad[9, 4] = special
        optimizer.step()
        averages = [optimizer.state[p]["momentum_buffer"] for p in weights[is_native]]
        weights[is_native] += averages
        assert weights[is_native][0].isnan().any()
        assert not weights[is_native][1].isnan().any()
    for found, expected in zip(weights[True], weights[False], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@NEEDS_ENGINE
def test_native_passes_are_of_what_they_take(monkeypatch):
    seen = chains(monkeypatch)
    for options in ({"normuon": True}, {"cautious_decay": True}, {"ns_dtype": torch.float32}):
        trained({(8, 32): list}, device="cuda", **{"ns_dtype": None} | options)
    trained({(8, 32): list}, device="cuda", ns_dtype=None, dtype=torch.float64)
    trained({(8, 30): list, (8, 32): list}, device="cuda", ns_dtype=None)
    trained({(64, 20): list}, device="cuda", ns_dtype=None)  # of 5 columns
    assert seen == []
    trained({(64, 32): list, (0, 8): list}, device="cuda", ns_dtype=None)
    assert seen == [[(64, 32)]] * 4
    params, optimizer = trained({(64, 32): list}, device="cuda", ns_dtype=None, steps=1)
    for fraction, count in ((0.5, 6), (0.1, 6), (None, 6), (0.25, 7)):
        optimizer.param_groups[0]["rank_fraction"] = fraction
        twin = copy.deepcopy(optimizer)
        optimizer.step()
        assert len(seen) == count
        twin.param_groups[0]["params"][0].grad = params[0].grad
        twin.step()
        del seen[count:]
        assert params[0].equal(twin.param_groups[0]["params"][0])


@NEEDS_ENGINE
def test_gradients_of_other_layouts_are_stepped_by_torch(monkeypatch):
    seen, found = chains(monkeypatch), []
    grad = torch.randn(32, 64, device="cuda")
    for each in (grad, grad.T.contiguous().T):
        p = torch.nn.Parameter(torch.ones(32, 64, device="cuda"))
        p.grad = each
        optim.Muon([p], rank_fraction=0.25).step()
        found.append(p.detach())
    assert len(seen) == 1
    assert found[0].equal(found[1])


@NEEDS_ENGINE
def test_native_steps_repeat_their_bits_and_count_versions(monkeypatch):
    seen = chains(monkeypatch)
    first, optimizer = trained(NATIVE, ns_dtype=None, device="cuda")
    second, _ = trained(NATIVE, ns_dtype=None, device="cuda")
    assert len(seen) == 8
    assert all(map(torch.equal, first, second))
    average = optimizer.state[first[0]]["momentum_buffer"]
    before = first[0]._version, average._version
    optimizer.step()
    assert (first[0]._version > before[0], average._version > before[1]) == (True, True)


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


@NEEDS_ENGINE
@pytest.mark.parametrize("begin", [0, 4, 7, 8])
def test_weights_that_share_memory_are_stepped_by_torch(begin, monkeypatch):
    seen = chains(monkeypatch)
    whole = torch.ones(16, 32, device="cuda")
    params = [torch.nn.Parameter(each) for each in (whole[begin : begin + 8], whole[:8])]
    optimizer = optim.Muon(params, rank_fraction=0.25)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert bool(seen) == (begin == 8)


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
