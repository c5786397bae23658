"""A device that is none: tensors that say they are on a GPU, and operations that mind.

Everything is computed on the CPU, for real. But a tensor that was put on `cuda:0` says so, what is
made of it is there too, and an operation on tensors of two devices is an error, as are the habits
that a GPU does not forgive: a random generator of the CPU, numpy, an index on the other side.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from kvpager._model.watch.looks import only_looks

GPU = torch.device("cuda", 0)
_TAG = "_on_the_gpu"
# Makers, which without a device make a tensor on the CPU; of these a program has to say which.
_MAKERS = (
    "arange empty empty_permuted empty_strided eye full linspace logspace ones rand randint randn "
    "randperm tensor zeros"
)
MAKERS = {getattr(torch, name) for name in _MAKERS.split()}
_TRANSFERS = {torch.Tensor.copy_, torch.Tensor.__setstate__}
_GETTERS = {torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__, torch.Tensor.is_cpu.__get__}
_HOST_ONLY = {torch.Tensor.numpy, torch.Tensor.__array__}


class MixedDevicesError(Exception):
    """What torch would have said on a machine with a GPU."""


@only_looks
class SimulatedGpu(TorchFunctionMode):
    """While entered, the tensors of `models` are on the GPU, and nothing else yet."""

    def __init__(self, *models):
        super().__init__()
        self._tensors = [x for model in models for x in (*model.parameters(), *model.buffers())]
        self.operations = 0  # on tensors of the GPU

    def __enter__(self):
        for tensor in self._tensors:
            _put(tensor)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        for tensor in self._tensors:
            setattr(tensor, _TAG, False)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in _GETTERS:
            return _told(func, args[0])
        if func is torch.Tensor.get_device:
            return 0 if on_gpu(args[0]) else -1
        kwargs.pop("pin_memory", None)
        places = {on_gpu(x) for x in _tensors((args, kwargs)) if x.ndim or on_gpu(x)}
        if func in _HOST_ONLY and True in places:
            raise MixedDevicesError(f"{resolve_name(func)} of a tensor on {GPU}")
        if func is torch.Tensor.to:
            return self._to(args[0], args[1:], kwargs)
        if func is torch.Tensor.cpu:
            return self._moved(args[0], False)
        if func is torch.Tensor.cuda:
            return self._moved(args[0], True)
        if len(places) == 2 and func not in _TRANSFERS:
            shapes = [(list(x.shape), str(_told(_DEVICE, x))) for x in _tensors((args, kwargs))]
            raise MixedDevicesError(f"{resolve_name(func) or func}: {shapes}")
        there = on_gpu(args[0]) if func in _TRANSFERS else True in places
        if "device" in kwargs and kwargs["device"] is not None:
            there = torch.device(kwargs["device"]).type == "cuda"
            kwargs["device"] = "cpu"
        generator = kwargs.get("generator")
        if there and generator is not None:
            raise MixedDevicesError(f"{resolve_name(func)}: a generator of the CPU on {GPU}")
        made = func(*args, **kwargs)
        if there:
            self.operations += 1
            for tensor in _tensors(made):
                _put(tensor)
        return made

    def _to(self, tensor, args, kwargs):
        """`Tensor.to` in its forms: of a device, a dtype, both, or another tensor."""
        there = on_gpu(tensor)
        rest = []
        for value in args:
            if isinstance(value, (torch.device, str)):
                there = torch.device(value).type == "cuda"
            elif isinstance(value, torch.Tensor):
                there = on_gpu(value)
                rest.append(value.dtype)
            else:
                rest.append(value)
        if kwargs.get("device") is not None:
            there = torch.device(kwargs["device"]).type == "cuda"
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        converted = tensor.to(*rest, **kwargs) if rest or kwargs else tensor
        return self._moved(converted, there, was=on_gpu(tensor))

    def _moved(self, tensor, there, was=None):
        was = on_gpu(tensor) if was is None else was
        moved = tensor.clone() if was != there else tensor  # as a copy to another device is
        setattr(moved, _TAG, there)
        self.operations += there
        return moved


def on_gpu(tensor):
    """Whether a tensor is said to be on the simulated GPU."""
    return getattr(tensor, _TAG, False)


def _put(tensor):
    setattr(tensor, _TAG, True)


_DEVICE = torch.Tensor.device.__get__


def _told(getter, tensor):
    there = on_gpu(tensor)
    if getter == _DEVICE:
        return GPU if there else torch.device("cpu")
    return there == (getter == torch.Tensor.is_cuda.__get__)


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


class _Event:
    """Everything has happened by the time it is recorded."""

    def record(self, stream=None):
        pass

    def synchronize(self):
        pass


def pretend(monkeypatch, backend="cpu"):
    """Lets a pager of `cuda:0` be made, which computes with another backend."""
    from kvpager.pager import device, pager

    options = pager._device_options

    def of_backend(layout, config, place, q_heads):
        if place.kind == "cuda":
            place = dataclasses.replace(place, name=backend)
        return options(layout, config, place, q_heads)

    monkeypatch.setattr(pager, "_device_options", of_backend)
    monkeypatch.setattr(device, "missing", lambda kind: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(name="GPU", major=9, minor=0, multi_processor_count=132),
    )
