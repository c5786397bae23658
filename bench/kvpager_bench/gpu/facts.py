"""What the machine is, before anything is measured on it."""

from __future__ import annotations

import subprocess
import time

import torch

from kvpager._model.weights.numerics import describe_cuda
from kvpager.errors import PagerError
from kvpager.pager import Pager
from kvpager_bench.gpu.run import Run
from kvpager_bench.gpu.sizes import GIB
from kvpager_bench.gpu.subjects import config
from kvpager_bench.harness import Column, MissingNumberError

_ASKED = ("driver_version", "pcie.link.gen.max", "pcie.link.width.max", "clocks.max.sm")


def facts(run: Run) -> None:
    """The device, its libraries and its link, and how long pinning an arena takes."""
    report = run.report(
        "facts", "What this machine is", Column("what", text=True), Column("value", text=True)
    )
    for what, value in {**_device(run), **_pinned(run)}.items():
        report.add(what=what, value=value)


def _device(run: Run) -> dict[str, str]:
    if run.machine.rehearsal:
        return {"device": "shim"}
    about = torch.cuda.get_device_properties(run.machine.tensors)
    shared = getattr(about, "shared_memory_per_block_optin", None)  # not in every torch
    torch.ones(1, 1, device=run.machine.tensors).mm(torch.ones(1, 1, device=run.machine.tensors))
    return {
        "device": about.name,
        "compute capability": f"{about.major}.{about.minor}",
        "multiprocessors": str(about.multi_processor_count),
        "memory": f"{about.total_memory} bytes",
        "L2": f"{about.L2_cache_size} bytes",
        "shared memory of a block, opted in": f"{shared} bytes" if shared else "unknown",
        "libraries": f"torch {torch.__version__}, {describe_cuda()}",
        **_driver(),
    }


def _driver() -> dict[str, str]:
    answer = subprocess.run(
        ["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()[0]
    return dict(zip(_ASKED, map(str.strip, answer.split(",")), strict=True))


def _pinned(run: Run) -> dict[str, str]:
    """Of a pager's arena, as an engine with that `host_bytes` waits for it when it starts."""
    sizes, found = run.sizes, {}
    layout = sizes.layout()
    for size in sizes.pinned_bytes:
        if run.out_of_time(f"{size} bytes of pinned memory"):
            break
        settings = config(
            run.machine, sizes.pool, host_bytes=size, rows=sizes.append_rows, policy="lru"
        )
        what = f"an arena of {size / GIB:.3g} GiB"
        start = time.perf_counter()
        try:
            pager = Pager(layout, settings, rows=sizes.append_rows, q_heads=sizes.q_heads)
        except PagerError as error:  # a fact about the machine, and no wrong kernel
            found[what] = f"refused: {error}"
            continue
        seconds = time.perf_counter() - start
        held = int(pager.stats()["pinned_bytes"])
        pager.close()
        if held < size - layout.chunk_bytes:
            raise MissingNumberError(f"{held} bytes are pinned, expected {size}")
        found[what] = f"{seconds:.3f} s"
    return found
