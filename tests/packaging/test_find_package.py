"""A C++ project finds an installed fusedstep by find_package and steps to the bits of Python."""

import subprocess
import sys
from pathlib import Path

import torch

from fusedstep import optim

HERE = Path(__file__).resolve().parent
RELEASE = HERE.parents[1] / "build" / "release"


def run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# As in consumer/main.cpp.
OPTIONS = {
    "Lamb": {"lr": 0.01, "weight_decay": 0.1},
    "Lamb-apex": {"lr": 0.01, "variant": "apex"},
    "Lamb-nvlamb": {"lr": 0.01, "variant": "nvlamb", "weight_decay": 0},
    "Lamb-timm": {"lr": 0.01, "variant": "timm", "decoupled_decay": True},
    "Lamb-deepspeed": {"lr": 0.01, "variant": "deepspeed"},
    "Lamb-cybertron": {"lr": 0.01, "variant": "cybertron"},
    "Adam": {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.01, "weight_decay": 0.1, "lr_decay": 0.1},
}


def eighths(factor: int, modulus: int) -> torch.Tensor:
    numbers = torch.arange(50_000) * factor % modulus - modulus // 2
    return numbers.float().div(8).reshape(500, 100)


def bits_after_five_steps(name: str) -> int:
    weight = torch.nn.Parameter(eighths(7, 13))
    optimizer = getattr(optim, name.partition("-")[0])([weight], **OPTIONS[name], fused=True)
    for step in range(1, 6):
        weight.grad = eighths(step, 29)
        optimizer.step()
    fnv = 14695981039346656037  # FNV-1a over the weights' bits
    for bits in weight.detach().view(torch.int32).flatten().tolist():
        fnv = (fnv ^ (bits & 0xFFFFFFFF)) * 1099511628211 % 2**64
    return fnv


def test_consumer_of_find_package_takes_a_step(tmp_path):
    prefix, build = tmp_path / "prefix", tmp_path / "build"
    run("cmake", "--install", RELEASE, "--prefix", prefix, "--component", "development")
    run(
        *("cmake", "-S", HERE / "consumer", "-B", build, "-G", "Ninja"),
        f"-DCMAKE_PREFIX_PATH={prefix}",
        f"-DPython_EXECUTABLE={sys.executable}",
        "-DCMAKE_BUILD_TYPE=Release",
    )
    run("cmake", "--build", build)
    printed = dict(line.split() for line in run(build / "consumer").splitlines())
    assert printed == {name: str(bits_after_five_steps(name)) for name in OPTIONS}
