"""The page's files: sound HTML, nothing from elsewhere; and its state, as it comes."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

from kvpager.server.routes import page as page_routes
from server.running import running

SCRIPTS = ("page.js", "common.js", "markdown.js", "server.js")
LIBRARIES = ("vendor/marked.js", "vendor/dompurify.js")
FETCH = Path(__file__).parents[2] / "scripts" / "fetch_page_libraries.sh"
VENDOR = Path(page_routes.__file__).parent.parent / "page" / "vendor"
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
    for name in ("/", "/page/page.css", *(f"/page/{script}" for script in SCRIPTS)):
        text = server.http.get(name).text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]", re.sub(r"^\s*//.*$", "", text, flags=re.M)), name
    policy = server.http.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "require-trusted-types-for 'script'" in policy
    assert server.http.get("/page/../settings.py").status_code == 404
    assert server.http.get("/page/index.html").status_code == 404


def test_libraries_are_there_with_their_licences_and_name_their_versions(server):
    for name in LIBRARIES:
        assert server.http.get(f"/page/{name}").status_code == 200
        assert "sourceMappingURL" not in server.http.get(f"/page/{name}").text
    fetched = dict(re.findall(r'^  "(\w+) ([\d.]+) sha512-', FETCH.read_text(), flags=re.M))
    assert sorted(fetched) == ["dompurify", "marked"]
    for name, version in fetched.items():
        assert version in (VENDOR / f"{name}.js").read_text()[:200]
        assert (VENDOR / f"{name}.LICENSE").stat().st_size > 1000


def test_the_program_finds_every_element_it_uses(server, page):
    ids = {values.get("id") for _, values in page.elements}
    program = "".join(server.http.get(f"/page/{script}").text for script in SCRIPTS)
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
