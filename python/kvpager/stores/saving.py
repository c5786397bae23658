"""One save into a directory store: plan under the lock, write outside it, publish under it."""

from __future__ import annotations

import contextlib
from types import TracebackType

from kvpager import _core
from kvpager.errors import InvalidArgumentError, PagerError
from kvpager.stores.base import ProgressCallback, SaveReport, tokens_of
from kvpager.stores.belonging import Belonging
from kvpager.stores.budget import make_room, tidy
from kvpager.stores.catalogue import Catalogue
from kvpager.stores.chunk_index import Place
from kvpager.stores.lock import Hold
from kvpager.stores.names import new_pack_id
from kvpager.stores.own_name import with_name
from kvpager.stores.plan import PackTable, WritePlan, plan_write, table_of
from kvpager.stores.removal import remove_strays, remove_unneeded_packs
from kvpager.stores.settings import StoreSettings
from kvpager.stores.sidecar import SIDECAR_BYTES, Sidecar

PACK_SESSION = '{"pack":true}'


class Saving:
    """Call begin, write, publish in this order; leaving the `with` block releases everything.

    Attributes:
        plan: which chunks are written and which are shared; set by `begin`.
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
        owner: str | None = None,
        overwrite: bool = False,
    ) -> None:
        """`owner`: for a companion, the name of its primary, whose sidecar it uses.

        overwrite: also replace a snapshot of another salt or model.
        """
        self._overwrite = overwrite
        self.name = name
        self.owner = owner
        self.pack_id = new_pack_id()
        self.bytes_written = 0
        self.logical_digest = ""
        self._path = ""
        self._content = content
        self._fingerprint = fingerprint
        self._session = with_name(session, name)
        self._hold = Hold()
        self._pack: _core.SnapshotWriter | None = None
        self._manifest: _core.SnapshotWriter | None = None
        self._sizes: dict[str, int] = {}
        self._summary_checksums: dict[int, int] = {}

    def begin(self, catalogue: Catalogue, settings: StoreSettings, now_ns: int) -> None:
        """Plans the save, makes room and takes it. REQUIRES: the store's lock.

        Raises:
            InvalidArgumentError: the name belongs to another snapshot's companion; or a companion
                would take the name of a session; or a snapshot of another salt or model has the
                name and `overwrite` is False.
        """
        content = self._content
        self._check_name(catalogue)
        self.plan = plan_write(content.chain_hashes, content.content_ids, catalogue.sound_places)
        shared_packs = frozenset(self.plan.shared_packs)
        self._hold.add(catalogue.pack_path(pack) for pack in sorted(shared_packs))
        self._sizes = {pack: catalogue.packs[pack].chunks for pack in shared_packs}
        self._summary_checksums = {
            chunk: int(catalogue.packs[place.pack].summary_checksums[place.chunk])
            for chunk, place in self.plan.shared.items()
        }
        pack_bytes, manifest_bytes = self._bounds()
        tidy(catalogue, settings, now_ns)
        make_room(
            catalogue,
            settings,
            pack_bytes + manifest_bytes + SIDECAR_BYTES,
            kept=self.owner or self.name,
            wanted=shared_packs,
        )
        layout = content.layout
        if self.plan.write:
            path = catalogue.pack_path(self.pack_id)
            self._pack = _core.SnapshotWriter(path, layout, pack_bytes, settings.mode)
        self._path = catalogue.manifest_path(self.name)
        self._manifest = _core.SnapshotWriter(self._path, layout, manifest_bytes, settings.mode)

    def _check_name(self, catalogue: Catalogue) -> None:
        there = catalogue.snapshots.get(self.name)
        if there is None or there.manifest.error:
            return
        owner = there.manifest.companion_of
        if self.owner is not None and owner != self.owner:
            raise InvalidArgumentError(
                f"snapshot {self.name!r} is there already and does not belong to {self.owner!r}"
            )
        if self.owner is None and self.name in catalogue.owners():
            raise InvalidArgumentError(
                f"name is {self.name!r}, which belongs to snapshot {owner!r}; expected another name"
            )
        if self.owner is None and not self._overwrite and there.manifest.belonging is not None:
            own = Belonging.of(self._fingerprint, self._session, self.name)
            if (what := there.manifest.belonging.differs_from(own)) is not None:
                raise InvalidArgumentError(
                    f"name is {self.name!r}, and the snapshot that has it was saved under {what}; "
                    "expected another name, or overwrite=True to replace it"
                )

    def _bounds(self) -> tuple[int, int]:
        """Most bytes that pack and manifest can take."""
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
            self._summary_checksums.update(zip(new, self._pack.summary_checksums.tolist()))
        if content.sealed_chunks:
            table = self._table()
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

    def _table(self) -> PackTable:
        numbers = {chunk: i for i, chunk in enumerate(self.plan.write)}
        shared = self.plan.shared
        places = [
            shared[chunk] if chunk in shared else Place(self.pack_id, numbers[chunk])
            for chunk in range(self._content.sealed_chunks)
        ]
        return table_of(places, self._sizes.__getitem__, self._summary_checksums.__getitem__)

    def publish(self, catalogue: Catalogue, settings: StoreSettings, now_ns: int) -> None:
        """Makes the snapshot visible. REQUIRES: the store's lock.

        If it fails before the last rename, the name is unchanged, and `undo` removes what is left.
        """
        assert self._manifest is not None
        before = catalogue.snapshots.get(self.name)
        if self._pack is not None:
            self._pack.publish()
        if self.owner is None and (before is None or not before.sidecar_bytes):
            self._write_sidecar(catalogue, settings, now_ns)
        self._manifest.publish()
        self.release()

    def _write_sidecar(self, catalogue: Catalogue, settings: StoreSettings, now_ns: int) -> None:
        # `begin` made room for the sidecar but does not hold it. Without a sidecar, the last use is
        # the manifest's own time.
        budget = settings.byte_budget
        if budget is None or catalogue.bytes + SIDECAR_BYTES <= budget:
            Sidecar().write(catalogue.sidecar_path(self.name), now_ns, settings.mode)

    def report(self, seconds: float, companions: tuple[SaveReport, ...] = ()) -> SaveReport:
        """The report. seconds: from the call until it was in place. REQUIRES: `write`."""
        content = self._content
        return SaveReport(
            name=self.name,
            path=self._path,
            tokens=tokens_of(content, self._session),
            chunks=content.chunks,
            chunks_written=content.chunks - len(self.plan.shared),
            bytes_written=self.bytes_written,
            bytes_shared=len(self.plan.shared) * content.layout.chunk_bytes,
            logical_digest=self.logical_digest,
            seconds=seconds,
            companions=companions,
        )

    def undo(self, catalogue: Catalogue) -> None:
        """Removes what a failed `publish` may have left. REQUIRES: the store's lock."""
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
