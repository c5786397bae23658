"""What every store can do, and what it reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from kvpager import _core
from kvpager.errors import CorruptSnapshotError
from kvpager.released import ReleasedText
from kvpager.section_json import parse_section
from kvpager.stores.companion import CompanionSnapshot
from kvpager.stores.segments import SegmentNote

# Called now and then with the bytes done so far and in all; what it raises stops and undoes.
ProgressCallback: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True)
class SaveReport:
    """What a save did.

    Attributes:
        name: of the snapshot in its store.
        path: the file that was published.
        tokens: positions saved.
        chunks: chunks saved, a tail included.
        chunks_written: chunks whose bytes were written; the store had the others already.
        bytes_written: size of all files that were written.
        bytes_shared: K/V bytes of the chunks the store had already.
        logical_digest: hex digest of layout, fingerprint, tokens, payload and provenance.
        seconds: from the call to the snapshot being in place.
        companions: what was done for each companion that was saved with it.
    """

    name: str
    path: str
    tokens: int
    chunks: int
    chunks_written: int
    bytes_written: int
    bytes_shared: int
    logical_digest: str
    seconds: float
    companions: tuple[SaveReport, ...] = ()


@dataclass(frozen=True)
class StoreEntry:
    """One snapshot of a store.

    Attributes:
        name: to open it by.
        path: its file; of a directory store, the manifest.
        tokens: positions it holds.
        chunks: chunks it holds, a tail included.
        bytes_own: bytes on disk that only this snapshot needs, its companions' included.
        bytes_shared: bytes on disk that other snapshots of the store need too.
        created: when it was saved, seconds since the epoch.
        last_used: when it was last saved or opened, likewise.
        pinned: whether it is kept whatever its age and the store's budget.
        ttl_seconds: how long it lives after its last use; None: for ever.
        logical_digest: hex digest, as in `SaveReport`.
        error: why it cannot be used, or not without computing a part again; None where it is sound.
        companions: names of the snapshots that belong to it.
        companion_of: name of the snapshot that it belongs to; None for one of its own.
        segment: what it says of the segment that it is; None for a session.
        salt_digest: digest of the salt it was saved under, empty for none; None where it does not
            say.
    """

    name: str
    path: str
    tokens: int = 0
    chunks: int = 0
    bytes_own: int = 0
    bytes_shared: int = 0
    created: float = 0.0
    last_used: float = 0.0
    pinned: bool = False
    ttl_seconds: float | None = None
    logical_digest: str = ""
    error: str | None = None
    companions: tuple[str, ...] = ()
    companion_of: str | None = None
    segment: SegmentNote | None = None
    salt_digest: str | None = None


@dataclass(frozen=True)
class GcReport:
    """What a garbage collection did, or of a dry run what one would do.

    Attributes:
        bytes_freed: by which the store's files shrank in all.
        expired: names of snapshots whose time to live was over.
        evicted: names of snapshots that had to go because the store was over its budget.
        orphans: names of companions that belonged to no snapshot, removed.
        temporaries: left-over files of writers that died, removed.
        packs_removed: packs that no snapshot needed any more.
        packs_compacted: packs of which less than half was needed, replaced by what was.
        chunks_moved: chunks that were copied for it.
        sidecars: notes on snapshots that are no more, removed.
        damaged: (path, why) of damaged files that were kept.
        damaged_removed: (path, why) of damaged files that were removed, because that was asked for.
        skipped: (path, why) of what could not be done now, such as packs that somebody reads.
        would_remove: of a dry run, the files that would go.
    """

    bytes_freed: int = 0
    expired: tuple[str, ...] = ()
    evicted: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()
    temporaries: int = 0
    packs_removed: int = 0
    packs_compacted: int = 0
    chunks_moved: int = 0
    sidecars: int = 0
    damaged: tuple[tuple[str, str], ...] = ()
    damaged_removed: tuple[tuple[str, str], ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    would_remove: tuple[str, ...] = ()


def tokens_of(content: _core.SnapshotContent, session: str) -> int:
    """Tokens of the text that a snapshot is of: those it has chunks of, and those before them.

    session: its JSON text; one that is none counts for nothing here.
    """
    held = len(content.tokens)
    try:
        values = parse_section(session, "the snapshot", "session")
        released = ReleasedText.of_session(values, "the snapshot", content.layout.chunk_tokens)
    except CorruptSnapshotError:  # reported to whoever restores it
        return held
    return held if released is None else held + len(released.tokens)


class SnapshotStore(Protocol):
    """Keeps snapshots by name. Safe for several threads and processes at once.

    A store is no access control: whoever can use it can list, read, replace and delete all it has.
    """

    def save(
        self,
        name: str,
        content: _core.SnapshotContent,
        *,
        fingerprint: str,
        session: str,
        progress: ProgressCallback | None = None,
        companions: Sequence[CompanionSnapshot] = (),
        overwrite: bool = ...,
    ) -> SaveReport:
        """Keeps `content` under `name`, atomically, in the place of what had the name.

        Companions are kept beside it, before it; one that cannot be is left out with a warning.

        Args:
            name: of the snapshot.
            content: a frozen sequence or an opened snapshot.
            fingerprint: what the bytes belong to, JSON text of an object.
            session: what a generation needs to go on, JSON text of an object.
            progress: called with bytes written and bytes to write, of each snapshot anew.
            companions: what belongs to it; only given where there are some.
            overwrite: replace also what another salt or model has saved; only given where that is
                wanted. A store without such a distinction may ignore it.

        Raises:
            InvalidArgumentError: a name the store cannot have.
            CapacityError: no room within the store's budget.
            StorageError: the system refused. After any error what had the name is as it was.
        """
        ...

    def open(self, name: str) -> _core.SnapshotReader:
        """Opens a snapshot: metadata are read and verified, chunks when they are needed.

        Raises:
            StorageError: there is none of this name, or it cannot be read.
            CorruptSnapshotError, UnsupportedVersionError: it is not what was written.
        """
        ...

    def find_prefix(self, hashes: Sequence[bytes]) -> _core.SnapshotReader | None:
        """The longest run of chunks with these names, from the first on; None without any.

        Names of 32 bytes, or the hashes of 16 bytes of snapshots of 1.0 and 1.1. A name finds a
        candidate; whoever restores it compares all token ids.
        """
        ...

    def entries(self) -> list[StoreEntry]:
        """All snapshots by name, damaged ones included."""
        ...

    def delete(self, name: str) -> None:
        """Forgets a snapshot. Those who have it open can read on.

        Raises:
            StorageError: there is none of this name, or the system refused.
        """
        ...
