"""The machine a GPU measurement runs on: its clock, its copies, its memory. One of two.

`CudaMachine` times with events of the device. `RehearsalMachine` runs the same sections on the
shim, on CPU tensors with the host's clock, to see that they work; what it measures means nothing.
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from kvpager import _core
from kvpager.pager.device import resolve
from kvpager_bench.harness import Timing

Call = Callable[[], object]


@dataclass(frozen=True)
class Ran:
    """What a profiler saw: a kernel, or a copy or fill of the device, and every time it ran."""

    name: str
    seconds: tuple[float, ...]

    @property
    def is_kernel(self) -> bool:
        return not self.name.startswith(("Memcpy", "Memset"))


BEFORE_CAPTURE = 3  # calls on a stream of their own, as torch's documentation asks for
AHEAD_CYCLES = 20_000_000  # about 10 ms: longer than the host takes to enqueue what is timed


def plugins() -> list[Any]:
    """What was found of each kind of device."""
    return [_core.probe_device(kind) for kind in ("cuda", "shim")]


def _ran(profiler: Any, kind: str) -> list[Ran]:
    seconds: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type.name == kind:
            seconds.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e6)
    found = [Ran(name, tuple(times)) for name, times in seconds.items()]
    return sorted(found, key=lambda ran: -sum(ran.seconds))


class Machine(ABC):
    """Where tensors are, and how long a call takes there."""

    rehearsal: bool
    pager_device: str  # for PagerConfig.device
    tensors: torch.device

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for everything the device has been given, on every stream."""

    @abstractmethod
    def time(self, calls: Call | Sequence[Call], *, runs: int, warm_up: int = 2) -> Timing:
        """Device seconds of one call on the current stream; several take turns, each on inputs of
        its own, so that a cache smaller than all of them holds none."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What figures depend on, for the report."""

    @abstractmethod
    def pinned(self, bytes_: int) -> torch.Tensor:
        """Pinned host memory, uint8, random bytes."""

    @abstractmethod
    def both_ways(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies to the first from the second of each pair, each pair on a stream of its own."""

    @abstractmethod
    def profile(self, call: Call) -> list[Ran]:
        """What ran on the device in one call, which ran before; the longest in all comes first."""

    @contextmanager
    def attention_backend(self) -> Iterator[None]:
        """Inside, torch's attention is its flash kernel, or an error."""
        yield

    def captured(self, call: Call) -> Call:
        """The call as a graph of the device, where it has graphs. It has run a few times then."""
        return call

    def wall(
        self, call: Call, *, runs: int, warm_up: int = 1, before: Call | None = None
    ) -> Timing:
        """Host seconds from the call until the device has nothing left to do: for what uses streams
        of its own. `before` runs ahead of each and is finished first."""
        seconds = []
        for run in range(warm_up + runs):
            if before is not None:
                before()
            self.synchronize()
            start = time.perf_counter()
            call()
            self.synchronize()
            elapsed = time.perf_counter() - start
            if run >= warm_up:
                seconds.append(elapsed)
        return Timing(tuple(seconds))

    def random(self, *shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
        """Normal numbers; on zeros a GPU is faster than on data."""
        generator = torch.Generator(device=self.tensors).manual_seed(seed)
        return torch.randn(*shape, dtype=dtype, device=self.tensors, generator=generator)

    def free(self) -> None:
        """Releases unused memory for the next section."""
        gc.collect()

    def out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, torch.OutOfMemoryError)


class CudaMachine(Machine):
    """One CUDA device."""

    rehearsal = False

    def __init__(self, name: str = "cuda") -> None:
        place = resolve(name, None)
        self.pager_device = place.name
        self.tensors = place.tensors
        torch.cuda.set_device(self.tensors)
        stream: Any = torch.cuda.Stream
        self._streams = [stream() for _ in range(2)]

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def time(self, calls: Call | Sequence[Call], *, runs: int, warm_up: int = 2) -> Timing:
        turns = [calls] if callable(calls) else list(calls)
        for number in range(max(warm_up, len(turns))):
            turns[number % len(turns)]()
        torch.cuda.synchronize()
        seconds = []
        event: Any = torch.cuda.Event
        for run in range(runs):
            start, stop = (event(enable_timing=True) for _ in range(2))
            # Busy while the host enqueues, so that no gap of the host's is timed.
            torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001
            start.record()
            turns[run % len(turns)]()
            stop.record()
            stop.synchronize()
            seconds.append(start.elapsed_time(stop) / 1e3)
        return Timing(tuple(seconds))

    def describe(self) -> dict[str, Any]:
        about = torch.cuda.get_device_properties(self.tensors)
        return {
            "device": about.name,
            "capability": f"{about.major}.{about.minor}",
            "multiprocessors": about.multi_processor_count,
            "device_memory_bytes": about.total_memory,
            "cache_bytes": about.L2_cache_size,
            "torch_cuda": torch.version.cuda,
            "plugins": plugins(),
            "rehearsal": False,
        }

    def pinned(self, bytes_: int) -> torch.Tensor:
        return (
            torch.randint(0, 256, (bytes_,), dtype=torch.uint8, device=self.tensors)
            .cpu()
            .pin_memory()
        )

    def both_ways(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        current = torch.cuda.current_stream()
        for stream, (to, source) in zip(self._streams, pairs, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                to.copy_(source, non_blocking=True)
        for stream in self._streams:
            current.wait_stream(stream)

    @contextmanager
    def attention_backend(self) -> Iterator[None]:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            yield

    def captured(self, call: Call) -> Call:
        make: Any = torch.cuda.Stream
        stream = make()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(BEFORE_CAPTURE):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        replay: Call = graph.replay
        return replay

    def profile(self, call: Call) -> list[Ran]:
        torch.cuda.synchronize()  # what was launched before is none of the call's
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            call()
            torch.cuda.synchronize()
        return _ran(profiler, "CUDA")

    def free(self) -> None:
        super().free()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class RehearsalMachine(Machine):
    """The shim, CPU tensors and the host's clock."""

    rehearsal = True
    pager_device = "shim"
    tensors = torch.device("cpu")

    def __init__(self) -> None:
        resolve("shim", None)

    def synchronize(self) -> None:
        """Nothing to wait for: torch on the CPU is synchronous, and the shim drains its streams
        where somebody looks at a result."""

    def time(self, calls: Call | Sequence[Call], *, runs: int, warm_up: int = 2) -> Timing:
        turns = [calls] if callable(calls) else list(calls)
        del warm_up
        seconds = []
        for run in range(runs):
            start = time.perf_counter()
            turns[run % len(turns)]()
            seconds.append(max(time.perf_counter() - start, 1e-9))
        return Timing(tuple(seconds))

    def describe(self) -> dict[str, Any]:
        return {"device": "shim", "rehearsal": True, "plugins": plugins()}

    def profile(self, call: Call) -> list[Ran]:
        """Of torch's operations: the shim's kernels are none that a profiler sees."""
        with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("the call"):
            call()
        return _ran(profiler, "CPU")

    def pinned(self, bytes_: int) -> torch.Tensor:
        return torch.randint(0, 256, (bytes_,), dtype=torch.uint8)

    def both_ways(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for to, source in pairs:
            to.copy_(source)
