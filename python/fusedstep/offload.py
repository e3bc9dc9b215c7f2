"""An optimizer on the CPU for a model on a GPU: copies and steps go on while the backward does."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from fusedstep.optim._arrivals import Arrivals, PreviousNorm, buckets_of, check_arguments
from fusedstep.optim._base import FusedOptimizer
from fusedstep.optim._checks import name_of
from fusedstep.optim._dtensor import is_dtensor
from fusedstep.optim._plan import Bucket
from fusedstep.optim._weights import asked_way

__all__ = ["OffloadedOptimizer", "offload"]

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def offload(
    optimizer: FusedOptimizer,
    device: torch.device | str = "cpu",
    *,
    bucket_cap_mb: float = 25.0,
    accumulation_steps: int | None = 1,
    overlap: bool = True,
    max_previous_norm: float | None = None,
) -> OffloadedOptimizer:
    r"""Returns an optimizer that steps on the CPU, for a model that is elsewhere.

    States, and a copy of the weights, are in the host's memory. When the backward pass has all
    gradients of a bucket, they are copied there and freed, the bucket is stepped by native kernels
    on a thread of its own, and its weights are copied back: all of it while the backward pass goes
    on, copies on streams of their own. ``step()`` waits for what is left.

    A weight of 16 bits is kept in float32 there, by ``master_weights="float32"``, unless its group
    says how it keeps its value. The weights are those of the optimizer that was given, with the
    same options and kernels of the CPU, bit for bit. State dictionaries are that optimizer's, both
    ways. Steps are native ones even if ``fused=False`` was given.

    Args:
        optimizer: one of :mod:`fusedstep.optim`. Its states are taken over; do not use it again
        device: of the steps: ``"cpu"``
        bucket_cap_mb: the size of the gradients of a bucket, in MiB; a larger weight is a bucket
            of its own (default: 25)
        accumulation_steps: backward passes whose gradients are added up, where the weights are,
            before they are copied. Call ``step()`` after the last of them. None: any number;
            gradients stay until ``step()``, which copies and steps bucket by bucket. A GradScaler
            and ``clip_grad_norm_`` need that (default: 1)
        overlap: step during the backward pass. False copies gradients then, and steps in
            ``step()``, which takes ``max_norm`` then. Groups with ``max_grad_norm`` need False
            (default: True)
        max_previous_norm: clip by the norm of the iteration before, as
            :func:`fusedstep.step_in_backward` does (default: None)

    Raises:
        TypeError: if the optimizer is not one of ours.
        ValueError: if an argument is out of range, or a weight is a DTensor, complex, or on
            another device than the others.
        RuntimeError: for ``max_grad_norm`` with ``overlap``, and for ``capturable`` and
            ``differentiable``. At ``step()``: for ``max_norm`` with ``overlap``.
        MemoryError: if the host has less memory than weights, gradients and states need; nothing
            has moved by then.

    Example::

        >>> optimizer = fusedstep.offload(optim.AdamW(model.parameters()))
        >>> model(input).sum().backward()
        >>> optimizer.step()
    """
    check_arguments(
        optimizer, bucket_cap_mb, 1 if accumulation_steps is None else accumulation_steps
    )
    if torch.device(device).type != "cpu":
        raise ValueError(f"device must be 'cpu', not {str(device)!r}")
    norm = PreviousNorm(max_previous_norm)
    if overlap and optimizer._max_grad_norm() < math.inf:
        raise RuntimeError(
            "max_grad_norm needs all gradients before the first step: give overlap=False, or "
            "max_previous_norm in its place"
        )
    if not overlap and max_previous_norm is not None:
        raise ValueError(
            "max_previous_norm is for steps that overlap: without them step(max_norm=…) clips by "
            "the norm of this iteration"
        )
    _check_weights(optimizer)
    _check_memory(optimizer)
    return OffloadedOptimizer(optimizer, bucket_cap_mb, accumulation_steps, overlap, norm)


def _threads_of_a_step() -> int:
    """One less than torch's: the thread that feeds the device needs a core, and threads of a step
    that must share one with it let all others of the step wait.
    """
    return max(torch.get_num_threads() - 1, 1)


def _check_weights(optimizer: FusedOptimizer) -> None:
    devices = set()
    for index, group in enumerate(optimizer.param_groups):
        for option in ("capturable", "differentiable"):
            if group.get(option):
                raise RuntimeError(f"offload does not support `{option}`")
        for place, weight in enumerate(group["params"]):
            name = name_of(group, index, place)
            if is_dtensor(weight):
                raise ValueError(
                    f"{name} is a DTensor: fully_shard(…, offload_policy=CPUOffloadPolicy()) "
                    "offloads those"
                )
            if weight.is_complex():
                raise ValueError(f"{name} is complex: native kernels take real weights")
            devices.add(weight.device)
            if len(devices) > 1:
                raise ValueError(f"{name} is on {weight.device}, and others on another device")


def _check_memory(optimizer: FusedOptimizer) -> None:
    """Raises if weights, gradients and states have no room in what the host has available."""
    shapes = type(optimizer).__new__(type(optimizer))
    groups = [
        _options_of(group) | {"params": [_like(p, torch.device("meta")) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    shapes.__setstate__(_as_unpickled(optimizer, groups))
    for group in groups:
        shapes._store.create(group, group["params"], native=False)
    states = [v for state in shapes._state.values() for v in state.values()]
    needed = 2 * sum(_size_there(p) for group in optimizer.param_groups for p in group["params"])
    needed += sum(v.nbytes for v in states if isinstance(v, Tensor))
    if needed > (there := _available()):
        raise MemoryError(
            f"offload needs {needed / 2**30:,.1f} GiB of the host's memory for weights, gradients "
            f"and states, and {there / 2**30:,.1f} GiB are available: small states need less "
            "(state_dtype='int8'), and so do weights of 16 bits with master_weights='split'"
        )


def _size_there(weight: Tensor) -> int:
    """The bytes of a copy of a weight: torch rounds pinned memory up to a power of two."""
    return 1 << (weight.nbytes - 1).bit_length() if weight.is_cuda else weight.nbytes


def _available() -> float:
    """The bytes that the host can give, as the kernel estimates it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = next(line for line in lines if line.startswith("MemAvailable:"))
        return 1024 * int(found.split()[1])
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    """The options with which a group is stepped on the CPU."""
    options = {name: value for name, value in group.items() if name != "params"}
    if options.get("fused") is False:
        options["fused"] = None
    narrow = any(p.dtype in _SIXTEEN_BITS for p in group["params"])
    if narrow and asked_way(group) is None:
        options["master_weights"] = "float32"
    return options


def _as_unpickled(optimizer: FusedOptimizer, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The state that makes an optimizer like this one, with other groups, of an empty one."""
    return {"defaults": optimizer.defaults, "state": defaultdict(dict), "param_groups": groups}


def _like(weight: Tensor, device: torch.device, *, pin: bool = False) -> torch.nn.Parameter:
    """A contiguous parameter of the same shape and dtype."""
    memory = torch.empty(weight.shape, dtype=weight.dtype, device=device, pin_memory=pin)
    return torch.nn.Parameter(memory, requires_grad=weight.requires_grad)


class OffloadedOptimizer(Optimizer):
    """An optimizer by :func:`offload`: its weights are the model's, its states on the CPU."""

    def __init__(
        self,
        optimizer: FusedOptimizer,
        bucket_cap_mb: float,
        accumulation_steps: int | None,
        overlap: bool,
        norm: PreviousNorm,
    ) -> None:
        saved = optimizer.state_dict() if optimizer.state else None
        groups = optimizer.param_groups
        self._copies = _Copies(next(p.device for group in groups for p in group["params"]))
        self._inner = type(optimizer).__new__(type(optimizer))
        self._on_cpu: dict[Tensor, _Copy] = {}
        inner_groups = []
        for group in groups:
            copies = [self._copies.of(weight) for weight in group["params"]]
            self._on_cpu |= zip(group["params"], copies, strict=True)
            options = _options_of(group)
            inner_groups.append(options | {"params": [copy.weight for copy in copies]})
            # As the schedulers and dictionaries of this one see it.
            group |= options
        self._inner.__setstate__(_as_unpickled(optimizer, inner_groups))
        self._overlap, self._norm = overlap, norm
        self._worker = ThreadPoolExecutor(1, "fusedstep-offload")
        self._pending: list[Future[None]] = []
        self._last_arrived: Callable[[], None] = lambda: None
        self._threads = _threads_of_a_step()
        super().__init__(groups, optimizer.defaults)
        if saved is not None:
            self.load_state_dict(saved)
        buckets = list(buckets_of(self.param_groups, bucket_cap_mb * 2**20))
        passes = math.inf if accumulation_steps is None else accumulation_steps
        self._arrivals = Arrivals(buckets, passes, self._take)

    def remove(self) -> None:
        """Ends it: another optimizer may step the weights. Waits for steps that are under way."""
        self._finish()
        self._arrivals.remove()
        self._worker.shutdown()

    # Groups and states

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "_arrivals" in vars(self):
            raise RuntimeError("add groups to an optimizer before it is offloaded")
        super().add_param_group(param_group)

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The states, which are on the CPU, by the weights of the model."""
        self._finish()
        states = self._inner.state
        found = ((weight, states.get(copy.weight)) for weight, copy in self._on_cpu.items())
        return {weight: state for weight, state in found if state is not None}

    @state.setter
    def state(self, _: Any) -> None:
        """torch's constructor sets an empty one."""

    def _pass_options_on(self) -> None:
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner |= {name: value for name, value in group.items() if name != "params"}

    def state_dict(self) -> dict[str, Any]:
        """As that of the optimizer that was given; its tensors are on the CPU."""
        self._finish()
        self._pass_options_on()
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a dictionary of this optimizer, or of one that was not offloaded."""
        self._finish()
        self._pass_options_on()
        for copy in self._on_cpu.values():
            copy.refresh()
        self._inner.load_state_dict(state_dict)
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group |= {name: value for name, value in inner.items() if name != "params"}
            # The dictionary may be of weights that kept no value beside them.
            inner |= _options_of(inner)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Frees the gradients that have not been stepped: those on the CPU as well."""
        self._finish()
        super().zero_grad(set_to_none)
        for copy in self._on_cpu.values():
            copy.weight.grad = None
        self._arrivals.reset()

    # The step

    @torch._disable_dynamo
    def _take(self, bucket: Bucket) -> None:
        """Copies gradients of a bucket, and has it stepped if steps overlap."""
        copies = [self._on_cpu[weight] for weight in bucket.weights]
        with torch.no_grad(), self._copies.bringing():
            for copy in copies:
                copy.take_gradient()
        arrived = self._copies.arrived()
        if self._overlap:
            self._pass_options_on()
            inner = bucket._replace(weights=[copy.weight for copy in copies])
            stepped = [copy for copy in copies if copy.weight.grad is not None]
            self._pending.append(self._worker.submit(self._step_bucket, inner, stepped, arrived))
        # The host runs ahead of the device, which cannot free gradients before their copy is made:
        # those of many buckets would take memory there.
        self._last_arrived()
        self._last_arrived = arrived

    def _step_bucket(
        self, bucket: Bucket, stepped: list[_Copy], arrived: Callable[[], None]
    ) -> None:
        arrived()
        if torch.get_num_threads() != self._threads:  # which each thread has its own number of
            torch.set_num_threads(self._threads)
        with torch.no_grad():
            self._norm.add(self._inner._update_bucket(bucket, self._norm.factor))
            self._put_back(stepped)

    def _put_back(self, stepped: list[_Copy]) -> None:
        with self._copies.putting():
            for copy in stepped:
                copy.put_weight()

    def _finish(self) -> None:
        """Waits for all steps; raises the error of the first that failed."""
        pending, self._pending = self._pending, []
        errors = [future.exception() for future in pending]
        self._copies.join()
        for error in errors:
            if error is not None:
                raise error

    def step(
        self, closure: Callable[[], Any] | None = None, *, max_norm: float | None = None
    ) -> Any:
        """Steps the weights that the backward pass has not, and waits for all.

        Args:
            closure: reevaluates the model and returns the loss
            max_norm: clips the gradients, those of all groups together, to this 2-norm first. For
                ``overlap=False``

        Returns:
            What the closure did; else with ``max_norm`` the norm before clipping; else None.
        """
        if max_norm is not None and self._overlap:
            raise RuntimeError(
                "step(max_norm=…) needs all gradients before the first bucket is stepped: give "
                "offload() overlap=False, or max_previous_norm"
            )
        loss, self._threads = None, _threads_of_a_step()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._arrivals.complete_all()
        norm = None
        if self._overlap:
            self._finish()
            self._norm.begin_iteration()
        else:
            norm = self._step_all(max_norm)
        return norm if closure is None else loss

    def _step_all(self, max_norm: float | None) -> Tensor | None:
        self._copies.arrived()()
        self._pass_options_on()
        stepped = [copy for copy in self._on_cpu.values() if copy.weight.grad is not None]
        norm = self._inner.step(max_norm=max_norm, zero_grad="none")
        with torch.no_grad():
            self._put_back(stepped)
        self._copies.join()
        return norm


class _Copy:
    """A weight of the model, and its copy on the CPU."""

    def __init__(self, source: Tensor, copies: _Copies) -> None:
        self._source, self._copies = source, copies
        pin = source.is_cuda
        self.weight = _like(source, torch.device("cpu"), pin=pin)
        self._grad = torch.empty_like(self.weight, pin_memory=pin, requires_grad=False)
        self._version = -1
        self.refresh()

    def refresh(self) -> None:
        """Takes over a weight that something else has changed."""
        if self._source._version != self._version:
            with torch.no_grad():
                self.weight.copy_(self._source)
            self._version = self._source._version

    def take_gradient(self) -> None:
        """Begins to copy the gradient, and frees it, inside of bringing()."""
        grad, self._source.grad = self._source.grad, None
        if grad is None:
            self.weight.grad = None
            return
        self.refresh()
        if grad.layout is torch.strided:
            self._copies.bring(grad, self._grad)
            self.weight.grad = self._grad
        else:
            self.weight.grad = grad.cpu()

    def put_weight(self) -> None:
        """Begins to copy the weight back, inside of putting()."""
        self._source.copy_(self.weight, non_blocking=True)
        self._version = self._source._version


class _Copies:
    """The transfers from and to a device: on streams of their own, where it has streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_streams = device.type == "cuda"
        if self._has_streams:
            self._out, self._back = (torch.cuda.Stream(device) for _ in range(2))

    def of(self, weight: Tensor) -> _Copy:
        return _Copy(weight, self)

    @contextmanager
    def bringing(self) -> Iterator[None]:
        """bring() copies here what the current stream has computed so far."""
        if not self._has_streams:
            yield
            return
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            yield

    def bring(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)
        if self._has_streams:
            source.record_stream(self._out)

    def putting(self) -> AbstractContextManager[Any]:
        """Copies to the device are made in a stream of their own here."""
        return torch.cuda.stream(self._back) if self._has_streams else nullcontext()

    def arrived(self) -> Callable[[], None]:
        """Returns a function that waits for all that has been brought so far.

        Weights may be put back then, as far as the current stream is concerned.
        """
        if not self._has_streams:
            return lambda: None
        event = torch.cuda.Event(blocking=True)  # it leaves its core to who feeds the device
        event.record(self._out)
        return event.synchronize

    def join(self) -> None:
        """Has what follows on the current stream wait for what has been put back."""
        if self._has_streams:
            torch.cuda.current_stream(self._device).wait_stream(self._back)
