#!/usr/bin/env python3
"""Train a character-level GPT on tiny Shakespeare, and measure its iterations.

    nanonano_train.py [--config FILE] [--SETTING VALUE ...]

Settings are those of hyper_param.json beside this script; each of them is a flag as well. With
`--checkpoint_interval N` an interrupted run goes on when it is started again with `--resume`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

import nanonano_settings
from nanonano_settings import SettingsError


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", default=nanonano_settings.FILE,
        help="settings in place of hyper_param.json")  # fmt: skip
    add("--resume", action="store_true", help="go on with the checkpoint in out_dir, if any")
    add("--json", type=Path, metavar="FILE", help="write the figures")
    add("--events", action="store_true", help="print losses and figures as lines of JSON")
    nanonano_settings.add_flags(parser)
    return parser.parse_args(words)


def described(figures: dict[str, Any]) -> str:
    """Returns the closing lines of a run."""
    weights = f"{figures['weights'] / 1e6:.2f} M weights"
    lines = [f"{weights}, {figures['dtype']}, loss {figures['loss']:.4f}"]
    if "first_ms" in figures:
        lines.append(f"first iteration: {figures['first_ms']:,.1f} ms")
    if "compile_ms" in figures:
        lines.append(f"compilation: {figures['compile_ms']:,.1f} ms of it")
    if "ms" in figures:
        lines.append(
            f"later ones: {figures['ms']:,.1f} ms, of which the optimizer takes "
            f"{figures['optimizer_ms']:,.2f} ms ({100 * figures['share']:.1f} %)"
        )
    lines.append(f"peak of memory: {figures['peak'] / 2**20:,.0f} MiB")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> None:
    arguments = parse(words)
    if importlib.util.find_spec("fusedstep") is None:  # not installed: that of this source tree
        sys.path.append(str(Path(__file__).resolve().parents[2] / "python"))
    import nanonano_loop

    try:
        settings = nanonano_settings.read(arguments.config)
        settings = settings.with_values(nanonano_settings.given(arguments))
        with tqdm(
            total=settings.max_iters, desc=settings.name, unit="it", disable=arguments.events
        ) as bar:

            def tell(iteration: int, loss: float) -> None:
                if arguments.events:
                    print(json.dumps({"iteration": iteration, "loss": loss}), flush=True)
                bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
                bar.update(iteration - bar.n)

            figures = nanonano_loop.train(settings, tell, resume=arguments.resume)
    except (SettingsError, FileNotFoundError, FloatingPointError) as error:
        sys.exit(f"nanonano_train.py: {error}")
    except KeyboardInterrupt:
        file = Path(settings.out_dir, nanonano_loop.CHECKPOINT)
        has_one = settings.checkpoint_interval and file.is_file()
        how = f": --resume goes on with {file}" if has_one else ""
        print(f"nanonano_train.py: interrupted{how}", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    print(json.dumps({"figures": figures}) if arguments.events else described(figures))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
