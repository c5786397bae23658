"""Tenants and their API keys; each tenant has its own salt, store and limits."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpager._support.arguments import refusal
from kvpager._support.option_table import parse_bytes
from kvpager.errors import InvalidArgumentError
from kvpager.server.errors import ApiError, retry_after

ANONYMOUS = "default"
_FIELDS = ("key", "key_sha256", "tenant", "salt", "store_budget", "requests_per_minute", "priority")
_MINUTE = 60.0


@dataclass(frozen=True)
class Tenant:
    """A group of clients that share chunks, snapshots and names.

    Attributes:
        name: also its folder's.
        salt: part of the names of its chunks; empty: the engine's own.
        store_budget: most bytes of its store; None: the server's setting.
        requests_per_minute: None: no limit.
        priority: default of its requests; lower is earlier.
    """

    name: str = ANONYMOUS
    salt: str = ""
    store_budget: int | None = None
    requests_per_minute: int | None = None
    priority: int = 0


@dataclass
class Tenants:
    """The tenants of a server by their keys' digests; without keys there is one for all.

    REQUIRES: used by one thread.
    """

    by_digest: Mapping[str, Tenant] = field(default_factory=dict)
    _recent: dict[str, deque[float]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | None, key: str | None = None) -> Tenants:
        """Reads a YAML file with a list of {key or key_sha256, tenant, ...}; none for None.

        Args:
            path: the file.
            key: one more key, for the tenant "default".

        Raises:
            InvalidArgumentError: about the entry and the field that are wrong.
        """
        more = {} if key is None else {_digest(key): Tenant()}
        if path is None:
            return cls(more)
        import yaml

        try:
            entries = yaml.safe_load(Path(path).read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
            raise InvalidArgumentError(f"api_keys {path}: {error}") from error
        if not isinstance(entries, list) or not entries:
            raise InvalidArgumentError(
                f"api_keys {path}: expected a list such as `- {{key: sk-1, tenant: alice}}`"
            )
        by_digest: dict[str, Tenant] = {}
        by_name: dict[str, Tenant] = {}
        for number, entry in enumerate(entries):
            digest, tenant = _read_entry(f"{path}[{number}]", entry)
            if digest in by_digest:
                raise InvalidArgumentError(f"api_keys {path}[{number}]: the key is there twice")
            if by_name.setdefault(tenant.name, tenant) != tenant:
                raise InvalidArgumentError(
                    f"api_keys {path}[{number}]: tenant {tenant.name!r} was described otherwise "
                    "before; expected the same fields with each of its keys"
                )
            by_digest[digest] = tenant
        return cls(more | by_digest)

    def renewed(self, other: Tenants) -> Tenants:
        """Returns other tenants with these tenants' counts of recent requests."""
        return Tenants(other.by_digest, self._recent)

    @property
    def needs_keys(self) -> bool:
        """Returns whether a request needs a key."""
        return bool(self.by_digest)

    def all(self) -> list[Tenant]:
        """Returns every tenant once."""
        return list({one.name: one for one in self.by_digest.values()}.values()) or [Tenant()]

    def of(self, key: str | None) -> Tenant:
        """Returns the tenant of a key. Raises ApiError 401."""
        if not self.needs_keys:
            return Tenant()
        if key is not None:
            digest = _digest(key)
            for known, tenant in self.by_digest.items():
                if hmac.compare_digest(known, digest):
                    return tenant
        raise ApiError(
            401,
            "the API key is missing or unknown; expected the header `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )

    def count(self, tenant: Tenant, now: float | None = None) -> None:
        """Counts a request. Raises ApiError 429 beyond the tenant's limit for a minute."""
        most = tenant.requests_per_minute
        if most is None:
            return
        now = time.monotonic() if now is None else now
        recent = self._recent.setdefault(tenant.name, deque())
        while recent and recent[0] <= now - _MINUTE:
            recent.popleft()
        if len(recent) >= most:
            wait = recent[0] + _MINUTE - now
            raise ApiError(
                429,
                f"tenant {tenant.name!r} has sent {most} requests within a minute, its limit",
                code="rate_limit_exceeded",
                headers=retry_after(wait),
            )
        recent.append(now)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _read_entry(where: str, entry: Any) -> tuple[str, Tenant]:
    if not isinstance(entry, dict):
        raise InvalidArgumentError(f"api_keys {where} is {entry!r}; expected a mapping")
    for name in entry:
        if name not in _FIELDS:
            raise InvalidArgumentError(
                f"api_keys {where} has a field {name!r}; expected {', '.join(_FIELDS)}"
            )
    keys = [name for name in ("key", "key_sha256") if name in entry]
    if len(keys) != 1 or not isinstance(entry[keys[0]], str) or not entry[keys[0]]:
        raise InvalidArgumentError(f"api_keys {where}: expected one of key and key_sha256, as text")
    digest = entry["key_sha256"].lower() if keys == ["key_sha256"] else _digest(entry["key"])
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise InvalidArgumentError(f"api_keys {where}: key_sha256 is not 64 hexadecimal digits")
    name = entry.get("tenant", ANONYMOUS)
    sound = isinstance(name, str) and name.replace("-", "").replace("_", "").isalnum()
    if not sound or not name.isascii():
        raise refusal(f"api_keys {where}.tenant", name, "letters, digits, '-' and '_'")
    salt = entry.get("salt", "" if name == ANONYMOUS else f"tenant {name}")
    if not isinstance(salt, str):
        raise refusal(f"api_keys {where}.salt", salt, "text")
    budget = entry.get("store_budget")
    return digest, Tenant(
        name=name,
        salt=salt,
        store_budget=None if budget is None else parse_bytes(f"{where}.store_budget", budget),
        requests_per_minute=_whole(where, entry, "requests_per_minute", None, 1),
        priority=_whole(where, entry, "priority", 0, -(1 << 31)),
    )


def _whole(where: str, entry: Mapping[str, Any], name: str, default: Any, least: int) -> Any:
    value = entry.get(name, default)
    if value is not None and (type(value) is not int or value < least):
        raise refusal(f"api_keys {where}.{name}", value, f"an integer of at least {least}")
    return value
