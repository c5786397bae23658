"""No instant at which an operation of an engine may be interrupted leaves anything behind."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference_models import build, make_engine, prompt

sys.path.append(str(Path(__file__).parents[1] / "python"))
from interrupts import at_every_instant, open_files

from kvpager import Engine
from kvpager.stores import DirectoryStore

IDS = prompt(70)
MORE = np.concatenate([IDS, prompt(20, seed=1)])
OTHER = np.concatenate([IDS[:41], prompt(30, seed=2)])


@dataclass
class Subject:
    """A session of an engine that all instants share, and what it has to give in the end."""

    engine: Engine
    session: Any
    store: DirectoryStore
    files: set[str]
    made: Any = None


def prefill(s: Subject) -> None:
    s.session.prefill(MORE)


def append(s: Subject) -> None:
    s.session.append(MORE[70:])


def generate(s: Subject) -> None:
    for _ in s.session.generate(5):
        pass


def speculate(s: Subject) -> None:
    for _ in s.session.generate(5, speculate="prompt-lookup", temperature=0.7, seed=1):
        pass


def generate_many(s: Subject) -> None:
    s.made = s.engine.session()
    s.made.prefill(OTHER)
    for _ in s.engine.generate_many([s.session, s.made], 3):
        pass


def run(s: Subject) -> None:
    s.engine.run([OTHER, MORE], 3)


def step(s: Subject) -> None:
    with s.engine.scheduler() as scheduler:
        scheduler.submit(OTHER, 3)
        scheduler.submit(s.session, 3)
        while not scheduler.idle:
            scheduler.step()


def trim(s: Subject) -> None:
    s.session.trim(39)


def update(s: Subject) -> None:
    s.session.update(OTHER)


def regenerate(s: Subject) -> None:
    list(s.session.generate(3))
    list(s.session.regenerate(3))


def fork(s: Subject) -> None:
    s.made = s.session.fork()
    list(s.made.generate(2))
    s.made.close()


def save(s: Subject) -> None:
    s.session.save("a", store=s.store)


def score(s: Subject) -> None:
    s.engine.score(OTHER)


def logits(s: Subject) -> None:
    s.session.trim(50)
    assert s.session.logits is not None


def close(s: Subject) -> None:
    s.session.close()


def assemble(s: Subject) -> None:
    s.engine.cache_segment(OTHER[:40], name="part")
    s.made = s.engine.assemble([IDS[:20], "part", IDS[:7]])


OPERATIONS = [
    prefill,
    append,
    generate,
    speculate,
    generate_many,
    run,
    step,
    trim,
    update,
    regenerate,
    fork,
    save,
    score,
    logits,
    close,
    assemble,
]


@pytest.fixture(scope="module")
def engine():
    with make_engine(build("llama")) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected() -> bytes:
    with make_engine(build("llama")) as engine, engine.session() as cold:
        cold.prefill(MORE)
        return cold.logits.numpy().tobytes()


@pytest.mark.parametrize("operate", OPERATIONS, ids=lambda operate: operate.__name__)
def test_an_interrupt_at_any_return_leaves_nothing_behind(operate, engine, expected, tmp_path):
    store = DirectoryStore(tmp_path / "store")

    def prepare() -> Subject:
        files = open_files()
        session = engine.session()
        session.prefill(IDS)
        return Subject(engine, session, store, files)

    def check(s: Subject, interrupted: bool) -> None:
        assert not engine.pager.core.forward_running()
        engine.pager.check_invariants()
        if s.session.closed:
            s.session = engine.session()
        s.session.update(MORE)
        assert s.session.logits.numpy().tobytes() == expected

    def finish(s: Subject) -> None:
        s.session.close()
        if s.made is not None:
            s.made.close()
            s.made = None
        for name in list(engine.segments):
            engine.segments.remove(name)
        gc.collect()
        stats = engine.stats()
        assert stats["sequences"] == 0
        assert stats["open_blocks"] == 0
        assert stats["reserved_chunks"] == 0
        assert stats["pinned_blocks"] == 0
        engine.pager.check_invariants()
        assert open_files() <= s.files
        left = [path for path in (tmp_path / "store").rglob("*") if path.name.startswith(".kv")]
        assert not left
        store.gc()

    assert at_every_instant(prepare, operate, check, finish, most=4) >= 1
