"""What a machine can do, in numbers: measured, from a data sheet, or given by hand.

Products of matrices are described by what they achieve at several row counts, since libraries are
far from either roofline in between; everything else is a rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from kvpager.errors import InvalidArgumentError
from kvpager.plan.shape import DTYPE_BYTES

_ROWS = tuple(2**n for n in range(13))


@dataclass(frozen=True)
class Products:
    """Seconds that a weight matrix costs, by the rows it is multiplied with.

    points: (rows, seconds per element of the matrix), ascending in rows; between two of them and
    beyond the last, interpolated in logarithms and continued in proportion.
    """

    points: tuple[tuple[int, float], ...]

    @classmethod
    def roofline(cls, dtype: str, bandwidth: float, flops: float) -> Products:
        """Whichever is slower: reading the weights, or the arithmetic."""
        read = DTYPE_BYTES[dtype] / bandwidth
        return cls(tuple((rows, max(read, 2 * rows / flops)) for rows in _ROWS))

    def seconds(self, elements: float, rows: float) -> float:
        """Of products of `rows` rows with matrices of so many elements together."""
        return elements * self._per_element(rows)

    def _per_element(self, rows: float) -> float:
        before = self.points[0]
        if rows <= before[0]:
            return before[1]
        for point in self.points[1:]:
            if rows <= point[0]:
                share = math.log(rows / before[0]) / math.log(point[0] / before[0])
                return float(before[1] ** (1 - share) * point[1] ** share)
            before = point
        return before[1] * rows / before[0]


@dataclass(frozen=True)
class Machine:
    """Rates in bytes or operations per second, fixed costs in seconds.

    Attributes:
        name: of the device.
        source: "measured", "data sheet" or "given", and what was assumed.
        on_gpu: whether the pool is in a memory of its own, behind a link.
        bandwidth: of the memory that pool and weights are in, as it is achieved.
        copy: of that memory, bytes copied per second, each counted once.
        products: by dtype of the weights.
        attention_flops: of attention over many rows.
        attention_share: of `bandwidth`, at which attention of few rows reads K/V.
        scan: summary bytes scored per second. Where every row reads them anew, for each row.
        scan_ops: integer operations per second of scoring many rows that share what is read; None:
            every row reads the summaries anew.
        link: from host memory to the device; of no meaning where there is none.
        disk_write, disk_read: the latter of what the page cache does not hold.
        cached_read: reading and verifying what the page cache holds.
        fresh: bytes of memory per second that a process gets for the first time.
        sync_seconds: of making one file lasting.
        element_seconds: of a norm, per element; other small operations are shares of it.
        layer_seconds: of the framework per layer and forward: modules, launches, small operations.
        forward_seconds: likewise, per forward.
        device_memory: bytes, where known.
        decode_rows: by dtype, the fewest rows a forward has when one session decodes.
    """

    name: str
    source: str
    on_gpu: bool
    bandwidth: float
    copy: float
    products: Mapping[str, Products]
    attention_flops: float
    scan: float
    link: float
    disk_write: float
    disk_read: float
    cached_read: float
    fresh: float
    sync_seconds: float
    element_seconds: float
    layer_seconds: float
    forward_seconds: float
    scan_ops: float | None = None
    attention_share: float = 0.8
    device_memory: int | None = None
    decode_rows: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def with_rates(
        self,
        *,
        flops: float | None = None,
        bandwidth: float | None = None,
        link: float | None = None,
        disk: float | None = None,
    ) -> Machine:
        """The machine with some rates given by hand; what follows from one changes with it."""
        changed = self
        if bandwidth is not None:
            share = bandwidth / self.bandwidth
            changed = replace(
                changed,
                bandwidth=bandwidth,
                copy=self.copy * share,
                scan=self.scan * share,
            )
        if flops is not None or bandwidth is not None:
            changed = replace(
                changed,
                products=MappingProxyType(
                    {
                        dtype: Products.roofline(
                            dtype, changed.bandwidth, flops or _peak(self.products[dtype])
                        )
                        for dtype in self.products
                    }
                ),
            )
        if flops is not None:
            changed = replace(changed, attention_flops=flops / 2)
        if link is not None:
            changed = replace(changed, link=link)
        if disk is not None:
            changed = replace(changed, disk_write=disk, disk_read=disk)
        return (
            changed if changed is self else replace(changed, source=self.source + "; given rates")
        )

    def rows_to_decode(self, dtype: str, sessions: int) -> int:
        """Rows of a forward in which so many sessions decode: the smallest proven count."""
        return max(self.decode_rows.get(dtype, 1), sessions)


def _peak(products: Products) -> float:
    rows, seconds = products.points[-1]
    return 2 * rows / seconds


# Shares of a data sheet's figure that are taken to be achieved.
_BANDWIDTH_SHARE = 0.85
_FLOPS_SHARE = 0.6
_LINK_SHARE = 0.8
_PASSES = 8  # of float32 through memory, that a norm makes
_DOTS_SHARE = 0.3  # of four times float32, the rate of integer dot products


def _gpu(
    name: str, *, memory: float, bandwidth: float, flops: float, float32: float, link: float
) -> Machine:
    """A GPU from its data sheet: GiB, GB/s, TFLOP/s (dense, 16 bits; float32), GB/s."""
    achieved = _BANDWIDTH_SHARE * bandwidth * 1e9
    peak = _FLOPS_SHARE * flops * 1e12
    return Machine(
        name=name,
        source=(
            f"data sheet; taken to be achieved: {_BANDWIDTH_SHARE:.0%} of bandwidth, "
            f"{_FLOPS_SHARE:.0%} of FLOP/s, {_LINK_SHARE:.0%} of the link"
        ),
        on_gpu=True,
        bandwidth=achieved,
        copy=achieved / 2,
        products=MappingProxyType(
            {
                "bfloat16": Products.roofline("bfloat16", achieved, peak),
                "float16": Products.roofline("float16", achieved, peak),
                "float32": Products.roofline("float32", achieved, _FLOPS_SHARE * float32 * 1e12),
            }
        ),
        attention_flops=peak / 2,
        scan=achieved / 2,
        scan_ops=_DOTS_SHARE * 4 * float32 * 1e12,
        link=_LINK_SHARE * link * 1e9,
        disk_write=2e9,
        disk_read=3e9,
        cached_read=8e9,
        fresh=1e10,
        sync_seconds=2e-3,
        element_seconds=_PASSES * 4 / achieved,
        layer_seconds=2.5e-4,
        forward_seconds=1e-3,
        device_memory=int(memory * 2**30),
        decode_rows=MappingProxyType({"float32": 16, "bfloat16": 16, "float16": 16}),
    )


# A laptop of eight cores with AVX2 and two channels of DDR5: assumed, as an example of one.
_LAPTOP = Machine(
    name="laptop",
    source="assumed: eight cores with AVX2, two channels of DDR5, an NVMe disk",
    on_gpu=False,
    bandwidth=6e10,
    copy=2.5e10,
    products=MappingProxyType(
        {
            "float32": Products.roofline("float32", 6e10, 6e11),
            "bfloat16": Products.roofline("bfloat16", 6e10, 3e11),
            "float16": Products.roofline("float16", 6e10, 3e11),
        }
    ),
    attention_flops=3e11,
    scan=3e10,
    link=6e10,
    disk_write=2e9,
    disk_read=3e9,
    cached_read=8e9,
    fresh=2e9,
    sync_seconds=2e-3,
    element_seconds=3e-10,
    layer_seconds=2e-4,
    forward_seconds=1e-3,
    decode_rows=MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2}),
)

# Vendors' data sheets: memory GiB, GB/s, dense TFLOP/s in 16 bits and in float32, GB/s of one
# direction of the link.
DEVICES: Mapping[str, Machine] = MappingProxyType(
    {
        machine.name: machine
        for machine in (
            _LAPTOP,
            _gpu("rtx3090", memory=24, bandwidth=936, flops=71, float32=35.6, link=31.5),
            _gpu("rtx4090", memory=24, bandwidth=1008, flops=165, float32=82.6, link=31.5),
            _gpu("rtx5090", memory=32, bandwidth=1792, flops=209, float32=104.8, link=63),
            _gpu("l4", memory=24, bandwidth=300, flops=121, float32=30.3, link=31.5),
            _gpu("l40s", memory=48, bandwidth=864, flops=362, float32=91.6, link=31.5),
            _gpu("a100-40gb", memory=40, bandwidth=1555, flops=312, float32=19.5, link=31.5),
            _gpu("a100-80gb", memory=80, bandwidth=2039, flops=312, float32=19.5, link=31.5),
            _gpu("h100", memory=80, bandwidth=3350, flops=989, float32=67, link=63),
            _gpu("h200", memory=141, bandwidth=4800, flops=989, float32=67, link=63),
        )
    }
)


def device_named(name: str) -> Machine:
    """The machine of that name.

    Raises:
        InvalidArgumentError: there is none; names those there are.
    """
    if name not in DEVICES:
        raise InvalidArgumentError(
            f'device is {name!r}; expected "measure" or one of {", ".join(DEVICES)}'
        )
    return DEVICES[name]
