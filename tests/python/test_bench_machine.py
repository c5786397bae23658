"""Rooflines: that all bytes are touched, nothing is left behind and nothing is measured twice."""

from __future__ import annotations

import math
from contextlib import nullcontext

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


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_byte_is_read_and_copied_whatever_the_number_of_threads(threads):
    numbers = 100_003  # more than torch gives one thread
    copier = machine.MemoryCopier(threads, 8 * numbers)
    reader = machine.MemoryReader(threads, 8 * numbers)
    assert torch.equal(copier(), torch.ones(numbers, dtype=torch.int64))
    assert int(reader()) == numbers
    assert (reader.bytes, copier.bytes) == (8 * numbers, 8 * numbers)


@pytest.mark.parametrize("fails", [False, True])
def test_memory_is_read_in_so_many_of_torchs_threads_and_the_others_are_back_afterwards(fails):
    own = torch.get_num_threads()
    reader = machine.MemoryReader(own + 1, 8)
    seen = []

    def call():
        seen.append(torch.get_num_threads())
        return 1 / 0 if fails else torch.ones(())

    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        reader._run(call)
    assert (seen, torch.get_num_threads()) == ([own + 1], own)


def test_no_threads_are_refused():
    with pytest.raises(ValueError, match="threads is 0"):
        machine.MemoryReader(0)


def test_bandwidth_is_the_best_of_several_runs_and_measured_once(monkeypatch):
    rates = iter((machine.Rate((1.0, 3.0, 2.0)), machine.Rate((5.0, 4.0))))
    monkeypatch.setattr(machine, "_rate", lambda subject: next(rates))
    found = machine.memory_bandwidth(2)
    assert (found.read, found.copy, found.reads.median) == (3.0, 5.0, 2.0)
    assert machine.memory_bandwidth(2) is found


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
    found = machine.disk_bandwidth(tmp_path / "disk")
    assert found.write > 0
    assert found.cold_read > 0
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
