"""A C++ project finds an installed fusedstep by find_package, and steps."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RELEASE = ROOT / "build" / "release"


def run(*command: object) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def write_programs(folder):
    """The consumer, and the examples of the README, the headers and the page of small states."""
    shutil.copytree(HERE / "consumer", folder)
    for page, name in (("README.md", "readme"), ("docs/small_states.md", "small_states")):
        (sample,) = re.findall(r"```cpp\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        (folder / f"{name}.cpp").write_text(sample)
    header = (ROOT / "include/fusedstep/optim/fused.h").read_text()
    lines = header.split("#pragma once")[0].splitlines()
    in_header = [line.removeprefix("//   ") for line in lines if line.startswith("//   ")]
    (folder / "header.cpp").write_text("\n".join(in_header) + "\n")
    return sorted(folder.glob("*.cpp"))


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
