"""Print the tables of HACKING.md's sizes: lines of code, and bytes of all tracked files."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Subjects of the library, and patterns of their paths. A file is of the first that it matches.
SUBJECTS = {
    "shards": r"shard|_step/sums\.|_factored/blocks\.",
    "steps in the backward pass, offload": r"fusedstep/(backward|offload)|_api/buckets\.",
    "converting, verifying, doctor, memory, other frameworks": (
        r"fusedstep/(convert|verify|doctor|_models/|memory/|integrations/)|_torch_ops/twin\."
        r"|/transformers_adamw\.|_api/(foreign|names|registry)\."
    ),
    "steps in matrix products, factored moments, rows of tables": (
        r"adafactor|factored|matri|projec|galore|apollo|muon|musgd|came\.|low_rank|newton|rowwise"
        r"|sparse|/rows\."
    ),
    "how weights and states are stored": r"coded|codes?[._]|low_bit|_state/storage\.|weight_value",
    "rules, engines, plans, the step and its states": "",
}

#: Parts of the repository, likewise.
PARTS = {
    "library": r"^(include|src|cpu_kernels|cuda_kernels|python)/",
    "tests": r"^tests/",
    "benchmark": r"^bench/(?!probes|nanogpt/|results)",
    "probes": r"^bench/probes/",
    "GPT of `bench/nanogpt`": r"^bench/nanogpt/",
    "results and their plots": r"^bench/results/",
    "pages": r"^docs/|^[^/]*\.md$",
    "builds, examples, packaging": "",
}

#: Files without code.
DATA = (".md", ".svg", ".json", ".typed")

Files = dict[str, bytes]


def tracked() -> Files:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = listed.stdout.decode().split("\0")[:-1]
    return {name: (ROOT / name).read_bytes() for name in names}


def grouped(files: Files, patterns: dict[str, str]) -> dict[str, Files]:
    found: dict[str, Files] = {name: {} for name in patterns}
    for path, content in files.items():
        of = next(name for name, pattern in patterns.items() if re.search(pattern, path))
        found[of][path] = content
    return found


def lines(files: Files) -> int:
    return sum(content.count(b"\n") for path, content in files.items() if not path.endswith(DATA))


def size(files: Files) -> int:
    return sum(map(len, files.values()))


def main() -> None:
    files = tracked()
    parts = grouped(files, PARTS)
    print("| subject | lines |\n| --- | ---: |")
    for name, found in grouped(parts["library"], SUBJECTS).items():
        print(f"| {name} | {round(lines(found), -2):,} |")
    print("\n| part | lines | MB |\n| --- | ---: | ---: |")
    for name, found in (parts | {"all": files}).items():
        print(f"| {name} | {round(lines(found), -2):,} | {size(found) / 1e6:.2f} |")


if __name__ == "__main__":
    main()
