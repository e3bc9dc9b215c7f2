"""A C++ project finds an installed fusedstep by find_package, and steps."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusedstep
from support.pages import blocks

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RELEASE = ROOT / "build" / "release"


def run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


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


def header_of(optimizer: str) -> str:
    """The header of the class, or that of all classes that follow from their rules."""
    name = optimizer.lower()
    return name if (ROOT / f"include/fusedstep/optim/{name}.h").exists() else "plain"


def one_program(samples):
    """Returns a program that runs the examples: torch's headers take seconds to read."""
    includes, functions = set(), []
    for sample in samples:
        own = set(re.findall(r"^#include <(.+)>$", sample, re.MULTILINE))
        headers = re.findall(r"fusedstep::optim::(\w+) ", sample)
        needed = {f"fusedstep/optim/{header_of(name)}.h" for name in headers}
        if "fusedstep/optim.h" in own:
            needed = set()
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


def test_a_libtorch_without_python_is_found(tmp_path):
    """By its CMake package's folder, also where torch's own package has been found before."""
    prefix, libtorch = tmp_path / "prefix", tmp_path / "libtorch"
    libtorch.symlink_to(Path(torch.__file__).parent)
    shutil.copytree(HERE / "consumer", tmp_path / "consumer")
    run("cmake", "--install", RELEASE, "--prefix", prefix, "--component", "development")
    for name in ("Torch_DIR", "TORCH_INSTALL_PREFIX"):
        found = {"Torch_DIR": libtorch / "share" / "cmake" / "Torch"}.get(name, libtorch)
        said = run(
            *("cmake", "-S", tmp_path / "consumer", "-B", tmp_path / name, "-G", "Ninja"),
            *(f"-DCMAKE_PREFIX_PATH={prefix}", f"-D{name}={found}"),
            *("-DPython_EXECUTABLE=/nowhere/python", "-DCMAKE_DISABLE_FIND_PACKAGE_Python=ON"),
        )
        assert f"torch {torch.__version__.rpartition('.')[0]} in {libtorch}" in said


def test_a_checkout_that_is_built_has_the_package(tmp_path):
    """In place: with the library and the headers of the checkout. torch is the prefix's."""
    prefixes = f"{torch.utils.cmake_prefix_path};{fusedstep.cmake_prefix_path}"
    configure = ("cmake", "-S", HERE / "consumer", "-B", tmp_path, "-G", "Ninja")
    run(*configure, f"-DCMAKE_PREFIX_PATH={prefixes}", "-DCMAKE_DISABLE_FIND_PACKAGE_Python=ON")
    run("cmake", "--build", tmp_path)
    run(tmp_path / "main")


def test_a_package_that_is_not_there_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(fusedstep._native.libraries, "_PACKAGE", tmp_path)
    with pytest.raises(AttributeError, match=r"not found in \S+/share/cmake. Install fusedstep"):
        _ = fusedstep.cmake_prefix_path
    with pytest.raises(AttributeError, match="no attribute 'cmake_prefix'"):
        _ = fusedstep.cmake_prefix


def test_kernels_that_are_a_check_are_not_installed(tmp_path):
    built = (RELEASE / "build.ninja").read_text()
    is_check = "code=[compute_90]" in built  # as PTX alone
    said = run("cmake", "--install", RELEASE, "--prefix", tmp_path, "--component", "development")
    installed = bool(list(tmp_path.glob("**/libfusedstep_cuda.so")))
    assert installed == ("libfusedstep_cuda.so" in built and not is_check)
    assert ("FUSEDSTEP_CUDA_ARCHITECTURES" in said) == is_check


def test_an_older_standard_is_the_first_error():
    header = ROOT / "include" / "fusedstep" / "optim" / "lamb.h"
    command = ["-std=c++17", "-fsyntax-only", "-Wfatal-errors", f"-I{ROOT / 'include'}"]
    compiler = os.environ.get("CXX", "g++")
    done = subprocess.run([compiler, *command, header], capture_output=True, text=True)
    assert "need C++20" in done.stderr
    assert done.stderr.count("error:") == 1
