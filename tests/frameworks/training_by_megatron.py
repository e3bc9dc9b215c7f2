"""Trains with Megatron-Core itself, by torch's classes and by ours; on the CPU if there is no GPU.

test_megatron.py runs this in a process of its own, where Megatron-Core is installed.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile

import megatron.core.utils
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch.overrides import TorchFunctionMode

from fusedstep import integrations, optim

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

OFFLOADED = {
    "optimizer_cpu_offload": True,
    "overlap_cpu_optimizer_d2h_h2d": True,
    "use_precision_aware_optimizer": True,
}
"""Options of an optimizer on the CPU for each weight, as many as Megatron is told to offload."""

WAYS = ("dp_reshardable", "fully_reshardable")
"""Ways in which Megatron saves states of its distributed optimizer."""


class OnCpu(TorchFunctionMode):
    """Has on the CPU what Megatron has on a GPU; what it copies to the host is told by a mark."""

    KEEPING = (torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.float)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if function in (torch.Tensor.pin_memory, torch.Tensor.cuda) or args[1:2] == ("cuda",):
            return args[0]
        if function == torch.Tensor.is_cuda.__get__:
            return not hasattr(args[0], "is_of_host")
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.")
        is_copied = function is torch.Tensor.cpu
        result = args[0].clone() if is_copied else function(*args, **kwargs)
        if is_copied or (function in self.KEEPING and hasattr(args[0], "is_of_host")):
            result.is_of_host = True
        return result


class Stream:
    """A stream of a GPU that does all at once."""

    def wait_stream(self, other):
        pass

    def record_event(self):
        return self

    def wait(self, stream):
        pass

    def synchronize(self):
        pass


def without_a_gpu():
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *device: None
    torch.cuda.Stream = torch.cuda.current_stream = Stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    return OnCpu()


class Net(MegatronModule):
    def __init__(self, config):
        super().__init__(config)
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(8, 16), torch.nn.Linear(16, 2)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def make(name, *, is_distributed, **options):
    """A model and its optimizer: of float32, or of bfloat16 if the optimizer is distributed."""
    options |= {"bf16": is_distributed, "use_distributed_optimizer": is_distributed}
    shape = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    config = TransformerConfig(**shape, bf16=is_distributed)
    net = Net(config).to(DEVICE)
    net = Float16Module(config, net) if is_distributed else net
    ways = DistributedDataParallelConfig(use_distributed_optimizer=is_distributed)
    model = DistributedDataParallel(config, ways, net)
    config = OptimizerConfig(optimizer=name, lr=1e-2, weight_decay=0.1, clip_grad=0.0, **options)
    (optimizer,) = get_megatron_optimizer(config, [model]).chained_optimizers
    return model, optimizer


def train(model, optimizer, seed):
    """Takes three steps; returns copies of the weights."""
    torch.manual_seed(seed)
    for _ in range(3):
        x = torch.randn(4, 8).to(DEVICE)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        model.finish_grad_sync()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def dictionary(model, optimizer, way, is_loading):
    net = model.module.module
    states = net.sharded_state_dict()
    how = {"distrib_optim_sharding_type": way}
    saved = optimizer.sharded_state_dict(states, is_loading=is_loading, metadata=how)
    return {"model": states, "optimizer": saved}


def resumed(way, **options):
    """The weights of six steps, and those of three that go on from a checkpoint of the others."""
    model, optimizer = make("adam", is_distributed=True, **options)
    train(model, optimizer, 1)
    with tempfile.TemporaryDirectory() as folder:
        dist_checkpointing.save(dictionary(model, optimizer, way, False), folder)
        expected = train(model, optimizer, 2)
        model, optimizer = make("adam", is_distributed=True, **options)
        found = dist_checkpointing.load(dictionary(model, optimizer, way, True), folder)
    model.module.module.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    return expected, train(model, optimizer, 2), optimizer.optimizer


def by_ours(function, *args, **options):
    integrations.megatron.register()
    try:
        return function(*args, **options)
    finally:
        integrations.megatron.unregister()


def first_weights(name, **options):
    model, optimizer = make(name, **options)
    return train(model, optimizer, 1), optimizer.optimizer


def same(found, expected, **tolerance):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def has_transformer_engine():
    """Has Megatron take states as Transformer Engine's class has them: counts are in groups."""
    megatron.core.utils.get_te_version = lambda: megatron.core.utils.PkgVersion("2.1.0")
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True


def main():
    for name, cls in (("adam", optim.Adam), ("sgd", optim.SGD)):
        expected, _ = first_weights(name, is_distributed=False)
        found, optimizer = by_ours(first_weights, name, is_distributed=False)
        assert isinstance(optimizer, cls), type(optimizer)
        same(found, expected)
    expected, _ = first_weights("adam", is_distributed=True)
    has_transformer_engine()
    for way in WAYS:
        found, again, optimizer = by_ours(resumed, way)
        assert isinstance(optimizer, optim.Adam), type(optimizer)
        same(again, found, rtol=0, atol=0)
    found, _ = by_ours(first_weights, "adam", is_distributed=True)
    same(found, expected)
    for fraction in (0.5, 1.0):
        options = OFFLOADED | {"optimizer_offload_fraction": fraction}
        expected, _ = first_weights("adam", is_distributed=True, **options)
        found, optimizer = by_ours(first_weights, "adam", is_distributed=True, **options)
        made = optimizer.sub_optimizers
        assert len(made) == (3 if fraction == 0.5 else 4), made
        assert all(isinstance(each, optim.Adam) for each in made), made
        same(found, expected, rtol=0.016, atol=1e-3)  # bfloat16; masters differ in their last bits
        found, again, optimizer = by_ours(resumed, "dp_reshardable", **options)
        same(again, found, rtol=0, atol=0)
        assert {int(state["step"]) for state in optimizer.state.values()} == {6}
    print("trained")


if __name__ == "__main__":
    mode = contextlib.nullcontext() if DEVICE == "cuda" else without_a_gpu()
    backend = "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    parallel_state.initialize_model_parallel(1, 1)
    with mode:
        main()
    sys.stdout.flush()
