"""Works of two processes together: shards of DTensor weights, gradients in DDP's buckets."""

import contextlib
import copy
import functools
import multiprocessing
import os
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fusedstep
from fusedstep import optim
from fusedstep._native import ops
from fusedstep._sharding.dtensor import is_dtensor, local, spread_like
from fusedstep.optim import lamb
from reference.codes import MAPS
from support.cases import FAMILIES, KINDS, PLAIN
from support.foreign import torchao_state
from support.stepping import as_parameters, assert_same_bits, make_gradients, make_weights

SHAPES = ((9, 4), (5,), (1, 3), (40, 50))
PROCESSES = 2
ELEMENTWISE = next(case for case in PLAIN if case.elementwise)


#: What works import of torch, in seconds: the server of processes has it before it forks them.
IMPORTED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.debug",
)


@functools.cache
def mesh_of(device_type, sizes=(PROCESSES,)):
    """One for all works: each new one of two dimensions has groups, threads and connections."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, sizes)


def shards_of(whole, mesh, placements):
    """Made of what each process has, without communication: that is slow, and knows no float8."""
    from torch.distributed.tensor import distribute_tensor

    spread = distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)
    spread._local_tensor = spread._local_tensor.clone()  # it has been a view of the whole
    return spread


def like(whole, other):
    """A tensor spread as another one is, if that is."""
    return shards_of(whole, other.device_mesh, other.placements) if is_dtensor(other) else whole


def part_of(whole, shards):
    """Returns what this process has of a tensor that is spread as the shards are.

    They have its shape.
    """
    assert shards.shape == whole.shape
    return local(like(whole.detach(), shards)).to(local(shards).device)  # offloaded from the mesh


class Process(NamedTuple):
    """One of them, and the device that its part of everything is on."""

    rank: int
    device: torch.device

    def mesh(self, *sizes):
        return mesh_of(self.device.type, sizes or (PROCESSES,))

    def spread(self, tensor, placement):
        return shards_of(tensor.to(self.device), self.mesh(), [placement])

    def subjects(self, placement):
        """Parameters, and the same spread over the processes; all with gradients."""
        weights = [weight.to(self.device) for weight in make_weights(SHAPES, torch.float32)]
        spread = [torch.nn.Parameter(self.spread(weight, placement)) for weight in weights]
        params = as_parameters(weights)
        self.set_gradients(params, spread, placement, step=1)
        return params, spread

    def set_gradients(self, params, spread, placement, step):
        gradients = make_gradients(SHAPES, torch.float32, step)
        for param, shards, gradient in zip(params, spread, gradients, strict=True):
            param.grad = gradient.to(self.device)
            shards.grad = self.spread(gradient, placement)


Work = Callable[[Process], None]


@contextlib.contextmanager
def folder_of_both():
    """Yields a folder that both processes know, and removes it when both are done."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    yield Path(names[0])
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(names[0])


def shards_are_stepped_as_the_whole(here):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    for case in KINDS:
        for placement in (Shard(0), Replicate()):
            params, spread = here.subjects(placement)
            ours = case.build(params)
            theirs = case.build(spread)
            for step in (1, 2):
                here.set_gradients(params, spread, placement, step)
                ours.step()
                theirs.step()
            assert theirs._plans
            what = f"{case}, {placement}"
            for param, shards in zip(params, spread, strict=True):
                state = {name: theirs.state[shards][name] for name in case.states}
                assert all(isinstance(value, DTensor) for value in state.values())
                for name, value in state.items():
                    assert value.placements == shards.placements
                    assert_same_bits(local(value), part_of(ours.state[param][name], value), what)
                found, expected = local(shards).detach(), part_of(param, shards)
                if case.elementwise or placement == Replicate():
                    assert_same_bits(found, expected, what)
                else:  # but for the last bit of a sum in double
                    torch.testing.assert_close(found, expected, rtol=2e-7, atol=2e-7)


def steps_of_shards_repeat_the_last_one(here):
    """Past Python, with what has changed since noticed."""
    from torch.distributed.tensor import Replicate, Shard

    for case in KINDS:
        for placement in (Shard(0), Replicate()):
            params, spread = here.subjects(placement)
            ours, theirs = case.build(params), case.build(spread)
            answers = {ours: [], theirs: []}
            with noted_repeats(answers):
                for step in range(1, 5):
                    here.set_gradients(params, spread, placement, step)
                    versions = [shards._version for shards in spread]
                    for optimizer in (ours, theirs):
                        optimizer.param_groups[0]["lr"] *= 0.5
                        optimizer.step()
                    assert all(v < s._version for v, s in zip(versions, spread, strict=True))
            # A step that adds up norms has more to do.
            repeats = case.elementwise or placement == Replicate()
            assert answers[theirs] == (answers[ours] if repeats else []), f"{case}, {placement}"
            assert case is not ELEMENTWISE or answers[theirs] == [True] * 3
            for param, shards in zip(params, spread, strict=True):
                found, expected = local(shards).detach(), part_of(param, shards)
                if repeats:
                    assert_same_bits(found, expected, f"{case}, {placement}")
                else:
                    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
            kept = [shards.to_local().detach().clone() for shards in spread]
            other = Replicate() if placement == Shard(0) else Shard(0)
            spread[-1].grad = here.spread(params[-1].grad, other)
            with pytest.raises(RuntimeError, match="same mesh and placements"):
                theirs.step()
            for shards, before in zip(spread, kept, strict=True):
                assert_same_bits(shards.to_local().detach(), before, f"{case}, {placement}")


@contextlib.contextmanager
def noted_repeats(answers):
    """Adds what ``repeat`` answers to the lists of optimizers."""
    repeat = ops.bind.repeat

    def noting(optimizer, last):
        answers[optimizer].append(repeat(optimizer, last))
        return answers[optimizer][-1]

    with mock.patch.object(ops.bind, "repeat", noting):
        yield


def shards_on_their_way_are_waited_for(here):
    from torch.distributed._functional_collectives import all_reduce
    from torch.distributed.tensor import DTensor, Shard

    params, spread = here.subjects(Shard(0))
    param, shards = params[-1], spread[-1]  # of which each process has as much
    ours, theirs = ELEMENTWISE.build([param]), ELEMENTWISE.build([shards])
    for step in (1, 2, 3):
        here.set_gradients(params, spread, Shard(0), step)
        mesh, placements = shards.device_mesh, shards.placements
        part = all_reduce(shards.grad.to_local(), "sum", dist.group.WORLD)
        assert type(part) is not torch.Tensor
        param.grad = DTensor.from_local(part.wait(), mesh, placements).full_tensor()
        part = all_reduce(shards.grad.to_local(), "sum", dist.group.WORLD)
        shards.grad = DTensor.from_local(part, mesh, placements)
        ours.step()
        theirs.step()
        assert_same_bits(local(shards).detach(), part_of(param, shards), f"step {step}")


def a_compiled_step_leaves_shards_to_the_step(here):
    from torch.distributed.tensor import Shard

    params, spread = here.subjects(Shard(0))
    optim.Adam(params).step()
    torch.compile(optim.Adam(spread, fused=True).step, backend="aot_eager")()
    for param, shards in zip(params, spread, strict=True):
        assert_same_bits(local(shards).detach(), part_of(param, shards), "weight")


def each_process_verifies_its_shards(here):
    from torch.distributed.tensor import Replicate, Shard

    for case in FAMILIES:
        placement = Shard(0) if case.elementwise else Replicate()
        _, spread = here.subjects(placement)
        report = fusedstep.verify(case.build(spread), lambda: None, steps=2)
        assert report.ok, report

    def spoil(optimizer, args, kwargs):
        if here.rank == 1:
            spread[3]._local_tensor[7, 8] += 1

    optimizer = case.build(spread)
    report = fusedstep.verify(optimizer, steps=1)
    # Before the comparison: the newest hook that asks for the first place has it.
    handle = optimizer.register_step_post_hook(spoil)
    handle.hooks_dict_ref().move_to_end(handle.id, last=False)
    optimizer.step()
    assert report.ok == (here.rank == 0), report


def states_of_shards_are_loaded(here):
    from torch.distributed.tensor import Shard

    for case in KINDS:
        _, spread = here.subjects(Shard(0))
        optimizer = case.build(spread, fused=None)
        optimizer.step()
        twins = [torch.nn.Parameter(param.detach().clone()) for param in spread]
        for param, twin in zip(spread, twins, strict=True):
            twin.grad = param.grad.clone()
        loaded = case.build(twins, fused=None)
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()
        loaded.step()
        for param, twin in zip(spread, twins, strict=True):
            assert_same_bits(param.to_local(), twin.to_local(), str(case))


def codes_of_shards_are_loaded(here):
    from torch.distributed.tensor import Shard

    for kind in ("int8", "int4", "fp8"):
        weights = [
            torch.nn.Parameter(here.spread(make_weights([(90, 80)], torch.float32)[0], Shard(0)))
            for _ in range(2)
        ]
        optimizer, other = (optim.AdamW([weight], state_dtype=kind) for weight in weights)
        for step in (1, 2):
            weights[0].grad = here.spread(torch.full((90, 80), 0.5 * step), Shard(0))
            optimizer.step()
        with torch.no_grad():
            weights[1].copy_(weights[0])
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for weight, each in zip(weights, (optimizer, other), strict=True):
            weight.grad = here.spread(torch.full((90, 80), -0.25), Shard(0))
            each.step()
        assert_same_bits(*(weight.to_local() for weight in weights), kind)


def codes_of_torchao_stay_with_their_shards(here):
    from torch.distributed.tensor import Shard

    generator = torch.Generator().manual_seed(here.rank)
    weight = torch.nn.Parameter(here.spread(torch.ones(128, 80), Shard(0)))
    for kind, block in (("int8", 256), ("int4", 128), ("fp8", 256)):
        state = {"step": torch.tensor(3.0)}
        for name in ("exp_avg", "exp_avg_sq"):
            numbers = torch.rand(64, 80, generator=generator).to(here.device)
            of_codes = MAPS[kind, name == "exp_avg"][0].to(here.device)
            state[name] = spread_like(weight, torchao_state(numbers, kind, of_codes, block))
        group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "params": [0]}
        optimizer = optim.AdamW([weight], state_dtype=kind)
        fusedstep.import_state_dict(optimizer, {"state": {0: state}, "param_groups": [group]})
        for name in ("exp_avg", "exp_avg_sq"):
            codes = local(optimizer.state[weight][name])
            assert_same_bits(codes, local(state[name]).codes.view_as(codes), name)
        weight.grad = here.spread(torch.ones(128, 80), Shard(0))
        optimizer.step()


def max_norm_is_that_of_all_shards(here):
    from torch.distributed.tensor import Replicate, Shard

    for case in KINDS:
        for placement in (Shard(0), Replicate()):
            params, spread = here.subjects(placement)
            expected = case.build(params, fused=False).step(max_norm=0.5)
            norm = case.build(spread, fused=None).step(max_norm=0.5, zero_grad=True)
            # But for the order of a sum in double.
            torch.testing.assert_close(norm.cpu(), expected, rtol=1e-12, atol=0)
            for param, shards in zip(params, spread, strict=True):
                found, expected = local(shards).detach(), part_of(param, shards)
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
                assert not local(shards.grad).any()


def max_norm_takes_one_collective(here):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    for placement, collectives in ((Shard(0), 1), (Replicate(), 0)):
        _, spread = here.subjects(placement)
        optimizer = ELEMENTWISE.build([{"params": spread[:2]}, {"params": spread[2:], "lr": 0.1}])
        with CommDebugMode() as counted:
            optimizer.step(max_norm=0.5)
        assert counted.get_total_counts() == collectives


def unfused_steps_take_shards(here):
    from torch.distributed.tensor import Replicate, Shard

    for case in PLAIN:
        for placement in (Shard(0), Replicate()):
            params, spread = here.subjects(placement)
            case.build(params, fused=False).step()
            case.build(spread, fused=False).step()
            for param, shards in zip(params, spread, strict=True):
                found, expected = local(shards).detach(), part_of(param, shards)
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def shards_whose_step_finds_no_memory_are_as_before(here):
    """The old values are written back over those that the step has written by then."""
    from torch.distributed.tensor import Shard

    _, spread = here.subjects(Shard(0))
    params = [torch.nn.Parameter(shards.detach().bfloat16()) for shards in spread]
    for param, shards in zip(params, spread, strict=True):
        param.grad = shards.grad.bfloat16()
    optimizer = ELEMENTWISE.build(params[:1], fused=False, master_weights=True)
    optimizer.step()

    def values():
        (state,) = optimizer.state.values()
        return [local(value).detach().clone() for value in (params[0], *state.values())]

    before, seen = values(), []

    def finds_no_memory(*_):
        seen.append(values())
        raise MemoryError

    fails = mock.patch.object(optimizer._store, "encode", finds_no_memory)
    with fails, pytest.raises(MemoryError):
        optimizer.step()
    assert not torch.equal(seen[0][0], before[0])
    for found, expected in zip(values(), before, strict=True):
        assert_same_bits(found, expected, "shard")


def norms_of_a_step_take_one_collective(here):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    by_torch = {"fused": False}
    for placement, collectives, of_group in (
        (Shard(0), 1, ({}, {})),
        (Shard(0), 1, ({}, by_torch)),
        # Processes need not step a group alike.
        (Shard(0), 1, (by_torch, {}) if here.rank else (by_torch, by_torch)),
        (Replicate(), 0, (by_torch, by_torch)),
    ):
        params, spread = here.subjects(placement)
        optim.Lamb(params, lr=0.1).step()
        both = zip((spread[:2], spread[2:]), of_group, strict=True)
        optimizer = optim.Lamb([{"params": some} | own for some, own in both], lr=0.1)
        with CommDebugMode() as counted:
            optimizer.step()
        assert counted.get_total_counts() == collectives
        for param, shards in zip(params, spread, strict=True):
            found, expected = local(shards).detach(), part_of(param, shards)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def max_norm_counts_what_all_processes_have_once(here):
    """In one group: shards, copies, and a weight that is no DTensor."""
    from torch.distributed.tensor import Replicate, Shard

    params, spread = here.subjects(Shard(0))
    spread[1:3] = here.subjects(Replicate())[1][1:3]
    (spread[3],) = as_parameters(params[3:])
    spread[3].grad = params[3].grad.clone()
    optimizer, twin = ELEMENTWISE.build(params), ELEMENTWISE.build(spread)
    expected, norm = optimizer.step(max_norm=0.5), twin.step(max_norm=0.5)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    for param, shards in zip(params[:3], spread[:3], strict=True):
        torch.testing.assert_close(local(shards).detach(), part_of(param, shards))
    torch.testing.assert_close(spread[3], params[3])


def weights_of_all_kinds_are_stepped_together(here):
    """Steps weights of two meshes and two dtypes, copies and plain ones, in one optimizer."""
    from torch.distributed.tensor import Replicate, Shard

    line, grid = here.mesh(), here.mesh(2, 1)
    kinds = [
        (torch.float32, line, [Shard(0)]),
        (torch.float32, grid, [Shard(1), Replicate()]),
        (torch.bfloat16, line, [Shard(0)]),
        (torch.bfloat16, line, [Replicate()]),
        (torch.float32, None, None),
        (torch.float32, line, [Shard(1)]),
    ]

    def of_kind(tensor, kind):
        dtype, mesh, placements = kind
        tensor = tensor.to(here.device, dtype, copy=True)
        return tensor if mesh is None else shards_of(tensor, mesh, placements)

    for build, options in (
        (optim.AdamW, {"max_norm": 0.5}),
        (optim.Lamb, {"max_norm": 0.5}),
        (functools.partial(optim.Lamb, variant="nvlamb", max_grad_norm=0.5), {}),
        (functools.partial(optim.Adan, max_grad_norm=0.5), {}),
        (optim.Adafactor, {"max_norm": 0.5}),
    ):
        weights = make_weights(((40, 50),) * len(kinds), torch.float32)
        wholes = [
            torch.nn.Parameter(w.to(here.device, k[0])) for w, k in zip(weights, kinds, strict=True)
        ]
        spread = [
            torch.nn.Parameter(of_kind(w.detach(), k)) for w, k in zip(wholes, kinds, strict=True)
        ]
        ours, theirs = build(wholes, lr=0.01), build(spread, lr=0.01)
        for step in range(3):
            grads = make_gradients(((40, 50),) * len(kinds), torch.float32, step)
            for whole, shard, grad, kind in zip(wholes, spread, grads, kinds, strict=True):
                whole.grad = grad.to(here.device, kind[0])
                shard.grad = of_kind(grad, kind)
            expected, norm = ours.step(**options), theirs.step(**options)
            if options:
                torch.testing.assert_close(norm.cpu(), expected.cpu(), rtol=1e-6, atol=0)
        for whole, shard, (dtype, *_) in zip(wholes, spread, kinds, strict=True):
            found, expected = local(shard).detach(), part_of(whole, shard)
            bound = 1e-5 if dtype is torch.float32 else 1e-2
            torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


def steps_with_norms_are_those_of_the_whole(here):
    """LAMB and Adafactor, over several meshes."""
    from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

    # Who has which part of a mesh of [1, 0] is torch's affair: it spreads and gathers them itself.
    meshes = here.mesh(), DeviceMesh(here.device.type, [1, 0])
    kinds = [(mesh, placements) for mesh in meshes for placements in ([Shard(0)], [Shard(1)])]
    kinds += [
        (here.mesh(1, 2), [Replicate(), Shard(0)]),
        (here.mesh(2, 1), [Shard(1), Replicate()]),
    ]
    builds = [functools.partial(optim.Lamb, variant=variant) for variant in lamb.VARIANTS]
    for build in (*builds, optim.Adafactor):
        (weight,) = make_weights([(40, 50)], torch.float32)
        whole = torch.nn.Parameter(weight.to(here.device))
        shards = [
            torch.nn.Parameter(distribute_tensor(whole.detach().clone(), *kind)) for kind in kinds
        ]
        optimizers = [build([each], lr=0.01, weight_decay=0.1) for each in (whole, *shards)]
        for step in range(3):
            (grad,) = make_gradients([(40, 50)], torch.float32, step)
            whole.grad = grad.to(here.device)
            for shard in shards:
                shard.grad = distribute_tensor(whole.grad, shard.device_mesh, shard.placements)
            for optimizer in optimizers:
                optimizer.step()
        found = [shard.detach().full_tensor() for shard in shards]
        for each, kind in zip(found, kinds, strict=True):
            what = functools.partial("{}, {}: {}".format, build, kind)
            torch.testing.assert_close(each, whole.detach(), rtol=2e-6, atol=1e-7, msg=what)
        for forth, back in zip(found[:2], found[2:4], strict=True):
            assert_same_bits(forth, back, f"{build}")


def steps_with_norms_do_not_depend_on_who_has_which_part(here):
    """A mesh of [1, 0] would not show that: torch gives parts to ranks in rising order."""
    from torch.distributed.tensor import DTensor, Shard

    mesh = here.mesh()
    weights = make_weights([(40, 50)], torch.float32)
    builds = [functools.partial(optim.Lamb, variant=variant) for variant in lamb.VARIANTS]
    clips = optim.Adafactor, {"max_norm": 0.5}
    for build, arguments in (*((each, {}) for each in (*builds, optim.Adafactor)), clips):
        found = []
        for order in (0, 1), (1, 0):

            def part_of(whole, order=order):
                part = whole.detach().chunk(PROCESSES)[order[here.rank]].to(here.device, copy=True)
                return DTensor.from_local(part, mesh, [Shard(0)])

            weight = torch.nn.Parameter(part_of(weights[0]))
            optimizer = build([weight], lr=0.01, weight_decay=0.1)
            for step in range(3):
                (grad,) = make_gradients([(40, 50)], torch.float32, step)
                weight.grad = part_of(grad)
                optimizer.step(**arguments)
            parts = weight.detach().full_tensor().chunk(PROCESSES)
            found.append([parts[place] for place in order])
        for forth, back in zip(*found, strict=True):
            assert_same_bits(forth, back, f"{build}")


def an_optimizers_own_max_norm_is_that_of_all_shards(here):
    from torch.distributed.tensor import Replicate, Shard

    for placement in (Shard(0), Replicate()):
        params, spread = here.subjects(placement)
        optim.Lamb(params, fused=False, variant="nvlamb", max_grad_norm=0.5).step()
        optim.Lamb(spread, variant="nvlamb", max_grad_norm=0.5).step()
        for param, shards in zip(params, spread, strict=True):
            found, expected = local(shards).detach(), part_of(param, shards)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def what_cannot_be_right_is_refused_by_name(here):
    from torch.distributed.tensor import Replicate, Shard

    for case in KINDS:
        params, spread = here.subjects(Shard(0))
        optimizer = case.build(spread)
        others = [here.spread(param.grad, Replicate()) for param in params]
        before = [weight.to_local().detach().clone() for weight in spread]
        for weight, other in zip(spread, others, strict=True):
            weight.grad = other
        with pytest.raises(RuntimeError, match="same mesh and placements"):
            optimizer.step()
        for weight, kept in zip(spread, before, strict=True):
            assert_same_bits(weight.to_local().detach(), kept, str(case))


def gradients_in_the_buckets_of_ddp(here):
    for case in KINDS:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 2)
        ).to(here.device)
        twin = copy.deepcopy(model)
        parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer, reference = case.build(model.parameters()), case.build(twin.parameters())
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(PROCESSES, 8, 20, generator=generator).to(here.device)
            parallel(inputs[here.rank]).square().mean().backward()
            sum(twin(each).square().mean() for each in inputs).div(PROCESSES).backward()
            # The same gradients to the bit: how they are summed is not the optimizer's affair.
            for param, other in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(param.grad, other.grad)
                other.grad.copy_(param.grad)
            buckets = [param.grad.data_ptr() for param in model.parameters()]
            optimizer.step(zero_grad=True)
            reference.step()
            reference.zero_grad()
            for param, other in zip(model.parameters(), twin.parameters(), strict=True):
                assert_same_bits(param.detach(), other.detach(), f"{case}, step {step}")
            assert buckets == [param.grad.data_ptr() for param in model.parameters()]


def offloaded_shards_are_stepped_where_they_are(here):
    """With FSDP2's offloading the mesh is one of GPUs, and weights and gradients are on the CPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    mesh = here.mesh()
    policy = CPUOffloadPolicy(pin_memory=here.device.type == "cuda")
    for case in KINDS:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 2))
        twin = copy.deepcopy(model)
        fully_shard(model, mesh=mesh, offload_policy=policy)
        optimizer = case.build(model.parameters(), fused=None)
        reference = case.build(twin.parameters())
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(8, 20, generator=generator)
            model(inputs.to(here.device)).square().mean().backward()
            twin(inputs).square().mean().backward()
            optimizer.step(max_norm=0.5, zero_grad=True)
            reference.step(max_norm=0.5, zero_grad=True)
        assert optimizer._plans
        for weight, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert weight.to_local().is_cpu
            for name in case.states:
                state = optimizer.state[weight][name]
                assert state.to_local().is_cpu
                assert state.placements == weight.placements
                assert state.shape == weight.shape
            found, expected = local(weight).detach(), part_of(other, weight)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def a_state_is_the_memory_of_its_shard(here):
    from torch.distributed.tensor import Shard

    from fusedstep._sharding.dtensor import spread_like

    _, spread = here.subjects(Shard(0))
    for weight in spread:
        for dtype in (torch.float32, torch.float64):
            shard = torch.zeros(weight.to_local().shape, dtype=dtype, device="meta")
            state = spread_like(weight, shard)  # whatever the device of the mesh
            assert state._local_tensor is shard
            assert (state.shape, state.stride()) == (weight.shape, weight.stride())
            assert (state.dtype, state.placements) == (dtype, weight.placements)


def warnings_of(act, text):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(each.message) for each in caught if text in str(each.message)]


def flat_parameters_are_warned_of(here):
    from torch.distributed.fsdp import FullyShardedDataParallel

    for use_orig_params in (False, True):
        lamb._warn.cache_clear()
        model = FullyShardedDataParallel(
            torch.nn.Linear(4, 2).to(here.device),
            use_orig_params=use_orig_params,
            device_id=here.device,
        )
        params = list(model.parameters())
        text = "parts of a flat parameter"
        assert not warnings_of(lambda params=params: optim.Adam(params), text)
        assert len(warnings_of(lambda params=params: optim.Lamb(params), text)) == 1


WORKS = (
    shards_are_stepped_as_the_whole,
    steps_of_shards_repeat_the_last_one,
    shards_on_their_way_are_waited_for,
    a_compiled_step_leaves_shards_to_the_step,
    each_process_verifies_its_shards,
    states_of_shards_are_loaded,
    codes_of_shards_are_loaded,
    codes_of_torchao_stay_with_their_shards,
    max_norm_is_that_of_all_shards,
    max_norm_takes_one_collective,
    norms_of_a_step_take_one_collective,
    unfused_steps_take_shards,
    max_norm_counts_what_all_processes_have_once,
    weights_of_all_kinds_are_stepped_together,
    steps_with_norms_are_those_of_the_whole,
    steps_with_norms_do_not_depend_on_who_has_which_part,
    an_optimizers_own_max_norm_is_that_of_all_shards,
    what_cannot_be_right_is_refused_by_name,
    gradients_in_the_buckets_of_ddp,
    offloaded_shards_are_stepped_where_they_are,
    a_state_is_the_memory_of_its_shard,
    flat_parameters_are_warned_of,
)

#: On devices nothing is kept to be written back.
ON_THE_CPU = (shards_whose_step_finds_no_memory_are_as_before,)


def _process(
    rank: int,
    processes: int,
    backend: str,
    folder: str,
    works: list[Work],
    prepare: Callable[[], None],
    environment: dict[str, str],
) -> None:
    """Does one work after another, together with the other processes."""
    os.environ.update(environment)  # which that of the server may not be
    prepare()
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ["NCCL_NVLS_ENABLE"] = "0"  # NVLink multicast: nothing for tests to set up
    dist.init_process_group(
        backend,
        f"file://{folder}/meeting",
        rank=rank,
        world_size=processes,
        device_id=device if device.type == "cuda" else None,
    )
    for work in works:
        try:
            work(Process(rank, device))
            dist.barrier()
        except BaseException:
            text = f"process {rank}:\n{traceback.format_exc()}"
            Path(folder, f"{work.__name__}.failed.{rank}").write_text(text)
            # No other process is left waiting: all are ended when this one ends so.
            os._exit(1)
        Path(folder, f"{work.__name__}.done").touch()
    # Not by way of destructors: gloo's threads now and then outlive their group there, and abort.
    os._exit(0)


def server_of_processes() -> multiprocessing.context.BaseContext:
    """Forks processes that have imported torch: it takes seconds, once for all of a test process.

    They have the environment of the first of them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def nothing() -> None:
    """Needs no preparation."""


def failures_by_name(
    backend: str,
    works: Iterable[Work] = WORKS,
    prepare: Callable[[], None] = nothing,
    processes: int = PROCESSES,
) -> dict[str, str]:
    """Runs the works one after another in so many processes.

    Returns the failures, by the name of the work. After a failure there are new processes for the
    works that are left. Each begins with ``prepare()``.
    """
    # A process cannot use CUDA if it has been forked from one that has asked for devices.
    method = "spawn" if backend == "nccl" else server_of_processes().get_start_method()
    left, found = list(works), {}
    while left:
        with tempfile.TemporaryDirectory() as folder:  # a file to meet at: a free port may be taken
            died = ""
            try:
                args = processes, backend, folder, left, prepare, dict(os.environ)
                mp.start_processes(_process, args, processes, start_method=method)
            except mp.ProcessExitedException as error:
                died = str(error)
            left = [work for work in left if not Path(folder, f"{work.__name__}.done").exists()]
            if left:
                name = left.pop(0).__name__
                texts = [path.read_text() for path in Path(folder).glob(f"{name}.failed.*")]
                found[name] = "".join(texts) or died
    return found
