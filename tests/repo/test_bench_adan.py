"""The benchmark of Adan over sizes of GPT-2: the sizes, what is measured, the tables."""

import dataclasses
import math
import statistics
import sys
import types

import pytest
import torch

from fusedstep import optim
from reports import adan, page
from suites import gpt2, implementations, memory, rows, shapes, subjects, worker
from suites.adan_published import PUBLISHED

# ---- The publication -----------------------------------------------------------------------------


def test_the_published_sizes_are_twenty_five():
    assert len(PUBLISHED) == 25
    assert list(PUBLISHED)[:2] == ["6x6x768", "12x6x768"]
    assert list(PUBLISHED)[-1] == "16x24x2048"
    assert {published.heads for published in PUBLISHED.values()} == {6, 12, 16}


def test_the_published_headline_comes_out_of_its_tables():
    """The authors: at most 15 % more memory, 64 to 85 % of the time."""
    differences = [published.difference for published in PUBLISHED.values()]
    assert min(differences) == 0
    assert max(differences) == pytest.approx(14.30, abs=0.01)
    assert sum(difference > 0.1 for difference in differences) == 4
    ratios = [published.ratio for published in PUBLISHED.values()]
    assert min(ratios) == pytest.approx(0.638, abs=1e-3)
    assert max(ratios) == pytest.approx(0.847, abs=1e-3)
    assert statistics.median(ratios) == pytest.approx(0.76, abs=0.01)


def test_published_peaks_are_what_an_allocator_reserves():
    """Whole pieces of 2 MiB, in 10^6 bytes rounded down: why ours are compared as reserved."""
    for published in PUBLISHED.values():
        for peak in (published.adam_peak, published.adan_peak):
            pieces = math.ceil(peak * 10**6 / 2**21)
            assert pieces * 2**21 // 10**6 == peak


def test_rows_have_the_published_sizes():
    found = list(rows.adan())
    assert [str(row) for row in found] == [f"adan/{name}" for name in PUBLISHED]
    for row, published in zip(found, PUBLISHED.values(), strict=True):
        assert row.shape_list.elements // 10**6 == published.millions
        # Two embeddings, twelve tensors a block, the last norm: kernels that a for-loop starts.
        assert len(row.shape_list.shapes) == 2 + 12 * published.layers + 2
        assert max(row.elements) == gpt2.VOCABULARY * published.embedding
    assert found[0].title == "6 × 6 × 768"


# ---- The model -----------------------------------------------------------------------------------

TINY = dataclasses.replace(PUBLISHED["6x6x768"], heads=2, layers=2, embedding=8)


def test_the_model_predicts_from_what_came_before():
    """A later token changes no earlier logits; every parameter gets a gradient."""
    torch.manual_seed(0)
    model = gpt2.GPT2(TINY)
    tokens = torch.randint(gpt2.VOCABULARY, (1, 6))
    changed = tokens.clone()
    changed[0, 4] = (changed[0, 4] + 1) % gpt2.VOCABULARY
    torch.manual_seed(1)
    loss, logits = model(tokens)
    torch.manual_seed(1)
    _, others = model(changed)
    torch.testing.assert_close(logits[:, :4], others[:, :4])
    assert not torch.allclose(logits[:, 4], others[:, 4])
    assert loss.item() == pytest.approx(math.log(gpt2.VOCABULARY), rel=0.01)
    gpt2.make_gradients(model)
    assert all(parameter.grad.any() for parameter in model.parameters())


def test_gelu_is_that_of_torch():
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    expected = torch.nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(gpt2.gelu(x), expected)


# ---- What is measured ----------------------------------------------------------------------------

SOME = shapes.ShapeList("some", "some", ((64, 48), (1,), (1000,), (3, 5, 7)))


def verdict(implementation):
    row = rows.Row(rows.NAMED["adan"], SOME)
    params = subjects.make(SOME, torch.float32)
    formula = implementation.formula_of(row)
    check = subjects.Check(formula, SOME, torch.float32, implementation.slack)
    return check(implementation.build(row, params), params)


@pytest.mark.parametrize("implementation", implementations.ADAN[:7], ids=lambda i: i.name)
def test_contestants_are_right(implementation):
    assert verdict(implementation) is None


class AuthorsAdan(optim.Adan):
    """The single-tensor one fails."""

    def __init__(self, params, fused, foreach, **options):
        if not foreach:
            raise RuntimeError("no kernel for this machine")
        super().__init__(params, fused=False, **options)


def test_the_authors_kernel_is_a_contestant_where_it_can_be_imported(monkeypatch):
    single, multi = implementations.ADAN[7:]
    with pytest.raises(implementations.UnavailableError, match="cannot be imported"):
        verdict(multi)
    for name, members in (("adan", {"Adan": AuthorsAdan}), ("fused_adan", {})):
        module = types.SimpleNamespace(__spec__=types.SimpleNamespace(), **members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True)
    assert verdict(multi) is None
    with pytest.raises(RuntimeError, match="no kernel for this machine"):
        verdict(single)


def test_peaks_are_those_of_a_training_step(monkeypatch):
    monkeypatch.setattr(memory, "POSITIONS", 32)
    model = gpt2.GPT2(TINY)
    before = model.norm.weight.clone()
    for number, step in enumerate(memory.training_steps(model, "adan_multi")):
        assert step == ("first", "later")[number]
        assert model.norm.weight.grad is not None
        assert not torch.equal(model.norm.weight, before), "read before the step"
        before = model.norm.weight.clone()
    assert number == 1


def test_a_size_that_does_not_fit_is_not_tried(monkeypatch):
    parameters = 82 * 10**6
    assert "needs about 6 GiB, 4 are free" in memory.lacking("6x6x768", parameters, 4 << 30)
    assert memory.lacking("6x6x768", parameters, 8 << 30) is None
    monkeypatch.setattr(memory, "peaks", None)
    bench = worker.Bench(worker.Request(until=0.0, suite="adan"))
    monkeypatch.setattr(bench.device, "available_memory", lambda: 4 << 30)
    results = {"adam_for_loop": {"ms": 1.0}}
    bench._add_peaks(next(iter(rows.adan())), results)
    assert results["adam_for_loop"] == {"ms": 1.0}
    assert results["adan_multi"] == {"memory": "needs about 6 GiB, 4 are free"}


def test_peaks_stand_beside_the_times(monkeypatch):
    def peaks(size, name, device):
        if name == "adan_single":
            raise torch.OutOfMemoryError("the system ended the process")
        return {"first": 1, "later": 2}

    monkeypatch.setattr(memory, "peaks", peaks)
    bench = worker.Bench(worker.Request(until=0.0, suite="adan"))
    monkeypatch.setattr(bench.device, "available_memory", lambda: 64 << 30)
    results = {name: {"ms": 1.0} for name in memory.COMPARED[:2]}
    results["adan_multi"] = {"wrong": "off"}
    bench._add_peaks(next(iter(rows.adan())), results)
    assert results == {
        "adam_for_loop": {"ms": 1.0, "first": 1, "later": 2},
        "adan_single": {"ms": 1.0, "memory": "OutOfMemoryError: the system ended the process"},
        "adan_multi": {"wrong": "off"},
    }


# ---- The tables ----------------------------------------------------------------------------------


def peaks(first, later):
    return {"first": first * 10**6, "later": later * 10**6}


def some_results():
    full = {name: {"memory": "needs 99 GiB"} for name in memory.COMPARED}
    found = {
        "adam_for_loop": {"ms": 4.0} | peaks(4000, 5000),
        "adam_foreach": {"ms": 3.0},
        "adam_fused": {"ms": 2.0},
        "adan_single": {"wrong": "1.0e+00 off"} | peaks(4000, 5600),
        "adan_multi": {"ms": 2.4} | peaks(4400, 6000),
    }
    sizes = {"16x24x2048": (1_313_000_000, full), "6x6x1536": (248_900_000, found)}
    return {
        "suite": "adan",
        "machine": {"cpu": "a CPU"},
        "torch": "2.11",
        "threads": 2,
        "date": "today",
        "notes": [],
        "implementations": {each.name: each.title for each in implementations.ADAN},
        "rows": [
            {"name": f"adan/{name}", "optimizer": "adan", "purpose": "list", "shapes": name,
             "title": name.replace("x", " × "), "elements": elements, "results": results}
            for name, (elements, results) in sizes.items()
        ],
    }  # fmt: skip


def cells(grid, line):
    return dict(zip(grid.header, grid.lines[line], strict=True))


def test_memory_table_stands_beside_the_published():
    first, later, _ = page.grids(some_results())
    assert cells(first, 0) == {
        "heads × layers × embedding": "6 × 6 × 1536",
        "M": "248",
        "Adam, for-loop": "4,000",
        "Adan, fused single %": "0.00",
        "Adan, fused multi %": "+10.00",
        "published, Adam": "6,880",
        "published %": "+6.22",
    }
    found = cells(later, 0)
    assert (found["Adan, fused single %"], found["Adan, fused multi %"]) == ("+12.00", "+20.00")
    assert "published %" not in found


def test_memory_table_of_a_gpu_has_what_was_reserved():
    results = some_results()
    found = results["rows"][1]["results"]
    for name, reserved in zip(memory.COMPARED, (4000, 4000, 4200), strict=True):
        found[name]["first_reserved"] = reserved * 10**6
    first = cells(page.grids(results)[0], 0)
    assert first["reserved, Adam"] == "4,000"
    assert first["reserved, Adan, fused multi %"] == "+5.00"
    told = "\n".join(page.remarks(results))
    handed_out, reserved = (
        f"memory {kind} in the first step: at most {most} % beside Adam, above the published in "
        for kind, most in (("handed out", "+10.00"), ("reserved", "+5.00"))
    )
    assert f"{handed_out}1 of 1 rows (6x6x1536)" in told
    assert f"{reserved}0 of 1 rows" in told


def test_time_table_stands_beside_the_published():
    *_, grid = page.grids(some_results())
    assert cells(grid, 0) == {
        "heads × layers × embedding": "6 × 6 × 1536",
        "M": "248",
        "Adam, for-loop": "4.00",
        "Adam, foreach": "3.00",
        "Adam, fused": "2.00",
        "Adan, for-loop": "–",
        "Adan, foreach": "–",
        "Adan, fused single": "wrong",
        "Adan, fused multi": "2.40",
        "authors' fused single": "–",
        "authors' fused multi": "–",
        "multi / for-loop %": "60.0",
        "published %": "77.2",
        "multi / foreach %": "80.0",
        "multi / fused %": "120.0",
    }


def test_remarks_tell_the_point_and_what_is_missing():
    told = list(page.remarks(some_results()))
    text = "\n".join(told)
    assert "60.0 % of the time of Adam, for-loop, median of 1 rows (60.0 to 60.0)" in text
    assert "Published on one A100: 77.2 %" in text
    assert "Not timed: Adan, fused multi does not fit: needs 99 GiB (adan, 16 × 24 × 2048)." in told
    assert "Adan, fused single is wrong: 1.0e+00 off (adan, 6 × 6 × 1536)." in text
    assert adan.difference(some_results()["rows"][0], "adan_multi", "first") is None
