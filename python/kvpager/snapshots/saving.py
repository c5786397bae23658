"""Saves in threads of their own: they write the frozen state while the session goes on."""

from __future__ import annotations

import _thread
import logging
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, field

from kvpager.errors import (
    InvalidArgumentError,
)
from kvpager.process import MadeIn
from kvpager.progress import Progress, check_progress, reporting_bytes
from kvpager.snapshots.freezing import FrozenState
from kvpager.stores import SaveReport

_log = logging.getLogger(__name__)


_POLL_SECONDS = 1.0


@dataclass
class _Job:
    """The state that a save's thread and its handle share; neither refers to the other.

    Nothing here waits for a thread to start, as `Thread.start` does: an interrupt between two
    instructions of `threading` can leave one of its locks taken forever.
    """

    name: str
    stop: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    bytes: tuple[int, int] = (0, 0)
    report: SaveReport | None = None
    error: BaseException | None = None
    abandoned: bool = False  # the handle is gone: no caller can ask for the error any more
    made_in: MadeIn = field(default_factory=MadeIn)  # the process of the thread
    thread: int | None = None  # id of the thread that runs it
    ended: bool = False
    _decided: threading.Lock = field(default_factory=threading.Lock)  # never released
    _ending: threading.Lock = field(default_factory=threading.Lock)  # free once it has ended

    def __post_init__(self) -> None:
        self._ending.acquire()

    def decide(self) -> bool:
        """True for the first caller only, who decides whether the save runs."""
        return self._decided.acquire(blocking=False)

    def run(self, states: list[FrozenState], progress: Progress) -> None:
        self.thread = threading.get_ident()
        state = states.pop()
        try:
            with reporting_bytes(progress, "save") as report:
                outcome = state.write(lambda done, total: self._advance(done, total, report))
        except BaseException as error:  # `result` raises it again
            _forget_frames(error)
            self._fail(error)
        else:
            self.report = outcome
        finally:
            del state  # the error's traceback keeps this frame
            self._end()

    def start(self, thread: threading.Thread) -> None:
        """Starts its thread, unless the save was dropped. Runs in a thread of its own.

        Signals interrupt only the main thread.
        """
        if not self.decide():
            return
        try:
            thread.start()
        except BaseException as error:  # the system has no more threads
            self._fail(error)
            self._end()

    def drop(self) -> None:
        """Drops the save if it has not begun, because its start was interrupted."""
        if self.decide():
            self._fail(CancelledError(f"saving {self.name} had not begun when it was waited for"))
            self._end()

    def wait(self, timeout: float | None) -> None:
        """Waits until it has ended, at most `timeout` seconds."""
        if self.thread == threading.get_ident() and not self.ended:
            raise InvalidArgumentError(
                f"saving {self.name}: its progress callback cannot wait for its end"
            )
        until = None if timeout is None else time.monotonic() + timeout
        # Another waiting thread may be interrupted before it releases the lock.
        while not self.ended:
            left = _POLL_SECONDS if until is None else min(_POLL_SECONDS, until - time.monotonic())
            if self._ending.acquire(timeout=max(0.0, left)):
                self._ending.release()
            elif until is not None and time.monotonic() >= until:
                return

    def _fail(self, error: BaseException) -> None:
        with self.lock:
            self.error = error
            unheard = self.abandoned
        if unheard:
            self._log_error()

    def _end(self) -> None:
        self.ended = True
        self._ending.release()

    def _advance(self, done: int, total: int, report: Callable[[int, int], object]) -> None:
        self.bytes = (done, total)
        report(done, total)
        if self.stop:
            raise CancelledError(f"saving {self.name} was cancelled")

    def abandon(self) -> None:
        """Called when the handle is gone: an error is logged from now on."""
        if self.made_in.forked:
            return
        with self.lock:
            self.abandoned = True
            failed = self.error is not None
        if failed:
            self._log_error()

    def _log_error(self) -> None:
        if not isinstance(self.error, CancelledError):
            _log.error("saving %s failed: %s", self.name, self.error, exc_info=self.error)


class SaveHandle:
    """A save that runs in a thread of its own; made by `Session.save(..., wait=False)`.

    If `result` is never called, an error is logged when the handle is freed.
    """

    def __init__(self, state: FrozenState, progress: Progress) -> None:
        check_progress(progress)
        self._job = _Job(state.name)
        self._thread = threading.Thread(
            target=self._job.run, args=([state], progress), name=f"kvpager save {state.name}"
        )
        self._finalizer = weakref.finalize(self, self._job.abandon)

    def start(self, *owners: Saves) -> SaveHandle:
        """Begins to write; the owners wait for it before they close."""
        for owner in owners:
            owner.add(self._job)
        started = threading.Lock()
        started.acquire()
        _thread.start_new_thread(_start, (self._job, self._thread, started))
        started.acquire()  # the process waits for the save before it exits
        return self

    @property
    def name(self) -> str:
        """Name or path that is being saved to."""
        return self._job.name

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes written and bytes in all; (0, 0) before the first write."""
        return self._job.bytes

    def done(self) -> bool:
        """Whether it has ended, with success or an error."""
        self._job.made_in.require("this save")
        return self._job.ended

    def result(self, timeout: float | None = None) -> SaveReport:
        """Waits for the end and returns the report.

        Args:
            timeout: seconds to wait at most; None: as long as it takes.

        Raises:
            TimeoutError: it still runs; it goes on.
            concurrent.futures.CancelledError: it was cancelled.
            StorageError, CapacityError, CorruptSnapshotError: why it failed, as `Session.save`
                would have raised it. Nothing of it is left; an older snapshot of that name stays.
        """
        self.wait(timeout)
        job = self._job
        if job.error is None:
            assert job.report is not None
            return job.report
        self._finalizer.detach()
        try:
            raise job.error
        finally:
            del self, job  # the error's traceback keeps this frame

    def cancel(self) -> bool:
        """Stops it and waits until it has stopped, unless called from its progress callback.

        Returns:
            True if nothing is saved; False if it had ended before: see `result`.
        """
        self._job.made_in.require("this save")
        self._job.stop = True
        if self._job.thread == threading.get_ident() and not self._job.ended:
            return True  # the save sees it as soon as the callback returns
        self.wait()
        return isinstance(self._job.error, CancelledError)

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the end, but does not raise the save's error.

        Args:
            timeout: seconds to wait at most; None: as long as it takes.

        Raises:
            TimeoutError: it still runs; it goes on.
            InvalidArgumentError: in a forked child: the save runs in its parent.
        """
        self._job.made_in.require("this save")
        self._job.wait(timeout)
        if not self._job.ended:
            done, total = self._job.bytes
            raise TimeoutError(
                f"saving {self.name} has not ended after {timeout} s: {done} of {total} bytes"
            )

    def __repr__(self) -> str:
        job = self._job
        if job.made_in.forked:
            state = "of another process"
        elif not self.done():
            state = f"{job.bytes[0]} of {job.bytes[1]} bytes"
        else:
            state = "saved" if job.error is None else f"failed: {job.error}"
        return f"SaveHandle({self.name!r}, {state})"


class Saves:
    """The running saves of one owner, which waits for them before it closes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: list[_Job] = []

    def add(self, job: _Job) -> None:
        """Adds a save that is about to begin, and removes those that have ended."""
        with self._lock:
            self._jobs = [other for other in self._jobs if not other.ended] + [job]

    def wait(self) -> None:
        """Waits until all have ended, apart from those interrupted before they began."""
        with self._lock:
            jobs = list(self._jobs)
        for job in jobs:
            job.drop()
            job.wait(None)


def _start(job: _Job, thread: threading.Thread, started: threading.Lock) -> None:
    try:
        job.start(thread)
    finally:
        started.release()


def _forget_frames(error: BaseException) -> None:
    """Clears the frames of an error: they must not keep a frozen state after its save."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
