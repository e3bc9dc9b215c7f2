"""An optimizer on the CPU for a model on a GPU: copies and steps go on while the backward does."""

from __future__ import annotations

import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from fusedstep._api.base import FusedOptimizer
from fusedstep._api.buckets import Arrivals, PreviousNorm, check_arguments, name_in
from fusedstep._api.foreign import not_of_step
from fusedstep._api.unknown import options_of
from fusedstep._sharding.dtensor import is_dtensor
from fusedstep._state.checks import name_of
from fusedstep._state.storage import asked_way
from fusedstep._step.binding import forget_removed
from fusedstep._step.limits import needs_whole_norm
from fusedstep._step.plan import Bucket

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
            before they are copied. Call ``step()`` after the last of them: with ``overlap`` a
            gradient that comes before that, for a bucket that has been stepped, is an error out of
            ``backward()``. None: any number; gradients stay until ``step()``, which copies and
            steps bucket by bucket. A GradScaler and ``clip_grad_norm_`` need that (default: 1)
        overlap: step during the backward pass. False copies gradients then, and steps in
            ``step()``, which takes ``max_norm`` then. Groups with ``max_grad_norm`` or
            ``skip_nonfinite`` need False (default: True)
        max_previous_norm: clip by the norm of the iteration before, as
            :func:`fusedstep.step_in_backward` does (default: None)

    Raises:
        TypeError: if the optimizer is not one of ours.
        ValueError: if an argument is out of range, or a weight is a DTensor, complex, or on
            another device than the others.
        RuntimeError: for ``max_grad_norm`` and ``skip_nonfinite`` with ``overlap``, and for
            ``capturable`` and ``differentiable``. At ``step()``: for ``max_norm`` and
            ``error_if_nonfinite`` with ``overlap``.
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
    if overlap and (name := needs_whole_norm(optimizer)):
        way = ", or max_previous_norm in its place" if name == "max_grad_norm" else ""
        raise RuntimeError(
            f"{name} needs all gradients before the first step: give overlap=False{way}"
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
            if weight.is_nested:
                raise ValueError(f"{name} is a nested tensor, which native kernels do not take")
            if weight.is_complex():
                raise ValueError(f"{name} is complex: native kernels take real weights")
            devices.add(weight.device)
            if len(devices) > 1:
                raise ValueError(f"{name} is on {weight.device}, and others on another device")


def _check_memory(optimizer: FusedOptimizer) -> None:
    """Raises if weights, gradients and states have no room in what the host has available."""
    shapes = _without_groups(optimizer)
    groups = [
        _options_of(type(shapes), group)
        | {"params": [_like(p, torch.device("meta")) for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    shapes.__setstate__(_as_unpickled(optimizer, groups))
    for group in groups:
        shapes._store.create(group, group["params"], False, groups)
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


def _options_of(cls: type[FusedOptimizer], group: dict[str, Any]) -> dict[str, Any]:
    """The options with which a class steps a group on the CPU."""
    options = {name: value for name, value in group.items() if name != "params"}
    if options.get("fused") is False:
        options["fused"] = None
    narrow = any(p.dtype in _SIXTEEN_BITS for p in group["params"])
    if narrow and asked_way(group) is None and "master_weights" in options_of(cls):
        options["master_weights"] = "float32"
    return options


def _without_groups(optimizer: FusedOptimizer) -> FusedOptimizer:
    """An optimizer to unpickle into: of the class that has the states, not of a wrapper's."""
    cls: type[FusedOptimizer] = optimizer._store.optimizer
    return cls.__new__(cls)


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
        self._inner = _without_groups(optimizer)
        self._on_cpu = {p: self._copies.of(p) for group in groups for p in group["params"]}
        self._inner.__setstate__(_as_unpickled(optimizer, self._groups_on_cpu(groups)))
        self._grouped = [*groups]  # as those of the copies
        self._removed: list[_Copy] = []  # of weights that have left the groups
        self._overlap, self._norm = overlap, norm
        self._worker = ThreadPoolExecutor(1, "fusedstep-offload")
        self._pending: list[Future[None]] = []
        self._stepping: set[_Copy] = set()
        self._last_arrived: Callable[[], None] = lambda: None
        self._threads = _threads_of_a_step()
        super().__init__(groups, optimizer.defaults)
        self._arrivals = Arrivals(
            self,
            bucket_cap_mb * 2**20,
            math.inf if accumulation_steps is None else accumulation_steps,
            self._take,
            regrouped=self._follow_groups,
            is_final=overlap,
            ended=self._wait if overlap else None,
        )
        if saved is not None:
            self.load_state_dict(saved)

    def remove(self) -> None:
        """Ends it: another optimizer may step the weights. Waits for steps that are under way."""
        self._finish()
        self._arrivals.remove()
        self._worker.shutdown()

    @property
    def skipped_steps(self) -> int:
        """The steps that ``skip_nonfinite=True`` has left out since this optimizer was made."""
        return self._inner.skipped_steps

    @property
    def grad_norm(self) -> Tensor | None:
        """The 2-norm of all gradients at the last step that clipped, before that."""
        return self._inner.grad_norm

    # Groups and states

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "_arrivals" in vars(self):
            raise RuntimeError("add groups to an optimizer before it is offloaded")
        super().add_param_group(param_group)

    def _groups_on_cpu(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Groups of the copies, with the options of these groups, which take over what is chosen.

        Schedulers and dictionaries see it there.
        """
        found = []
        for group in groups:
            options = _options_of(type(self._inner), group)
            group |= options
            copies = [self._on_cpu[weight].weight for weight in group["params"]]
            found.append(options | {"params": copies})
        return found

    def _follow_groups(self) -> None:
        """Gives the copies the groups of the weights, which have been edited."""
        for index, group in enumerate(self.param_groups):
            for place, weight in enumerate(group["params"]):
                if weight not in self._on_cpu:
                    raise RuntimeError(
                        f"{name_of(group, index, place)} has not been offloaded: give an optimizer "
                        "all its weights before it is offloaded"
                    )
        self._finish()
        self._inner.param_groups[:] = self._groups_on_cpu(self.param_groups)
        self._inner._forget_plans()  # weights have other places, by which they are rounded
        self._grouped = [*self.param_groups]
        kept = self._in_groups()
        self._removed = [copy for copy in self._on_cpu.values() if copy not in kept]
        for copy in self._removed:
            copy.give_gradient_back()

    def _forget_removed(self) -> None:
        """Lets go of weights that have left the groups and that neither a state nor a user has.

        Others may be in a group again.
        """
        probe = SimpleNamespace(source=object())
        held = {probe.source: probe}  # as a copy of a weight that nobody else has
        of_nobody = sys.getrefcount(probe.source)
        for copy in self._removed:
            is_known = copy.weight in self._inner._state
            if not is_known and sys.getrefcount(copy.source) == of_nobody:
                del self._on_cpu[copy.source]
        self._removed = [copy for copy in self._removed if copy.source in self._on_cpu]
        forget_removed(self._inner)
        held.clear()

    def _in_groups(self) -> dict[_Copy, None]:
        """The copies of the weights that a group has now, in their order."""
        weights = (weight for group in self._grouped for weight in group["params"])
        return dict.fromkeys(self._on_cpu[weight] for weight in weights)

    def _pairs(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The groups of the weights with those of the copies."""
        return zip(self._grouped, self._inner.param_groups, strict=True)

    def _pass_options_on(self) -> None:
        for group, inner in self._pairs():
            inner |= {name: value for name, value in group.items() if name != "params"}

    @property  # type: ignore[override]  # a view is no dictionary
    def state(self) -> MutableMapping[Tensor, dict[str, Any]]:
        """The states, which are on the CPU, by the weights of the model."""
        return _States(self)

    @state.setter
    def state(self, states: Mapping[Tensor, dict[str, Any]]) -> None:
        of_copies: dict[Tensor, dict[str, Any]]
        of_copies = {self._on_cpu[weight].weight: state for weight, state in states.items()}
        self._finish()
        self._inner.state = defaultdict(dict, of_copies)

    def state_dict(self) -> dict[str, Any]:
        """As that of the optimizer that was given; its tensors are on the CPU."""
        self._finish()
        self._arrivals.look()
        self._pass_options_on()
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a dictionary of this optimizer, or of one that was not offloaded."""
        self._finish()
        self._arrivals.look()
        self._pass_options_on()
        self._refresh(list(self._on_cpu.values()))
        self._inner.load_state_dict(state_dict)
        for group, inner in self._pairs():
            group |= {name: value for name, value in inner.items() if name != "params"}
            # The dictionary may be of weights that kept no value beside them.
            inner |= _options_of(type(self._inner), inner)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Frees the gradients that have not been stepped: those on the CPU as well."""
        self._finish()
        self._arrivals.look()
        super().zero_grad(set_to_none)
        for copy in self._in_groups():
            copy.weight.grad = None
        self._arrivals.forget()

    # The step

    @torch._disable_dynamo
    def _take(self, bucket: Bucket) -> None:
        """Copies gradients of a bucket, and has it stepped if steps overlap."""
        copies = [self._on_cpu[weight] for weight in bucket.weights]
        if not self._stepping.isdisjoint(copies):  # their memory is in use
            self._finish()
        self._check_unchanged(copies)
        with torch.no_grad(), self._copies.bringing():
            for copy in copies:
                copy.take_gradient()
            stepped = [copy for copy in copies if copy.weight.grad is not None]
            if self._overlap:
                for copy in stepped:
                    copy.refresh()
        arrived = self._copies.arrived()
        if self._overlap:
            self._pass_options_on()
            group = next(inner for group, inner in self._pairs() if group is bucket.group)
            inner = bucket._replace(group=group, weights=[copy.weight for copy in copies])
            self._stepping.update(stepped)
            self._pending.append(self._worker.submit(self._step_bucket, inner, stepped, arrived))
        # The host runs ahead of the device, which cannot free gradients before their copy is made:
        # those of many buckets would take memory there.
        self._last_arrived()
        self._last_arrived = arrived

    def _check_unchanged(self, copies: list[_Copy]) -> None:
        """Raises for a weight that has other memory needs than its copy; nothing has moved then."""
        for copy in copies:
            if not copy.is_like_source():
                raise RuntimeError(
                    f"{name_in(self.param_groups, copy.source)} has another shape, dtype or device "
                    "than when it was offloaded: change weights before, or remove() this optimizer "
                    "and offload another"
                )

    def _refresh(self, copies: list[_Copy]) -> None:
        """Takes over the values of weights, and waits for these."""
        self._check_unchanged(copies)
        with torch.no_grad(), self._copies.bringing():
            for copy in copies:
                copy.refresh()
        self._copies.arrived()()

    def _step_bucket(
        self, bucket: Bucket, stepped: list[_Copy], arrived: Callable[[], None]
    ) -> None:
        arrived()
        if torch.get_num_threads() != self._threads:  # torch keeps the number for each thread
            torch.set_num_threads(self._threads)
        with torch.no_grad():
            self._norm.add(self._inner._update_bucket(bucket, self._norm.factor))
            self._put_back(stepped)

    def _put_back(self, stepped: list[_Copy]) -> None:
        with self._copies.putting():
            for copy in stepped:
                copy.put_weight()

    def _wait(self) -> None:
        """Waits for all steps: the next forward pass, or an edit, finds the new weights."""
        wait(self._pending)
        self._copies.join()

    def _finish(self) -> None:
        """Waits for all steps; raises the error of the first that failed."""
        self._wait()
        pending, self._pending = self._pending, []
        self._stepping.clear()
        errors = [future.exception() for future in pending]
        for error in errors:
            if error is not None:
                raise error

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        max_norm: float | None = None,
        error_if_nonfinite: bool = False,
        **unknown: Any,
    ) -> Any:
        """Steps the weights that the backward pass has not, and waits for all.

        Args:
            closure: reevaluates the model and returns the loss
            max_norm: clips the gradients, those of all groups together, to this 2-norm first. For
                ``overlap=False``
            error_if_nonfinite: raises a RuntimeError that names the first weight whose gradient is
                not finite, before a weight is changed. For ``overlap=False``
            unknown: any other option is a TypeError, which says where the option belongs

        Returns:
            What the closure did; else with ``max_norm`` the norm before clipping; else None.
        """
        if unknown:
            inner = type(self._inner)
            raise not_of_step(self, unknown, options_of(inner) | inner._own_options.keys())
        if self._overlap and (max_norm is not None or error_if_nonfinite):
            name = "error_if_nonfinite" if max_norm is None else "max_norm"
            raise RuntimeError(
                f"step({name}=…) needs all gradients before the first bucket is stepped: give "
                f"offload() overlap=False{'' if max_norm is None else ', or max_previous_norm'}"
            )
        loss, self._threads = None, _threads_of_a_step()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._arrivals.complete_all()
        norm = None
        if self._overlap:
            self._finish()
            if (norm_of_all := self._norm.begin_iteration()) is not None:
                self._inner._norm = norm_of_all
        else:
            norm = self._step_all(max_norm, error_if_nonfinite)
        if self._removed:
            self._forget_removed()
        return norm if closure is None else loss

    def _step_all(self, max_norm: float | None, error_if_nonfinite: bool) -> Tensor | None:
        self._pass_options_on()
        stepped = [copy for copy in self._in_groups() if copy.weight.grad is not None]
        self._refresh(stepped)
        norm = self._inner.step(
            max_norm=max_norm, zero_grad="none", error_if_nonfinite=error_if_nonfinite
        )
        with torch.no_grad():
            self._put_back(stepped)
        self._copies.join()
        return norm


class _States(MutableMapping[Tensor, dict[str, Any]]):
    """A view of the states on the CPU by the weights of the model, as ``state`` of torch's classes.

    States that are under way are waited for.
    """

    def __init__(self, optimizer: OffloadedOptimizer) -> None:
        self._optimizer = optimizer

    def _there(self) -> dict[Tensor, dict[str, Any]]:
        self._optimizer._finish()
        return self._optimizer._inner.state

    def _copy_of(self, weight: Tensor) -> Tensor:
        return self._optimizer._on_cpu[weight].weight

    def __getitem__(self, weight: Tensor) -> dict[str, Any]:
        return self._there()[self._copy_of(weight)]  # a new one where there is none

    def __setitem__(self, weight: Tensor, state: dict[str, Any]) -> None:
        self._there()[self._copy_of(weight)] = state

    def __delitem__(self, weight: Tensor) -> None:
        del self._there()[self._copy_of(weight)]

    def __contains__(self, weight: object) -> bool:
        return (
            isinstance(weight, Tensor)
            and weight in self._optimizer._on_cpu
            and self._copy_of(weight) in self._there()
        )

    def __iter__(self) -> Iterator[Tensor]:
        sources: dict[Tensor, Tensor]
        sources = {copy.weight: weight for weight, copy in self._optimizer._on_cpu.items()}
        return iter([sources[weight] for weight in self._there()])

    def __len__(self) -> int:
        return len(self._there())

    def get(self, weight: Tensor, default: Any = None) -> Any:
        return self._there().get(self._copy_of(weight), default) if weight in self else default

    def pop(self, weight: Tensor, *default: Any) -> Any:
        return self._there().pop(self._copy_of(weight), *default)

    def setdefault(self, weight: Tensor, default: Any = None) -> Any:
        return self._there().setdefault(self._copy_of(weight), default)

    def __repr__(self) -> str:
        return repr(dict(self))


class _Copy:
    """A weight of the model, and its copy on the CPU."""

    def __init__(self, source: Tensor, copies: _Copies) -> None:
        self.source, self._copies, self._device = source, copies, source.device
        pin = source.is_cuda
        self.weight = _like(source, torch.device("cpu"), pin=pin)
        self._grad = torch.empty_like(self.weight, pin_memory=pin, requires_grad=False)
        with torch.no_grad():
            self.weight.copy_(source)

    def is_like_source(self) -> bool:
        source, weight = self.source, self.weight
        return (
            source.shape == weight.shape
            and source.dtype is weight.dtype
            and source.device == self._device
        )

    def refresh(self) -> None:
        """Begins to copy the weight, inside of bringing().

        Always: no version tells of changes by ``.data``.
        """
        self._copies.bring(self.source.detach(), self.weight)

    def take_gradient(self) -> None:
        """Begins to copy the gradient, and frees it, inside of bringing().

        It is added to one that has not been stepped.
        """
        grad, self.source.grad = self.source.grad, None
        if grad is None:
            return
        if self.weight.grad is not None:
            grad = self.weight.grad.to(grad.device) + grad
        if grad.layout is torch.strided:
            self._copies.bring(grad, self._grad)
            self.weight.grad = self._grad
        else:
            self.weight.grad = grad.cpu()

    def give_gradient_back(self) -> None:
        """The weight has left its group, and is not stepped."""
        if self.weight.grad is None:
            return
        grad, self.weight.grad = self.weight.grad.to(self.source.device, copy=True), None
        self.source.grad = grad if self.source.grad is None else grad + self.source.grad

    def put_weight(self) -> None:
        """Begins to copy the weight back, inside of putting()."""
        self.source.copy_(self.weight, non_blocking=True)


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
