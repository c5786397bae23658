"""Saves a snapshot and its companions into a directory store and publishes them together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType

from kvpager import _core
from kvpager.errors import CapacityError, PagerError
from kvpager.stores.base import ProgressCallback, SaveReport
from kvpager.stores.catalogue import Catalogue
from kvpager.stores.companion import CompanionSnapshot
from kvpager.stores.companions import companion_name, session_of_companion, session_of_primary
from kvpager.stores.names import check_name
from kvpager.stores.saving import Saving
from kvpager.stores.settings import StoreSettings
from kvpager.stores.tables import Snapshot

_log = logging.getLogger(__name__)

# Takes the store's lock; returns the store's contents while the lock is held.
Locked = Callable[[], AbstractContextManager[tuple[Catalogue, StoreSettings, int]]]


class GroupSaving:
    """Call write_companions, write, publish in this order; leaving the block releases everything.

    If a companion cannot be saved, the primary is saved without it, and a warning is logged.
    """

    def __init__(self, locked: Locked, name: str, *, overwrite: bool = False) -> None:
        """`overwrite`: also replace a snapshot of another salt or model.

        Raises InvalidArgumentError for a name that no snapshot can have.
        """
        self._overwrite = overwrite
        self._locked = locked
        self._name = check_name(name)
        self._companions: dict[str, Saving] = {}  # by kind
        self._primary: Saving | None = None
        self._seconds: dict[str, float] = {}  # by name
        self._stack = ExitStack()

    def write_companions(
        self, companions: Sequence[CompanionSnapshot], progress: ProgressCallback | None
    ) -> None:
        """Writes them without publishing; leaves out those that cannot be saved."""
        for companion in companions:
            try:
                name = check_name(companion_name(self._name, companion.kind))
                session = session_of_companion(companion.session, self._name)
                saving = Saving(
                    name, companion.content, companion.fingerprint, session, owner=self._name
                )
                self._write(saving, progress)
            except PagerError as error:  # noqa: PERF203  # each is left out by itself
                self._leave_out(companion.kind, error)
            else:
                self._companions[companion.kind] = saving

    def write(
        self,
        content: _core.SnapshotContent,
        fingerprint: str,
        session: str,
        progress: ProgressCallback | None,
    ) -> None:
        """Writes the primary, which names the companions; drops these if there is no room."""

        def primary() -> Saving:
            reports = {
                kind: saving.report(self._seconds[saving.name])
                for kind, saving in self._companions.items()
            }
            return Saving(
                self._name,
                content,
                fingerprint,
                session_of_primary(session, reports),
                overwrite=self._overwrite,
            )

        self._primary = primary()
        try:
            self._write(self._primary, progress)
        except CapacityError as error:
            if not self._companions:
                raise
            for kind, saving in self._companions.items():
                saving.release()
                self._leave_out(kind, error)
            self._companions.clear()
            self._primary = primary()
            self._write(self._primary, progress)

    def _write(self, saving: Saving, progress: ProgressCallback | None) -> None:
        started = time.monotonic()
        self._stack.enter_context(saving)
        try:
            with self._locked() as (catalogue, settings, now_ns):
                saving.begin(catalogue, settings, now_ns)
            saving.write(progress)
        except BaseException:
            saving.release()
            raise
        self._seconds[saving.name] = time.monotonic() - started

    def _leave_out(self, kind: str, error: PagerError) -> None:
        _log.warning("%s is saved without its %s: %s", self._name, kind, error)

    @property
    def _parts(self) -> list[Saving]:
        assert self._primary is not None
        return [*self._companions.values(), self._primary]

    def publish(self, catalogue: Catalogue, settings: StoreSettings, now_ns: int) -> list[Snapshot]:
        """Publishes all, the primary last; returns the snapshots that they replaced.

        REQUIRES: the store's lock.
        """
        replaced = [catalogue.snapshots.get(part.name) for part in self._parts]
        for part in self._parts:
            part.publish(catalogue, settings, now_ns)
        return [snapshot for snapshot in replaced if snapshot is not None]

    def undo(self, catalogue: Catalogue) -> None:
        """Removes what a failed `publish` may have left. REQUIRES: the store's lock."""
        for part in self._parts:
            part.undo(catalogue)

    def report(self, seconds: float) -> SaveReport:
        """The report. seconds: from the call until all was in place."""
        *companions, primary = self._parts
        return primary.report(
            seconds,
            tuple(companion.report(self._seconds[companion.name]) for companion in companions),
        )

    def release(self) -> None:
        """Removes what was not published, and releases locks. May be called twice."""
        self._stack.close()

    def __enter__(self) -> GroupSaving:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
