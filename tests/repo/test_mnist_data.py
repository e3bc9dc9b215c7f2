"""The data of examples/mnist: IDX files, where they are looked for, download and stand-in."""

import functools
import gzip
import hashlib
import http.server
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "mnist"
sys.path.append(str(EXAMPLE))
import data  # noqa: E402
import idx  # noqa: E402

NAMES = tuple(name.removesuffix(".gz") for name in data.RESOURCES)


def idx_bytes(shape, elements, kind=8):
    """The bytes of an IDX file; the elements may be fewer or more than the shape says."""
    sizes = (kind << 8 | len(shape), *shape)
    return b"".join(size.to_bytes(4, "big") for size in sizes) + bytes(elements)


def set_files(images=3, test_images=2):
    """The bytes of the four files, by name."""
    sizes = {"train": images, "t10k": test_images}
    return {
        name: idx_bytes((count, 28, 28), bytes(count * 784))
        if "images" in name
        else idx_bytes((count,), range(count))
        for name in NAMES
        for count in (sizes[name.split("-")[0]],)
    }


def write_sets(folder):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in set_files().items():
        (folder / name).write_bytes(content)
    return folder


def expect_error(path, reason):
    return pytest.raises(idx.IdxError, match=f"^{re.escape(f'{path}: {reason}')}")


# ---- The reader --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "a.gz"])
def test_read_plain_and_gzip_alike(tmp_path, name):
    content = idx_bytes((2, 1, 3), (1, 2, 3, 4, 5, 255))
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    array = idx.read(path, 3)
    assert array.dtype == np.uint8
    assert array.tolist() == [[[1, 2, 3]], [[4, 5, 255]]]


def test_write_gives_the_bytes_of_the_format(tmp_path):
    idx.write(tmp_path / "a", np.array([[1, 2, 3], [4, 5, 6]], np.uint8).T)
    expected = bytes((0, 0, 8, 2, 0, 0, 0, 3, 0, 0, 0, 2, 1, 4, 2, 5, 3, 6))
    assert (tmp_path / "a").read_bytes() == expected


CUT = 2**32 - 1

DAMAGED = {
    "empty": (1, b"", "truncated: 0 bytes, the header alone takes 8"),
    "header": (3, idx_bytes((1, 28), b""), "truncated: 12 bytes, the header alone takes 16"),
    "fewer": (1, idx_bytes((4,), b"abc"), "truncated: the header declares 4 bytes, 3 are there"),
    "more": (2, idx_bytes((2, 1), b"abc"), "too long: the header declares 2x1 bytes, more "),
    "huge": (3, idx_bytes((CUT,) * 3, b"a"), f"too large: the header declares {CUT}x{CUT}x{CUT} "),
    "labels": (3, idx_bytes((4,), bytes(12)), "wrong magic number 0x00000801, expected 0x00000803"),
    "floats": (1, idx_bytes((1,), b"", 13), "wrong magic number 0x00000d01, expected 0x00000801"),
    "zipped": (1, gzip.compress(b"a", mtime=0), "wrong magic number 0x1f8b08"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_read_refuses_a_damaged_file(tmp_path, case):
    dimensions, content, reason = DAMAGED[case]
    path = tmp_path / case
    path.write_bytes(content)
    with expect_error(path, reason):
        idx.read(path, dimensions)


def test_read_refuses_a_truncated_gzip(tmp_path):
    path = tmp_path / "a.gz"
    whole = gzip.compress(idx_bytes((5,), b"abcde"), compresslevel=0)
    for size in (len(whole) - 1, len(whole) - 12, 10):
        path.write_bytes(whole[:size])
        with expect_error(path, "truncated: the gzip stream ends too early"):
            idx.read(path, 1)


def test_read_unpacks_no_more_than_the_header_declares(tmp_path):
    """The checksum is wrong, but nobody gets there."""
    path = tmp_path / "a.gz"
    content = bytearray(gzip.compress(idx_bytes((2,), bytes(9 << 20))))
    content[-6] ^= 0xFF
    path.write_bytes(content)
    with expect_error(path, "too long: the header declares 2 bytes, more are there"):
        idx.read(path, 1)
    path.write_bytes(gzip.compress(idx_bytes((2**30 + 1,), b"a")))
    with expect_error(path, "too large: the header declares 1073741825 bytes, at most 1073741824 "):
        idx.read(path, 1)


@pytest.mark.parametrize("at", [0, 10, -6], ids=["header", "data", "checksum"])
def test_read_refuses_a_corrupt_gzip(tmp_path, at):
    path = tmp_path / "a.gz"
    content = bytearray(gzip.compress(idx_bytes((5,), b"abcde"), compresslevel=0))
    content[at] ^= 0xFF
    path.write_bytes(content)
    with expect_error(path, "corrupt gzip: "):
        idx.read(path, 1)


def test_read_set(tmp_path):
    images, labels = idx.read_set(write_sets(tmp_path), "train")
    assert images.shape == (3, 28, 28)
    assert labels.tolist() == [0, 1, 2]


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"

DISAGREEING = {
    "count": (LABELS, idx_bytes((2,), b"\1\2"), f"2 labels for the 3 images of {IMAGES}"),
    "label": (LABELS, idx_bytes((3,), b"\1\12\2"), "label 10 at 1, expected 0 to 9"),
    "size": (IMAGES, idx_bytes((3, 28, 27), bytes(3 * 756)), "images of 28x27, expected 28x28"),
    "none": (IMAGES, idx_bytes((0, 28, 28), b""), "no images"),
}


@pytest.mark.parametrize("case", DISAGREEING)
def test_read_set_refuses_files_that_disagree(tmp_path, case):
    name, content, reason = DISAGREEING[case]
    (write_sets(tmp_path) / name).write_bytes(content)
    with expect_error(tmp_path / name, reason):
        idx.read_set(tmp_path, "train")


def test_read_set_names_a_missing_file(tmp_path):
    (write_sets(tmp_path) / LABELS).unlink()
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}: neither {LABELS} nor"):
        idx.read_set(tmp_path, "train")


def test_the_database_itself():
    """The facts that the database's own page states."""
    if "FUSEDSTEP_DATA" not in os.environ:
        pytest.skip("FUSEDSTEP_DATA is not set")
    folder = data.find()
    for name, count, first in (("train", 60000, [5, 0, 4, 1]), ("t10k", 10000, [7, 2, 1, 0])):
        images, labels = idx.read_set(folder, name)
        assert images.shape == (count, 28, 28)
        assert labels[:4].tolist() == first
        if name == "train":
            assert images.mean() / 255 == pytest.approx(0.1307, abs=5e-5)
            assert images.std() / 255 == pytest.approx(0.3081, abs=5e-5)


# ---- Where the files are looked for ------------------------------------------------------------


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A repository and a current folder without data, and no environment variable."""
    for name in ("repository", "current"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(data, "REPOSITORY", tmp_path / "repository")
    monkeypatch.chdir(tmp_path / "current")
    monkeypatch.delenv("FUSEDSTEP_DATA", raising=False)
    return tmp_path


def test_find_takes_the_first_place_that_has_the_files(places, monkeypatch):
    assert data.find() is None
    for subfolder in ("repository/data/mnist", "repository/data", "current/data/mnist"):
        folder = write_sets(places / subfolder)
        assert data.find().resolve() == folder
    folder = write_sets(places / "environment" / "mnist")
    monkeypatch.setenv("FUSEDSTEP_DATA", str(folder.parent))
    assert data.find() == folder
    monkeypatch.setenv("FUSEDSTEP_DATA", str(folder))
    assert data.find() == folder
    option = write_sets(places / "option")
    assert data.find(str(option)) == option


def test_find_needs_all_four_files_gzipped_or_not(places):
    folder = write_sets(places / "current" / "data")
    name = folder / NAMES[3]
    name.rename(name.with_suffix(".gz"))
    assert data.find().resolve() == folder
    name.with_suffix(".gz").unlink()
    assert data.find() is None


def test_find_never_passes_over_what_the_user_names(places, monkeypatch):
    write_sets(places / "current" / "data")
    with pytest.raises(FileNotFoundError, match="--data: neither nowhere nor nowhere/mnist"):
        data.find("nowhere")
    monkeypatch.setenv("FUSEDSTEP_DATA", "nowhere")
    with pytest.raises(FileNotFoundError, match=f"FUSEDSTEP_DATA: .*{NAMES[0]}"):
        data.fetch()


# ---- Download and stand-in ---------------------------------------------------------------------


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture
def mirror(places, monkeypatch):
    """A folder with the four files, gzipped, served by the second of two mirrors; the first one
    has none of them."""
    folder = places / "served"
    (folder / "good").mkdir(parents=True)
    sums = {}
    for name, content in set_files().items():
        zipped = gzip.compress(content)
        (folder / "good" / f"{name}.gz").write_bytes(zipped)
        sums[f"{name}.gz"] = hashlib.md5(zipped).hexdigest()
    handler = functools.partial(_Handler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        root = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(data, "MIRRORS", (f"{root}/empty/", f"{root}/good/"))
        monkeypatch.setattr(data, "RESOURCES", sums)
        yield folder / "good"
        server.shutdown()
        thread.join()


def test_fetch_downloads_from_the_first_mirror_that_has_the_files(places, mirror):
    folder = data.fetch()
    assert folder == places / "repository" / "data" / "mnist"
    assert sorted(path.name for path in folder.iterdir()) == sorted(data.RESOURCES)
    for name in data.RESOURCES:
        assert (folder / name).read_bytes() == (mirror / name).read_bytes()
    assert len(idx.read_set(folder, "train")[0]) == 3
    assert data.fetch().resolve() == folder  # now found


def test_download_keeps_what_is_there(tmp_path, mirror):
    (tmp_path / NAMES[1]).write_bytes(b"mine")
    data.download(tmp_path)
    assert (tmp_path / NAMES[1]).read_bytes() == b"mine"
    assert not (tmp_path / f"{NAMES[1]}.gz").exists()


def test_download_refuses_a_wrong_checksum(tmp_path, mirror):
    damaged = mirror / f"{NAMES[2]}.gz"
    damaged.write_bytes(damaged.read_bytes() + b"x")
    with pytest.raises(data.DownloadError, match=f"{damaged.name}: md5 sum .*, expected "):
        data.download(tmp_path / "new")
    # The files before it are whole, and nothing else is there.
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert names == sorted(f"{name}.gz" for name in NAMES[:2])


def test_a_download_cut_off_leaves_nothing_behind(tmp_path, mirror, monkeypatch):
    def cut(self, source, target):
        target.write(source.read(20))

    monkeypatch.setattr(_Handler, "copyfile", cut)
    with pytest.raises(data.DownloadError, match="md5 sum"):
        data.download(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_fetch_falls_back_to_digits(places, mirror, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    (mirror / f"{NAMES[0]}.gz").unlink()
    folder = data.fetch()
    assert folder == places / "repository" / "data" / "digits"
    line = capsys.readouterr().err.splitlines()[-1]
    assert "MNIST could not be downloaded" in line
    assert "handwritten digits" in line

    images, labels = idx.read_set(folder, "train")
    test_images, test_labels = idx.read_set(folder, "t10k")
    assert len(images) + len(test_images) == 1797
    assert len(test_images) == 1797 // 6
    assert set(test_labels) == set(labels) == set(range(10))


def test_digits_are_resized_as_torch_does_it(tmp_path):
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    data.export_digits(tmp_path)
    for name, chosen in (("train", np.arange(1797) % 6 != 5), ("t10k", np.arange(1797) % 6 == 5)):
        images, labels = idx.read_set(tmp_path, name)
        assert labels.tolist() == digits.target[chosen].tolist()
        original = torch.from_numpy(digits.images[chosen] * 255 / 16).unsqueeze(1)
        expected = F.interpolate(original, (28, 28), mode="bilinear", align_corners=False)
        assert np.abs(images - expected.squeeze(1).numpy()).max() <= 0.5 + 1e-9


def test_fetch_says_what_to_do_without_network_and_scikit_learn(places, mirror, monkeypatch):
    (mirror / f"{NAMES[0]}.gz").unlink()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"--data or FUSEDSTEP_DATA, or install scikit"):
        data.fetch()


def test_the_program_prints_the_folder_alone(tmp_path):
    write_sets(tmp_path / "mnist")
    command = [sys.executable, str(EXAMPLE / "data.py"), "--data"]
    good = subprocess.run([*command, tmp_path], capture_output=True, text=True)
    assert (good.returncode, good.stdout) == (0, f"{tmp_path / 'mnist'}\n")
    bad = subprocess.run([*command, tmp_path / "none"], capture_output=True, text=True)
    assert (bad.returncode, bad.stdout) == (1, "")
    assert "data.py: --data: neither" in bad.stderr
