"""Base of the laws: subjects made from seeds, trajectories, and comparison bit for bit."""

import contextlib
import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import fusedstep
from fusedstep._native import ops
from support.cases import LOW_PRECISION, Case, Tolerance

CHUNK = int(ops.capabilities()["chunk"])
"""Elements in a chunk of the engine: sizes around it are where tails and seams are."""
TEAM = int(ops.capabilities()["serial_elements"])
"""Elements for which the engine starts a team of threads."""

ISAS = tuple(
    pytest.param(
        isa, marks=pytest.mark.skipif(isa not in fusedstep.isas(), reason=f"CPU without {isa}")
    )
    for isa in ("base", "avx2", "avx512")
)

WAYS = {
    "float32": {"master_weights": True},
    "split": {"master_weights": "split"},
    "kahan": {"rounding": "kahan"},
    "stochastic": {"rounding": "stochastic", "seed": 3},
}
"""Options by which a weight of 16 bits keeps its value."""

SINGLE = torch.finfo(torch.float32).eps
FEW = 1e-3
"""The share of the elements that a step may turn the other way where the update jumps."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextlib.contextmanager
def threads(count: int, *, started: bool = False) -> Iterator[None]:
    """Sets the number of threads.

    `started` starts the threads now, so that they inherit the current floating-point mode.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    if started:
        torch.zeros(2 * count * TEAM).neg_()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def forced_isa(name: str) -> Iterator[None]:
    ops.force_isa(name)
    try:
        yield
    finally:
        ops.force_isa(None)


def make_weights(shapes, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Normal values with some exact zeros among them."""
    return [weight.clone() for weight in _weights(tuple(shapes), dtype, seed)]


def make_gradients(shapes, dtype: torch.dtype, step: int) -> list[Tensor]:
    """Values over two orders of magnitude; over half of one where the dtype has few bits.

    All are larger than the decay of the rows that add it to the gradient, so that the sum does not
    cancel and the error of a step stays a few units. The narrow range keeps squares of fp16
    gradients out of the denormals, where torch's for-loop divides by zero.
    """
    return [gradient.clone() for gradient in _gradients(tuple(shapes), dtype, step)]


@functools.lru_cache(maxsize=64)
def _weights(shapes, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = []
    for shape in shapes:
        weight = torch.randn(shape, generator=generator, dtype=torch.float64)
        weight[torch.rand(shape, generator=generator) < 0.05] = 0.0
        weights.append(weight.to(dtype))
    return weights


@functools.lru_cache(maxsize=64)
def _gradients(shapes, dtype, step):
    # Only operations that are exact: torch's powers differ with the number of threads.
    generator = torch.Generator().manual_seed(1000 + step)
    powers = torch.tensor([2.0**exponent for exponent in range(-3, 4)], dtype=torch.float64)
    gradients = []
    for shape in shapes:
        sign = torch.randint(0, 2, shape, generator=generator, dtype=torch.float64) * 2 - 1
        magnitude = 1 + torch.rand(shape, generator=generator, dtype=torch.float64)
        if dtype in LOW_PRECISION:
            magnitude *= 0.5
        else:
            magnitude *= powers[torch.randint(0, len(powers), shape, generator=generator)]
        gradients.append((sign * magnitude).to(dtype))
    return gradients


def as_parameters(tensors) -> list[torch.nn.Parameter]:
    """Parameters with memory of their own."""
    return [torch.nn.Parameter(tensor.detach().clone()) for tensor in tensors]


def train(optimizer, params, steps) -> None:
    """Steps with the gradients of the given step numbers, in memory of their own each time."""
    shapes = [tuple(param.shape) for param in params]
    for step in steps:
        gradients = make_gradients(shapes, params[0].dtype, step)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        optimizer.step()


def run(case: Case, shapes, dtype: torch.dtype, steps: int, **overrides):
    """The parameters and the optimizer after some steps from seeded weights."""
    params = as_parameters(make_weights(shapes, dtype))
    optimizer = case.build(params, **overrides)
    train(optimizer, params, range(1, steps + 1))
    return params, optimizer


def assert_counts(case: Case, optimizer, params, expected) -> None:
    """The step counts of the parameters; of an optimizer without counts, that there are none."""
    states = [optimizer.state.get(param, {}) for param in params]
    if case.counts:
        assert [float(state.get("step", 0)) for state in states] == list(expected)
    else:
        assert not any("step" in state for state in states)


def contents(optimizer) -> dict[str, Tensor]:
    """Copies of every weight and state, by name."""
    found = {}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, param in enumerate(params):
        found[f"weight {index}"] = param.detach().clone()
        for name, value in optimizer.state[param].items():
            found[f"{name} {index}"] = value.detach().clone()
    return found


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(_INTEGERS[tensor.element_size()])


def assert_same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
    if torch.equal(bits(actual), bits(expected)):
        return
    differing = (bits(actual) != bits(expected)).nonzero()
    first = tuple(differing[0].tolist())
    pytest.fail(
        f"{what}: {len(differing)} of {actual.numel()} elements differ, the first at {first}: "
        f"{actual[first].item()!r} instead of {expected[first].item()!r}"
    )


def assert_same_contents(actual: dict[str, Tensor], expected: dict[str, Tensor], what="") -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(actual[name], tensor, f"{what} {name}".strip())


def assert_contents_close(
    actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float, atol: float
) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name].double(), tensor.double(), rtol=rtol, atol=atol, equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip


class Bounds:
    """Bounds on the distance of two trajectories of one weight, from their inputs so far.

    An error once made stays: it is relative to the largest value that an element has had.
    """

    def __init__(self, case: Case, dtype: torch.dtype, tolerance: Tolerance):
        self._case = case
        self._tolerance = tolerance
        self._epsilon = torch.finfo(dtype).eps
        self._tiny = torch.finfo(dtype).smallest_normal
        self._steps = 0
        self._largest_weight = torch.zeros(())
        self._largest_gradient = torch.zeros(())
        self._largest_move = 0.0

    def note(self, before: Tensor, after: Tensor, gradient: Tensor) -> None:
        self._steps += 1
        before, after, gradient = (t.detach().double() for t in (before, after, gradient))
        decay = self._case.options.get("weight_decay", 0.0)
        magnitude = gradient.abs() + decay * before.abs()
        self._largest_gradient = torch.maximum(self._largest_gradient, magnitude)
        for weight in (before, after):
            self._largest_weight = torch.maximum(self._largest_weight, weight.abs())
        if before.numel():
            self._largest_move = max(self._largest_move, (after - before).abs().max().item())

    def check(self, weight, state, expected_weight, expected_state, what: str) -> None:
        tolerance = self._tolerance
        bound = self._units(tolerance.weight) * self._largest_weight
        bound += self._units(tolerance.update) * self._largest_move
        assert_within(weight, expected_weight, bound, f"{what}: weight", **self.jumps)
        for name in self._case.states:
            magnitude = (
                expected_state[name].detach().double().abs() + self._share(name) + self._tiny
            )
            bound = self._units(tolerance.state) * magnitude
            assert_within(state[name], expected_state[name], bound, f"{what}: {name}")
        for name in self._case.numbers:
            bound = (1 + self._steps) * SINGLE * expected_state[name].double().abs()
            assert_within(state[name], expected_state[name], bound, f"{what}: {name}")

    def _share(self, name: str) -> Tensor | float:
        """The most that a gradient adds to a state.

        A sum's roundings are relative to its terms, which may cancel. Neither the old state's nor
        the gradient's is larger than the new state's magnitude and this share together.
        """
        betas, gradient = self._case.betas, self._largest_gradient
        match name:
            case "exp_avg" | "grad_avg":
                return (1 - betas[0]) * gradient
            case "exp_avg_sq" | "max_exp_avg_sq" | "square_avg":
                return (1 - betas[-1]) * (self._case.squares * gradient) ** 2
            case "exp_avg_diff":
                return (1 - betas[1]) * 2 * gradient
            case "neg_pre_grad" | "exp_inf" | "prev":
                return gradient
            case "ax":  # a mean of weights, whose errors are theirs
                return self._largest_weight + 3 * self._largest_move
            case "step_size":
                return 0.0
            case "sum":
                return gradient**2
            case "acc_delta":
                return (1 - betas[-1]) * (self._largest_move / self._case.lr) ** 2
            case "momentum_buffer":
                # It adds up gradients, or gradients divided by the root of their mean square.
                return (1 - betas[-1]) ** -0.5 if self._case.buffers_moves else gradient
        pytest.fail(f"Bounds._share in tests/support/stepping.py does not know {name!r}")

    @property
    def jumps(self) -> dict[str, float]:
        """Arguments of `assert_within` that allow a few elements an update the other way."""
        if self._case.continuous:
            return {}
        return {"share": FEW * self._steps, "far": 2 * self._largest_move * self._steps}

    def _units(self, per_step: float) -> float:
        """Both sides round their last result as well."""
        return (1 + self._steps * per_step) * self._epsilon


class Reference:
    """A row's reference function, stepped over one weight.

    Weight and states are rounded to the dtype after each step, as an optimizer has to store them.
    """

    def __init__(self, case: Case, weight: Tensor):
        self._case = case
        self._dtype = weight.dtype
        self._bounds = Bounds(case, weight.dtype, case.tolerances[weight.dtype])
        self.weight = weight.detach().double()
        self.state: dict[str, Tensor] = {}
        self.steps = 0

    def step(self, gradient: Tensor) -> None:
        before = self.weight
        self.steps += 1
        weight, state = self._case.reference(
            before, gradient.double(), self.state, self.steps, **self._case.options
        )
        self.weight = weight.to(self._dtype).double()
        self.state = {
            name: value.to(torch.float32 if name in self._case.numbers else self._dtype).double()
            for name, value in state.items()
        }
        self._bounds.note(before, weight, gradient)

    @property
    def kept(self) -> dict[str, Tensor]:
        """The states that an optimizer has by now, in double."""
        counts = {"step": torch.tensor(float(self.steps))} if self._case.counts else {}
        return self.state | counts

    @property
    def jumps(self) -> dict[str, float]:
        return self._bounds.jumps

    def check(self, weight: Tensor, state: dict[str, Tensor], what: str) -> None:
        """Compares with a weight and its states after as many steps, within the row's tolerance."""
        assert state.keys() == {*self._case.states, *self._case.numbers}, what
        self._bounds.check(weight, state, self.weight, self.kept, what)


def one_ulp_of_ratio(before: Tensor, after: Tensor) -> Tensor:
    """Bound on a weight's distance from `after` if only the trust ratio moved by one unit of fp32.

    The move scales with the ratio; forming lr times ratio and rounding the stored weight each may
    go to the neighbouring value because of it.
    """
    epsilon = torch.finfo(after.dtype).eps
    ratio_unit = torch.finfo(torch.float32).eps if after.dtype != torch.float64 else 64 * epsilon
    move = (after.double() - before.double()).abs()
    return 2 * ratio_unit * move + epsilon * torch.maximum(after.abs(), before.abs()).double()


def assert_within(
    actual: Tensor,
    expected: Tensor,
    bound: Tensor,
    what: str,
    *,
    share: float = 0.0,
    far: float = 0.0,
) -> None:
    """Every element within its bound; NaN is within no bound.

    A `share` of the elements, or one, may be as `far` off beside.
    """
    assert actual.shape == expected.shape, what
    actual, expected = actual.detach().double(), expected.detach().double()
    distance = (actual - expected).abs()
    is_within = distance <= bound
    if is_within.all():
        return
    beyond = (~is_within).nonzero()
    allowed = max(1, share * actual.numel()) if share else 0
    if len(beyond) <= allowed and (distance <= bound + far).all():
        return
    if len(beyond):
        first = tuple(beyond[0].tolist())
        pytest.fail(
            f"{what}: {len(beyond)} of {actual.numel()} elements out of bounds, the first at "
            f"{first}: {actual[first].item()!r} instead of {expected[first].item()!r} "
            f"within {bound.expand(actual.shape)[first].item():g}"
        )
