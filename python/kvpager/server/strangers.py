"""Refuses requests that a foreign web page sends: by Host, by Origin, and by content type.

A page of any site may have its visitor's browser send requests to this machine. It cannot choose
the Host header, except by a name of its own that leads here (DNS rebinding), nor the Origin header;
and without this server's consent it can send neither JSON nor headers of its own.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING

from kvpager.server.errors import ApiError, bad_request

if TYPE_CHECKING:
    from starlette.types import Scope

ANY = "*"
READING = ("GET", "HEAD", "OPTIONS")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_](?:[A-Za-z0-9._-]*))(?::(\d{1,5}))?")
_ORIGIN = re.compile(r"(https?)://(.+)")
_PORTS = {"http": "80", "https": "443"}
_OF_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")
_MEDIA_TYPE = re.compile(r"[\w!#$%&'*+.^`|~-]+/[\w!#$%&'*+.^`|~-]+")
# Headers that no page can send to another origin unless that allows it, and no proxy adds.
_CUSTOM = re.compile(rb"x-kvpager|x-api-key|x-session-id|x-requested-with|x-stainless-.+")

Address = IPv4Address | IPv6Address


class Strangers:
    """Detects requests of foreign web pages."""

    def __init__(self, host: str, allowed_hosts: Collection[str], origins: Collection[str]) -> None:
        """Sets the names of this server and the allowed origins.

        Args:
            host: the address that the server listens at.
            allowed_hosts: names that the Host header may have; none: those of this machine; "*" is
                any, and "*.example.com" any below example.com.
            origins: of other sites whose pages may use the server; "*": all.
        """
        self._names = own_names(host) if not allowed_hosts else [*map(_name, allowed_hosts)]
        self._address = None if allowed_hosts else _address(host)
        self._origins = {_origin(one) or one for one in origins}

    def refusal(self, scope: Scope) -> ApiError | None:
        """Returns the error of a request; None if it is allowed."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        host = _joined(headers, b"host")
        if not self._is_own(host):
            return ApiError(
                403,
                f"the Host header is {host!r}, which is no name of this server; expected "
                f"{' or '.join(map(repr, self._names))}, or start it with --allowed-hosts",
                code="host_not_allowed",
            )
        origin, site = _joined(headers, b"origin"), _joined(headers, b"sec-fetch-site")
        if origin is None or not self._is_allowed(origin):
            if origin is not None and _origin(origin) != _place(host, origin):
                return _foreign(f"the Origin header is {origin!r}, another site")
            if site not in (None, "same-origin", "none") and not _shows_page(scope):
                return _foreign(f"the Sec-Fetch-Site header is {site!r}")
        # Browsers send a preflight before every other method that changes something.
        return _refusal_of_form(headers) if scope["method"] == "POST" else None

    def _is_own(self, host: str | None) -> bool:
        """Returns whether a Host header names this server."""
        if ANY in self._names:
            return True
        found = _HOST.fullmatch(host or "")
        if found is None:
            return False
        name = _name(found[1])
        if any(_matches(name, one) for one in self._names):
            return True
        address = _address(name)
        if address is None or self._address is None:
            return False
        # DNS rebinding needs a name, so an address is safe.
        if self._address.is_unspecified:
            return not address.is_unspecified
        return address == self._address or (self._address.is_loopback and address.is_loopback)

    def _is_allowed(self, origin: str) -> bool:
        return ANY in self._origins or origin in self._origins or _origin(origin) in self._origins


def own_names(host: str) -> list[str]:
    """Returns names of this machine for a server that listens at an address.

    host: the address. Where other machines can reach it, the machine's own name is among them.
    """
    names = ["localhost", "127.0.0.1", "::1"]
    address = _address(host)
    if address is None or not (address.is_loopback or address.is_unspecified):
        names.append(_name(host))
    if address is None or not address.is_loopback:
        own = _name(socket.gethostname())
        names += [own, own.split(".")[0], own.split(".")[0] + ".local"]
    return list(dict.fromkeys(name for name in names if name))


def is_origin(value: str) -> bool:
    """Returns whether a text is an origin such as https://example.com:8443, or "*"."""
    return value in (ANY, "null") or _origin(value) is not None


def is_host(value: str) -> bool:
    """Returns whether a text is a name that a Host header may have, "*.example.com", or "*"."""
    return value == ANY or bool(_HOST.fullmatch(value.removeprefix("*."))) or bool(_address(value))


def _foreign(found: str) -> ApiError:
    return ApiError(
        403,
        f"{found}; expected this server's own page, or start it with --allow-origin",
        code="cross_site_request",
    )


def _refusal_of_form(headers: Iterable[tuple[bytes, bytes]]) -> ApiError | None:
    """Refuses content types that a page can send without preflight: forms, plain text, none."""
    kinds = [value.decode("latin-1") for name, value in headers if name == b"content-type"]
    if len(kinds) == 1:
        kind = kinds[0].split(";")[0].strip().lower()
        if _MEDIA_TYPE.fullmatch(kind) and kind not in _OF_FORMS:
            return None
    elif not kinds and any(_is_custom(name, value) for name, value in headers):
        return None
    given = repr(", ".join(kinds)) if kinds else "missing"
    return bad_request(
        f"content-type is {given}; expected 'application/json', of a snapshot "
        "'application/octet-stream', or without a body the header X-Kvpager: 1"
    )


def _is_custom(name: bytes, value: bytes) -> bool:
    """Returns whether a header proves that no foreign page sent the request.

    A browser sends a password of HTTP's own by itself, but no other Authorization.
    """
    if name == b"authorization":
        return value.strip().lower().startswith(b"bearer ")
    return bool(_CUSTOM.fullmatch(name) and value.strip())


def _shows_page(scope: Scope) -> bool:
    """Returns whether a browser navigates to the server's page, as by a link from elsewhere."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    navigates = _joined(headers, b"sec-fetch-mode") == "navigate"
    inside = _joined(headers, b"sec-fetch-dest") not in (None, "document")
    return scope["method"] in ("GET", "HEAD") and scope["path"] == "/" and navigates and not inside


def _joined(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str | None:
    """Returns a header's joined values; nothing allows several of them."""
    values = [value.decode("latin-1") for key, value in headers if key == name]
    return ", ".join(values) if values else None


def _name(text: str) -> str:
    """Normalizes a name: no brackets or final dot, lower case; addresses as Python writes them."""
    plain = text.strip("[]").rstrip(".").lower()
    address = _address(plain)
    return plain if address is None else str(address)


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or (pattern.startswith("*.") and name.endswith(pattern[1:]))


def _address(text: str) -> Address | None:
    try:
        return ip_address(text.strip("[]"))
    except ValueError:
        return None


def _origin(text: str) -> tuple[str, str] | None:
    """Returns the name and port of an origin; None if the text is not an origin."""
    found = _ORIGIN.fullmatch(text.lower())
    return None if found is None else _place(found[2], found[1])


def _place(host: str | None, origin: str) -> tuple[str, str] | None:
    """Returns the name and port of a Host header; the origin's scheme sets the default port."""
    found = _HOST.fullmatch(host or "")
    if found is None:
        return None
    return _name(found[1]), found[2] or _PORTS.get(origin.split(":")[0].lower(), "")
