"""Rooflines: that all bytes are touched, nothing is left behind and nothing is measured twice."""

from __future__ import annotations

import math

import pytest
import torch

from kvpager_bench import file_peers, machine
from kvpager_bench.report import MissingNumberError


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(machine, "DISK_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "RUNS", 3)
    machine.memory_bandwidth.cache_clear()
    machine.disk_bandwidth.cache_clear()
    yield
    machine.memory_bandwidth.cache_clear()
    machine.disk_bandwidth.cache_clear()


def test_every_byte_is_read_and_copied():
    numbers = 100_003  # more than torch gives one thread
    copier, reader = machine.MemoryCopier(8 * numbers), machine.MemoryReader(8 * numbers)
    assert torch.equal(copier(), torch.ones(numbers, dtype=torch.int64))
    assert int(reader()) == numbers
    assert (reader.bytes, copier.bytes) == (8 * numbers, 8 * numbers)


def test_bandwidth_is_the_best_of_several_runs_and_measured_once(monkeypatch):
    rates = iter((machine.Rate((1.0, 3.0, 2.0)), machine.Rate((5.0, 4.0))))
    monkeypatch.setattr(machine, "_rate", lambda subject: next(rates))
    reads, copies = machine.memory_bandwidth()
    assert (reads.best, copies.best, reads.median) == (3.0, 5.0, 2.0)
    assert machine.memory_bandwidth()[0] is reads


@pytest.mark.parametrize("runs", [(), (0.0,), (1.0, -1.0), (math.nan,)])
def test_rates_that_are_none_are_refused(runs):
    with pytest.raises(MissingNumberError):
        machine.Rate(runs)


def test_the_disk_is_measured_and_left_as_it_was(tmp_path, monkeypatch):
    states = []
    prepare = file_peers.prepare

    def noted(path, state):
        states.append((path.stat().st_size, state))
        prepare(path, state)

    monkeypatch.setattr(file_peers, "prepare", noted)
    assert all(rate.best > 0 for rate in machine.disk_bandwidth(tmp_path / "disk"))
    assert states == [(1 << 20, "dropped")] * machine.DISK_RUNS
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_disk_that_fails_keeps_nothing_of_the_measurement(tmp_path, monkeypatch):
    def broken(path, data):
        path.write_bytes(b"part")
        raise OSError("no space")

    monkeypatch.setattr(file_peers, "write_synced", broken)
    with pytest.raises(OSError, match="no space"):
        machine.disk_bandwidth(tmp_path)
    assert list(tmp_path.iterdir()) == []
