"""The images that the experiments learn from, and what broken files get."""

from __future__ import annotations

import gzip
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from reproduce.harness.data import MNIST_FILES, DataError, load_digits, load_mnist, read_idx

IMAGES, LABELS = MNIST_FILES[:2]


def idx(sizes: tuple[int, ...], values: bytes, magic: int | None = None) -> bytes:
    """The content of an IDX file before compression."""
    magic = 0x0800 + len(sizes) if magic is None else magic
    return struct.pack(f">{1 + len(sizes)}I", magic, *sizes) + values


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A set in the form of MNIST, with 6 training and 4 test images of 2 x 3 pixels."""
    for name, count in zip(MNIST_FILES, (6, 6, 4, 4), strict=True):
        sizes = (count, 2, 3) if "images" in name else (count,)
        values = bytes(range(6 * count)) if "images" in name else bytes(range(count))
        (tmp_path / name).write_bytes(gzip.compress(idx(sizes, values)))
    return tmp_path


def test_load_mnist_reads_rows_in_order(folder: Path) -> None:
    images = load_mnist(folder)
    assert images.shape == (2, 3)
    assert images.n == 6
    expected = torch.arange(36).view(6, 6) / 255
    torch.testing.assert_close(images.train_images, expected, rtol=1e-7, atol=0)
    torch.testing.assert_close(images.test_images, expected[:4], rtol=1e-7, atol=0)
    assert images.train_labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert images.test_labels.tolist() == [0, 1, 2, 3]


def test_load_mnist_reads_the_real_files() -> None:
    given = os.environ.get("KHOT_DATA_DIR")
    if not given:
        pytest.skip("KHOT_DATA_DIR is not set")
    images = load_mnist(Path(given))
    assert images.shape == (28, 28)
    assert images.train_images.shape == (60_000, 784)
    assert images.test_images.shape == (10_000, 784)
    # The counts of each digit that are published with MNIST.
    assert images.train_labels.bincount().tolist() == [
        *(5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949)
    ]
    assert images.test_labels.bincount().tolist() == [
        *(980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)
    ]
    assert (images.train_images.min(), images.train_images.max()) == (0, 1)
    # Its published mean and standard deviation.
    assert images.train_images.mean().item() == pytest.approx(0.1307, abs=1e-4)
    assert images.train_images.std().item() == pytest.approx(0.3081, abs=1e-4)


def test_load_digits_is_split_by_class() -> None:
    images = load_digits()
    assert images.shape == (8, 8)
    assert len(images.train_labels) + len(images.test_labels) == 1797
    assert (images.train_images.min(), images.train_images.max()) == (0, 1)
    tested = images.test_labels.bincount(minlength=10)
    share = tested / (tested + images.train_labels.bincount(minlength=10))
    assert (share - 0.3).abs().max() < 0.01


BREAKS: dict[str, tuple[str, Callable[[bytes], bytes | None], str]] = {
    "missing": (LABELS, lambda content: None, f"found no {LABELS}"),
    "not gzip": (IMAGES, lambda content: content, "a gzipped IDX file"),
    "gzip damaged": (
        IMAGES,
        lambda content: gzip.compress(content)[:12] + bytes(20),
        "a gzipped IDX file",
    ),
    "labels for images": (
        IMAGES,
        lambda content: gzip.compress(idx((20,), bytes(20))),
        "expected magic number 2051 (unsigned bytes in 3 dimensions), found 2049",
    ),
    "too few bytes": (
        IMAGES,
        lambda content: gzip.compress(content[:-1]),
        "expected 36 bytes after the header, for 6 x 2 x 3, found 35",
    ),
    "too few labels": (
        LABELS,
        lambda content: gzip.compress(idx((5,), bytes(5))),
        f"expected 6 labels, as many as there are images in {IMAGES}, found 5",
    ),
    "a label above 9": (
        LABELS,
        lambda content: gzip.compress(idx((6,), bytes([0, 1, 2, 10, 3, 4]))),
        "expected labels from 0 to 9, found 10",
    ),
}


@pytest.mark.parametrize("case", BREAKS)
def test_load_mnist_says_what_is_wrong(folder: Path, case: str) -> None:
    name, change, message = BREAKS[case]
    content = change(gzip.decompress((folder / name).read_bytes()))
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_mnist(folder)
    text = str(caught.value)
    assert name in text
    assert message in text
    assert "expected" in text
    assert "\n" not in text


# bytes before compression, and the message; the zeros that follow the header are 50 MB, compressed 50 kB
BOMBS: dict[str, tuple[bytes, str]] = {
    "more than announced": (
        idx((6, 2, 3), b""),
        "expected 36 bytes after the header, for 6 x 2 x 3, found 37",
    ),
    "another kind": (idx((6,), b""), "expected magic number 2051"),
}


@pytest.mark.parametrize("case", BOMBS)
def test_read_idx_takes_no_more_memory_than_the_header_announces(tmp_path: Path, case: str) -> None:
    start, message = BOMBS[case]
    path = tmp_path / IMAGES
    path.write_bytes(gzip.compress(start + bytes(50_000_000)))
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as caught:
            read_idx(path, ndim=3)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert message in str(caught.value)


def test_read_idx_reads_every_member_and_checks_the_sum(tmp_path: Path) -> None:
    """A gzip file may have several members, and its checksum comes after the last byte."""
    path, content = tmp_path / LABELS, idx((3,), b"abc")
    path.write_bytes(gzip.compress(content[:9]) + gzip.compress(content[9:]))
    assert read_idx(path, ndim=1).tolist() == list(b"abc")
    whole = gzip.compress(content)
    path.write_bytes(whole[:-8] + bytes([whole[-8] ^ 1]) + whole[-7:])
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(path, ndim=1)
