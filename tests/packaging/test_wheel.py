"""Law: the contents of the wheels of `./run.sh wheel`."""

import email
import platform
import re
import sysconfig
import zipfile
from pathlib import Path

import pytest

from built_wheels import ROOT

PLATFORM = sysconfig.get_platform().replace("-", "_")


@pytest.fixture(params=["raw", "repaired", "raw_cuda", "cuda"])
def wheel(request, wheels) -> Path:
    return getattr(wheels, request.param) or pytest.skip("there is no nvcc")


def files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    return {name for name in names if ".dist-info/" not in name and not name.endswith("/")}


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_platform_of_a_wheel(wheel):
    """One for every Python; after auditwheel's check also for all systems that torch's is for."""
    name, _, *tags, system = wheel.stem.split("-")
    assert name == ("fusedstep_cuda" if "cuda" in wheel.name else "fusedstep")
    assert tags == ["py3", "none"]
    is_raw = wheel.parent.name == "raw"
    assert system == (PLATFORM if is_raw else f"manylinux_2_28_{platform.machine()}")


def test_wheels_hold_a_package_and_its_libraries_only(wheel):
    """The libraries, and what C++ programs need. The repaired ones have no OpenMP of their own."""
    if "cuda" in wheel.name:
        library = "fusedstep_cuda/lib/libfusedstep_cuda.so"
        assert files(wheel) == {"fusedstep_cuda/__init__.py", library}
        return
    package = ROOT / "python" / "fusedstep"
    sources = [*package.rglob("*.py"), package / "py.typed"]
    expected = {str(path.relative_to(ROOT / "python")) for path in sources}
    libraries = {"fusedstep/lib/libfusedstep.so"}
    if (package / "lib" / "_bind.abi3.so").is_file():
        libraries.add("fusedstep/lib/_bind.abi3.so")
    include = ROOT / "include"
    headers = {f"fusedstep/include/{path.relative_to(include)}" for path in include.rglob("*.h")}
    config = ("Config", "ConfigVersion", "Targets", "Targets-release")
    cmake = {f"fusedstep/share/cmake/fusedstep/fusedstep{name}.cmake" for name in config}
    cmake.add("fusedstep/share/cmake/fusedstep/FusedstepTorch.cmake")
    assert files(wheel) == expected | libraries | headers | cmake


def test_kernels_of_cuda_go_with_one_version(wheels):
    if not wheels.cuda:
        pytest.skip("there is no nvcc")
    about = metadata(wheels.repaired)
    assert metadata(wheels.cuda)["Version"] == about["Version"]
    assert metadata(wheels.cuda).get_all("Requires-Dist") == [f"fusedstep=={about['Version']}"]


def test_links_lead_somewhere_on_a_package_page(wheels):
    about = metadata(wheels.raw)
    home = "https://github.com/fusedstep/fusedstep"
    files = "https://raw.githubusercontent.com/fusedstep/fusedstep"
    assert f"Homepage, {home}" in about.get_all("Project-URL")
    assert about["Description-Content-Type"] == "text/markdown"
    page = about.get_payload(decode=True).decode()
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", page)
    assert len(links) == len(re.findall(r"\]\(", (ROOT / "README.md").read_text()))
    assert {bool(picture) for picture, _ in links} == {True, False}
    for picture, link in links:
        start = f"{files}/main/" if picture else f"{home}/blob/main/"
        assert link.startswith(start), link
        assert (ROOT / link.removeprefix(start).partition("#")[0]).exists(), link
