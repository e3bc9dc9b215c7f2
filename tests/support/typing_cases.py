"""Types of the public functions, for a type checker: test_typing.py has mypy look at them.

It reports what does not fit, and a comment `type: ignore` where nothing is to be ignored.
"""

from typing import Literal

import torch
from torch import Tensor

import fusedstep
from fusedstep import integrations, optim

parameters = [torch.nn.Parameter(torch.ones(3))]
matrices = [torch.nn.Parameter(torch.ones(3, 3))]


def steps(optimizer: optim.Lamb) -> float:
    optimizer.step()
    optimizer.step(zero_grad="none")
    norm: Tensor = optimizer.step(max_norm=1.0)
    loss: float = optimizer.step(lambda: 1.0)
    loss = optimizer.step(lambda: 1.0, max_norm=1.0, zero_grad=True, error_if_nonfinite=True)
    text: str = optimizer.step(lambda: 1.0)  # type: ignore[assignment]
    return optimizer.step(max_norm=1.0).item() + norm.item() + loss + len(text)


def classes() -> list[optim.FusedOptimizer]:
    """Each with options of its own."""
    low_rank = [{"params": matrices, "rank": 2}]
    return [
        optim.Adadelta(parameters, rho=0.9),
        optim.Adafactor(matrices, lr=None, relative_step=True),
        optim.Adafactor(matrices, eps=(None, 1e-3), beta2_decay=-0.8),
        optim.Adagrad(parameters, lr_decay=0.1),
        optim.Adam(parameters, amsgrad=True, state_dtype="int8"),
        optim.AdamW(parameters, master_weights="split", rounding="stochastic", seed=1),
        optim.Adamax(parameters, betas=(0.9, 0.999)),
        optim.Adan(parameters, betas=(0.98, 0.92, 0.99), no_prox=True),
        optim.ADOPT(parameters, clip_exp=None, decoupled_weight_decay=True),
        optim.APOLLOAdamW(low_rank, proj="random", scale_type="channel", scale_front=True),
        optim.CAME(matrices, eps=(1e-30, 1e-16), betas=(0.9, 0.999, 0.9999), clip_threshold=0.5),
        optim.GaLoreAdafactor(low_rank, svd="exact", update_proj_gap=50),
        optim.GaLoreAdamW(low_rank, svd="exact", update_proj_gap=50, stagger=True),
        optim.Lamb(parameters, variant="apex", min_ratio=0.1),
        optim.Lion(parameters, state_dtype=torch.float32),
        optim.Muon(
            matrices, ns_steps=3, split_heads=1, split_sizes=(2, 1), adjust_lr_fn="original"
        ),
        optim.MuSGD(matrices, 0.01, 0.9, use_muon=True, muon=0.2, ns_dtype=torch.bfloat16),
        optim.NAdam(parameters, momentum_decay=4e-3),
        optim.RAdam(parameters, decoupled_weight_decay=True),
        optim.RMSprop(parameters, centered=True),
        optim.RowWiseAdagrad(matrices, lr=0.1),
        optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
        optim.SparseAdam(parameters, weight_decay=0.1),
    ]


def low_bit() -> tuple[optim.AdamW8bit, optim.SGD, optim.Lamb]:
    """They are classes, for annotations too, with the options of those that they begin with."""
    others: list[optim.FusedOptimizer] = [
        optim.Adagrad8bit(parameters, initial_accumulator_value=0.1),
        optim.Adam8bit(parameters, amsgrad=True),
        optim.Adam4bit(parameters),
        optim.AdamFp8(parameters),
        optim.AdamW4bit(parameters),
        optim.AdamWFp8(parameters),
        optim.Lion8bit(parameters),
        optim.RMSprop8bit(parameters, alpha=0.9),
        optim.GaLoreAdamW8bit([{"params": matrices, "rank": 2}], block_wise=True),
    ]
    others[0].step()
    optim.AdamW8bit(parameters, momentum=0.9)  # type: ignore[call-arg]
    adamw = optim.AdamW8bit(parameters, lr=1e-3)
    return adamw, optim.SGD8bit(parameters, lr=0.1), optim.Lamb8bit(parameters, variant="timm")


def factors(optimizer: optim.MuSGD) -> float:
    optimizer.muon = 0.25
    return optimizer.muon + optimizer.sgd


def schedules(optimizer: optim.Muon) -> list[float | Tensor]:
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    averaged = optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2))
    base: optim.Optimizer = optimizer
    base.load_state_dict(optimizer.state_dict())
    averaged.eval()
    return scheduler.get_last_lr()


def in_backward(optimizer: optim.AdamW) -> None:
    with fusedstep.step_in_backward(optimizer, bucket_cap_mb=1.0, accumulation_steps=2) as handle:
        handle.remove()
    fusedstep.step_in_backward(torch.optim.Adam(parameters))  # type: ignore[arg-type]


def elsewhere(model: torch.nn.Module) -> torch.optim.Optimizer:
    offloaded = fusedstep.offload(optim.AdamW(model.parameters()), "cpu", overlap=False)
    offloaded.step()
    offloaded.zero_grad()
    offloaded.load_state_dict(offloaded.state_dict())
    offloaded.remove()
    fusedstep.offload(optim.AdamW(parameters), overlap="no")  # type: ignore[arg-type]
    return offloaded


def registered() -> None:
    for register in (
        integrations.accelerate.register,
        integrations.deepspeed.register,
        integrations.lightning.register,
        integrations.megatron.register,
        integrations.timm.register,
        integrations.torchtitan.register,
        integrations.transformers.register,
    ):
        register()
    integrations.timm.unregister()


def told() -> tuple[str, ...]:
    topics = [finding.topic for finding in fusedstep.doctor()]
    advice: str | None = fusedstep.doctor()[0].advice
    report = fusedstep.verify(optim.Lamb(parameters), steps=2)
    gain = fusedstep.compare(optim.Lamb(parameters), rounds=1, iteration_ms=20)
    share: float | None = gain.share
    ok: bool = report.ok
    speedup: float = report.speedup
    differing = [(each.largest, each.excess) for each in report.differing]
    version: Literal[1] = fusedstep.__version__  # type: ignore[assignment]
    return (
        *fusedstep.isas(),
        fusedstep.isa(),
        *topics,
        str(advice),
        str((ok, speedup, differing, share, version)),
    )


def created(model: torch.nn.Module) -> tuple[str, ...]:
    fused: optim.FusedOptimizer = optim.create("lamb", model, lr=0.1, no_decay=("bias", "norm"))
    optim.create("adamw", [{"params": parameters}], no_decay=0)  # type: ignore[arg-type]
    optim.create("muon", model, preset="gpt", no_decay="auto", others={"lr": 1e-4})
    optim.create("adamw", model, preset=1)  # type: ignore[arg-type]
    groups = optim.groups(model, for_="muon", rules={"h.*": "matrix", torch.nn.GRU: {"lr": 1}})
    optim.Muon(groups, lr=0.1)
    optim.groups(model, rules={})  # type: ignore[call-arg]
    fused.step()
    return optim.names()


def conversions(other: torch.optim.Optimizer, base: optim.FusedOptimizer) -> None:
    adamw: optim.AdamW = fusedstep.convert(torch.optim.AdamW(parameters))
    adam: optim.Adam = fusedstep.convert(torch.optim.Adam(parameters))
    adagrad: optim.Adagrad = fusedstep.convert(torch.optim.Adagrad(parameters), lr=0.1)
    adadelta: optim.Adadelta = fusedstep.convert(torch.optim.Adadelta(parameters))
    adafactor: optim.Adafactor = fusedstep.convert(torch.optim.Adafactor(matrices))
    adamax: optim.Adamax = fusedstep.convert(torch.optim.Adamax(parameters))
    asgd: optim.ASGD = fusedstep.convert(torch.optim.ASGD(parameters))
    muon: optim.Muon = fusedstep.convert(torch.optim.Muon(matrices))
    nadam: optim.NAdam = fusedstep.convert(torch.optim.NAdam(parameters))
    radam: optim.RAdam = fusedstep.convert(torch.optim.RAdam(parameters))
    rmsprop: optim.RMSprop = fusedstep.convert(torch.optim.RMSprop(parameters))
    rprop: optim.Rprop = fusedstep.convert(torch.optim.Rprop(parameters))
    sgd: optim.SGD = fusedstep.convert(torch.optim.SGD(parameters))
    adan: optim.Adan = fusedstep.convert(optim.Adan(parameters))
    fused: optim.FusedOptimizer = fusedstep.convert(other)
    fused.step(max_norm=1.0).item()
    fusedstep.verify(fusedstep.convert(base)).worst  # noqa: B018
    wrong: optim.Lamb = fusedstep.convert(other)  # type: ignore[assignment]
    fusedstep.import_state_dict(wrong, other.state_dict())
    del adamw, adam, adagrad, adadelta, adafactor, adamax, muon, nadam, radam, rmsprop, sgd, adan
    del asgd, rprop


def mistakes() -> None:
    optim.AdamW(parameters, lr="1e-3")  # type: ignore[arg-type]
    optim.Lamb(parameters, trust_clip=True)  # type: ignore[call-arg]
    optim.Lamb(parameters, variant="unknown")  # type: ignore[arg-type]
    optim.Adan(parameters, betas=(0.9, 0.999))  # type: ignore[arg-type]
    fusedstep.verify(optim.Adam(parameters), steps="3")  # type: ignore[arg-type]
