"""Tables and plots that are made of results."""

import json

import pytest

from reports import grid, page, steps

pytest.importorskip("matplotlib")

from reports import plot


def row_of(name, purpose="list", **more):
    optimizer, shape_list, *_ = name.split("/")
    return {
        "name": name, "optimizer": optimizer, "shapes": shape_list, "title": shape_list,
        "precision": "float32", "purpose": purpose, "tensors": 1, "elements": 1 << 20,
        "bytes": 28 << 20,
    } | more  # fmt: skip


def measured(row, limit, fused, **ms):
    results = {n: {"ms": t, "times": t / fused, "share": limit / t} for n, t in ms.items()}
    results["fused"] = {"ms": fused, "share": limit / fused}
    return row | {"limit": {"ms": limit}, "results": results}


@pytest.fixture
def results():
    """Results of a run that measured all kinds of rows."""
    found = []
    for name, ms in (
        ("lamb/resnet50", 2.6), ("adam/resnet50", 2.0), ("adam/channels-last", 2.2),
        ("adam/contiguous", 0.5), ("adam/transposed", 0.6), ("adam/sliced", 0.7),
    ):  # fmt: skip
        row = measured(row_of(name), 0.4, ms, torch_fused=2 * ms, unfused=12 * ms)
        if name.endswith(("transposed", "sliced", "channels-last")):
            row["contiguous"] = {"ms": 0.5, "times": ms / 0.5}
        found.append(row)
    for threads in (1, 2):
        row = row_of(f"adam/gpt2/{threads}-threads", "threads", threads=threads)
        found.append(measured(row, 9 / threads, 10 / threads, torch_fused=12 / threads))
    for tensors in (1, 100):
        row = row_of(f"adam/64x{tensors}", "host", tensors=tensors)
        found.append(measured(row, 0.001, 0.02, torch_fused=0.008 * tensors))
    for elements in (1 << 10, 1 << 20):
        found.append(measured(row_of(f"adam/{elements}", "size", elements=elements), 0.5, 1.0))
    return {
        "suite": "peers", "date": "today", "machine": {"cpu": "CPU"}, "threads": 2, "isa": "avx2",
        "torch": "2", "notes": ["a note"], "rows": [{"allocator": "glibc"} | r for r in found],
        "implementations": {
            "unfused": "ours unfused", "torch_fused": "torch fused", "fused": "ours fused"
        },
    }  # fmt: skip


def test_tables_by_optimizer_and_purpose(results):
    grids = {grid.title: grid for grid in page.grids(results)}
    assert list(grids) == [
        "lamb: ms a step", "adam: ms a step", "adam by threads", "adam by host", "adam by size"
    ]  # fmt: skip
    adam = grids["adam: ms a step"]
    assert adam.header == [
        "tensors", "allocator", "ours unfused", "torch fused", "ours fused", "limit", "speed-up",
        "to contiguous", "GB/s", "share",
    ]  # fmt: skip
    assert len(adam.lines) == 5, "rows of plots are in tables of their own"
    assert adam.lines[0] == [
        "resnet50", "glibc", "24.0 (12.00×)", "4.00 (2.00×)", "2.00", "0.400", "12.0×", "", "15",
        "0.20",
    ]  # fmt: skip
    transposed = dict(zip(adam.header, adam.lines[3], strict=True))
    assert transposed["to contiguous"] == "1.20×"
    assert [line[2:5] for line in grids["adam by threads"].lines] == [
        ["12.0 (1.20×)", "10.0", "9.00"],
        ["6.00 (1.20×)", "5.00", "4.50"],
    ]
    assert [line[-1] for line in grids["adam by size"].lines] == ["0.50", "0.50"]


def test_allocators_of_a_list_follow_one_another(results):
    row = results["rows"][1]
    results["rows"].append(row | {"allocator": "jemalloc"})
    lines = next(g for g in page.grids(results) if g.title == "adam: ms a step").lines
    assert [line[:2] for line in lines[:3]] == [
        ["resnet50", "glibc"], ["resnet50", "jemalloc"], ["channels-last", "glibc"]
    ]  # fmt: skip


def test_what_is_wrong_or_skipped_is_shown_as_such(results):
    row = results["rows"][1]
    row["results"]["torch_fused"] = {"wrong": "tensor 0 is 1.0e+00 off"}
    huge = {k: v for k, v in row.items() if k not in ("limit", "results")}
    results["rows"].append(huge | {"title": "huge", "shapes": "huge", "skipped": "no memory"})
    text = "\n".join(grid.markdown() for grid in page.grids(results))
    assert "| wrong |" in text
    assert "| huge |" not in text
    told = list(page.remarks(results))
    assert "Not timed: torch fused is wrong: tensor 0 is 1.0e+00 off (adam, resnet50, glibc)." in (
        told
    )
    assert "Skipped: no memory (adam, huge, glibc)." in told
    assert "a note" in told


def test_ratios_are_medians_over_the_lists(results):
    adam = [row for row in results["rows"] if row["optimizer"] == "adam"]
    for row, times in zip(adam, (1.5, 2.5, 3.5, 4.0, 9.0), strict=False):
        row["results"]["torch_fused"]["times"] = times
    (told,) = (line for line in steps.ratios(results) if line.startswith("adam"))
    assert "torch fused 3.50× (1.50 to 9.00)" in told


def test_share_above_the_limit_is_told_as_a_fault(results):
    assert not any("Above the limit" in line for line in page.remarks(results))
    results["rows"][0]["results"]["fused"]["share"] = 1.02
    (told,) = (line for line in page.remarks(results) if "Above the limit" in line)
    assert told.endswith("ours fused (lamb, resnet50, glibc).")


def test_rows_on_a_gpu_have_the_shares_of_both_of_ours(results):
    results["device"] = "Some GPU"
    results["implementations"]["graph"] = "ours, graph"
    for row in results["rows"]:
        del row["allocator"]
        row["results"]["graph"] = {"ms": 1.0, "times": 0.5, "share": 0.4}
    first = next(page.grids(results).__iter__())
    assert first.header[-2:] == ["share, ours fused", "share, ours, graph"]
    assert first.header[:2] == ["tensors", "ours unfused"]
    assert grid.subtitle(results) == "Some GPU, avx2, torch 2, today"
    assert "graph: a replay" in steps.legend(results)


def test_page_of_a_folder_has_its_tables_its_plots_and_what_made_them(results, tmp_path):
    (tmp_path / "peers.json").write_text(json.dumps(results))
    (tmp_path / "clipping.json").write_text(
        json.dumps(results | {"suite": "clipping", "rows": results["rows"][:1]})
    )
    (tmp_path / "odd.json").write_text("{}")
    (tmp_path / "rare.json").write_text('{"by": "python -m rare"}')
    (tmp_path / "peers-times.svg").touch()
    text = page.page(tmp_path)
    assert text.index("## Beside other libraries") < text.index("## Clipping and clearing")
    assert "CPU, 2 threads, avx2, torch 2, today; `./run.sh bench peers`." in text
    assert "![peers-times](peers-times.svg)" in text
    assert "[odd.json](odd.json) is from `bench/probes/odd`." in text
    assert "[rare.json](rare.json) is from `python -m rare`." in text
    gpu = steps.command("peers", {"device": "x"}), steps.command("steps", {"device": "x"})
    assert gpu == ("`./run.sh bench peers --device cuda`", "`./run.sh bench cuda`")
    assert steps.command("steps", {}) == "`./run.sh bench`"


def test_panels_are_of_optimizers_that_were_measured_on_several_lists(results):
    skipped = row_of("adam/gpt2") | {"allocator": "glibc", "skipped": "the time was up"}
    rows = results["rows"]
    rows.append(rows[0] | {"name": "lamb/gpt2", "allocator": "jemalloc"})
    panels = plot.panels_of(results)
    assert {name: len(rows) for name, rows in panels.items()} == {"adam": 5}
    assert not plot.panels_of(results | {"rows": [*rows[:2], skipped]})


def test_bars_stand_for_the_times_of_ours(results):
    results["rows"][1]["results"]["torch_fused"] = {"wrong": "tensor 0 is off"}
    figure = plot.plot_times(results, plot.panels_of(results))
    (adam,) = figure.axes
    assert adam.get_title(loc="left") == "adam"
    heights = {bars.get_label(): [b.get_height() for b in bars] for bars in adam.containers}
    assert heights["ours unfused"] == pytest.approx([12.0] * 5)
    assert heights["torch fused"] == pytest.approx([2.0] * 4)
    assert [text.get_text() for text in adam.texts] == ["wrong"]


def test_the_same_results_make_the_same_file(results, tmp_path):
    (tmp_path / "peers.json").write_text(json.dumps(results))
    plot.draw(tmp_path / "peers.json", tmp_path)
    first = (tmp_path / "peers-times.svg").read_bytes()
    plot.draw(tmp_path / "peers.json", tmp_path)
    assert (tmp_path / "peers-times.svg").read_bytes() == first
    assert b"<text" in first
    (tmp_path / "few.json").write_text(json.dumps(results | {"rows": results["rows"][:1]}))
    plot.draw(tmp_path / "few.json", tmp_path)
    assert not (tmp_path / "few-times.svg").exists()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00012, "0.0001"),
        (0.0456, "0.0456"),
        (0.456, "0.456"),
        (4.56, "4.56"),
        (456.7, "457"),
        (999.4, "999"),
        (999.6, "1,000"),
    ],
)
def test_milliseconds(value, text):
    assert grid.milliseconds(value) == text
