"""The interface of every store, and the reports of its methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from kvpager import _core
from kvpager._runtime.released import ReleasedText
from kvpager.errors import CorruptSnapshotError
from kvpager.stores.companions import CompanionSnapshot
from kvpager.stores.segments import SegmentNote

# Called repeatedly with the bytes done and the bytes in all. What it raises undoes the work.
ProgressCallback: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True)
class SaveReport:
    """The report of a save.

    Attributes:
        name: of the snapshot in its store.
        path: the file that was published.
        tokens: positions saved.
        chunks: chunks saved, a tail included.
        chunks_written: chunks whose bytes were written; the store had the others already.
        bytes_written: size of all files that were written.
        bytes_shared: K/V bytes of the chunks the store had already.
        logical_digest: hex digest of layout, fingerprint, tokens, payload and provenance.
        seconds: from the call until the snapshot is in place.
        companions: a report for each companion that was saved with it.
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
        pinned: whether it never expires and is never evicted.
        ttl_seconds: how long it lives after its last use; None: forever.
        logical_digest: hex digest, as in `SaveReport`.
        error: why it cannot be used, or only after computing a part again; None: it is sound.
        companions: names of the snapshots that belong to it.
        companion_of: name of the snapshot that it is a companion of; None: it is no companion.
        segment: its segment's note; None for a session.
        salt_digest: digest of the salt it was saved under, empty for no salt; None if it was not
            recorded.
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
    """The report of a garbage collection; for a dry run, of what one would do.

    Attributes:
        bytes_freed: by how much the store's files shrank in all.
        expired: names of snapshots removed because their time to live was over.
        evicted: names of snapshots removed because the store was over its budget.
        orphans: names of removed companions that belonged to no snapshot.
        temporaries: number of removed files of writers that died.
        packs_removed: number of packs removed because no snapshot needed them any more.
        packs_compacted: number of packs of which less than half was needed, replaced by a pack of
            the needed chunks.
        chunks_moved: number of chunks copied for that.
        sidecars: number of removed sidecars whose snapshot is gone.
        damaged: (path, why) of damaged files that were kept.
        damaged_removed: (path, why) of damaged files removed with `remove_damaged`.
        skipped: (path, why) of what could not be removed now, such as packs with readers.
        would_remove: in a dry run, the files that would be removed.
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


def tokens_of(content: _core.SnapshotContent, session: Mapping[str, Any]) -> int:
    """Tokens of a snapshot's text: those in its chunks, and released ones before them.

    session: its parsed session section.
    """
    held = len(content.tokens)
    try:
        released = ReleasedText.of_session(session, "the snapshot", content.layout.chunk_tokens)
    except CorruptSnapshotError:  # `restore` reports it
        return held
    return held if released is None else held + len(released.tokens)


class ByteRanges(Protocol):
    """The bytes of a file that never changes, read by range. Safe for several threads at once.

    `SnapshotReader.open(path, opener=...)` reads a snapshot through such an object. It verifies all
    that it reads, whatever the source.
    """

    @property
    def size(self) -> int:
        """Bytes in all."""
        ...

    def read(self, offset: int, size: int) -> bytes | bytearray | memoryview:
        """Returns `size` bytes from `offset` on.

        Called by any thread, also while an attention call runs: it must neither use the engine nor
        wait for somebody who does.

        Raises:
            OSError: they cannot be read. The caller gets a StorageError with its message.
            CorruptSnapshotError: the file has ended, or the bytes are known to be damaged.
        """
        ...

    def will_need(self, offset: int, size: int) -> None:
        """A hint that `size` bytes from `offset` on will be read soon. Must not wait for them."""
        ...


# Opens a file by its path. Raises OSError if there is none.
RangesOpener: TypeAlias = Callable[[str], ByteRanges]


class SnapshotStore(Protocol):
    """Keeps snapshots by name. Safe for several threads and processes at once.

    A store is no access control: anyone who can use it can list, read, replace and delete it all.
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
        """Saves `content` under `name`; atomically replaces a snapshot of that name.

        Companions are saved before it; one that cannot be saved is left out with a warning.

        Args:
            name: of the snapshot.
            content: a frozen sequence or an opened snapshot.
            fingerprint: of the engine that computed it, JSON text of an object.
            session: the session section, JSON text of an object.
            progress: called with bytes written and bytes to write; from 0 again for each companion.
            companions: its companions; only passed if there are any. They only save time: a store
                may leave them out.
            overwrite: also replace a snapshot of another salt or model; only passed if True. A
                store that does not distinguish these may ignore it.

        Raises:
            InvalidArgumentError: a name the store cannot have.
            CapacityError: no room within the store's budget.
            StorageError: a system call failed. After any error, the old snapshot of that name
                stays.
        """
        ...

    def open(self, name: str) -> _core.SnapshotReader:
        """Opens a snapshot: reads and verifies its metadata now, its chunks when they are needed.

        Raises:
            StorageError: no snapshot has this name, or it cannot be read.
            CorruptSnapshotError: it is damaged. UnsupportedVersionError: a newer release wrote it.
        """
        ...

    def find_prefix(self, hashes: Sequence[bytes]) -> _core.SnapshotReader | None:
        """The longest prefix of chunks with these names; None if the store lacks the first one.

        hashes: names of the full chunks of a text, 32 bytes each.
        """
        ...

    def entries(self) -> list[StoreEntry]:
        """All snapshots by name, damaged ones included."""
        ...

    def delete(self, name: str) -> None:
        """Deletes a snapshot. Readers that have it open can read on.

        Raises:
            StorageError: no snapshot has this name, or a system call failed.
        """
        ...


class Journal(Protocol):
    """A journal that this process holds. Any thread may use it.

    Attributes:
        batch_tokens: tokens that are worth a part, and as many as a dead holder may have lost.
        batch_seconds: how long fewer of them wait for more.
    """

    @property
    def batch_tokens(self) -> int: ...  # noqa: D102

    @property
    def batch_seconds(self) -> float: ...  # noqa: D102

    def append(self, part: bytes) -> bool:
        """Appends a part, which has no line end, durably; False if it is not held any more.

        After an error the journal ends before this part.
        """
        ...

    def renew(self) -> None:
        """Shows others that the holder lives; to be called every few seconds."""
        ...

    def release(self) -> None:
        """Lets another process take it at once."""
        ...

    def delete(self) -> None:
        """Removes it, unless another process has taken it."""
        ...


class Journals(Protocol):
    """Records of work under way, by name, with which another process can go on.

    A journal is a list of parts. At most one process holds it; others can read. All methods, those
    of `Journal` too, raise OSError or StorageError. Safe for several threads and processes at once.

    Attributes:
        poll_seconds: between two looks of a reader.
    """

    @property
    def poll_seconds(self) -> float: ...  # noqa: D102

    def create(self, name: str, first: bytes) -> Journal:
        """Makes a journal, durably, and holds it."""
        ...

    def take(self, name: str, *, force: bool = False) -> Journal | None:
        """Holds a journal that nobody holds, or whose holder died; else returns None.

        A holder of this machine is known to be dead at once; elsewhere it takes several calls, over
        as long as a holder's lease lasts.

        force: also from a holder that lives, whose next `append` returns False.
        """
        ...

    def read(self, name: str, cursor: int = 0) -> tuple[list[bytes], int] | None:
        """The parts from `cursor` on (0: all), and the cursor behind them; None: no such journal.

        Damaged parts, and one that a holder did not finish, are left out.
        """
        ...

    def delete(self, name: str) -> bool:
        """Removes a journal, whoever holds it; False if there is none."""
        ...
