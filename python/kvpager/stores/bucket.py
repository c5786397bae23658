"""Requests to a bucket: conditional writes, ranges, bounded retries, and counts of both.

A request is repeated while the bucket cannot be reached or answers with an error of its own (5xx),
for `retry_seconds` in all. If no other request was answered meanwhile, the bucket then counts as
unreachable: until one is, one a second is tried, once, and all others fail at once. A conditional
write whose answer was lost finds its own object there when it is repeated, a conflict like any
other: callers look at what is there, and write again.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from kvpager.errors import InvalidArgumentError, StorageError

SCHEMES = ("s3", "gs", "az")
_ENDPOINTS = ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT")  # variables
_HAS_BUCKETS = sys.version_info[:2] >= (3, 11)  # obstore needs it
_ONE_PUT_BYTES = 64 << 20  # larger objects are uploaded in parts
_PART_BYTES = 16 << 20
_PAGE = 1000  # objects of one answer to a listing
_NO_SUCH_RANGE = "416 Range Not Satisfiable"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_PROBE_SECONDS = 1.0  # between requests to an unreachable bucket


class ConflictError(Exception):
    """The object is not the version that a conditional write was to replace."""


class UnreachableError(StorageError):
    """The bucket did not answer, or answered with errors of its own, until the time was over."""


@dataclass(frozen=True)
class _Outage:
    """Why the last request failed, and when (monotonic) the next one is tried."""

    error: str
    next_probe: float


@dataclass(frozen=True)
class ObjectVersion:
    """One version of an object.

    Attributes:
        path: relative to the store's address.
        size: in bytes.
        etag: changes whenever the contents do.
        generation: what some services need besides, to replace exactly this version.
        modified: when it was written, by the bucket's clock, seconds since the epoch.
    """

    path: str
    size: int
    etag: str
    generation: str | None
    modified: float

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> ObjectVersion:
        """Converts what obstore returns."""
        modified = meta["last_modified"].timestamp()
        return cls(meta["path"], meta["size"], meta["e_tag"] or "", meta["version"], modified)


def is_bucket(address: str) -> bool:
    """Whether this is the address of a bucket rather than the path of a folder."""
    return address.partition("://")[0] in SCHEMES and "://" in address


def load_obstore() -> Any:
    """The package obstore. Raises StorageError, naming the extra, if it cannot be imported."""
    if not _HAS_BUCKETS:
        raise StorageError(
            f"stores in buckets need Python 3.11 or later, and this is {sys.version.split()[0]}"
        )
    try:
        return importlib.import_module("obstore")
    except ImportError as error:
        raise StorageError(
            f"stores in buckets need the package obstore ({error}); install kvpager[s3]"
        ) from error


class Bucket:
    """The objects below one address. Used by any number of threads.

    Args:
        address: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://ACCOUNT/CONTAINER/PREFIX, or a store
            of obstore.
        options: settings of obstore for this service, such as endpoint, region or keys; without
            them, the environment's.
        retry_seconds: for how long a failing request is repeated.
        timeout: seconds without an answer after which a request has failed.
    """

    def __init__(
        self,
        address: object,
        options: Mapping[str, Any] | None,
        *,
        retry_seconds: float,
        timeout: float,
    ) -> None:
        self._obstore = load_obstore()
        self._errors = importlib.import_module("obstore.exceptions")
        self._retry_seconds = retry_seconds
        self._lock = threading.Lock()
        self._outage: _Outage | None = None
        self._answers = 0  # a refusal is one, too
        self._requests: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        if isinstance(address, str):
            self.address = address.rstrip("/")
            if not is_bucket(address):
                expected = " or ".join(f"{scheme}://" for scheme in SCHEMES)
                raise InvalidArgumentError(f"address is {address!r}; expected {expected}")
            self._store = self._open(dict(options or {}), timeout, 0.0)
            self._retrying_store = self._open(dict(options or {}), timeout, retry_seconds)
        else:
            self.address = repr(address)
            self._store = self._retrying_store = address

    def _open(self, options: dict[str, Any], timeout: float, retry_seconds: float) -> Any:
        endpoints = [options.get("endpoint"), *map(os.environ.get, _ENDPOINTS)]
        client = {
            "connect_timeout": timedelta(seconds=min(5.0, timeout)),
            "read_timeout": timedelta(seconds=timeout),
            "timeout": timedelta(hours=1),
            "allow_http": any(str(one).startswith("http://") for one in endpoints),
        }
        retries = {
            "max_retries": 10 if retry_seconds else 0,
            "retry_timeout": timedelta(seconds=retry_seconds),
        }
        try:
            return importlib.import_module("obstore.store").from_url(
                self.address, config=options, client_options=client, retry_config=retries
            )
        except (self._errors.BaseError, TypeError, ValueError) as error:
            raise InvalidArgumentError(f"{self.address}: {_first_line(error)}") from error

    def stats(self) -> dict[str, dict[str, int]]:
        """Requests by kind, and the bytes of those that carry any."""
        with self._lock:
            return {
                kind: {"requests": count, "bytes": self._bytes[kind]}
                for kind, count in sorted(self._requests.items())
            }

    def head(self, path: str) -> ObjectVersion | None:
        """The object's current version; None if there is no such object."""
        try:
            return ObjectVersion.of(self._request("head", path, self._obstore.head, path))
        except FileNotFoundError:
            return None

    def get(self, path: str) -> tuple[bytes, ObjectVersion] | None:
        """An object's bytes and version; None if there is no such object."""

        def whole(store: Any) -> tuple[bytes, ObjectVersion]:
            answer = self._obstore.get(store, path)
            return bytes(answer.bytes()), ObjectVersion.of(answer.meta)

        try:
            data, version = self._request("get", path, whole)
        except FileNotFoundError:
            return None
        self._count_bytes("get", len(data))
        return data, version

    def get_range(self, path: str, start: int, size: int) -> Any:
        """Exactly these bytes of an object, in one request.

        Raises:
            StorageError: the object is missing or ends before.
        """
        try:
            data = self._request(
                "get", path, self._obstore.get_range, path, start=start, length=size
            )
        except FileNotFoundError as error:
            raise StorageError(f"{self.address}/{path}: no longer in the bucket") from error
        self._count_bytes("get", len(data))
        if len(data) != size:
            raise StorageError(
                f"{self.address}/{path}: {len(data)} bytes at {start}, expected {size}"
            )
        return data

    def put(self, path: str, data: bytes) -> None:
        """Writes an object, whatever there is."""
        self._put(path, data, "overwrite")

    def replace(self, path: str, data: bytes, old: ObjectVersion | None) -> ObjectVersion:
        """Writes an object in place of this version of it; None: where there is none.

        Raises ConflictError if another version is there.
        """
        if old is not None and old.generation is None and self.address.startswith("gs://"):
            now = self.head(path)  # listings lack the generation
            if now is None or now.etag != old.etag:
                raise ConflictError(path)
            old = now
        mode: Any = "create"
        if old is not None:
            mode = {"e_tag": old.etag}
            if old.generation is not None:
                mode["version"] = old.generation
        written = self._put(path, data, mode)
        return ObjectVersion(
            path, len(data), written["e_tag"] or "", written["version"], time.time()
        )

    def _put(self, path: str, data: bytes, mode: Any) -> Any:
        put = self._obstore.put
        answer = self._request("put", path, put, path, data, mode=mode, use_multipart=False)
        self._count_bytes("put", len(data))
        return answer

    def upload(self, path: str, file: str, between: Callable[[], None]) -> None:
        """Uploads a file whose object, if it is there, can only be the same.

        between: called between parts of a large one.
        """
        size = Path(file).stat().st_size
        if size <= _ONE_PUT_BYTES:
            try:
                self._put(path, Path(file).read_bytes(), "create")
            except ConflictError:
                there = self.head(path)
                if there is None or there.size != size:
                    raise StorageError(f"{self.address}/{path}: another object is there") from None
            return

        def parts() -> Iterator[bytes]:
            with Path(file).open("rb") as source:
                while part := source.read(_PART_BYTES):
                    between()
                    yield part

        def in_parts(_: Any) -> None:
            self._obstore.put(
                self._retrying_store, path, parts(), use_multipart=True, chunk_size=_PART_BYTES
            )

        self._request("put", path, in_parts)
        self._count_bytes("put", size)

    def list(self, prefix: str) -> list[ObjectVersion]:
        """All objects below a prefix that ends with a slash."""

        def pages(store: Any) -> list[ObjectVersion]:
            found: list[ObjectVersion] = []
            for page in self._obstore.list(store, prefix, chunk_size=_PAGE):
                self._count("list" if found else "")
                found += map(ObjectVersion.of, page)
            return found

        return list(self._request("list", prefix, pages))

    def delete(self, path: str) -> None:
        """Deletes an object, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._request("delete", path, self._obstore.delete, path)

    def now(self, path: str) -> float:
        """The time by the bucket's clock. path: of an object that is written for it."""
        self.put(path, b"")
        there = self.head(path)
        if there is None:
            raise StorageError(f"{self.address}/{path}: gone as soon as it was written")
        return there.modified

    def _request(
        self, kind: str, path: str, call: Callable[..., Any], *values: Any, **more: Any
    ) -> Any:
        errors = self._errors
        started, tries = time.monotonic(), 0
        patience, answers = self._patience(kind, path, started), self._answers
        while True:
            tries += 1
            self._count(kind)
            try:
                result = call(self._store, *values, **more)
            except FileNotFoundError:
                self._note_answer()
                raise
            except (errors.AlreadyExistsError, errors.PreconditionError) as error:
                self._note_answer()
                raise ConflictError(path) from error
            except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
                self._note_answer()
                raise self._failure(StorageError, kind, path, "was refused", error) from error
            except (errors.BaseError, OSError) as error:
                if _NO_SUCH_RANGE in str(error):  # obstore has no class for it
                    self._note_answer()
                    words = "is beyond the object's end"
                    raise self._failure(StorageError, kind, path, words, error) from error
                longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (tries - 1))
                pause = random.uniform(longest / 2, longest)
                spent = time.monotonic() - started
                if spent + pause > patience:
                    self._note_failure(_first_line(error), answers)
                    how = f"failed {tries} times in {spent:.1f} s"
                    raise self._failure(UnreachableError, kind, path, how, error) from error
                time.sleep(pause)
            else:
                self._note_answer()
                return result

    def _note_answer(self) -> None:
        with self._lock:
            self._outage = None
            self._answers += 1

    def _note_failure(self, error: str, answers: int) -> None:
        """answers: how many there were when the request began."""
        with self._lock:
            if answers == self._answers:
                self._outage = _Outage(error, time.monotonic() + _PROBE_SECONDS)

    def _patience(self, kind: str, path: str, now: float) -> float:
        """Seconds for which a request is repeated. Raises where it is not even to be tried."""
        with self._lock:
            outage = self._outage
            if outage is None:
                return self._retry_seconds
            if now >= outage.next_probe:
                self._outage = _Outage(outage.error, now + _PROBE_SECONDS)
                return 0.0
        raise UnreachableError(
            f"{self.address}/{path}: {kind} was not tried, since the bucket cannot be reached: "
            f"{outage.error}"
        )

    def _failure(
        self, failure: type[StorageError], kind: str, path: str, how: str, error: Exception
    ) -> StorageError:
        return failure(f"{self.address}/{path}: {kind} {how}: {_first_line(error)}")

    def _count(self, kind: str) -> None:
        if kind:
            with self._lock:
                self._requests[kind] += 1

    def _count_bytes(self, kind: str, count: int) -> None:
        with self._lock:
            self._bytes[kind] += count


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].strip()


def at_once(pool: ThreadPoolExecutor, call: Callable[..., Any], items: Iterable[Any]) -> list[Any]:
    """Calls for each item on the pool's threads; raises the first error once all have ended."""
    futures = [pool.submit(call, item) for item in items]
    results, failed = [], None
    for future in futures:
        try:
            results.append(future.result())
        except Exception as error:  # noqa: PERF203  # raised below
            failed = failed or error
    if failed is not None:
        raise failed
    return results
