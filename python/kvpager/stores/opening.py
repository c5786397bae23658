"""Opens a store by its address: a folder, or a bucket."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TypeAlias

from kvpager._support.remembered import OFF, VARIABLE, cache_folder
from kvpager.errors import InvalidArgumentError
from kvpager.stores.bucket import is_bucket
from kvpager.stores.directory import DirectoryStore
from kvpager.stores.encryption import StoreKey
from kvpager.stores.object import ObjectStore
from kvpager.stores.settings import UNLIMITED

NamedStore: TypeAlias = DirectoryStore | ObjectStore


def open_store(
    address: str,
    *,
    byte_budget: int | str | None = None,
    ttl: float | str | None = None,
    mode: int | None = None,
    key: StoreKey | None = None,
    create: bool = True,
) -> NamedStore:
    """A `DirectoryStore`, or an `ObjectStore` whose cache is in the user's folder of caches.

    byte_budget: of a bucket, that of the cache.
    """
    if not is_bucket(address):
        return DirectoryStore(
            address, byte_budget=byte_budget, ttl=ttl, mode=mode, key=key, create=create
        )
    if mode is not None:
        raise InvalidArgumentError(f"mode is {mode:o}, and {address} is a bucket; expected None")
    folder = cache_folder()
    if folder is None:
        raise InvalidArgumentError(
            f"{VARIABLE} is {OFF!r}, and {address} is a bucket, which needs a cache; expected a "
            "folder"
        )
    name = hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:32]
    budget = UNLIMITED if byte_budget is None else byte_budget
    cache = Path(folder, "buckets", name)
    return ObjectStore(address, cache=cache, cache_bytes=budget, ttl=ttl, create=create, key=key)
