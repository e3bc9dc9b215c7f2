"""Weights that `split_sizes` has stepped as several matrices, on every way that a step may take."""

import copy
import json

import pytest
import torch

from fusedstep import optim
from fusedstep._matrix.native_batches import NativeStages
from fusedstep._native import ops
from support.matrices import assert_moved_alike, largest_allocation, parameters

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ("cpu", pytest.param("cuda", marks=NEEDS_GPU))

SIZES = (24, 8, 8)

#: Their parts are [24, …] and [8, …]. Muon takes the last two for stacks; see `dim_of_rows`.
SHAPES = ((40, 24), (40, 24), (40, 16), (40, 2, 3, 4), (2, 40, 8), (1, 40, 8))


def dim_of_rows(shape):
    return int(len(shape) == 3)


def split(tensors):
    """The parts as tensors of their own."""
    return [
        part.detach().clone(memory_format=torch.contiguous_format)
        for each in tensors
        for part in each.split(SIZES, dim_of_rows(each.shape))
    ]


def trained(cls, params, grads, **options):
    optimizer = cls([{"params": params, "use_muon": True}], **options)
    for some in grads:
        for p, grad in zip(params, some, strict=True):
            p.grad = grad.clone()
        optimizer.step()
    return optimizer


def assert_parts_step_as_weights(cls, device="cpu", dtype=torch.float32, bound=1e-5, **options):
    """Steps weights of several parts, and the parts as weights of their own."""
    shapes = SHAPES if cls is optim.Muon else SHAPES[:-2]
    start = [p.detach().to(device) for p in parameters(shapes, dtype)]
    generator = torch.Generator().manual_seed(1)
    grads = [[torch.randn(s, generator=generator).to(device, dtype) for s in shapes] for _ in "123"]
    options = {"lr": 0.5 if dtype is torch.bfloat16 else 0.02, "momentum": 0.9} | options
    params = [torch.nn.Parameter(each.clone()) for each in start]
    optimizer = trained(cls, params, grads, split_sizes=SIZES, **options)
    alone = [torch.nn.Parameter(each) for each in split(start)]
    apart = trained(cls, alone, list(map(split, grads)), **options)
    assert_moved_alike(split(params), alone, split(start), bound)
    for name in apart.state[alone[0]].keys() - {"compensation", "step"}:
        states = split([optimizer.state[p][name] for p in params])
        for found, p in zip(states, alone, strict=True):
            torch.testing.assert_close(found, apart.state[p][name], rtol=bound, atol=bound)


@pytest.mark.parametrize("fused", [None, False], ids=["together", "one by one"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        {"ns_dtype": torch.bfloat16, "bound": 0.05},
        {"ns_dtype": torch.bfloat16, "dtype": torch.bfloat16, "bound": 0.1},
        {"ns_dtype": torch.float64, "dtype": torch.float64, "maximize": True, "bound": 1e-10},
        {"ns_dtype": torch.float32, "dtype": torch.bfloat16, "master_weights": True},
        {"ns_dtype": torch.float16, "dtype": torch.float16, "bound": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize("cls", [optim.Muon, optim.MuSGD])
def test_parts_step_as_weights_of_their_own(cls, options, device, fused):
    if options.get("master_weights"):
        options = options | {"bound": 1e-2}  # of bfloat16, to which the weights are rounded
    assert_parts_step_as_weights(cls, device, fused=fused, **options)


@pytest.mark.parametrize("fused", [None, False], ids=["together", "one by one"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        {"adjust_lr_fn": "match_rms_adamw", "nesterov": False},
        {"adjust_lr_fn": "spectral_unclamped", "ns_coefficients": "polar_express"},
        {"cautious_decay": True, "weight_decay": 5.0},
        {"normuon": True},
        {"ns_start": "aol", "ns_steps": 4},
        {"normuon": True, "dtype": torch.bfloat16, "bound": 1e-2},
    ],
    ids=str,
)
def test_parts_step_as_weights_of_their_own_with_options_of_muon(options, device, fused):
    options = {"ns_dtype": torch.float32} | options
    assert_parts_step_as_weights(optim.Muon, device, fused=fused, **options)


@pytest.mark.skipif(ops.product_isa() is None, reason="has no native products")
@pytest.mark.parametrize("cls", [optim.Muon, optim.MuSGD])
def test_the_native_engine_takes_parts_of_all_shapes_together(cls, monkeypatch):
    seen, begin = [], NativeStages.begin

    def noted(self):
        seen.append([shape for batch in self._native.batches for shape in batch.matrices])
        return begin(self)

    monkeypatch.setattr(NativeStages, "begin", noted)
    params = parameters([(40, 24), (40, 24), (40, 16)])
    grads = [[torch.ones_like(p) for p in params]] * 2
    trained(cls, params, grads, ns_dtype=torch.bfloat16, split_sizes=SIZES)
    assert seen == [[(2, 24, 24), (4, 8, 24), (1, 24, 16), (2, 8, 16)]] * 2


def test_states_in_codes():
    params, kept = parameters([(64, 80)]), parameters([(64, 80)])
    grads = [[torch.ones(64, 80).tril_()]] * 3
    options = {"lr": 0.02, "ns_dtype": torch.float32, "split_sizes": (32, 16, 16)}
    trained(optim.Muon, params, grads, state_dtype="int8", **options)
    trained(optim.Muon, kept, grads, **options)
    assert_moved_alike(params, kept, parameters([(64, 80)]), 0.05)


def test_what_is_not_a_number_stays_in_its_part():
    (p,) = parameters([(40, 24)])
    grad = torch.ones(40, 24)
    grad[25, 3] = torch.nan
    trained(optim.Muon, [p], [[grad]], split_sizes=SIZES)
    assert [bool(part.isnan().all()) for part in p.split(SIZES)] == [False, True, False]
    assert not p[:24].isnan().any()
    assert not p[32:].isnan().any()


@pytest.mark.parametrize("cls", [optim.Muon, optim.MuSGD])
def test_a_group_is_saved_and_loaded(cls):
    """In a dictionary, and in a file of JSON, which has lists for tuples."""
    grads = [[torch.ones(40, 24).tril_(k)] for k in range(4)]
    expected = parameters([(40, 24)])
    trained(cls, expected, grads, split_sizes=SIZES)
    params = parameters([(40, 24)])
    saved = copy.deepcopy(trained(cls, params, grads[:2], split_sizes=SIZES).state_dict())
    (group,) = saved["param_groups"]
    group["split_sizes"] = json.loads(json.dumps(group["split_sizes"]))
    optimizer = cls([{"params": params, "use_muon": True}])
    optimizer.load_state_dict(saved)
    for (grad,) in grads[2:]:
        params[0].grad = grad.clone()
        optimizer.step()
    assert torch.equal(params[0], expected[0])
    assert "split_sizes" not in cls([{"params": params, "use_muon": True}]).param_groups[0]


def test_sizes_that_do_not_fit_change_nothing():
    params = parameters([(40, 24), (24, 40)])
    optimizer = optim.MuSGD([{"params": params, "use_muon": True}])
    optimizer.param_groups[0]["split_sizes"] = SIZES
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"parameter 1 of group 0 has matrices of 24 rows"):
        optimizer.step()
    assert all(map(torch.equal, params, parameters([(40, 24), (24, 40)])))
    with pytest.raises(ValueError, match="'qkv' has matrices of 24 rows, of which split_sizes"):
        optim.Muon([("qkv", params[1])], split_sizes=SIZES)


def test_a_step_allocates_nothing_of_a_parts_size():
    params = parameters([(96, 32), (96, 64)])
    grads = [[torch.ones_like(p) for p in params]] * 2
    optimizer = trained(optim.Muon, params, grads, split_sizes=(48, 24, 24))
    assert largest_allocation(optimizer.step) < 24 * 32 * 2
