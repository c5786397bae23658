"""Engines that are killed at random moments: what was reported stored is whole, or was evicted."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import time
from pathlib import Path

import pytest
import xxhash

from connectors.engines import WHOLE, Engines, kvpager_tier, prompt, save_model
from kvpager.stores.chunks import ChunkStore, ReadResult

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; make test-vllm"
)

KILLS = int(os.environ.get("KVPAGER_KILLS", "10"))
CHUNK_BYTES = 65536
PROMPTS = 40  # far more than an engine has time for


class Reports:
    """What an engine has written into a pipe: `given KEY DIGEST` and `stored KEY`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self.given: dict[bytes, str] = {}
        self.stored: set[bytes] = set()
        self._rest = b""

    def read(self) -> None:
        while True:
            try:
                data = os.read(self._pipe, 65536)
            except BlockingIOError:
                return
            if not data:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                what, key, *digest = line.decode().split()
                if what == "given":
                    self.given[bytes.fromhex(key)] = digest[0]
                else:
                    self.stored.add(bytes.fromhex(key))

    def close(self) -> None:
        os.close(self._pipe)


def test_what_was_reported_stored_before_a_kill_is_there_and_right(tmp_path):
    model = save_model(tmp_path / "model", 1)
    store = tmp_path / "store"
    tier = kvpager_tier(store)
    chance = random.Random(5)
    given: dict[bytes, str] = {}
    stored: set[bytes] = set()
    with Engines(tmp_path) as engines:
        cold = engines.ask(model, kvpager_tier(tmp_path / "cold"), prompt(0)).answer
        engines.ask(model, tier, prompt(0))
        for number in range(KILLS):
            steps = [{"prompts": [prompt(1 + number * PROMPTS + i)]} for i in range(PROMPTS)]
            reports = Reports(tmp_path / f"pipe-{number}")
            started = engines.start(model, tier, steps, report=str(reports.path))
            end = time.monotonic() + 600  # engines start in minutes on a busy machine
            while not reports.given and time.monotonic() < end:
                time.sleep(0.005)
                reports.read()
            assert reports.given, started.log.read_text()[-4000:]
            time.sleep(chance.uniform(0, 0.4))
            os.kill(started.pid, signal.SIGKILL)
            engines.reap(started)
            reports.read()
            reports.close()
            given |= reports.given
            stored |= reports.stored
        after = engines.ask(model, tier, prompt(0)).answer
        assert after.is_as(cold)
        assert after.cached == WHOLE
    assert len(stored) >= KILLS
    with ChunkStore(store, {}) as any_identity:
        assert any_identity.verify() == []
        ((identity, blocks, _),) = any_identity.identities()
    assert blocks >= len(stored)
    into = bytearray(CHUNK_BYTES)
    with ChunkStore(store, identity) as opened:
        for key in stored:
            assert opened.read([key], 0, [into]) == [ReadResult.HIT]
            assert xxhash.xxh3_64_hexdigest(into) == given[key]
