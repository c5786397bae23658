"""Sound snapshot files of every kind, made by the pager, and the pager that watches."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvpager import _core
from kvpager.config import PagerConfig
from kvpager.pager import Layout, Pager

# It takes address space by the terabyte, so that none can be rationed.
UNDER_ADDRESS_SANITIZER = "libasan" in os.environ.get("LD_PRELOAD", "")

LAYERS, KV_HEADS, DIM, C = 2, 1, 16, 16
LAYOUT = Layout(LAYERS, KV_HEADS, DIM, DIM, chunk_tokens=C, k_dtype="float32", v_dtype="bfloat16")
FINGERPRINT = {"model": "specimen", "numerics": {"rows": C}}
TOKENS = 3 * C + 5  # three sealed chunks and a tail
LENGTHS_OF_STORE = (2 * C + 3, 5 * C)  # the longer begins as the shorter
PACK_IDS = ("00112233445566778899aabbccddeeff", "ffeeddccbbaa99887766554433221100")
KINDS = ("self-contained", "pack", "manifest")


def make_pager(**options):
    settings = {"chunk_tokens": C, "host_bytes": "1MiB", "summary_bytes": 2**20}
    pool = options.pop("pool_chunks", 12)
    return Pager(
        LAYOUT,
        PagerConfig(pool * C, **{**settings, **options}),
        rows=C,
        fingerprint=FINGERPRINT,
        threads=1,
    )


def fill(sequence, count, seed=0):
    """Appends `count` tokens; they and their keys and values begin as those of a smaller count."""
    tokens = np.random.default_rng(seed).integers(0, 1000, count).astype(np.int32)
    shape = (count, 2, LAYERS, KV_HEADS, DIM)
    rows = np.random.default_rng(seed + 1).standard_normal(shape, dtype=np.float32)
    k, v = np.ascontiguousarray(rows.transpose(1, 2, 0, 3, 4))
    sequence.append(tokens, k, v, provenance="exact")
    return sequence


def bits(sequence):
    """Everything a sequence holds, as a digest."""
    digest = hashlib.sha256(sequence.tokens.tobytes())
    for layer in range(LAYERS):
        for tensor in sequence.read_kv(layer, 0, sequence.length):
            digest.update(bytes_of(tensor))
    return digest.hexdigest()


def listing(folder):
    """Names in a folder, hidden ones too."""
    return sorted(path.name for path in Path(folder).iterdir())


def open_descriptors():
    """Of this process; what tests before have left to the collector is collected first."""
    gc.collect()
    return len(listing("/proc/self/fd"))


def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@dataclass
class Specimens:
    """A folder laid out as a directory store, and the self-contained file of the same content."""

    folder: Path

    @property
    def single(self):
        return self.folder / "single.kvsnap"

    @property
    def other(self):
        """A sound self-contained file of another content under the same fingerprint."""
        return self.folder / "other.kvsnap"

    @property
    def manifest(self):
        return self.folder / "snapshots" / "turn.kvsnap"

    def pack(self, n=0):
        return self.folder / "packs" / f"{PACK_IDS[n]}.kvsnap"

    def path(self, kind):
        """The file of a kind; a pack is opened by its store, too."""
        return {"self-contained": self.single, "pack": self.pack(), "manifest": self.manifest}[kind]

    def copy(self, folder):
        return Specimens(Path(shutil.copytree(self.folder, folder / "specimens")))


def write_single(path, content, fingerprint, session='{"n":1}', which=None):
    chunks = list(range(content.chunks)) if which is None else which
    writer = _core.SnapshotWriter(str(path), content.layout)
    writer.write_content(content, chunks, fingerprint, session)
    checksums = writer.summary_checksums
    writer.publish()
    return checksums


def make_specimens(folder):
    """Pack 0 holds chunks 0 and 2, pack 1 chunk 1; the manifest has the tail."""
    made = Specimens(Path(folder))
    (made.folder / "packs").mkdir()
    (made.folder / "snapshots").mkdir()
    pager = make_pager()
    sequence = fill(pager.sequence(), TOKENS)
    content = pager.core.freeze(sequence.uid)
    fingerprint = pager.fingerprint_json
    write_single(made.single, content, fingerprint)
    first = write_single(made.pack(0), content, fingerprint, '{"pack":true}', [0, 2])
    second = write_single(made.pack(1), content, fingerprint, '{"pack":true}', [1])
    writer = _core.SnapshotWriter(str(made.manifest), content.layout)
    places = np.array([[0, 0], [1, 0], [0, 1]], dtype=np.uint32)
    checksums = np.array([first[0], second[0], first[1]], dtype=np.uint64)
    packs = [(PACK_IDS[0], 2), (PACK_IDS[1], 1)]
    writer.write_manifest(content, packs, places, checksums, fingerprint, '{"n":1}')
    writer.publish()
    sequence = fill(pager.sequence(), TOKENS, seed=1)
    another = pager.core.freeze(sequence.uid)
    write_single(made.other, another, fingerprint)
    del content, another
    return made


class Bystander:
    """A pager with a sequence of its own; `state` is all that a failure must not change."""

    # Counters of work done and time spent; everything else says what the pager holds.
    WORK = ("snapshot_bytes_read", "slices_streamed", "forwards", "aborted_forwards")

    def __init__(self):
        self.pager = make_pager()
        self.sequence = fill(self.pager.sequence(), TOKENS, seed=7)

    def state(self):
        self.pager.check_invariants()
        stats = self.pager.stats()
        held = {k: v for k, v in stats.items() if k not in self.WORK and "seconds" not in k}
        ledger = [
            {n: str(getattr(i, n)) for n in dir(i) if not n.startswith("_")}
            for i in self.sequence.ledger()
        ]
        return held, ledger, self.sequence.tokens.tolist()

    def bits(self):
        return bits(self.sequence)

    def close(self):
        self.sequence.close()
        self.pager.check_invariants()
        self.pager.close()
