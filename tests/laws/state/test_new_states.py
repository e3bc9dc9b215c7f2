"""The operator of new states: the same as torch operations give, whichever way slots are stored."""

import itertools

import pytest
import torch

from fusedstep._state.codes import new_states as made_by_torch
from support.cuda_device import needs_cuda
from support.layouts import WEIGHT_LAYOUTS
from support.stepping import TEAM, assert_same_bits, make_weights, threads

#: Storage of numbers, of codes, and of what is beside a weight; in the last ones nothing fits.
STORAGES = (
    (),
    ("weight",),
    ("int16",),
    ("float32", "float32", "float32"),
    ("float32", "float32", "weight"),
    ("float32", "int16"),
    ("int8", "unsigned int8", "unsigned int8", "float32"),
    ("int4", "unsigned int4", "int16"),
    ("fp8", "unsigned fp8", "weight"),
    ("weight", "int8", "int16", "unsigned int4"),
)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DEVICES = ("cpu", pytest.param("cuda", marks=needs_cuda))


def new_states(weights, storages):
    """The tensors that the operator makes in memory where something else has been."""
    for weight in weights:
        for _ in storages:
            torch.full((3 * weight.numel(),), 77.0, device=weight.device)
    return torch.ops.fusedstep.new_states(weights, list(storages))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("storages", STORAGES, ids=str)
def test_the_tensors_of_torch_operations(storages, device):
    for dtype, count in itertools.product(DTYPES, (1, 3)):
        weights = [
            layout.place(*make_weights([layout.shape], dtype)).view.to(device)
            for layout in WEIGHT_LAYOUTS
        ]
        weights += [torch.ones(TEAM + 7, dtype=dtype, device=device)]
        with threads(count):
            made = new_states(weights, storages)
        expected = made_by_torch(weights, list(storages))
        for index, (tensor, other) in enumerate(zip(made, expected, strict=True)):
            assert (tensor.dtype, tensor.device) == (other.dtype, other.device)
            assert_same_bits(tensor, other, f"{dtype}, tensor {index}")


@pytest.mark.parametrize("storage", ["weight", "float32", "int16"])
def test_numbers_are_dense_in_the_order_of_the_weight(storage):
    for layout in [each for each in WEIGHT_LAYOUTS if 0 not in each.shape]:
        (weight,) = make_weights([layout.shape], torch.bfloat16)
        view = layout.place(weight).view
        (made,) = new_states([view], [storage])
        long = [dim for dim, size in enumerate(view.shape) if size > 1]
        strides = [[each.stride(dim) for dim in long] for each in (made, torch.empty_like(view))]
        assert strides[0] == strides[1], layout


@pytest.mark.parametrize("storages", STORAGES, ids=str)
def test_slots_of_one_storage_are_placed_apart(storages):
    weight = torch.ones(TEAM * 16, dtype=torch.bfloat16)
    made = new_states([weight], storages)
    for storage in {each.removeprefix("unsigned ") for each in storages}:
        slots = [k for k, each in enumerate(storages) if each.removeprefix("unsigned ") == storage]
        offsets = [tensor.data_ptr() % 4096 for tensor in (weight, *(made[k] for k in slots))]
        assert len(set(offsets)) == len(offsets), (storage, offsets)


def test_what_is_no_storage_is_named():
    with pytest.raises(RuntimeError, match='not as "float16"'):
        new_states([torch.ones(3)], ["weight", "float16"])


def test_a_weight_has_at_most_so_many_states():
    with pytest.raises(RuntimeError, match=r"at most \d+ states"):
        new_states([torch.ones(3)], ["weight"] * 20)


@pytest.mark.parametrize("storages", [("weight", "weight"), ("int8", "int8")], ids=str)
def test_where_there_is_no_memory_an_error_has_the_bytes(storages):
    count = 1 << 50
    weight = torch.ones(1).expand(count)
    size = 4 * count if storages[0] == "weight" else count + 4 * (count // 256)
    text = f"no memory for the states of the optimizer: {2 * size} bytes, of 1 weights with 2 "
    with pytest.raises((RuntimeError, MemoryError), match=text):
        torch.ops.fusedstep.new_states([weight], list(storages))
