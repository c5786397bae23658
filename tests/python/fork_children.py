"""Programs that fork while they have a pager or an engine.

    python fork_children.py FOLDER

runs each in a process of its own, forked before anything was computed, and writes to FOLDER/results
what became of each: "sound" where all is well.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvpager import Engine, _core
from kvpager.config import Dense, PagerConfig
from kvpager.errors import InvalidArgumentError
from kvpager.pager import ROW_COMMIT, Layout, Pager, Sequence
from kvpager.stores import DirectoryStore

C, M, DIM, LENGTH = 16, 16, 16, 20 * 16 + 3
LAYOUT = Layout(2, 1, DIM, DIM, chunk_tokens=C)
RANDOM = np.random.default_rng(3)
TOKENS = RANDOM.integers(0, 1000, LENGTH, dtype=np.int32)
K, V = RANDOM.standard_normal((2, 2, LENGTH, 1, DIM), dtype=np.float32)


def in_child(program: Callable[[], object], *, leave: Callable[[int], None] = os._exit) -> None:
    """Runs a program in a forked child, which ends by `leave`; the child must end, and well."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # what hangs is killed, and shows
        status = 1
        try:
            program()
            status = 0
        except BaseException as error:
            print(f"child: {error!r}", file=sys.stderr, flush=True)
        leave(status)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with {status}"


def refused(use: Callable[[], object]) -> None:
    try:
        use()
    except InvalidArgumentError as error:
        assert "forked from it" in str(error), error  # noqa: PT017
    else:
        raise AssertionError("was accepted in a forked child")


def paged(folder: Path) -> tuple[Pager, Sequence]:
    """A pager with four threads whose chunks are mostly in its spill file."""
    config = PagerConfig(
        4 * C,
        chunk_tokens=C,
        selection=Dense(),
        host_bytes=2 * LAYOUT.chunk_bytes,
        disk_bytes=64 * LAYOUT.chunk_bytes,
        disk_path=str(folder),
    )
    pager = Pager(LAYOUT, config, rows=M, threads=4)
    sequence = pager.sequence()
    for at in range(0, LENGTH, C):
        part = slice(at, min(at + C, LENGTH))
        sequence.append(TOKENS[part], K[:, part], V[:, part], provenance="exact")
    pager.evict_all()
    assert pager.stats()["disk_bytes_used"] > 10 * LAYOUT.chunk_bytes
    return pager, sequence


def holds(sequence: Sequence) -> None:
    for layer in range(2):
        k, v = sequence.read_kv(layer, 0, LENGTH)
        assert k.numpy().tobytes() == K[layer].tobytes()
        assert v.numpy().tobytes() == V[layer].tobytes()


def pager_in_child(folder: Path) -> None:
    """Every call is refused; the parent's spill file and chunks are as they were."""
    pager, sequence = paged(folder)
    pin = sequence.pin(0, C)
    forward = pager.begin_spans([(sequence, LENGTH, 1, ROW_COMMIT)], TOKENS[:1])

    def use() -> None:
        part = slice(0, C)
        rows = np.zeros((1, 1, DIM), dtype=np.float32)
        for call in (
            pager.sequence,
            lambda: sequence.length,
            lambda: sequence.tokens,
            lambda: sequence.append(TOKENS[part], K[:, part], V[:, part]),
            lambda: sequence.read_kv(0, 0, C),
            lambda: sequence.trim(0),
            lambda: sequence.fork(),
            lambda: sequence.pin(0, C),
            lambda: sequence.reserve(LENGTH + 1),
            lambda: sequence.adopt_prefix(TOKENS),
            lambda: sequence.select(0, rows[0]),
            lambda: sequence.freeze(),
            lambda: sequence.save(folder / "child.kvsnap"),
            lambda: sequence.ledger(),
            lambda: sequence.residency(),
            lambda: forward.attend(0, rows, rows, rows, scaling=1.0),
            lambda: forward.write(0, rows, rows),
            lambda: forward.commit(),
            lambda: pager.begin_spans([(sequence, LENGTH, 1, ROW_COMMIT)], TOKENS[:1]),
            pager.evict_all,
            pager.stats,
            pager.check_invariants,
        ):
            refused(call)
        pin.release()
        forward.abort()
        sequence.close()
        gc.collect()
        pager.close()
        own, mine = paged(folder)
        holds(mine)
        own.close()

    in_child(use)
    forward.abort()
    holds(sequence)
    pin.release()
    in_child(lambda: None, leave=sys.exit)
    holds(sequence)
    pager.check_invariants()
    assert not list(folder.iterdir())


def dropped_in_child(folder: Path) -> None:
    """A child that lets everything go, by the collector and by a reset, hangs nowhere."""
    held: list[Any] = [*paged(folder)]
    held.append(held[1].freeze())
    held.append(held[1].pin(0, C))

    def drop() -> None:
        twin = held[1]
        held.clear()
        del twin
        gc.collect()

    in_child(drop)
    in_child(lambda: held[0].reset())
    holds(held[1])
    held[0].check_invariants()


def forks_at_work(folder: Path) -> None:
    """Children are forked while other threads are in the pager, whose lock is then held."""
    pager, sequence = paged(folder)
    stop = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.is_set():
                holds(sequence)
                pager.evict_all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()

    def use() -> None:
        refused(lambda: sequence.length)
        sequence.close()
        pager.close()
        gc.collect()

    for _ in range(4):
        in_child(use)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures, failures
    holds(sequence)
    pager.check_invariants()


def exits_normally(folder: Path) -> None:
    """A child that runs to its end does its exit work and disturbs nothing."""
    pager, sequence = paged(folder)
    before = {path.name for path in folder.iterdir()}
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        return  # through the interpreter's own exit, with everything still held
    _, status = os.waitpid(child, 0)
    assert status == 0, status
    holds(sequence)
    assert {path.name for path in folder.iterdir()} == before
    pager.check_invariants()


def make_engine(**options: Any) -> Engine:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=None,
        bos_token_id=None,
    )
    options = {"pool_tokens": 256, "chunk_tokens": C, "rows": M, "small_rows": "fixed", **options}
    return Engine(LlamaForCausalLM(config).eval(), host_bytes="4MiB", threads=2, **options)


def engine_in_child(folder: Path) -> None:
    """An engine with a save in flight, a scheduler and a store: refused, left alone, no hang."""
    store = DirectoryStore(folder / "store")
    with make_engine() as engine:
        session = engine.session()
        session.prefill(TOKENS[:150] % 64)
        first = session.generate(4).tokens.tolist()
        scheduler = engine.scheduler()
        scheduler.submit(TOKENS[:40] % 64, 4)
        writing, forked = threading.Event(), threading.Event()

        def progress(done: int, total: int) -> None:
            writing.set()
            assert forked.wait(60)

        handle = session.save("a", store=store, wait=False, progress=progress)
        assert writing.wait(60)

        def use() -> None:
            for call in (
                engine.session,
                lambda: session.prefill(TOKENS[:200] % 64),
                lambda: next(session.generate(1, stream="tokens")),
                lambda: session.save("b", store=store),
                lambda: session.trim(3),
                lambda: session.fork(),
                lambda: session.logits,
                lambda: scheduler.submit(TOKENS[:40] % 64, 4),
                lambda: list(scheduler.step()),
                lambda: engine.run([TOKENS[:40] % 64], 2),
                lambda: engine.score(TOKENS[:40] % 64),
                engine.stats,
                engine.weights_changed,
                engine.scheduler,
                lambda: engine.cache_segment(TOKENS[:40] % 64, name="part"),
                lambda: engine.assemble([TOKENS[:40] % 64]),
                lambda: engine.restore("a", store=store),
                lambda: engine.prefill_many([(session, TOKENS[:200] % 64)]),
                lambda: list(engine.generate_many([session], 1)),
                lambda: session.append(TOKENS[:4] % 64),
                lambda: session.update(TOKENS[:40] % 64),
                lambda: session.regenerate(2).tokens.tolist(),
                lambda: session.pin(0, C),
                session.ledger,
                handle.result,
                handle.wait,
                handle.cancel,
                handle.done,
            ):
                refused(call)
            repr(handle)
            scheduler.close()
            session.close()
            engine.close()
            gc.collect()

        in_child(use)
        in_child(lambda: None, leave=sys.exit)
        forked.set()
        assert handle.result(60).tokens > 0
        for _ in iter(lambda: list(scheduler.step()), []):
            pass
        scheduler.close()
        again = engine.restore("a", store=store)
        again.prefill(session.tokens[: again.length])
        assert first == list(session.tokens[150:154])
        more = session.generate(4).tokens.tolist()
    with make_engine() as engine, engine.session() as cold:
        cold.prefill(TOKENS[:150] % 64)
        assert first + more == cold.generate(8).tokens.tolist()


def fork_while_writing(folder: Path) -> None:
    """A child that leaves the blocks it was forked in removes no file and takes back no lock."""
    from kvpager.stores.lock import Hold, exclusive, in_use

    pager, sequence = paged(folder)
    kept = folder / "kept"
    kept.write_bytes(b"")
    with exclusive(str(folder / "lock"), 120), Hold() as hold:
        hold.add([str(kept)])
        child = os.fork()
        if child == 0:
            signal.alarm(60)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)

    with Hold() as hold:
        hold.add([str(kept)])
        in_child(hold.release)
        assert in_use(str(kept))
    assert not in_use(str(kept))
    files: list[set[str]] = []

    def progress(done: int, total: int) -> None:
        if files:
            return
        files.append({path.name for path in folder.iterdir()})
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            raise SystemExit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0, status
        assert {path.name for path in folder.iterdir()} == files[0]

    sequence.save(folder / "a.kvsnap", progress=progress)
    restored = pager.restore(pager.open_snapshot(folder / "a.kvsnap"))
    holds(restored)

    # Large chunks are prepared by a thread, ahead of the writer: the child has no such thread.
    large = Layout(1, 1, 512, 512, chunk_tokens=256)
    config = PagerConfig(4 * 256, chunk_tokens=256, selection=Dense(), host_bytes="32MiB")
    pager = Pager(large, config, rows=256, threads=2)
    sequence = pager.sequence()
    rows = torch.ones(1, 12 * 256, 1, 512)
    sequence.append(np.zeros(12 * 256, dtype=np.int32), rows, rows)
    files.clear()
    sequence.save(folder / "b.kvsnap", progress=progress)
    assert pager.open_snapshot(folder / "b.kvsnap").tokens.size == 12 * 256


def fork_while_verifying(folder: Path) -> None:
    """A child of `verify`'s progress callback does not wait for threads that it has not."""
    _pager, sequence = paged(folder)
    sequence.save(folder / "a.kvsnap")
    reader = _core.SnapshotReader.open(str(folder / "a.kvsnap"))
    children: list[int] = []

    def progress(done: int, total: int) -> None:
        if children:
            return
        children.append(os.fork())
        if children[0] == 0:
            signal.alarm(60)

    me = os.getpid()
    try:
        found = reader.verify(4, progress)
    except InvalidArgumentError as error:
        os._exit(0 if os.getpid() != me and "forked from it" in str(error) else 1)
    if os.getpid() != me:
        os._exit(2)
    assert found == []
    assert os.waitpid(children[0], 0)[1] == 0


PROGRAMS = {
    program.__name__: program
    for program in (
        pager_in_child,
        dropped_in_child,
        forks_at_work,
        exits_normally,
        engine_in_child,
        fork_while_writing,
        fork_while_verifying,
    )
}


def run(program: Callable[[Path], None], folder: Path, result: Path) -> None:
    """One program; its result is written by it, and not by what it forks."""
    folder.mkdir()
    me = os.getpid()
    try:
        program(folder)
        words = "sound"
    except BaseException:
        words = traceback.format_exc()
    if os.getpid() == me:
        result.write_text(words)


def main() -> None:
    # Python says that a fork beside threads may deadlock. That it does not is what is tested here.
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    torch.set_num_threads(2)
    top = Path(sys.argv[1])
    results = top / "results"
    results.mkdir()
    for name, program in PROGRAMS.items():
        child = os.fork()
        if child == 0:
            run(program, top / name, results / name)
            return  # through the interpreter's own exit
        _, status = os.waitpid(child, 0)
        if status != 0:
            (results / name).write_text(f"ended with {status}")


if __name__ == "__main__":
    main()
