"""The training loop: measures iterations, writes checkpoints, and goes on with them."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nanonano_text
from nanonano_meter import Mark, meter_of
from nanonano_model import GPT
from nanonano_settings import FREE_TO_CHANGE, Settings, SettingsError

Tell = Callable[[int, float], object]
"""Is called with the number of iterations that are done and the loss of the last."""

CHECKPOINT = "checkpoint.pt"


def train(
    settings: Settings, tell: Tell = lambda *_: None, *, resume: bool = False
) -> dict[str, Any]:
    """Trains, and returns the facts and figures of the run.

    Args:
        settings: of the run
        tell: called every `log_interval` iterations, on a CPU after each
        resume: go on with the checkpoint in `out_dir`, if there is one

    Raises:
        SettingsError: what the device lacks; settings that differ from those of the checkpoint.
        FileNotFoundError: there is no text.
        FloatingPointError: the loss is not finite.
    """
    run = Run(settings)
    if resume and (file := Path(settings.out_dir, CHECKPOINT)).is_file():
        run.load(file)
    run.go(tell)
    return run.facts() | run.figures()


def device_of(settings: Settings) -> torch.device:
    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingsError(f"device: torch knows no {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise SettingsError(f"device must be cpu or cuda, not {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingsError("device: torch sees no CUDA device")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def has_bfloat16(device_type: str) -> bool:
    """Returns True if the processor has instructions for products in bfloat16."""
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16") or able.get("bf16"))


def dtype_of(settings: Settings, device_type: str) -> str:
    """Raises SettingsError if the kernel of the attention lacks it."""
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "bfloat16" if has_bfloat16(device_type) else "float32"
    if device_type == "cuda" and dtype == "float32" and settings.attn_type == "flash_attn":
        raise SettingsError("attn_type: flash_attn needs dtype bfloat16 on a GPU")
    return dtype


def optimizer_of(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """Makes the optimizer. Vectors have no weight decay; `fused` is on where the class has it.

    Raises SettingsError if there is no such class, or if it lacks an option.
    """
    origin, _, name = settings.optimizer.partition(":")
    if origin == "fusedstep":
        from fusedstep import optim
    else:
        optim = torch.optim
    cls = getattr(optim, name, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise SettingsError(f"optimizer: {origin} has no class {name!r}")
    accepted = inspect.signature(cls).parameters
    options: dict[str, Any] = {"lr": settings.learning_rate, "fused": True}
    if "betas" in accepted and len(accepted["betas"].default) == 2:
        options["betas"] = (settings.beta1, settings.beta2)
    options = {key: value for key, value in options.items() if key in accepted}
    for key in settings.optimizer_options.keys() - accepted.keys():
        raise SettingsError(f"optimizer_options: {settings.optimizer} has no {key!r}")
    weights = list(model.parameters())
    groups = [
        {"params": [weight for weight in weights if weight.dim() >= 2]},
        {"params": [weight for weight in weights if weight.dim() < 2]},
    ]
    if "weight_decay" in accepted:
        for group, decay in zip(groups, (settings.weight_decay, 0.0), strict=True):
            group["weight_decay"] = decay
    return cls(groups, **options | settings.optimizer_options)


@contextlib.contextmanager
def kernels(deterministic: bool) -> Iterator[None]:
    """Has torch take deterministic kernels alone if that is wanted, and puts its modes back.

    The backend `math` computes in the dtype of its inputs, as all other ways do: torch has had it
    compute 16 bits in float32 since 2.5, unless it is told.
    """
    before = torch.are_deterministic_algorithms_enabled()
    narrow = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    if deterministic:  # cuBLAS reads this at its first product, and torch insists on it
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(narrow)


@dataclasses.dataclass
class Times:
    """Milliseconds of each iteration of this process, and of the optimizer in it."""

    iterations: list[tuple[Mark, Mark]] = dataclasses.field(default_factory=list)
    steps: list[tuple[Mark, Mark]] = dataclasses.field(default_factory=list)
    passes: list[tuple[Mark, Mark]] = dataclasses.field(default_factory=list)
    """The first two forward and backward passes: the first one compiles."""


class Run:
    """A model and its optimizer in training."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.device = settings, device_of(settings)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.dtype = dtype_of(settings, self.device.type)
        is_fused = settings.attn_type in ("flash_attn", "efficient_attn")
        if settings.dropout and self.device.type == "cpu" and is_fused:
            raise SettingsError(
                f"dropout must be 0 with {settings.attn_type} on a CPU, whose kernel has none"
            )
        text = nanonano_text.read(nanonano_text.find(settings.data))
        if len(text.train) <= settings.block_size:
            raise SettingsError(
                f"block_size must be below the {len(text.train)} characters that are trained on, "
                f"not {settings.block_size}"
            )
        # All of it is there, so that no batch is waited for.
        self.text = text.train.to(self.device)
        self.offsets = torch.arange(settings.block_size + 1, device=self.device)
        torch.manual_seed(settings.seed)
        self.model = GPT(settings, text.symbols, self.device.type).to(self.device)
        self.optimizer = optimizer_of(settings, self.model)
        self.iteration = 0
        self.losses: list[Tensor] = []
        """One of each iteration, on the device."""
        self.meter, self.times = meter_of(self.device.type), Times()

    # ---- Training --------------------------------------------------------------------------------

    def go(self, tell: Tell) -> None:
        """Takes the iterations that are left."""
        settings, model, cpu = self.settings, self.model, self.device.type == "cpu"
        if settings.compile:
            # Another model that was compiled in this process would count as a recompilation.
            torch.compiler.reset()
            model = torch.compile(model, backend=settings.compile_backend)
        model.train()
        self.meter.wait()
        self.meter.reset_peak()
        while self.iteration < settings.max_iters:
            with kernels(settings.deterministic):
                self.losses.append(self._iterate(model))
            self.iteration += 1
            done = self.iteration == settings.max_iters
            # A GPU is waited for where a loss is told. On a CPU it is known.
            if cpu or done or self.iteration % settings.log_interval == 0:
                tell(self.iteration, self.losses[-1].item())
            every = settings.checkpoint_interval
            if every and self.iteration % every == 0:
                self.save(Path(settings.out_dir, CHECKPOINT))
        self.meter.wait()

    def _iterate(self, model: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Takes an iteration; returns its loss, which is still being computed on a GPU."""
        settings, mark = self.settings, self.meter.mark
        pieces = settings.gradient_accumulation_steps
        began = mark()
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(self.iteration)
        total = torch.zeros((), device=self.device)
        for tokens in self._batches():
            first = len(self.times.passes) < 2
            if first:
                self.meter.wait()
                pass_began = mark()
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16"):
                # Contiguous, as compiled kernels are made for the alignment of the first batch.
                inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
                loss = model(inputs, targets) / pieces
            loss.backward()
            total += loss.detach()
            if first:
                self.meter.wait()
                self.times.passes.append((pass_began, mark()))
        step_began = mark()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        ended = mark()
        self.times.steps.append((step_began, ended))
        self.times.iterations.append((began, ended))
        return total

    def _batches(self) -> Tensor:
        """Returns the batches of this iteration: [pieces, batch, length + 1]."""
        settings = self.settings
        starts = nanonano_text.starts(
            settings.seed,
            self.iteration,
            (settings.gradient_accumulation_steps, settings.batch_size, 1),
            len(self.text) - settings.block_size,
        )
        return self.text[starts.to(self.device) + self.offsets]

    # ---- Checkpoints -----------------------------------------------------------------------------

    def save(self, file: Path) -> None:
        """Writes a checkpoint. The file is the last one's until this one is complete."""
        content = {
            "settings": dataclasses.asdict(self.settings),
            "iteration": self.iteration,
            "losses": torch.stack(self.losses).cpu(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
        if self.device.type == "cuda":
            content["random_cuda"] = torch.cuda.get_rng_state(self.device)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f"{file.name}.{os.getpid()}.part")
        try:
            torch.save(content, part)
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)

    def load(self, file: Path) -> None:
        """Raises SettingsError, with nothing changed, if the checkpoint is of another run."""
        content = torch.load(file, map_location="cpu", weights_only=True)
        for name, value in dataclasses.asdict(self.settings).items():
            before = content["settings"].get(name)
            if name not in FREE_TO_CHANGE and before != value:
                raise SettingsError(f"{name} is {value!r}, but {file} has {before!r}")
        self.iteration = content["iteration"]
        self.losses = list(content["losses"].to(self.device))
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        torch.set_rng_state(content["random"])
        if self.device.type == "cuda" and "random_cuda" in content:
            torch.cuda.set_rng_state(content["random_cuda"], self.device)

    # ---- Figures ---------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """Returns what was measured. Averages are without the first iteration of this process.

        Raises FloatingPointError if the loss is not finite: such figures are of no use.
        """
        settings, ms = self.settings, self.meter.ms
        losses = torch.stack(self.losses).tolist()
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(f"the loss after {len(losses)} iterations is {losses[-1]}")
        backend = self.model.blocks[0].attention.backend
        found: dict[str, Any] = {
            "optimizer": settings.optimizer,
            "attn_type": settings.attn_type,
            "compile": settings.compile,
            "kernel": "none" if backend is None else backend.name.lower(),
            "dtype": self.dtype,
            "weights": self.model.weights(),
            "iterations": len(self.times.iterations),
            "loss": losses[-1],
            "losses": losses,
            **self.meter.memory(),
        }
        iterations = [ms(*each) for each in self.times.iterations]
        steps = [ms(*each) for each in self.times.steps]
        passes = [ms(*each) for each in self.times.passes]
        if iterations:
            found |= {"first_ms": iterations[0], "all_ms": sum(iterations) / len(iterations)}
        if later := iterations[1:]:
            found |= {
                "ms": sum(later) / len(later),
                "optimizer_ms": sum(steps[1:]) / len(later),
                "share": sum(steps[1:]) / sum(later),
            }
        if settings.compile and len(passes) == 2:
            found["compile_ms"] = max(0.0, passes[0] - passes[1])
        return found

    def facts(self) -> dict[str, Any]:
        """Returns the machine's part of the results."""
        found = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        if self.device.type == "cuda":
            return found | {"device": torch.cuda.get_device_name(self.device)}
        if self.settings.optimizer.startswith("fusedstep:"):
            import fusedstep

            found["isa"] = fusedstep.isa()
        return found
