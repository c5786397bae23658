"""Settings and libraries that matrix products depend on, on each kind of device."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
# Floats for this thread's own arithmetic, whose modes torch and C's fesetround set.
_DENORMAL, _SMALL, _ONE = 5e-324, 1e-17, 1.0


def settings(device: torch.device) -> dict[str, object]:
    """Switches that change bits, by the names they are set with; cheap enough for every forward."""
    return _cpu_settings() if device.type == "cpu" else _cuda_settings()


def _cpu_settings() -> dict[str, object]:
    return {
        "torch.get_float32_matmul_precision()": precision_on_cpu(),
        "torch.backends.mkldnn.enabled": bool(torch.backends.mkldnn.enabled),
        # torch has no getter for it.
        "torch.set_flush_denormal, as it was called on this thread,": _DENORMAL * _ONE == 0,
        "rounding to nearest, as C's fesetround was called on this thread,": (
            _ONE + _SMALL == _ONE and _ONE - _SMALL == _ONE
        ),
    }


def precision_on_cpu() -> str:
    """`torch.get_float32_matmul_precision()`, of a CPU.

    torch refuses to tell it where switches by other names were set, those of a GPU too.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # not declared
        return {"bf16": "medium", "tf32": "high"}.get(matmul.fp32_precision, "highest")


def _cuda_settings() -> dict[str, object]:
    matmul: Any = torch.backends.cuda.matmul
    prefix = "torch.backends.cuda.matmul."
    names = (
        "fp32_precision",
        "allow_fp16_reduced_precision_reduction",
        "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    )
    return {
        "torch.get_float32_matmul_precision()": _switch(torch.get_float32_matmul_precision),
        prefix + "allow_tf32": _switch(lambda: matmul.allow_tf32),
        **{prefix + name: getattr(matmul, name, None) for name in names},
        "torch.backends.cudnn.allow_tf32": _switch(lambda: torch.backends.cudnn.allow_tf32),
        "torch.backends.cuda.preferred_blas_library()": str(
            torch.backends.cuda.preferred_blas_library()
        ),
        "torch.are_deterministic_algorithms_enabled()": (
            torch.are_deterministic_algorithms_enabled()
        ),
        _WORKSPACE: os.environ.get(_WORKSPACE, ""),
    }


def describe_settings(device: torch.device) -> str:
    """`settings` in one line."""
    return ", ".join(f"{name}={value}" for name, value in settings(device).items())


def tunes_kernels() -> bool:
    """Whether torch times kernels and takes the fastest, so that bits depend on the run."""
    try:
        return bool(torch.cuda.tunable.is_enabled())
    except AttributeError:  # a build without CUDA
        return False


def describe_processor(device: torch.device) -> str:
    """The processor, as far as a matrix library chooses kernels by it."""
    if device.type == "cpu":
        amx = torch.cpu._is_amx_tile_supported()  # noqa: SLF001  # no public way
        return "+".join([torch.backends.cpu.get_cpu_capability(), *["amx"] * amx])
    gpu = torch.cuda.get_device_properties(device)
    return f"{gpu.name}, {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} multiprocessors"


def describe_cuda() -> str:
    """Releases of CUDA, and of the cuBLAS this process has loaded."""
    return f"CUDA {torch.version.cuda}, cuBLAS {_cublas_version() or 'unknown'}"


def _cublas_version() -> str:
    path = next(_loaded("/libcublas.so"), None)
    try:
        return "" if path is None else _version_of(ctypes.CDLL(path))
    except (OSError, AttributeError):
        return ""


def _version_of(cublas: Any) -> str:
    parts = []
    for which in range(3):  # major, minor, patch
        part = ctypes.c_int()
        if cublas.cublasGetProperty(which, ctypes.byref(part)):
            return ""
        parts.append(str(part.value))
    return ".".join(parts)


def _loaded(name: str) -> Iterator[str]:
    """Paths of shared objects of this process that contain `name`."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    yield from sorted({line[line.index("/") :] for line in maps.splitlines() if name in line})


def _switch(ask: Callable[[], object]) -> object:
    """The value of a switch; torch refuses to return one that was set by its old and new names."""
    try:
        return ask()
    except RuntimeError:
        return "mixed"
