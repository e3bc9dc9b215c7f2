"""The native iteration of Muon's matrices, on each level of the CPU that has kernels for it."""

import pytest
import torch

from fusedstep._matrix import newton_schulz
from fusedstep._matrix.coefficients import coefficients_of
from fusedstep._matrix.newton_schulz import Scratch, orthogonalize
from fusedstep._native import ops
from reference.orthogonal import iterated
from support.matrices import error
from support.stepping import forced_isa

#: The largest relative error of an iterated matrix, for singular values of random matrices.
ERROR = 8e-2

LEVELS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(name not in ops.product_isas(), reason=f"CPU without {name}"),
    )
    for name in ("amx", "avx512bf16")
]
SHAPES = (
    (2, 1, 1),
    (1, 17, 17),
    (3, 64, 64),
    (2, 100, 260),
    (2, 260, 100),
    (1, 1, 64),
    (1, 64, 17),
)


@pytest.fixture(params=LEVELS)
def level(request):
    with forced_isa(request.param):
        yield request.param


def matrices(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return (x / torch.linalg.matrix_norm(x)[:, None, None]).bfloat16()


def natively(x, y, steps, ends, is_aol=False):
    """Runs the operator on batches, in a workspace of the size that it asks for."""
    numbers = [number for step in steps for number in step]
    size = torch.ops.fusedstep.newton_schulz_workspace(x, numbers, ends, is_aol)
    room = torch.empty(size, dtype=torch.uint8)
    torch.ops.fusedstep.newton_schulz(x, y, room, numbers, ends, is_aol)


@pytest.mark.parametrize("start", ["norm", "aol"])
@pytest.mark.parametrize("gram", [False, True], ids=["usual form", "Gram form"])
@pytest.mark.parametrize("name", ["quintic", "polar_express"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_the_iteration_in_float64(level, shape, name, gram, start, monkeypatch):
    monkeypatch.setattr(newton_schulz, "takes_gram_form", lambda *args: gram)
    for count in (1, 5, 8):
        steps, x, scratch = coefficients_of(name, count), matrices(shape), Scratch()
        expected = torch.stack([iterated(each.double(), steps, 1e-7, start) for each in x])
        found = orthogonalize(x, steps, scratch, start == "aol")
        assert found.shape == x.shape
        assert error(found, expected) < ERROR
        kept = {use for use, *_ in scratch._buffers}
        assert kept == {"other", "workspace"}, "the products of the library have been taken"


@pytest.mark.parametrize("is_aol", [False, True], ids=["norm", "aol"])
def test_batches_of_other_shapes_do_not_affect_one_another(level, is_aol):
    """An even number of ends leaves the result in x, an odd number in y."""
    steps, x = coefficients_of("quintic", 5), [matrices(shape) for shape in SHAPES]
    ends = [
        end for i in range(len(x)) for end in ([True] * 5, [False, True, False, False, True])[i % 2]
    ]

    def run(x, ends):
        y = [torch.empty_like(each) for each in x]
        natively(x, y, steps, ends, is_aol)
        counts = [sum(ends[i : i + 5]) for i in range(0, len(ends), 5)]
        return [b if count % 2 else a for a, b, count in zip(x, y, counts, strict=True)]

    together = run([each.clone() for each in x], ends)
    for i, (each, expected) in enumerate(zip(x, together, strict=True)):
        (alone,) = run([each.clone()], ends[5 * i : 5 * i + 5])
        assert alone.equal(expected)


@pytest.mark.parametrize("is_aol", [False, True], ids=["norm", "aol"])
def test_nothing_is_allocated_once_the_scratch_is_there(level, is_aol):
    steps, x, scratch = coefficients_of("quintic", 5), matrices((2, 100, 260)), Scratch()
    found = [orthogonalize(x.clone(), steps, scratch, is_aol).data_ptr() for _ in range(2)]
    assert found[0] == found[1]
    assert len(scratch.tensors()) == 2


def test_no_step_asks_for_the_name_of_the_level(level, monkeypatch):
    """torch 2.11 leaks memory for each text that an operator returns."""
    monkeypatch.setattr(ops, "product_isa", lambda: pytest.fail("a text in a step"))
    scratch = Scratch()
    orthogonalize(matrices((1, 20, 30)), coefficients_of("quintic", 2), scratch)
    assert "workspace" in {use for use, *_ in scratch._buffers}


def test_a_forced_instruction_set_has_no_products(level):
    assert ops.product_isa() == level
    assert ops.isa() == "avx512"
    x = matrices((1, 20, 30))
    with forced_isa("avx512"):
        assert ops.product_isa() == ""
        assert not torch.ops.fusedstep.has_chains(-1)
        with pytest.raises(RuntimeError, match="no kernels for newton_schulz"):
            natively([x], [x.clone()], [(1.0, 1.0, 1.0)], [True])
        scratch = Scratch()
        orthogonalize(x, coefficients_of("quintic", 2), scratch)
        assert "workspace" not in {use for use, *_ in scratch._buffers}


def test_other_dtypes_are_the_librarys(level):
    for dtype in (torch.float16, torch.float32, torch.float64):
        scratch = Scratch()
        orthogonalize(matrices((1, 20, 30)).to(dtype), coefficients_of("quintic", 2), scratch)
        assert "workspace" not in {use for use, *_ in scratch._buffers}


#: What differs from arguments that are right, and the error.
WRONG = {
    "workspace": ({"workspace": lambda right: right[:-1]}, "workspace must be at least"),
    "its dtype": ({"workspace": torch.Tensor.char}, "workspace must be at least .* bytes"),
    "its layout": ({"workspace": lambda right: right.repeat(2)[::2]}, "contiguous bytes"),
    "x": ({"x": lambda right: [right[0].float()]}, "x must be bfloat16 or float16"),
    "kernels": (dict.fromkeys("xy", lambda right: [right[0].half()]), "no kernels .* this dtype"),
    "strides": ({"x": lambda right: [right[0].mT.contiguous().mT]}, "x must be contiguous"),
    "y": ({"y": lambda right: [right[0].half()]}, "y must be of the dtype and device of x"),
    "shapes": ({"y": lambda right: [right[0][:, 1:].clone()]}, "y must have the shapes of x"),
    "lists": ({"y": lambda right: []}, "y must have as many batches as x"),
    "steps": ({"steps": lambda right: right[:-1]}, "steps must be three numbers for each step"),
    "no steps": ({"steps": lambda right: []}, "ends must be one bool for each step"),
    "ends": ({"ends": lambda right: right[:-1]}, "ends must be one bool for each step"),
    "last end": ({"ends": lambda right: [True, False]}, "the last step of each batch must be one"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named_and_nothing_changes(level, what):
    x, steps, ends = matrices((2, 20, 30)), [2.0, -1.5, 0.5] * 2, [True, True]
    size = torch.ops.fusedstep.newton_schulz_workspace([x], steps, ends, True)
    right = {
        "x": [x],
        "y": [torch.full_like(x, 7)],
        "workspace": torch.empty(size, dtype=torch.uint8),
        "steps": steps,
        "ends": ends,
        "is_aol": True,
    }
    changes, message = WRONG[what]
    wrong = right | {name: change(right[name]) for name, change in changes.items()}
    kept = [each.clone() for each in [*wrong["x"], *wrong["y"]]]
    with pytest.raises(RuntimeError, match=message):
        torch.ops.fusedstep.newton_schulz(*wrong.values())
    assert all(a.equal(b) for a, b in zip([*wrong["x"], *wrong["y"]], kept, strict=True))
