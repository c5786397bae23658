"""One bad number in q, k or v, at every offset of a chunk: what a pager makes of it.

    python non_finite.py FOLDER COMBINATIONS TIER...

runs the matrix under each instruction-set tier, in a child forked before any kernel was called, and
writes what went wrong to FOLDER/TIER.json. COMBINATIONS: "all" of dtypes and selections, or "two".
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from kvpager import _core
from kvpager.config import Dense, PagerConfig, TopK
from kvpager.errors import NonFiniteError
from kvpager.pager import ROW_COMMIT, ROW_PADDING, ROW_READ, Layout, Pager, Sequence

C = M = 16
LAYERS, KV_HEADS, Q_HEADS, DIM = 2, 2, 4, 32
BAD = {"NaN": float("nan"), "+inf": float("inf"), "-inf": float("-inf")}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make(device: str, dtype: str, selection: Dense | TopK) -> Pager:
    layout = Layout(LAYERS, KV_HEADS, DIM, DIM, chunk_tokens=C, k_dtype=dtype, v_dtype=dtype)
    config = PagerConfig(12 * C, chunk_tokens=C, host_bytes="1MiB", selection=selection)
    return Pager(layout, config, rows=M, threads=1, device=device, q_heads=Q_HEADS)


class Text:
    """Rows of four chunks, the same for everybody."""

    def __init__(self, dtype: str, device: str) -> None:
        where = torch.device("cuda" if device == "cuda" else "cpu")
        random = torch.Generator().manual_seed(3)

        def drawn(heads: int) -> torch.Tensor:
            rows = torch.randn(LAYERS, 5 * C, heads, DIM, generator=random)
            return rows.to(where, DTYPES[dtype])

        self.rows = {"q": drawn(Q_HEADS), "k": drawn(KV_HEADS), "v": drawn(KV_HEADS)}

    def forward(
        self,
        pager: Pager,
        sequence: Sequence,
        at: int,
        count: int,
        kind: int = ROW_COMMIT,
        bad: tuple[str, int, int, float] | None = None,
    ) -> list[torch.Tensor]:
        """`count` rows and padding of NaN; `bad`: (which, layer, row, value) of one number."""
        padding = M - count
        spans = [(sequence, at, count, kind)]
        spans += [(None, 0, padding, ROW_PADDING)] if padding else []
        outputs = []
        with pager.begin_spans(spans, np.arange(M, dtype=np.int32)) as forward:
            for layer in range(LAYERS):
                given = {}
                for name, rows in self.rows.items():
                    given[name] = torch.full_like(rows[layer, :M], torch.nan)
                    given[name][:count] = rows[layer, at : at + count]
                if bad is not None and bad[1] == layer:
                    given[bad[0]][bad[2], -1, 5 + bad[2]] = bad[3]
                out = forward.attend(layer, *given.values(), scaling=DIM**-0.5)
                outputs.append(out[:count].cpu().clone())
            forward.commit()
        return outputs


def refusal(call: Callable[[], object], what: str) -> str:
    """The words of the NonFiniteError that a call raises."""
    try:
        call()
    except NonFiniteError as error:
        return str(error)
    raise AssertionError(f"{what}: was accepted")


def cases() -> Iterator[tuple[str, str, int, int, int]]:
    """(which, bad value, layer, offset in the chunk, first position)."""
    for which in ("q", "k", "v"):
        for name in BAD:
            for offset in range(C):
                yield which, name, offset % LAYERS, offset, 2 * C + 5 * (offset % 3)


def check(device: str, dtype: str, selection: Dense | TopK, every: int = 1) -> int:
    """Refused with layer and position wherever the number is; nothing else changes. AssertionError.

    every: only every so manyth number.

    Returns how many numbers were tried.
    """
    text = Text(dtype, device)
    pager, untouched = make(device, dtype, selection), make(device, dtype, selection)
    base, other = pager.sequence(), untouched.sequence()
    for at in (0, C, 2 * C):
        text.forward(pager, base, at, C)
        text.forward(untouched, other, at, C)
    tried = 0
    for which, name, layer, offset, at in list(cases())[::every]:
        sequence, twin = base.fork(), other.fork()
        sequence.trim(at)
        twin.trim(at)
        row = (offset - at) % C
        count = max(row + 1, (tried % M) + 1)
        here = f"{which} {name} layer {layer} offset {offset} of {count} rows at {at}"
        number = (which, layer, row, BAD[name])
        words = refusal(partial(text.forward, pager, sequence, at, count, bad=number), here)
        assert f"layer {layer}: " in words, f"{here}: {words}"
        assert f" position {at + row} of " in words, f"{here}: {words}"
        assert ("query" in words) == (which == "q"), f"{here}: {words}"
        assert sequence.length == at, here
        assert not pager.core.forward_running(), here
        found = text.forward(pager, sequence, at, count)
        expected = text.forward(untouched, twin, at, count)
        for a, b in zip(found, expected):
            same = a.view(torch.uint8).numpy().tobytes() == b.view(torch.uint8).numpy().tobytes()
            assert same, f"{here}: other bits afterwards"
            assert bool(torch.isfinite(a).all()), here
        tried += 1
    pager.check_invariants()
    # A reading row's query counts; its keys and values, which exist already, do not.
    sequence = base.fork()
    sequence.trim(2 * C)
    for name, value in BAD.items():
        for row in range(0, M, every):
            number = ("q", 1, row, value)
            reading = partial(text.forward, pager, sequence, C, M, ROW_READ, bad=number)
            assert f"the query at position {C + row} of " in refusal(reading, f"{name}, reading")
            text.forward(pager, sequence, C, M, ROW_READ, bad=("k", 1, row, value))
            tried += 1
    for name, value in BAD.items():
        q = text.rows["q"][0, 0].cpu().clone()
        q[2, 3] = value
        words = refusal(partial(sequence.select, 0, q), f"{name}, select")
        assert f"the query at position {2 * C} of " in words, words
        tried += 1
    return tried


SELECTIONS = {"dense": Dense(), "top-k": TopK(chunks=2, sinks=C, recent=M)}
TWO = [("float32", "dense"), ("bfloat16", "top-k")]
COMBINATIONS = {
    "two": TWO,
    "all": [(dtype, selection) for dtype in DTYPES for selection in SELECTIONS],
}


def main() -> None:
    torch.set_num_threads(1)
    for tier in sys.argv[3:]:
        child = os.fork()
        if child == 0:
            answer = {}
            try:
                os.environ["KVPAGER_ISA"] = tier
                answer["tried"] = sum(
                    check("cpu", dtype, SELECTIONS[selection])
                    for dtype, selection in COMBINATIONS[sys.argv[2]]
                )
                answer["isa"] = _core.isa_name()
            except BaseException:
                answer["error"] = traceback.format_exc()
            Path(sys.argv[1], f"{tier}.json").write_text(json.dumps(answer))
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
