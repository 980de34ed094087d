"""The images that the experiments learn from: scikit-learn's digits, and MNIST from a folder."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["MNIST_FILES", "DataError", "Images", "load_digits", "load_mnist", "read_idx"]

MNIST_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)

PIECE = 1 << 20  # bytes that are decompressed at once


class DataError(ValueError):
    """A file is missing or broken. The message is one line: the file, what was expected, what was found."""

    def __init__(self, path: Path, expected: str, found: str) -> None:
        super().__init__(f"{path}: expected {expected}, found {found}")


@dataclass(frozen=True)
class Images:
    """Labelled images, split into training and test.

    Attributes:
        name: the name of the data set, for headings.
        shape: (height, width) of an image; n = height · width.
        train_images, test_images: (N, n), float32, in [0, 1].
        train_labels, test_labels: (N,), int64, 0 to 9.
    """

    name: str
    shape: tuple[int, int]
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @property
    def n(self) -> int:
        """The number of pixels."""
        return math.prod(self.shape)


def load_digits() -> Images:
    """The 1,797 digits of 8 x 8 pixels that scikit-learn ships; 30 % of every class are test images."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    inputs = torch.from_numpy(images).float() / 16  # scikit-learn's grey levels are 0 to 16
    targets = torch.from_numpy(labels).long()
    # Three of every ten images of a class are test images: the split is stratified, and does not depend on
    # versions or seeds.
    place = torch.nn.functional.one_hot(targets, 10).cumsum(0).gather(1, targets[:, None])[:, 0]
    test = place % 10 < 3
    return Images(
        name="scikit-learn digits",
        shape=(8, 8),
        train_images=inputs[~test],
        train_labels=targets[~test],
        test_images=inputs[test],
        test_labels=targets[test],
    )


def load_mnist(folder: Path) -> Images:
    """MNIST, or any data set in its form, from a folder with the gzipped IDX files of :data:`MNIST_FILES`.

    Raises:
        DataError: the folder or a file is missing or broken, or a file does not fit the others.
    """
    missing = [name for name in MNIST_FILES if not (folder / name).is_file()]
    if missing:
        found = "no such folder" if not folder.is_dir() else f"no {', '.join(missing)}"
        raise DataError(folder, f"a folder with {', '.join(MNIST_FILES)}", found)
    train_images, train_labels = _read_pair(folder / MNIST_FILES[0], folder / MNIST_FILES[1])
    test_images, test_labels = _read_pair(folder / MNIST_FILES[2], folder / MNIST_FILES[3])
    height, width = train_images.shape[1:]
    if test_images.shape[1:] != (height, width):
        found = " x ".join(map(str, test_images.shape[1:]))
        expected = f"images of {height} x {width} pixels, as in {MNIST_FILES[0]}"
        raise DataError(folder / MNIST_FILES[2], expected, found)
    return Images(
        name="MNIST",
        shape=(height, width),
        train_images=train_images.flatten(1).float().div_(255),
        train_labels=train_labels.long(),
        test_images=test_images.flatten(1).float().div_(255),
        test_labels=test_labels.long(),
    )


def _read_pair(images_path: Path, labels_path: Path) -> tuple[Tensor, Tensor]:
    """The images of one file and their labels from the other."""
    images, labels = read_idx(images_path, ndim=3), read_idx(labels_path, ndim=1)
    if len(labels) != len(images):
        expected = f"{len(images)} labels, as many as there are images in {images_path.name}"
        raise DataError(labels_path, expected, str(len(labels)))
    if labels.max() > 9:
        raise DataError(labels_path, "labels from 0 to 9", str(labels.max().item()))
    return images, labels


def read_idx(path: Path, ndim: int) -> Tensor:
    """The array in a gzipped IDX file of unsigned bytes.

    The file has a big-endian header, then the bytes with the last dimension varying fastest. The header is
    two zero bytes, 0x08 for unsigned bytes, the number of dimensions, and the size of each dimension in four
    bytes.

    Args:
        path: the file.
        ndim: the number of dimensions that the array must have: 3 for images, 1 for labels.

    The header is checked before the bytes are read, and no more of them are read than it announces, so that a
    small file cannot fill the memory.

    Returns:
        A uint8 tensor with ``ndim`` dimensions, none of them empty.

    Raises:
        DataError: the file is missing, is not gzip, is too short or too long, or holds another kind of array.
    """
    header = 4 + 4 * ndim
    try:
        with gzip.open(path) as file:
            start = file.read(header)
            sizes = _sizes(path, start, ndim)
            # One byte more than announced shows that there are too many. The file is read in pieces, because
            # a false header may announce more than fits into memory.
            total = math.prod(sizes)
            content = bytearray()
            while len(content) <= total and (piece := file.read(min(PIECE, total + 1 - len(content)))):
                content += piece
    except FileNotFoundError:
        raise DataError(path, "a gzipped IDX file", "no such file") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise DataError(path, "a gzipped IDX file", f"one that cannot be read ({reason})") from None
    if len(content) != total:
        expected = f"{total} bytes after the header, for {' x '.join(map(str, sizes))}"
        found = f"{len(content)} or more" if len(content) > total else str(len(content))
        raise DataError(path, expected, found)
    return torch.frombuffer(content, dtype=torch.uint8).view(sizes)


def _sizes(path: Path, start: bytes, ndim: int) -> list[int]:
    """The sizes that the header of an IDX file announces."""
    header = 4 + 4 * ndim
    if len(start) < header:
        raise DataError(path, f"an IDX header of {header} bytes", f"{len(start)} bytes")
    magic, *sizes = struct.unpack(f">{1 + ndim}I", start)
    if magic != 0x0800 + ndim:
        expected = f"magic number {0x0800 + ndim} (unsigned bytes in {ndim} dimensions)"
        raise DataError(path, expected, str(magic))
    if 0 in sizes:
        raise DataError(path, "sizes of at least 1", " x ".join(map(str, sizes)))
    return sizes
