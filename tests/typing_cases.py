"""Types of the public functions, for a type checker: tests/test_typing.py has mypy look at them.

It reports what does not fit, and a comment `type: ignore` where nothing is to be ignored.
"""

import torch
from torch import Tensor

import fusedstep
from fusedstep import optim

parameters = [torch.nn.Parameter(torch.ones(3))]


def steps(optimizer: optim.Lamb) -> float:
    optimizer.step()
    optimizer.step(zero_grad="none")
    norm: Tensor = optimizer.step(max_norm=1.0)
    loss: float = optimizer.step(lambda: 1.0)
    text: str = optimizer.step(lambda: 1.0)  # type: ignore[assignment]
    return optimizer.step(max_norm=1.0).item() + norm.item() + loss + len(text)


def created(model: torch.nn.Module) -> tuple[str, ...]:
    fused: optim.FusedOptimizer = optim.create("lamb", model, lr=0.1, no_decay=("bias", "norm"))
    optim.create("adamw", [{"params": parameters}], no_decay=0)  # type: ignore[arg-type]
    fused.step()
    return optim.names()


def conversions(other: torch.optim.Optimizer, base: optim.FusedOptimizer) -> None:
    adamw: optim.AdamW = fusedstep.convert(torch.optim.AdamW(parameters))
    adam: optim.Adam = fusedstep.convert(torch.optim.Adam(parameters))
    adagrad: optim.Adagrad = fusedstep.convert(torch.optim.Adagrad(parameters), lr=0.1)
    adadelta: optim.Adadelta = fusedstep.convert(torch.optim.Adadelta(parameters))
    adamax: optim.Adamax = fusedstep.convert(torch.optim.Adamax(parameters))
    muon: optim.Muon = fusedstep.convert(torch.optim.Muon([torch.nn.Parameter(torch.ones(3, 3))]))
    nadam: optim.NAdam = fusedstep.convert(torch.optim.NAdam(parameters))
    radam: optim.RAdam = fusedstep.convert(torch.optim.RAdam(parameters))
    rmsprop: optim.RMSprop = fusedstep.convert(torch.optim.RMSprop(parameters))
    sgd: optim.SGD = fusedstep.convert(torch.optim.SGD(parameters))
    adan: optim.Adan = fusedstep.convert(optim.Adan(parameters))
    fused: optim.FusedOptimizer = fusedstep.convert(other)
    fused.step(max_norm=1.0).item()
    fusedstep.verify(fusedstep.convert(base)).worst  # noqa: B018
    wrong: optim.Lamb = fusedstep.convert(other)  # type: ignore[assignment]
    fusedstep.import_state_dict(wrong, other.state_dict())
    del adamw, adam, adagrad, adadelta, adamax, muon, nadam, radam, rmsprop, sgd, adan


def mistakes() -> None:
    optim.AdamW(parameters, lr="1e-3")  # type: ignore[arg-type]
    optim.Lamb(parameters, trust_clip=True)  # type: ignore[call-arg]
    optim.Lamb(parameters, variant="unknown")  # type: ignore[arg-type]
    optim.Adan(parameters, betas=(0.9, 0.999))  # type: ignore[arg-type]
    fusedstep.verify(optim.Adam(parameters), steps="3")  # type: ignore[arg-type]
