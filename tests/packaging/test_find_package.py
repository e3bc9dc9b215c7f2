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


def write_programs(folder):
    """The consumer, the examples of the README and the headers, and those of all other pages."""
    shutil.copytree(HERE / "consumer", folder)
    (sample,) = blocks(ROOT / "README.md", "cpp")
    (folder / "readme.cpp").write_text(sample)
    (folder / "pages.cpp").write_text(one_program(sorted(ROOT.glob("docs/**/*.md"))))
    header = (ROOT / "include/fusedstep/optim/fused.h").read_text()
    lines = header.split("#pragma once")[0].splitlines()
    in_header = [line.removeprefix("//   ") for line in lines if line.startswith("//   ")]
    (folder / "header.cpp").write_text("\n".join(in_header) + "\n")
    return sorted(folder.glob("*.cpp"))


def one_program(pages):
    """Returns a program that runs the examples of pages: torch's headers take seconds to read."""
    includes, functions = set(), []
    for page in pages:
        for sample in blocks(page, "cpp"):
            own = set(re.findall(r"^#include <(.+)>$", sample, re.MULTILINE))
            headers = re.findall(r"fusedstep::optim::(\w+) ", sample)
            assert own >= {f"fusedstep/optim/{name.lower()}.h" for name in headers}, page
            includes |= own
            body = re.sub("^#include .*\n", "", sample, flags=re.MULTILINE)
            name = f"example_{len(functions)}"
            body, mains = re.subn(r"^int main\(\)", f"void {name}()", body, flags=re.MULTILINE)
            assert mains == 1, page
            functions.append((name, body))
    lines = [f"#include <{name}>" for name in sorted(includes)]
    lines += [body for _, body in functions]
    lines += ["int main() {", *(f"  {name}();" for name, _ in functions), "}", ""]
    return "\n".join(lines)


def test_programs_that_find_the_package_take_steps(tmp_path):
    prefix, build = tmp_path / "prefix", tmp_path / "build"
    programs = write_programs(tmp_path / "consumer")
    run("cmake", "--install", RELEASE, "--prefix", prefix, "--component", "development")
    run(
        *("cmake", "-S", tmp_path / "consumer", "-B", build, "-G", "Ninja"),
        f"-DCMAKE_PREFIX_PATH={prefix}",
        f"-DPython_EXECUTABLE={sys.executable}",
        "-DCMAKE_BUILD_TYPE=Release",
    )
    run("cmake", "--build", build)
    for program in programs:
        run(build / program.stem)
