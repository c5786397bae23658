"""Whose tensors a pager takes: those on its own device, by what DLPack says of them."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kvpager.config import PagerConfig
from kvpager.errors import InvalidArgumentError
from kvpager.pager import ROW_COMMIT, Layout, Pager

ROWS, HEADS, DIM = 16, 2, 16
CPU, CUDA, PINNED, ROCM = 1, 2, 3, 10  # DLPack's numbers


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        # What follows in a managed tensor.
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Elsewhere:
    """Zeros [ROWS, HEADS, DIM] float32 that say they are on another device."""

    def __init__(self, device_type: int, ordinal: int) -> None:
        self._memory = np.zeros((ROWS, HEADS, DIM), dtype=np.float32)
        self._shape = (ctypes.c_int64 * 3)(ROWS, HEADS, DIM)
        self._tensor = _Tensor(
            self._memory.ctypes.data, device_type, ordinal, 3, 2, 32, 1, self._shape, None, 0
        )

    shape = (ROWS, HEADS, DIM)
    dtype = np.dtype(np.float32)

    def __dlpack__(self, **_: object) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = (
            ctypes.py_object,
            (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
        )
        return new(ctypes.addressof(self._tensor), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor.device_type, self._tensor.device_id


@pytest.fixture
def forward():
    pager = Pager(
        Layout(1, HEADS, DIM, DIM, chunk_tokens=16),
        PagerConfig(128, chunk_tokens=16, host_bytes=0),
        rows=ROWS,
    )
    sequence = pager.sequence()
    with pager.begin([sequence] * ROWS, range(ROWS), range(ROWS), [ROW_COMMIT] * ROWS) as running:
        yield running


@pytest.mark.parametrize(
    ("device_type", "ordinal", "name"),
    [(CUDA, 0, "cuda:0"), (CUDA, 3, "cuda:3"), (ROCM, 1, "DLPack device 10:1")],
)
@pytest.mark.parametrize("which", ["q", "k", "v", "out"])
def test_a_tensor_on_another_device_is_refused_naming_both_and_the_forward_goes_on(
    forward, which, device_type, ordinal, name
):
    tensors = {part: np.ones((ROWS, HEADS, DIM), dtype=np.float32) for part in ("q", "k", "v")}
    tensors["out"] = np.zeros((ROWS, HEADS, DIM), dtype=np.float32)
    odd = {**tensors, which: Elsewhere(device_type, ordinal)}
    with pytest.raises(InvalidArgumentError) as error:
        forward.attend(0, odd["q"], odd["k"], odd["v"], out=odd["out"], scaling=1.0)
    said = f"{which}: a tensor on {name}, expected one on cpu, where this pager is (cpu)"
    assert str(error.value) == said
    forward.attend(0, tensors["q"], tensors["k"], tensors["v"], out=tensors["out"], scaling=1.0)
    forward.commit()
    assert (tensors["out"] == 1).all()


@pytest.mark.parametrize("device_type", [CPU, PINNED])
def test_memory_of_the_cpu_is_taken_pinned_or_not(forward, device_type):
    ones = np.ones((ROWS, HEADS, DIM), dtype=np.float32)
    out = np.ones((ROWS, HEADS, DIM), dtype=np.float32)
    forward.attend(
        0, Elsewhere(device_type, 0), ones, Elsewhere(device_type, 0), out=out, scaling=1
    )
    forward.commit()
    assert not out.any()


@pytest.mark.parametrize("sinks", [[0.5], [0.5, 1.0, 1.5]])
def test_sinks_are_one_per_query_head(forward, sinks):
    ones = np.ones((ROWS, HEADS, DIM), dtype=np.float32)
    with pytest.raises(InvalidArgumentError, match=r"sinks: .* one float32 per query head"):
        forward.attend(0, ones, ones, ones, scaling=1.0, sinks=np.array(sinks))
    forward.attend(0, ones, ones, ones, scaling=1.0, sinks=np.array([0.5, 1.0]))
    forward.commit()
