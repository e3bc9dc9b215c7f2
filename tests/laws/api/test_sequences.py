"""Options that are several numbers may be any sequence of them, as configurations have lists."""

import io
from collections import UserList

import numpy
import pytest
import torch

from fusedstep import optim

OPTIONS = [
    (optim.Rprop, "etas", [0.5, 1.25]),
    (optim.Rprop, "step_sizes", [1e-6, 50.0]),
    (optim.Adafactor, "eps", [1e-30, 1e-3]),
    (optim.GaLoreAdafactor, "eps", [1e-30, 1e-3]),
    (optim.CAME, "eps", [1e-30, 1e-16]),
    (optim.AdamW, "betas", [0.5, 0.75]),
    (optim.Adan, "betas", [0.5, 0.75, 0.875]),
    (optim.Muon, "ns_coefficients", [3.5, -4.75, 2.0]),
]


@pytest.mark.parametrize("in_group", [False, True], ids=["of all", "of a group"])
@pytest.mark.parametrize("sequence", [UserList, numpy.array], ids=["a list", "an array"])
@pytest.mark.parametrize(("cls", "name", "numbers"), OPTIONS, ids=str)
def test_any_sequence_of_numbers(cls, name, numbers, sequence, in_group):
    weight = torch.nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.ones(4, 4)
    option = {name: sequence(numbers)}
    group = {"params": [weight]} | (option if in_group else {})
    optimizer = cls([group], **({} if in_group else option))
    optimizer.step()
    assert optimizer.param_groups[0][name] == tuple(numbers)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["param_groups"][0][name] == tuple(numbers)


@pytest.mark.parametrize("sequence", [UserList, numpy.array], ids=["a list", "an array"])
def test_sequences_in_a_sequence(sequence):
    steps = [[3.5, -4.75, 2.0], [3.0, -4.0, 2.0]]
    given = sequence([sequence(step) for step in steps])
    optimizer = optim.Muon([torch.nn.Parameter(torch.ones(4, 4))], ns_coefficients=given)
    assert optimizer.param_groups[0]["ns_coefficients"] == tuple(map(tuple, steps))


@pytest.mark.parametrize("wrong", ["ab", {0.5: 1, 1.25: 2}, {0.5, 1.25}, [0.5], 0.5], ids=str)
def test_two_of_anything_are_no_pair(wrong):
    with pytest.raises(TypeError, match="etas must be two numbers"):
        optim.Rprop([torch.nn.Parameter(torch.ones(1))], etas=wrong)


@pytest.mark.parametrize("fused", [None, False])
def test_a_nested_gradient_is_not_called_sparse(fused):
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    weight = torch.nn.Parameter(nested)
    weight.grad = torch.ones_like(nested)
    with pytest.raises(RuntimeError, match="does not support nested tensors"):
        optim.AdamW([weight], fused=fused).step()


def test_muon_names_a_nested_weight():
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    with pytest.raises(ValueError, match="parameter 0 of group 0 is a nested tensor"):
        optim.Muon([torch.nn.Parameter(nested)])
