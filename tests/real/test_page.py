"""The page with a real model: what it shows is what Python says, also after a restart."""

from __future__ import annotations

from kvpager import Engine
from server.browsing import answered, ask, chromium, tabs  # noqa: F401
from server.running import running

QUESTIONS = ("What is the capital of France?", "And of Italy?", "Which is larger?")
NEW = 12


def test_a_conversation_goes_on_in_a_browser_after_a_restart(loaded, tmp_path, tab):
    model, tokenizer = loaded
    shown, name = [], ""
    for question in QUESTIONS:
        with (
            Engine(model, tokenizer=tokenizer, pool_tokens=2048) as engine,
            running(engine, tmp_path) as server,
        ):
            view = tab(f"{server.url}/{name}", user=question)
            if name:
                assert answered(view, 2 * len(shown)) == shown[-1]
            ask(view, question, NEW)
            shown.append(answered(view, 2 * len(shown) + 2))
            name = "#c/what-is-the-capital-of-france"
            assert view.url.endswith(name)
            view.close()
    with Engine(model, tokenizer=tokenizer) as engine, engine.session() as session:
        assert shown == [session.chat(question, NEW, temperature=0).text for question in QUESTIONS]
