"""Works of two processes with shards of weights whose second moments are factored: Adafactor."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from codes_of_shards import WAYS, Training, assert_same_state, like, spread
from fusedstep import optim
from fusedstep.optim._dtensor import is_dtensor, local
from stepping import as_parameters, assert_same_bits, make_gradients, make_weights
from two_processes import folder_of_both

#: A matrix, one with fewer rows than processes, stacks of matrices, a vector, and a number of it.
SHAPES = ((300, 520), (1, 300), (9, 4, 5), (3, 4, 5, 6), (7,), (1,))

OPTIONS = (
    {},
    {"weight_decay": 0.1, "d": 1.5, "maximize": True, "eps": (0.3, 2.0)},
    {"variant": "transformers"},
    {"beta1": 0.8, "warmup_init": True, "weight_decay": 0.1, "clip_threshold": 0.5},
)

#: The mesh of two processes, and the placements of a weight of so many dimensions.
CUTS = {
    "rows": ((2,), lambda dims: [Shard(0)]),
    "columns": ((2,), lambda dims: [Shard(dims - 1)]),
    "the last but one": ((2,), lambda dims: [Shard(max(dims - 2, 0))]),
    "copies": ((2,), lambda dims: [Replicate()]),
    "HSDP, one copy": ((1, 2), lambda dims: [Replicate(), Shard(0)]),
    "HSDP, two copies": ((2, 1), lambda dims: [Replicate(), Shard(0)]),
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


class Cut:
    """Tensors spread over both processes in one way."""

    def __init__(self, here, name):
        sizes, self._placements = CUTS[name]
        self._mesh = init_device_mesh(here.device.type, sizes)

    def __call__(self, tensor):
        return spread(tensor, self._mesh, self._placements(tensor.dim()))


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
    whole = whole.detach()
    found = found.detach().full_tensor()
    assert found.shape == whole.shape, what
    most = units * torch.finfo(found.dtype).eps * whole.abs().max().item()
    torch.testing.assert_close(found, whole, rtol=0, atol=most, msg=lambda text: f"{what}: {text}")


def parts_are_stepped_as_the_whole(here):
    for number, name in enumerate(CUTS):
        cut = Cut(here, name)
        for place, (dtype, kept) in enumerate(KEPT):
            turn = (number + place) % len(OPTIONS)
            # Rows and columns have all options, other cuts one with each way to keep a value.
            for options in OPTIONS if place < 2 and number < 2 else OPTIONS[turn : turn + 1]:
                params, shards = subjects(here, cut, dtype)
                ours = optim.Adafactor(params, lr=0.05, **options, **kept)
                theirs = optim.Adafactor(shards, lr=0.05, **options, **kept)
                for step in range(3):
                    set_gradients(here, params, shards, cut, step)
                    versions = [shard._version for shard in shards]
                    ours.step()
                    theirs.step()
                    assert all(v < s._version for v, s in zip(versions, shards, strict=True))
                what = f"{name}, {dtype}, {options}, {kept}"
                for param, shard in zip(params, shards, strict=True):
                    assert_close(shard, param, 1 if dtype is torch.bfloat16 else 32, what)
                    state = theirs.state[shard]
                    assert state.keys() == ours.state[param].keys()
                    for key, value in ours.state[param].items():
                        if key == "step":
                            assert_same_bits(state[key], value, what)
                        elif value.dtype.is_floating_point:
                            # The rest of a 16-bit weight jumps where the weight is rounded.
                            units = 2**17 if key == "compensation" else 32
                            assert_close(state[key], value, units, f"{what}, {key}")


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
        with CommDebugMode() as counted:
            optimizer.step()
        assert counted.get_total_counts() == collectives, name


def nothing_has_changed_where_one_process_lacks_a_gradient(here):
    cut = Cut(here, "rows")
    for lost in (0, 4):
        params, shards = subjects(here, cut)
        optimizer = optim.Adafactor(shards)
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
            if not options:
                torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0)
            for param, shard in zip(params, shards, strict=True):
                assert_close(shard, param, 16, name)


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
    states_lie_beside_their_elements,
    a_phase_takes_one_collective,
    nothing_has_changed_where_one_process_lacks_a_gradient,
    other_gradients_are_refused_by_name,
    clipping_takes_the_norm_of_all_parts,
    states_are_saved_and_resharded,
)
