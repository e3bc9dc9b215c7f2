"""The pages: their Python runs, their links lead somewhere, pictures have committed results."""

import inspect
import json
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fusedstep import optim
from nanonano_settings import ATTENTION
from probes import against
from probes.zero_offload import medians
from reports import iterations
from reports.tables import rounded
from support.pages import INTEGRATIONS, PAGES, ROOT, blocks


def named(pages):
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


WITH_EXAMPLES = [page for page in PAGES if blocks(page, "python") and page not in INTEGRATIONS]


@pytest.mark.parametrize("page", named(WITH_EXAMPLES))
def test_examples_run(page):
    exec(compile("\n".join(blocks(page, "python")), str(page), "exec"), {"__name__": "__main__"})


def test_every_page_on_a_framework_is_run():
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "frameworks").glob("*.py"))
    run = re.findall(r'run_page\(\s*"(.+?)"', tests)
    assert {page.stem for page in INTEGRATIONS} == set(run)
    overview = (ROOT / "docs" / "integrations.md").read_text()
    assert all(f"(integrations/{page.name})" in overview for page in INTEGRATIONS)


@pytest.mark.parametrize("page", named(PAGES))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_start_installs_what_a_build_imports():
    """Without build isolation pip brings none of it. torch is there, as the page says."""
    (listed,) = re.findall(
        r"^\[build-system\]\nrequires = \[(.+?)\]", (ROOT / "pyproject.toml").read_text(), re.M
    )
    needed = {re.match(r"[\w-]+", word)[0] for word in re.findall(r'"(.+?)"', listed)}
    tools, install, _ = blocks(ROOT / "docs" / "start.md", "sh")[0].splitlines()
    assert {*re.findall(r"(?<=[ '])[a-z][\w-]+", tools.partition("#")[0])} >= {
        *(needed - {"torch"}),
        "cmake",
        "ninja",
    }
    assert "--no-build-isolation" in install


def test_pages_of_optimizers_have_bars_of_their_steps(monkeypatch):
    """On the site: for every optimizer that one of the results has."""
    monkeypatch.syspath_prepend(ROOT / "scripts" / "site")
    import figures

    rows = [row for files in figures.FILES for file in files for row in results(file)["rows"]]
    measured = {row["optimizer"] for row in rows if row["title"] in figures.OF and "results" in row}
    sections = {
        page.stem: figures.section(page.stem, "") for page in ROOT.glob("docs/optimizers/*.md")
    }
    assert {name for name, text in sections.items() if '"bar ours"' in text} == measured
    torchs = {"sgd", "lion", "rmsprop", "radam", "nadam", "adamax", "adadelta", "asgd", "rprop"}
    assert measured >= torchs | {"sparse_adam", "rowwise_adagrad"}
    for file in ("intel-emerald-rapids-16-cores/steps.json", "nvidia-h100/steps.json"):
        for name in torchs:
            assert f"<b>{gpt2(file, name):#.3g}</b>" in sections[name], (file, name)


def test_narrow_screens_have_bars_in_place_of_the_picture_of_times(monkeypatch):
    """At a phone's width the picture's text is too small to read."""
    monkeypatch.syspath_prepend(ROOT / "scripts" / "site")
    hooks = pytest.importorskip("hooks", exc_type=ImportError)
    for page in [ROOT / "README.md", ROOT / "docs" / "README.md", ROOT / "docs" / "performance.md"]:
        ((path, times),) = [
            (page.parent / match[1], match) for match in hooks.TIMES.finditer(page.read_text())
        ]
        assert times[0].startswith("![")
        told = hooks.figures.narrow(path)
        rows = json.loads((path.parent / "peers.json").read_text())["rows"]
        (lamb, *_) = [
            row["results"]
            for row in rows
            if (row["optimizer"], row["title"]) == ("lamb", "GPT-2 124 M")
        ]
        assert "<b>lamb, GPT-2 124 M</b>" in told
        assert f"<b>{lamb['timm']['times']:#.3g}×</b>" in told
        assert told.count("<b>1.00×</b>") == told.count('"bar ours"') > 3


def test_every_page_is_in_a_menu_of_the_site():
    menus = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert "  - Optimizers: []" in menus  # where scripts/site/hooks.py puts that folder's pages
    pages = {page.name for page in ROOT.glob("docs/*.md")}
    pages |= {f"integrations/{page.name}" for page in INTEGRATIONS}
    assert {page.parent.name for page in ROOT.glob("docs/**/*.md")} == {
        "docs",
        "integrations",
        "optimizers",
    }
    missing = sorted(pages - set(re.findall(r": (\S+\.md)$", menus, re.MULTILINE)))
    assert not missing, f"mkdocs.yml, nav: has no line for {', '.join(missing)}"


@pytest.mark.parametrize("page", named(PAGES))
def test_pictures_are_drawn_from_committed_results(page):
    """A picture has its results beside it, or in a file or folder that the page links to."""
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", page.read_text())
    files = [page.parent / path for mark, path in links if not mark and "/results/" in path]
    given = any(file.suffix == ".json" or list(file.glob("*.json")) for file in files)
    for picture in [page.parent / path for mark, path in links if mark]:
        beside = [
            file for file in picture.parent.glob("*.json") if picture.stem.startswith(file.stem)
        ]
        assert beside or given, picture


def results(file):
    return json.loads((ROOT / "bench" / "results" / file).read_text())


def gpt2(file, optimizer):
    """Milliseconds of ours, over the weights of GPT-2 124 M."""
    return next(
        row["results"]["fused"]["ms"]
        for row in results(file)["rows"]
        if (row["optimizer"], row["title"]) == (optimizer, "GPT-2 124 M") and "results" in row
    )


def test_the_choice_has_every_optimizer():
    table = (ROOT / "docs" / "choosing.md").read_text().partition("\n\nBytes are")[0]
    missing = [name for name in optim.__all__ if f"`{name}`" not in table]
    # Classes with states in codes are those of their names without what tells of that.
    assert [name for name in missing if not re.search(r"(8bit|4bit|Fp8)$", name)] == []


def test_times_of_the_choice_are_those_measured():
    """The columns CPU and GPU of docs/choosing.md, in units of AdamW's time."""
    cpu, gpu = "intel-emerald-rapids-16-cores/peers.json", "nvidia-h200/peers.json"
    steps = "nvidia-h200/steps.json"
    machines = {"cpu": "nvidia-h100", "cuda": "nvidia-h200"}  # the cores beside a GPU, and a GPU
    adafactor, galore = (
        {device: results(f"{machine}/{name}.json")[device] for device, machine in machines.items()}
        for name in ("adafactor", "galore")
    )
    muon = results("nvidia-h200/muon.json")["ms"]
    on = {device: adafactor[device]["ms"] for device in machines}
    low_rank = [galore[device]["steps"]["hybrid"] / on[device]["AdamW"] for device in on]
    expected = {
        "AdamW": [1, 1],
        "Adam": [1, 1],
        "Lamb": [gpt2(cpu, "lamb") / gpt2(cpu, "adam"), gpt2(gpu, "lamb") / gpt2(gpu, "adam")],
        "Adan": [None, gpt2(steps, "adan") / gpt2(steps, "adam")],
        "Adafactor": [on[d]["Adafactor, torch's"] / on[d]["AdamW"] for d in on],
        "GaLoreAdamW": low_rank,
        "Muon": [None, muon["Muon, float16"] / on["cuda"]["AdamW"]],
        "Adagrad": [gpt2(f, "adagrad") / gpt2(f, "adam") for f in (cpu, gpu)],
    }
    others = "intel-emerald-rapids-16-cores/steps.json"
    of_torch = ("SGD", "RAdam", "NAdam", "Adamax", "Adadelta", "RMSprop", "Rprop", "ASGD")
    for name in (*of_torch, "Lion"):
        expected[name] = [gpt2(others, name.lower()) / gpt2(cpu, "adam"), None]
    page = (ROOT / "docs" / "choosing.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|.*\|([^|]*)\|([^|]*)\|$", page, re.MULTILINE)
    assert {name for name, *_ in rows} == set(optim.__all__)
    told = {
        name: [time.strip() for time in times] for name, *times in rows if "".join(times).strip()
    }
    assert told == {
        name: ["–" if time is None else f"{time:.2g}" for time in times]
        for name, times in expected.items()
    }


def test_times_of_tables_are_those_measured():
    """Tables of docs/performance.md."""
    rows = {
        row["name"]: {name: f"{found['ms']:.3g}" for name, found in row["results"].items()}
        for row in results("intel-emerald-rapids-16-cores/embedding.json")["rows"]
    }
    names = {"adagrad": "Adagrad", "rowwise_adagrad": "RowWiseAdagrad", "sparse_adam": "SparseAdam"}
    whats = {"each-row-once": "step", "backward-of-bags": "backward pass and step"}
    lines = []
    for name, title in names.items():
        for gradient, what in whats.items():
            found = rows[f"{name}/embedding/{gradient}"]
            torchs, fbgemms = found.get("torch", "–"), found.get("fbgemm", "–")
            lines.append(f"| `{title}`, {what} | **{found['fused']}** | {torchs} | {fbgemms} |\n")
    page = (ROOT / "docs" / "performance.md").read_text()
    assert "".join(lines) in page
    assert f"a dense gradient takes {rows['adagrad/embedding/each-row-once']['dense']} ms" in page
    of_bags = rows["rowwise_adagrad/embedding/backward-of-bags"]
    page = (ROOT / "docs" / "optimizers" / "rowwise_adagrad.md").read_text()
    assert f"takes {of_bags['fbgemm']} ms for a\nbatch, torch's" in page
    assert f"our step {of_bags['fused']} (" in page


def test_memory_of_the_ladder_is_that_measured():
    file = ROOT / "bench" / "results" / "intel-emerald-rapids-2-cores" / "ladder.json"
    rows = json.loads(file.read_text())["rows"]
    table = (ROOT / "docs" / "recipes.md").read_text().partition("| rung | MiB |")[2]
    found = [float(cell) for cell in re.findall(r"^\| .+ \| ([\d.]+) \|$", table, re.MULTILINE)]
    assert found == [round(row["bytes"] / 2**20, 1) for row in rows]


def page_of_the_gpt():
    return " ".join((ROOT / "docs" / "nanogpt.md").read_text().split())


def test_limit_of_the_step_in_training_is_that_measured():
    """Figures of docs/nanogpt.md: weights of a GPT, and the fastest move of as many bytes."""
    runs = {run["name"]: run for run in results("nvidia-h200/nanogpt.json")["rows"]}
    rows = results("nvidia-h200/steps.json")["rows"]
    (adam,) = (r for r in rows if r["name"] == "adam/gpt2")
    assert adam["bytes"] == 28 * adam["elements"]
    torchs, ours = ([r["optimizer_ms"] for n, r in runs.items() if n.startswith(lead)]
                    for lead in ("torch:", "fusedstep:"))  # fmt: skip
    weights = next(iter(runs.values()))["weights"] + 1024 * 768
    rate = adam["bytes"] / adam["limit"]["ms"] / 1e9
    limit = 28 * weights / rate / 1e9
    aim = 0.85 * min(torchs)
    alone = {name: adam["results"][name]["ms"] for name in ("fused", "torch_fused")}
    page = page_of_the_gpt()
    for told in (
        f"each of {weights / 1e6:.2f} M weights",
        f"counted: {28 * weights / 1e9:.2f} GB.",
        f"reach {rate:.2f} TB/s",
        f"take {limit:.3f} ms",
        f"at {limit / max(ours):.2f} to {limit / min(ours):.2f} of that",
        f"torch's is {aim:.3f} ms.",
        f"[{alone['fused']:.3f} ms for ours and {alone['torch_fused']:.3g} for torch's]",
        f", {less(alone['fused'], alone['torch_fused'])} % less. On the H100",
    ):
        assert told in page, told


def less(ours, torchs):
    """Returns by how many per cent ours is below torch's."""
    return f"{100 * (1 - ours / torchs):.0f}"


def test_shares_of_the_step_in_training_are_those_measured():
    """Figures of docs/nanogpt.md, their order, and the aim of 15 %."""
    found = results("nvidia-h200/nanogpt.json")
    runs = {run["name"]: run for run in found["rows"]}
    eager, compiled = (
        {a: runs[f"fusedstep:AdamW/{a}{way}"]["ms"] for a in ATTENTION} for way in ("", "/compiled")
    )
    assert max(eager["flash_attn"], eager["efficient_attn"]) < eager["math"] < eager["naive"]
    gains = {attention: eager[attention] / compiled[attention] for attention in ATTENTION}
    assert max(gains, key=gains.get) == "naive"
    first = [run["first_ms"] / 1e3 for run in runs.values() if run["compile"]]
    losses = [run["loss"] for run in runs.values()]
    flash = "AdamW/flash_attn"
    pairs = [tuple(runs[f"{lead}:{flash}{way}"] for lead in ("fusedstep", "torch"))
             for way in ("", "/compiled")]  # fmt: skip
    again = [{run["name"]: run for run in each["rows"]} for each in found["repeats"]]
    repeats = [(each[f"fusedstep:{flash}"], each[f"torch:{flash}"]) for each in again]
    h100 = {run["name"]: run for run in results("nvidia-h100/gpt_iteration.json")["rows"]}
    before = [(h100[ours["name"]], h100[torchs["name"]]) for ours, torchs in pairs]
    shares = [[(100 * a["share"], 100 * b["share"]) for a, b in each]
              for each in (pairs, repeats, before)]  # fmt: skip
    percents = [[less(*pair) for pair in each] for each in shares]
    assert all(ours <= 0.85 * torchs for ours, torchs in shares[0] + shares[1])
    assert len(set(percents[0])) == 1
    times = [sorted(run["ms"] for run in each) for each in zip(pairs[0], *repeats, strict=True)]
    spread = max(each[-1] / each[0] - 1 for each in times)
    steps = [sorted(run["optimizer_ms"] for run in each) for each in zip(*pairs, strict=True)]
    saved = pairs[0][1]["optimizer_ms"] - pairs[0][0]["optimizer_ms"]
    least = min(run["optimizer_ms"] for run in runs.values())
    assert least == runs["fusedstep:AdamW/naive"]["optimizer_ms"]
    page = page_of_the_gpt()
    for told in (
        "is {naive:.1f} times as fast with it; math is {math:.1f} times as fast, efficient "
        "{efficient_attn:.1f}, flash {flash_attn:.1f}.".format(**gains),
        f"takes {min(first):.0f} to {max(first):.0f} seconds",
        f"between {min(losses):.3f} and {max(losses):.3f}:",
        "took {:.1f} and {:.1f} ms, where the H200 took {:.1f} and {:.1f}.".format(
            *(each[0]["ms"] for each in before + pairs)
        ),
        "in three runs on an H200 they took {}, {} and {} ms with ours".format(*times[0]),
        "and {}, {} and {} with torch's fused AdamW.".format(*times[1]),
        f"up to {100 * spread:.0f} % apart",
        f"more than {max(max(pair) for pair in shares[0]):.1f} % of an iteration",
        "takes {:.2f} % of an iteration with `flash_attn`, torch's fused AdamW {:.2f} %: training "
        "is {:.2f} % faster".format(*shares[0][0], 100 * saved / pairs[0][1]["ms"]),
        "the optimizer takes {:.2f} % and {:.2f} %".format(*shares[0][1]),
        f"In both cases ours takes {percents[0][0]} % less",
        "{:.2f} against {:.2f} % and {:.2f} against {:.2f} %".format(*shares[1][0], *shares[1][1]),
        "{} and {} % less. A part".format(*percents[1]),
        "our step takes {:.2f} and {:.2f} ms there, and".format(*steps[0]),
        f"{least:.2f} with naive attention",
        "torch's takes {:.2f} and {:.2f}.".format(*steps[1]),
        "ours took {} and {} % less of an iteration.".format(*percents[2]),
    ):
        assert told in page, told


def test_the_table_of_iterations_is_that_of_the_results():
    assert iterations.table() in (ROOT / "docs" / "performance.md").read_text()
    readme = (ROOT / "README.md").read_text()
    gpu, cpu, *_ = (each.faster() for each in iterations.iterations())
    assert f"[{gpu:.1g} % faster](docs/performance.md). Come for memory" in readme
    assert f"[{cpu:.1g} % faster](docs/performance.md) on two" in readme


def test_time_of_the_small_preset_is_that_measured():
    """Two idle cores take less than two minutes: all of the CPU time is less than that."""
    found = results("amd-zen3-2-cores/nanogpt_preset.json")
    assert len(found["rows"]) == 2 * len(ATTENTION)
    seconds = found["seconds"]
    used = seconds["user"] + seconds["system"]
    assert used < 120
    (others,) = re.findall(r"took (\d+ %) of the CPUs", found["notes"][0])
    page = page_of_the_gpt()
    assert (
        f"took {used:.0f} s of CPU time on two cores of a Zen 3, {used / 2:.0f} s of each;" in page
    )
    assert f"{seconds['wall']:.0f} s passed, since other programs took {others}" in page


def test_a_refresh_beside_an_iteration_is_that_measured():
    """docs/optimizers/galore.md tells its part of an iteration on an H100."""
    rows = {row["name"]: row for row in results("nvidia-h100/gpt_iteration.json")["rows"]}
    ms = rows["fusedstep:AdamW/flash_attn/compiled"]["ms"]
    page = " ".join((ROOT / "docs" / "optimizers" / "galore.md").read_text().split())
    whole = re.search(r"anew takes (\d+) ms with `\"randomized\"` and ([\d.]+) with", page)
    randomized, power = (100 * float(each) / 200 / ms for each in whole.groups())
    assert f"{randomized:.1f} and {power:.1f} % of a compiled iteration" in page
    assert f"[{ms:.1f} ms](" in page


def test_ratios_of_wrapped_and_read_steps_are_those_measured():
    """Figures of docs/performance.md and docs/integrations.md, and what they may be at most."""
    machine = ROOT / "bench" / "results" / "amd-zen4-2-cores"
    wrapped, read = (
        [each["ratio"] for each in json.loads((machine / name).read_text())["us"].values()]
        for name in ("through_accelerate.json", "read_states.json")
    )
    told = f"{max(wrapped):.3g} times the direct step, with each of {len(wrapped)} classes"
    assert told in (ROOT / "docs" / "performance.md").read_text()
    page = (ROOT / "docs" / "integrations.md").read_text()
    assert f"a step takes {min(read):.2f} to {max(read):.2f} times as long as" in page
    assert max(*wrapped, *read) <= 1.3


def test_ratios_of_offloaded_shards_are_those_measured():
    """Figures of docs/performance.md, and what they may be."""
    page = (ROOT / "docs" / "performance.md").read_text().replace("\n", " ")
    ms = results("nvidia-h200/fsdp2.json")["offloaded"]["ms"]["2"]["GPT-2 124 M"]
    adamw = ms["AdamW"]
    bare, clipped = (
        adamw[f"torch fused{way}"] / adamw[f"fusedstep{way}"] for way in ("", ", clipped")
    )
    lamb = ms["Lamb"]["fusedstep"] / adamw["fusedstep"]
    for told in (
        f"AdamW is {bare:.2f} times as fast as torch's, and {clipped:.2f} times where both clip",
        f"{40 / 28:.2f} times as many, and takes {lamb:.2f} times as long",
    ):
        assert told in page, told
    assert bare >= 1.35
    assert clipped >= 2.5
    assert lamb <= 1.6


def test_ratios_of_offloaded_zero_are_those_measured():
    """Figures of docs/performance.md, of runs of engines that were alone in their processes."""
    page = (ROOT / "docs" / "performance.md").read_text().replace("\n", " ")
    found = results("nvidia-h200/zero_offload.json")
    runs, names = found["ms by run"], ("DeepSpeedCPUAdam", "fusedstep")
    assert found["ms"] == rounded(medians(runs))
    theirs, ours = ([run for run in runs if run["engine"] == name] for name in names)
    ratios = {
        part: ours_ms / theirs_ms
        for part, theirs_ms, ours_ms in zip(
            found["ms"][names[0]], *(found["ms"][name].values() for name in names), strict=True
        )
    }
    pairs = [f"{a['iteration'] / b['iteration']:.2f}" for a, b in zip(ours, theirs, strict=True)]
    saved = found["ms"][names[0]]["optimizer"] - found["ms"][names[1]]["optimizer"]
    least, most = (f(run["iteration"] for run in theirs) for f in (min, max))
    for told in (
        f"takes {ratios['optimizer']:.2f} of DeepSpeedCPUAdam's time, {saved:.0f} ms less",
        f"An iteration takes {ratios['iteration']:.2f}, of the pairs {', '.join(pairs[:-1])} and",
        f"and {pairs[-1]}: most of the difference is that of the passes",
        f"DeepSpeedCPUAdam's iterations went from {least:.0f} to {most:.0f} ms",
    ):
        assert told in page, told
    assert ratios["iteration"] <= 1


def test_ratios_of_offload_are_those_measured():
    """Figures of docs/offload.md, and what they may be."""
    page = (ROOT / "docs" / "offload.md").read_text().replace("\n", " ")
    rows = results("nvidia-h100/offload.json")["rows"]
    ms = {(row["kind"], row["weights"]): row["ms"] for row in rows}
    low, split = "bf16, float32 masters", "bf16, split"
    first = 111 / 344.6 * ms["none", low]  # by operations
    step = ms["after", low] - ms["none", low]
    left = [ms["ours", each] - ms["none", low] for each in (low, split)]
    single = [ms[kind, "float32"] - ms["none", "float32"] for kind in ("ours", "after")]
    ratios = [
        ms["torchao", "float32"] / ms["ours", "float32"],
        *(ms["torchao", low] / ms["ours", each] for each in (low, split)),
    ]
    for told in (
        f"With float32 weights it is {ratios[0]:.2f} times as fast as torchao's",
        f"masters and float32 states {ratios[1]:.2f} times as fast as torchao's without",
        f"keeps the same values, {ratios[2]:.2f} times",
        f'adds {left[0]:.0f} ms (masters) or {left[1]:.0f} ms (`"split"`) to the '
        f"{ms['none', low]:.0f} ms of the passes. The backward pass hides "
        f"{100 - 100 * left[0] / step:.0f} % and {100 - 100 * left[1] / step:.0f} % of the step, "
        f"and {100 - 100 * single[0] / single[1]:.0f} % with float32 weights",
        f"A step and its copies take {step:.0f} ms",
        f"after {first:.0f} of the {ms['none', low]:.0f} ms",
        f"takes at least {first + step:.0f} ms",
        f"are {ms['torchao', low] / ms['none', low]:.2f} times as fast as torchao's whole",
    ):
        assert told in page, told
    assert ratios[0] >= 1.3
    assert left[0] <= 0.25 * step


def test_times_of_the_tests_are_those_measured():
    """CONTRIBUTING.md tells those of two cores.

    A law may take what it does where all take 15 minutes, with the other parts as they are.
    """
    found = results("amd-zen5-2-cores/test_time.json")
    page = (ROOT / "CONTRIBUTING.md").read_text().replace("\n", " ")
    waited = {part["part"]: part["seconds"] for part in found["parts"]}
    tests = {part["part"]: part["tests"] for part in found["parts"]}
    of_a_law = 2000 / int(tests["Python"].split(" passed")[0])
    others = found["seconds"] - waited["Python"]
    for told in (
        *(f"| {part} | {waited[part]} | " for part in waited),
        f"They are {found['seconds'] / 60:.1f} minutes",
        f"they take {waited['Python'] * of_a_law:.0f} ms of a core each",
        f"as they are, {others} s, 15 minutes leave {(900 - others) * of_a_law:.0f} ms",
    ):
        assert told in page, told


def test_times_beside_another_commit_are_those_measured():
    """Tables of bench/README.md."""
    page = (ROOT / "bench" / "README.md").read_text()
    files = list((ROOT / "bench" / "results").glob("*/against*.json"))
    assert len(files) == 19
    for file in files:
        table = against.table(json.loads(file.read_text()))
        if file.stem == "against_unfused":
            table = table.replace("| |", "| `fused=False` |", 1)
        assert table in page, file


def test_times_of_small_calls_are_those_measured():
    """Figures of docs/performance.md."""
    found = results("amd-zen3-2-cores/engines.json")["us"]
    page = (ROOT / "docs" / "performance.md").read_text()
    for way, times in found.items():
        ours, torchs = (f"{times[name]:.3g}" for name in ("fusedstep", "torch"))
        assert f"| {way} | **{ours}** | {torchs} |" in page
    each = [times for way, times in found.items() if way.startswith("an optimizer for each")]
    assert all(times["fusedstep"] <= times["torch"] + 5 for times in each)


def tables(page):
    """Yields the results that the paragraphs of a section link to before a table, and its rows."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    files = []
    for part in re.split(r"\n\n+", text):
        if part.startswith("|"):
            rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in part.splitlines()]
            yield files, rows[0], rows[2:]
        linked = re.findall(r"\]\(([^)\s]*/results/[^)\s]+)\)", part)
        if linked or part.startswith("#"):
            files = [file for path in linked for file in files_of(page.parent / path)]


def files_of(result):
    """Returns a file of results, or those that a machine's page has been written from."""
    return [result] if result.suffix == ".json" else sorted(result.parent.glob("*.json"))


def numbers(value, name=""):
    """Yields all numbers of a result; bytes also in MiB and GiB."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from numbers(each, key)
            yield from numbers(key)
    elif isinstance(value, list):
        for each in value:
            yield from numbers(each, name)
    elif isinstance(value, str):
        yield from map(float, re.findall(r"\d+(?:\.\d+)?", value))
    elif isinstance(value, (int, float)):
        yield value
        if re.search("bytes|peak", name):
            yield from (value / 2**20, value / 2**30)


#: Columns that are worked out of several numbers, by the page. Other tests compute them.
DERIVED = {
    ("galore.md", "energy kept, of the exact one's"),
    ("galore.md", "bytes of state for a weight"),
    ("performance.md", "its ms"),
    ("performance.md", "our ms"),
    ("performance.md", "of an iteration"),
    ("performance.md", "training is faster by"),
    ("scaling.md", "the model is off by"),
    ("small_states.md", "share"),
    ("small_states.md", "bytes an element"),
    ("small_states.md", "against float32"),
    ("small_states.md", "worst seed"),
}
WITH_RESULTS = [page for page in PAGES if any(files for files, _, _ in tables(page))]


@pytest.mark.parametrize("page", named(WITH_RESULTS))
def test_figures_of_tables_are_in_the_results_beside_them(page):
    """Rounded as they are shown: 46,300 to hundreds, 0.91 to hundredths."""
    for files, heading, rows in tables(page):
        found = [each for file in files for each in numbers(json.loads(file.read_text()))]
        for name, *cells in rows if files else ():
            for column, cell in zip(heading[1:], cells, strict=True):
                if (page.name, column) in DERIVED:
                    continue
                for told in re.findall(r"(?<!e)-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", cell):
                    number = told.replace(",", "")
                    digits = re.sub(r"e.*", "", number).partition(".")[2]
                    unit = 10.0 ** -len(digits)
                    if abs(float(number)) >= 1000:
                        unit = 10.0 ** (len(number) - len(number.rstrip("0")))
                    near = 0.5 * unit * (1 + 1e-9) if "e" not in number else 0
                    assert any(abs(each - float(number)) <= near for each in found), (
                        f"{page.name}, {name}: {told} is in none of {[file.name for file in files]}"
                    )


def test_figures_that_are_worked_out_of_galores_results():
    page = (ROOT / "docs" / "optimizers" / "galore.md").read_text()
    kept = results("nvidia-h100/galore.json")["cuda"]["refreshes"]
    for way in ("randomized", "power"):
        share = kept[way]["energy"] / kept["exact"]["energy"]
        assert re.search(rf'^\| `svd="{way}"` \| [\d.]+ \| {share:.4f} \|$', page, re.MULTILINE)
    runs = results("amd-zen4-2-cores/galore_training.json")["runs"]
    table = page.partition("| bytes of state for a weight |")[2]
    rows = re.findall(r"^\| .* \| ([\d.]+) \| ([\d.]+) \|$", table, re.MULTILINE)[: len(runs)]
    assert rows == [
        (f"{run['losses'][-1]:.3f}", f"{run['state_bytes'] / run['weights']:.2f}") for run in runs
    ]


#: Pages with Python that is a part of something, and what runs that.
PARTS = {
    "HACKING.md": "test_parts_of_adopt_stand_in_its_files",
    "dcp.md": "test_a_checkpoint_gets_its_name_when_it_is_whole",
    "memory.md": "test_a_step_that_was_stopped_goes_on_as_the_page_says",
    "musgd.md": "test_ultralytics.py",
}


def parts(page, language):
    """The code of fences that may be indented, as in a list."""
    text = (ROOT / page).read_text()
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)


def test_every_part_is_run_by_a_test():
    assert {page.name for page in PAGES if parts(page, "py")} == set(PARTS)
    for test in PARTS.values():
        assert test in globals() or (ROOT / "tests" / "frameworks" / test).exists()
    in_cpp = {
        page.name for page in PAGES if parts(page, "cpp") and ROOT / "docs" not in page.parents
    }
    assert in_cpp == {"HACKING.md", "README.md"}  # the second, and docs: tests/packaging


def test_parts_of_adopt_stand_in_its_files():
    """HACKING.md shows how an optimizer is added by code of one that is compiled and run."""
    files = {
        "cpp": ["include/fusedstep/rules/adopt.h"],
        "py": [f"{folder}/adopt.py" for folder in (
            "python/fusedstep/optim", "tests/reference", "tests/optimizers")],
    }  # fmt: skip
    for language, sources in files.items():
        texts = [" ".join((ROOT / source).read_text().split()) for source in sources]
        shown = parts("HACKING.md", language)
        assert len(shown) >= 2
        for part in shown:
            assert any(" ".join(part.split()) in text for text in texts), part


def test_a_step_that_was_stopped_goes_on_as_the_page_says(monkeypatch):
    """The first step takes one of two weights, and says so."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = optim.SGD(weights, lr=0.25)
    for weight in weights:
        weight.grad = torch.ones(2)
    step, calls = optimizer.step, []

    def stopped():
        calls.append(None)
        if len(calls) == 1:
            weights[1].grad, kept = None, weights[1].grad
            step()
            weights[1].grad = kept
            error = MemoryError()
            error.stepped = weights[:1]
            raise error
        step()

    monkeypatch.setattr(optimizer, "step", stopped)
    (part,) = parts("docs/memory.md", "py")
    exec(part, {"optimizer": optimizer, "free_some_memory": lambda: None})
    assert len(calls) == 2
    assert all(torch.equal(weight.detach(), torch.full((2,), 0.75)) for weight in weights)


def test_a_checkpoint_gets_its_name_when_it_is_whole(tmp_path):
    (part,) = parts("docs/integrations/dcp.md", "py")
    names = {"os": os, "dist": dist, "dcp": dcp, "folder": tmp_path, "step": 12}
    states = {"weight": torch.arange(3.0)}
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        exec(part, names | {"states": states})
        loaded = {"weight": torch.zeros(3)}
        dcp.load(loaded, checkpoint_id=tmp_path / "step-00000012")
    finally:
        dist.destroy_process_group()
    assert torch.equal(loaded["weight"], states["weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000012"]


@pytest.mark.parametrize("name", ["lamb", "adan"])
def test_pages_name_the_options_that_cpp_lacks(name):
    header = (ROOT / "include" / "fusedstep" / "optim" / f"{name}.h").read_text()
    common = (ROOT / "include" / "fusedstep" / "optim" / "options.h").read_text()
    in_cpp = re.findall(r"^  X\([\w:]+, (\w+), ", header + common, re.MULTILINE)
    page = (ROOT / "docs" / "optimizers" / f"{name}.md").read_text()
    (told,) = re.findall(r"has these options except ([^.]+)\.", page)
    python = set(inspect.signature(getattr(optim, name.capitalize())).parameters) - {"params"}
    assert python - set(in_cpp) == set(re.findall(r"`(\w+)`", told))
