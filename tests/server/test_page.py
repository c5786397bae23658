"""The page: sound HTML, nothing from elsewhere, and in a browser a conversation that goes on."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser

import httpx
import pytest

from server.running import running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
VOID = {"meta", "link", "input", "br"}


class Page(HTMLParser):
    """Elements of a page; fails for tags that are not closed in their order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.labels = [], [], set()
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.elements.append((tag, values))
        if tag == "label":
            self.labels.add(values["for"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(server):
    return Page(server.http.get("/").text)


def test_tags_are_closed_and_ids_are_there_once(page):
    ids = [values["id"] for _, values in page.elements if "id" in values]
    assert len(set(ids)) == len(ids)


def test_inputs_have_labels_and_drawings_have_words(page):
    for tag, values in page.elements:
        if tag in ("input", "textarea"):
            assert values["id"] in page.labels
        if tag in ("svg", "canvas"):
            assert values["aria-label"]
        if tag == "th":
            assert values["scope"] == "col"


def test_sections_are_named_by_headings_that_exist(page):
    ids = {values.get("id") for _, values in page.elements}
    for tag, values in page.elements:
        if tag == "section":
            assert values["aria-labelledby"] in ids


def test_nothing_comes_from_elsewhere(server):
    for name in ("/", "/page/page.css", "/page/page.js"):
        text = server.http.get(name).text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]", re.sub(r"^\s*//.*$", "", text, flags=re.M)), name
    assert "default-src 'none'" in server.http.get("/").headers["content-security-policy"]
    assert server.http.get("/page/../settings.py").status_code == 404
    assert server.http.get("/page/index.html").status_code == 404


def test_the_program_finds_every_element_it_uses(server, page):
    ids = {values.get("id") for _, values in page.elements}
    program = server.http.get("/page/page.js").text
    used = re.findall(r'\bat\("([\w-]+)"\)', program) + re.findall(r'fill\("(\w+)"', program)
    assert used
    assert set(used) <= ids


def test_the_state_is_told_at_once_and_has_no_text(server):
    server.chat("a very private question", extra_body={"session_id": "seen"})
    with httpx.stream("GET", f"{server.url}/monitor/events?session=seen", timeout=20) as answer:
        lines = answer.iter_lines()
        data = next(line for line in lines if line.startswith("data: "))
    state = json.loads(data[6:])
    assert "private" not in data
    assert state["pool"]["blocks"] == server.service.engine.config.pool_blocks
    assert "seen" in [one["id"] for one in state["sessions"]]
    assert state["strip"]["chunks"]
    server.http.delete("/v1/sessions/seen")


def test_the_page_can_be_left_out(engine, tmp_path):
    with running(engine, tmp_path, page=False) as server:
        assert server.http.get("/").status_code == 404
        assert server.http.get("/monitor/events").status_code == 404


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.parametrize("width", [1280, 360])
def test_a_conversation_in_a_browser_goes_on_from_what_was_computed(server, width):
    api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with api.sync_playwright() as player:
        browser = player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": width, "height": 800}, bypass_csp=True)
        wrong = []
        view.on("console", lambda message: wrong.append(message.text))
        view.on("pageerror", lambda error: wrong.append(str(error)))
        view.goto(server.url)
        for number, text in enumerate(("Write a class.", "Add a method."), 1):
            view.fill("#text", text)
            view.keyboard.press("Enter")
            view.wait_for_function(
                f"document.querySelectorAll('#messages li').length == {2 * number}"
                " && !document.getElementById('send').disabled",
                timeout=90_000,
            )
        cached = re.search(r"(\d+) of them cached", view.text_content("#usage"))
        assert int(cached[1]) > 20
        view.click("#sessions button")
        view.wait_for_selector("#strip-table td.number")
        assert view.evaluate("document.documentElement.scrollWidth") <= width
        assert wrong == []
        browser.close()
