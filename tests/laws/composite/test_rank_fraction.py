"""Dion2: a step of Muon that orthogonalizes the rows or columns with the largest norms alone."""

import copy
import io

import pytest
import torch

from fusedstep import optim
from fusedstep._matrix import batches
from reference.dion2 import dion2
from support.matrices import assert_moved_alike, largest_allocation, parameters, step
from support.stepping import WAYS

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
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
