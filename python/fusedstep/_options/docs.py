"""Paragraphs that the docstrings of all optimizers share."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable

#: A paragraph for each option, by name.
_ARGS = {
    "params": """\
params (iterable): iterable of parameters or named_parameters to optimize
    or iterable of dicts defining parameter groups""",
    "foreach": """\
foreach (bool, optional): True asks for plain torch operations, weight by
    weight, as ``fused=False`` does (default: None)""",
    "maximize": """\
maximize (bool, optional): maximize the objective instead of minimizing it
    (default: False)""",
    "capturable": """\
capturable (bool, optional): keep the step count on the weight's device, so
    that a step can be captured in a CUDA graph (default: False)""",
    "differentiable": """\
differentiable (bool, optional): let autograd go through the step, which
    then runs without native kernels (default: False)""",
    "fused": """\
fused (bool, optional): True runs the native kernels, False the same formula
    in plain torch operations. None takes the native kernels if they can
    update every weight of the group and neither foreach nor differentiable
    is True (default: None)""",
    "state_dtype": """\
state_dtype (torch.dtype or str, optional): torch.float32 keeps float32 states for bfloat16
    and float16 weights; ``"int8"``, ``"int4"`` and ``"fp8"`` keep states in codes of 8 or 4
    bits, blocks of which share a float32 scale, for weights of at least 4,096 elements;
    None keeps all states in the weight's dtype (default: None)""",
    "master_weights": """\
master_weights (bool or str, optional): ``"float32"``, or True, keeps a float32 copy of
    bfloat16 and float16 weights in the state ``master_param`` and updates that, so that
    moves too small for the weight's dtype add up; the weight is the copy rounded, and its
    states are float32. A weight that is changed otherwise is taken as it is then.
    ``"split"``, for bfloat16 weights, keeps the lower 16 bits of the copy in ``low_param``
    in its place: the weight has the upper ones, rounded to nearest. To a weight that is
    changed otherwise these still count: less than half a unit in its last place. Weights of
    32 or 64 bits have no copy: where a group has no others, ``repr`` says so
    (default: False)""",
    "rounding": """\
rounding (str, optional): how weights of 16 bits are rounded, if not to nearest.
    ``"stochastic"``, for bfloat16 weights, rounds up or down at random, so that the mean of
    the roundings is the exact value; nothing is kept beside the weight. ``"kahan"`` keeps
    the last rounding error in the state ``compensation``, and adds it to the weight at the
    next step. States are float32 or in codes (default: None)""",
    "seed": """\
seed (int, optional): of the random numbers of ``rounding="stochastic"``. They follow from the
    seed, the step count, the group, the weight's place there and the element's, and are the
    same for any layout and number of threads, and on every process (default: 0)""",
    "max_grad_norm": """\
max_grad_norm (float, optional): clips the 2-norm of the gradients, those of all groups
    together, to this for the step, as :func:`torch.nn.utils.clip_grad_norm_` does, but
    leaves ``.grad`` alone. It is one number for all groups. None clips nothing, and neither does
    ``math.inf``, which takes the norm for :attr:`grad_norm`. ``step(max_norm=...)`` clips
    before it (default: None)""",
    "skip_nonfinite": """\
skip_nonfinite (bool, optional): leaves a step out if the 2-norm of the gradients, those of
    all groups together, is NaN or infinite: weights, states and step counts stay as they
    are, and :attr:`skipped_steps` counts the step. It is one value for all groups
    (default: False)""",
}

_WEIGHTS = """\
Weights may have any shape and strides (transposed, channels-last, sliced), as may their
gradients; of a gradient only the shape, dtype and device must be the weight's. The native
kernels update float32, float64, bfloat16 and float16 weights on the CPU or a CUDA device.
bfloat16 and float16 are computed in float32 natively, and in their own precision with
``fused=False``. The states {states} have the weight's dtype and dimension order{numbers}.
"""

_RAISES = """\
Raises:
    ValueError: if a hyper-parameter is out of range, or ``params`` is empty.
    RuntimeError: if ``fused=True`` meets ``foreach`` or ``differentiable``, weights that are
        not of the dtypes and devices above, or a missing native library; at :meth:`step`,
        before anything is changed, for sparse gradients and weights that overlap themselves in
        memory.
"""

_EXAMPLE = """\
Example::

    >>> optimizer = optim.{name}(model.parameters(){options})
    >>> optimizer.zero_grad()
    >>> loss_fn(model(input), target).backward()
    >>> optimizer.step()
"""

#: The only line of a class's own example.
_MADE = re.compile(r"^Example::\n\n    >>> optimizer = optim\.\w+\(model\.\w+\(\)(.*)\)\n\n", re.M)


def complete(cls: type, states: tuple[str, ...], numbers: Iterable[str]) -> None:
    """Adds to the docstring of a class the weights and options that it shares, and what it raises.

    ``states`` and ``numbers``: the names of its states.
    Its own are under ``Args:`` there; the others follow in the order of the signature. An example
    may have a line, with options, or none.
    """
    doc = inspect.cleandoc(cls.__doc__ or "")
    before, header, rest = doc.partition("\nArgs:\n")
    if not header:
        return
    own, _, after = rest.partition("\n\n")
    parameters = inspect.signature(cls).parameters
    shared = {
        name: textwrap.indent(_ARGS[name], "    ")
        for name in parameters
        if name in _ARGS and f"\n    {name} (" not in f"\n{own}"
    }
    numbers = "".join(f"; ``{name}`` is a 0-dimensional float32 tensor" for name in numbers)
    if "\n\nWeights " not in before:  # else it says itself which it takes
        before += "\n" + _WEIGHTS.format(states=_listed(states), numbers=numbers)
    args = "\n".join(filter(None, [shared.pop("params", ""), own, *shared.values()]))
    raises, after = _RAISES, f"{after}\n\n"
    if after.startswith("Raises:"):
        raises, _, after = after.partition("\n\n")
    lr = parameters.get("lr")
    options = f", lr={lr.default}" if lr is not None and "Example" not in after else ""
    if made := _MADE.search(after):
        options, after = made[1], after.replace(made[0], "")
    example = _EXAMPLE.format(name=cls.__name__, options=options) if options else ""
    parts = (f"{before}{header}{args}", raises, example, after)
    cls.__doc__ = "\n\n".join(part.strip() for part in parts if part.strip())


def _listed(names: tuple[str, ...]) -> str:
    *others, last = [f"``{name}``" for name in names]
    return f"{', '.join(others)} and {last}" if others else last
