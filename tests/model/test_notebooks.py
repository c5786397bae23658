"""Notebooks: what objects show, a cell that is run twice, and what `help` says."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import text_models

import kvpager
from kvpager import Engine, InvalidArgumentError, Session
from kvpager.progress import reporting, reporting_bytes

SAMPLED = {"temperature": 1.0, "seed": 5, "eos": None}


@pytest.fixture
def engine() -> Iterator[Engine]:
    tokenizer = text_models.byte_level()
    with Engine(text_models.model(), tokenizer=tokenizer, pool_tokens="auto", rows=32) as made:
        yield made


@pytest.fixture
def session(engine: Engine) -> Session:
    return engine.session()


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has this process look like a notebook's kernel."""
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", shell)


def html_of(shown: Any) -> str:
    text: str = shown._repr_html_()
    for tag in re.findall(r"</(\w+)>", text):  # what is opened is closed
        assert len(re.findall(rf"<{tag}\b", text)) == text.count(f"</{tag}>")
    assert "<script" not in text
    return text


# What objects show.


def test_a_session_shows_its_messages_as_text_and_its_chunks(session: Session) -> None:
    session.chat("<b>What</b> is a cache?", 3, **SAMPLED)
    shown = html_of(session)
    assert "&lt;b&gt;What&lt;/b&gt; is a cache?" in shown
    assert f"Session of {session.length} tokens" in shown
    assert html_of(session.ledger()) in shown


def test_a_ledger_shows_a_cell_for_each_chunk_and_counts_them_by_place(session: Session) -> None:
    session.prefill(range(3, 3 + 200))
    ledger = session.ledger()
    shown = html_of(ledger)
    assert len(ledger) == 4
    assert shown.count("<span title=") == 4
    assert "in the pool: 4" in shown
    assert "chunk 3: tokens 192 to 199, in the pool, open, exact" in shown
    assert ledger[1:] == list(ledger)[1:]


def test_a_long_ledger_draws_a_part_and_counts_all(session: Session) -> None:
    from kvpager.pager import Ledger

    session.prefill(range(3, 3 + 64))
    shown = html_of(Ledger(session.ledger() * 1000))
    assert shown.count("<span title=") == 600
    assert "in the pool: 1,000" in shown


def test_a_completion_shows_its_text_and_figures(session: Session) -> None:
    done = session.chat("Hello", 3, **SAMPLED)
    shown = html_of(done)
    assert "3 tokens" in shown
    assert "length" in shown
    assert "first token after" in shown


def test_an_engine_and_its_plan_show_the_pool_with_units(engine: Engine) -> None:
    shown = html_of(engine)
    assert type(engine.model).__name__ in shown
    assert "layers x" in shown
    assert f"{engine.config.pool_tokens:,} tokens" in shown
    assert "MiB" in html_of(engine.plan)


def test_what_is_closed_shows_that(engine: Engine, session: Session) -> None:
    session.close()
    assert "closed" in html_of(session)
    engine.close()
    assert "closed" in html_of(engine)


def test_progress_bars_are_those_of_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Bar:
        n, total = 0, None

        def __init__(self, desc: str, **options: Any) -> None:
            self.label, self.options = desc, options
            made.append(self)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None: ...

        def update(self, more: int) -> None:
            self.n += more

        def refresh(self) -> None: ...

    monkeypatch.setattr("tqdm.auto.tqdm", Bar)
    with reporting(True, "prefill", 30) as report:
        for done in (10, 30):
            report(done)
    with reporting_bytes(True, "save") as report_bytes:
        report_bytes(1 << 20, 2 << 20)
    assert [(bar.label, bar.n, bar.total) for bar in made] == [
        ("prefill", 30, 30),
        ("save", 1 << 20, 2 << 20),
    ]
    assert made[1].options["unit"] == "B"


# A cell that is run twice.


def test_the_same_message_again_is_refused_in_a_notebook_alone(
    session: Session, request: pytest.FixtureRequest
) -> None:
    for _ in range(2):
        session.chat("Go on.", 3, **SAMPLED)  # a program may mean it
    request.getfixturevalue("notebook")
    before = session.messages
    with pytest.raises(InvalidArgumentError, match="turn=2 to answer again, or turn=3 to add it"):
        session.chat("Go on.", 3, **SAMPLED)
    assert session.messages == before
    session.chat("And then?", 3, **SAMPLED)
    assert len(session.messages) == 6


@pytest.mark.usefixtures("notebook")
def test_a_numbered_turn_answers_again_and_adds_nothing(session: Session) -> None:
    first = session.chat("Hello", 4, turn=1, **SAMPLED)
    second = session.chat("Go on.", 4, turn=2, **SAMPLED)
    held = session.messages
    again = session.chat("Go on.", 4, turn=2, **SAMPLED)
    assert session.messages == held
    assert again.tokens.tolist() == second.tokens.tolist()
    # An earlier turn drops what follows it.
    assert session.chat("Hello", 4, turn=1, **SAMPLED).tokens.tolist() == first.tokens.tolist()
    assert session.messages == held[:2]


@pytest.mark.parametrize(
    ("messages", "turn", "says"),
    [
        ("Hello", 0, "turn is 0; expected 1 to 2"),
        ("Hello", 3, "turn is 3; expected 1 to 2"),
        ("Hello", "first", "turn is 'first'"),
        ([{"role": "user", "content": "Hello"}], 1, "turn is 1, and messages are a list"),
    ],
)
def test_a_turn_that_cannot_be_is_refused(
    session: Session, messages: Any, turn: Any, says: str
) -> None:
    session.chat("Hello", 3, **SAMPLED)
    before = session.messages
    with pytest.raises(InvalidArgumentError, match=re.escape(says)):
        session.chat(messages, 3, turn=turn)
    assert session.messages == before


# What `help` says.


def members() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in kvpager.__all__:
        value = getattr(kvpager, name)
        for own, member in vars(value).items() if inspect.isclass(value) else ():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            public = own == "__init__" or not own.startswith("_")
            if public and inspect.isfunction(function):
                yield f"{name}.{own}", function


def test_no_signature_of_a_public_name_leaves_a_type_open() -> None:
    open_ones = [
        f"{name}: {part}"
        for name, function in members()
        for part, kind in function.__annotations__.items()
        if "Any" in str(kind).split(" | ") and name != "DirectoryStore.annotate"  # by name, for two
    ]
    assert open_ones == []


def test_no_help_of_a_public_name_refers_to_the_line_before() -> None:
    texts = {name: function.__doc__ for name, function in members()}
    texts |= {name: getattr(kvpager, name).__doc__ for name in kvpager.__all__}
    assert [name for name, text in texts.items() if "likewise" in (text or "")] == []
