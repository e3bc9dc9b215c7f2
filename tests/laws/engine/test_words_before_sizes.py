"""Law: the library reads around a tensor's sizes only what belongs to the tensor."""

import ctypes

import pytest
import torch

from fusedstep._native.libraries import library_path

WORD = ctypes.sizeof(ctypes.c_int64)


@pytest.fixture(scope="module")
def words() -> int:
    """The words from the start of a tensor to its sizes, as the library has found them by trial."""
    library = ctypes.CDLL(str(library_path()))
    return ctypes.c_size_t.in_dll(library, "_ZN9fusedstep3ops18words_before_sizesE").value


@pytest.mark.parametrize("dims", range(1, 6))
@pytest.mark.parametrize("of", [torch.Tensor, torch.nn.Parameter])
def test_sizes_lie_behind_them(words, dims, of):
    tensor = torch.empty(tuple(range(2, 2 + dims))).permute(*reversed(range(dims)))
    if of is torch.nn.Parameter:
        tensor = of(tensor)
    start = tensor._cdata  # the address of the tensor that torch.Tensor refers to
    read = (ctypes.c_int64 * 10).from_address(start + words * WORD)
    assert tuple(read[:dims]) == tensor.shape
    assert tuple(read[5 : 5 + dims]) == tensor.stride()


def test_the_address_of_the_storage_is_among_them(words):
    tensor = torch.ones(3)
    among = (ctypes.c_uint64 * words).from_address(tensor._cdata)
    assert tensor.untyped_storage()._cdata in among[1:]


class NegativeBit(ctypes.Structure):
    _fields_ = (("word", ctypes.c_ssize_t), ("mask", ctypes.c_uint64))


def test_the_negative_bit_is_found(words):
    library = ctypes.CDLL(str(library_path()))
    bit = NegativeBit.in_dll(library, "_ZN9fusedstep3ops12negative_bitE")
    assert bit.mask.bit_count() == 1
    for tensor in (torch.ones(3), torch.ones(2, 3, dtype=torch.bfloat16)):
        negated = torch._neg_view(tensor)
        for each in (tensor, negated, torch._neg_view(negated)):
            start = each._cdata + (words + bit.word) * WORD
            assert (ctypes.c_uint64.from_address(start).value & bit.mask != 0) == each.is_neg()
