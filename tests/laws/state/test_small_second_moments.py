"""Law: states in codes move no weight more than twice as far as float32 states do.

A second moment that rounds to zero beside a first one that does not is the danger: one is divided
by the root of the other. So a positive number of an unsigned map never becomes zero. And a moment
that changes by less than half of the distance to the next code must not keep its code: a step
rounds up from another place between two codes than the step before.
"""

import warnings
from itertools import product

import pytest
import torch
from torch import nn

import fusedstep
from fusedstep import optim
from fusedstep._state.codes import storage_index, warn_of_codes
from reference.codes import MAPS, NOT_NEGATIVE, rounded
from support.cases import CASES
from support.cuda_device import needs_cuda
from support.stepping import assert_same_bits, forced_isa

#: Those that have a zero.
KINDS = ("int8", "fp8")
CODED = pytest.mark.parametrize("kind", KINDS)
UNSIGNED = [case for case in CASES if not NOT_NEGATIVE.isdisjoint(case.states)]

#: Positive numbers of every size beside their block's largest one.
LARGEST = (1e-44, 1e-36, 1e-20, 1.0, 1e20, 8e37)


def positive_numbers():
    rows = [torch.logspace(-45, 38, 5003).clamp(max=largest) for largest in LARGEST]
    for row, largest in zip(rows, LARGEST, strict=True):
        row[::256] = largest
    return rows


#: Numbers of steps, the first of which round near the middle, up and down; 0: to nearest.
STEPS_OF_CODES = (0, 1, 2, 34, 55, 233, 377, 2**24 + 3)


@pytest.mark.parametrize("step", STEPS_OF_CODES)
@pytest.mark.parametrize("isa", fusedstep.isas())
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_a_positive_number_never_becomes_zero(kind, isa, step):
    for numbers in positive_numbers():
        numbers[7::9], numbers[8::9] = 0.0, -0.0
        with forced_isa("base"):
            expected = torch.ops.fusedstep.encode_state(numbers, storage_index(kind), False, step)
        with forced_isa(isa):
            found = torch.ops.fusedstep.encode_state(numbers, storage_index(kind), False, step)
            decoded = torch.ops.fusedstep.decode_state(*found, numbers.shape, False)
        assert_same_bits(found[0], expected[0], "codes")
        assert_same_bits(found[1], expected[1], "absmax")
        assert torch.all(decoded[numbers > 0] > 0)
        assert kind == "int4" or torch.all(decoded[numbers == 0] == 0)


@pytest.mark.parametrize("step", STEPS_OF_CODES)
@pytest.mark.parametrize("isa", fusedstep.isas())
@pytest.mark.parametrize(("kind", "signed"), MAPS)
def test_a_step_rounds_at_its_place_between_two_codes(kind, signed, isa, step):
    torch.manual_seed(0)
    shares = (torch.rand(20_000) * 10 ** (-8 * torch.rand(20_000))).view(-1, 100)
    shares[:, 0] = 1.0
    shares[:, 1::2] *= -1 if signed else 1
    numbers = torch.nn.functional.pad(shares, (0, MAPS[kind, signed][1] - 100))
    with forced_isa(isa):
        found = torch.ops.fusedstep.encode_state(numbers, storage_index(kind), signed, step)
        decoded = torch.ops.fusedstep.decode_state(*found, numbers.shape, signed)
    expected, clear = rounded(shares[:, 1:].double(), kind, signed, step)
    assert clear.double().mean() > 0.99
    decoded = decoded[:, 1:100].double()
    torch.testing.assert_close(decoded[clear], expected[clear], rtol=1e-6, atol=0)


@pytest.mark.parametrize("factor", [0.999, 1.001])
@pytest.mark.parametrize(("kind", "signed"), [of for of in MAPS if of[0] != "int4"])
def test_a_moment_that_changes_little_a_step_does_not_lag(kind, signed, factor):
    """To nearest it would keep its code, and be 1.5 times too large, or 0.67 of what it is."""
    steps, shape = 400, (16, 256)
    order = torch.randperm(16 * 256, generator=torch.Generator().manual_seed(0))
    start = torch.logspace(-3.5, -0.3, 16 * 256)[order].view(shape)
    numbers = start.clone()
    for step in range(1, steps + 1):
        numbers *= factor
        numbers[:, 0] = 1.0
        found = torch.ops.fusedstep.encode_state(numbers, storage_index(kind), signed, step)
        numbers = torch.ops.fusedstep.decode_state(*found, shape, signed)
    ratio = (numbers / (start * factor**steps))[:, 1:]
    assert ratio.mean().item() == pytest.approx(1, rel=0.15)
    assert 0.6 < ratio.min() <= ratio.max() < 1.3


def moments_of(numbers, kind, device):
    """The codes of numbers as a step of Adamax makes them its second moments."""
    param = nn.Parameter(torch.zeros(len(numbers), device=device))
    param.grad = numbers.to(device)
    optimizer = optim.Adamax([param], eps=0.0, state_dtype=kind)
    optimizer.step()
    return [optimizer.state[param][name].cpu() for name in ("exp_inf", "exp_inf_absmax")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@CODED
def test_steps_encode_them_alike(kind, device):
    for numbers in positive_numbers():
        expected = torch.ops.fusedstep.encode_state(numbers, storage_index(kind), False, 1)
        found = moments_of(numbers, kind, device)
        assert_same_bits(found[0], expected[0], "codes")
        assert_same_bits(found[1], expected[1], "absmax")


@pytest.mark.parametrize("then", [1e-9, 3e-6])
@pytest.mark.parametrize("fused", [True, False])
@CODED
@pytest.mark.parametrize("case", UNSIGNED, ids=str)
def test_a_small_gradient_beside_large_ones(case, kind, fused, then):
    """torchao's and bitsandbytes' 8-bit Adam move the weight by 11,900 learning rates."""

    def move(state_dtype):
        param = nn.Parameter(torch.zeros(4096))
        optimizer = case.build([param], state_dtype=state_dtype, fused=fused)
        for small, others in ((3e-4, 1.0), (then, 0.0)):
            param.grad = torch.full([4096], others)
            param.grad[1] = small
            before = param.detach().clone()
            optimizer.step()
        return (param.detach() - before)[1].abs()

    assert move(kind) <= 2 * move(torch.float32)


CENTERED = (
    ({"state_dtype": "int8"}, {}, False),
    ({"centered": True}, {}, False),
    ({"centered": True, "state_dtype": torch.float32}, {}, False),
    ({"centered": True}, {"state_dtype": "fp8"}, True),
    ({"state_dtype": "int4"}, {"centered": True}, True),
)


@pytest.mark.parametrize(("of_all", "of_group", "warns"), CENTERED)
def test_a_centered_step_in_codes_is_warned_of_once(of_all, of_group, warns):
    warn_of_codes.cache_clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            optim.RMSprop([{"params": [torch.zeros(2, 2)], **of_group}], **of_all)
    texts = [str(each.message) for each in found]
    assert len(texts) == warns
    assert all("centered=True" in text and text.startswith("RMSprop") for text in texts)


# Trainings


def convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    means = torch.randn(10, 3, 8, 8)

    def loss():
        labels = torch.randint(10, (32,))
        found = model(means[labels] + torch.randn(32, 3, 8, 8))
        return nn.functional.cross_entropy(found, labels)

    return model, loss


def words():
    """Words of Zipf's frequencies."""
    layers = nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)
    model = nn.Sequential(nn.Embedding(512, 16), *layers)
    shares, labels = 1 / torch.arange(1, 513).float(), torch.randint(8, (512,))

    def loss():
        found = torch.multinomial(shares, 128, True).view(32, 4)
        return nn.functional.cross_entropy(model(found), labels[found[:, 0]])

    return model, loss


def language_model_head():
    inputs = torch.randn(2048, 32)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2048, bias=False))
    shares = 1 / torch.arange(1, 2049).float()
    following = torch.multinomial(shares, 2048, True)

    def loss():
        found = torch.multinomial(shares, 64, True)
        return nn.functional.cross_entropy(model(inputs[found]), following[found])

    return model, loss


RULES = {
    "Adagrad": lambda params, kind: optim.Adagrad(params, 1e-2, state_dtype=kind),
    "Adam": lambda params, kind: optim.Adam(params, amsgrad=True, state_dtype=kind),
    "AdamW": lambda params, kind: optim.AdamW(params, weight_decay=0, state_dtype=kind),
    "Adamax": lambda params, kind: optim.Adamax(params, state_dtype=kind),
    "Adan": lambda params, kind: optim.Adan(params, state_dtype=kind),
    "Lamb": lambda params, kind: optim.Lamb(params, state_dtype=kind),
    "NAdam": lambda params, kind: optim.NAdam(params, state_dtype=kind),
    "RAdam": lambda params, kind: optim.RAdam(params, state_dtype=kind),
    "RMSprop": lambda params, kind: optim.RMSprop(params, 1e-3, momentum=0.9, state_dtype=kind),
}
STEPS = 60


@pytest.mark.parametrize(
    ("training", "rule", "steps"),
    [
        *product((convolutions, words, language_model_head), RULES, [STEPS]),
        (language_model_head, "Adan", 5 * STEPS),  # its first moments change least
    ],
)
def test_no_weight_moves_much_further(training, rule, steps):
    """Zeros would move one by 3,310 learning rates in a step of AdamW where float32 has 1.7.

    To nearest, one would move 2.2 times as far after 60 steps, and 4 times after 300.
    """

    def trained(kind):
        torch.manual_seed(0)
        model, loss = training()
        params = list(model.parameters())
        optimizer, largest, losses = RULES[rule](params, kind), 0.0, []
        for _ in range(steps):
            optimizer.zero_grad()
            losses.append(loss())
            losses[-1].backward()
            before = [param.detach().clone() for param in params]
            optimizer.step()
            moves = [(p - q).abs().amax() for p, q in zip(params, before, strict=True)]
            largest = max(largest, *(move.item() for move in moves))
        return largest, torch.stack(losses[-20:]).mean().item()

    largest, loss = trained(torch.float32)
    for kind in KINDS:
        found = trained(kind)
        assert found[0] <= 2 * largest, kind
        # One element would stop the whole weight.
        assert rule != "Lamb" or found[1] == pytest.approx(loss, rel=0.03), kind
