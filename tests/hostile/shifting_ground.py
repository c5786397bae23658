"""A process under whose feet the snapshot it reads changes; prints what its reads gave.

Usage: shifting_ground.py pager|engine FOLDER

Run apart because what it must show is that no signal comes: its exit status is 0.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
from anatomy import regions
from specimens import DIM, LAYERS, C, bits, fill, make_pager

from kvpager.config import TopK
from kvpager.errors import CorruptSnapshotError, StorageError


def spans(path):
    """Where each slice of the payload lies: {(chunk, layer): (start, stop)}."""
    out = {}
    for name, start, stop in regions(path.read_bytes()):
        if name.startswith("payload["):
            n = int(name[8:-1])
            out[n // LAYERS, n % LAYERS] = (start, stop)
    return out


def readable(session, chunks, kept):
    """{"chunk,layer": "same" | "other" | error}: what reading each slice gives."""
    out = {}
    for c in range(chunks):
        for layer in range(LAYERS):
            try:
                got = session.read_kv(layer, c * C, (c + 1) * C)
            except (CorruptSnapshotError, StorageError) as error:
                out[f"{c},{layer}"] = type(error).__name__
                continue
            same = all(a.equal(b) for a, b in zip(got, kept[c, layer]))
            out[f"{c},{layer}"] = "same" if same else "other"
    return out


def shrink(path, at):
    os.truncate(path, at[2, 0][0] + 100)


def empty(path, at):
    os.truncate(path, 0)


def overwrite(path, at):
    """Chunk 1 whole, and a byte of chunk 3's last layer."""
    with path.open("r+b") as file:
        file.seek(at[1, 0][0])
        file.write(b"\xa5" * (at[1, LAYERS - 1][1] - at[1, 0][0]))
        file.seek(at[3, LAYERS - 1][0] + 7)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def replace(path, at):
    path.with_name("new").write_bytes(b"something else")
    path.with_name("new").replace(path)


def unlink(path, at):
    path.unlink()


def rewrite(path, at):
    """The same bytes again: an editor or a copy that touched nothing."""
    path.write_bytes(path.read_bytes())


def grow(path, at):
    with path.open("ab") as file:
        file.write(bytes(1 << 20))


CHANGES = (shrink, empty, overwrite, replace, unlink, rewrite, grow)


def with_pager(folder):
    chunks = 5
    saver = make_pager()
    sequence = fill(saver.sequence(), chunks * C + 3, seed=2)
    kept = {
        (c, layer): [t.clone() for t in sequence.read_kv(layer, c * C, (c + 1) * C)]
        for c in range(chunks)
        for layer in range(LAYERS)
    }
    results = {}
    for change in CHANGES:
        path = folder / f"{change.__name__}.kvsnap"
        sequence.save(path)
        pager = make_pager(selection=TopK(chunks=1, sinks=C, recent=C))
        bystander = fill(pager.sequence(), 2 * C, seed=3)
        before = bits(bystander)
        session = pager.restore(pager.open_snapshot(path))
        first = readable(session, 1, kept)  # one chunk was needed already
        change(path, spans(path))
        after = readable(session, chunks, kept)
        pager.check_invariants()
        # Summaries are made again from chunks; where both are gone, who selects is told.
        try:
            session.select(0, np.ones((2, DIM), dtype=np.float32))
            selected = "yes"
        except CorruptSnapshotError as error:
            selected = type(error).__name__
        length = session.length
        session.close()
        fill(bystander, C, seed=5)
        pager.check_invariants()
        bystander.trim(2 * C)
        results[change.__name__] = {
            "first": first,
            "after": after,
            "selected": selected,
            "length": length,
            "bystander": bits(bystander) == before,
        }
        pager.close()
    return results


def with_engine(folder):
    """A conversation of a real model goes on where the damage was, if it computes it again."""
    import torch
    import transformers

    from kvpager import Engine

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    prompt = [3 + i % 60 for i in range(5 * C + 3)]
    results = {}
    for change in CHANGES:
        path = folder / f"{change.__name__}.kvsnap"
        with Engine(model, pool_tokens=16 * C, rows=C, chunk_tokens=C, host_bytes="8MiB") as engine:
            session = engine.session()
            session.prefill(prompt)
            session.save(path)
            expected = session.generate(4, eos=None).tokens.tolist()
        with Engine(model, pool_tokens=16 * C, rows=C, chunk_tokens=C, host_bytes="8MiB") as engine:
            session = engine.restore(path)
            change(path, spans(path))
            try:
                got = session.generate(4, eos=None).tokens.tolist()
                outcome = "same" if got == expected else "other"
            except (CorruptSnapshotError, StorageError) as error:
                outcome = type(error).__name__
            kept = session.tokens.tolist()[: len(prompt)] == prompt
            fresh = engine.session()
            fresh.prefill(prompt)
            outcome_fresh = fresh.generate(4, eos=None).tokens.tolist() == expected
            engine.pager.check_invariants()
        results[change.__name__] = {"outcome": outcome, "tokens": kept, "fresh": outcome_fresh}
    return results


if __name__ == "__main__":
    level, folder = sys.argv[1:]
    print(json.dumps({"pager": with_pager, "engine": with_engine}[level](Path(folder))))
