"""Finds the MNIST files, or gets them.

As a program it prints the folder that holds them, so that others can read the same files:

    mnist --data "$(python examples/mnist/data.py)"
"""

import argparse
import hashlib
import os
import sys
import urllib.request
from http.client import HTTPException
from pathlib import Path

import idx
import numpy as np
from progress import progress

REPOSITORY = Path(__file__).resolve().parents[2]

# As torchvision.datasets.MNIST has them: the gzipped files, their md5 sums and who serves them.
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)
RESOURCES = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}

_TIMEOUT = 10  # seconds without an answer after which the next mirror is tried
_BLOCK = 1 << 16


class DownloadError(RuntimeError):
    """No mirror served a file as it should be; the text says what each did instead."""


def find(data: str | None = None) -> Path | None:
    """The folder that holds the four files, gzipped or not; None if there is none.

    Looked for in `data`, else in the environment's FUSEDSTEP_DATA, else in `data/` of the current
    folder and of the repository; each time in the folder itself and in `mnist/` inside it.

    Raises:
        FileNotFoundError: `data` or FUSEDSTEP_DATA is given, but lacks a file. What a user
            names is never passed over for something else.
    """
    named = data or os.environ.get("FUSEDSTEP_DATA")
    roots = (Path(named),) if named else (Path("data"), REPOSITORY / "data")
    for folder in (folder for root in roots for folder in (root, root / "mnist")):
        if not _missing(folder):
            return folder
    if named:
        source = "--data" if data else "FUSEDSTEP_DATA"
        missing = _missing(Path(named))[0]
        raise FileNotFoundError(
            f"{source}: neither {named} nor {Path(named, 'mnist')} holds the MNIST files "
            f"({missing}[.gz] is missing)"
        )
    return None


def _missing(folder: Path) -> list[str]:
    names = [name.removesuffix(".gz") for name in RESOURCES]
    return [name for name in names if idx.locate(folder, name) is None]


def download(folder: Path) -> None:
    """Downloads into `folder` those of the four files that it lacks.

    Raises:
        DownloadError: no mirror served a file with the right md5 sum. The folder then holds
            whole and verified files only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    print(f"Downloading MNIST to {folder}", file=sys.stderr)
    for name in (f"{name}.gz" for name in _missing(folder)):
        faults = []
        for mirror in MIRRORS:
            try:
                _download(mirror + name, folder / name, RESOURCES[name])
                break
            except (OSError, HTTPException, DownloadError) as error:  # URLError is an OSError
                faults.append(f"{mirror}{name}: {error}")
        else:
            raise DownloadError("; ".join(faults))


def _download(url: str, path: Path, md5: str) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    # A file under its own name is a whole and verified one: it gets the name last.
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT) as response, part.open("wb") as file:
            size = int(response.headers.get("Content-Length", 0)) or None
            with progress(f"Downloading {path.name}", size) as advance:
                while block := response.read(_BLOCK):
                    file.write(block)
                    digest.update(block)
                    advance(len(block))
        if digest.hexdigest() != md5:
            raise DownloadError(f"md5 sum {digest.hexdigest()}, expected {md5}")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def export_digits(folder: Path) -> None:
    """Writes scikit-learn's 1,797 handwritten digits of 8x8 pixels to `folder`, 28x28, as MNIST's
    four files. Every sixth digit is a test one."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    resize = _bilinear(8, idx.SIDE)
    images = resize @ (digits.images * (255 / digits.images.max())) @ resize.T
    images, labels = np.rint(images).astype(np.uint8), digits.target.astype(np.uint8)
    test = np.arange(len(labels)) % 6 == 5
    folder.mkdir(parents=True, exist_ok=True)
    for name, chosen in (("train", ~test), ("t10k", test)):
        idx.write(folder / f"{name}-images-idx3-ubyte", images[chosen])
        idx.write(folder / f"{name}-labels-idx1-ubyte", labels[chosen])


def _bilinear(old: int, new: int) -> np.ndarray:
    """The [new, old] matrix that resizes a line of pixels, their centres aligned."""
    centres = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    return np.clip(1 - np.abs(centres[:, None] - np.arange(old)), 0, None)


def fetch(data: str | None = None) -> Path:
    """The folder that `find` finds, else a download of MNIST, else scikit-learn's digits.

    Raises:
        FileNotFoundError: as `find`.
        ModuleNotFoundError: MNIST cannot be had and scikit-learn is not installed.
    """
    folder = find(data)
    if folder is not None:
        return folder
    try:
        download(REPOSITORY / "data" / "mnist")
        return REPOSITORY / "data" / "mnist"
    except DownloadError as error:
        reason = error
    folder = REPOSITORY / "data" / "digits"
    try:
        export_digits(folder)
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"MNIST could not be downloaded ({reason}): name a folder that holds it by --data or "
            "FUSEDSTEP_DATA, or install scikit-learn for its handwritten digits"
        ) from None
    print(
        "Not MNIST, but the 1,797 handwritten digits that scikit-learn ships: "
        f"MNIST could not be downloaded ({reason})",
        file=sys.stderr,
    )
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", metavar="DIR", help="the folder that holds the MNIST files")
    try:
        print(fetch(parser.parse_args().data).resolve())
    except (OSError, ModuleNotFoundError) as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
