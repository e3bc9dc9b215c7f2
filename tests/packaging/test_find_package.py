"""A C++ project finds an installed fusedstep by find_package, and steps."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from pages import blocks

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RELEASE = ROOT / "build" / "release"


def run(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def samples():
    """A step in numbers that can be worked out by hand, then the examples of pages and headers."""
    (readme,) = blocks(ROOT / "README.md", "cpp")
    pages = sorted(ROOT.glob("docs/**/*.md"))
    header = (ROOT / "include/fusedstep/optim/fused.h").read_text()
    lines = header.split("#pragma once")[0].splitlines()
    in_header = [line.removeprefix("//   ") for line in lines if line.startswith("//   ")]
    return [
        (HERE / "consumer" / "main.cpp").read_text(),
        readme,
        *(sample for page in pages for sample in blocks(page, "cpp")),
        "\n".join(in_header) + "\n",
    ]


def one_program(samples):
    """Returns a program that runs the examples: torch's headers take seconds to read."""
    includes, functions = set(), []
    for sample in samples:
        own = set(re.findall(r"^#include <(.+)>$", sample, re.MULTILINE))
        headers = re.findall(r"fusedstep::optim::(\w+) ", sample)
        needed = {f"fusedstep/optim/{name.lower()}.h" for name in headers}
        assert own >= needed | {"torch/torch.h"}, sample
        includes |= own
        body = re.sub("^#include .*\n", "", sample, flags=re.MULTILINE)
        name = f"example_{len(functions)}"
        body, mains = re.subn(r"^int main\(\)", f"void {name}()", body, flags=re.MULTILINE)
        assert mains == 1, sample
        functions.append((name, body))
    lines = [f"#include <{name}>" for name in sorted(includes)]
    lines += [body for _, body in functions]
    lines += ["int main() {", *(f"  {name}();" for name, _ in functions), "}", ""]
    return "\n".join(lines)


def test_a_program_that_finds_the_package_takes_steps(tmp_path):
    """Compiled without optimisation, which takes longer than the steps do."""
    prefix, build = tmp_path / "prefix", tmp_path / "build"
    shutil.copytree(HERE / "consumer", tmp_path / "consumer")
    (tmp_path / "consumer" / "main.cpp").write_text(one_program(samples()))
    run("cmake", "--install", RELEASE, "--prefix", prefix, "--component", "development")
    run(
        *("cmake", "-S", tmp_path / "consumer", "-B", build, "-G", "Ninja"),
        f"-DCMAKE_PREFIX_PATH={prefix}",
        f"-DPython_EXECUTABLE={sys.executable}",
    )
    run("cmake", "--build", build)
    run(build / "main")
