"""The native engine of chained matrix products on a GPU, against float64."""

import pytest
import torch

from fusedstep import optim
from fusedstep._matrix import newton_schulz
from fusedstep._matrix.coefficients import coefficients_of
from fusedstep._matrix.newton_schulz import Chain, Scratch, orthogonalize
from reference.orthogonal import almost_orthogonal, iterated
from support.matrices import error

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)),
    reason="needs a GPU of compute capability 9.0",
)

#: How many times the error of the library's products in the usual form the error may be.
USUAL, GRAM = 1.5, 8

#: Starts, and how many times these errors they may have: the AOL start rounds twice more.
STARTS = {"norm": 1, "aol": 3}

DTYPES = (torch.float16, torch.bfloat16)

#: Wide, tall and square; less than a tile, tiles and a part, with rows that end in no word of rows.
SHAPES = [(2, 16, 64), (3, 64, 16), (2, 200, 456), (1, 300, 136), (4, 1, 8), (2, 128, 128)]
SHAPES += [(2, 333, 336), (1, 9, 1000), (3, 520, 128), (1, 640, 1288)]


def normalized(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x / torch.linalg.matrix_norm(x)[:, None, None]


def usual_form(x, steps, start="norm"):
    """The iteration by torch's products, in the dtype of x."""
    if start == "aol":
        x = almost_orthogonal(x.double()).to(x.dtype)
    for a, b, c in steps:
        gram = x @ x.mT if x.shape[1] <= x.shape[2] else x.mT @ x
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        pair = (polynomial, x) if x.shape[1] <= x.shape[2] else (x, polynomial)
        x = torch.baddbmm(x, *pair, beta=a)
    return x


def run(x, steps, is_aol=False):
    """The results of batches that go through the products together."""
    chain = Chain(x, [torch.full_like(each, torch.nan) for each in x], steps, is_aol)
    chain.take(Scratch())
    return [each.clone() for each in chain.run()]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("gram", [False, True], ids=["usual form", "Gram form"])
@pytest.mark.parametrize("name", ["quintic", "polar_express"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_iterates_singular_values(dtype, name, gram, start, monkeypatch):
    """The usual form errs as the library's products do, the Gram form a few times as much."""
    monkeypatch.setattr(newton_schulz, "takes_gram_form", lambda *args: gram)
    for count in (0, 1, 2, 3, 5, 8) if start == "norm" else (1, 2, 3, 4, 5, 8):
        steps = coefficients_of(name, count)
        exact = [normalized(shape, seed) for seed, shape in enumerate(SHAPES)]
        found = run([x.to("cuda", dtype) for x in exact], steps, start == "aol")
        for x, each in zip(exact, found, strict=True):
            expected = torch.stack([iterated(matrix, steps, 1e-7, start) for matrix in x])
            by_library = error(usual_form(x.to("cuda", dtype), steps, start).cpu(), expected)
            bound = STARTS[start] * (GRAM if gram else USUAL) * by_library
            bound += STARTS[start] * torch.finfo(dtype).eps
            assert error(each.cpu(), expected) <= bound, (count, x.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_alone_are_rounded_once(dtype):
    """One step with b = c = 0 multiplies by a; with a = c = 0 it is X X' X."""
    unit = torch.finfo(dtype).eps / 2
    x = normalized((2, 200, 456), 0).to("cuda", dtype)
    (found,) = run([x.clone()], [(2.0, 0.0, 0.0)])
    assert found.equal(2 * x)
    wide = x.double()
    (found,) = run([x.clone()], [(0.0, 1.0, 0.0)])
    gram = (wide @ wide.mT).to(dtype).double()
    expected = gram @ wide
    # Gram matrices may be rounded to a neighbour where float32 sums lie beside a tie.
    bound = 4 * unit * (gram.abs() @ wide.abs()) + 1e-7
    assert ((found.double() - expected).abs() <= bound).all()


def test_symmetric_products_are_symmetric_to_the_last_bit():
    """The step with b alone makes of X = [x, I] the product G X: its last columns are G."""
    for side in (40, 64, 128, 200, 328):
        x = normalized((2, side, 512), 3).to("cuda", torch.float16)
        eye = torch.eye(side, device="cuda", dtype=torch.float16).expand(2, side, side).contiguous()
        wide = torch.cat([x, eye, eye.new_zeros(2, side, -side % 8)], 2).contiguous()
        (found,) = run([wide.clone()], [(0.0, 1.0, 0.0)])
        gram = found[:, :, 512 : 512 + side]
        assert gram.equal(gram.mT)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_aol_start_scales_rows_or_columns(dtype):
    """A step that multiplies by 1 leaves them scaled. Those of zeros stay zeros."""
    exact = [normalized(shape, seed) for seed, shape in enumerate(SHAPES)]
    exact[2][1, 5] = 0  # a row of a wide matrix
    exact[3][0, :, 7] = 0
    exact[3][0, :, 9] *= 1e-4
    exact[5][0] = 0
    found = run([x.to("cuda", dtype) for x in exact], [(1.0, 0.0, 0.0)], is_aol=True)
    for x, each in zip(exact, found, strict=True):
        x, each = x.to(dtype).double(), each.cpu().double()
        expected = almost_orthogonal(x)
        assert (torch.linalg.matrix_norm(each, 2) <= 1 + 4 * torch.finfo(dtype).eps).all()
        assert each[x == 0].eq(0).all()
        assert error(each, expected) <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("is_aol", [False, True], ids=["norm", "aol"])
def test_a_nan_stays_in_its_matrix(is_aol):
    x = normalized((3, 200, 456), 0).to("cuda", torch.float16)
    steps = coefficients_of("quintic", 5)
    (clean,) = run([x.clone()], steps, is_aol)
    x[1, 7, 9] = torch.nan
    (found,) = run([x], steps, is_aol)
    assert found[1].isnan().all()
    assert found[[0, 2]].equal(clean[[0, 2]])


@pytest.mark.parametrize("is_aol", [False, True], ids=["norm", "aol"])
def test_bits_are_the_same_alone_and_together(is_aol):
    steps = coefficients_of("quintic", 5)
    x = [normalized(shape, 1).to("cuda", torch.float16) for shape in SHAPES * 7]
    together = run([each.clone() for each in x], steps, is_aol)
    for each, found in zip(x, together, strict=True):
        for part, expected in zip(each.split(1), found.split(1), strict=True):
            (alone,) = run([part.clone()], steps, is_aol)
            assert alone.equal(expected)
            assert orthogonalize(part.clone(), steps, Scratch(), is_aol).equal(expected)


@pytest.mark.parametrize("adds_eps", [False, True])
@pytest.mark.parametrize(
    ("stored", "to"),
    [
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.float16),
    ],
    ids=str,
)
def test_matrices_are_divided_by_their_norms(stored, to, adds_eps):
    generator = torch.Generator().manual_seed(2)
    x = [
        torch.randn(shape, generator=generator) for shape in [(3, 7, 11), (2, 300, 700), (0, 4, 4)]
    ]
    x = [each.to("cuda", stored) for each in x]
    x[0][1] = 0
    x[1][0, 5, 5] = torch.nan
    out = [torch.empty_like(each, dtype=to) for each in x]
    size = torch.ops.fusedstep.normalize_sums(x)
    sums = torch.empty(size, device="cuda")
    torch.ops.fusedstep.normalize_into(x, out, sums, 1e-3, adds_eps)
    for each, found in zip(x, out, strict=True):
        norms = torch.linalg.matrix_norm(each.double())[:, None, None]
        divisor = norms + 1e-3 if adds_eps else norms.clamp(min=1e-3)
        expected = each.double() / divisor
        limit = torch.finfo(to).eps * expected.abs() + torch.finfo(to).smallest_normal * 1e-3
        assert found.isnan().equal(expected.isnan())
        assert ((found.double() - expected).abs() <= limit).logical_or(expected.isnan()).all()


def test_arguments_that_do_not_fit_are_refused_and_change_nothing():
    x = normalized((2, 16, 24), 0).to("cuda", torch.float16)
    kept, y, steps, ends = x.clone(), torch.zeros_like(x), [1.0, 2.0, 3.0], [True]
    ops = torch.ops.fusedstep
    size = ops.newton_schulz_workspace([x], steps, ends, True)
    room = torch.empty(size, dtype=torch.uint8, device="cuda")

    def refused(match, x=x, y=y, room=room, steps=steps, ends=ends):
        with pytest.raises(RuntimeError, match=match):
            ops.newton_schulz([x], [y], room, steps, ends, True)

    refused("workspace must be at least", room=room[:-1])
    refused("workspace must be at least", room=room.cpu())
    refused("y must be of the dtype", y=y.cpu())
    refused("multiple of 8 columns", x=x[:, :, :12].clone(), y=y[:, :, :12].clone())
    assert x.equal(kept)
    assert not y.any()


def of_aol(params, **options):
    return optim.Muon(params, ns_start="aol", **options)


@pytest.mark.parametrize("cls", [optim.Muon, optim.MuSGD, of_aol])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_of_all_shapes_step_together(cls, dtype, monkeypatch):
    """As ``fused=False`` steps them, whether or not a gradient is contiguous."""
    shapes = [(64, 64), (160, 64), (64, 200), (4, 40, 24), (32, 8, 3, 3), (33, 65), (64, 64)]
    calls = []
    run_chain = Chain.run
    monkeypatch.setattr(Chain, "run", lambda chain: calls.append(len(chain._x)) or run_chain(chain))

    def trained(fused, transposed):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(s, device="cuda", dtype=dtype)) for s in shapes]
        start = [p.detach().clone() for p in params]
        optimizer = cls([{"params": params, "use_muon": True}], lr=0.5, fused=fused)
        for _ in range(3):
            for p in params:
                grad = torch.randn_like(p)
                p.grad = grad.mT.contiguous().mT if transposed else grad
            optimizer.step()
        return [(p.detach() - a).float() for p, a in zip(params, start, strict=True)]

    for transposed in (False, True):
        expected = trained(False, transposed)
        assert not calls
        for a, b in zip(trained(None, transposed), expected, strict=True):
            assert (a - b).norm() <= 0.1 * b.norm()
        # [33, 65] alone has rows that begin at no word.
        assert calls.count(5) == (0 if transposed else 3)
        calls.clear()


def test_memory_is_kept_and_scratch_may_move():
    """Another group, with larger matrices, takes the memory anew between two steps."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(64, 64, device="cuda")) for _ in range(2)]
    params += [torch.nn.Parameter(torch.randn(128, 512, device="cuda"))]
    optimizer = optim.Muon([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)
    other = [torch.nn.Parameter(p.detach().clone()) for p in params]
    single = [optim.Muon([p], lr=0.1) for p in other]
    for number in range(3):
        for p, q in zip(params, other, strict=True):
            p.grad = None if number == 0 and p is params[2] else torch.randn_like(p)
            q.grad = None if p.grad is None else p.grad.clone()
        optimizer.step()
        for each in single:
            each.step()
    for p, q in zip(params, other, strict=True):
        assert p.equal(q)
