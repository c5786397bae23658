"""Options of `kvpager serve` other than those of the model and the pager."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from kvpager._runtime.text.template_input import CONTROL_TOKENS
from kvpager._runtime.text.tool_calls import FORMATS
from kvpager._support.arguments import refusal, usable_path
from kvpager._support.option_table import (
    Validated,
    choice,
    explain,
    flag,
    integer,
    name,
    number,
    option,
    size,
)
from kvpager._support.remembered import data_folder
from kvpager.errors import InvalidArgumentError
from kvpager.server.strangers import is_host, is_origin
from kvpager.server.tenants import Tenant
from kvpager.stores.bucket import is_bucket
from kvpager.stores.settings import parse_ttl

AUTO, OFF = "auto", "off"
MIB = 1 << 20
LOG_LEVELS = ("debug", "info", "warning", "error")
TOOL_FORMATS = (AUTO, OFF, *FORMATS)


def _file(field: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not Path(usable_path(value, field)).is_file():
        raise refusal(field, value, "the path of an existing file, or None")
    return os.fspath(value)


def _path(field: str, value: Any) -> str | None:
    return None if value is None else os.fspath(usable_path(value, field))


def _names(field: str, value: Any) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) else value
    sound = isinstance(given, (tuple, list)) and all(isinstance(one, str) and one for one in given)
    if not sound:
        raise refusal(field, value, "names, such as my-model,another")
    return tuple(given)


def _each(field: str, value: Any, sound: Callable[[str], bool], expected: str) -> tuple[str, ...]:
    names = _names(field, value)
    for one in names:
        if not sound(one):
            raise refusal(field, one, expected)
    return names


def _hosts(field: str, value: Any) -> tuple[str, ...]:
    return _each(field, value, is_host, 'names such as example.com, "*.example.com", or "*"')


def _origins(field: str, value: Any) -> tuple[str, ...]:
    return _each(field, value, is_origin, 'origins such as https://example.com:8443, or "*"')


def _secret(field: str, value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, str) and value.isascii() and value.isprintable() and value.strip():
        return value.strip()
    raise refusal(field, "***", "printable ASCII text, or None")


def _lifetime(field: str, value: Any) -> Any:
    parse_ttl(field, value)
    return value


def _address(field: str, value: Any) -> str | None:
    if value is None:
        return None
    parts = urlsplit(value) if isinstance(value, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise refusal(field, value, "an http:// or https:// address, or None")
    return str(value)


@dataclass(frozen=True)
class ServerSettings(Validated):
    """Options of `kvpager serve`; none of them changes a bit of any answer."""

    host: str = option(
        name(), "address to listen at; one that others can reach wants api_keys", "127.0.0.1"
    )
    port: int = option(integer(0, 65535), "port to listen at; 0: any free one", 8000)
    uds: str | None = option(
        ("the path of a socket, or None", _path),
        "Unix domain socket to listen at, instead of host and port; its owner alone may connect",
        None,
    )
    ssl_certfile: str | None = option(
        ("the path of a PEM file, or None", _file),
        "certificate for TLS, with its chain; None: plain HTTP",
        None,
    )
    ssl_keyfile: str | None = option(
        ("the path of a PEM file, or None", _file),
        "the certificate's private key; None: it is in ssl_certfile",
        None,
    )
    allowed_hosts: tuple[str, ...] = option(
        ("names", _hosts),
        "names that the Host header of a request may have; none: those of this machine; *: any",
        (),
    )
    allow_origin: tuple[str, ...] = option(
        ("origins", _origins),
        "web sites whose pages may use the server, such as https://example.com; *: all; none: its "
        "own page alone",
        (),
    )
    served_model_name: tuple[str, ...] = option(
        ("names", _names),
        "names that requests may call the model by, the first one in answers; none: its folder's",
        (),
    )
    api_keys: str | None = option(
        ("the path of a YAML file, or None", _file),
        "keys and their tenants (docs/how_to/http_server.md); None: everybody is one tenant, "
        "without a key",
        None,
    )
    api_key: str | None = option(
        ("a key, or None", _secret),
        "key that requests need; others see a command line, so prefer the variable",
        None,
    )
    store: str = option(
        name(),
        "where conversations are saved: a folder, or a bucket such as s3://BUCKET/PREFIX; "
        '"auto": a folder for each model in the user\'s data folder; "off": nothing is saved, and '
        "restarts forget",
        AUTO,
    )
    store_budget: int = option(
        size(), "most bytes on disk of one tenant's store; of a bucket, of its cache", 10 << 30
    )
    store_ttl: str = option(
        ('a duration such as "7d", or "never"', _lifetime),
        "how long a saved conversation lives after its last use",
        "30d",
    )
    store_key: str | None = option(
        ("the path of a file, or None", _file),
        "file with the master key that encrypts the stores, 64 hexadecimal digits, older keys on "
        "further lines; each tenant has a key of its own",
        None,
    )
    shared_store: bool = option(
        flag(),
        "whether other servers use the store too: then conversations without a name are saved as "
        "well, and each server can go on with those of the others",
        False,
    )
    kept_sessions: int = option(
        integer(1, 1 << 20),
        "most conversations that stay in memory after their last answer; fewer where their chunks "
        "fill three quarters of host_bytes and disk_bytes; others are restored from the store when "
        "they go on",
        1024,
    )
    max_running: int | None = option(
        integer(1, 4096, none="one per row of a forward"), "most requests that run at once", None
    )
    max_waiting: int = option(
        integer(0, 1 << 20),
        "most requests of a tenant that wait; further requests get 429",
        1024,
    )
    max_tokens: int = option(
        integer(1, 1 << 30), "most tokens of an answer if the request sets no limit", 1024
    )
    max_choices: int = option(integer(1, 1024), "largest n", 16)
    max_request_bytes: int = option(size(), "largest body of a request", 32 * MIB)
    max_prompt_chars: int | None = option(
        integer(1, 1 << 40, none="16 for each token of the model's context, at least 65536"),
        "most characters of a request's messages, or of a prompt; more are refused before "
        "they are tokenized",
        None,
    )
    read_timeout: float = option(
        number(0, 1e9),
        "seconds that reading a request may take: its JSON, template, tokens and grammar; 0: any",
        30.0,
    )
    max_connections: int = option(
        integer(8, 1 << 20),
        "most connections, half of them of one address, and no more than three quarters of the "
        "process's descriptors; beyond it the oldest without a request is closed",
        1024,
    )
    header_timeout: float = option(
        number(0.1, 1e9),
        "seconds from the connection or the last answer to the end of the next request's head",
        20.0,
    )
    send_timeout: float = option(
        number(0.1, 1e9), "seconds that a client may leave an answer unread", 60.0
    )
    max_transfers: int = option(
        integer(1, 1024), "most exports and imports of one tenant at a time", 4
    )
    transfer_timeout: float = option(
        number(1, 1e9), "seconds that a client may take to read an export", 3600.0
    )
    request_timeout: float = option(
        number(0, 1e9), "seconds from a request to its end, the wait included; 0: no limit", 0.0
    )
    drain_seconds: float = option(
        number(0, 1e6),
        "seconds that running requests may continue after the server is asked to stop",
        30.0,
    )
    on_corrupt: str = option(
        choice(("fail", "recompute")),
        "handling of a saved conversation with a damaged chunk, unless the request sets it",
        "fail",
    )
    tool_calls: str = option(
        choice(TOOL_FORMATS),
        "how the model writes tool calls; auto: as its chat template does; off: tools are refused",
        AUTO,
    )
    control_tokens: Literal["text", "tokens"] = option(
        choice(CONTROL_TOKENS),
        'what a control token in the text of a message is, such as "<|im_end|>": text, so that no '
        "text ends its message, or one of the tokens of the chat template",
        "text",
    )
    page: bool = option(flag(), "whether there is a page at /", True)
    log_level: str = option(choice(LOG_LEVELS), "what is logged to stderr", "info")
    otlp_endpoint: str | None = option(
        ("an http:// or https:// address, or None", _address),
        "OpenTelemetry collector for spans of requests, by OTLP over HTTP, such as "
        "http://localhost:4318; None: none",
        None,
    )
    log_prompts: bool = option(flag(), "whether prompts and answers are logged, in clear", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.store not in (AUTO, OFF):
            usable_path(self.store, "ServerSettings.store")
        if self.shared_store and self.store == OFF:
            raise InvalidArgumentError(
                "ServerSettings.shared_store is True, and store is 'off'; expected a folder"
            )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise InvalidArgumentError(
                f"ServerSettings.ssl_keyfile is {self.ssl_keyfile!r}, and ssl_certfile is None; "
                "expected both, or neither"
            )

    def store_budget_of(self, tenant: Tenant) -> int:
        """Returns the most bytes of a tenant's store, and of one snapshot that it imports."""
        return self.store_budget if tenant.store_budget is None else tenant.store_budget

    def store_path(self, model: str) -> str | None:
        """Returns the folder of the stores for a model of this name; None: nothing is saved."""
        if self.store == OFF:
            return None
        if self.store != AUTO:
            return self.store
        return str(data_folder() / "serve" / _as_file_name(model))

    def store_folder(self, model: str) -> Path | None:
        """Returns `store_path` as a folder of this machine; None if it is a bucket or off."""
        path = self.store_path(model)
        return None if path is None or is_bucket(path) else Path(path)


def _as_file_name(model: str) -> str:
    kept = "".join(c if c.isalnum() or c in "._-" else "-" for c in model).strip(".")
    if not kept:
        raise InvalidArgumentError(f"served_model_name is {model!r}; expected a name")
    return kept


explain(ServerSettings)
