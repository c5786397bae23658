"""A process that saves is killed at a random instant, many times.

Afterwards every snapshot it reported saved is whole and the one reported, or the one it was just
replacing it by; no other name is visible but that of the save it died in, whole; and what it left
unfinished is recognisable, harmless and in nobody's way.

Processes are killed here, not machines: what a power failure does is up to fsync, whose failures
tests/cpp/snapshot/faults_test.cc injects.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time

import pytest
from nursery import LENGTHS, NAMES, Nursery
from specimens import fill, listing, make_pager

from kvpager import _core
from kvpager.pager import open_snapshot

TEMPORARY = re.compile(r"\.kvsnap-[0-9a-f]+\.tmp")


@pytest.fixture(scope="module")
def digests(tmp_path_factory):
    """Logical digest of each of the sequences, from a process nobody kills."""
    folder = tmp_path_factory.mktemp("digests")
    pager = make_pager(pool_chunks=16, host_bytes="16MiB", summary_bytes=2**24)
    found = []
    for n in LENGTHS:
        fill(pager.sequence(), n, seed=n).save(folder / "one")
        found.append(open_snapshot(folder / "one").logical_digest)
    pager.close()
    return found


@pytest.fixture(scope="module")
def nursery():
    running = Nursery()
    yield running
    running.close()


def whole_digest(path):
    """Of a file every byte of which was just verified."""
    reader = _core.SnapshotReader.open(str(path))
    assert not reader.verify(1), path
    return reader.logical_digest


def kill_at_random_instants(kills, folder, nursery, digests, seed):
    dice = random.Random(seed)
    phases = {"writing": 0, "between": 0, "replacing": 0}
    known = {}  # what each name held when the last process died
    saves = 0
    for n in range(kills):
        delay = dice.uniform(0, 0.06) if dice.random() < 0.8 else dice.uniform(0, 0.3)

        def moment(child, delay=delay):
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)

        lived = nursery.live_and_die(folder, dice.randrange(2**31), moment)
        saves += lived.saves
        known.update(lived.saved)
        left = listing(folder)
        temporaries = [name for name in left if TEMPORARY.fullmatch(name)]
        visible = {name for name in left if name not in temporaries}
        assert visible <= set(NAMES)
        # Reported: there, whole, and that content, unless it was being replaced when the end came.
        begun = dict([lived.begun]) if lived.begun else {}
        for name in visible:
            digest = whole_digest(folder / name)
            held = [w for w in (known.get(name), begun.get(name)) if w is not None]
            held = [which for which in held if digests[which] == digest]
            assert held, f"kill {n}: {name} is none of {known.get(name)}, {begun.get(name)}"
            phases["replacing"] += held[0] != known.get(name)  # it got as far as the rename
            known[name] = held[0]
        assert set(known) <= visible, n
        # At most the file that was being written, or the one that was just replaced.
        assert len(temporaries) <= 1, temporaries
        if temporaries:
            assert lived.begun is not None
            phases["writing"] += 1
            (folder / temporaries[0]).unlink()
        else:
            phases["between"] += 1
    return saves, phases


# attack 74
def test_after_a_kill_at_any_instant_what_was_reported_saved_is_whole(tmp_path, nursery, digests):
    saves, phases = kill_at_random_instants(20, tmp_path, nursery, digests, seed=1)
    assert saves > 20
    assert phases["writing"] > 0


# attack 74
@pytest.mark.deep
def test_after_hundreds_of_kills_what_was_reported_saved_is_whole(tmp_path, nursery, digests):
    saves, phases = kill_at_random_instants(400, tmp_path, nursery, digests, seed=2)
    assert saves > 400
    # Kills landed before the first byte, in the writes and after the rename.
    assert min(phases.values()) > 0, phases


# attack 75
def test_what_killed_processes_left_is_in_nobodys_way(tmp_path, nursery, digests):
    """A save goes past a temporary of the dead and sweeps it; no reader takes one."""
    dice = random.Random(3)
    left = []
    for _ in range(200):
        left = [n for n in listing(tmp_path) if TEMPORARY.fullmatch(n)]
        if left:
            break

        def moment(child):
            time.sleep(dice.uniform(0.005, 0.05))
            os.kill(child, signal.SIGKILL)

        nursery.live_and_die(tmp_path, dice.randrange(2**31), moment)
    assert left
    assert not set(left) & {p.name for p in tmp_path.glob("*.kvsnap")}
    pager = make_pager()
    sequence = fill(pager.sequence(), LENGTHS[0], seed=LENGTHS[0])
    for name in NAMES:
        sequence.save(tmp_path / name)
        assert whole_digest(tmp_path / name) == digests[0]
    pager.close()
    assert [n for n in listing(tmp_path) if TEMPORARY.fullmatch(n)] == []
