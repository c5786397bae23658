"""A pager on a device, with no model: bits, errors, graphs and storms of evictions."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "model"))
from devices import DEVICES, require

from kvpager import _core
from kvpager.config import PagerConfig, TopK
from kvpager.errors import CapacityError, DeviceError, InvalidArgumentError, NonFiniteError
from kvpager.pager import ROW_COMMIT, ROW_PADDING, Forward, Layout, Pager, Sequence

KV_HEADS, GROUP, C, M = 2, 2, 16, 16
Q_HEADS = KV_HEADS * GROUP
LAYERS = 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return require(request.param)


def layout_of(dtype: str = "float32", dim: int = 64) -> Layout:
    return Layout(LAYERS, KV_HEADS, dim, dim, chunk_tokens=C, k_dtype=dtype, v_dtype=dtype)


def make_pager(device: str, layout: Layout, pool: int = 8, **options: object) -> Pager:
    settings = {"chunk_tokens": C, "host_bytes": "16MiB", **options}
    return Pager(
        layout,
        PagerConfig(pool * C, **settings),
        rows=M,
        threads=1,
        device=device,
        q_heads=Q_HEADS,
    )


class Rows:
    """Queries, keys and values that are a function of layer and position, for whoever asks."""

    def __init__(self, layout: Layout, tokens: int, where: torch.device, seed: int = 0) -> None:
        generator = torch.Generator("cpu").manual_seed(seed)
        dtype, dim = DTYPES[layout.k_dtype], layout.k_dim

        def drawn(heads: int) -> torch.Tensor:
            shape = (layout.layers, tokens, heads, dim)
            return torch.randn(shape, generator=generator).to(dtype).to(where)

        self.q, self.k, self.v = drawn(Q_HEADS), drawn(KV_HEADS), drawn(KV_HEADS)

    def of(self, layer: int, first: int, count: int, total: int) -> tuple[torch.Tensor, ...]:
        """[total, heads, dim] each: rows first, ... and then NaN."""
        taken = []
        for tensor in (self.q, self.k, self.v):
            rows = tensor.new_full((total, *tensor.shape[2:]), float("nan"))
            rows[:count] = tensor[layer, first : first + count]
            taken.append(rows)
        return tuple(taken)


def begin(pager: Pager, sequence: Sequence, count: int, total: int) -> Forward:
    padding = total - count
    start = sequence.length
    return pager.begin(
        [sequence] * count + [None] * padding,
        [*range(start, start + count), *[0] * padding],
        [*range(100 + start, 100 + start + count), *[0] * padding],
        [ROW_COMMIT] * count + [ROW_PADDING] * padding,
    )


def feed(
    pager: Pager, sequence: Sequence, rows: Rows, count: int, total: int = M, **call: object
) -> list[torch.Tensor]:
    """One forward of the next `count` rows; attention of each layer, padding left out."""
    outputs = []
    with begin(pager, sequence, count, total) as forward:
        first = sequence.length
        for layer in range(LAYERS):
            q, k, v = rows.of(layer, first, count, total)
            outputs.append(forward.attend(layer, q, k, v, scaling=0.125, **call))
        forward.commit()
    for out in outputs:
        assert not out[count:].any()  # padding is zeros
    return [out[:count].cpu() for out in outputs]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    integers = torch.int32 if a.element_size() == 4 else torch.int16
    return a.dtype == b.dtype and torch.equal(a.view(integers), b.view(integers))


CALLS = [{}, {"window": 20}, {"softcap": 3.0}, {"sinks": [0.5, -1.0, 2.0, 0.0]}]


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize(("dtype", "dim"), [("float32", 32), ("bfloat16", 64), ("float16", 16)])
def test_the_reference_order_gives_the_cpus_bits(
    dtype: str, dim: int, call: dict, device: str
) -> None:
    layout = layout_of(dtype, dim)
    tokens = 5 * C + 3
    mine = make_pager(device, layout, pool=4, attention="reference")
    theirs = make_pager("cpu", layout, pool=4)
    ours, other = mine.sequence(), theirs.sequence()
    here, there = Rows(layout, tokens, mine.device), Rows(layout, tokens, torch.device("cpu"))
    for count in (16, 16, 5, 1, 16, 13, 1, 15):
        given = dict(call)
        if "sinks" in call:
            given["sinks"] = torch.tensor(call["sinks"], device=mine.device)
        outputs = feed(mine, ours, here, count, **given)
        for layer, expected in enumerate(feed(theirs, other, there, count, **call)):
            assert same(outputs[layer], expected), (layer, count)
    for layer in range(LAYERS):
        assert all(map(same, ours.read_kv(layer, 0, tokens), other.read_kv(layer, 0, tokens)))
    assert mine.stats()["chunks_evicted"] > 0
    mine.check_invariants()


def test_a_row_of_tensor_cores_has_the_same_bits_alone_and_among_many(device: str) -> None:
    layout = layout_of("bfloat16")
    outputs = {}
    for counts in ((16, 16, 16, 3), (1,) * 51, (5, 11, 16, 3, 16)):
        pager = make_pager(device, layout, pool=12)
        sequence = pager.sequence()
        rows = Rows(layout, 60, pager.device)
        parts = [feed(pager, sequence, rows, count, max(count, 1)) for count in counts]
        outputs[counts] = [torch.cat([part[layer] for part in parts]) for layer in range(LAYERS)]
    first, *others = outputs.values()
    for other in others:
        assert all(map(same, first, other))


@pytest.mark.parametrize("missed", ["auto", "direct", "staged"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_storm_of_evictions_shows_in_no_bit(dtype: str, missed: str, device: str) -> None:
    layout = layout_of(dtype)
    tokens = 8 * C
    random = np.random.default_rng(7)
    small = make_pager(
        device, layout, pool=6, missed_chunks=missed, debug_poison=True, debug_shuffle_seed=5
    )
    large = make_pager(device, layout, pool=40)
    rows = [Rows(layout, tokens, small.device, seed) for seed in range(2)]
    pairs = [(small.sequence(), large.sequence()) for _ in rows]
    while any(one.length < tokens for one, _ in pairs):
        for mine, (one, other) in zip(rows, pairs):
            count = min(int(random.integers(1, M + 1)), tokens - one.length)
            if not count:
                continue
            outputs = feed(small, one, mine, count), feed(large, other, mine, count)
            assert all(map(same, *outputs)), one.length
            if random.random() < 0.5:
                small.evict_all()
            if one.length > C and random.random() < 0.3:
                with one.pin(0, C):
                    k, v = one.read_kv(1, 0, C)
                    expected = other.read_kv(1, 0, C)
                    assert same(k, expected[0])
                    assert same(v, expected[1])
    stats = small.stats()
    assert stats["chunks_evicted"] > 10
    assert stats["bytes_written_through"] == stats["chunks_sealed"] * stats["chunk_bytes"]
    small.check_invariants()


def test_rows_choose_the_same_chunks_on_a_device(device: str) -> None:
    layout = layout_of("bfloat16")
    selection = TopK(chunks=2, sinks=C, recent=M)
    tokens = 10 * C
    chosen = {}
    for name in (device, "cpu"):
        pager = make_pager(name, layout, pool=6, selection=selection)
        rows = Rows(layout, tokens + 8, pager.device)
        sequence = pager.sequence()
        while sequence.length < tokens:
            feed(pager, sequence, rows, M)
        chosen[name] = [
            sequence.select(layer, rows.q[layer, tokens + i])
            for layer in range(LAYERS)
            for i in range(8)
        ]
        assert sequence.read_kv(0, 0, tokens)[0].shape == (tokens, KV_HEADS, layout.k_dim)
    assert chosen[device] == chosen["cpu"]


def test_computed_elsewhere_forked_and_trimmed_on_a_device(device: str) -> None:
    layout = layout_of()
    pager = make_pager(device, layout)
    rows = Rows(layout, 3 * C, pager.device)
    fed, appended = pager.sequence(), pager.sequence()
    for count in (16, 16, 9):
        feed(pager, fed, rows, count)
    appended.append(range(100, 141), rows.k[:, :41], rows.v[:, :41])
    twin = fed.fork()
    twin.trim(20)
    assert twin.length == 20
    for layer in range(LAYERS):
        for other in (appended, twin):
            expected = fed.read_kv(layer, 0, other.length)
            assert all(map(same, other.read_kv(layer, 0, other.length), expected))


@pytest.mark.parametrize("which", ["k", "v"])
def test_what_is_not_finite_ends_the_forward_and_nothing_else(which: str, device: str) -> None:
    layout = layout_of()
    pager = make_pager(device, layout)
    sequence = pager.sequence()
    rows = Rows(layout, 2 * C, pager.device)
    feed(pager, sequence, rows, 10)
    before = sequence.read_kv(0, 0, 10)
    broken = Rows(layout, 2 * C, pager.device)
    getattr(broken, which)[1, 12, 1, 3] = float("inf")
    with pytest.raises(NonFiniteError, match="layer 1"):
        feed(pager, sequence, broken, 6)
    assert sequence.length == 10
    assert all(map(same, sequence.read_kv(0, 0, 10), before))
    feed(pager, sequence, rows, 6)
    pager.check_invariants()


def test_query_heads_are_asked_for(device: str) -> None:
    with pytest.raises(InvalidArgumentError, match="q_heads is None; expected the model's"):
        Pager(layout_of(), PagerConfig(8 * C, chunk_tokens=C), rows=M, device=device)


def test_host_memory_that_is_too_little_is_refused_with_the_bytes_needed(device: str) -> None:
    layout = layout_of()
    pager = make_pager(device, layout, host_bytes=2 * layout.chunk_bytes, pool=4)
    sequence = pager.sequence()
    with pytest.raises(CapacityError, match="bytes"):
        sequence.reserve(100 * C)
    rows = Rows(layout, C, pager.device)
    feed(pager, sequence, rows, 8)
    assert sequence.length == 8


def test_chunks_that_fit_neither_pool_nor_host_are_refused_naming_the_option(
    device: str, tmp_path: Path
) -> None:
    """Kernels read both in place; what is on disk has to come up first."""
    layout = layout_of()
    pager = make_pager(
        device,
        layout,
        pool=4,
        host_bytes=2 * layout.chunk_bytes,
        disk_path=tmp_path,
        disk_bytes=64 * layout.chunk_bytes,
    )
    sequence = pager.sequence()
    rows = Rows(layout, 20 * C, pager.device)
    sequence.reserve(20 * C)

    def feed_all() -> None:
        while sequence.length < 20 * C:
            feed(pager, sequence, rows, M)

    with pytest.raises(CapacityError, match="host_bytes"):
        feed_all()
    held = sequence.length
    assert 3 * C <= held < 20 * C
    assert all(map(same, [sequence.read_kv(0, 0, held)[0]], [rows.k[0, :held].cpu()]))
    pager.check_invariants()


def test_memory_of_a_pager_is_given_back(device: str) -> None:
    before = _core.total_device_bytes(), _core.total_pinned_bytes()
    pager = make_pager(device, layout_of())
    feed(pager, pager.sequence(), Rows(layout_of(), C, pager.device), 4)
    stats = pager.stats()
    assert _core.total_device_bytes() - before[0] == stats["device_bytes"] > 0
    assert _core.total_pinned_bytes() - before[1] == stats["pinned_bytes"] > 0
    pager.close()
    assert (_core.total_device_bytes(), _core.total_pinned_bytes()) == before


@pytest.mark.parametrize(("point", "error"), [("device.allocate", 12), ("device.pin", 12)])
def test_memory_that_cannot_be_had_is_a_capacity_error_and_leaves_nothing(
    point: str, error: int, device: str
) -> None:
    before = _core.total_device_bytes(), _core.total_pinned_bytes()
    _core.arm_fault(point, 0, error)
    try:
        with pytest.raises(CapacityError):
            make_pager(device, layout_of())
    finally:
        _core.disarm_faults()
    assert (_core.total_device_bytes(), _core.total_pinned_bytes()) == before


def test_there_is_nothing_to_replay_where_nothing_was_captured() -> None:
    pager = make_pager("cpu", layout_of())
    with begin(pager, pager.sequence(), 1, M) as forward, pytest.raises(InvalidArgumentError):
        forward.replayed(pager.generation)


@pytest.mark.cuda
class TestCuda:
    @pytest.fixture(autouse=True)
    def device(self) -> str:
        return require("cuda")

    def test_tensors_elsewhere_are_refused_naming_both_places(self) -> None:
        layout = layout_of()
        pager = make_pager("cuda:0", layout)
        rows = Rows(layout, C, torch.device("cpu"))
        with begin(pager, pager.sequence(), 4, M) as forward:
            q, k, v = rows.of(0, 0, 4, M)
            with pytest.raises(InvalidArgumentError, match=r"q: a tensor on cpu, .*cuda:0"):
                forward.attend(0, q, k, v, scaling=1.0)
            with pytest.raises(InvalidArgumentError, match=r"k: a tensor on cpu, .*cuda:0"):
                forward.attend(0, q.cuda(), k, v.cuda(), scaling=1.0)

    def test_device_tensors_are_refused_by_a_pager_of_the_cpu(self) -> None:
        layout = layout_of()
        pager = make_pager("cpu", layout)
        rows = Rows(layout, C, torch.device("cuda"))
        with begin(pager, pager.sequence(), 4, M) as forward:
            q, k, v = rows.of(0, 0, 4, M)
            with pytest.raises(InvalidArgumentError, match=r"q: a tensor on cuda:0, .*cpu"):
                forward.attend(0, q, k, v, scaling=1.0)

    def test_a_device_that_is_not_there_is_refused_with_how_many_are(self) -> None:
        with pytest.raises(DeviceError, match=r"cuda:77: there (is|are) "):
            make_pager("cuda:77", layout_of())

    @pytest.mark.parametrize("topk", [False, True])
    def test_a_captured_forward_replayed_gives_the_bits_of_one_that_was_not(
        self, topk: bool
    ) -> None:
        """64 decode steps through a pool of 6 chunks: boundaries, seals, evictions, misses."""
        layout = layout_of("bfloat16", 128)
        options = {"selection": TopK(chunks=2, sinks=C, recent=M)} if topk else {}
        prompt, steps = 6 * C + 5, 64
        eager = make_pager("cuda", layout, pool=6, **options)
        graphed = make_pager("cuda", layout, pool=6, **options)
        rows = Rows(layout, prompt + steps, eager.device)
        pairs = [(pager, pager.sequence()) for pager in (eager, graphed)]
        for pager, sequence in pairs:
            while sequence.length < prompt:
                feed(pager, sequence, rows, min(M, prompt - sequence.length))
        given = [tuple(x.clone() for x in rows.of(layer, 0, 1, 1)) for layer in range(LAYERS)]
        graph, captured, out = None, -1, []
        captures = 0
        for step in range(steps):
            position = prompt + step
            expected = feed(eager, pairs[0][1], rows, 1, 1)
            for layer in range(LAYERS):
                for fixed, fresh in zip(given[layer], rows.of(layer, position, 1, 1)):
                    fixed.copy_(fresh)
            with begin(graphed, pairs[1][1], 1, 1) as forward:
                if graph is None or graphed.generation != captured:
                    captures += 1
                    graph = torch.cuda.CUDAGraph()
                    torch.cuda.synchronize()
                    with torch.cuda.graph(graph):
                        out = [
                            forward.attend(layer, *given[layer], scaling=0.125)
                            for layer in range(LAYERS)
                        ]
                    captured = graphed.generation
                    with pytest.raises(InvalidArgumentError):
                        forward.commit()  # captured is not computed
                graph.replay()
                forward.replayed(captured)
                forward.commit()
            for layer in range(LAYERS):
                assert same(out[layer].cpu(), expected[layer]), (step, layer)
        assert captures < steps // 2
        for layer in range(LAYERS):
            kv = [sequence.read_kv(layer, 0, prompt + steps) for _, sequence in pairs]
            assert all(map(same, *kv))
        assert graphed.stats()["chunks_evicted"] > 0

    def test_work_on_another_stream_is_ordered_with_the_streams_own(self) -> None:
        """What a stream computes just before, on that stream, is what rows are made of."""
        layout = layout_of("bfloat16")
        pager, other = (make_pager("cuda", layout, pool=6) for _ in range(2))
        rows = Rows(layout, 4 * C, pager.device)
        one, two = pager.sequence(), other.sequence()
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        while one.length < 4 * C:
            stream = streams[one.length // M % 2]
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)  # whoever does not wait reads what is not there yet
                outputs = feed(pager, one, rows, M)
            assert all(map(same, outputs, feed(other, two, rows, M)))

    def test_long_storms_of_evictions_at_real_sizes(self) -> None:
        """8 kv heads of 128, 64 tokens a chunk, 32K tokens through a pool of 2K, in bfloat16."""
        layout = Layout(4, 8, 128, 128, chunk_tokens=64, k_dtype="bfloat16", v_dtype="bfloat16")
        tokens, rows = 32 * 1024, 256
        generator = torch.Generator("cuda").manual_seed(0)

        def drawn(heads: int) -> torch.Tensor:
            return torch.randn(
                rows, heads, 128, generator=generator, device="cuda", dtype=torch.bfloat16
            )

        pagers = [
            Pager(
                layout,
                PagerConfig(pool, host_bytes="4GiB"),
                rows=rows,
                device="cuda",
                q_heads=32,
            )
            for pool in (2048, tokens + 512)
        ]
        sequences = [pager.sequence() for pager in pagers]
        for start in range(0, tokens, rows):
            given = [(drawn(32), drawn(8), drawn(8)) for _ in range(layout.layers)]
            outputs = []
            for pager, sequence in zip(pagers, sequences):
                with pager.begin(
                    [sequence] * rows,
                    range(start, start + rows),
                    range(start, start + rows),
                    [ROW_COMMIT] * rows,
                ) as forward:
                    outputs.append(
                        [
                            forward.attend(layer, *given[layer], scaling=128**-0.5)
                            for layer in range(layout.layers)
                        ]
                    )
                    forward.commit()
                if start // rows % 8 == 7:
                    pager.evict_all()
            for ours, theirs in zip(*outputs):
                assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16)), start
        assert pagers[0].stats()["chunks_evicted"] >= tokens // 64 - 2048 // 64


def test_thousands_of_ranges_that_every_row_sees_are_those_of_one(device: str) -> None:
    """More than a transfer buffer holds: 5000 ranges, and the one that they make together."""
    layout = layout_of()
    tokens = 6 * C
    outputs = []
    for always in (tuple((i, i + 1) for i in range(2 * C, 2 * C + 5000)), ((2 * C, 2 * C + 5000),)):
        pager = make_pager(
            device, layout, 12, selection=TopK(chunks=1, sinks=0, recent=C, always=always)
        )
        rows = Rows(layout, tokens, pager.device)
        sequence = pager.sequence()
        outputs.append([feed(pager, sequence, rows, C) for _ in range(tokens // C)])
    assert all(
        torch.equal(ours, theirs)
        for one, other in zip(*outputs, strict=True)
        for ours, theirs in zip(one, other, strict=True)
    )
