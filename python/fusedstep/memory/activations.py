"""The memory of a forward and a backward, found without their maths: on tensors without data."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fusedstep._api.buckets import buckets_of


class Activations(NamedTuple):
    """Bytes that live in a forward and a backward beside the weights, at times of high demand.

    ``times`` are pairs: the bytes that are no gradients of weights, and those that are. No pair is
    below another one in both.
    """

    times: tuple[tuple[int, int], ...]

    @property
    def highest(self) -> int:
        """Bytes that are no gradients, at their highest."""
        return max((other for other, _ in self.times), default=0)

    def beside(self, gradients: float, share: float, accumulate: bool) -> int:
        """The bytes that the peak has beyond the gradients that a step finds.

        Gradients come as activations go. ``share``: the part of each gradient that is kept, in its
        own dtype. With ``accumulate`` the gradients of an earlier backward are there all the time.
        """
        if accumulate:
            return self.highest
        peak = max((other + share * kept for other, kept in self.times), default=0)
        return max(round(peak - gradients), 0)


def trace(
    make: Callable[[], torch.nn.Module],
    size: tuple[int, ...],
    *,
    tokens: bool = True,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    attention: str = "flash",
    checkpointing: bool = False,
    inference: bool = False,
    trained: torch.dtype | None = None,
    bucket: float | None = None,
) -> Activations:
    """Runs a model's forward and backward on fake tensors, and counts what lives.

    Args:
        make (Callable): makes the model
        size (tuple[int, ...]): of a batch
        tokens (bool): what the batch has: tokens, or numbers of the weights' dtype
        dtype (torch.dtype): of the weights
        autocast (torch.dtype, optional): what autocast computes in
        attention (str): ``"flash"`` keeps no matrix of attention, ``"eager"`` does
        checkpointing (bool): the blocks of each stack are computed again in the backward
        inference (bool): without a backward
        trained (torch.dtype, optional): of weights that are trained, if not ``dtype``
        bucket (float, optional): bytes of gradients that are stepped together in the backward pass,
            and freed
    """

    def cast(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor.to(trained if trained and tensor.requires_grad else dtype)

    fake, on_host = FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu")
    with fake, on_host, _conversions(), torch.random.fork_rng(devices=()):
        model = make()._apply(cast).train(not inference)
        if checkpointing:
            checkpoint_blocks(model)
        inputs = torch.zeros(size, dtype=torch.long if tokens else dtype, device="cpu")
        with _attention(attention), _Live() as live:
            casts = torch.autocast("cpu", autocast, enabled=autocast is not None)
            if inference:
                with torch.no_grad(), casts:
                    _forward(model, inputs)
            else:
                live.watch_gradients(model, bucket)
                with casts:
                    loss, output = loss_of(model, inputs)
                loss.backward()
                del loss, output
    return Activations(live.times())


def loss_of(model: torch.nn.Module, inputs: Tensor) -> tuple[Tensor, Any]:
    """A model's own loss, if it has one, else cross entropy; and all that the model returned."""
    output = _forward(model, inputs, labels=inputs)
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss, output
    tensors = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
    if not tensors:
        raise ValueError(f"MODEL returns no tensor but {type(output).__name__}")
    first = tensors[0]
    if first.dim() == 0:
        return first, output
    scores = first.flatten(0, -2) if first.dim() > 2 else first
    if scores.dim() < 2:
        return scores.sum(), output
    is_of_tokens = inputs.dtype is torch.long and inputs.numel() == len(scores)
    targets = inputs.flatten() if is_of_tokens else scores.new_zeros(len(scores), dtype=torch.long)
    return F.cross_entropy(scores, targets.to(scores.device)), output


def _forward(model: torch.nn.Module, inputs: Tensor, **more: Any) -> Any:
    """Calls a model with those keywords that it takes by name."""
    names = inspect.signature(model.forward).parameters
    if inputs.dtype is torch.long and "use_cache" in names:
        more["use_cache"] = False
    more = {name: value for name, value in more.items() if name in names}
    return model(inputs, **more)


@contextlib.contextmanager
def _conversions() -> Iterator[None]:
    """Makes a module's ``to()`` and its like give it new weights: torch swaps no fake tensors."""
    own = torch.nn.Module._apply
    converted: dict[Tensor, torch.nn.Parameter] = {}  # by what it was before: weights may be tied

    def apply(
        self: torch.nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> torch.nn.Module:
        for child in self.children() if recurse else ():
            child._apply(convert)
        for name, weight in self._parameters.items():
            if weight is None:
                continue
            while weight in converted:
                weight = converted[weight]
            with torch.no_grad():
                new = convert(weight)
            if new is not weight:
                new = torch.nn.Parameter(new.detach(), weight.requires_grad)
                converted[weight] = new
            self._parameters[name] = new
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = convert(buffer)
        return self

    modules: Any = torch.nn.Module
    modules._apply = apply
    try:
        yield
    finally:
        modules._apply = own


def stacks(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.nn.ModuleList]]:
    """The outermost lists of modules, with their names."""
    for name, child in module.named_children():
        if isinstance(child, torch.nn.ModuleList):
            yield prefix + name, child
        else:
            yield from stacks(child, f"{prefix}{name}.")


def checkpoint_blocks(model: torch.nn.Module) -> None:
    blocks = [block for _, stack in stacks(model) for block in stack]
    if not blocks:
        raise ValueError("--checkpointing: MODEL has no ModuleList of blocks")
    for block in blocks:
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )


@contextlib.contextmanager
def _attention(kind: str) -> Iterator[None]:
    """Makes torch's attention keep its matrices, or not. On GPUs it keeps none for dropout."""
    own = F.scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *more: Any,
        **options: Any,
    ) -> Tensor:
        if kind == "eager":
            with sdpa_kernel(SDPBackend.MATH):
                return own(query, key, value, attn_mask, dropout_p, *more, **options)
        return own(query, key, value, attn_mask, 0.0, *more, **options)

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = own


def _free(bucket: list[Tensor], missing: set[Tensor], weight: Tensor) -> None:
    """Frees the gradients of a bucket when the last one is there."""
    missing.discard(weight)
    if not missing:
        for each in bucket:
            each.grad = None


class _Live(TorchDispatchMode):
    """Counts the bytes of storages that operators make, until they die."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes: dict[int, int] = {}  # of storages, by their addresses
        self._gradients: set[int] = set()
        self._other = self._kept = 0
        self._times: set[tuple[int, int]] = set()

    def watch_gradients(self, model: torch.nn.Module, bucket: float | None = None) -> None:
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        for weight in weights:
            weight.register_post_accumulate_grad_hook(self._keep)
        if bucket is None:
            return
        for each in buckets_of([{"params": weights}], bucket):
            missing = set(each.weights)
            for member in each.weights:
                member.register_post_accumulate_grad_hook(partial(_free, each.weights, missing))

    def times(self) -> tuple[tuple[int, int], ...]:
        """The times that no other one exceeds in both kinds of bytes."""
        found: list[tuple[int, int]] = []
        for other, kept in sorted(self._times, reverse=True):
            if not found or kept > found[-1][1]:
                found.append((other, kept))
        return tuple(found)

    def _keep(self, weight: Tensor) -> None:
        assert weight.grad is not None
        key = weight.grad.untyped_storage()._cdata
        if key in self._bytes and key not in self._gradients:
            self._gradients.add(key)
            self._other -= self._bytes[key]
            self._kept += self._bytes[key]
            self._times.add((self._other, self._kept))

    def _drop(self, key: int) -> None:
        size = self._bytes.pop(key)
        if key in self._gradients:
            self._gradients.remove(key)
            self._kept -= size
        else:
            self._other -= size

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {
            each.untyped_storage()._cdata
            for each in tree_leaves((args, kwargs))
            if isinstance(each, Tensor)
        }
        for each in tree_leaves(result):
            if not isinstance(each, Tensor):
                continue
            storage = each.untyped_storage()
            key = storage._cdata
            if key in self._bytes or key in given:
                continue
            self._bytes[key] = storage.nbytes()
            self._other += self._bytes[key]
            weakref.finalize(storage, self._drop, key)
        self._times.add((self._other, self._kept))
        return result
