"""Arguments of the low-level pager: refused by name, never taken for something else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_pager_rows import DIM, GROUP, KV_HEADS, LAYOUT, TOKENS, C, M, begin, make_pager

from kvpager.config import PagerConfig
from kvpager.errors import CapacityError, InvalidArgumentError, NonFiniteError
from kvpager.pager import ROW_COMMIT, Pager, Sequence

NAN, INF = float("nan"), float("inf")


def tensors(rows: int = M) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": KV_HEADS * GROUP, "k": KV_HEADS, "v": KV_HEADS}
    return {
        name: torch.randn(rows, heads, DIM, generator=generator) for name, heads in shapes.items()
    }


def negated(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as a view that torch negates when it is read."""
    view = torch.conj(torch.complex(x, -x)).imag
    assert view.is_neg()
    assert torch.equal(view, x)
    return view


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_a_tensor_that_is_negated_when_it_is_read_is_refused(name: str) -> None:
    pager = make_pager()
    sequence = pager.sequence()
    given = tensors()
    given["out"] = torch.zeros(M, KV_HEADS * GROUP, DIM)
    given[name] = negated(given[name])
    refused = pytest.raises(InvalidArgumentError, match=rf"{name}: .* pass tensor\.resolve_neg")
    with begin(pager, sequence, TOKENS[:M], M) as forward, refused:
        forward.attend(0, **given, scaling=0.25)
    assert sequence.length == 0
    pager.check_invariants()


@pytest.mark.parametrize(
    "options",
    [{"softcap": NAN}, {"softcap": INF}, {"softcap": -1.0}, {"window": 1.5}, {"window": -1}],
    ids=str,
)
def test_numbers_of_attention_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    pager = make_pager()
    (name,) = options
    refused = pytest.raises(InvalidArgumentError, match=name)
    with begin(pager, pager.sequence(), TOKENS[:M], M) as forward, refused:
        forward.attend(0, **tensors(), scaling=0.25, **options)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("positions", value) for value in (0.9, "0", None, NAN, 2**70)),
        *(("tokens", value) for value in (0.5, "1", None, -1, 2**31, [1, 2])),
        *(("kinds", value) for value in (0.5, "0", None, 256, -1)),
    ],
)
def test_rows_are_described_by_integers(field: str, value: Any) -> None:
    pager = make_pager()
    rows: dict[str, Any] = {
        "positions": [*range(M)],
        "tokens": TOKENS[:M],
        "kinds": [ROW_COMMIT] * M,
    }
    rows[field] = [*rows[field][:-1], value]
    sequence = pager.sequence()
    with pytest.raises(InvalidArgumentError, match=field):
        pager.begin([sequence] * M, **rows)
    with begin(pager, sequence, TOKENS[:M], M):
        pass


def test_negative_ids_are_refused_in_every_dtype() -> None:
    sequence = make_pager().sequence()
    for dtype in (np.int32, np.int64, np.int8):
        with pytest.raises(InvalidArgumentError, match="ids from -1 to 2"):
            sequence.adopt_prefix(np.array([1, -1, 2], dtype=dtype))


def test_a_salt_is_unicode_text() -> None:
    pager = make_pager()
    for salt in (b"x", None, 5, "half \ud800"):
        with pytest.raises(InvalidArgumentError, match="salt"):
            pager.sequence(salt=salt)  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [0, -1, 2**40, 1.5])
def test_a_number_of_threads_is_one_that_a_machine_has(threads: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="threads is"):
        Pager(LAYOUT, PagerConfig(8 * C, chunk_tokens=C), rows=M, threads=threads)


class TestAppend:
    """Positions that were computed elsewhere, in a pager with room for 12 chunks."""

    @pytest.fixture
    def pager(self) -> Pager:
        config = PagerConfig(8 * C, chunk_tokens=C, host_bytes=12 * LAYOUT.chunk_bytes)
        return Pager(LAYOUT, config, rows=M, threads=1)

    def kv(self, value: float = 1.0) -> torch.Tensor:
        return torch.full((1, C, KV_HEADS, DIM), value)

    def holds_ten(self, pager: Pager) -> Sequence:
        sequence = pager.sequence()
        sequence.reserve(10 * C)
        return sequence

    def test_leaves_a_sequence_the_room_it_was_admitted_with(self, pager: Pager) -> None:
        sequence, other = self.holds_ten(pager), pager.sequence()
        sequence.append(TOKENS[:C], self.kv(), self.kv())
        with pytest.raises(CapacityError):
            other.reserve(4 * C)
        for _ in range(9):
            sequence.append(TOKENS[:C], self.kv(), self.kv())
        assert sequence.length == 10 * C

    def test_that_fails_leaves_it_too(self, pager: Pager) -> None:
        sequence, other = self.holds_ten(pager), pager.sequence()
        with pytest.raises(NonFiniteError):
            sequence.append(TOKENS[:C], self.kv(NAN), self.kv())
        with pytest.raises(CapacityError):
            other.reserve(4 * C)
        assert sequence.length == 0

    def test_within_a_forward_says_that_one_runs(self, pager: Pager) -> None:
        sequence = pager.sequence()
        refused = pytest.raises(InvalidArgumentError, match="forward")
        with begin(pager, sequence, TOKENS[:M], M), refused as error:
            sequence.append(TOKENS[:C], self.kv(), self.kv())
        assert "trim" not in str(error.value)


@pytest.mark.parametrize("sink", [NAN, INF])
def test_a_sink_that_would_hide_every_key_is_refused(sink: float) -> None:
    pager = make_pager()
    sequence = pager.sequence()
    sinks = torch.zeros(KV_HEADS * GROUP)
    sinks[1] = sink
    with begin(pager, sequence, TOKENS[:M], M) as forward:
        with pytest.raises(InvalidArgumentError, match=r"sinks\[1\]: .*expected a number"):
            forward.attend(0, **tensors(), scaling=0.25, sinks=sinks)
        sinks[1] = -INF  # as if there were none
        forward.attend(0, **tensors(), scaling=0.25, sinks=sinks)
