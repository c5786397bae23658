"""The device of a pager's pool, the devices of this machine, and the dtypes elements are read in.

Nothing here initialises CUDA: the plug-in's own probe finds the devices.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from kvpager import _core
from kvpager.errors import DeviceError, InvalidArgumentError

READ_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "q8": torch.float32,
    "q4": torch.float32,
}


_NAME = re.compile(r"(cpu|shim|meta|cuda)(?::(\d+))?")


@dataclass(frozen=True)
class PoolDevice:
    """Where a pager computes.

    Attributes:
        name: as the core opens it: "cpu", "shim", "meta" or "cuda:0".
        tensors: the device of the tensors it takes and returns.
    """

    name: str
    tensors: torch.device

    @property
    def kind(self) -> str:
        """One of "cpu", "cuda", "shim" and "meta"."""
        return self.name.partition(":")[0]

    @property
    def stream(self) -> int:
        """The handle of torch's current stream there; 0 for a device without streams."""
        if self.tensors.type != "cuda":
            return 0
        return int(torch.cuda.current_stream(self.tensors).cuda_stream)


def resolve(
    wanted: str, tensors: torch.device | None, field: str = "PagerConfig.device"
) -> PoolDevice:
    """Chooses the device of a new pager.

    Args:
        wanted: a value of `PagerConfig.device`.
        tensors: the model's device; None: there is no model, and "auto" means the CPU.
        field: name of `wanted` in messages.

    Raises:
        InvalidArgumentError: tensors on one device cannot be paged by another.
        DeviceError: there is no such device; the message says what was found and what to do.
    """
    match = _NAME.fullmatch(wanted if wanted != "auto" else _auto(tensors))
    assert match is not None
    kind, number = match[1], match[2]
    if kind == "meta" and tensors is not None:
        raise InvalidArgumentError(
            f'{field} is "meta", which has no bytes to compute with; expected "auto" with a model'
        )
    if kind != "cuda":
        if tensors is not None and tensors.type != "cpu":
            raise InvalidArgumentError(
                f'{field} is {wanted!r}, but the model is on {tensors}; expected "auto" or '
                f'"{tensors}", or call model.to("cpu")'
            )
        if kind == "shim":
            require(kind)
        return PoolDevice(kind, torch.device("cpu"))
    if tensors is not None and tensors.type != "cuda":
        raise InvalidArgumentError(
            f'{field} is {wanted!r}, but the model is on {tensors}; call model.to("{wanted}") first'
        )
    require(kind)
    index = int(number) if number is not None else _current(tensors)
    if tensors is not None and index != _current(tensors):
        raise InvalidArgumentError(
            f'{field} is {wanted!r}, but the model is on {tensors}; expected "auto"'
        )
    name = f"cuda:{index}"
    count = torch.cuda.device_count()
    if index >= count:
        there = "is 1 CUDA device" if count == 1 else f"are {count} CUDA devices"
        raise DeviceError(f'{name}: there {there}; run `kvpager info`, or use device="cuda:0"')
    return PoolDevice(name, torch.device("cuda", index))


def require(kind: str) -> None:
    """Raises DeviceError, with the reason, unless devices of `kind` can be used."""
    if why_not := missing(kind):
        raise DeviceError(f'{kind}: {why_not}; or use device="cpu"')


def missing(kind: str) -> str:
    """Why devices of a kind cannot be used, and what to do; empty if they can."""
    report = _core.probe_device(kind)
    if report["why_not"]:
        return f"{report['why_not']}; {_remedy(kind, report)}"
    if kind == "cuda" and not torch.cuda.is_available():
        return f"{_why_torch_cannot()}; install a build of torch for CUDA"
    return ""


def torch_device(name: str) -> torch.device:
    """The torch device for a model that is to be paged on the device `name`.

    Raises:
        DeviceError: as `resolve`.
    """
    return resolve(name, None).tensors


def _auto(tensors: torch.device | None) -> str:
    if tensors is None or tensors.type == "cpu":
        return "cpu"
    if tensors.type == "cuda":
        return f"cuda:{_current(tensors)}"
    raise InvalidArgumentError(
        f'the model is on {tensors}; expected the CPU or one CUDA device: model.to("cuda")'
    )


def _current(tensors: torch.device | None) -> int:
    if tensors is not None and tensors.index is not None:
        return int(tensors.index)
    return int(torch.cuda.current_device())


def _why_torch_cannot() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return f"torch {torch.__version__} sees no device"


def _remedy(kind: str, report: dict[str, Any]) -> str:
    if kind == "shim":
        return "it is there for tests: build with KVPAGER_SHIM=ON"
    if not report["plugin"]:
        return (
            "build kvpager with KVPAGER_CUDA=ON, which takes nvcc, or name the plug-in's folder in "
            "KVPAGER_DEVICE_PATH"
        )
    return "check that nvidia-smi lists a device and that its driver is new enough"
