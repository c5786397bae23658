"""Saves in threads of their own: they write the frozen state while the session goes on."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from kvpager._runtime.snapshots.freezing import FrozenState
from kvpager._support.process import MadeIn
from kvpager.errors import CapacityError, InvalidArgumentError
from kvpager.progress import Progress, check_progress, reporting_bytes
from kvpager.stores import SaveReport

_log = logging.getLogger(__name__)


class _Job:
    """One save: what its thread and its handle share; neither refers to the other."""

    def __init__(self, state: FrozenState, progress: Progress, owners: tuple[Saves, ...]) -> None:
        """Begins to write in a new thread, for which the process waits before it exits."""
        self.name = state.name
        self.stop = False
        self.bytes = (0, 0)
        self.made_in = MadeIn()  # the process of the thread
        self._thread: int | None = None  # id of the thread, while it writes
        self._beginning = threading.Lock()  # held until the owners know of it
        self._pool = ThreadPoolExecutor(1, f"kvpager save {self.name}")
        try:
            with self._beginning:
                self.future = self._pool.submit(self._run, [state], progress)
                for owner in owners:
                    owner.add(self)
        except RuntimeError as error:
            raise CapacityError(f"saving {self.name}: no thread can be started: {error}") from error
        finally:
            self._pool.shutdown(wait=False)

    def _run(self, states: list[FrozenState], progress: Progress) -> SaveReport:
        with self._beginning:
            self._thread = threading.get_ident()
        state = states.pop()
        try:
            with reporting_bytes(progress, "save") as report:
                return state.write(lambda done, total: self._advance(done, total, report))
        except BaseException as error:
            _clear_frames(error)
            raise
        finally:
            self._thread = None
            del state  # the error's traceback keeps this frame

    def _advance(self, done: int, total: int, report: Callable[[int, int], object]) -> None:
        self.bytes = (done, total)
        report(done, total)
        if self.stop:
            raise CancelledError(f"saving {self.name} was cancelled")

    @property
    def runs_here(self) -> bool:
        """Whether the caller is its progress callback."""
        return self._thread == threading.get_ident()

    def wait(self, timeout: float | None) -> None:
        """Waits until it has ended, at most `timeout` seconds."""
        if self.runs_here:
            raise InvalidArgumentError(
                f"saving {self.name}: its progress callback cannot wait for its end"
            )
        concurrent.futures.wait([self.future], timeout)

    def join(self) -> None:
        """Waits until its thread has ended: after the future's result comes what is logged."""
        self.wait(None)
        self._pool.shutdown()

    def log_error(self) -> None:
        """Logs the error that it ends or has ended with; its handle is gone."""
        if not self.made_in.forked:
            self.future.add_done_callback(self._log_error)

    def _log_error(self, future: Future[SaveReport]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None and not isinstance(error, CancelledError):
            _log.error("saving %s failed: %s", self.name, error, exc_info=error)


class SaveHandle:
    """A save that runs in a thread of its own; made by `Session.save(..., wait=False)`.

    If `result` is never called, an error is logged when the handle is freed.
    """

    def __init__(self, state: FrozenState, progress: Progress, *owners: Saves) -> None:
        """Begins to write; the owners wait for it before they close."""
        check_progress(progress)
        self._job = _Job(state, progress, owners)
        self._finalizer = weakref.finalize(self, self._job.log_error)

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
        return self._job.future.done()

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
        error = self._job.future.exception()
        if error is None:
            return self._job.future.result()
        self._finalizer.detach()
        try:
            raise error
        finally:
            del self, error  # the error's traceback keeps this frame

    def cancel(self) -> bool:
        """Stops it and waits until it has stopped, unless called from its progress callback.

        Returns:
            True if nothing is saved; False if it had ended before: see `result`.
        """
        self._job.made_in.require("this save")
        self._job.stop = True
        if self._job.runs_here:
            return True  # the save sees it as soon as the callback returns
        self.wait()
        return isinstance(self._job.future.exception(), CancelledError)

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
        if not self._job.future.done():
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
            error = job.future.exception()
            state = "saved" if error is None else f"failed: {error}"
        return f"SaveHandle({self.name!r}, {state})"


class Saves:
    """The running saves of one owner, which waits for them before it closes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: list[_Job] = []

    def add(self, job: _Job) -> None:
        """Adds a save that has begun, and removes those that have ended."""
        with self._lock:
            self._jobs = [other for other in self._jobs if not other.future.done()] + [job]

    def wait(self) -> None:
        """Waits until all have ended."""
        with self._lock:
            jobs = list(self._jobs)
        for job in jobs:
            job.join()


def _clear_frames(error: BaseException) -> None:
    """Clears the frames of an error: they must not keep a frozen state after its save."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
