"""The page in a browser: conversations that outlive tabs, connections and servers, drawn safely."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
from pathlib import Path

import pytest

from kvpager.server.turn import ServedTurn
from server.browsing import (
    SLOW_MS,
    answered,
    ask,
    chromium,  # noqa: F401
    expect,
    grows,
    tabs,  # noqa: F401
)
from server.running import ServerProcess, running, said

LONG, SHORT = "Write a class.", "Why?"  # greedy answers of more than 1,000 tokens, and of 43
SCREENSHOTS = "KVPAGER_SCREENSHOTS"  # a folder for pictures to look at
EVIL = """\
<script>window.broken = 1</script><img src=x onerror="window.broken = 2">

[a link](javascript:window.broken=3) and ![a picture](https://elsewhere.example/p.png)

<details open ontoggle="window.broken = 4"><form action="https://elsewhere.example"></form></details>

[another](https://elsewhere.example/a "a title") &lt;b&gt; **bold** `1 < 2`

| a | b |
|---|---|
| 1 | 2 |

```html
<b onclick="window.broken = 5">code</b>
```
"""


@pytest.fixture(scope="module")
def served(engine, tmp_path_factory):
    with running(engine, tmp_path_factory.mktemp("page")) as server:
        yield server


@pytest.fixture
def hurry(monkeypatch):
    """Answers take 0.1 s a token until this event is set, so that a test finds them under way."""
    hurry, arrive = threading.Event(), ServedTurn._arrive

    def slowly(turn, one):  # in the thread that steps
        hurry.wait(0.1)
        arrive(turn, one)

    monkeypatch.setattr(ServedTurn, "_arrive", slowly)
    return hurry


def saved(server, name):
    answer = server.http.get(f"/v1/sessions/{name}/messages")
    answer.raise_for_status()
    return answer.json()["data"]


def test_a_conversation_is_listed_opened_again_and_continued(served, tab):
    view = tab(served.url)
    ask(view, "Tell me about lists, please.", 20)
    answered(view, 2)
    assert view.url.endswith("#c/tell-me-about-lists-please")
    view.reload()
    first = answered(view, 2)
    assert [one["content"] for one in saved(served, "tell-me-about-lists-please")][1] == first
    ask(view, "Go on.", 8)
    answered(view, 4)
    cached = re.search(r"(\d+) of them cached", view.text_content("#usage"))
    assert int(cached[1]) > 20
    view.click("#new")
    expect(view.locator("#welcome")).to_be_visible()
    for messages in (2, 4):
        ask(view, "Tell me about lists, please.", 3)
        answered(view, messages)
    assert len(saved(served, "tell-me-about-lists-please-2")) == 4
    expect(view.locator("#list a")).to_contain_text(
        ["tell-me-about-lists-please-2", "tell-me-about-lists-please"]
    )
    view.click("#list a >> nth=1")
    answered(view, 4)


def test_an_answer_goes_on_without_its_tab_and_is_read_to_its_end_in_another(served, tab, hurry):
    view = tab(served.url)
    ask(view, LONG, 300)
    grows(view)
    url = view.url
    view.close()
    view = tab(url)
    grows(view)
    view.reload()
    grows(view)
    view.goto(f"{served.url}/#server")
    expect(view.locator("#requests")).to_contain_text("write-a-class", timeout=SLOW_MS)
    stranger = tab(url, user="grace")  # who has nothing of this answer but the conversation's name
    grows(stranger)
    hurry.set()
    text = answered(stranger, 2)
    assert saved(served, "write-a-class") == said(LONG, text)
    assert "300 generated" in stranger.text_content("#usage")
    view.goto(url)
    assert answered(view, 2) == text


def test_a_stopped_answer_is_kept_as_far_as_it_came(served, tab, hurry):
    view = tab(served.url)
    ask(view, "Write a class for me.", 2000)
    grows(view)
    view.keyboard.press("Escape")
    text = answered(view, 2)
    assert "stopped" in view.text_content("#usage")
    name = view.text_content("#name")
    assert saved(served, name)[-1]["content"] == text
    hurry.set()
    ask(view, SHORT, 5)
    answered(view, 4)


class Relay:
    """A port that leads to a server; its connections can be cut, and it can lead to another one."""

    def __init__(self, port):
        self.port = port
        self._ends = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):  # it is closed
            while True:
                near, _ = self._socket.accept()
                threading.Thread(target=self._lead, args=(near,), daemon=True).start()

    def _lead(self, near):
        with (
            near,
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port)) as far,
        ):
            self._ends += [near, far]
            back = threading.Thread(target=self._copy, args=(far, near), daemon=True)
            back.start()
            self._copy(near, far)
            back.join()

    def _copy(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        self._shut(source, target)

    def _shut(self, *ends):
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self):
        ends, self._ends = self._ends, []
        self._shut(*ends)

    def close(self):
        self._shut(self._socket)
        self._socket.close()
        self.cut()


@pytest.fixture
def relay():
    made = []

    def leading_to(server):
        made.append(Relay(int(server.url.rsplit(":", 1)[1])))
        return made[-1]

    yield leading_to
    for one in made:
        one.close()


def test_an_answer_goes_on_when_its_connection_is_cut(served, tab, relay, hurry):
    between = relay(served)
    view = tab(between.url)
    ask(view, "Write a class again.", 200)
    for _ in range(3):
        grows(view)
        between.cut()
    hurry.set()
    text = answered(view, 2)
    assert saved(served, "write-a-class-again")[-1]["content"] == text
    assert view.locator("#usage").get_attribute("class") != "error"


def test_an_answer_goes_on_when_its_server_is_killed_and_started_again(tab, relay, tmp_path):
    with ServerProcess(tmp_path) as first:
        between = relay(first.client)
        view = tab(between.url)
        ask(view, LONG, 500)
        grows(view)
        first.kill()
        expect(view.locator("#usage")).to_contain_text("connection is lost", timeout=SLOW_MS)
    with ServerProcess(tmp_path) as second:
        between.port = int(second.client.url.rsplit(":", 1)[1])
        text = answered(view, 2)
        assert "500 generated" in view.text_content("#usage")
        assert saved(second.client, "write-a-class") == said(LONG, text)


def test_a_conversation_is_renamed_forked_exported_and_deleted(served, tab):
    view = tab(served.url, accept_downloads=True)
    ask(view, "What is it?", 12)
    first = answered(view, 2)
    ask(view, SHORT, 5)
    answered(view, 4)
    view.click("#menu-button")
    view.click("#rename")
    view.fill("#new-name", "no name")
    view.click("#rename-dialog .main")
    expect(view.locator("#rename-dialog")).to_be_visible()
    view.fill("#new-name", "Q.1")
    view.click("#rename-dialog .main")
    expect(view.locator("#name")).to_have_text("Q.1")
    expect(view.locator("#list a[aria-current]")).to_contain_text("Q.1")
    view.locator("#messages > li").nth(1).get_by_role("button", name="Fork").click()
    expect(view.locator("#name")).to_have_text("Q.1-fork")
    assert answered(view, 2) == first
    assert len(saved(served, "Q.1")) == 4
    for action, suffix in (("as-markdown", "md"), ("as-json", "json"), ("as-snapshot", "kvsnap")):
        view.click("#menu-button")
        with view.expect_download() as download:
            view.click(f"#{action}")
        assert download.value.suggested_filename == f"Q.1-fork.{suffix}"
        data = Path(download.value.path()).read_bytes()
        if suffix == "md":
            assert (
                data.decode() == f"# Q.1-fork\n\n## You\n\nWhat is it?\n\n## Assistant\n\n{first}\n"
            )
        if suffix == "json":
            assert json.loads(data)["data"] == said("What is it?", first)
    view.click("#menu-button")
    view.click("#delete")
    view.click("#delete-dialog .cancel")
    assert served.http.get("/v1/sessions/Q.1-fork").status_code == 200
    view.click("#menu-button")
    view.click("#delete")
    view.click("#delete-dialog .main")
    expect(view.locator("#welcome")).to_be_visible()
    expect(view.get_by_role("link", name="Q.1-fork")).to_have_count(0)
    assert served.http.get("/v1/sessions/Q.1-fork").status_code == 404
    assert served.http.get("/v1/sessions/Q.1").status_code == 200


def test_markdown_of_a_model_is_shown_and_nothing_in_it_runs_or_loads(served, tab):
    served.chat("Hi", EVIL, "Go on", max_tokens=3, extra_body={"session_id": "evil"})
    view = tab(served.url)
    asked = []
    view.on("request", lambda request: asked.append(request.url))
    view.goto(f"{served.url}/#c/evil")
    answered(view, 4)
    body = view.locator("#messages > li").nth(1).locator(".body")
    expect(body).to_contain_text("<script>window.broken = 1</script>")
    assert body.locator("strong").text_content() == "bold"
    assert body.locator("td").all_text_contents() == ["1", "2"]
    assert body.locator("pre").text_content() == '<b onclick="window.broken = 5">code</b>\n'
    links = [
        (one.text_content(), one.get_attribute("href"), one.get_attribute("rel"))
        for one in body.locator("a").all()
    ]
    assert links == [
        ("a link", None, "noopener noreferrer"),
        ("a picture", "https://elsewhere.example/p.png", "noopener noreferrer"),
        ("another", "https://elsewhere.example/a", "noopener noreferrer"),
    ]
    assert body.locator("img, script, form, style, [onclick], [onerror]").count() == 0
    assert view.evaluate("window.broken") is None
    assert all(url.startswith(served.url) for url in asked)
    view.evaluate("document.getElementById('settings').open = true")
    view.uncheck("#markdown")
    assert body.text_content() == EVIL
    served.http.delete("/v1/sessions/evil").raise_for_status()


def test_a_key_is_asked_for_kept_by_its_tab_and_asked_for_again_where_it_is_wrong(
    engine, tab, tmp_path
):
    keys = tmp_path / "keys.yaml"
    keys.write_text("- {key: sk-a, tenant: alice}\n- {key: sk-b, tenant: bob}\n")
    with running(engine, tmp_path / "store", api_keys=str(keys)) as server:
        view = tab(server.url, connected=False)
        dialog = view.locator("#key-dialog")
        for key in ("wrong", "sk-a"):
            expect(dialog).to_be_visible()
            view.fill("#key", key)
            view.keyboard.press("Enter")
            if key == "wrong":
                expect(view.locator("#key-error")).to_contain_text("missing or unknown")
        expect(view.locator("#connection")).to_have_text("connected")
        ask(view, SHORT, 4)
        text = answered(view, 2)
        view.reload()
        assert answered(view, 2) == text
        assert view.evaluate(
            "[localStorage, sessionStorage].map((one) => 'kvpager.key' in one)"
        ) == [
            False,
            True,
        ]
        other = tab(server.url, user="bob", connected=False)
        other.fill("#key", "sk-b")
        other.keyboard.press("Enter")
        expect(other.locator("#list-empty")).to_have_text("No conversation yet.")


def test_many_conversations_are_listed_in_pages_and_found_by_their_names(served, tab):
    served.chat("Hi", max_tokens=1, extra_body={"session_id": "many-0"})
    names = ["many-0", *(f"many-{i}" for i in range(1, 90))]
    for name in names[1:]:
        served.post("/v1/sessions/many-0/fork", id=name).raise_for_status()
    served.openai.responses.create(model="tiny-coder", input="Hi", max_output_tokens=1)
    view = tab(served.url)
    view.keyboard.press("Control+k")
    view.keyboard.type("MANY-")
    expect(view.locator("#list a")).to_have_count(40)
    view.click("#more")
    expect(view.locator("#list a")).to_have_count(80)
    view.click("#more")
    expect(view.locator("#list a")).to_have_count(90)
    expect(view.locator("#more")).to_be_hidden()
    view.fill("#search", "many-77")
    expect(view.locator("#list a")).to_have_count(1)
    view.click("#list a")
    answered(view, 2)
    view.fill("#search", "nothing has this name")
    expect(view.locator("#list-empty")).to_have_text("No name contains this.")
    view.fill("#search", "resp_")
    expect(view.locator("#list-empty")).to_be_visible()
    for name in names:
        served.http.delete(f"/v1/sessions/{name}").raise_for_status()


CONTRAST = """() => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const over = (colours) => {
    pen.clearRect(0, 0, 1, 1);
    for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const luminance = (rgb) => rgb
    .map((one) => one / 255)
    .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
    .reduce((sum, one, i) => sum + one * [0.2126, 0.7152, 0.0722][i], 0);
  const weak = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
    if (!own || !element.checkVisibility() || element.closest(".hidden, .skip")) continue;
    const behind = [];
    for (let at = element; at; at = at.parentElement)
      behind.unshift(getComputedStyle(at).backgroundColor);
    const [dark, light] = [over(behind), over([...behind, getComputedStyle(element).color])]
      .map(luminance).sort((a, b) => a - b);
    const ratio = (light + 0.05) / (dark + 0.05);
    if (ratio < 4.5) weak.push([element.outerHTML.slice(0, 80), ratio]);
  }
  return weak;
}"""
OUTSIDE = """() => [...document.querySelectorAll("main:not([hidden]) *")]
  .filter((one) => one.checkVisibility() && !one.closest(".scroll, pre, .hidden, svg"))
  .filter((one) => one.getBoundingClientRect().right > innerWidth + 1)
  .map((one) => one.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_everything_fits_and_can_be_read(served, tab, tmp_path, width, scheme):
    folder = Path(os.environ.get(SCREENSHOTS) or tmp_path)
    table = "| river | country |\n|---|---|\n| Danube | Germany to Ukraine |\n"
    code = (
        "```python\ndef reverse(items):\n    return items[::-1]  # "
        + "a long line, " * 12
        + "\n```"
    )
    answer = f"Here is **one** way:\n\n{code}\n\n1. It copies.\n2. `reversed` does not.\n\n{table}"
    served.chat("Reverse a list.", answer, SHORT, max_tokens=5, extra_body={"session_id": "look"})
    view = tab(
        served.url,
        user=scheme,
        viewport={"width": width, "height": 800},
        color_scheme=scheme,
        reduced_motion="reduce",
    )

    def looks_right(name):
        assert view.evaluate("document.documentElement.scrollWidth") <= width
        assert view.evaluate(OUTSIDE) == []
        assert view.evaluate(CONTRAST) == []
        view.screenshot(path=folder / f"{name}-{width}-{scheme}.png")

    looks_right("new")
    view.goto(f"{served.url}/#c/look")
    answered(view, 4)
    expect(view.locator("#cells i").first).to_be_visible()
    view.evaluate("document.getElementById('scroll').scrollTop = 0")
    looks_right("conversation")
    view.click("#settings summary")
    view.click("#strip summary")
    looks_right("settings")
    view.click("#menu-button")
    looks_right("actions")
    view.click("#delete")
    looks_right("delete")
    view.click("#delete-dialog .cancel")
    if width == 360:
        view.click("#talk .open-side")
        expect(view.locator("#new")).to_be_focused()
        looks_right("list")
        view.keyboard.press("Escape")
        expect(view.locator("#new")).not_to_be_visible()
    view.goto(f"{served.url}/#server")
    expect(view.locator("#sessions a").first).to_be_visible()
    assert view.locator("#tiers td:first-child").all_text_contents() == [
        "resident",
        "host",
        "disk",
        "snapshot",
    ]
    looks_right("server")


def test_a_keyboard_is_enough(served, tab):
    view = tab(served.url)
    view.keyboard.press("Alt+n")
    expect(view.locator("#text")).to_be_focused()
    view.keyboard.type("One line")
    view.keyboard.press("Shift+Enter")
    view.keyboard.type("and another one")
    view.locator("#maximum").evaluate("(field) => { field.value = 3; }")
    view.keyboard.press("Enter")
    answered(view, 2)
    assert saved(served, "one-line-and-another-one")[0]["content"] == "One line\nand another one"
    view.keyboard.press("Control+k")
    expect(view.locator("#search")).to_be_focused()
    view.locator("#list a").first.press("Enter")
    answered(view, 2)
    view.locator("#menu-button").press("Enter")
    expect(view.locator("#menu")).to_be_visible()
    view.keyboard.press("Escape")
    expect(view.locator("#menu")).to_be_hidden()
