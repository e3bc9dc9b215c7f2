"""Law: what the built library defines and needs.

Code of one instruction set must not be what the linker keeps for all: every function that several
objects may define lies in its instruction set's namespace. And the library brings no second OpenMP
runtime, asks for none newer than torch's, and uses torch by its stable interface only.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusedstep._native.libraries import CUDA, library_path

NAMESPACES = {
    "base": ("fusedstep::cpu::base::", "at::vec::DEFAULT::"),
    "avx2": ("fusedstep::cpu::avx2::", "at::vec::AVX2::"),
    "avx512": ("fusedstep::cpu::avx512::", "at::vec::AVX512::"),
}
#: Those of matrix products.
PRODUCTS = ("base", "avx512bf16", "amx")
OPENMP = r"lib(gomp|iomp5|omp)[-.\w]*\.so[.\d]*"


def output(*command) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def objects(repository, target) -> list[Path]:
    """Object files of a target; for kernels, those of every rule."""
    folder = repository / "build" / "release" / "CMakeFiles"
    rules = [f"{target}_*.dir/**/*.o"] if "kernels" in target else []
    found = sorted(
        path for pattern in (f"{target}.dir/**/*.o", *rules) for path in folder.glob(pattern)
    )
    assert found, (
        f"no objects of {target}: cmake --preset release && cmake --build --preset release"
    )
    return found


def weak_definitions(path) -> list[str]:
    """Demangled names of what other objects may define as well: weak and unique symbols."""
    lines = output("nm", "--demangle", "--defined-only", path).splitlines()
    symbols = [line.split(maxsplit=2)[1:] for line in lines if line and not line.endswith(":")]
    return [name for kind, name in symbols if kind in "WVuwv"]


@pytest.mark.parametrize("isa", NAMESPACES)
def test_weak_symbols_stay_in_the_namespace_of_their_isa(isa, repository):
    found = [
        name
        for o in objects(repository, f"fusedstep_kernels_{isa}")
        for name in weak_definitions(o)
    ]
    assert found, "nm shows no weak symbol at all: the check would prove nothing"
    outside = [name for name in found if not any(space in name for space in NAMESPACES[isa])]
    assert not outside
    others = [space for other in NAMESPACES if other != isa for space in NAMESPACES[other]]
    assert not [name for name in found if any(space in name for space in others)]


@pytest.mark.parametrize("isa", PRODUCTS)
def test_weak_symbols_of_products_stay_in_the_namespace_of_their_isa(isa, repository):
    found = [
        name
        for o in objects(repository, f"fusedstep_products_{isa}")
        for name in weak_definitions(o)
    ]
    assert found
    assert not [name for name in found if f"fusedstep::cpu::{isa}::" not in name]


@pytest.mark.parametrize("isa", NAMESPACES)
def test_kernels_inline_what_is_inside_of_them(isa, repository):
    functions = [
        line
        for path in objects(repository, f"fusedstep_kernels_{isa}")
        for line in output("nm", "--demangle", path).splitlines()
        if " U " not in line
    ]
    assert any("update_span" in name for name in functions)
    assert not [name for name in functions if "{lambda" in name]


@pytest.mark.parametrize(
    ("target", "registers"),
    [
        ("fusedstep_core", "%[yz]mm"),
        ("fusedstep", "%[yz]mm"),
        ("fusedstep_kernels_base", "%[yz]mm"),
        ("fusedstep_kernels_avx2", "%zmm"),
        ("fusedstep_products_base", "%[yz]mm"),
        ("fusedstep_products_avx512bf16", "%tmm"),
    ],
)
def test_no_instruction_beyond_the_isa(target, registers, repository):
    for path in objects(repository, target):
        assert not re.search(registers, output("objdump", "--disassemble", path)), path


@pytest.mark.parametrize(
    ("target", "instruction"),
    [
        ("fusedstep_kernels_avx2", "%ymm"),
        ("fusedstep_kernels_avx512", "%zmm"),
        ("fusedstep_products_avx512bf16", "vdpbf16ps"),
        ("fusedstep_products_amx", "tdpbf16ps"),
    ],
)
def test_the_isa_is_used(target, instruction, repository):
    for path in objects(repository, target):
        assert instruction in output("objdump", "--disassemble", path), path


def needed(path=None) -> list[str]:
    dynamic = output("readelf", "--dynamic", path or library_path())
    return re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)


def undefined() -> list[str]:
    lines = output("nm", "--dynamic", "--undefined-only", library_path()).splitlines()
    return [line.split()[-1] for line in lines]


def test_the_library_needs_one_openmp_runtime():
    assert [name for name in needed() if re.fullmatch(OPENMP, name)] == ["libgomp.so.1"]


def test_the_library_needs_no_python():
    assert not [name for name in needed() if "python" in name]


def test_the_binding_fits_every_python_and_every_torch():
    path = library_path().with_name("_bind.abi3.so")
    if not path.is_file():
        pytest.skip("built without Python's headers")
    assert not [name for name in needed(path) if "python" in name]
    symbols = output("nm", "--dynamic", "--undefined-only", path).split()
    assert "PyList_GetItem" in symbols
    # Functions that the limited API's own macros call.
    limited = {
        "_PyArg_ParseTuple_SizeT",
        "_Py_Dealloc",
        "_Py_FalseStruct",
        "_Py_NoneStruct",
        "_Py_TrueStruct",
    }
    assert {name for name in symbols if name.startswith("_Py")} <= limited
    assert not [name for name in symbols if re.match(r"_ZNK?(2at|3c10|5torch)", name)]


def test_the_cuda_library_has_a_runtime_of_its_own():
    """Beside a torch of another CUDA it must neither need that one's runtime nor use it."""
    path = library_path(CUDA)
    if not path.is_file():
        pytest.skip("built without CUDA")
    assert "libtorch_cuda.so" in needed(path)
    assert not [name for name in needed(path) if name.startswith("libcuda")]
    symbols = output("nm", "--dynamic", path).split()
    assert not [name for name in symbols if re.match(r"_*cuda[A-Z]", name)]
    assert "fusedstep_cuda_versions" in symbols


def test_one_openmp_runtime_is_mapped(subprocess_environment):
    program = "import fusedstep; print(open('/proc/self/maps').read())"
    maps = subprocess.run(
        [sys.executable, "-c", program],
        env=subprocess_environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    paths = {line.split()[-1] for line in maps.splitlines() if "/" in line}
    runtimes = [path for path in paths if re.fullmatch(OPENMP, Path(path).name)]
    assert len(runtimes) == 1, runtimes


def test_no_openmp_symbol_is_newer_than_those_of_torch():
    libgomp = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
    lines = output("nm", "--dynamic", "--defined-only", libgomp).splitlines()
    defined = {line.split()[-1] for line in lines if " A " in line}
    asked = {symbol.split("@")[-1] for symbol in undefined() if re.search("@G?OMP_", symbol)}
    assert {"GOMP_4.0", "OMP_1.0"} <= defined
    assert asked
    assert asked <= defined


def test_torch_is_used_by_its_stable_interface():
    """C functions only: a C++ name of torch's would bind the library to one release."""
    names = undefined()
    assert any(name.startswith("aoti_torch_") for name in names)
    assert not [name for name in names if re.match(r"_ZNK?(2at|3c10|5torch)", name)]
