"""Which GPUs the CUDA kernels are compiled for."""

import os
import subprocess
from pathlib import Path

import pytest

MODULE = Path(__file__).resolve().parents[2] / "cmake" / "FusedstepCuda.cmake"
ALL = "80-real;86-real;89-real;90-real;100-real;120"


@pytest.mark.parametrize(
    ("gpus", "options", "expected"),
    [
        ("9.0", (), "90"),
        ("9.0\\n8.6\\n9.0", ("-DFUSEDSTEP_IN_PLACE=ON",), "90;86"),
        ("12.0", ("-DFUSEDSTEP_CUDA_ARCHITECTURES=ALL",), ALL),
        ("9.0", ("-DFUSEDSTEP_CUDA_ARCHITECTURES=80;86-real",), "80;86-real"),
        (None, (), ALL),
        (None, ("-DFUSEDSTEP_IN_PLACE=ON",), "90-virtual, runs nowhere"),
        ("9.0", ("-DFUSEDSTEP_CUDA_ARCHITECTURES=NONE",), "90-virtual, runs nowhere"),
        ("9.0", ("-DFUSEDSTEP_CUDA_ARCHITECTURES=90-virtual",), "90-virtual"),
        (None, ("-DFUSEDSTEP_IN_PLACE=ON", "-DFUSEDSTEP_CUDA_ARCHITECTURES=ALL"), ALL),
    ],
)
def test_gpus_of_this_machine_else_all(tmp_path, gpus, options, expected):
    tells = f"printf '{gpus}\\n'" if gpus else "echo 'NVIDIA-SMI has failed'; exit 9"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{tells}\n")
    program.chmod(0o755)
    script = tmp_path / "script.cmake"
    script.write_text(
        f'include("{MODULE}")\nfusedstep_cuda_architectures(chosen)\n'
        'if(FUSEDSTEP_CUDA_RUNS_NOWHERE)\n  string(APPEND chosen ", runs nowhere")\nendif()\n'
        'message("=${chosen}")\n'
    )
    done = subprocess.run(
        ["cmake", *options, "-P", script],
        env=os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == f"={expected}\n"
