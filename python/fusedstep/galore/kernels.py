"""Ways to take GaLore's step of one matrix, and what they differ by.

=========  =========================================================================================
torch      the formula in torch operations: ``GaLoreAdamW(fused=False)``
hybrid     two library products and a native Adam step in between: ``GaLoreAdamW(fused=True)``
parts      these products and this step alone, without the optimizer around them
fused      the native step in the epilogue of the first product, and the second product, alone
compiled   the formula of a whole step in one graph of torch.compile
=========  =========================================================================================
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedstep._matrix.products import add_back, in_tf32, project
from fusedstep._matrix.projection import LEFT, low_shape, sides
from fusedstep._matrix.scratch import Scratch, step_all
from fusedstep._matrix.transformers_adamw import bias_correction, direction
from fusedstep._native import ops
from fusedstep.optim.galore import GaLoreAdamW

#: Steps that a run has taken before the one that is looked at.
_STEPS_BEFORE = 10

_OPTIONS: dict[str, Any] = {
    "lr": 1e-2,
    "weight_decay": 0.01,
    "scale": 0.25,
    "update_proj_gap": 10**9,
}


class Problem(NamedTuple):
    """A matrix in the middle of a training run."""

    weight: Tensor
    grad: Tensor
    state: dict[str, Tensor]

    def copied(self, dtype: torch.dtype | None = None) -> Problem:
        """The same in other memory; in float64 the states are, too."""
        wide = torch.float64 if dtype is torch.float64 else None
        state = {
            name: value.clone() if name == "step" else value.to(wide or value.dtype, copy=True)
            for name, value in self.state.items()
        }
        dtype = dtype or self.weight.dtype
        return Problem(self.weight.to(dtype, copy=True), self.grad.to(dtype, copy=True), state)


def problem(rows: int, columns: int, rank: int, dtype: torch.dtype, device: str) -> Problem:
    """A problem with numbers that depend on its shape alone."""
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")

    (side,) = sides("std", rows, columns)
    shape = low_shape(rank, (side,), rows, columns)
    basis = torch.linalg.qr(normal(rows if side == LEFT else columns, rank))[0]
    state = {
        "exp_avg": 0.1 * normal(*shape),
        "exp_avg_sq": 0.5 + uniform(*shape),
        side: basis if side == LEFT else basis.t().contiguous(),
    }
    state = {name: value.to(device) for name, value in state.items()}
    state["step"] = torch.tensor(float(_STEPS_BEFORE), dtype=torch.float32, device="cpu")
    weight, grad = (normal(rows, columns).to(device, dtype) for _ in range(2))
    return Problem(weight, grad, state)


def _by_optimizer(given: Problem, fused: bool) -> Callable[[], None]:
    weight = torch.nn.Parameter(given.weight)
    weight.grad = given.grad
    rank = min(given.state["exp_avg"].shape)
    optimizer = GaLoreAdamW([weight], rank=rank, fused=fused, **_OPTIONS)
    optimizer.state[weight] = given.state
    return optimizer.step


def _group() -> tuple[dict[str, Any], tuple[Any, ...]]:
    """A group, and the options of the native step of its low-rank gradients."""
    weight = torch.zeros(1, dtype=torch.float32, device="cpu")
    optimizer = GaLoreAdamW([weight], **_OPTIONS)
    (group,) = optimizer.param_groups
    return group, optimizer._options(group | {"weight_decay": 0.0}, 1.0)


def _parts(given: Problem) -> Callable[[], None]:
    group, options = _group()
    (side,) = given.state.keys() - {"exp_avg", "exp_avg_sq", "step"}
    bases, low = {side: given.state[side]}, given.state["exp_avg"].shape
    scratch = Scratch([given.weight], [given.state], [low], [{side: bases[side].shape}], ())
    scratch.set_bases(0, bases)
    scratch.keep_bases(0, bases)
    keep = 1 - group["lr"] * group["weight_decay"]

    def step() -> None:
        scratch.project({0: given.grad}, 1.0)
        scratch.prepare("adam", options)
        step_all([scratch])
        factor = group["lr"] * keep * group["scale"]
        add_back(given.weight, scratch.update(0), scratch.bases(0), keep, factor)

    return step


def _fused(given: Problem) -> Callable[[], None]:
    group, (*options, _) = _group()
    (side,) = given.state.keys() - {"exp_avg", "exp_avg_sq", "step"}
    basis, from_left = given.state[side], side == LEFT
    ready = in_tf32(basis.t() if from_left else basis, 1 if _is_tf32() else 2)
    states = [given.state["exp_avg"], given.state["exp_avg_sq"]]
    update, numbers = torch.empty_like(states[0]), list(map(float, options))
    keep = 1 - group["lr"] * group["weight_decay"]

    def step() -> None:
        given.state["step"] += 1
        count = int(given.state["step"])
        torch.ops.fusedstep.projected_step(
            ops.rule_index["adam"],
            numbers,
            count,
            given.grad,
            ready,
            states,
            update,
            from_left,
            1.0,
        )
        add_back(given.weight, update, {side: basis}, keep, group["lr"] * keep * group["scale"])

    return step


def _is_tf32() -> bool:
    return bool(torch.backends.cuda.matmul.allow_tf32)


def _compiled(given: Problem) -> Callable[[], None]:
    group, _ = _group()
    (side,) = given.state.keys() - {"exp_avg", "exp_avg_sq", "step"}
    state, mode = given.state, "max-autotune" if given.weight.is_cuda else "default"

    def formula(weight: Tensor, grad: Tensor, state: dict[str, Tensor], length: Tensor) -> None:
        basis = state[side]
        low = project(grad, {side: basis.to(grad.dtype)}).to(basis.dtype)
        update = direction(state["exp_avg"], state["exp_avg_sq"], low, group["betas"], group["eps"])
        basis, update = basis.to(grad.dtype), update.to(grad.dtype)
        update = basis @ update if side == LEFT else update @ basis
        weight.sub_(update * length.to(grad.dtype))
        weight.mul_(1 - group["lr"] * group["weight_decay"])

    torch._dynamo.reset()  # a formula has few shapes, and a benchmark has many
    compiled = torch.compile(formula, fullgraph=True, mode=mode)
    tensors = {name: value for name, value in state.items() if name != "step"}

    def step() -> None:
        state["step"] += 1
        length = group["lr"] * group["scale"] * bias_correction(group, int(state["step"]))
        # A tensor: a graph for each number would be compiled otherwise. Filled, not copied: a copy
        # from the host waits for the GPU.
        number = torch.full((), length, dtype=torch.float32, device=given.grad.device)
        compiled(given.weight, given.grad, tensors, number)

    return step


#: The ways that there are, by name. Each is given a problem, and returns a step over its memory.
KERNELS: dict[str, Callable[[Problem], Callable[[], None]]] = {
    "torch": lambda given: _by_optimizer(given, fused=False),
    "hybrid": lambda given: _by_optimizer(given, fused=True),
    "parts": _parts,
    "fused": _fused,
    "compiled": _compiled,
}


def why_not(kernel: str, device: str, dtype: torch.dtype, rows: int, columns: int) -> str | None:
    """Returns why there is no such kernel for a matrix, or None."""
    if kernel != "fused":
        return None
    if torch.device(device).type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "kernel=fused is for GPUs of compute capability 9.0, as the H100 and the H200"
    if dtype is not torch.float32 or rows % 4 or columns % 4:
        return "kernel=fused is for float32, and for sides that are multiples of 4"
    return ops.missing_on("cuda")


@torch.no_grad()
def errors(given: Problem, kernel: str) -> dict[str, dict[str, float]]:
    """The errors of a step, against the formula in float64.

    ``largest``: of an element. ``relative``: of all, in the 2-norm, by that of the right values.
    """
    exact, found = given.copied(torch.float64), given.copied()
    KERNELS["torch"](exact)()
    KERNELS[kernel](found)()
    pairs = {
        "mean": (found.state["exp_avg"], exact.state["exp_avg"]),
        "variance": (found.state["exp_avg_sq"], exact.state["exp_avg_sq"]),
        "parameters": (found.weight, exact.weight),
    }
    result = {}
    for name, (value, right) in pairs.items():
        difference = value.double() - right
        result[name] = {
            "largest": difference.abs().max().item(),
            "relative": (difference.norm() / right.norm()).item(),
        }
    return result


@torch.no_grad()
def milliseconds(given: Problem, kernel: str, repeats: int) -> list[float]:
    """Times of steps, after one that is not counted: it makes memory, or compiles."""
    step, times = KERNELS[kernel](given.copied()), []
    for index in range(repeats + 1):
        _wait(given)
        start = time.perf_counter()
        step()
        _wait(given)
        if index:
            times.append(1e3 * (time.perf_counter() - start))
    return times


def median(times: list[float]) -> float:
    return float(f"{statistics.median(times):.4g}")


def _wait(given: Problem) -> None:
    if given.weight.is_cuda:
        torch.cuda.synchronize(given.weight.device)
