"""The wheels in a fresh environment, with this torch and with the newest, without the checkout."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from built_wheels import ROOT, environment, run
from support.pages import blocks

NEWEST = ROOT / "build" / "newest-torch"

# In the first step m/bc1 = g and v/bc2 = g²: u = (1, -1), and the ratio is |(3, 4)| / |(1, -1)|.
STEP = """
import math
import torch
import fusedstep
from fusedstep import optim
from fusedstep._native import ops

weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
weight.grad = torch.tensor([0.5, -2.0])
optim.Lamb([weight], lr=0.1, fused=True).step()
moved = 0.1 * 5 / math.sqrt(2)
torch.testing.assert_close(weight.data, torch.tensor([3 - moved, 4 + moved]), rtol=1e-6, atol=0)
print(fusedstep.__version__, fusedstep.isa(), ops.missing_on("cuda"))
fusedstep.doctor()
"""

#: Runs pytest over the package that is installed, whatever the paths of tests lead to.
TESTS = """
import pathlib, sys
import fusedstep, pytest
assert pathlib.Path(fusedstep.__file__).is_relative_to(sys.prefix), fusedstep.__file__
sys.exit(pytest.main(sys.argv[1:]))
"""

LAWS = (
    "laws/maths/test_reference.py::test_fused_matches_the_reference",
    "laws/maths/test_reference.py::test_fused_matches_torch",
    "laws/engine/test_isa.py::test_the_forced_isa_ran",
    "laws/engine/test_layouts.py::test_trust_ratio_within_one_ulp",
)
#: All recipes and examples of pages that need no framework; of them, what trains in a second each.
EXAMPLES = ("repo/test_recipes.py", "repo/test_docs.py::test_examples_run")
PART = (
    "repo/test_recipes.py::test_recipe[bf16_split]",
    "repo/test_recipes.py::test_recipe[int8_states]",
    "repo/test_recipes.py::test_lamb_with_warmup",
    "repo/test_recipes.py::test_galore_in_backward",
    "repo/test_recipes.py::test_recommender",
)
ON_A_GPU = (
    "laws/engine/test_cuda.py::test_same_bits_as_on_the_cpu_over_100_steps",
    "laws/engine/test_cuda.py::test_clipping_scaling_and_clearing_as_on_the_cpu",
    "laws/engine/test_cuda.py::test_a_captured_step_is_replayed",
    "laws/engine/test_cuda.py::test_the_current_stream_is_used",
)


@pytest.fixture(scope="module", params=["this torch", "newest torch"])
def installed(request, wheels, tmp_path_factory) -> Path:
    """The Python of an environment with the wheels."""
    packages = [folder for folder in sys.path if folder.endswith("-packages")]
    if request.param == "newest torch":
        if not (NEWEST / ".looked-for").exists():
            pytest.skip("./run.sh test has not installed a newest torch")
        packages[:0] = map(str, NEWEST.glob("lib/python*/site-packages"))
    both = [wheel for wheel in (wheels.repaired, wheels.cuda) if wheel]
    return environment(tmp_path_factory.mktemp("installed") / "venv", packages, *both)


def test_a_step_and_the_doctor(installed, wheels, tmp_path):
    """Without a warning. The kernels of CUDA are loaded where there is no GPU, too."""
    done = run(installed, "-W", "error", "-c", STEP, cwd=tmp_path)
    first, _, doctor = done.partition("\n")
    version, isa, missing = first.split(maxsplit=2)
    assert version == wheels.repaired.name.split("-")[1]
    assert isa in ("base", "avx2", "avx512")
    with_cuda = wheels.cuda and torch.backends.cuda.is_built()
    assert missing == "None" if with_cuda else "fusedstep-cuda" in missing
    assert re.search(r"^OpenMP +one runtime", doctor, re.MULTILINE), doctor
    assert "run.sh" not in doctor
    if with_cuda:
        assert re.search(r"^CUDA .*(library present|native kernels loaded)$", doctor, re.MULTILINE)


def test_a_part_of_the_laws_and_the_examples(installed, request, tmp_path):
    newest = request.node.callspec.params["installed"] == "newest torch"
    part = LAWS + (PART if newest else EXAMPLES) + (ON_A_GPU if torch.cuda.is_available() else ())
    options = ("-q", "--plain", "-p", "no:cacheprovider", "-p", "no:logging")
    paths = ("-o", "pythonpath=bench bench/nanogpt", "--rootdir", ROOT)
    tests = [ROOT / "tests" / name for name in part]
    done = run(installed, "-c", TESTS, *options, *paths, *tests, cwd=tmp_path)
    assert re.search(r"^\d+ passed", done.splitlines()[-1]), done


def test_a_cpp_program_takes_a_step(installed, tmp_path):
    """By the commands of the page on C++. The program has torch of the environment alone."""
    (commands,) = blocks(ROOT / "docs" / "cpp.md", "sh")
    shutil.copytree(ROOT / "tests" / "packaging" / "consumer", tmp_path / "consumer")
    said = run("bash", "-ec", commands, cwd=tmp_path / "consumer", python=installed)
    folder = run(installed, "-c", "import torch; print(torch.__path__[0])").strip()
    assert re.search(rf"^-- torch [\d.]+ in {re.escape(folder)}$", said, re.MULTILINE), said
    run(tmp_path / "consumer" / "build" / "main")
