"""Options may be any numbers, and any sequence of several, as configurations have lists.

Groups and dictionaries have Python's own: ``torch.load`` takes them, and a checkpoint has no tensor
where the next optimizer has a number.
"""

import copy
import inspect
import io
from collections import UserList

import numpy
import pytest
import torch

from fusedstep import optim
from fusedstep._options.kinds import Flag, LearningRate, Number
from support.cases import PLAIN
from support.composites import ROWS

OPTIONS = [
    (optim.Rprop, "etas", [0.5, 1.25]),
    (optim.Rprop, "step_sizes", [1e-6, 50.0]),
    (optim.Adafactor, "eps", [1e-30, 1e-3]),
    (optim.GaLoreAdafactor, "eps", [1e-30, 1e-3]),
    (optim.CAME, "eps", [1e-30, 1e-16]),
    (optim.AdamW, "betas", [0.5, 0.75]),
    (optim.Adan, "betas", [0.5, 0.75, 0.875]),
    (optim.Muon, "ns_coefficients", [3.5, -4.75, 2.0]),
    (optim.Muon, "split_sizes", [1, 3]),
    (optim.MuSGD, "split_sizes", [1, 3]),
]


def through_a_file(dictionary):
    file = io.BytesIO()
    torch.save(dictionary, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def numbers_of(optimizer):
    """All options of a group that are numbers or flags, but for the learning rate."""
    (group,) = optimizer.param_groups
    for name, option in type(optimizer)._option_kinds.items():
        value = group.get(name, option.unset)
        if isinstance(option, (Number, Flag)) and not isinstance(option, LearningRate):
            if isinstance(value, (bool, int, float)):
                yield name, value
            elif value is None and isinstance(option, Number):
                yield name, 0.5


@pytest.mark.parametrize(
    "made",
    [lambda value: torch.tensor(value, dtype=KINDS[type(value)]), numpy.array, numpy.atleast_1d],
    ids=["a tensor", "a number of numpy", "an array"],
)
@pytest.mark.parametrize("row", [*PLAIN, *ROWS], ids=str)
def test_numbers_are_pythons_own(row, made):
    weight = torch.nn.Parameter(torch.ones(12, 8))
    for name, value in numbers_of(row.build([weight])):
        group = {"params": [weight]} | getattr(row, "of_group", {}) | {name: made(value)}
        optimizer = row.optimizer([group])
        found = optimizer.param_groups[0][name]
        assert (type(found), found) == (type(value), value), name
        assert type(through_a_file(optimizer.state_dict())["param_groups"][0][name]) is type(value)
        if name in inspect.signature(row.optimizer).parameters:
            found = row.build([weight], **{name: made(value)}).param_groups[0].get(name, value)
            assert (type(found), found) == (type(value), value), name
        if not isinstance(value, bool):  # a dictionary may have what a group was given later
            optimizer.param_groups[0][name] = made(value)
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            assert type(optimizer.param_groups[0][name]) is type(value), name


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("seed", numpy.int64(7), 7),
        ("seed", torch.tensor(7), 7),
        ("master_weights", numpy.bool_(True), True),
        ("master_weights", numpy.str_("float32"), "float32"),
        ("state_dtype", numpy.str_("int8"), "int8"),
        ("rounding", numpy.str_("kahan"), "kahan"),
    ],
    ids=str,
)
def test_ways_to_store_are_pythons_own(name, given, expected):
    weight = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    for optimizer in (
        optim.AdamW([weight], **{name: given}),
        optim.AdamW([{"params": [weight], name: given}]),
    ):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.param_groups[0][name] = given
        optimizer.load_state_dict(optimizer.state_dict())
        found = through_a_file(optimizer.state_dict())["param_groups"][0][name]
        assert (type(found), found) == (type(expected), expected)


@pytest.mark.parametrize("made", [torch.tensor, numpy.array], ids=["a tensor", "an array"])
@pytest.mark.parametrize("in_group", [False, True], ids=["of all", "of a group"])
def test_several_numbers_are_no_number(in_group, made):
    weight = torch.nn.Parameter(torch.ones(8, 8))
    for cls, name in (
        (optim.AdamW, "weight_decay"),
        (optim.Muon, "rank_fraction"),
        (optim.Muon, "adamw_eps"),
        (optim.GaLoreAdamW, "scale"),
        (optim.SGD, "momentum"),
    ):
        option = {name: made([0.25, 0.5])}
        group = {"params": [weight]} | (option if in_group else {})
        with pytest.raises(ValueError, match=f"{name} must be 1-element"):
            cls([group], **({} if in_group else option))


KINDS = {bool: torch.bool, int: torch.int64, float: torch.float64}


def test_tensors_that_torch_takes_stay():
    weight = torch.nn.Parameter(torch.ones(4, 4))
    decay = torch.tensor(0.1, requires_grad=True)
    options = {
        "lr": torch.tensor(0.1),
        "betas": (torch.tensor(0.9), torch.tensor(0.99)),
        "weight_decay": decay,
    }
    (group,) = optim.AdamW([weight], **options, differentiable=True, capturable=True).param_groups
    assert group["lr"] is options["lr"]
    assert all(map(torch.is_tensor, group["betas"]))
    assert group["weight_decay"] is decay


def as_tensor(numbers):
    first = numbers[0]
    return (
        torch.stack(list(numbers))
        if torch.is_tensor(first)
        else torch.tensor(numbers, dtype=KINDS[type(first)])
    )


#: Sequences of numbers, by what they are made of.
SEQUENCES = {
    "a list": UserList,
    "an array": numpy.array,
    "a tensor": as_tensor,
    "tensors": lambda numbers: tuple(as_tensor(numbers)),
    "numbers of numpy": lambda numbers: tuple(numpy.array(numbers)),
}


@pytest.mark.parametrize("in_group", [False, True], ids=["of all", "of a group"])
@pytest.mark.parametrize("sequence", SEQUENCES.values(), ids=SEQUENCES)
@pytest.mark.parametrize(("cls", "name", "numbers"), OPTIONS, ids=str)
def test_any_sequence_of_numbers(cls, name, numbers, sequence, in_group):
    weight = torch.nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.ones(4, 4)
    option = {name: sequence(numbers)}
    group = {"params": [weight]} | (option if in_group else {})
    optimizer = cls([group], **({} if in_group else option))
    optimizer.step()
    assert optimizer.param_groups[0][name] == tuple(numbers)
    loaded = through_a_file(optimizer.state_dict())
    assert loaded["param_groups"][0][name] == tuple(numbers)


@pytest.mark.parametrize(
    "sequence", [UserList, numpy.array, as_tensor], ids=["a list", "an array", "a tensor"]
)
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
