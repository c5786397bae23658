"""Restoring a long context reads what it uses: metadata, summaries and the selected chunks.

Bytes are those the system counts for all that this process reads meanwhile, from a disk or from
the page cache. The bounds they have to keep follow from the selection alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from transformers import AutoModelForCausalLM

from kvpager import Engine, Layout, Pager, PagerConfig, TopK, open_snapshot
from kvpager.cli.needles import NeedleTask, shipped_model_path
from kvpager.pager import ROW_COMMIT, ROW_PADDING

CHUNKS, SINKS, RECENT = 4, 64, 256
ROWS = 64
TAIL = 21  # tokens behind the last sealed chunk
COUNTER_BYTES = 4096  # reading the counter is itself a read
K = 1024


class Reads:
    """Counts the bytes of read calls inside its block."""

    def __enter__(self):
        self.start = self.now()
        return self

    def __exit__(self, *_):
        self.bytes = self.now() - self.start

    @staticmethod
    def now():
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def config(host_bytes):
    selection = TopK(chunks=CHUNKS, sinks=SINKS, recent=RECENT)
    return PagerConfig(
        pool_tokens=2048, selection=selection, host_bytes=host_bytes, summary_bytes="64MiB"
    )


def bounds(reader, rows):
    """Most bytes of a restore alone, and of it and `rows` rows that attend behind the snapshot.

    A restore reads all that is neither summary nor payload, and the tail. A row may then have, in
    every layer, CHUNKS chunks for each kv head; sinks and recent window are common to all.
    """
    layout, sealed = reader.layout, reader.sealed_chunks
    payload = sealed * layout.chunk_bytes
    summaries = sealed * layout.layers * layout.kv_heads * reader.summary_page_bytes
    always = SINKS // layout.chunk_tokens + (RECENT + rows) // layout.chunk_tokens + 2
    chunks = rows * layout.layers * layout.kv_heads * CHUNKS + always
    restore = reader.file_bytes - payload - summaries + COUNTER_BYTES
    return restore, restore + summaries + chunks * layout.chunk_bytes


def check(path, restoring, attending, *, rows, counted, share):
    """The bounds hold and are below this share of the file; what we count is what was read."""
    reader = open_snapshot(path).reader
    restore_bound, bound = bounds(reader, rows)
    both = restoring.bytes + attending.bytes
    print(
        f"{len(reader.tokens)} tokens: restore read {restoring.bytes} bytes (at most "
        f"{restore_bound}), with the first answer {both} (at most {bound}), of {reader.file_bytes}"
    )
    assert restoring.bytes <= restore_bound <= reader.file_bytes / 40
    assert both <= bound <= share * reader.file_bytes
    metadata = restore_bound - reader.layout.chunk_bytes
    assert both - metadata <= counted <= both


@pytest.mark.parametrize(
    ("tokens", "share"), [(16 * K, 0.35), pytest.param(128 * K - 64, 0.08, marks=pytest.mark.deep)]
)
def test_a_restored_document_gives_the_same_answer_and_only_what_it_selects_is_read(
    tokens, share, tmp_path
):
    task = NeedleTask(seed=5)
    document = task.document(tokens + TAIL, 8, avoid=[(0, SINKS), (tokens - 2 * RECENT, tokens)])
    needle = 2
    prompt = np.concatenate([document.ids, task.query(document.keys[needle])])
    model = AutoModelForCausalLM.from_pretrained(shipped_model_path()).eval()
    path = tmp_path / "document.kvsnap"
    with Engine(model, config("512MiB")) as engine:
        session = engine.session()
        session.prefill(document.ids)
        session.save(path)
        session.prefill(prompt)
        expected = session.logits
        answer = session.generate(4).tokens.tolist()
    assert answer == task.answer(document.values[needle]).tolist()
    with Engine(model, config(0)) as engine:
        with Reads() as restoring:
            restored = engine.restore(path)
        with Reads() as attending:
            restored.prefill(prompt)
        counted = engine.stats()["snapshot_bytes_read"]
        assert restored.restored_tokens_consumed == len(document.ids)
        assert_same_bits(restored.logits, expected, "logits after the question")
        assert restored.generate(4).tokens.tolist() == answer
    rows = len(prompt) - len(document.ids)
    check(path, restoring, attending, rows=rows, counted=counted, share=share)


LAYOUT = Layout(layers=2, kv_heads=2, k_dim=64, v_dim=64)


def make_pager(host_bytes):
    return Pager(LAYOUT, config(host_bytes), rows=ROWS, fingerprint={"model": "none"}, threads=2)


def random_kv(tokens, generator):
    shape = (LAYOUT.layers, tokens, LAYOUT.kv_heads, LAYOUT.k_dim)
    return torch.randn(*shape, generator=generator), torch.randn(*shape, generator=generator)


def attend_once(pager, sequence):
    """One row behind the sequence attends at every layer; the outputs of all layers."""
    rows = [1] + [0] * (ROWS - 1)
    generator = torch.Generator().manual_seed(3)
    outputs = []
    with pager.begin(
        [sequence if row else None for row in rows],
        [sequence.length * row for row in rows],
        [9 * row for row in rows],
        [ROW_COMMIT if row else ROW_PADDING for row in rows],
    ) as forward:
        for layer in range(LAYOUT.layers):
            q = torch.randn(ROWS, 2 * LAYOUT.kv_heads, LAYOUT.k_dim, generator=generator)
            k, v = (kv[0] for kv in random_kv(ROWS, generator))
            outputs.append(forward.attend(layer, q, k, v, scaling=0.125))
    return torch.stack(outputs)


@pytest.mark.parametrize(
    ("tokens", "share"), [(16 * K, 0.15), pytest.param(256 * K, 0.05, marks=pytest.mark.deep)]
)
def test_a_restored_sequence_attends_to_the_same_bits_and_only_what_it_selects_is_read(
    tokens, share, tmp_path
):
    path = tmp_path / "injected.kvsnap"
    generator = torch.Generator().manual_seed(0)
    pager = make_pager((tokens + 2 * K) * LAYOUT.token_bytes)
    sequence = pager.sequence()
    for _ in range(tokens // K):
        ids = torch.randint(8, 1024, (K,), generator=generator)
        sequence.append(ids, *random_kv(K, generator), provenance="exact")
    sequence.append(list(range(8, 8 + TAIL)), *random_kv(TAIL, generator), provenance="exact")
    sequence.save(path)
    expected = attend_once(pager, sequence)
    pager.close()
    pager = make_pager(0)
    with Reads() as restoring:
        restored = pager.restore(pager.open_snapshot(path))
    with Reads() as attending:
        outputs = attend_once(pager, restored)
    counted = pager.stats()["snapshot_bytes_read"]
    pager.close()
    assert_same_bits(outputs, expected, "attention after a restore")
    check(path, restoring, attending, rows=1, counted=counted, share=share)
