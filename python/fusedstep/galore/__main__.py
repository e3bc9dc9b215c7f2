"""Command line: ``python -m fusedstep.galore``."""

from __future__ import annotations

import argparse
import functools
import json
import platform
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

from fusedstep.galore.kernels import KERNELS, errors, median, milliseconds, problem, why_not

#: The published tables.
RANKS, SHAPES = (32, 64, 128, 256, 512), ((4096, 4096), (4096, 11008))

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fusedstep.galore",
        description="Checks or times GaLore's step of one matrix [M, N], between two refreshes.",
    )
    add = parser.add_argument
    add("--mode", choices=("test", "benchmark"), default="test", help="(default: test)")
    add(
        "--kernel",
        choices=("torch", "hybrid", "parts", "fused", "compiled"),
        default="hybrid",
        help="what --mode=test looks at (default: hybrid)",
    )
    add("--M", type=int, help="rows (default: 4096; a benchmark has the published shapes)")
    add("--N", type=int, help="columns (default: 4096)")
    add("--rank", type=int, help="(default: 128; a benchmark has the published ranks)")
    add("--dtype", choices=_DTYPES, default="float32", help="(default: float32)")
    add("--allow_tf32", action="store_true", help="products in TF32, on a GPU that has it")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--repeats", type=int, default=10, help="steps that are timed (default: 10)")
    add("--json", type=Path, metavar="FILE", help="write what was found, after every time")
    add("--resume", action="store_true", help="time what the FILE of an earlier benchmark lacks")
    add("--plot", type=Path, metavar="FILE", help="draw a benchmark; needs matplotlib")
    add("--verbose", action="store_true", help="print every time, not only the median")
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = _parser()
    given = parser.parse_args(arguments)
    shapes, ranks = _sizes(given)
    if given.repeats < 1:
        parser.error("--repeats must be at least 1")
    for (rows, columns), rank in product(shapes, ranks):
        if not 1 <= rank <= min(rows, columns):
            parser.error(f"--rank {rank} is not from 1 to the smaller side of {rows} x {columns}")
    is_gpu = torch.device(given.device).type == "cuda"
    if given.allow_tf32 and not (is_gpu and given.dtype == "float32"):
        parser.error("--allow_tf32 is for float32 on a GPU: other products have no TF32")
    if given.resume and not (given.json and given.mode == "benchmark"):
        parser.error("--resume is for --mode=benchmark with --json")
    if given.mode == "test" and (reason := _why_not(given, given.kernel, shapes)):
        parser.error(reason)
    found = _test(given, *shapes[0], ranks[0]) if given.mode == "test" else _benchmark(given)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    if given.plot and given.mode == "benchmark":
        _draw(found, given.plot)


def _sizes(given: argparse.Namespace) -> tuple[list[tuple[int, int]], list[int]]:
    """The shapes and the ranks that the options ask for."""
    if given.mode == "benchmark" and given.M is None and given.N is None:
        shapes = list(SHAPES)
    else:
        shapes = [(given.M or 4096, given.N or 4096)]
    if given.rank is not None:
        return shapes, [given.rank]
    smallest = min(map(min, shapes))
    ranks = [rank for rank in RANKS if rank <= smallest] if given.mode == "benchmark" else [128]
    return shapes, ranks


def _why_not(given: argparse.Namespace, kernel: str, shapes: list[tuple[int, int]]) -> str | None:
    """Returns why a kernel is not for all of these shapes, or None."""
    reasons = (why_not(kernel, given.device, _DTYPES[given.dtype], *shape) for shape in shapes)
    return next(filter(None, reasons), None)


def _settings(given: argparse.Namespace) -> dict[str, Any]:
    is_gpu = torch.device(given.device).type == "cuda"
    name = (
        torch.cuda.get_device_name(given.device)
        if is_gpu
        else platform.processor() or platform.machine()
    )
    return {
        "device": given.device,
        "name": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": given.dtype,
    }


def _allow_tf32(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed


def _test(given: argparse.Namespace, rows: int, columns: int, rank: int) -> dict[str, Any]:
    _allow_tf32(given.allow_tf32)
    kernel, settings = given.kernel, _settings(given)
    example = problem(rows, columns, rank, _DTYPES[given.dtype], given.device)
    shapes = {name: list(value.shape) for name, value in example.state.items() if value.dim()}
    shapes = {"weight": [rows, columns]} | shapes
    for name, value in ({"kernel": kernel, "allow_tf32": given.allow_tf32} | settings).items():
        print(f"{name:>12}  {value}")
    for name, shape in shapes.items():
        print(f"{name:>16}  {' x '.join(map(str, shape))}")
    found = errors(example, kernel)
    print(f"\n{'':>12}  largest error  relative error")
    for name, error in found.items():
        print(f"{name:>12}  {error['largest']:13.2e}  {error['relative']:14.2e}")
    times = {}
    for each in dict.fromkeys(("torch", kernel)):
        all_times = milliseconds(example, each, given.repeats)
        times[each] = median(all_times)
        print(f"{each:>12}  {times[each]:10.3f} ms")
        if given.verbose:
            print(_listed(all_times))
    return {"settings": settings, "kernel": kernel, "shapes": shapes, "errors": found, "ms": times}


def _benchmark(given: argparse.Namespace) -> dict[str, Any]:
    shapes, ranks = _sizes(given)
    found = _tables(given, shapes, ranks)
    kernels = [kernel for kernel in KERNELS if not _why_not(given, kernel, shapes)]
    total, done = len(found["tables"]) * len(ranks) * len(kernels), 0
    made = functools.cache(
        functools.partial(problem, dtype=_DTYPES[given.dtype], device=given.device)
    )
    # The one that compiles comes last: a benchmark that is stopped then has all others in its file.
    for kernel, table in product(kernels, found["tables"]):
        for row in table["rows"]:
            done += 1
            if kernel in row:
                continue
            text = f"{_title(table)}, rank {row['rank']}, {kernel:<8}"
            print(f"[{done}/{total}] {text}", end=" ", file=sys.stderr, flush=True)
            _allow_tf32(table["tf32"])
            example = made(table["M"], table["N"], row["rank"])
            all_times = milliseconds(example, kernel, given.repeats)
            row[kernel] = median(all_times)
            print(f"{row[kernel]:9.3f} ms", file=sys.stderr, flush=True)
            if given.verbose:
                print(_listed(all_times), file=sys.stderr)
            if given.json:
                given.json.write_text(json.dumps(found, indent=1) + "\n")
    for table in found["tables"]:
        print("\n".join(_lines(table)))
    return found


def _tables(
    given: argparse.Namespace, shapes: list[tuple[int, int]], ranks: list[int]
) -> dict[str, Any]:
    """Makes what a benchmark fills: tables without times, or those of the file that it resumes.

    Raises:
        SystemExit: if that file is of another benchmark.
    """
    has_tf32 = torch.device(given.device).type == "cuda" and given.dtype == "float32"

    def empty(tables: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [each | {"rows": [{"rank": row["rank"]} for row in each["rows"]]} for each in tables]

    rows = [{"rank": rank} for rank in ranks]
    tables = [
        {"M": shape[0], "N": shape[1], "tf32": tf32, "rows": rows}
        for tf32, shape in product((True, False) if has_tf32 else (False,), shapes)
    ]
    found = {"settings": _settings(given), "tables": empty(tables)}
    if given.resume and given.json.exists():
        kept: dict[str, Any] = json.loads(given.json.read_text())
        if kept | {"tables": empty(kept["tables"])} != found:
            raise SystemExit(
                f"{given.json} is of another device, dtype, torch, shape or rank: "
                "give another file to --json, or leave out --resume"
            )
        return kept
    return found


def _listed(times: list[float]) -> str:
    return f"{'':>12}  " + " ".join(f"{time:.3f}" for time in times)


def _title(table: dict[str, Any]) -> str:
    return f"{table['M']} x {table['N']}" + (", TF32" if table["tf32"] else "")


def _lines(table: dict[str, Any]) -> Iterator[str]:
    yield f"\n{_title(table)}, median ms"
    kernels = [kernel for kernel in KERNELS if kernel in table["rows"][0]]
    yield "rank  " + "  ".join(f"{kernel:>9}" for kernel in kernels)
    for row in table["rows"]:
        yield f"{row['rank']:>4}  " + "  ".join(f"{row[kernel]:9.3f}" for kernel in kernels)


def _draw(found: dict[str, Any], file: Path) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    tables = found["tables"]
    figure = Figure(figsize=(5 * len(tables), 4), layout="constrained")
    for axes, table in zip(figure.subplots(1, len(tables), squeeze=False)[0], tables, strict=True):
        ranks = [row["rank"] for row in table["rows"]]
        for kernel in [kernel for kernel in KERNELS if kernel in table["rows"][0]]:
            times = [row.get(kernel, float("nan")) for row in table["rows"]]
            axes.plot(ranks, times, marker="o", label=kernel)
        axes.set(xscale="log", yscale="log", xlabel="rank", ylabel="ms")
        axes.set_xticks(ranks, map(str, ranks))
        axes.set_xticks([], minor=True)
        axes.set_title(_title(table))
        axes.legend()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(file)


if __name__ == "__main__":
    main()
