"""Works of two processes with shards of weights whose second moments are factored: Adafactor."""

import itertools
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from fusedstep import optim
from fusedstep._factored.steps import part_by_torch
from fusedstep._sharding.dtensor import is_dtensor, local
from fusedstep._step.clip import _norms
from support.codes_of_shards import WAYS, Training, assert_all_have, assert_same_state
from support.stepping import as_parameters, assert_same_bits, make_gradients, make_weights
from support.two_processes import folder_of_both, like, part_of, shards_of

#: A matrix, one with fewer rows than processes, stacks of matrices, a vector, and a number of it.
SHAPES = ((300, 520), (1, 300), (9, 4, 5), (3, 4, 5, 6), (7,), (1,))

OPTIONS = (
    {"lr": 0.05},
    {"lr": 0.05, "weight_decay": 0.1, "d": 1.5, "maximize": True, "eps": (0.3, 2.0)},
    {"variant": "transformers", "max_relative_step": 0.05},
    {
        "beta1": 0.8,
        "warmup_init": True,
        "weight_decay": 0.1,
        "clip_threshold": 0.5,
        "max_relative_step": 0.05,
    },
)

#: The mesh of two processes, and the placements of a weight of so many dimensions.
CUTS = {
    "rows": ((2,), lambda dims: [Shard(0)]),
    "columns": ((2,), lambda dims: [Shard(dims - 1)]),
    "the last but one": ((2,), lambda dims: [Shard(max(dims - 2, 0))]),
    "copies": ((2,), lambda dims: [Replicate()]),
    "HSDP, one copy": ((1, 2), lambda dims: [Replicate(), Shard(0)]),
    "HSDP, two copies": ((2, 1), lambda dims: [Replicate(), Shard(0)]),
    "one process": ((2, 1), lambda dims: [Replicate(), Shard(dims - 1)]),
    "rows and columns": (
        (2, 1),
        lambda dims: [Shard(0), Shard(dims - 1) if dims > 1 else Replicate()],
    ),
}

#: Dtypes of weights, and how their values are kept.
KEPT = (
    (torch.float32, {}),
    (torch.float64, {}),
    (torch.bfloat16, {}),
    (torch.bfloat16, {"master_weights": True}),
    (torch.bfloat16, {"master_weights": "split"}),
    (torch.bfloat16, {"rounding": "kahan"}),
)


#: Where each process has all, cut or not: the sums are those of whole weights.
WHOLE = ("copies", "HSDP, two copies", "one process")


class Cut:
    """Tensors spread over both processes in one way."""

    def __init__(self, here, name):
        sizes, self._placements = CUTS[name]
        self._mesh = here.mesh(*sizes)

    def __call__(self, tensor):
        return shards_of(tensor, self._mesh, self._placements(tensor.dim()))


def subjects(here, cut, dtype=torch.float32):
    """Parameters, and the same spread over the processes."""
    weights = [weight.to(here.device) for weight in make_weights(SHAPES, dtype)]
    return as_parameters(weights), [torch.nn.Parameter(cut(weight)) for weight in weights]


def set_gradients(here, params, shards, cut, step):
    grads = make_gradients(SHAPES, params[0].dtype, step)
    for param, shard, grad in zip(params, shards, grads, strict=True):
        param.grad = grad.to(here.device)
        shard.grad = cut(param.grad)


def assert_close(found, whole, units, what):
    """To so many units of float32, or of float64, of the largest number."""
    most = units * torch.finfo(found.dtype).eps * whole.detach().abs().max().item()
    torch.testing.assert_close(
        local(found).detach(),
        part_of(whole, found),
        rtol=0,
        atol=most,
        msg=lambda text: f"{what}: {text}",
    )


def parts_are_stepped_as_the_whole(here):
    for (number, name), fused in itertools.product(enumerate(CUTS), (True, False)):
        cut = Cut(here, name)
        # Torch's operations take the sums of parts in one way, however a value is kept.
        for place, (dtype, kept) in enumerate(KEPT if fused else KEPT[number % 3 :: 3]):
            turn = (number + place) % len(OPTIONS)
            # Rows and columns have all options, other cuts one with each way to keep a value.
            has_all = fused and place < 2 and number < 2
            for options in OPTIONS if has_all else OPTIONS[turn : turn + 1]:
                params, shards = subjects(here, cut, dtype)
                ours = optim.Adafactor(params, fused=True, **options, **kept)
                theirs = optim.Adafactor(shards, fused=fused, **options, **kept)
                for step in range(2):
                    set_gradients(here, params, shards, cut, step)
                    versions = [shard._version for shard in shards]
                    ours.step()
                    theirs.step()
                    assert all(v < s._version for v, s in zip(versions, shards, strict=True))
                what = f"{name}, {fused}, {dtype}, {options}, {kept}"
                for param, shard in zip(params, shards, strict=True):
                    assert_close(shard, param, 1 if dtype is torch.bfloat16 else 32, what)
                    if fused and name in WHOLE:
                        assert_same_bits(local(shard).detach(), param.detach(), what)
                    state = theirs.state[shard]
                    assert state.keys() == ours.state[param].keys()
                    for key, value in ours.state[param].items():
                        if key == "step":
                            assert_same_bits(state[key], value, what)
                        elif fused and name in WHOLE:
                            assert_same_bits(local(state[key]), value, f"{what}, {key}")
                        elif value.dtype.is_floating_point:
                            # The rest of a 16-bit weight jumps where the weight is rounded.
                            units = 2**17 if key == "compensation" else 32
                            assert_close(state[key], value, units, f"{what}, {key}")


def native_kernels_step_parts(here):
    """Other operations take parts without elements, and what native kernels are not to step."""
    for name in ("rows", "columns", "rows and columns"):
        for fused in (None, True, False):
            cut = Cut(here, name)
            params, shards = subjects(here, cut)
            set_gradients(here, params, shards, cut, 0)
            optimizer = optim.Adafactor(shards, fused=fused, variant="transformers")
            with mock.patch(
                "fusedstep._factored.program.part_by_torch", wraps=part_by_torch
            ) as by_torch:
                optimizer.step()
            empty = sum(local(shard).numel() == 0 for shard in shards)
            assert by_torch.call_count == (len(shards) if fused is False else empty), name


def parts_are_rounded_at_random(here):
    """To one of both neighbours of the value, which is their mean; copies have the same."""
    shape, ulp = (200, 100), 2.0**-7  # of the weights, which stay within 1 and 2
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = torch.nn.Parameter(torch.full(shape, 1.5, device=here.device))
    exact.grad = grad.to(here.device).float()
    optim.Adafactor([exact], lr=1e-3, eps=(1e-30, 1e-3)).step()
    exact = exact.detach()
    for name, fused in itertools.product(("rows", "columns", "HSDP, two copies"), (True, False)):
        cut = Cut(here, name)
        weight = torch.full(shape, 1.5, device=here.device, dtype=torch.bfloat16)
        shard = torch.nn.Parameter(cut(weight))
        shard.grad = cut(grad.to(here.device))
        options = {"lr": 1e-3, "eps": (1e-30, 1e-3), "rounding": "stochastic", "fused": fused}
        optim.Adafactor([shard], **options).step()
        assert_all_have([shard.detach().full_tensor()], name)
        error = shard.detach().full_tensor().float() - exact
        assert error.abs().max() < ulp, name
        assert error.abs().max() > ulp / 2, name  # else it would be to nearest
        # An error's variance is at most that of a coin between two neighbours.
        assert error.mean().abs() < 5 * ulp / 2 / math.sqrt(exact.numel()), name


def states_lie_beside_their_elements(here):
    """Moments of rows as the rows are cut, and whole where the columns are."""
    for variant, name, placements in (
        ("torch", "rows", (Shard(0), Replicate())),
        ("torch", "columns", (Replicate(), Shard(1))),
        ("transformers", "rows", (Shard(0), Replicate())),
        ("transformers", "columns", (Replicate(), Shard(0))),
    ):
        cut = Cut(here, name)
        params, shards = subjects(here, cut)
        set_gradients(here, params, shards, cut, 0)
        optimizer = optim.Adafactor(shards, variant=variant)
        optimizer.step()
        state = list(optimizer.state[shards[0]].values())
        assert tuple(each.placements[0] for each in state[1:]) == placements
        assert sum(local(each).numel() for each in state[1:]) < 300 + 520


def a_phase_takes_one_collective(here):
    for name, collectives in (("rows", 2), ("columns", 2), ("HSDP, one copy", 2), ("copies", 0)):
        cut = Cut(here, name)
        params, shards = subjects(here, cut)
        optimizer = optim.Adafactor([{"params": shards[:1]}, {"params": shards[1:], "lr": 0.1}])
        set_gradients(here, params, shards, cut, 0)
        with CommDebugMode() as counted:  # under which torch operations step
            optimizer.step()
        assert counted.get_total_counts() == collectives, name
        with mock.patch("torch.distributed.all_reduce", wraps=dist.all_reduce) as all_reduce:
            optimizer.step()
        assert all_reduce.call_count == collectives, name


def a_gradient_that_is_refused(here, optimizer, shards):
    grad = shards[0].grad
    shards[0].grad = Cut(here, "copies")(grad.full_tensor())
    with pytest.raises(RuntimeError, match="same mesh and placements"):
        optimizer.step()
    shards[0].grad = grad


CHANGES = {
    "nothing": lambda here, optimizer, shards: None,
    "the learning rate": lambda here, optimizer, shards: optimizer.param_groups[1].update(lr=0.5),
    "an option": lambda here, optimizer, shards: optimizer.param_groups[0].update(d=2.0),
    "a state": lambda here, optimizer, shards: local(optimizer.state[shards[1]]["row_var"]).mul_(2),
    "states": lambda here, optimizer, shards: optimizer.load_state_dict(optimizer.state_dict()),
    "a count": lambda here, optimizer, shards: optimizer.state[shards[0]]["step"].add_(1),
    "gradients of one process elsewhere": lambda here, optimizer, shards: [
        setattr(shard, "grad", shard.grad.clone()) for shard in shards if here.rank == 1
    ],
    "a gradient less": lambda here, optimizer, shards: setattr(shards[2], "grad", None),
    "placements": a_gradient_that_is_refused,
}


def steps_alike_see_what_has_changed(here):
    """A process keeps what it has checked, or checks all again: with the same bits."""
    shapes = ((300, 520), (40, 30), (9, 4, 5), (7,))
    cut = Cut(here, "rows")
    for change, act in CHANGES.items():
        kept = []
        for repeats in (True, False):
            weights = make_weights(shapes, torch.float32)
            shards = [torch.nn.Parameter(cut(weight.to(here.device))) for weight in weights]
            groups = [{"params": shards[:2]}, {"params": shards[2:], "weight_decay": 0.1}]
            optimizer = optim.Adafactor(groups)
            for step in range(5):
                grads = make_gradients(shapes, torch.float32, step)
                for shard, grad in zip(shards, grads, strict=True):
                    if shard.grad is None:
                        shard.grad = torch.zeros_like(shard)
                    local(shard.grad).copy_(local(cut(grad.to(here.device))))
                assert step != 3 or not repeats or optimizer._memory[shards[0]].derived
                if step == 3:
                    act(here, optimizer, shards)
                if not repeats:
                    optimizer._forget_plans()
                optimizer.step()
            states = [optimizer.state[shard] for shard in shards]
            kept.append([*shards, *(value for state in states for value in state.values())])
        for kept_step, long in zip(*kept, strict=True):
            assert_same_bits(local(kept_step).detach(), local(long).detach(), change)


def nothing_has_changed_where_one_process_lacks_a_gradient(here):
    cut = Cut(here, "rows")
    for lost, fused in itertools.product((0, 4), (True, False)):
        params, shards = subjects(here, cut)
        optimizer = optim.Adafactor(shards, fused=fused)
        for step in range(2):
            set_gradients(here, params, shards, cut, step)
            if step == 0:
                optimizer.step()
        kept = [
            (tensor, local(tensor).detach().clone())
            for shard in shards
            for tensor in (shard, *optimizer.state[shard].values())
        ]
        if here.rank == 1:
            shards[lost].grad = None
        with pytest.raises(RuntimeError, match=f"parameter {lost} of group 0 has a gradient in"):
            optimizer.step()
        for tensor, before in kept:
            assert_same_bits(local(tensor).detach(), before, "weights and states")


def other_gradients_are_refused_by_name(here):
    cut = Cut(here, "rows")
    params, shards = subjects(here, cut)
    set_gradients(here, params, shards, cut, 0)
    shards[2].grad = params[2].grad
    optimizer = optim.Adafactor(shards)
    kept = [local(shard).detach().clone() for shard in shards]
    with pytest.raises(RuntimeError, match="same mesh and placements"):
        optimizer.step()
    for shard, before in zip(shards, kept, strict=True):
        assert_same_bits(local(shard).detach(), before, "weight")


def clipping_takes_the_norm_of_all_parts(here):
    for options in ({}, {"max_grad_norm": 0.5}):
        for name in ("rows", "copies"):
            cut = Cut(here, name)
            params, shards = subjects(here, cut)
            set_gradients(here, params, shards, cut, 0)
            arguments = {} if options else {"max_norm": 0.5}
            norms = [
                optim.Adafactor(weights, **options).step(**arguments)
                for weights in (params, shards)
            ]
            if not options:  # the host adds up those of cut weights
                torch.testing.assert_close(norms[1].cpu(), norms[0].cpu(), rtol=1e-5, atol=0)
            for param, shard in zip(params, shards, strict=True):
                assert_close(shard, param, 16, name)


def clipping_sums_parts_natively(here):
    """To the last digits of float64. torch's norm is taken of what no kernel is to read."""
    for name, fused in itertools.product(("rows", "copies"), (None, False)):
        cut = Cut(here, name)
        params, shards = subjects(here, cut)
        set_gradients(here, params, shards, cut, 0)
        grads = [param.grad.double().flatten().tolist() for param in params]
        exact = math.sqrt(math.fsum(value**2 for value in itertools.chain(*grads)))
        optimizer = optim.Adafactor(shards, fused=fused)
        with mock.patch("fusedstep._step.clip._norms", wraps=_norms) as by_torch:
            found = optimizer.step(max_norm=0.5).item()
        assert found == pytest.approx(exact, rel=1e-13), name
        # Copies have plans. No kernel of a GPU reads gradients that have none.
        is_native = fused is None and (name == "copies" or here.device.type == "cpu")
        assert by_torch.called != is_native, (name, fused)
        assert by_torch.call_count <= 2, (name, fused)  # of weights that are cut, and of others


def whole(tensor):
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def adafactor(groups, lr):
    for group in groups:
        group["variant"] = "transformers" if "rounding" in group else "torch"
    return optim.Adafactor(groups, lr=lr)


def states_are_saved_and_resharded(here):
    kept = KEPT[:1] + KEPT[3:4] + KEPT[5:]  # gloo gathers no int16
    for first, second in (*WAYS, ("FSDP2", "FSDP2")):
        begun = Training(here, first, SHAPES, kept, adafactor).step(0, 1)
        resumed = Training(here, second, SHAPES, kept, adafactor)
        with folder_of_both() as folder:
            begun.save(folder)
            resumed.load(folder)
        for weight, twin in zip(begun.weights, resumed.weights, strict=True):
            state = {k: whole(value) for k, value in begun.optimizer.state[weight].items()}
            assert_same_state(resumed.optimizer.state[twin], state, f"{first} to {second}")
            with torch.no_grad():
                twin.copy_(like(whole(weight.detach()), twin))
        resumed.step(2)
        begun.step(2)
        for weight, twin in zip(begun.weights, resumed.weights, strict=True):
            found, expected = whole(twin.detach()), whole(weight.detach())
            torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-6)


WORKS = (
    parts_are_stepped_as_the_whole,
    native_kernels_step_parts,
    parts_are_rounded_at_random,
    states_lie_beside_their_elements,
    a_phase_takes_one_collective,
    steps_alike_see_what_has_changed,
    nothing_has_changed_where_one_process_lacks_a_gradient,
    other_gradients_are_refused_by_name,
    clipping_takes_the_norm_of_all_parts,
    clipping_sums_parts_natively,
    states_are_saved_and_resharded,
)
