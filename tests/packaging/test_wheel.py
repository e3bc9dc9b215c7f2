"""`pip install .` gives a package that works outside of the source tree."""

import email
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# In the first step m/bc1 = g and v/bc2 = g²: u = (1, -1), and the ratio is |(3, 4)| / |(1, -1)|.
STEP = """
import math, pathlib, sys
import torch
import fusedstep
from fusedstep import optim

assert pathlib.Path(fusedstep.__file__).is_relative_to(sys.prefix), fusedstep.__file__
weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
weight.grad = torch.tensor([0.5, -2.0])
optim.Lamb([weight], lr=0.1, fused=True).step()
moved = 0.1 * 5 / math.sqrt(2)
torch.testing.assert_close(weight.data, torch.tensor([3 - moved, 4 + moved]), rtol=1e-6, atol=0)
print(fusedstep.__version__, fusedstep.isa())
"""


def run(*command: object, **options) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=environment, **options
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built with the torch that runs this test: an isolated build would download one."""
    folder = tmp_path_factory.mktemp("wheel")
    # Without the CUDA library, which takes nvcc minutes for all architectures.
    cpu_only = ("-C", "cmake.define.FUSEDSTEP_WITH_CUDA=OFF")
    options = ("--no-build-isolation", "--no-deps", "--no-index", *cpu_only)
    run(sys.executable, "-m", "pip", "wheel", *options, "-w", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def repaired(wheel, tmp_path_factory) -> Path:
    """The wheel as it goes to a package index."""
    folder = tmp_path_factory.mktemp("repaired")
    run("env", f"PYTHON={sys.executable}", ROOT / "scripts" / "repair_wheel.sh", wheel, folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(params=["wheel", "repaired"])
def any_wheel(request) -> Path:
    return request.getfixturevalue(request.param)


def test_platform_of_a_wheel(wheel, repaired):
    platform = sysconfig.get_platform().replace("-", "_")
    assert wheel.name.split("-")[0] == "fusedstep"
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    tags = repaired.stem.split("-")[-1].split(".")
    assert all(tag.startswith("manylinux") for tag in tags), repaired.name


def test_wheel_holds_the_package_and_its_library_only(any_wheel):
    """The repaired one has no OpenMP of its own either."""
    with zipfile.ZipFile(any_wheel) as archive:
        names = {
            name
            for name in archive.namelist()
            if ".dist-info/" not in name and not name.endswith("/")
        }
    sources = [*(ROOT / "python").rglob("*.py"), ROOT / "python" / "fusedstep" / "py.typed"]
    expected = {str(path.relative_to(ROOT / "python")) for path in sources}
    libraries = {"fusedstep/lib/libfusedstep.so"}
    if (ROOT / "python" / "fusedstep" / "lib" / "_bind.abi3.so").is_file():
        libraries.add("fusedstep/lib/_bind.abi3.so")
    assert names == expected | libraries


def test_links_lead_somewhere_on_a_package_page(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    home = "https://github.com/fusedstep/fusedstep"
    files = "https://raw.githubusercontent.com/fusedstep/fusedstep"
    assert f"Homepage, {home}" in metadata.get_all("Project-URL")
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = metadata.get_payload(decode=True).decode()
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", page)
    assert len(links) == len(re.findall(r"\]\(", (ROOT / "README.md").read_text()))
    assert {bool(picture) for picture, _ in links} == {True, False}
    for picture, link in links:
        start = f"{files}/main/" if picture else f"{home}/blob/main/"
        assert link.startswith(start), link
        assert (ROOT / link.removeprefix(start).partition("#")[0]).exists(), link


def test_installed_wheel_takes_a_step(any_wheel, tmp_path):
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    (site,) = venv.glob("lib/python*/site-packages")
    ours = [folder for folder in sys.path if folder.endswith("-packages")]
    (site / "torch.pth").write_text("\n".join(ours))
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", any_wheel)
    version, isa = run(python, "-c", STEP, cwd=tmp_path).split()
    assert version == any_wheel.name.split("-")[1]
    assert isa in ("base", "avx2", "avx512")
    doctor = run(python, "-m", "fusedstep", "doctor", cwd=tmp_path)
    assert re.search(r"^OpenMP +one runtime", doctor, re.MULTILINE), doctor
    assert "run.sh" not in doctor
