#!/usr/bin/env python3
"""Train the GPT with each attention, with and without torch.compile, and compare the runs.

Each run is a process of its own. FILTER is a regular expression that selects some of them by their
names, such as "torch:AdamW/naive/compiled". Results go into a folder as nanogpt.json, README.md
(the tables) and nanogpt-iterations.svg.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import nanonano_plot
import nanonano_settings
import run
from harness.environment import ROOT, Env, environments
from harness.machine import Others, this_machine
from harness.processes import WorkerError, events_of
from nanonano_settings import ATTENTION, Settings, SettingsError
from reports import page
from reports.tables import write_table

TRAIN = Path(__file__).resolve().parent / "nanonano_train.py"

#: Options that differ from hyper_param.json.
PRESETS: dict[str, dict[str, Any]] = {
    "full": {},
    "cpu": {
        "device": "cpu", "n_layer": 2, "n_head": 8, "n_embd": 256, "block_size": 256,
        "batch_size": 2, "gradient_accumulation_steps": 2, "max_iters": 20, "warmup_iters": 5,
        "log_interval": 1,
        # inductor's C++ takes a minute of a core for each run, whatever the model's size.
        "compile_backend": "aot_eager",
    },
}  # fmt: skip

#: Options by which the runs of a matrix differ. They have other flags, or none.
VARIED = ("attn_type", "compile", "optimizer")

#: Losses of a run that are kept for the plot, at most.
POINTS = 50


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("filter", nargs="?", default="", metavar="FILTER")
    add("--preset", choices=PRESETS, help="default: full on a GPU, else cpu")
    add("--optimizer", action="append", dest="optimizers", metavar="NAME",
        help="fusedstep:CLASS or torch:CLASS; several are compared")  # fmt: skip
    add("--config", type=Path, metavar="FILE", default=nanonano_settings.FILE,
        help="settings in place of hyper_param.json")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the results here too")
    where = parser.add_mutually_exclusive_group().add_argument
    where("--output", type=Path, metavar="DIR", help="not build/results/MACHINE")
    where("--commit", action="store_true", help="write into bench/results/MACHINE, for the pages")
    nanonano_settings.add_flags(parser, without=VARIED)
    arguments = parser.parse_args(words)
    try:
        re.compile(arguments.filter)
    except re.error as error:
        parser.error(f"not a regular expression: {error}")
    if arguments.preset is None:
        arguments.preset = "full" if torch.cuda.is_available() else "cpu"
    return arguments


def settings_of(arguments: argparse.Namespace) -> list[Settings]:
    """Returns the settings of all runs that are asked for.

    Optimizers follow one another, so that disturbances of the machine affect all alike.
    """
    base = nanonano_settings.read(arguments.config)
    base = base.with_values(PRESETS[arguments.preset] | nanonano_settings.given(arguments))
    every = [
        dataclasses.replace(base, optimizer=optimizer, attn_type=attention, compile=compiled)
        for attention in ATTENTION
        for compiled in (False, True)
        for optimizer in dict.fromkeys(arguments.optimizers or [base.optimizer])
    ]
    return [each for each in every if re.search(arguments.filter, name_of(each))]


def name_of(settings: Settings) -> str:
    words = (settings.optimizer, settings.attn_type, "compiled" * settings.compile)
    return "/".join(filter(None, words))


def in_a_process(settings: Settings, env: Env) -> Iterator[dict[str, Any]]:
    """Yields the events of a training. Nothing that it compiles was compiled before.

    Raises WorkerError if it fails.
    """
    log = ROOT / "build" / "logs" / "nanogpt" / f"{name_of(settings)}.log".replace("/", "-")
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="nanogpt-") as folder:
        file = Path(folder, "settings.json")
        file.write_text(json.dumps(asdict(settings)), encoding="utf-8")
        command = [sys.executable, str(TRAIN), "--config", str(file), "--events"]
        yield from events_of(command, env | {"TORCHINDUCTOR_CACHE_DIR": folder}, log)


def measured(settings: Settings, env: Env, tell: Callable[[int, float], None]) -> dict[str, Any]:
    """Returns the figures of a run, or the reason why there are none."""
    row = {
        "name": name_of(settings),
        "optimizer": settings.optimizer,
        "attn_type": settings.attn_type,
        "compile": settings.compile,
    }
    try:
        for event in in_a_process(settings, env):
            if "figures" in event:
                row |= event["figures"]
            else:
                tell(event["iteration"], event["loss"])
    except WorkerError as failure:
        return row | {"failed": str(failure)}
    return row | {"losses": thinned(row["losses"])}


def thinned(losses: list[float]) -> list[list[float]]:
    """Returns some of the losses with the numbers of their iterations, the last one among them."""
    every = -(-len(losses) // POINTS)
    return [[n, losses[n - 1]] for n in range(len(losses), 0, -every)][::-1]


def collect(wanted: list[Settings], env: Env) -> list[dict[str, Any]]:
    """Returns the rows of all runs, which follow one another."""
    rows = []
    with tqdm(total=sum(each.max_iters for each in wanted), unit="it") as bar:
        for settings in wanted:
            before = bar.n
            bar.set_description(name_of(settings))

            def tell(iteration: int, loss: float, before: int = before) -> None:
                bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
                bar.update(before + iteration - bar.n)

            rows.append(measured(settings, env, tell))
            bar.update(before + settings.max_iters - bar.n)
    return rows


def main(words: list[str] | None = None) -> None:
    arguments = parse(words)
    try:
        wanted = settings_of(arguments)
    except (SettingsError, OSError) as error:
        sys.exit(f"nanogpt: {error}")
    if not wanted:
        sys.exit(f"nanogpt: no run is named like {arguments.filter!r}")
    machine = this_machine()  # before this process is pinned to some of its CPUs
    envs, notes = environments(["jemalloc"])
    if not envs:
        envs, _ = environments(["glibc"])
    ((allocator, env),) = envs.items()
    others = Others()
    rows = collect(wanted, env)
    share = others.share()
    if share > run.DISTURBING:
        notes.append(
            f"other programs took {100 * share:.0f} % of the CPUs meanwhile: these are the "
            "figures of a busy machine"
        )
    facts = {}
    for row in rows:
        facts |= {key: row.pop(key) for key in ("torch", "threads", "isa", "device") if key in row}
    if not facts:
        sys.exit("\n".join(f"nanogpt: {row['name']}: {row['failed']}" for row in rows))
    results = {
        "suite": "nanogpt",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": asdict(machine),
        **facts,
        "allocator": allocator,
        "preset": arguments.preset,
        "settings": {k: v for k, v in asdict(wanted[0]).items() if k not in (*VARIED, "data")},
        "notes": notes,
        "rows": rows,
    }
    slug = "-".join(facts.get("device", "").lower().split()) or machine.slug
    folder = run.folder_of(arguments, slug)
    run.write(folder, results)
    # Pages show the plots that a folder of committed results has.
    if not arguments.commit or (folder / "nanogpt-iterations.svg").exists():
        nanonano_plot.draw(folder / "nanogpt.json", folder)
        page.write_page(folder)  # once more, with the plot
    if arguments.json:
        write_table(arguments.json, results)
    run.show_tables(results, folder)
    if any("failed" in row for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
