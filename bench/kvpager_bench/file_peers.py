"""Other ways of moving the bytes of a snapshot: what our figures are put beside."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

FILE_STATES = ("cached", "dropped")  # from the page cache
TENSOR_FILES = ("torch.save", "safetensors")
WRITE_BLOCK = 1 << 20
WRITE_THREADS = 2
READ_BLOCK = 8 << 20
COPY_TARGET = 256 << 20  # many times any cache; larger files are copied to it part by part

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def write_synced(path: Path, data: Bytes) -> None:
    """As `dd bs=1M conv=fsync` writes: a block at a time, then one fsync."""
    view = data.data
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(view), WRITE_BLOCK):
            block = view[start : start + WRITE_BLOCK]
            if file.write(block) != len(block):
                raise OSError(f"{path.name}: the disk took a part of a block only")
        os.fsync(file.fileno())


def write_reserved(path: Path, data: Bytes, threads: int = WRITE_THREADS) -> None:
    """The best plain way here: space reserved first, a part of the file per thread, one fsync."""
    view = data.data
    part = -(-len(view) // threads // WRITE_BLOCK) * WRITE_BLOCK
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def write(first: int) -> None:
        for start in range(first, min(first + part, len(view)), WRITE_BLOCK):
            block = view[start : min(start + WRITE_BLOCK, first + part)]
            if os.pwrite(file, block, start) != len(block):
                raise OSError(f"{path.name}: the disk took a part of a block only")

    try:
        os.posix_fallocate(file, 0, len(view))
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(write, range(0, len(view), part)))
        os.fsync(file)
    finally:
        os.close(file)


class Copy:
    """memcpy of `data`, to memory that is there already."""

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.target = np.zeros(min(len(data), COPY_TARGET), dtype=np.uint8)

    def __call__(self) -> None:
        for start in range(0, len(self.data), len(self.target)):
            part = self.data[start : start + len(self.target)]
            np.copyto(self.target[: len(part)], part)


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, how: str) -> None:
    """`how` is one of TENSOR_FILES."""
    if how == "torch.save":
        torch.save(dict(tensors), path)
    else:
        save_file(dict(tensors), path)


def save_tensors_synced(tensors: Mapping[str, torch.Tensor], path: Path, how: str) -> None:
    """With the fsync that neither library does."""
    save_tensors(tensors, path, how)
    sync(path)


def load_tensors(path: Path, how: str) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(path) if how == "torch.save" else load_file(path)
    return loaded


def load_tensors_whole(path: Path, how: str) -> None:
    """Every byte is in memory afterwards: safetensors maps the file and reads on first touch."""
    for tensor in load_tensors(path, how).values():
        if how == "safetensors":
            tensor.clone()


def read_file(path: Path) -> None:
    """The whole file in large plain reads: the machine's read rate."""
    buffer = bytearray(READ_BLOCK)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def prepare(path: Path, state: str) -> None:
    """Brings a file into the page cache or drops it from there."""
    if state == "cached":
        read_file(path)
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
