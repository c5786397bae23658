"""Linear layers of an 8B shape on a GPU: kvpager's products beside cuBLAS's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvpager import _core
from kvpager.pager.device import resolve
from kvpager_bench.gpu.run import Run
from kvpager_bench.gpu.sizes import Sizes
from kvpager_bench.gpu.subjects import BFLOAT16, WrongResultError, differing_bits
from kvpager_bench.harness import Column, Report, Timing

GB = 1e9
LAYER = "all of a layer"
_ERROR = 2e-2  # of the largest element: two roundings to bfloat16 of sums in different orders


@dataclass(frozen=True)
class Shape:
    """A matrix of a layer, and how many the layer has."""

    name: str
    depth: int
    outputs: int
    count: int


def shapes(sizes: Sizes) -> tuple[Shape, ...]:
    q, kv = sizes.q_heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    return (
        Shape("q", sizes.hidden, q, 1),
        Shape("k, v", sizes.hidden, kv, 2),
        Shape("o", q, sizes.hidden, 1),
        Shape("gate, up", sizes.hidden, sizes.intermediate, 2),
        Shape("down", sizes.intermediate, sizes.hidden, 1),
    )


def linear(run: Run) -> None:
    """One call for each matrix, of weights that no cache holds."""
    report = run.report(
        "linear",
        "Linear layers of an 8B shape in bfloat16, beside cuBLAS's products",
        Column("what", text=True),
        Column("rows"),
        Column("time_us", "us"),
        Column("spread", "(max-min)/median", 2),
        Column("gbs", "GB/s of weights"),
        Column("of_copy", "of the device copy"),
        Column("torch_us", "us"),
        Column("over_torch", "x its speed"),
    )
    device = _core.Device(run.machine.pager_device)
    for rows in run.sizes.product_rows:
        if run.out_of_time(f"linear layers of {rows} rows"):
            return
        ours, theirs, spread, read = 0.0, 0.0, 0.0, 0
        for shape in shapes(run.sizes):
            own, torchs, size = _time(run, device, shape, rows)
            _add(run, report, shape.name, rows, own.median, own.spread, torchs.median, size)
            ours += shape.count * own.median
            theirs += shape.count * torchs.median
            read += shape.count * size
            spread = max(spread, own.spread)
        _add(run, report, LAYER, rows, ours, spread, theirs, read)


def _add(
    run: Run, report: Report, what: str, rows: int, ours: float, spread: float, theirs: float,
    size: int,
) -> None:  # fmt: skip
    rate = size / ours / GB
    report.add(
        what=what,
        rows=rows,
        time_us=1e6 * ours,
        spread=spread,
        gbs=rate,
        of_copy=rate / run.ceiling("device copy, read + written"),
        torch_us=1e6 * theirs,
        over_torch=theirs / ours,
    )


def _time(run: Run, device: Any, shape: Shape, rows: int) -> tuple[Timing, Timing, int]:
    """Both products over as many weights as it takes to be read from memory, and their bytes."""
    machine, sizes = run.machine, run.sizes
    stream = resolve(machine.pager_device, None).stream
    size = 2 * shape.depth * shape.outputs
    weights = [
        machine.random(shape.outputs, shape.depth, dtype=BFLOAT16, seed=seed) / shape.depth**0.5
        for seed in range(max(1, -(-sizes.rotated_bytes // size)))
    ]
    x = machine.random(rows, shape.depth, dtype=BFLOAT16, seed=99)
    out = x.new_empty(rows, shape.outputs)

    def multiply(weight: torch.Tensor, x: torch.Tensor = x, out: torch.Tensor = out) -> None:
        if not device.linear(x, weight, None, out, stream):
            raise WrongResultError(f"{shape.name}: the device did not take the product")

    _check(shape, rows, multiply, x, weights[0], out)
    calls = [partial(multiply, weight) for weight in weights]
    torchs = [partial(torch.nn.functional.linear, x, weight) for weight in weights]
    ours = machine.time(calls, runs=max(sizes.runs, len(weights)))
    theirs = machine.time(torchs, runs=max(sizes.runs, len(weights)))
    del weights, calls, torchs
    machine.free()
    return ours, theirs, size


def _check(
    shape: Shape, rows: int, multiply: Any, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
) -> None:
    """Numbers near torch's, and the last row with the bits that it has alone."""
    multiply(weight)
    expected = torch.nn.functional.linear(x, weight).float()
    error = float((out.float() - expected).abs().max() / expected.abs().max())
    if not error <= _ERROR:
        raise WrongResultError(f"{shape.name}, {rows} rows: relative error {error:.3g}")
    alone = out.new_empty(1, shape.outputs)
    multiply(weight, x[-1:], alone)
    if differing_bits(alone, out[-1:]):
        raise WrongResultError(f"{shape.name}: a row has other bits among {rows} rows than alone")
