"""Law: native libraries are found, and a message says why those of CUDA are not to be used."""

import importlib
import warnings

import pytest
import torch

import fusedstep
from fusedstep import optim
from fusedstep._native import libraries, ops
from fusedstep._native.libraries import CUDA, library_path, why_not_cuda

doctor = importlib.import_module("fusedstep.doctor")  # fusedstep.doctor is the function


@pytest.fixture
def own(monkeypatch, tmp_path):
    """The folder in which the library is, and not that of CUDA."""
    folder = tmp_path / "own"
    folder.mkdir()
    monkeypatch.setenv("FUSEDSTEP_LIBRARY", str(folder / "libfusedstep.so"))
    ops.missing_on.cache_clear()
    ops.warn_missing.cache_clear()
    yield folder
    ops.missing_on.cache_clear()
    ops.warn_missing.cache_clear()


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Installs a fusedstep-cuda of a version, whose library is an empty file; returns its path."""

    def install(version):
        site = tmp_path / "site-packages"
        library = site / "fusedstep_cuda" / "lib" / CUDA
        library.parent.mkdir(parents=True)
        library.touch()
        (site / "fusedstep_cuda" / "__init__.py").touch()
        about = site / f"fusedstep_cuda-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Name: fusedstep-cuda\nVersion: {version}\n")
        monkeypatch.syspath_prepend(site)
        return library

    return install


def test_all_are_beside_the_one_that_is_named(own):
    assert library_path() == own / "libfusedstep.so"
    assert library_path(libraries.BINDING) == own / "_bind.abi3.so"
    assert library_path(CUDA) == own / CUDA


def test_that_of_cuda_is_in_a_package_of_its_own(own, install):
    library = install(fusedstep.__version__)
    assert library_path(CUDA) == library
    assert library_path() == own / "libfusedstep.so"
    assert why_not_cuda() is None


def test_one_that_was_built_here_comes_first(own, install):
    install("9.9")
    (own / CUDA).touch()
    assert library_path(CUDA) == own / CUDA
    assert why_not_cuda() is None


def test_without_it_is_said_how_to_get_it(own):
    told = ops.missing_on("cuda")
    assert f"not found at {own / CUDA}" in told
    assert f"fusedstep-cuda {fusedstep.__version__}" in told
    assert "where nvcc is" in told


def test_one_of_another_version_is_not_loaded(own, install):
    install("9.9")
    assert ops.missing_on("cuda") == (
        f"fusedstep-cuda is version 9.9, but fusedstep is {fusedstep.__version__}: "
        f"install fusedstep-cuda {fusedstep.__version__}."
    )


def test_another_version_is_told_once_by_optimizers(own, install):
    install("9.9")
    with pytest.warns(UserWarning, match=r"fusedstep-cuda is version 9\.9, .* fused=False is used"):
        ops.warn_missing("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.warn_missing("cuda")


@pytest.mark.parametrize("device", [False, True])
def test_another_version_is_told_by_the_doctor(monkeypatch, own, install, device):
    install("9.9")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert doctor.check_cuda().advice == why_not_cuda()


def test_a_library_that_cannot_be_loaded_is_named(own, install):
    library = install(fusedstep.__version__)
    assert "could not be loaded" in ops.missing_on("cuda")
    assert str(library) in ops.missing_on("cuda")


@pytest.mark.parametrize(
    ("runtime", "driver", "told"),
    [
        (13000, 13000, None),
        (13000, 13010, None),
        (12080, 12020, None),  # newer runtimes of a major version run on its older drivers
        (12080, 13000, None),
        (13000, 0, None),  # there is none: nothing to run on either
        (13000, 12080, "compiled by CUDA 13, and the driver of this machine knows CUDA 12.8."),
    ],
)
def test_drivers(runtime, driver, told):
    found = ops._driver_is_too_old(runtime, driver)
    assert (told in found) if told else (found is None)


def test_the_library_tells_its_versions():
    if ops.missing_on("cuda"):
        pytest.skip("built without CUDA")
    runtime, driver = ops._cuda_versions()
    assert 12000 <= runtime < 20000
    assert (driver > 0) == torch.cuda.is_available()


def test_weights_on_the_cpu_do_not_look_for_it(own, install):
    install("9.9")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = torch.nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        optim.SGD([weight], lr=0.5).step()
    torch.testing.assert_close(weight.data, torch.full((2,), 0.5))
