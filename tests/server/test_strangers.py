"""Web pages that have a visitor's browser send requests here: none is answered, nothing changes."""

from __future__ import annotations

import httpx
import pytest

from kvpager.server.strangers import Strangers
from server.running import running, said

JSON = "application/json"
EVIL = "https://evil.example"


def refused(strangers, method="POST", path="/v1/sessions/a/pin", **headers):
    """Whether a request with these headers is refused; `_` stands for `-`."""
    given = {"host": "localhost:8000", **headers}
    several = [
        (name.replace("_", "-").encode(), one.encode())
        for name, value in given.items()
        for one in (value if isinstance(value, list) else [value])
    ]
    scope = {"type": "http", "method": method, "path": path, "headers": several}
    return strangers.refusal(scope) is not None


@pytest.fixture
def here():
    return Strangers("127.0.0.1", (), ())


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8000",
        "localhost.",
        "localhost.:1",
        "127.0.0.1:8000",
        "127.0.0.2",
        "[::1]:8000",
        "[::1]",
        "[0:0:0:0:0:0:0:1]",
    ],
)
def test_this_machine_has_its_names_at_any_port(here, host):
    assert not refused(here, "GET", host=host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "localhost@evil.example",
        "",
        "127.0.0.1.evil.example",
        "notlocalhost",
        "xlocalhost",
        "10.0.0.1",
        "0.0.0.0",
        "[::]",
        "localhost:8000:1",
        "localhost,evil.example",
        "localhost evil",
        "[::1",
        "::1",
        "2130706433",
        "[fe80::1%25lo]",
        "localhost:",
        "localhost/",
        "127.1",
        ["localhost", "evil.example"],
        [],
    ],
)
def test_another_name_is_refused(here, host):
    assert refused(here, "GET", host=host)


def test_listening_wider_this_machines_own_name_and_addresses_are_names_too(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "Box.lan")
    for bound in ("0.0.0.0", "::"):
        wide = Strangers(bound, (), ())
        for host in ("box.lan", "box", "box.local", "192.168.1.5:8000", "[fd00::5]", "localhost"):
            assert not refused(wide, "GET", host=host)
        for host in ("evil.example", "box.lan.evil.example", "0.0.0.0:8000"):
            assert refused(wide, "GET", host=host)
    narrow = Strangers("192.168.1.5", (), ())
    assert not refused(narrow, "GET", host="192.168.1.5")
    assert refused(narrow, "GET", host="192.168.1.6")
    named = Strangers("box.example", (), ())
    assert not refused(named, "GET", host="box.example")


def test_hosts_that_are_allowed_are_the_only_ones():
    some = Strangers("127.0.0.1", ("api.example.com", "*.lan", "[::1]"), ())
    for host in ("api.example.com:443", "API.example.com.", "a.b.lan", "[::1]:80"):
        assert not refused(some, "GET", host=host)
    for host in ("lan", "example.com", "x.api.example.com", "evillan", "localhost", "127.0.0.1"):
        assert refused(some, "GET", host=host)
    assert not refused(Strangers("127.0.0.1", ("*",), ()), "GET", host="evil.example")


@pytest.mark.parametrize(
    "origin",
    [
        EVIL,
        "null",
        "http://localhost",
        "http://localhost:3000",
        "http://127.0.0.1:8000",
        "file://",
        "http://localhost:8000.evil.example",
        "http://localhost:8000@evil.example",
        "x",
        "",
        "http://[::1]:8000",
        ["http://localhost:8000", EVIL],
        "http://localhost:8000, x",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
def test_a_page_of_another_origin_is_refused(here, origin, method):
    assert refused(here, method, origin=origin, content_type=JSON)


def test_the_servers_own_page_is_not_foreign(here):
    own = {"origin": "http://localhost:8000", "content_type": JSON, "sec_fetch_site": "same-origin"}
    assert not refused(here, **own)
    assert not refused(here, **own | {"origin": "HTTP://LOCALHOST:8000"})
    assert not refused(here, host="localhost", **own | {"origin": "http://localhost:80"})
    assert not refused(here, host="localhost:443", **own | {"origin": "https://localhost"})
    assert not refused(here, host="[::1]:8000", **own | {"origin": "http://[::1]:8000"})
    assert not refused(here, "GET", "/", sec_fetch_site="none")


@pytest.mark.parametrize("site", ["cross-site", "same-site", "", ["same-origin", "cross-site"]])
def test_images_and_scripts_of_another_site_get_nothing(here, site):
    for path in ("/v1/sessions/a/export", "/metrics", "/", "/page/page.js"):
        assert refused(here, "GET", path, sec_fetch_site=site, sec_fetch_mode="no-cors")
    own = {"origin": "http://localhost:8000", "content_type": JSON}
    assert refused(here, **own, sec_fetch_site=site)


def test_a_link_from_elsewhere_shows_the_page_and_nothing_else(here):
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert not refused(here, "GET", "/", sec_fetch_dest="document", **link)
    assert refused(here, "GET", "/", sec_fetch_dest="iframe", **link)
    assert refused(here, "GET", "/v1/sessions/a/export", sec_fetch_dest="document", **link)
    assert refused(here, "POST", "/", sec_fetch_dest="document", content_type=JSON, **link)


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "TEXT/PLAIN; charset=utf-8",
        "application/x-www-form-urlencoded",
        "",
        "json",
        "multipart/form-data; boundary=x",
        "text/plain;application/json",
        [JSON, JSON],
        "text/plain, application/json",
        ["text/plain", JSON],
        ";application/json",
        "/json",
    ],
)
def test_what_a_page_can_send_without_asking_is_refused(here, kind):
    assert refused(here, content_type=kind)
    assert refused(here, content_type=kind, x_session_id="a")


def test_a_post_without_a_type_has_a_header_that_no_page_can_send(here):
    assert refused(here)
    # Neither what a browser sends by itself, nor what a proxy adds, is such a header.
    for name in ("authorization", "referer", "x_forwarded_for", "x_request_id", "x_stainless_"):
        assert refused(here, **{name: "Basic YTpi"})
    for name in ("x_kvpager", "x_api_key", "x_session_id", "x_requested_with"):
        assert not refused(here, **{name: "1"})
        assert refused(here, **{name: " "})
    assert not refused(here, x_stainless_lang="python")
    assert not refused(here, authorization="Bearer k")
    assert not refused(here, content_type="application/octet-stream")
    assert not refused(here, content_type="Application/JSON; charset=utf-8")
    assert not refused(here, "DELETE")  # a browser asks first


def test_origins_that_are_allowed_may_use_the_server():
    some = Strangers("127.0.0.1", (), ("https://chat.example.com", "http://localhost:3000"))
    page = {"content_type": JSON, "sec_fetch_site": "cross-site"}
    assert not refused(some, origin="https://chat.example.com", **page)
    assert not refused(some, origin="http://localhost:3000", **page)
    assert refused(some, origin=EVIL, **page)
    assert refused(some, origin="null", **page)
    assert refused(some, origin="https://chat.example.com", content_type="text/plain")
    assert refused(some, origin="https://chat.example.com", host="evil.example")
    everybody = Strangers("127.0.0.1", (), ("*",))
    assert not refused(everybody, origin=EVIL, **page)
    assert refused(everybody, origin=EVIL, content_type="text/plain")


def test_what_a_page_of_another_site_sends_changes_nothing(server):
    server.chat("Hi", extra_body={"session_id": "mine"})
    for headers in (
        {"host": "evil.example"},
        {"origin": EVIL},
        {"origin": "null", "content-type": "text/plain"},
        {"sec-fetch-site": "cross-site"},
    ):
        for method, path in (
            ("GET", "/v1/sessions/mine/export"),
            ("GET", "/v1/sessions"),
            ("POST", "/v1/sessions/mine/pin"),
            ("DELETE", "/v1/sessions/mine"),
            ("OPTIONS", "/v1/chat/completions"),
        ):
            answer = server.http.request(method, path, headers=headers)
            assert answer.status_code == 403, (method, path, headers)
            assert "access-control-allow-origin" not in answer.headers
            assert answer.json()["error"]["code"] in ("host_not_allowed", "cross_site_request")
    for form in (
        httpx.post(f"{server.url}/v1/sessions/mine/pin"),
        server.http.post("/v1/sessions/mine/pin", data={"a": "b"}),
        httpx.post(f"{server.url}/v1/sessions/made/import", content=b"x"),
        httpx.post(f"{server.url}/slots/1?action=erase"),
    ):
        assert form.status_code == 400
        assert "X-Kvpager: 1" in form.json()["error"]["message"]
    assert not server.http.get("/v1/sessions/mine").json()["pinned"]
    server.http.delete("/v1/sessions/mine")


def test_an_error_of_the_gate_has_the_shape_of_its_api(server):
    error = server.http.post("/v1/messages", json={}, headers={"host": "evil.example"})
    assert error.status_code == 403
    assert error.json()["error"]["type"] == "permission_error"
    assert "--allowed-hosts" in error.json()["error"]["message"]
    assert error.headers["x-request-id"]


def test_an_allowed_page_passes_preflights_and_reads_answers(engine):
    with running(engine, None, allow_origin=("https://chat.example.com",)) as server:
        asks = {
            "origin": "https://chat.example.com",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-session-id",
        }
        preflight = server.http.options("/v1/chat/completions", headers=asks)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://chat.example.com"
        assert "x-session-id" in preflight.headers["access-control-allow-headers"]
        body = {"messages": said("Hi"), "max_tokens": 1}
        origin = {"origin": "https://chat.example.com"}
        answer = server.http.post("/v1/chat/completions", json=body, headers=origin)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://chat.example.com"
        foreign = server.http.options("/v1/chat/completions", headers={**asks, "origin": EVIL})
        assert foreign.status_code == 403
