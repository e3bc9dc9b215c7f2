"""Reads and writes the IDX files of the MNIST database.

An IDX file holds one array: two zero bytes, a type byte (8: unsigned byte), the number of
dimensions, each dimension as a big-endian 32-bit number, then the elements in C order. Source:
"The MNIST database of handwritten digits", Y. LeCun, C. Cortes, C. J. C. Burges.
"""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

SIDE = 28  # pixels an image is high and wide
CLASSES = 10
_UNSIGNED_BYTE = 8
_MOST = 1 << 30  # elements of an array: MNIST has 47 million


class IdxError(ValueError):
    """A file is not the IDX file it should be; the text names the file and the reason."""

    def __init__(self, path: Path, reason: str):
        super().__init__(f"{path}: {reason}")


def locate(folder: Path, name: str) -> Path | None:
    """The file `name` of `folder`, as it is or gzipped (`name.gz`); None if neither is there."""
    candidates = (folder / name, folder / f"{name}.gz")
    return next((path for path in candidates if path.is_file()), None)


def read(path: Path, dimensions: int) -> np.ndarray:
    """The uint8 array of `dimensions` dimensions in `path`, which is gzipped if it ends in `.gz`.

    Raises:
        IdxError: not gzip, damaged or cut off, another kind of file, more than 2^30 elements, or
            fewer or more than the header declares. No more is read or unpacked than that.
    """
    header = 4 + 4 * dimensions
    content = _content(path, header)
    if len(content) < header:
        raise IdxError(path, f"truncated: {len(content)} bytes, the header alone takes {header}")
    magic = int.from_bytes(content[:4], "big")
    expected_magic = _UNSIGNED_BYTE << 8 | dimensions
    if magic != expected_magic:
        raise IdxError(path, f"wrong magic number 0x{magic:08x}, expected 0x{expected_magic:08x}")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", dimensions, offset=4))
    declared, text = math.prod(shape), f"the header declares {'x'.join(map(str, shape))} bytes"
    if declared > _MOST:
        raise IdxError(path, f"too large: {text}, at most {_MOST} are read")
    content = _content(path, header + declared + 1)
    elements = len(content) - header
    if elements < declared:
        raise IdxError(path, f"truncated: {text}, {elements} are there")
    if elements > declared:
        raise IdxError(path, f"too long: {text}, more are there")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy()


def _content(path: Path, most: int) -> bytes:
    """The first `most` bytes of a file, unpacked, or all if it has fewer."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            return file.read(most)
    except EOFError:
        raise IdxError(path, "truncated: the gzip stream ends too early") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise IdxError(path, f"corrupt gzip: {error}") from None


def write(path: Path, array: np.ndarray) -> None:
    """Writes a uint8 array of any shape to `path`, not gzipped."""
    header = bytes((0, 0, _UNSIGNED_BYTE, array.ndim)) + np.array(array.shape, ">u4").tobytes()
    path.write_bytes(header + np.ascontiguousarray(array, np.uint8).tobytes())


def read_set(folder: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 28, 28] and labels [n], both uint8, of the set `name`: "train" or "t10k".

    Raises:
        FileNotFoundError: a file is not in `folder`.
        IdxError: as `read`; or the images have another size, there is none, there is another
            number of labels, or a label is not in 0..9.
    """
    images_path, labels_path = (
        _require(folder, f"{name}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1")
    )
    images = read(images_path, 3)
    labels = read(labels_path, 1)
    if images.shape[1:] != (SIDE, SIDE):
        height, width = images.shape[1:]
        raise IdxError(images_path, f"images of {height}x{width}, expected {SIDE}x{SIDE}")
    if len(images) == 0:
        raise IdxError(images_path, "no images")
    if len(labels) != len(images):
        raise IdxError(
            labels_path, f"{len(labels)} labels for the {len(images)} images of {images_path.name}"
        )
    if labels.max() >= CLASSES:
        at = int(np.argmax(labels >= CLASSES))
        raise IdxError(labels_path, f"label {labels[at]} at {at}, expected 0 to {CLASSES - 1}")
    return images, labels


def _require(folder: Path, name: str) -> Path:
    path = locate(folder, name)
    if path is None:
        raise FileNotFoundError(f"{folder}: neither {name} nor {name}.gz is there")
    return path
