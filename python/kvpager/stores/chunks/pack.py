"""Packs: files of blocks that one `put` writes. They never change, except that blocks are freed.

    header     72 bytes: magic, version, flags (1: encrypted), time of writing in ns, bytes of the
               file, bytes of the metadata, number of blocks, 32 random bytes; then a check of 16
    metadata   from byte 128 on: bytes of the identity, its JSON, an entry of 40 bytes for each
               block (start, bytes, group, bytes of its key, check), all keys
    blocks     each from a multiple of 4096 on

All numbers are little-endian. The check of a block is XXH3-128 of its binding (SHA-256 of the
identity, group, size, key) and of XXH3-128 of its bytes; that of the header is XXH3-128 of header
and metadata. In an encrypted store metadata and blocks are AES-256-GCM messages of the file's own
key, with header or binding as associated data, and their tags are the checks. The nonce of a block
is its start. Freed blocks are holes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import stat
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from kvpager import _core
from kvpager.errors import CorruptSnapshotError, StorageError, UnsupportedVersionError
from kvpager.stores.encryption import NONCE_BYTES, Secret
from kvpager.stores.files import remove, set_mode, sync_folder
from kvpager.stores.names import BLOCKS_SUFFIX, new_pack_id, temporary_name

ALIGNMENT = 4096
CHECK_BYTES = 16
MOST_BLOCK_BYTES = (1 << 31) - 1  # of one AES-GCM message
MOST_KEY_BYTES = 1024
MOST_GROUP = (1 << 32) - 1
_MAGIC, _VERSION, _ENCRYPTED = b"\x89KVBLKS\n", 1, 1
_HEADER = struct.Struct("<8sIIQQII32s")
_METADATA_START = 128
_ENTRY = struct.Struct("<QQIH2x16s")
_BINDING = struct.Struct("<32sIQ")
_LENGTH = struct.Struct("<I")
_WRITE_BYTES, _MOST_PARTS = 8 << 20, 1000  # of one write; the system takes 1024 parts
_ZEROS = memoryview(bytes(ALIGNMENT))
_METADATA_NONCE = b"\xff" * NONCE_BYTES  # no block starts there


def span(size: int) -> int:
    """Bytes on disk of so many bytes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Identity:
    """Whose blocks these are: JSON text of an object, and its SHA-256."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = hashlib.sha256(text.encode()).digest()

    def label(self, key: bytes, group: int, secret: Secret | None) -> bytes:
        """By what the index finds a block: 16 bytes of hash; keyed in an encrypted store."""
        data = self.digest + _LENGTH.pack(group) + key
        return xxhash.xxh3_128_digest(data) if secret is None else secret.label(data)

    def binding(self, key: bytes, group: int, size: int) -> bytes:
        """What the check of a block binds besides its bytes."""
        return _BINDING.pack(self.digest, group, size) + key


class Entry(NamedTuple):
    """A block in its pack. start: in the file."""

    key: bytes
    group: int
    start: int
    size: int
    check: bytes


class Table(NamedTuple):
    """What the front of a pack says.

    Attributes:
        front: bytes before the first block.
        bytes: of the file.
        created_ns: when it was written.
    """

    identity: Identity
    entries: list[Entry]
    front: int
    bytes: int
    created_ns: int


class Buffers:
    """Memory for the blocks that one thread reads, one after the other.

    Attributes:
        raw: bytes of a block as they are on disk.
    """

    def __init__(self) -> None:
        self._raw, self._plain = bytearray(), bytearray()
        self.raw = memoryview(self._raw)

    def resize(self, size: int) -> memoryview:
        """Makes `raw` this large; returns it."""
        if len(self._raw) < size + CHECK_BYTES:
            self._raw = bytearray(size + CHECK_BYTES)
        self.raw = memoryview(self._raw)[:size]
        return self.raw

    def text(self, tag: bytes) -> memoryview:
        """`raw` and a tag behind it."""
        text = memoryview(self._raw)[: len(self.raw) + CHECK_BYTES]
        text[len(self.raw) :] = tag
        return text

    @property
    def plain(self) -> memoryview:
        """As many bytes as `raw` has, for what is decrypted."""
        if len(self._plain) < len(self.raw):
            self._plain = bytearray(len(self.raw))
        return memoryview(self._plain)[: len(self.raw)]


class _Hashed:
    """Blocks as they are, with hashes."""

    def close(self, binding: bytes, start: int, data: memoryview) -> tuple[Any, bytes]:
        """The bytes to be written, and the check."""
        return data, _core.block_check(binding, data)


class _Encrypted:
    def __init__(self, secret: Secret, salt: bytes, place: str) -> None:
        self._aead = secret.file_aead(salt, place)

    def close(self, binding: bytes, start: int, data: memoryview) -> tuple[Any, bytes]:
        """See `_Hashed.close`."""
        text = memoryview(self._aead.encrypt(_nonce(start), data, binding))
        return text[: len(data)], bytes(text[len(data) :])

    def opens(self, binding: bytes, start: int, check: bytes, data: Buffers) -> memoryview | None:
        """The block whose bytes on disk are in `data`; None: they are not what was written."""
        text, plain = data.text(check), data.plain
        with contextlib.suppress(_invalid_tag()):
            self._aead.decrypt_into(_nonce(start), text, binding, plain)
            return plain
        return None

    def close_metadata(self, header: bytes, metadata: bytes) -> tuple[bytes, bytes]:
        text = self._aead.encrypt(_METADATA_NONCE, metadata, header)
        return text[:-CHECK_BYTES], text[-CHECK_BYTES:]

    def open_metadata(self, header: bytes, metadata: bytes, check: bytes) -> bytes | None:
        with contextlib.suppress(_invalid_tag()):
            return bytes(self._aead.decrypt(_METADATA_NONCE, metadata + check, header))
        return None


def _invalid_tag() -> type[Exception]:
    from cryptography.exceptions import InvalidTag

    return InvalidTag


_HASHED = _Hashed()


def _nonce(start: int) -> bytes:
    return start.to_bytes(NONCE_BYTES, "little")


def _place(pack: str) -> str:
    return f"packs/{pack}{BLOCKS_SUFFIX}"


class PackWriter:
    """Writes one pack. A context manager: what was not published is removed at its end.

    Attributes:
        id: of the new pack.
        path: of the file when it is published.
        temporary: of the file until then.
        bytes: of the file.
        table: set by `write`.
    """

    table: Table

    def __init__(
        self,
        folder: str,
        identity: Identity,
        blocks: Sequence[tuple[bytes, int, memoryview]],
        secret: Secret | None,
    ) -> None:
        """`folder`: of the packs; `blocks`: key, group and bytes of each."""
        self.id = new_pack_id()
        self.path = f"{folder}/{self.id}{BLOCKS_SUFFIX}"
        self.temporary = f"{folder}/{temporary_name()}"
        self._folder, self._identity, self._blocks, self._secret = folder, identity, blocks, secret
        metadata = _LENGTH.size + len(identity.text.encode())
        metadata += sum(_ENTRY.size + len(key) for key, _, _ in blocks)
        self._front = span(_METADATA_START + metadata)
        self.bytes = self._front + sum(span(len(data)) for _, _, data in blocks)
        self._file: _core.OwnedFile | None = None

    def create(self, mode: int) -> None:
        """Makes the temporary file, with all its room on disk. REQUIRES: the store's lock."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        self._file = _core.OwnedFile(self.temporary, flags)
        self._file.lock(fcntl.LOCK_EX | fcntl.LOCK_NB)  # a file without a lock has a dead writer
        set_mode(self._file.fileno(), mode)
        os.posix_fallocate(self._file.fileno(), 0, self.bytes)

    def write(self) -> None:
        """Writes and syncs the file."""
        assert self._file is not None
        file, salt = self._file.fileno(), secrets.token_bytes(32)
        seal = _seal(self._secret, salt, self.id)
        entries, start = [], self._front
        parts, first = list[Any](), start
        for key, group, data in self._blocks:
            binding = self._identity.binding(key, group, len(data))
            text, check = seal.close(binding, start, data)
            entries.append(Entry(key, group, start, len(data), check))
            start += span(len(data))
            parts += [text, _ZEROS[: span(len(data)) - len(data)]]
            if start - first >= _WRITE_BYTES or len(parts) >= _MOST_PARTS:
                _write(file, parts, first)
                parts, first = [], start
        _write(file, parts, first)
        self.table = Table(self._identity, entries, self._front, self.bytes, time.time_ns())
        _write(file, [_front_of(self.table, seal, salt)], 0)
        os.fsync(file)

    def publish(self) -> None:
        """Gives the file its name, durably. REQUIRES: the store's lock."""
        Path(self.temporary).rename(self.path)
        self._file = None
        sync_folder(self._folder)

    def discard(self) -> None:
        """Removes the file if it was not published. May be called twice."""
        if self._file is not None:
            remove(self.temporary)
            self._file = None

    def __enter__(self) -> PackWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


def _write(file: int, parts: Sequence[Any], start: int) -> None:
    """Writes parts one behind the other. Large writes give the page cache large pages."""
    views = [view for part in parts if (view := memoryview(part))]
    while views:
        count = os.pwritev(file, views, start)
        start += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]


def _seal(secret: Secret | None, salt: bytes, pack: str) -> _Hashed | _Encrypted:
    return _HASHED if secret is None else _Encrypted(secret, salt, _place(pack))


def _front_of(table: Table, seal: _Hashed | _Encrypted, salt: bytes) -> bytes:
    """Header and metadata."""
    text = table.identity.text.encode()
    parts = [_LENGTH.pack(len(text)), text]
    parts += [_ENTRY.pack(e.start, e.size, e.group, len(e.key), e.check) for e in table.entries]
    metadata = b"".join([*parts, *(e.key for e in table.entries)])
    flags = 0 if seal is _HASHED else _ENCRYPTED
    header = _HEADER.pack(
        _MAGIC,
        _VERSION,
        flags,
        table.created_ns,
        table.bytes,
        len(metadata),
        len(table.entries),
        salt,
    )
    if isinstance(seal, _Encrypted):
        metadata, check = seal.close_metadata(header, metadata)
    else:
        check = xxhash.xxh3_128_digest(header + metadata)
    return (header + check).ljust(_METADATA_START, b"\0") + metadata


class PackFile:
    """An open pack. Any number of threads may read it.

    Opening it raises OSError, FileNotFoundError without any, and of an encrypted one
    CorruptSnapshotError.
    """

    def __init__(self, path: str, pack: str, secret: Secret | None) -> None:
        self.path = path
        self._pack, self._secret = pack, secret
        self._file = _core.OwnedFile(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise StorageError(f"{path}: not a regular file; put the file itself in its place")
        self.inode, self.bytes, self.mtime_ns = status.st_ino, status.st_size, status.st_mtime_ns
        self.seal: _Hashed | _Encrypted = _HASHED
        if secret is not None:
            self.seal = _seal(secret, self._header()[1][-1], pack)

    @property
    def descriptor(self) -> int:
        """The file's descriptor, which stays this object's."""
        return self._file.fileno()

    def read_into(self, start: int, out: memoryview) -> bool:
        """Reads as many bytes as `out` has; False if the file has not so many."""
        done = 0
        while done < len(out):
            count = os.preadv(self._file.fileno(), [out[done:]], start + done)
            if count == 0:
                return False
            done += count
        return True

    def _read(self, start: int, size: int) -> bytes:
        out = bytearray(size)
        if start + size > self.bytes or not self.read_into(start, memoryview(out)):
            raise CorruptSnapshotError(f"{self.path}: it ends before byte {start + size}")
        return bytes(out)

    def _header(self) -> tuple[bytes, tuple[Any, ...], bytes]:
        """The header, its fields and its check."""
        front = self._read(0, _HEADER.size + CHECK_BYTES)
        header, check = front[: _HEADER.size], front[_HEADER.size :]
        fields = _HEADER.unpack(header)
        if fields[0] != _MAGIC:
            raise CorruptSnapshotError(
                f"{self.path}: it begins with {header[:8]!r}; expected {_MAGIC!r}, a pack of blocks"
            )
        if fields[1] > _VERSION:
            raise UnsupportedVersionError(
                f"{self.path}: version is {fields[1]}, this release knows {_VERSION}; use the "
                "release that wrote it, or a newer one"
            )
        encrypted = bool(fields[2] & _ENCRYPTED)
        if encrypted != (self._secret is not None):
            what = "encrypted" if encrypted else "not encrypted"
            raise CorruptSnapshotError(f"{self.path}: it is {what}, and its store is not so")
        return header, fields, check

    def table(self) -> Table:
        """What its front says. Raises CorruptSnapshotError, UnsupportedVersionError, OSError."""
        header, fields, check = self._header()
        _, _, _, created_ns, size, metadata_bytes, count, _ = fields
        if size != self.bytes:
            raise CorruptSnapshotError(f"{self.path}: it has {self.bytes} bytes; expected {size}")
        metadata: bytes | None = self._read(_METADATA_START, metadata_bytes)
        assert metadata is not None
        if isinstance(self.seal, _Encrypted):
            metadata = self.seal.open_metadata(header, metadata, check)
        elif xxhash.xxh3_128_digest(header + metadata) != check:
            metadata = None
        if metadata is None:
            raise CorruptSnapshotError(f"{self.path}: its table is not what was written")
        try:
            return _parsed(metadata, count, size, created_ns)
        except (struct.error, ValueError, RecursionError) as error:  # the check holds all the same
            raise CorruptSnapshotError(
                f"{self.path}: its table is inconsistent: {error}"
            ) from error


class Wanted(NamedTuple):
    """A block that is to be read. start, check: of its row in the index. into: as many bytes."""

    pack: PackFile
    start: int
    binding: bytes
    check: bytes
    into: memoryview


def read_blocks(gate: _core.ReadGate, blocks: Sequence[Wanted], buffers: Buffers) -> list[str]:
    """Reads blocks of one store, and copies those that are what was written. See `_core`."""
    if blocks and isinstance(blocks[0].pack.seal, _Encrypted):
        return [_read_encrypted(gate, block, buffers) for block in blocks]
    return _core.read_blocks(gate, [(block.pack.descriptor, *block[1:]) for block in blocks])


def _read_encrypted(gate: _core.ReadGate, block: Wanted, buffers: Buffers) -> str:
    pack, start, binding, check, into = block
    assert isinstance(pack.seal, _Encrypted)
    if not gate.is_open():
        return "miss"
    try:
        is_whole = pack.read_into(start, buffers.resize(len(into)))
    except OSError:
        return "unreadable"
    plain = pack.seal.opens(binding, start, check, buffers) if is_whole else None
    if plain is None:
        return "damaged"
    return "hit" if gate.copy(into, plain) else "miss"


def _parsed(metadata: bytes, count: int, size: int, created_ns: int) -> Table:
    (length,) = _LENGTH.unpack_from(metadata)
    at = _LENGTH.size + length
    identity = Identity(metadata[_LENGTH.size : at].decode())
    json.loads(identity.text)
    key_start = at + count * _ENTRY.size
    entries: list[Entry] = []
    front = span(_METADATA_START + len(metadata))
    for start, block, group, key_bytes, check in _ENTRY.iter_unpack(metadata[at:key_start]):
        key = metadata[key_start : key_start + key_bytes]
        key_start += key_bytes
        if len(key) != key_bytes or start < front or start % ALIGNMENT or start + block > size:
            raise ValueError(f"block {len(entries)} is not in the file")
        entries.append(Entry(key, group, start, block, check))
    if len(entries) != count:
        raise ValueError(f"{len(entries)} blocks, expected {count}")
    return Table(identity, entries, front, size, created_ns)
