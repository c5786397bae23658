"""Encrypted stores: AES-256-GCM for all that files hold, HMAC-SHA256 for names.

A directory store has a random secret, which store.json holds encrypted with the master key, so that
a new master key rewrites store.json alone. Every file has a key of its own: HKDF-SHA256 of the
secret, of random bytes in its header, and of its place in the store. Blocks of 64 KiB have their
number as nonce, and it and the place as associated data: a block that is moved within a file, put
into another file, or cut off is refused.

    file       header, block 0, block 1, ...
    header     magic, version, block bytes, front bytes, plain bytes, id of the secret, 32 random
               bytes, GCM tag over all of these; 128 bytes
    block 0    the front of the snapshot file and its tag (16 bytes)
    block n    64 KiB of the rest, the last one less, and its tag
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from kvpager.errors import CorruptSnapshotError, InvalidArgumentError, StorageError
from kvpager.stores.base import ByteRanges
from kvpager.stores.companions import KINDS

KEY_BYTES, SALT_BYTES, ID_BYTES, NONCE_BYTES, TAG_BYTES = 32, 32, 8, 12, 16
HEADER_BYTES, BLOCK_BYTES = 128, 65536
_SOME_BLOCKS = 8  # of a local file that are read at a time
# Buffers for them, of encrypted bytes: the system would give new ones page by page.
_spare: list[bytearray] = []
_MOST_SPARE = 8
_HEADER = struct.Struct(f"<8sIIIQ{ID_BYTES}s{SALT_BYTES}s")
_MAGIC, _VERSION = b"KVPCRYPT", 1
_HEADER_NONCE = b"\xff" * NONCE_BYTES  # no block has this number
KEY_VARIABLE, KEY_FILE_VARIABLE = "KVPAGER_STORE_KEY", "KVPAGER_STORE_KEY_FILE"
TENANT_VARIABLE = "KVPAGER_STORE_TENANT"

# Returns master keys, the current one first.
KeySource: TypeAlias = Callable[[], Sequence[bytes]]


class StoreKey:
    """The master keys of encrypted stores: the first one encrypts, all decrypt.

    Each tenant's key is derived from them, so that one tenant's stores tell nothing of another's.
    Needs the package `cryptography` (`pip install 'kvpager[encryption]'`).

    Args:
        source: a key of 32 bytes; several of them, the current one first; or a function that
            returns them, called when a store is opened and when a key is missing.
        tenant: whose key is derived.

    Raises:
        InvalidArgumentError: a key has another length, or the package is missing.

    Example:
        >>> store = DirectoryStore("agents", key=StoreKey.from_file("master.key", tenant="acme"))
    """

    def __init__(self, source: bytes | Sequence[bytes] | KeySource, *, tenant: str = "") -> None:
        _primitives()
        if not isinstance(tenant, str):
            raise InvalidArgumentError(f"tenant is {tenant!r}; expected a str")
        self._tenant = tenant.encode("utf-8")
        self._source: KeySource = source if callable(source) else lambda: _listed(source)
        self._derived: list[bytes] = []
        self._load()

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, tenant: str = "") -> StoreKey:
        """From a file with a key of 64 hexadecimal digits a line, the current one first.

        The file is read again when a key is missing. `openssl rand -hex 32` makes a key.

        Args:
            path: of the file.
            tenant: whose key is derived.

        Raises:
            StorageError: the file cannot be read.
            InvalidArgumentError: a line is no key.
        """

        def read() -> Sequence[bytes]:
            try:
                text = Path(path).read_text("ascii")
            except (OSError, UnicodeDecodeError) as error:
                raise StorageError(f"{path}: cannot read the store's key: {error}") from error
            return _parsed(text, str(path))

        return cls(read, tenant=tenant)

    @classmethod
    def from_environment(cls) -> StoreKey | None:
        """From KVPAGER_STORE_KEY, or the file of KVPAGER_STORE_KEY_FILE; None without either.

        The tenant is KVPAGER_STORE_TENANT.
        """
        tenant = os.environ.get(TENANT_VARIABLE, "")
        if text := os.environ.get(KEY_VARIABLE):
            return cls(_parsed(text, KEY_VARIABLE), tenant=tenant)
        if path := os.environ.get(KEY_FILE_VARIABLE):
            return cls.from_file(path, tenant=tenant)
        return None

    def cipher(self, place: str) -> BlockCipher:
        """Encrypts a file that is in no store, with the tenant's current key."""
        return BlockCipher(self._derived[0], key_id(self._derived[0]), place)

    def plain(self, below: ByteRanges, path: str, place: str) -> PlainRanges:
        """The plain bytes of such a file.

        below: its encrypted bytes. path: for messages. place: as `cipher` was given.

        Raises:
            StorageError, CorruptSnapshotError: its key was not given; it is damaged.
        """
        return PlainRanges(below, path, place, lambda wanted: self.by_id(wanted, path))

    def _load(self) -> None:
        masters = list(self._source())
        if not masters:
            raise InvalidArgumentError("source has no keys; expected at least one, of 32 bytes")
        for number, master in enumerate(masters):
            if not isinstance(master, (bytes, bytearray)) or len(master) != KEY_BYTES:
                raise InvalidArgumentError(
                    f"key {number} is {_kind_of(master)}; expected {KEY_BYTES} bytes"
                )
        self._derived = [_derived(bytes(m), b"tenant\0" + self._tenant) for m in masters]

    def current(self) -> bytes:
        """The tenant's current key, 32 bytes."""
        return self._derived[0]

    def by_id(self, wanted: bytes, what: str) -> bytes:
        """The tenant's key whose id is `wanted`. `what` is encrypted with it, for the message.

        Raises StorageError if it is not among the keys.
        """
        for attempt in range(2):
            for key in self._derived:
                if key_id(key) == wanted:
                    return key
            if attempt == 0:
                self._load()
        given = ", ".join(key_id(key).hex() for key in self._derived)
        raise StorageError(
            f"{what}: it is encrypted with key {wanted.hex()}, and the given ones are {given}; "
            "give the master key and the tenant that it was saved under"
        )

    def wrap(self, secret: bytes) -> dict[str, str]:
        """A secret encrypted with the current key, as JSON values."""
        nonce = os.urandom(NONCE_BYTES)
        text = _aead(self.current()).encrypt(nonce, secret, b"secret")
        return {"key": key_id(self.current()).hex(), "nonce": nonce.hex(), "secret": text.hex()}

    def unwrap(self, wrapped: Any, what: str) -> bytes:
        """The secret that `wrap` has `wrapped`. `what` has it, for messages.

        Raises:
            StorageError: its key was not given. CorruptSnapshotError: it is damaged.
        """
        try:
            key, nonce, text = (bytes.fromhex(wrapped[n]) for n in ("key", "nonce", "secret"))
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptSnapshotError(f"{what}: its encryption is damaged: {error}") from error
        found = self.by_id(key, what)
        with _refusing(what, "its secret"):
            secret: bytes = _aead(found).decrypt(nonce, text, b"secret")
            return secret

    def rewrap(self, wrapped: Any, what: str) -> dict[str, str]:
        """The secret that `wrap` has `wrapped`, encrypted with the current key. See `unwrap`.

        what: has it, for messages.
        """
        return self.wrap(self.unwrap(wrapped, what))


def make_key(key: StoreKey | bytes | None) -> StoreKey | None:
    """A StoreKey of what a caller gave; without anything, that of the environment."""
    if key is None:
        return StoreKey.from_environment()
    return key if isinstance(key, StoreKey) else StoreKey(key)


def secret_of(
    store: str, wrapped: Any, key: StoreKey | None, *, is_given: bool, file: str
) -> Secret | None:
    """The secret of a store; None if it is plain.

    Args:
        store: for messages.
        wrapped: the secret in the store's settings; None: it is plain.
        key: that opens it; None without any.
        is_given: whether the caller gave the key, rather than the environment.
        file: of the settings.

    Raises:
        InvalidArgumentError: a plain store was given a key, or an encrypted one none.
        StorageError: it is another key. CorruptSnapshotError: the wrapped secret is damaged.
    """
    if wrapped is None:
        if is_given:
            raise InvalidArgumentError(
                f"key is given, and {store} is a store without encryption; expected None, or a new "
                "store to copy its snapshots to (`kvpager snapshot export`, `import`)"
            )
        return None
    if key is None:
        raise InvalidArgumentError(
            f"key is None, and {store} is encrypted; expected its key, also by "
            f"{KEY_VARIABLE} or {KEY_FILE_VARIABLE}"
        )
    return Secret(key.unwrap(wrapped, file))


class Secret:
    """What a store's files and names are encrypted with."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.id = key_id(secret)
        self._names = _derived(secret, b"names")
        self._texts = _aead(_derived(secret, b"texts"))

    def stored(self, name: str) -> str:
        """The name of a snapshot's files: an HMAC, with the suffixes of companions as they are."""
        suffix, base = "", name
        while kind := next((kind for kind in KINDS if base.endswith(f".{kind}")), None):
            base, suffix = base.removesuffix(f".{kind}"), f".{kind}{suffix}"
        return hmac.new(self._names, base.encode(), hashlib.sha256).hexdigest()[:40] + suffix

    def hide(self, text: str) -> bytes:
        """A text for the index."""
        nonce = os.urandom(NONCE_BYTES)
        return nonce + bytes(self._texts.encrypt(nonce, text.encode(), b"index"))

    def show(self, hidden: str | bytes) -> str:
        """The text of `hide`. Raises CorruptSnapshotError if it is damaged."""
        hidden = hidden if isinstance(hidden, bytes) else b""
        with _refusing("the store's index (reindex() makes it anew)", "a name"):
            text: bytes = self._texts.decrypt(hidden[:NONCE_BYTES], hidden[NONCE_BYTES:], b"index")
            return text.decode()

    def cipher(self, place: str) -> BlockCipher:
        """Encrypts a new file. place: its folder and name in the store; empty: it has none."""
        return BlockCipher(self._secret, self.id, place)

    def label(self, data: bytes) -> bytes:
        """An HMAC of 16 bytes, by which the index finds what it must not name."""
        return hmac.digest(self._names, data, "sha256")[:16]

    def file_aead(self, salt: bytes, place: str) -> Any:
        """AES-256-GCM with the key of one file, for messages whose nonces never repeat in it.

        salt: random bytes of the file. place: its folder and name in the store.
        """
        return _aead(_file_key(self._secret, salt, place.encode()))

    def lines(self, place: str) -> LineCipher:
        """Encrypts the lines of a file. place: its folder and name in the store."""
        return LineCipher(self._secret, place)

    def plain(self, below: ByteRanges, path: str, place: str) -> PlainRanges:
        """The plain bytes of an encrypted file. Raises StorageError, CorruptSnapshotError."""

        def checked(wanted: bytes) -> bytes:
            if wanted != self.id:
                raise StorageError(f"{path}: it is encrypted for another store ({wanted.hex()})")
            return self._secret

        return PlainRanges(below, path, place, checked)


class LineCipher:
    """Encrypts the lines of one file. Each has a random nonce; an old file's name never returns."""

    def __init__(self, secret: bytes, place: str) -> None:
        self._aead = _aead(_derived(secret, b"lines\0" + place.encode()))
        self._place = place

    def seal(self, line: bytes) -> bytes:
        """A line encrypted, in base64."""
        nonce = os.urandom(NONCE_BYTES)
        return base64.b64encode(nonce + bytes(self._aead.encrypt(nonce, line, b"")))

    def unseal(self, sealed: bytes) -> bytes:
        """The line of `seal`. Raises CorruptSnapshotError if it is damaged."""
        with _refusing(self._place, "a line"):
            data = base64.b64decode(sealed, validate=True)
            line: bytes = self._aead.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], b"")
            return line


class BlockCipher:
    """Encrypts one file as `SnapshotWriter` writes it."""

    block_bytes, header_bytes, tag_bytes = BLOCK_BYTES, HEADER_BYTES, TAG_BYTES

    def __init__(self, secret: bytes, secret_id: bytes, place: str) -> None:
        self._id, self._place, self._salt = secret_id, place.encode(), os.urandom(SALT_BYTES)
        self._aead = _aead(_file_key(secret, self._salt, self._place))
        self._front_bytes = 4096

    def header(self, plain_bytes: int) -> bytes:
        """The header of a file with so many plain bytes."""
        fields = _HEADER.pack(
            _MAGIC, _VERSION, BLOCK_BYTES, self._front_bytes, plain_bytes, self._id, self._salt
        ).ljust(HEADER_BYTES - TAG_BYTES, b"\0")
        tag: bytes = self._aead.encrypt(_HEADER_NONCE, b"", fields + self._place)
        return fields + tag

    def encrypt(self, first: int, plain: memoryview, out: memoryview) -> None:
        """Blocks from number `first` on; the front is block 0. `out` has room for their tags."""
        size = len(plain) if first == 0 else BLOCK_BYTES
        for i in range(-(-len(plain) // size)):
            block = plain[i * size : (i + 1) * size]
            start = i * (size + TAG_BYTES)
            into = out[start : start + len(block) + TAG_BYTES]
            data = _data_of(self._place, first + i)
            self._aead.encrypt_into(_nonce_of(first + i), block, data, into)


class _Header(NamedTuple):
    magic: bytes
    version: int
    block_bytes: int
    front_bytes: int
    plain_bytes: int
    secret: bytes
    salt: bytes


class PlainRanges:
    """The plain bytes of an encrypted file."""

    def __init__(
        self, below: ByteRanges, path: str, place: str, secret: Callable[[bytes], bytes]
    ) -> None:
        self._below, self._path, self._place = below, path, place.encode()
        if below.size < HEADER_BYTES:
            raise CorruptSnapshotError(
                f"{path}: it has {below.size} bytes; expected the header of an encrypted file"
            )
        header = bytes(below.read(0, HEADER_BYTES))
        fields = _Header(*_HEADER.unpack_from(header))
        if fields.magic != _MAGIC or fields.version != _VERSION or fields.block_bytes <= 0:
            raise CorruptSnapshotError(
                f"{path}: it begins with {header[:8]!r}; expected {_MAGIC!r}, an encrypted file"
            )
        self.size = fields.plain_bytes
        self._block, self._front = fields.block_bytes, fields.front_bytes
        self._aead = _aead(_file_key(secret(fields.secret), fields.salt, self._place))
        with _refusing(path, "its header"):
            signed = header[:-TAG_BYTES] + self._place
            self._aead.decrypt(_HEADER_NONCE, header[-TAG_BYTES:], signed)
        if below.size != self._start(self._blocks):
            raise CorruptSnapshotError(
                f"{path}: it has {below.size} bytes; expected {self._start(self._blocks)}"
            )

    @property
    def _blocks(self) -> int:
        return 1 + -(-(self.size - min(self.size, self._front)) // self._block)

    def _plain_start(self, block: int) -> int:
        """Where a block begins in the plain text; that behind the last one: where it ends."""
        start = 0 if block == 0 else self._front + (block - 1) * self._block
        return min(start, self.size)

    def _start(self, block: int) -> int:
        return HEADER_BYTES + self._plain_start(block) + block * TAG_BYTES

    def block_start(self, offset: int) -> int:
        """Where, in the encrypted file, the block with the plain byte `offset` begins."""
        return self._start(self._block_of(offset))

    def _block_of(self, offset: int) -> int:
        return 0 if offset < self._front else 1 + (offset - self._front) // self._block

    def _range(self, offset: int, size: int) -> tuple[int, int]:
        """The blocks, first and behind the last, that have these bytes."""
        if not 0 <= offset <= offset + size <= self.size:
            raise CorruptSnapshotError(
                f"{self._path}: bytes {offset} to {offset + size} are wanted of {self.size}"
            )
        return self._block_of(offset), self._block_of(max(offset, offset + size - 1)) + 1

    def read(self, offset: int, size: int) -> bytearray:
        """See `ByteRanges.read`."""
        out = bytearray(size)
        self._read_into(offset, memoryview(out))
        return out

    def _read_into(self, offset: int, out: memoryview) -> None:
        first, end = self._range(offset, len(out))
        if not len(out):
            return
        for block, text in self._blocks_of(first, end):
            start, stop = self._plain_start(block), self._plain_start(block + 1)
            into, last = out[max(0, start - offset) : stop - offset], offset + len(out)
            is_whole = offset <= start and stop <= last
            plain = into if is_whole else memoryview(bytearray(stop - start))
            with _refusing(self._path, f"block {block}"):
                self._aead.decrypt_into(_nonce_of(block), text, _data_of(self._place, block), plain)
            if not is_whole:
                into[:] = plain[max(0, offset - start) : last - start]

    def _blocks_of(self, first: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """Encrypted blocks: of a local file some at a time, in a buffer that stays in the cache."""
        into = getattr(self._below, "_read_into", None)
        some = end - first if into is None else _SOME_BLOCKS
        for start in range(first, end, some):
            stop = min(start + some, end)
            begin, size = self._start(start), self._start(stop) - self._start(start)
            if into is None:  # one request
                yield from self._parts(memoryview(self._below.read(begin, size)), start, stop)
                continue
            buffer = bytearray()
            with contextlib.suppress(IndexError):
                buffer = _spare.pop()
            if len(buffer) < size:
                buffer = bytearray(size)
            into(begin, memoryview(buffer)[:size])
            yield from self._parts(memoryview(buffer), start, stop)
            if len(_spare) < _MOST_SPARE:
                _spare.append(buffer)

    def _parts(self, text: memoryview, first: int, end: int) -> Iterator[tuple[int, memoryview]]:
        begin = self._start(first)
        for block in range(first, end):
            yield block, text[self._start(block) - begin : self._start(block + 1) - begin]

    def will_need(self, offset: int, size: int) -> None:
        """See `ByteRanges.will_need`."""
        if not size:
            return
        with contextlib.suppress(CorruptSnapshotError):
            first, end = self._range(offset, size)
            self._below.will_need(self._start(first), self._start(end) - self._start(first))


def stored_name(secret: Secret | StoreKey | None, name: str) -> str:
    """The name of a snapshot's or a journal's files."""
    return secret.stored(name) if isinstance(secret, Secret) else name


def is_encrypted(file: ByteRanges) -> bool:
    """Whether it begins as an encrypted file does."""
    return file.size >= HEADER_BYTES and bytes(file.read(0, len(_MAGIC))) == _MAGIC


def new_secret() -> bytes:
    """A secret for a new store."""
    return os.urandom(KEY_BYTES)


def key_id(key: bytes) -> bytes:
    """Tells keys apart, and nothing else about them."""
    return _derived(key, b"id", ID_BYTES)


def _file_key(secret: bytes, salt: bytes, place: bytes) -> bytes:
    return _derived(secret, b"file\0" + place, salt=salt)


def _nonce_of(block: int) -> bytes:
    return block.to_bytes(NONCE_BYTES, "little")


def _data_of(place: bytes, block: int) -> bytes:
    return block.to_bytes(8, "little") + place


def _derived(key: bytes, purpose: bytes, size: int = KEY_BYTES, salt: bytes | None = None) -> bytes:
    _, hkdf, sha256 = _primitives()
    derived: bytes = hkdf(sha256(), size, salt, b"kvpager\0" + purpose).derive(key)
    return derived


def _aead(key: bytes) -> Any:
    aesgcm, _, _ = _primitives()
    return aesgcm(key)


def _primitives() -> tuple[Any, Any, Any]:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        raise InvalidArgumentError(
            "encrypted stores need the package cryptography: pip install 'kvpager[encryption]'"
        ) from error
    return AESGCM, HKDF, SHA256


class _refusing(contextlib.AbstractContextManager[None]):  # noqa: N801  # used as a function
    """Turns a failed authentication into CorruptSnapshotError."""

    def __init__(self, path: str, what: str) -> None:
        self._path, self._what = path, what

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        from cryptography.exceptions import InvalidTag

        if isinstance(error, (InvalidTag, ValueError)):  # ValueError: too short
            raise CorruptSnapshotError(
                f"{self._path}: {self._what} is not what was encrypted: it was damaged, moved from "
                "another place, or changed"
            ) from error


def _listed(source: bytes | Sequence[bytes]) -> Sequence[bytes]:
    return [bytes(source)] if isinstance(source, (bytes, bytearray)) else list(source)


def _parsed(text: str, what: str) -> list[bytes]:
    """Keys of a text with one of 64 hexadecimal digits a line."""
    keys = []
    for number, line in enumerate(text.split(), start=1):
        try:
            key = bytes.fromhex(line)
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            raise InvalidArgumentError(
                f"{what}: key {number} has {len(line)} characters; expected 64 hexadecimal digits"
            )
        keys.append(key)
    return keys


def _kind_of(value: object) -> str:
    return f"{len(value)} bytes" if isinstance(value, (bytes, bytearray)) else repr(type(value))
