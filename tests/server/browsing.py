"""Tests of the page in a browser: tabs, and a conversation in one of them."""

from __future__ import annotations

import shutil

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
expect = playwright.expect
expect.set_options(timeout=30_000)
SLOW_MS = 60_000


@pytest.fixture(name="browser", scope="module")
def chromium():
    """A browser; skips where there is none."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium (apt-get install chromium)")
    with playwright.sync_playwright() as player:
        browser = player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(name="tab")
def tabs(browser):
    """Opens tabs of one browser; a test fails for what any of them complains about."""
    wrong, contexts = [], {}

    def opened(url, user="ada", *, connected=True, **options):
        if user not in contexts:
            contexts[user] = browser.new_context(**options)
        view = contexts[user].new_page()
        view.set_default_timeout(SLOW_MS)
        view.on("pageerror", lambda error: wrong.append(str(error)))
        view.on("console", lambda one: wrong.append(one.text) if is_wrong(one) else None)
        view.goto(url)
        if connected:
            expect(view.locator("#connection")).to_have_text("connected", timeout=SLOW_MS)
        return view

    def is_wrong(message):
        return (
            message.type in ("error", "warning") and "Failed to load resource" not in message.text
        )

    yield opened
    for context in contexts.values():
        context.close()
    assert wrong == []


def ask(view, text, maximum=None):
    """Sends a message whose answer is greedy."""
    view.evaluate("document.getElementById('settings').open = true")
    view.fill("#temperature", "0")
    view.fill("#maximum", "" if maximum is None else str(maximum))
    view.evaluate("document.getElementById('settings').open = false")
    view.fill("#text", text)
    view.locator("#text").press("Enter")


def answered(view, messages):
    """Waits until the conversation has so many messages, and none grows; the last one's text."""
    expect(view.locator("#messages > li")).to_have_count(messages, timeout=SLOW_MS)
    expect(view.locator("#messages .growing")).to_have_count(0, timeout=SLOW_MS)
    return text_of(view)


def text_of(view):
    return view.locator("#messages > li > .body").last.get_attribute("data-text")


def grows(view):
    """Waits until an answer has begun."""
    expect(view.locator("#messages .growing .body")).not_to_be_empty(timeout=SLOW_MS)
