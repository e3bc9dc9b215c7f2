"""Steps of several processes: shards of DTensor weights, and gradients in the buckets of DDP."""

import copy
import os
import tempfile
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fusedstep
from cases import CASES
from fusedstep import optim
from stepping import as_parameters, assert_same_bits, make_gradients, make_weights

SHAPES = ((9, 4), (5,), (1, 3), (40, 50))
PROCESSES = 2


def _process(rank, meeting, works, finished, failures):
    """Does work(rank) for each of the works, together with the other process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=PROCESSES)
    for work in works:
        try:
            work(rank)
            dist.barrier()
        except BaseException:
            failures.put((work.__name__, f"process {rank}:\n{traceback.format_exc()}"))
            break
        if rank == 0:
            finished.put(work.__name__)
    # Not by way of destructors: gloo's threads now and then outlive their group there, and abort.
    os._exit(0)


def _spread(tensors, placement):
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (PROCESSES,))
    return [distribute_tensor(tensor.detach().clone(), mesh, [placement]) for tensor in tensors]


def _subjects(placement):
    """Parameters, and the same spread over the processes; all with gradients."""
    params = as_parameters(make_weights(SHAPES, torch.float32))
    spread = [torch.nn.Parameter(weight) for weight in _spread(params, placement)]
    _set_gradients(params, spread, placement, step=1)
    return params, spread


def _set_gradients(params, spread, placement, step):
    gradients = make_gradients(SHAPES, torch.float32, step)
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    for param, gradient in zip(spread, _spread(gradients, placement), strict=True):
        param.grad = gradient


def shards_are_stepped_as_the_whole(rank):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    for case in CASES:
        for placement in (Shard(0), Replicate()):
            native = case.elementwise or placement == Replicate()
            params, spread = _subjects(placement)
            ours = case.build(params)
            theirs = case.build(spread, fused=True if native else None)
            for step in (1, 2):
                _set_gradients(params, spread, placement, step)
                ours.step()
                theirs.step()
            assert bool(theirs._plans) == native
            what = f"{case}, {placement}"
            for param, shards in zip(params, spread, strict=True):
                whole = shards.detach().full_tensor()
                state = {name: theirs.state[shards][name] for name in case.states}
                assert all(isinstance(value, DTensor) for value in state.values())
                if native:
                    assert_same_bits(whole, param.detach(), what)
                    for name, value in state.items():
                        assert_same_bits(value.full_tensor(), ours.state[param][name], what)
                else:
                    torch.testing.assert_close(whole, param.detach(), rtol=1e-5, atol=1e-6)


def a_compiled_step_leaves_shards_to_the_step(rank):
    from torch.distributed.tensor import Shard

    params, spread = _subjects(Shard(0))
    optim.Adam(params).step()
    torch.compile(optim.Adam(spread, fused=True).step, backend="aot_eager")()
    for param, shards in zip(params, spread, strict=True):
        assert_same_bits(shards.detach().full_tensor(), param.detach(), "weight")


def each_process_verifies_its_shards(rank):
    from torch.distributed.tensor import Replicate, Shard

    for case in CASES:
        placement = Shard(0) if case.elementwise else Replicate()
        _, spread = _subjects(placement)
        report = fusedstep.verify(case.build(spread), lambda: None, steps=2)
        assert report.ok, report

    def spoil(optimizer, args, kwargs):
        if rank == 1:
            spread[3]._local_tensor[7, 8] += 1

    optimizer = case.build(spread)
    report = fusedstep.verify(optimizer, steps=1)
    # Before the comparison: the newest hook that asks for the first place has it.
    handle = optimizer.register_step_post_hook(spoil)
    handle.hooks_dict_ref().move_to_end(handle.id, last=False)
    optimizer.step()
    assert report.ok == (rank == 0), report


def states_of_shards_are_loaded(rank):
    from torch.distributed.tensor import Shard

    for case in CASES:
        _, spread = _subjects(Shard(0))
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


def max_norm_is_that_of_all_shards(rank):
    from torch.distributed.tensor import Replicate, Shard

    for case in CASES:
        for placement in (Shard(0), Replicate()):
            params, spread = _subjects(placement)
            expected = case.build(params, fused=False).step(max_norm=0.5)
            norm = case.build(spread, fused=None).step(max_norm=0.5, zero_grad=True)
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
            for param, shards in zip(params, spread, strict=True):
                whole = shards.detach().full_tensor()
                torch.testing.assert_close(whole, param.detach(), rtol=1e-5, atol=1e-6)
                assert not shards.grad.full_tensor().any()


def an_optimizers_own_max_norm_is_that_of_all_shards(rank):
    from torch.distributed.tensor import Replicate, Shard

    for placement in (Shard(0), Replicate()):
        params, spread = _subjects(placement)
        optim.Lamb(params, fused=False, variant="nvlamb", max_grad_norm=0.5).step()
        optim.Lamb(spread, variant="nvlamb", max_grad_norm=0.5).step()
        for param, shards in zip(params, spread, strict=True):
            whole = shards.detach().full_tensor()
            torch.testing.assert_close(whole, param.detach(), rtol=1e-5, atol=1e-6)


def what_cannot_be_right_is_refused_by_name(rank):
    from torch.distributed.tensor import Replicate, Shard

    for case in CASES:
        params, spread = _subjects(Shard(0))
        if not case.elementwise:
            with pytest.raises(RuntimeError, match="norm of whole params"):
                case.build(spread, fused=True)
            continue
        optimizer = case.build(spread)
        others = _spread([param.grad for param in params], Replicate())
        before = [weight.to_local().detach().clone() for weight in spread]
        for weight, other in zip(spread, others, strict=True):
            weight.grad = other
        with pytest.raises(RuntimeError, match="same mesh and placements"):
            optimizer.step()
        for weight, kept in zip(spread, before, strict=True):
            assert_same_bits(weight.to_local().detach(), kept, str(case))


def gradients_in_the_buckets_of_ddp(rank):
    for case in CASES:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 2)
        )
        twin = copy.deepcopy(model)
        parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer, reference = case.build(model.parameters()), case.build(twin.parameters())
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(PROCESSES, 8, 20, generator=generator)
            parallel(inputs[rank]).square().mean().backward()
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


WORKS = (
    shards_are_stepped_as_the_whole,
    a_compiled_step_leaves_shards_to_the_step,
    each_process_verifies_its_shards,
    states_of_shards_are_loaded,
    max_norm_is_that_of_all_shards,
    an_optimizers_own_max_norm_is_that_of_all_shards,
    what_cannot_be_right_is_refused_by_name,
    gradients_in_the_buckets_of_ddp,
)


@pytest.fixture(scope="module")
def failures_by_name():
    """What went wrong in each of the works, which two processes do one after another.

    Processes take seconds to start. After a failure there are new ones for what is left.
    """
    left, found = WORKS, {}
    while left:
        context = mp.get_context("spawn")
        finished, failures = context.SimpleQueue(), context.SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:  # a file to meet at: a free port may be taken
            mp.spawn(_process, (f"{folder}/meeting", left, finished, failures), nprocs=PROCESSES)
        done = set()
        while not finished.empty():
            done.add(finished.get())
        while not failures.empty():
            name, text = failures.get()
            found[name] = found.get(name, "") + text
        before, left = left, [work for work in left if work.__name__ not in done | found.keys()]
        assert len(left) < len(before)
    return found


@pytest.mark.parametrize("name", [work.__name__ for work in WORKS])
def test_two_processes(failures_by_name, name):
    if name in failures_by_name:
        pytest.fail(failures_by_name[name], pytrace=False)
