"""Measures a machine's rates in about a second.

Every figure is the best of a few runs: what else the machine was doing only adds time.
Attention of many rows is timed on the processor; on a GPU it follows from what products achieve,
and the scan of summaries from the memory's rate.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from kvpager.config import PagerConfig
from kvpager.errors import StorageError
from kvpager.layout import Layout
from kvpager.pager import ROW_COMMIT, Pager
from kvpager.plan.machine import Machine, Products

_MEMORY_BYTES = 128 << 20  # more than caches hold
_DISK_BYTES = 32 << 20
_WRITE_RUNS = 4
_FRESH_BYTES = 16 << 20
_FRESH_RUNS = 5
_PIECE_BYTES = 128 << 10  # of a file, about a chunk: restores read chunks here and there,
_ANNOUNCED = 32  # and tell the system of so many before they do
_WIDE = 1024
_MATRICES_BYTES = 64 << 20
_PRODUCT_ROWS = (1, 2, 4, 8, 16, 64, 256)
_NORM_ROWS = 2048
_FRAMEWORK_RUNS = 20
_LAYERS = (2, 6)  # of two little models, whose difference is what a layer costs
_SCAN_SHARE = 0.7  # of memory bandwidth, at which summaries are scored
_ATTENTION_SHARE = 0.7  # of what float32 products achieve on a GPU
_ATTENTION_TOKENS, _ATTENTION_ROWS, _ATTENTION_HEADS, _ATTENTION_DIM = 2048, 64, 8, 128
_ATTENTION_GROUP = 2  # query heads to a kv head


def measure(
    dtypes: tuple[str, ...] = ("float32", "bfloat16"),
    folder: str | os.PathLike[str] | None = None,
    device: str = "cpu",
) -> Machine:
    """This machine, with the threads torch has now.

    Args:
        dtypes: of weights that products are measured with.
        folder: where the disk is measured; by default that of temporary files.
        device: "cpu", or "cuda" for the GPU and its link.

    Raises:
        StorageError: a file of 32 MiB cannot be written and read in `folder`.
    """
    with torch.inference_mode():
        place = torch.device(device)
        bandwidth, copy = _memory(place)
        products = {dtype: _products(getattr(torch, dtype), place) for dtype in dtypes}
        element_seconds = _elements(place)
        layer_seconds, forward_seconds = _framework(place)
        fresh = _fresh()
        link = bandwidth if place.type == "cpu" else _link(place)
    if "bfloat16" in products:
        products.setdefault("float16", products["bfloat16"])
    write, read, cached, sync = _disk(Path(folder or tempfile.gettempdir()))
    on_gpu = place.type == "cuda"
    if on_gpu:
        rows, seconds = products.get("float32", next(iter(products.values()))).points[-1]
        attention = _ATTENTION_SHARE * 2 * rows / seconds
    else:
        attention = _attention()
    return Machine(
        name=torch.cuda.get_device_name(place) if on_gpu else "this machine",
        source=f"measured, {torch.get_num_threads()} threads",
        on_gpu=on_gpu,
        bandwidth=bandwidth,
        copy=copy,
        products=MappingProxyType(products),
        attention_flops=attention,
        scan=_SCAN_SHARE * bandwidth,
        link=link,
        disk_write=write,
        disk_read=read,
        cached_read=cached,
        fresh=fresh,
        sync_seconds=sync,
        element_seconds=element_seconds,
        layer_seconds=layer_seconds,
        forward_seconds=forward_seconds,
        device_memory=torch.cuda.get_device_properties(place).total_memory if on_gpu else None,
        decode_rows=MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2}),
    )


def _best(call: Callable[[], Any], runs: int, place: torch.device | None = None) -> float:
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        if place is not None and place.type == "cuda":
            torch.cuda.synchronize(place)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _memory(place: torch.device) -> tuple[float, float]:
    source = torch.zeros(_MEMORY_BYTES // 4, device=place)
    target = torch.zeros_like(source)
    read = _best(lambda: torch.dot(source, source), 5, place)
    copy = _best(lambda: target.copy_(source), 4, place)
    return _MEMORY_BYTES / read, _MEMORY_BYTES / copy


def _products(dtype: torch.dtype, place: torch.device) -> Products:
    """Matrices that together fit in no cache, as a model's weights do not."""
    elements = _WIDE * _WIDE * 3
    count = max(2, _MATRICES_BYTES // (elements * dtype.itemsize))
    weights = [
        torch.full((3 * _WIDE, _WIDE), 0.01, dtype=dtype, device=place) for _ in range(count)
    ]
    points = []
    for rows in _PRODUCT_ROWS:
        few = weights if rows < 64 else weights[: max(2, count // 4)]
        x = torch.ones(rows, _WIDE, dtype=dtype, device=place)

        def multiply(x: torch.Tensor = x, few: list[torch.Tensor] = few) -> None:
            for weight in few:
                torch.nn.functional.linear(x, weight)

        seconds = _best(multiply, 3, place)
        points.append((rows, seconds / (elements * len(few))))
    return Products(tuple(points))


def _elements(place: torch.device) -> float:
    """A norm as transformers computes it, over more rows than caches hold: seconds per element."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    norm = partial(Qwen3RMSNorm(_WIDE).to(place), torch.ones(_NORM_ROWS, _WIDE, device=place))
    norm()
    return _best(norm, 4, place) / (_NORM_ROWS * _WIDE)


def _framework(place: torch.device) -> tuple[float, float]:
    """What a layer and a forward of transformers cost when there is next to nothing to compute."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    ids = torch.zeros(1, 4, dtype=torch.int64, device=place)
    runs = []
    for layers in _LAYERS:
        config = Qwen3Config(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
        )
        with torch.random.fork_rng():
            little: Any = Qwen3ForCausalLM(config)
        runs.append(partial(little.eval().to(place), input_ids=ids, use_cache=False))
        runs[-1]()
    seconds = [float("inf")] * len(runs)
    for _ in range(_FRAMEWORK_RUNS):  # in turns, so that a busy moment slows all of them
        seconds = [min(best, _best(run, 1, place)) for best, run in zip(seconds, runs)]
    layer = max(1e-6, (seconds[1] - seconds[0]) / (_LAYERS[1] - _LAYERS[0]))
    return layer, max(1e-6, seconds[0] - _LAYERS[0] * layer)


def _attention() -> float:
    """Operations per second of rows that share their keys, in float32."""
    layout = Layout(
        layers=1,
        kv_heads=_ATTENTION_HEADS // _ATTENTION_GROUP,
        k_dim=_ATTENTION_DIM,
        v_dim=_ATTENTION_DIM,
    )
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, _ATTENTION_DIM, generator=generator)

    config = PagerConfig(pool_tokens=2 * _ATTENTION_TOKENS, host_bytes=0, policy="lru")
    threads = torch.get_num_threads()
    with closing(Pager(layout, config, rows=_ATTENTION_ROWS, threads=threads)) as pager:
        sequence = pager.sequence()
        kv = random(1, _ATTENTION_TOKENS, layout.kv_heads)
        sequence.append(np.zeros(_ATTENTION_TOKENS, dtype=np.int32), kv, kv)
        q = random(_ATTENTION_ROWS, _ATTENTION_HEADS)
        k = random(_ATTENTION_ROWS, layout.kv_heads)
        spans = [(sequence, _ATTENTION_TOKENS, _ATTENTION_ROWS, ROW_COMMIT)]
        with pager.begin_spans(spans, np.zeros(_ATTENTION_ROWS, dtype=np.int32)) as forward:
            seconds = _best(partial(forward.attend, 0, q, k, k, scaling=_ATTENTION_DIM**-0.5), 5)
    pairs = _ATTENTION_ROWS * (_ATTENTION_TOKENS + _ATTENTION_ROWS / 2)
    return 4 * _ATTENTION_HEADS * _ATTENTION_DIM * pairs / seconds


def _link(place: torch.device) -> float:
    pinned = torch.zeros(_MEMORY_BYTES // 4, pin_memory=True)
    target = torch.zeros(_MEMORY_BYTES // 4, device=place)
    return _MEMORY_BYTES / _best(lambda: target.copy_(pinned, non_blocking=True), 4, place)


def _fresh() -> float:
    """The first touch of memory mapped as pools and arenas are: in huge pages where there are any.

    The median of several: in a virtual machine, memory that no process has used before costs many
    times as much as reused memory.
    """
    import mmap

    seconds = []
    for _ in range(_FRESH_RUNS):
        with mmap.mmap(-1, _FRESH_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a system without them
                    memory.madvise(mmap.MADV_HUGEPAGE)
            start = time.perf_counter()
            for offset in range(0, _FRESH_BYTES, mmap.PAGESIZE):
                memory[offset] = 1
            seconds.append(time.perf_counter() - start)
    return _FRESH_BYTES / statistics.median(seconds)


def _write(handle: int, data: bytes) -> float:
    """Seconds in which a save would make so much last.

    It has the system begin to write early, so that the shorter of copying and writing is hidden.
    """
    os.ftruncate(handle, 0)
    os.lseek(handle, 0, os.SEEK_SET)
    start = time.perf_counter()
    os.write(handle, data)
    written = time.perf_counter()
    os.fsync(handle)
    return max(written - start, time.perf_counter() - written)


def _disk(folder: Path) -> tuple[float, float, float, float]:
    """Bytes per second written to last, read from the disk and from the page cache; a sync.

    Raises StorageError: a file in `folder` cannot be made, written or read.
    """
    try:
        return _disk_rates(folder)
    except OSError as error:
        raise StorageError(
            f"{folder}: cannot measure the disk: {error.strerror}; name a folder in which a file "
            f"of {_DISK_BYTES >> 20} MiB can be written"
        ) from error


def _disk_rates(folder: Path) -> tuple[float, float, float, float]:
    data = os.urandom(1 << 20) * (_DISK_BYTES >> 20)
    buffer = bytearray(_DISK_BYTES)
    handle, name = tempfile.mkstemp(prefix=".kvpager-plan-", dir=folder)
    try:
        Path(name).unlink()  # the open file needs no name, and a killed process leaves nothing
        os.write(handle, b"0" * 4096)
        start = time.perf_counter()
        os.fsync(handle)
        sync = time.perf_counter() - start
        write = min(_write(handle, data) for _ in range(_WRITE_RUNS))

        pieces = _DISK_BYTES // _PIECE_BYTES
        places = [i * 37 % pieces * _PIECE_BYTES for i in range(pieces)]
        room = memoryview(buffer)

        def read() -> float:
            start = time.perf_counter()
            for first in range(0, pieces, _ANNOUNCED):
                some = places[first : first + _ANNOUNCED]
                for at in some:
                    os.posix_fadvise(handle, at, _PIECE_BYTES, os.POSIX_FADV_WILLNEED)
                for at in some:
                    os.preadv(handle, [room[at : at + _PIECE_BYTES]], at)
            return time.perf_counter() - start

        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        cold = read()
        warm = min(read() for _ in range(3))
    finally:
        os.close(handle)
    return len(data) / write, len(data) / cold, len(data) / warm, sync
