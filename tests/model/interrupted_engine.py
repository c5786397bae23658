"""Operations of an engine that are interrupted, and what must hold after each interrupt."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from reference_models import build, make_engine, prompt

sys.path.append(str(Path(__file__).parents[1] / "python"))
from interrupts import Tried, at_every_instant, open_files
from kvpager import Engine
from kvpager._model.seam.attention import is_running
from kvpager._runtime.execution.recordings import WORTH
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
    kept: DirectoryStore
    folder: Path
    made: Any = None
    other: Engine | None = None


def prefill(s: Subject) -> None:
    s.session.prefill(MORE)


def append(s: Subject) -> None:
    s.session.append(MORE[70:])


def generate(s: Subject) -> None:
    for _ in s.session.generate(5, stream="tokens"):
        pass


def speculate(s: Subject) -> None:
    for _ in s.session.generate(
        5, speculate="prompt-lookup", temperature=0.7, seed=1, stream="tokens"
    ):
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
    s.session.generate(3).tokens.tolist()
    s.session.regenerate(3).tokens.tolist()


def fork(s: Subject) -> None:
    s.made = s.session.fork()
    s.made.generate(2).tokens.tolist()
    s.made.close()


def save(s: Subject) -> None:
    s.session.save("a", store=s.store)


def score(s: Subject) -> None:
    s.engine.score(OTHER)


def log_probabilities(s: Subject) -> None:
    (made,) = s.engine.logprobs([(OTHER[:50], OTHER[50:])])
    made.logprobs.sum().backward()


def logits(s: Subject) -> None:
    s.session.trim(50)
    assert s.session.logits is not None


def close(s: Subject) -> None:
    s.session.close()


def another_engine(s: Subject) -> None:
    s.other = make_engine(s.engine.model, small_rows="fixed", rows=16)


def open_and_close(s: Subject) -> None:
    with make_engine(s.engine.model, small_rows="fixed", rows=16) as engine:
        engine.session()


def reserve(s: Subject) -> None:
    s.session.transcript.reserve(MORE.size + 64)


def reserve_rows(s: Subject) -> None:
    s.session.sequence.reserve(MORE.size + 64)
    s.session.sequence.reserve(s.session.sequence.length)


def adopt(s: Subject) -> None:
    s.made = s.engine.session()
    s.made.prefill(IDS)


def evict_all(s: Subject) -> None:
    s.engine.pager.evict_all()


def restore_file(s: Subject) -> None:
    s.made = s.engine.restore(s.folder / "saved.kvsnap")


def restore_from_store(s: Subject) -> None:
    s.made = s.engine.restore("saved", store=s.kept)


def pin(s: Subject) -> None:
    with s.session.pin(0, 32):
        s.engine.pager.evict_all()
        s.session.append(MORE[70:75])


def save_file(s: Subject) -> None:
    s.session.save(s.folder / "other.kvsnap")


def save_beside(s: Subject) -> None:
    s.session.save("beside", store=s.store, wait=False).result()


def weights_changed(s: Subject) -> None:
    s.engine.weights_changed()


def cancel(s: Subject) -> None:
    with s.engine.scheduler() as scheduler:
        waiting = scheduler.submit(MORE, 3)
        request = scheduler.submit(OTHER, 3)
        scheduler.step()
        request.cancel()
        scheduler.step()
        waiting.cancel()


def record(s: Subject) -> None:
    """A forward of one row is recorded, as if none had been, and replayed."""
    graphs = s.engine.core.runner.graphs
    graphs._made.clear()
    graphs._seen[1] = WORTH
    s.session.generate(3, eos=None).tokens.tolist()


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
    log_probabilities,
    logits,
    close,
    assemble,
    reserve,
    reserve_rows,
    adopt,
    evict_all,
    restore_file,
    restore_from_store,
    pin,
    save_file,
    save_beside,
    cancel,
]
# These look at the whole model: seconds for one run with every return watched.
LONG = [another_engine, open_and_close, weights_changed, record]


def expected_logits() -> bytes:
    """What a session has in the end, of an engine that nobody has interrupted."""
    with make_engine(build("llama")) as engine, engine.session() as cold:
        cold.prefill(MORE)
        return cold.logits.numpy().tobytes()


def interrupt(
    operate: Callable[[Subject], None],
    engine: Engine,
    expected: bytes,
    folder: Path,
    most: int | None = None,
) -> Tried:
    """Interrupts an operation at `most` of its instants (None: all), as `at_every_instant` does."""
    store = DirectoryStore(folder / "store")
    kept = DirectoryStore(folder / "kept")
    with engine.session() as session:
        session.prefill(IDS)
        session.save("saved", store=kept)
        session.save(folder / "saved.kvsnap")
        session.generate(WORTH + 4, eos=None)  # steps of one row are replayed from now on

    def prepare() -> Subject:
        nonlocal engine
        if engine.closed:
            engine = make_engine(build("llama"))
        files = open_files()
        session = engine.session()
        session.prefill(IDS)
        return Subject(engine, session, store, files, kept, folder)

    def check(s: Subject, interrupted: bool) -> None:
        assert not is_running()
        if engine.closed:  # by weights_changed, which had forgotten and could not go on
            return
        assert not engine.core.turns.held_here
        assert not engine.pager.core.forward_running()
        engine.pager.check_invariants()
        for each in (s.store, s.kept):
            assert each.stats()["damaged"] == 0  # and its lock is to be had
        if s.session.closed:
            s.session = engine.session()
        s.session.update(MORE)
        assert s.session.logits.numpy().tobytes() == expected

    def finish(s: Subject) -> None:
        s.session.close()
        if s.made is not None:
            s.made.close()
            s.made = None
        if s.other is not None:
            s.other.close()
            s.other = None
        if engine.closed:
            return
        engine._saves.wait()
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
        left = [path for path in folder.rglob("*") if path.name.startswith(".kv")]
        assert not left
        (folder / "other.kvsnap").unlink(missing_ok=True)
        store.gc()

    return at_every_instant(prepare, operate, check, finish, most=most)
