"""A pager against a dict: whatever is done to it, it holds what a plain dict would.

Keys, values and queries are functions of the tokens up to their position, so the model needs only
token ids, and attention outputs must be one value per history, however it was packed, shared,
evicted, saved, restored or retried after a fault.
"""

from __future__ import annotations

import errno
import gc
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvpager import _core
from kvpager.config import Dense, PagerConfig, TopK
from kvpager.errors import CapacityError, InvalidArgumentError, StorageError
from kvpager.pager import (
    ROW_COMMIT,
    ROW_GIVEN,
    ROW_PADDING,
    ROW_READ,
    Forward,
    Layout,
    Pager,
    Pin,
    Sequence,
    Span,
)

LAYERS, KV_HEADS, HEADS, DIM, C, M = 2, 1, 2, 16, 16, 16
LAYOUT = Layout(LAYERS, KV_HEADS, DIM, DIM, chunk_tokens=C)
CHUNK = LAYOUT.chunk_bytes
POINTS = (
    "host.write",
    "disk.write",
    "disk.read",
    "snapshot.write",
    "snapshot.fsync",
    "snapshot.rename",
    "snapshot.read",
)
# Two long texts with a common start: sequences share prefixes, part, and meet again.
TEXTS = [[(7 * i + i // 40) % 50 for i in range(400)] for _ in range(2)]
TEXTS[1][100:] = [token + 1 for token in TEXTS[1][100:]]


@dataclass
class Modelled:
    """What one sequence must hold."""

    handle: Sequence
    salt: str
    tokens: list[int] = field(default_factory=list)
    pins: list[Pin] = field(default_factory=list)
    open: bool = True


class History:
    """q, k and v of a position, from a number that stands for all tokens up to it."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}
        self._rows: dict[int, np.ndarray] = {}

    def numbers(self, tokens: list[int]) -> list[int]:
        h, result = 0, []
        for token in tokens:
            h = self._numbers.setdefault((h, token), len(self._numbers) + 1)
            result.append(h)
        return result

    def row(self, number: int) -> np.ndarray:
        """[layers, HEADS + 2 * KV_HEADS, DIM]: q, then k, then v."""
        if number not in self._rows:
            generator = np.random.default_rng(number)
            shape = (LAYERS, HEADS + 2 * KV_HEADS, DIM)
            self._rows[number] = generator.standard_normal(shape, dtype=np.float32)
        return self._rows[number]


class PagerAgainstDict(RuleBasedStateMachine):
    sequences: Bundle[Modelled] = Bundle("sequences")
    saved: Bundle[tuple[Path, str, list[int]]] = Bundle("saved")

    @initialize(
        target=sequences,
        pool=st.integers(4, 10),
        host=st.sampled_from([0, 2, 6, 40]),
        disk=st.sampled_from([0, 0, 4, 40]),
        policy=st.sampled_from(["qk", "lru"]),
        recall=st.sampled_from([0, 4]),
        selection=st.sampled_from([Dense(), TopK(chunks=2, sinks=C, recent=C)]),
        window=st.sampled_from([0, 0, 40]),
        rewind=st.sampled_from([0, 40]),
        seed=st.integers(1, 1000),
    )
    def make_pager(
        self,
        pool: int,
        host: int,
        disk: int,
        policy: str,
        recall: int,
        selection: Any,
        window: int,
        rewind: int,
        seed: int,
    ) -> Any:
        self.folder = tempfile.TemporaryDirectory(prefix="kvpager-machine-")
        config = PagerConfig(
            pool * C,
            chunk_tokens=C,
            selection=selection,
            host_bytes=host * CHUNK,
            disk_bytes=disk * CHUNK,
            disk_path=self.folder.name if disk else None,
            summary_bytes=2**20,
            policy=policy,
            recall_chunks=recall,
            rewind_tokens=rewind,
            debug_shuffle_seed=seed,
            debug_poison=True,
        )
        gc.collect()  # pagers of earlier examples, which frames of their errors may have kept
        mapped = _core.total_mapped_bytes()
        self.window = window
        self.pager = Pager(
            LAYOUT, config, rows=M, window=window, fingerprint={"model": "test"}, threads=1
        )
        self.mapped = _core.total_mapped_bytes() - mapped
        self.mapped_before = mapped
        self.history = History()
        self.dense = selection == Dense()
        self.outputs: dict[tuple[int, bool], bytes] = {}
        self.live: list[Modelled] = []
        self.fault: tuple[str, int] | None = None
        self.files = 0
        return multiple(self.create(""), self.create("tenant"))

    def attempt(self, step: Callable[[], Any]) -> bool:
        """Whether `step` got through. It may find no room or meet the armed fault, no more."""
        if self.fault is not None:
            _core.arm_fault(*self.fault, errno.EIO)
        try:
            step()
        except CapacityError:
            return False
        except StorageError:
            assert self.fault is not None
            return False
        finally:
            _core.disarm_faults()
            self.fault = None
        return True

    def add(self, handle: Sequence, salt: str, tokens: list[int]) -> Modelled:
        modelled = Modelled(handle, salt, tokens)
        self.live.append(modelled)
        return modelled

    @rule(point=st.sampled_from(POINTS), after=st.integers(0, 6))
    def arm_a_fault(self, point: str, after: int) -> None:
        self.fault = (point, after)

    def create(self, salt: str) -> Modelled:
        return self.add(self.pager.sequence(salt=salt), salt, [])

    @rule(target=sequences, salt=st.sampled_from(["", "", "tenant"]))
    def create_another(self, salt: str) -> Modelled:
        return self.create(salt)

    @rule(
        a=sequences,
        b=sequences,
        text=st.integers(0, 1),
        seed=st.integers(0, 2**16),
        ending=st.sampled_from(["commit", "commit", "accept some", "abort"]),
        provenance=st.sampled_from(["exact", "exact", "decode"]),
        attend=st.booleans(),
        gifts=st.sampled_from([0.0, 0.07]),
    )
    def forward(
        self,
        a: Modelled,
        b: Modelled,
        text: int,
        seed: int,
        ending: str,
        provenance: str,
        attend: bool,
        gifts: float,
    ) -> None:
        """Rows of up to two sequences in any order, among padding, read-only rows and gifts."""
        owners = [s for s in ([a] if a is b else [a, b]) if s.open]
        if owners:
            dice = random.Random(seed)
            self.run_forward(dice, owners, text, ending, provenance, attend, gifts=gifts)

    @rule(a=sequences, text=st.integers(0, 1), forwards=st.integers(1, 8))
    def prefill(self, a: Modelled, text: int, forwards: int) -> None:
        for _ in range(forwards):
            if a.open:
                self.run_forward(random.Random(0), [a], text, "commit", "exact", True, full=True)

    @rule(s=sequences, text=st.integers(0, 1), count=st.integers(1, 60))
    def append(self, s: Modelled, text: int, count: int) -> None:
        start = len(s.tokens)
        more = TEXTS[text][start : min(start + count, 300)]
        if not s.open or not more:
            return
        numbers = self.history.numbers(s.tokens + more)[start:]
        _, k, v = np.split(
            np.stack([self.history.row(n) for n in numbers], 1), (HEADS, HEADS + KV_HEADS), axis=2
        )
        self.attempt(lambda: s.handle.append(more, k, v, provenance="exact"))
        added = s.handle.length - start  # a window may have let go of what an undo would take
        assert added in (0, len(more)) or self.window
        s.tokens += more[:added]

    def run_forward(
        self,
        dice: random.Random,
        owners: list[Modelled],
        text: int,
        ending: str,
        provenance: str,
        attend: bool,
        full: bool = False,
        gifts: float = 0.0,
    ) -> None:
        grown = {id(s): list(s.tokens) for s in owners}
        drafted = {id(s): 0 for s in owners}
        rows: list[tuple[Modelled | None, int, int, int]] = []
        given: list[tuple[Modelled, int, int]] = []
        spans: list[Span] = []
        for _ in range(M):
            s = dice.choice(owners)
            if dice.random() < gifts:  # which takes no row
                first, count = len(grown[id(s)]), dice.randint(1, 2 * C)
                for position in range(first, min(first + count, 300)):
                    given.append((s, position, TEXTS[text][position]))
                    spans.append((s.handle, position, 1, ROW_GIVEN))
                    grown[id(s)].append(given[-1][2])
                    drafted[id(s)] += 1
            what = 0.0 if full else dice.random()
            tokens = grown[id(s)]
            if what < 0.6 and len(tokens) < 300:
                # Mostly what the text says, sometimes a draft that goes another way.
                token = TEXTS[text][len(tokens)] + (50 if not full and dice.random() < 0.02 else 0)
                rows.append((s, len(tokens), token, ROW_COMMIT))
                tokens.append(token)
                drafted[id(s)] += 1
            elif what < 0.75 and s.tokens:
                first = max(0, s.handle.earliest_trim - 1)
                rows.append((s, dice.randrange(first, len(s.tokens)), 0, ROW_READ))
            else:
                rows.append((None, 0, 0, ROW_PADDING))
            owner, position, _, kind = rows[-1]
            spans.append((owner.handle if owner else None, position, 1, kind))
        if not given and all(row[0] is None for row in rows):
            return
        numbers = {key: self.history.numbers(tokens) for key, tokens in grown.items()}
        accepted = {
            id(s): drafted[id(s)] if ending == "commit" else dice.randint(0, drafted[id(s)])
            for s in owners
        }

        def begin() -> Forward:
            if given:
                ids = [token for _, _, token in given]
                tokens = [token for _, _, token, _ in rows]
                return self.pager.begin_spans(spans, tokens, given=ids, dense=True)
            return self.pager.begin(
                [s.handle if s else None for s, *_ in rows],
                [position for _, position, _, _ in rows],
                [token for _, _, token, _ in rows],
                [kind for *_, kind in rows],
            )

        def step() -> None:
            with begin() as forward:
                if given:
                    all_rows = [self.history.row(numbers[id(s)][at]) for s, at, _ in given]
                    _, k, v = np.split(np.stack(all_rows, 1), (HEADS, HEADS + KV_HEADS), axis=2)
                    forward.give(k, v)
                outputs = np.zeros((LAYERS, M, HEADS, DIM), dtype=np.float32)
                for layer in range(LAYERS):
                    if ending == "abort" and layer == dice.randint(0, LAYERS):
                        return
                    qkv = np.full((M, HEADS + 2 * KV_HEADS, DIM), np.nan, dtype=np.float32)
                    for i, (s, position, _, kind) in enumerate(rows):
                        if s is None:
                            continue
                        qkv[i] = self.history.row(numbers[id(s)][position])[layer]
                        if kind == ROW_READ:
                            qkv[i, HEADS:] = np.nan
                    q, k, v = np.split(qkv, (HEADS, HEADS + KV_HEADS), axis=1)
                    if attend:
                        outputs[layer] = forward.attend(
                            layer, q, k, v, scaling=0.25, window=self.window or None
                        )
                    else:
                        forward.write(layer, k, v)
                if ending == "abort":
                    return
                if attend:
                    for i, (s, position, _, _) in enumerate(rows):
                        bits = outputs[:, i].tobytes()
                        if s is None:
                            assert not any(bits)
                            continue
                        number = numbers[id(s)][position]
                        key = (number, self.dense or bool(given))
                        assert self.outputs.setdefault(key, bits) == bits
                taking_part = {id(r[0]) for r in [*rows, *given]}
                named = {s.handle: accepted[id(s)] for s in owners if id(s) in taking_part}
                forward.commit(None if ending == "commit" else named, provenance=provenance)

        if self.attempt(step) and ending != "abort":
            for s in owners:
                s.tokens = grown[id(s)][: len(s.tokens) + accepted[id(s)]]

    @rule(target=sequences, parent=sequences)
    def fork(self, parent: Modelled) -> Any:
        made: list[Sequence] = []
        if parent.open and self.attempt(lambda: made.append(parent.handle.fork())):
            return self.add(made[0], parent.salt, list(parent.tokens))
        return multiple()

    @rule(s=sequences, share=st.floats(0, 1))
    def trim(self, s: Modelled, share: float) -> None:
        position = round(share * len(s.tokens))
        if not s.open:
            return
        if 0 < position < s.handle.earliest_trim:
            self.refused(lambda: s.handle.trim(position))
        elif self.attempt(lambda: s.handle.trim(position)):
            del s.tokens[position:]

    def refused(self, step: Callable[[], Any]) -> None:
        """`step` needs what a window has let go."""
        with pytest.raises(InvalidArgumentError, match="were let go"):
            step()

    @rule(
        target=sequences,
        text=st.integers(0, 1),
        count=st.integers(0, 300),
        salt=st.sampled_from(["", "tenant"]),
    )
    def adopt(self, text: int, count: int, salt: str) -> Modelled:
        handle = self.pager.sequence(salt=salt)
        adopted = handle.adopt_prefix(TEXTS[text][:count])
        assert adopted % C == 0
        assert adopted <= count
        return self.add(handle, salt, TEXTS[text][:adopted])

    @rule(s=sequences, total=st.integers(0, 400))
    def reserve(self, s: Modelled, total: int) -> None:
        if s.open and total >= len(s.tokens):
            self.attempt(lambda: s.handle.reserve(total))

    @rule(s=sequences, start=st.floats(0, 1), count=st.integers(1, 60))
    def pin(self, s: Modelled, start: float, count: int) -> None:
        if not s.open or not s.tokens:
            return
        first = min(int(start * len(s.tokens)), len(s.tokens) - 1)
        stop = min(first + count, len(s.tokens))
        if first < s.handle.released:
            self.refused(lambda: s.handle.pin(first, stop))
        elif self.attempt(lambda: s.pins.append(s.handle.pin(first, stop))):
            for info in s.handle.ledger()[first // C : -(-stop // C)]:
                assert info.resident
                assert info.pins > 0

    @rule(s=sequences)
    def unpin(self, s: Modelled) -> None:
        if s.pins:
            s.pins.pop().release()

    @rule()
    def evict_all(self) -> None:
        self.pager.evict_all()
        chunks = [info for s in self.live for info in s.handle.ledger()]
        pinned = {info.block for info in chunks if info.pins}
        for info in chunks:
            if info.on_host or info.on_disk or info.in_snapshot:
                assert info.resident == (info.block in pinned)

    @rule(target=saved, s=sequences)
    def save(self, s: Modelled) -> Any:
        if not s.open or not s.tokens:
            return multiple()
        self.files += 1
        path = Path(self.folder.name) / f"{self.files}.kvp"
        if self.attempt(lambda: s.handle.save(path, session={"n": self.files})):
            return path, s.salt, list(s.tokens)
        return multiple()

    @rule(target=sequences, snapshot=saved)
    def restore(self, snapshot: tuple[Path, str, list[int]]) -> Any:
        path, salt, tokens = snapshot
        made: list[Sequence] = []

        def step() -> None:
            made.append(self.pager.restore(self.pager.open_snapshot(path), salt=salt))

        if self.attempt(step):
            return self.add(made[0], salt, list(tokens))
        return multiple()

    @precondition(lambda self: len(self.live) > 1)
    @rule(s=consumes(sequences))
    def close(self, s: Modelled) -> None:
        s.handle.close()
        s.open = False
        self.live.remove(s)
        try:
            _ = s.handle.length
        except InvalidArgumentError:
            return
        raise AssertionError("a closed sequence still answers")

    @rule(
        s=sequences,
        layer=st.integers(0, LAYERS - 1),
        start=st.floats(0, 1),
        count=st.integers(1, 48),
    )
    def read(self, s: Modelled, layer: int, start: float, count: int) -> None:
        if not s.open or not s.tokens:
            return
        first = min(int(start * len(s.tokens)), len(s.tokens) - 1)
        stop = min(first + count, len(s.tokens))
        if first < s.handle.released:
            self.refused(lambda: s.handle.read_kv(layer, first, stop))
            return
        result: list[Any] = []
        if not self.attempt(lambda: result.extend(s.handle.read_kv(layer, first, stop))):
            return
        rows = [self.history.row(n)[layer] for n in self.history.numbers(s.tokens)[first:stop]]
        k = np.stack([row[HEADS : HEADS + KV_HEADS] for row in rows])
        v = np.stack([row[HEADS + KV_HEADS :] for row in rows])
        assert result[0].numpy().tobytes() == k.tobytes()
        assert result[1].numpy().tobytes() == v.tobytes()

    @invariant()
    def pager_is_sound_and_holds_what_the_dict_holds(self) -> None:
        if not hasattr(self, "pager"):
            return
        self.pager.check_invariants()
        stats = self.pager.stats()
        assert stats["resident_bytes"] <= stats["pool_bytes"]
        assert stats["bytes_paged_out"] == stats["chunks_spilled"] * CHUNK
        assert stats["bytes_paged_in"] == stats["chunks_recalled"] * CHUNK
        assert stats["sequences"] == len(self.live)
        # Pagers of earlier examples may be freed meanwhile; this one never takes more.
        assert _core.total_mapped_bytes() <= self.mapped_before + self.mapped
        assert self.mapped == sum(
            stats[f"{what}_bytes"] for what in ("pool", "host", "summary", "staging")
        )
        for s in self.live:
            assert s.handle.length == len(s.tokens)
            assert s.handle.tokens.tolist() == s.tokens

    def teardown(self) -> None:
        _core.disarm_faults()
        if not hasattr(self, "pager"):
            return
        for s in list(self.live):
            held = s.handle.released
            for layer in range(LAYERS):
                k, _ = s.handle.read_kv(layer, held, len(s.tokens))
                numbers = self.history.numbers(s.tokens)[held:]
                rows = [self.history.row(n)[layer][HEADS : HEADS + KV_HEADS] for n in numbers]
                assert k.numpy().tobytes() == b"".join(row.tobytes() for row in rows)
            s.handle.close()
        stats = self.pager.stats()
        assert stats["open_blocks"] == stats["pinned_blocks"] == stats["reserved_chunks"] == 0
        assert stats["records"] == stats["cached_records"]
        self.pager.check_invariants()
        self.pager.close()
        self.folder.cleanup()


TestPagerAgainstDict = PagerAgainstDict.TestCase
TestPagerAgainstDict.settings = settings(
    settings.default,
    max_examples=max(1, settings.default.max_examples * 3 // 4),
    stateful_step_count=50,
)
