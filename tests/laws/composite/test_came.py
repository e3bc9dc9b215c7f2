"""Laws of CAME: its formula, blocks, memory, checkpoints, options and errors."""

import copy
import types

import pytest
import torch

import fusedstep
from fusedstep import optim
from fusedstep._factored import blocks as _factored_blocks
from fusedstep._factored.blocks import blocks_of
from reference.came import came
from support.factored import CAME as CASES
from support.factored import assert_same, stepped
from support.layouts import GRADIENT_LAYOUTS, WEIGHT_LAYOUTS, Placed
from support.stepping import WAYS, make_gradients, make_weights

#: Matrices, stacks of matrices, vectors and a number.
SHAPES = ((7, 5), (90, 210), (3, 40), (4, 5, 6, 7), (2, 33, 18), (70,), (1, 9), (9, 1), ())

NAMES = ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col", "exp_avg")


def case(function):
    return pytest.mark.parametrize("name", CASES)(function)


@pytest.fixture(params=[None, 50, 1], ids=["whole", "blocks", "rows"])
def blocks(request, monkeypatch):
    """Steps in blocks of so many elements."""
    if request.param is not None:
        monkeypatch.setattr(_factored_blocks, "_ELEMENTS", {"cpu": request.param})


def steps_of(weights, steps=3, grads=None, begin=0, **options):
    """An optimizer of these weights after some steps; the weights are changed."""
    return stepped(optim.CAME(weights, **options), weights, steps, grads, begin)


def moments(state, shape):
    """A state of the reference by our names, with means for its sums."""
    found = {"exp_avg": state["average"]}
    if len(shape) < 2:
        return found | {"exp_avg_sq": state["moments"]}
    for kind, names in (("moments", NAMES[:2]), ("residuals", NAMES[2:4])):
        rows, columns = state[kind]
        found |= zip(names, (rows / shape[-1], columns / shape[-2]), strict=True)
    return found


# The formula


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@case
def test_is_the_formula(name, dtype, fused, blocks):
    weights, eps = make_weights(SHAPES, dtype), torch.finfo(dtype).eps
    expected = [(weight.double(), {}) for weight in weights]
    moved = [torch.zeros_like(weight) for weight, _ in expected]
    for step in range(4):
        for i, grad in enumerate(make_gradients(SHAPES, dtype, step)):
            before = expected[i][0]
            expected[i] = came(before, grad.double(), expected[i][1], **CASES[name])
            moved[i] += (expected[i][0] - before).abs()
    optimizer = steps_of(weights, 4, fused=fused, **CASES[name])
    for weight, (value, state), move in zip(weights, expected, moved, strict=True):
        error = (weight.double() - value).abs()
        assert (error <= 4 * eps * weight.double().abs() + 64 * eps * move).all()
        ours = dict(optimizer.state[weight])
        assert ours.pop("step") == 4
        theirs = moments(state, weight.shape)
        assert ours.keys() == theirs.keys()
        for key, moment in theirs.items():
            assert ours[key].dtype is dtype
            torch.testing.assert_close(
                ours[key].double(), moment, rtol=0, atol=64 * eps * moment.abs().max().item()
            )


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@case
def test_16_bits_are_computed_in_float32(name, dtype, fused):
    """A step is that of float32 weights and gradients with these values, rounded at its end."""
    weights, grads = make_weights(SHAPES, dtype), make_gradients(SHAPES, dtype, 0)
    wide = [weight.float() for weight in weights]
    expected = steps_of(wide, 1, [grad.float() for grad in grads], fused=fused, **CASES[name])
    narrow = steps_of(weights, 1, grads, fused=fused, **CASES[name])
    for weight, value in zip(weights, wide, strict=True):
        assert torch.equal(weight, value.to(dtype))
        for key, state in narrow.state[weight].items():
            assert state.dtype is torch.float32
            assert torch.equal(state, expected.state[value][key])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fused", [True, False])
def test_bfloat16_weights_can_take_small_steps(way, fused):
    weight, exact = torch.ones(64, 64, dtype=torch.bfloat16), torch.ones(64, 64)
    options = {"lr": 1e-3, "eps": (1e-30, 1.0), "betas": (0.0, 0.9, 0.9), "fused": fused}
    steps_of([weight], 200, [torch.ones_like(weight)], **options, **WAYS[way])
    steps_of([exact], 200, [torch.ones_like(exact)], **options)
    assert exact.mean() < 0.82
    assert abs(weight.float().mean() - exact.mean()) < 4e-3
    stays = torch.ones(64, 64, dtype=torch.bfloat16)
    steps_of([stays], 200, [torch.ones_like(stays)], **options | {"betas": (0.0, 0.0, 0.0)})
    assert torch.equal(stays, torch.ones_like(stays))


def test_a_gradient_of_zeros_moves_nothing(blocks):
    weights = make_weights(SHAPES, torch.float32)
    before = [weight.clone() for weight in weights]
    steps_of(weights, 2, [torch.zeros_like(weight) for weight in weights])
    assert all(map(torch.equal, weights, before))


def test_weights_without_elements_count_steps():
    weights = [torch.ones(0, 3), torch.ones(3, 0), torch.ones(0)]
    optimizer = steps_of(weights, 2)
    for weight in weights:
        assert optimizer.state[weight]["step"] == 2
        assert not any(value.isnan().any() for value in optimizer.state[weight].values())


# Blocks


@pytest.mark.parametrize("most", [1, 6, 7, 35, 100, 10**6])
@pytest.mark.parametrize("shape", [(7, 5), (3, 40), (4, 5, 6, 7), (2, 1, 9), (1, 1)], ids=str)
def test_blocks_are_all_rows_once_and_no_larger(shape, most):
    seen = torch.zeros(shape)
    for block in blocks_of(seen.shape, most):
        seen[block] += 1
        assert seen[block].shape[-1] == shape[-1]
        assert seen[block].numel() <= max(most, shape[-1])
    assert (seen == 1).all()


@pytest.mark.parametrize("grad_layout", GRADIENT_LAYOUTS)
@pytest.mark.parametrize(
    "layout", [each for each in WEIGHT_LAYOUTS if 0 not in each.shape], ids=str
)
def test_every_layout_is_stepped_in_its_place(layout, grad_layout, monkeypatch):
    # Blocks of a few rows, in images too; small weights have blocks of some elements.
    elements = max(50, torch.Size(layout.shape).numel() // 30)
    monkeypatch.setattr(_factored_blocks, "_ELEMENTS", {"cpu": elements})
    (values,), (gradient,) = (
        make([layout.shape], torch.float32, 1) for make in (make_weights, make_gradients)
    )
    placed = layout.place(values)
    grad = Placed(gradient, GRADIENT_LAYOUTS[grad_layout](layout))
    expected = values.clone()
    steps_of([expected], 2, [grad.view.contiguous()], lr=0.02, weight_decay=0.1)
    steps_of([placed.view], 2, [grad.view], lr=0.02, weight_decay=0.1)
    torch.testing.assert_close(placed.view, expected, rtol=1e-5, atol=1e-6)
    placed.assert_outside_untouched("weight")
    grad.assert_outside_untouched("gradient")


def test_scratch_is_two_blocks(monkeypatch):
    """Not the weight's size: two blocks, and rows and columns."""
    monkeypatch.setattr(_factored_blocks, "_ELEMENTS", {"cpu": 1 << 12})
    weight = torch.ones(1024, 512)
    optimizer = steps_of([weight], 1)
    weight.grad = torch.ones_like(weight)
    made = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
            for tensor in out if isinstance(out, (list, tuple)) else [out]:
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    if storage.data_ptr() not in known and "out" not in (kwargs or {}):
                        made.append(storage.nbytes())
            return out

    with Sizes():
        optimizer.step()
    assert max(made) == 2 * 4 * (1 << 12)


# Checkpoints


def authors(params, **options):
    """The class of the authors' package as an object: its module, groups, states and step."""

    class CAME(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    self._step(group, p)

        def _step(self, group, p):
            (b1, b2, b3), eps, state = group["betas"], group["eps"], self.state[p]
            if not state:
                state |= {"step": 0, "exp_avg": torch.zeros_like(p), "RMS": 0}
                row, column = p.shape[:-1], (*p.shape[:-2], *p.shape[-1:])
                shapes = dict(zip(NAMES[:4], (row, column) * 2, strict=True))
                for name, shape in (shapes if p.dim() > 1 else {"exp_avg_sq": p.shape}).items():
                    state[name] = torch.zeros(shape)
            state["step"] += 1
            state["RMS"] = p.norm() / p.numel() ** 0.5
            u = self._over_root(p, state, "sq", p.grad**2 + eps[0], b2) * p.grad
            u /= (u.norm() / u.numel() ** 0.5 / group["clip_threshold"]).clamp(min=1.0)
            m = state["exp_avg"].mul_(b1).add_(u, alpha=1 - b1)
            if p.dim() > 1:
                u = self._over_root(p, state, "res", (u - m) ** 2 + eps[1], b3) * m
            else:
                u = m
            p.add_(p, alpha=-group["weight_decay"] * group["lr"]).add_(u, alpha=-group["lr"])

        def _over_root(self, p, state, kind, squares, beta):
            if p.dim() < 2:
                return state["exp_avg_sq"].mul_(beta).add_(squares, alpha=1 - beta).rsqrt()
            row, column = state[f"exp_avg_{kind}_row"], state[f"exp_avg_{kind}_col"]
            row.mul_(beta).add_(squares.mean(-1), alpha=1 - beta)
            column.mul_(beta).add_(squares.mean(-2), alpha=1 - beta)
            scaled = row / row.mean(-1, keepdim=True)
            return scaled.rsqrt().unsqueeze(-1) * column.rsqrt().unsqueeze(-2)

    CAME.__module__ = types.ModuleType("came_pytorch.CAME").__name__
    defaults = {
        "lr": 2e-4, "eps": (1e-30, 1e-16), "clip_threshold": 1.0,
        "betas": (0.9, 0.999, 0.9999), "weight_decay": 0.0,
    }  # fmt: skip
    return CAME(params, defaults | options)


PUBLISHED = [name for name, options in CASES.items() if "maximize" not in options]


@pytest.mark.parametrize("name", PUBLISHED)
def test_goes_on_from_checkpoints_of_the_authors_class_and_back(name, tmp_path):
    weights, others = (make_weights(SHAPES, torch.float32) for _ in range(2))
    ours, theirs = optim.CAME(weights, **CASES[name]), authors(others, **CASES[name])
    for optimizer, each in ((ours, weights), (theirs, others)):
        stepped(optimizer, each, 2)
    dictionaries = [copy.deepcopy(each.state_dict()) for each in (ours, theirs)]
    torch.save(dictionaries[1], tmp_path / "saved.pt")
    ours, theirs = optim.CAME(weights), authors(others)
    ours.load_state_dict(torch.load(tmp_path / "saved.pt", weights_only=True))
    theirs.load_state_dict(dictionaries[0])
    assert "RMS" not in ours.state[weights[0]]
    for optimizer, each in ((ours, weights), (theirs, others)):
        stepped(optimizer, each, 2, begin=2)
    for weight, other in zip(weights, others, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-5, atol=5e-6)
        for key, value in ours.state[weight].items():
            expected = torch.as_tensor(theirs.state[other][key], dtype=torch.float32)
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)


def test_the_authors_optimizer_is_converted_and_imported():
    weights = make_weights(SHAPES, torch.float32)
    other = stepped(authors(weights, lr=0.05, clip_threshold=0.7), weights, 1)
    ours = fusedstep.convert(other)
    assert type(ours) is optim.CAME
    group = ours.param_groups[0]
    assert (group["lr"], group["clip_threshold"]) == (0.05, 0.7)
    assert ours.state[weights[0]].keys() == {"step", *NAMES}
    fusedstep.verify(ours)
    loaded = optim.CAME(weights)
    fusedstep.import_state_dict(loaded, other.state_dict())
    assert_same((weights, loaded), (weights, ours))
    assert loaded.param_groups[0]["clip_threshold"] == 0.7


# Options and errors


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"eps": 1e-3}, "eps must be two numbers"),
        ({"eps": (1e-30, -1.0)}, "epsilon value at index 1"),
        ({"eps": (1e-30, "1")}, r"eps\[1\] must be a number"),
        ({"clip_threshold": 0.0}, "clip_threshold"),
        ({"clip_threshold": "1"}, "clip_threshold must be a number"),
        ({"betas": (0.9, 0.999)}, "beta1, beta2, beta3"),
        ({"lr": "fast"}, "lr must be a number"),
    ],
    ids=str,
)
def test_refuses_what_is_out_of_range(options, text):
    weight = torch.ones(3, 4)
    with pytest.raises((TypeError, ValueError), match=text):
        optim.CAME([weight], **options)
    optimizer = optim.CAME([weight])
    with pytest.raises((TypeError, ValueError), match=text):
        optimizer.add_param_group({"params": [torch.ones(2)], **options})
    assert len(optimizer.param_groups) == 1
    before, weight.grad = weight.clone(), torch.ones_like(weight)
    optimizer.param_groups[0].update(options)
    with pytest.raises((RuntimeError, TypeError, ValueError), match=text):
        optimizer.step()
    assert torch.equal(weight, before)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"betas": (0.9, 1.0, 0.9)},
        {"weight_decay": -1.0},
        {"master_weights": "half"},
    ],
    ids=str,
)
def test_refuses_defaults_out_of_range(options):
    with pytest.raises(ValueError, match=r"Invalid|master_weights must be"):
        optim.CAME([torch.ones(3, 4)], **options)


def test_refuses_complex_weights_by_name():
    with pytest.raises(ValueError, match="complex parameters: parameter 1 of group 0"):
        optim.CAME([torch.ones(3, 4), torch.ones(3, 4, dtype=torch.complex64)])


@pytest.fixture
def mesh():
    """A mesh of this process alone."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_refuses_shards_by_name_and_steps_copies(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    whole, copied = (make_weights(SHAPES[:2], torch.float32) for _ in range(2))
    shards = [torch.nn.Parameter(distribute_tensor(each, mesh, [Shard(0)])) for each in whole]
    with pytest.raises(ValueError, match="sharded parameters: parameter 1 of group 0"):
        optim.CAME([whole[0], *shards])
    copies = [torch.nn.Parameter(distribute_tensor(each, mesh, [Replicate()])) for each in copied]
    grads = make_gradients(SHAPES[:2], torch.float32, 0)
    steps_of(whole, 2, grads)
    versions = [each._version for each in copies]
    steps_of(copies, 2, [distribute_tensor(each, mesh, [Replicate()]) for each in grads])
    for weight, copied_weight in zip(whole, copies, strict=True):
        assert torch.equal(copied_weight.to_local(), weight)
    assert all(each._version > before for each, before in zip(copies, versions, strict=True))


def test_groups_have_options_of_their_own():
    first, second = (make_weights(SHAPES[:2], torch.float32) for _ in range(2))
    alone = copy.deepcopy((first, second))
    own = {"lr": 0.1, "betas": (0.5, 0.9, 0.9), "eps": (1e-20, 1e-3), "clip_threshold": 0.5}
    grads = make_gradients(SHAPES[:2] * 2, torch.float32, 0)
    groups = [{"params": first}, {"params": second} | own]
    stepped(optim.CAME(groups), [*first, *second], 2, grads)
    steps_of(alone[0], 2, grads[:2])
    steps_of(alone[1], 2, grads[2:], **own)
    assert all(map(torch.equal, (*first, *second), (*alone[0], *alone[1])))


def test_the_learning_rate_may_be_a_tensor():
    weights, others = (make_weights(SHAPES, torch.float32) for _ in range(2))
    found = steps_of(weights, 2, lr=torch.tensor(0.25))
    assert_same((weights, found), (others, steps_of(others, 2, lr=0.25)))


def test_a_scaler_divides_and_skips():
    weights, others = (make_weights(SHAPES, torch.float32) for _ in range(2))
    scaled, expected = optim.CAME(weights), steps_of(others, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for bad in (True, False):
        grads = make_gradients(SHAPES, torch.float32, 0)
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad * scaler.scale(torch.ones(()))
        if bad:
            weights[1].grad.fill_(torch.inf)
        scaler.step(scaled)
        scaler.update()
    assert_same((weights, scaled), (others, expected))
