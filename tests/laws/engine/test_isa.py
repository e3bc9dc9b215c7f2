"""Law: the instruction set can be listed and forced, and the forced one is the one that ran."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fusedstep
from fusedstep._native import ops
from support.cases import DTYPES, PLAIN, thinned
from support.stepping import ISAS, as_parameters, forced_isa, make_weights


def stepped(case, dtype=torch.float32):
    (param,) = as_parameters(make_weights([(100,)], dtype))
    param.grad = torch.ones_like(param)
    optimizer = case.build([param])
    optimizer.step()
    return optimizer


def cpu_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(set(line.split()) for line in lines if line.startswith("flags"))


def test_list_is_what_the_cpu_runs_best_first():
    flags = cpu_flags()
    runs = {
        "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags,
        "avx2": {"avx2", "fma"} <= flags,
        "base": True,
    }
    assert fusedstep.isas() == tuple(name for name, present in runs.items() if present)
    assert fusedstep.isa() == fusedstep.isas()[0]


def test_levels_of_products_are_those_that_the_cpu_runs():
    flags = cpu_flags()
    products = {
        "amx": {"avx512f", "avx512_bf16", "amx_tile", "amx_bf16"} <= flags,
        "avx512bf16": {"avx512f", "avx512_bf16"} <= flags,
    }
    expected = tuple(name for name, present in products.items() if present)
    assert ops.product_isas() == expected
    assert ops.product_isa() == (expected[0] if expected else "")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("case", "dtype"), thinned(PLAIN, DTYPES), ids=str)
def test_the_forced_isa_ran(case, dtype, isa):
    with forced_isa(isa):
        assert fusedstep.isa() == isa
        assert stepped(case, dtype)._isa() == isa
    assert fusedstep.isa() == fusedstep.isas()[0]


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_a_plan_follows_the_isa_from_step_to_step(case):
    optimizer = stepped(case)
    for isa in (*fusedstep.isas(), *reversed(fusedstep.isas())):
        with forced_isa(isa):
            optimizer.step()
        assert optimizer._isa() == isa


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_weights_without_elements_have_none(case):
    params = as_parameters(make_weights([(3,), (0,)], torch.float32))
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = case.build([{"params": [param]} for param in params])
    optimizer.step()
    assert optimizer._isa() == fusedstep.isa()


def test_the_twin_has_no_isa():
    (param,) = as_parameters(make_weights([(3,)], torch.float32))
    param.grad = torch.ones_like(param)
    optimizer = PLAIN[0].build([param], fused=False)
    optimizer.step()
    with pytest.raises(RuntimeError):
        optimizer._isa()


@pytest.mark.parametrize("name", ["sse9", "AVX2 ", "avx-512"])
def test_forcing_an_impossible_isa_is_an_error(name):
    with pytest.raises(ValueError, match=name):
        ops.force_isa(name)
    assert fusedstep.isa() == fusedstep.isas()[0]


def start_with(value, environment):
    program = "import fusedstep; print(fusedstep.isa())"
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"FUSEDSTEP_ISA": value},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_environment_forces_an_isa(subprocess_environment):
    isa = fusedstep.isas()[-1]
    result = start_with(isa, subprocess_environment)
    assert result.stdout.strip() == isa, result.stderr


def test_environment_with_an_impossible_isa_is_an_error_at_import(subprocess_environment):
    result = start_with("sse9", subprocess_environment)
    assert result.returncode != 0
    message = result.stderr.strip().splitlines()[-1]
    assert "FUSEDSTEP_ISA" in result.stderr
    assert "sse9" in message
    assert all(isa in message for isa in (*ops.product_isas(), *fusedstep.isas()))
