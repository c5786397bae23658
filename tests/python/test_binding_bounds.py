"""Lengths, strides and counts at their extremes, where they cross the bindings.

Each is either computed to the right bits, or refused with an error that names it; then nothing is
written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_store import LAYERS, LAYOUT, Author, C, text

from kvpager import _core
from kvpager.errors import CapacityError, InvalidArgumentError

N, K = 24, 128  # outputs and depth: two groups of compressed weights each
LARGE = 2**62
Product = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(torch.bfloat16).to(dtype)


@pytest.fixture(scope="module")
def workers() -> _core.Workers:
    return _core.Workers(2)


def usual(rows: int = 3) -> Product:
    return noise(rows, K), noise(N, K), noise(N), torch.full((rows, N), 7.0)


def with_weight(weight: torch.Tensor) -> Product:
    x, _, bias, out = usual()
    return x, weight, bias, out


def one_row_of_weights() -> Product:
    return with_weight(noise(1, K).expand(N, K))


def weights_that_overlap() -> Product:
    return with_weight(noise(4 * N + K).as_strided((N, K), (4, 1)))


def weights_of_a_larger_matrix() -> Product:
    return with_weight(noise(N, 2 * K)[:, K:])


def every_second_weight() -> Product:
    return with_weight(noise(2 * N, K)[::2])


def one_row_of_inputs() -> Product:
    _, weight, bias, out = usual()
    return noise(1, K).expand(3, K), weight, bias, out


def inputs_of_three_rows_each_twice() -> Product:
    _, weight, bias, _ = usual()
    return noise(3, 1, K).expand(3, 2, K), weight, bias, torch.full((3, 2, N), 7.0)


def inputs_that_are_all_one_row() -> Product:
    _, weight, bias, _ = usual()
    return noise(1, 1, K).expand(3, 2, K), weight, bias, torch.full((3, 2, N), 7.0)


def columns_of_what_is_read() -> Product:
    _, weight, bias, _ = usual()
    both = noise(3, K + N)
    return both[:, :K], weight, bias, both[:, K:]


def no_rows() -> Product:
    return usual(rows=0)


def no_outputs() -> Product:
    x, _, _, _ = usual()
    return x, noise(0, K), None, torch.zeros(3, 0)


def no_depth() -> Product:
    _, _, bias, out = usual()
    return torch.zeros(3, 0), torch.zeros(N, 0), bias, out


COMPUTED = (
    one_row_of_weights, weights_that_overlap, weights_of_a_larger_matrix, every_second_weight,
    one_row_of_inputs, inputs_of_three_rows_each_twice, inputs_that_are_all_one_row,
    columns_of_what_is_read, no_rows, no_outputs, no_depth,
)  # fmt: skip


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous().clone()


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "compressed"])
@pytest.mark.parametrize("make", COMPUTED)
def test_a_product_of_odd_strides_has_the_bits_of_copies_or_is_left_to_torch(
    workers: _core.Workers, make: Callable[[], Product], compressed: bool
) -> None:
    x, weight, bias, out = make()
    copies = _core.CompressedWeights() if compressed else None
    if copies is not None:
        copies.add(workers, weight)
    expected = torch.full_like(out, 7.0, memory_format=torch.contiguous_format)
    plain = [contiguous(tensor) for tensor in (x, weight, bias)]
    assert _core.linear(workers, *plain, expected)
    before = out.clone()
    if _core.linear(workers, x, weight, bias, out, copies):
        assert torch.equal(out, expected)
    else:
        assert torch.equal(out, before)


def out_in_one_row() -> Product:
    x, weight, bias, _ = usual()
    return x, weight, bias, torch.full((1, N), 7.0).expand(3, N)


def out_that_overlaps() -> Product:
    x, weight, bias, _ = usual()
    return x, weight, bias, torch.full((64,), 7.0).as_strided((3, N), (4, 1))


def out_in_the_inputs() -> Product:
    x, weight, bias, _ = usual()
    return x, weight, bias, x[:, :N]


def out_in_the_weights() -> Product:
    x, weight, bias, _ = usual()
    return x, weight, bias, weight.view(-1)[: 3 * N].view(3, N)


def out_in_the_bias() -> Product:
    _, weight, bias, _ = usual()
    assert bias is not None
    return noise(1, K), weight, bias, bias.view(1, N)


def a_bias_in_one_place() -> Product:
    x, weight, _, out = usual()
    return x, weight, noise(1).expand(N), out


def weights_of_another_depth() -> Product:
    return with_weight(noise(N, K + 1))


def more_rows_than_64_bits_count() -> Product:
    _, weight, bias, out = usual()
    return noise(1, 1, 1, K).expand(2**20, 2**20, 2**20, K), weight, bias, out


REFUSED = (
    out_in_one_row, out_that_overlaps, out_in_the_inputs, out_in_the_weights, out_in_the_bias,
    a_bias_in_one_place, weights_of_another_depth, more_rows_than_64_bits_count,
)  # fmt: skip


@pytest.mark.parametrize("make", REFUSED)
def test_a_product_that_cannot_be_is_refused_and_writes_nothing(
    workers: _core.Workers, make: Callable[[], Product]
) -> None:
    try:
        x, weight, bias, out = make()
    except RuntimeError:  # torch has no such tensor
        return
    before = [tensor.clone() for tensor in (weight, bias, out) if tensor is not None]
    assert not _core.linear(workers, x, weight, bias, out)
    after = [tensor for tensor in (weight, bias, out) if tensor is not None]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize(
    "weight",
    [
        noise(1, K).expand(N, K),
        noise(1, K).expand(2**40, K),
        noise(1, 1, K).expand(8, N, K),
        noise(N, 1, K).expand(N, 3, K),
        noise(4 * N + K).as_strided((N, K), (4, 1)),
        noise(N, K).t(),
        noise(N, 63),
        noise(0, K),
        noise(N, 0),
    ],
    ids=lambda weight: f"{tuple(weight.shape)}-{weight.stride()}",
)
def test_weights_without_rows_of_their_own_get_no_copy(
    workers: _core.Workers, weight: torch.Tensor
) -> None:
    copies = _core.CompressedWeights()
    assert not copies.add(workers, weight)
    assert (copies.bytes, copies.weight_bytes) == (0, 0)


def test_experts_of_a_stride_of_0_or_beyond_count_are_refused(workers: _core.Workers) -> None:
    x, chosen = noise(2, K), torch.zeros(2, dtype=torch.int64)
    out = torch.full((2, N), 7.0)
    for weight in (noise(1, N, K).expand(4, N, K), noise(1, 1, K).expand(2**40, 1, K)):
        of_one = out[:, : weight.shape[1]]
        assert not _core.linear_of_experts(workers, x, weight, None, chosen, of_one.clone()[:, :0])
        if _core.linear_of_experts(workers, x, weight, None, chosen, of_one):
            expected = torch.empty_like(of_one, memory_format=torch.contiguous_format)
            assert _core.linear(workers, x, weight[0].contiguous(), None, expected)
            assert torch.equal(of_one, expected)
        else:
            assert torch.equal(of_one, torch.full_like(of_one, 7.0))


SELECTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("topk", {"chunks": 0}, "selection.chunks is 0"),
    ("topk", {"chunks": 4, "sinks": -1}, "selection.sinks is -1"),
    ("topk", {"chunks": 4, "sinks": LARGE}, f"selection.sinks is {LARGE}"),
    ("window", {"recent": LARGE}, f"selection.recent is {LARGE}"),
    ("window", {"recent": -1}, "selection.recent is -1"),
    ("topk", {"chunks": 4, "always": [(0, LARGE)]}, "selection.always[0] is [0, "),
    ("topk", {"chunks": 4, "always": [(-1, 4)]}, "selection.always[0] is [-1, 4)"),
    ("topk", {"chunks": 4, "always": [(4, 4)]}, "selection.always[0] is [4, 4)"),
    ("topk", {"chunks": 4, "always": [(0, 4), (2, 8)]}, "selection.always[1] begins at 2"),
    ("topk", {"chunks": 4, "always": [(i, i + 1) for i in range(70000)]}, "has 70000 ranges"),
]


def options(**fields: Any) -> _core.PagerOptions:
    made = _core.PagerOptions()
    usual = {"layout": LAYOUT.native(), "pool_blocks": 8, "rows": C, "q_heads": 1}
    for name, value in {**usual, **fields}.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(("kind", "fields", "words"), SELECTIONS)
def test_a_selection_beyond_its_bounds_is_refused_by_name(
    kind: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        _core.Pager(options(selection=_core.Selection(kind, **fields)))
    assert words in str(error.value)


COUNTS = [
    ("pool_blocks", "pool_tokens"), ("rows", "rows"), ("host_bytes", "host_bytes"),
    ("disk_bytes", "disk_bytes"), ("summary_bytes", "summary_bytes"), ("window", "window"),
    ("rewind", "rewind"), ("recall_chunks", "recall_chunks"), ("threads", "threads"),
    ("q_heads", "q_heads"), ("smaller_rows", "smaller_rows"),
]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "shim", "meta"])
@pytest.mark.parametrize("value", [-2, 2**50 + 1, LARGE, 2**63 - 1])
@pytest.mark.parametrize(("field", "name"), COUNTS, ids=[field for field, _ in COUNTS])
def test_an_option_at_its_extremes_is_refused_by_name_or_holds(
    field: str, name: str, value: int, device: str
) -> None:
    given = [value] if field == "smaller_rows" else value
    try:
        made = options(device=device, **{field: given})
    except TypeError:  # no number of this field's width
        return
    if field == "disk_bytes":
        made.disk_path = "/dev/shm"
    refused = ""
    try:
        _core.Pager(made).check_invariants()
    except InvalidArgumentError as error:
        refused = str(error)
    except (CapacityError, _core.StorageError, _core.DeviceError):
        return  # as much memory, or space, as there is not
    assert not refused or name in refused or field in refused


@pytest.mark.parametrize(
    "tokens",
    [
        np.array([2**31] * C),
        np.array([-(2**31) - 1] * C),
        np.array([2**63] * C, np.uint64),
        np.array([2**40] * C)[::-1],
        [2**40] * C,
    ],
    ids=["above", "below", "unsigned", "strided", "list"],
)
def test_integers_that_do_not_fit_are_refused_by_name_and_never_wrapped(tokens: Any) -> None:
    pager = Author().pager.core
    sequence = _core.OwnedSequence(pager, None, "")
    calls: list[Callable[[], object]] = [
        lambda: pager.chain_hashes(tokens, ""),
        lambda: pager.adopt_prefix(sequence.uid, tokens),
        lambda: _core.OwnedForward(pager, None, [(sequence, 0, C, 0)], tokens),
        lambda: _core.OwnedForward(
            pager, None, sequences=[sequence] * C, positions=range(C), tokens=tokens, kinds=[0] * C
        ),
        lambda: _core.loose_content(LAYOUT.native(), tokens, [], [], []),
    ]
    for call in calls:
        with pytest.raises(
            InvalidArgumentError, match=r"tokens: integers from .* expected -2147483648"
        ):
            call()


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int64, np.uint64])
def test_integers_of_another_width_that_fit_are_the_same_tokens(dtype: Any) -> None:
    pager = Author().pager.core
    ids = [token % 100 for token in text(2 * C)]
    expected = pager.chain_hashes(np.array(ids, np.int32), "")
    assert pager.chain_hashes(np.array(ids, dtype), "") == expected
    assert pager.chain_hashes(ids, "") == expected
    assert pager.chain_hashes([], "") == []


@pytest.mark.parametrize("tokens", [[1.5] * C, np.ones(C), ["1"] * C, [None] * C, [1j] * C])
def test_numbers_that_are_no_integers_are_a_type_error(tokens: Any) -> None:
    with pytest.raises(TypeError):
        Author().pager.core.chain_hashes(tokens, "")


def test_queries_of_more_heads_than_a_model_has_are_refused() -> None:
    author = Author()
    sequence = author.pager.sequence()
    sequence.append([1], *np.zeros((2, LAYERS, 1, 1, LAYOUT.k_dim), np.float32))
    for heads in (2**17, 2**40):
        q = torch.zeros(1, 1, LAYOUT.k_dim).expand(1, heads, LAYOUT.k_dim)
        with pytest.raises(InvalidArgumentError, match="expected at most"):
            author.pager.core.select(sequence.uid, 0, q, 0)


def test_ranges_to_watch_that_are_none_are_refused() -> None:
    for ranges in ([(1, -1)], [(0, 1)]):
        with pytest.raises(InvalidArgumentError, match="ranges"):
            _core.ByteWatch(ranges, 1, 0)
    with pytest.raises(IndexError, match="range"):
        _core.ByteWatch([(0, 0)], 1, 0).digests(1)
