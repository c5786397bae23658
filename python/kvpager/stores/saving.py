"""Saves into a directory store: plans under the lock, writes outside it, publishes under it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvpager import _core
from kvpager._support.section_json import section_or_empty
from kvpager.errors import CapacityError, InvalidArgumentError, PagerError
from kvpager.stores.access import Access
from kvpager.stores.base import ProgressCallback, SaveReport, tokens_of
from kvpager.stores.budget import make_room, tidy
from kvpager.stores.catalogue import Catalogue
from kvpager.stores.companions import (
    CompanionSnapshot,
    companion_name,
    session_of_companion,
    session_of_primary,
)
from kvpager.stores.lock import Hold
from kvpager.stores.names import check_name, new_pack_id
from kvpager.stores.origin import Origin, with_name
from kvpager.stores.removal import remove_strays, remove_unneeded_packs
from kvpager.stores.settings import StoreSettings
from kvpager.stores.sharing import WritePlan, plan_write, shared_runs, table_of
from kvpager.stores.tables import SIDECAR_BYTES, Sidecar, Snapshot

if TYPE_CHECKING:
    from typing_extensions import Self

PACK_SESSION = '{"pack":true}'


class Saving:
    """Call begin, write, publish in this order; leaving the `with` block releases everything.

    Attributes:
        plan: which chunks are written and which are shared; set by `begin`.
        pack_bytes: most bytes of the new pack, 0 without one; likewise.
        pack_file, manifest_file: paths of the files that are written, until `publish`; likewise.
        bytes_written: size of the files; set by `write`.
        logical_digest: of the snapshot; set by `write`.
    """

    plan: WritePlan

    def __init__(
        self,
        name: str,
        content: _core.SnapshotContent,
        fingerprint: str,
        session: str,
        *,
        access: Access,
        owner: str | None = None,
        overwrite: bool = False,
    ) -> None:
        """`access`: of the store's files.

        owner: for a companion, the name of its primary, whose sidecar it uses.
        overwrite: also replace a snapshot of another salt or model.
        """
        self._overwrite = overwrite
        self.name = access.stored(name)
        self.owner = None if owner is None else access.stored(owner)
        self._shown, self._shown_owner = name, owner
        self._access = access
        self.pack_id = new_pack_id()
        self.pack_bytes = 0
        self.pack_file: str | None = None
        self.manifest_file = ""
        self.bytes_written = 0
        self.logical_digest = ""
        self._path = ""
        self._content = content
        self._fingerprint = fingerprint
        self._session = with_name(session, name)
        self._values = section_or_empty(self._session, name, "session")
        self._hold = Hold()
        self._temporaries: list[str] = []
        self._pack: _core.SnapshotWriter | None = None
        self._manifest: _core.SnapshotWriter | None = None
        self._sizes: dict[str, int] = {}
        self._summary_checksums: npt.NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)

    def begin(
        self,
        catalogue: Catalogue,
        settings: StoreSettings,
        now_ns: int,
        avoid: Set[str] = frozenset(),
    ) -> None:
        """Plans the save, makes room and takes it. REQUIRES: the store's lock.

        avoid: packs that are not shared.

        Raises:
            InvalidArgumentError: the name belongs to another snapshot's companion; or a companion
                would take the name of a session; or a snapshot of another salt or model has the
                name and `overwrite` is False.
        """
        content = self._content
        self._check_name(catalogue)
        chunks = content.sealed_chunks
        self.plan = plan_write(chunks, shared_runs(catalogue, content.hashes, avoid))
        shared_packs = frozenset(self.plan.shared_packs)
        self._hold.add(catalogue.pack_path(pack) for pack in sorted(shared_packs))
        tables = {pack: table for pack in shared_packs if (table := catalogue.pack(pack))}
        self._sizes = {pack: table.chunks for pack, table in tables.items()}
        self._summary_checksums = np.zeros(chunks, dtype=np.uint64)
        for first, count, pack, place in self.plan.shared:
            of_pack = tables[pack].summary_checksums
            self._summary_checksums[first : first + count] = of_pack[place : place + count]
        pack_bytes, manifest_bytes = self._bounds()
        self.pack_bytes = pack_bytes
        tidy(catalogue, settings, now_ns)
        make_room(
            catalogue,
            settings,
            sum(map(self._access.file_bytes, (pack_bytes, manifest_bytes))) + SIDECAR_BYTES,
            kept=self.owner or self.name,
            wanted=shared_packs,
        )
        layout, mode = content.layout, settings.mode
        self._path = catalogue.manifest_path(self.name)
        try:
            if self.plan.write:
                path = catalogue.pack_path(self.pack_id)
                self._pack = self._access.writer(path, layout, pack_bytes, mode)
            self._manifest = self._access.writer(self._path, layout, manifest_bytes, mode)
        except PagerError:  # such as a full disk, which costs the next call nothing
            self.release()
            catalogue.settle()
            raise
        self.pack_file = None
        if self._pack is not None:
            self.pack_file = f"{catalogue.packs_folder}/{self._pack.temporary}"
            self._temporaries.append(self.pack_file)
        self.manifest_file = f"{catalogue.snapshots_folder}/{self._manifest.temporary}"
        self._temporaries.append(self.manifest_file)
        for temporary in self._temporaries:
            catalogue.add_temporary(temporary)

    def _check_name(self, catalogue: Catalogue) -> None:
        there = catalogue.snapshot(self.name)
        if there is not None and not there.manifest.error:
            manifest, belongs = there.manifest, there.owner is not None
            self.check_taker(manifest.companion_of, manifest.origin, belongs=belongs)

    def check_taker(
        self, companion_of: str | None, origin: Origin | None, *, belongs: bool | None = None
    ) -> None:
        """Raises InvalidArgumentError unless it may replace another snapshot of its name.

        Args:
            companion_of: the snapshot that the other names as its primary.
            origin: of the other; None if it cannot be read.
            belongs: whether that primary names it too; None: if it names one.
        """
        owner = companion_of
        stored = None if owner is None else self._access.stored(owner)
        if self.owner is not None and stored != self.owner:
            raise InvalidArgumentError(
                f"snapshot {self._shown!r} is there already and does not belong to "
                f"{self._shown_owner!r}"
            )
        belongs = owner is not None if belongs is None else belongs
        if self.owner is None and belongs:
            raise InvalidArgumentError(
                f"name is {self._shown!r}, which belongs to snapshot {owner!r}; expected another "
                "name"
            )
        if self.owner is None and not self._overwrite and origin is not None:
            own = Origin.of(self._fingerprint, self._values, self._shown)
            if (what := origin.differs_from(own)) is not None:
                raise InvalidArgumentError(
                    f"name is {self._shown!r}, and the snapshot that has it was saved under "
                    f"{what}; expected another name, or overwrite=True to replace it"
                )

    def _bounds(self) -> tuple[int, int]:
        """Most plain bytes that pack and manifest can have."""
        content, new = self._content, len(self.plan.write)
        packs = len(self.plan.shared_packs) + bool(new)
        pack = _core.snapshot_file_bytes(content, new, False, self._fingerprint, PACK_SESSION, 0)
        return pack if new else 0, _core.snapshot_file_bytes(
            content,
            content.sealed_chunks,
            content.tail_tokens > 0,
            self._fingerprint,
            self._session,
            packs,
        )

    def write(self, progress: ProgressCallback | None) -> None:
        """Writes and syncs both files without publishing them."""
        assert self._manifest is not None
        content = self._content
        if self._pack is not None:
            new = list(self.plan.write)
            self.bytes_written += self._pack.write_content(
                content, new, self._fingerprint, PACK_SESSION, progress
            )
            self._sizes[self.pack_id] = len(new)
            self._summary_checksums[new] = self._pack.summary_checksums
        if content.sealed_chunks:
            runs = self.plan.runs(self.pack_id)
            table = table_of(runs, self._sizes.__getitem__, self._summary_checksums)
            self.bytes_written += self._manifest.write_manifest(
                content,
                table.packs,
                table.places,
                table.summary_checksums,
                self._fingerprint,
                self._session,
            )
        else:
            tail = list(range(content.chunks))
            self.bytes_written += self._manifest.write_content(
                content, tail, self._fingerprint, self._session
            )
        self.logical_digest = self._manifest.logical_digest
        if progress is not None and self._pack is None:
            progress(self.bytes_written, self.bytes_written)

    def publish(
        self, catalogue: Catalogue, settings: StoreSettings, now_ns: int
    ) -> Snapshot | None:
        """Makes the snapshot visible; returns the one that it replaced. REQUIRES: the store's lock.

        If it fails before the last rename, the name is unchanged, and `undo` removes what is left.
        """
        assert self._manifest is not None
        before = catalogue.snapshot(self.name)
        if self._pack is not None:
            self._pack.publish()
            catalogue.add_pack(self.pack_id)
        if self.owner is None and (before is None or not before.sidecar_bytes):
            self._write_sidecar(catalogue, settings, now_ns)
        self._manifest.publish()
        self.release()
        for temporary in self._temporaries:  # a replaced file may have kept such a name
            catalogue.add_temporary(temporary)
        catalogue.add_snapshot(self.name)
        return before

    def _write_sidecar(self, catalogue: Catalogue, settings: StoreSettings, now_ns: int) -> None:
        # `begin` made room for the sidecar but does not hold it. Without a sidecar, the last use is
        # the manifest's own time.
        budget = settings.byte_budget
        if budget is None or catalogue.size + SIDECAR_BYTES <= budget:
            Sidecar().write(catalogue.sidecar_path(self.name), now_ns, settings.mode)

    def report(self, seconds: float, companions: tuple[SaveReport, ...] = ()) -> SaveReport:
        """The report. seconds: from the call until it was in place. REQUIRES: `write`."""
        content = self._content
        return SaveReport(
            name=self._shown,
            path=self._path,
            tokens=tokens_of(content, self._values),
            chunks=content.chunks,
            chunks_written=content.chunks - self.plan.shared_chunks,
            bytes_written=self.bytes_written,
            bytes_shared=self.plan.shared_chunks * content.layout.chunk_bytes,
            logical_digest=self.logical_digest,
            seconds=seconds,
            companions=companions,
        )

    def undo(self, catalogue: Catalogue) -> None:
        """Removes what a save that failed has left. REQUIRES: the store's lock."""
        self.release()
        for temporary in self._temporaries:
            catalogue.add_temporary(temporary)
        remove_strays(catalogue)
        remove_unneeded_packs(catalogue, [self.pack_id])

    def release(self) -> None:
        """Removes what was not published, and releases locks. May be called twice."""
        for writer in (self._pack, self._manifest):
            if writer is not None:
                writer.discard()
        self._pack = self._manifest = None
        self._hold.release()

    def __enter__(self) -> Saving:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(PagerError):
            self.release()


_log = logging.getLogger(__name__)

# Takes the store's lock; returns the store's contents while the lock is held.
Locked = Callable[[], AbstractContextManager[tuple[Catalogue, StoreSettings, int]]]


class GroupSaving:
    """Call write_companions, write, publish in this order; leaving the block releases everything.

    If a companion cannot be saved, the primary is saved without it, and a warning is logged.
    """

    def __init__(
        self, locked: Locked, name: str, access: Access, *, overwrite: bool = False
    ) -> None:
        """`access`: of the store's files.

        overwrite: also replace a snapshot of another salt or model.
        Raises InvalidArgumentError for a name that no snapshot can have.
        """
        self._overwrite = overwrite
        self._locked = locked
        self._access = access
        self._name = check_name(name)
        self._companions: dict[str, Saving] = {}  # by kind
        self._begun: list[Saving] = []  # have files, or may have
        self._primary: Saving | None = None
        self._seconds: dict[str, float] = {}  # by name
        self._stack = ExitStack()
        self._avoided: set[str] = set()  # packs that are not shared

    def write_companions(
        self, companions: Sequence[CompanionSnapshot], progress: ProgressCallback | None
    ) -> None:
        """Writes them without publishing; leaves out those that cannot be saved."""
        for companion in companions:
            try:
                name = check_name(companion_name(self._name, companion.kind))
                session = session_of_companion(companion.session, self._name)
                saving = Saving(
                    name,
                    companion.content,
                    companion.fingerprint,
                    session,
                    access=self._access,
                    owner=self._name,
                )
                self._write(saving, progress)
            except PagerError as error:  # noqa: PERF203  # each is left out by itself
                self.undo(after=len(self._companions))
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
                access=self._access,
                overwrite=self._overwrite,
            )

        self._primary = primary()
        try:
            self._write(self._primary, progress)
        except CapacityError as error:
            if not self._companions:
                raise
            self.undo()
            for kind in self._companions:
                self._leave_out(kind, error)
            self._companions.clear()
            self._primary = primary()
            self._write(self._primary, progress)

    def _write(self, saving: Saving, progress: ProgressCallback | None) -> None:
        started = time.monotonic()
        self._stack.enter_context(saving)
        while True:
            with self._locked() as (catalogue, settings, now_ns):
                saving.begin(catalogue, settings, now_ns, self._avoided)
                if saving not in self._begun:
                    self._begun.append(saving)
            if self._may_write(saving):
                break
            saving.release()
        saving.write(progress)
        self._seconds[saving.name] = time.monotonic() - started

    def _may_write(self, saving: Saving) -> bool:
        """Whether what was planned may be written; else it is planned again."""
        del saving
        return True

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
        replaced = [part.publish(catalogue, settings, now_ns) for part in self._parts]
        return [snapshot for snapshot in replaced if snapshot is not None]

    def undo(self, after: int = 0) -> None:
        """Removes what a failed save may have left, under the store's lock.

        So the index has it, and the next call need not compare it with all files.

        after: leaves as many, the first ones.
        """
        if len(self._begun) > after:
            with contextlib.suppress(PagerError), self._locked() as (catalogue, _, _):
                while len(self._begun) > after:
                    self._begun.pop().undo(catalogue)

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
