"""Answers about what is stored, for a scheduler that must not wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from kvpager.connectors.lookups import Lookups


class Store:
    """A store whose answers can be held back. asked: the keys of each call."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.asked: list[list[str]] = []
        self.open = threading.Event()
        self.open.set()
        self.error: Exception | None = None

    def stored(self, keys: Sequence[str]) -> list[bool]:
        self.open.wait(60)
        self.asked.append(list(keys))
        if self.error is not None:
            raise self.error
        return [key in self.keys for key in keys]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def lookups(store: Store) -> Iterator[Lookups[str]]:
    found: Lookups[str] = Lookups(store.stored)
    yield found
    store.open.set()
    found.close()


def settled(lookups: Lookups[str]) -> None:
    """Waits until the thread has answered all that was sent."""
    done = threading.Event()
    lookups.do(done.set)
    assert done.wait(60)


def answer(lookups: Lookups[str], key: str, request: str = "a") -> bool | None:
    lookups.ask(key, request)
    lookups.send()
    settled(lookups)
    return lookups.ask(key, request)


def test_a_key_is_answered_after_it_was_sent(lookups, store):
    store.keys = {"one"}
    assert lookups.ask("one", "a") is None
    settled(lookups)
    assert lookups.ask("one", "a") is None
    lookups.send()
    settled(lookups)
    assert lookups.ask("one", "a") is True
    assert answer(lookups, "two") is False


def test_asking_returns_while_the_store_does_not_answer(lookups, store):
    store.open.clear()
    assert lookups.ask("one", "a") is None
    lookups.send()
    assert lookups.ask("one", "a") is None
    assert lookups.ask("two", "a") is None
    lookups.forget("a")
    assert store.asked == []


def test_keys_of_one_step_are_asked_together_and_once(lookups, store):
    for key in ("one", "two", "one"):
        lookups.ask(key, "a")
    lookups.ask("two", "b")
    lookups.send()
    lookups.send()
    settled(lookups)
    assert store.asked == [["one", "two"]]


def test_a_load_that_failed_is_a_miss_for_as_long_as_requests_ask(lookups, store):
    store.keys = {"one"}
    assert answer(lookups, "one") is True
    lookups.missed(["one", "unknown"])
    assert answer(lookups, "one") is False
    assert answer(lookups, "one", "b") is False
    assert len(store.asked) == 1


def test_a_load_that_failed_is_a_miss_though_the_store_is_just_being_asked(lookups, store):
    store.keys = {"one"}
    store.open.clear()
    lookups.ask("one", "a")
    lookups.send()
    lookups.missed(["one"])
    store.open.set()
    settled(lookups)
    assert lookups.ask("one", "a") is False


def test_a_key_is_asked_anew_when_its_requests_have_ended(lookups, store):
    assert answer(lookups, "one", "a") is False
    assert lookups.ask("one", "b") is False
    lookups.forget("a")
    assert lookups.ask("one", "b") is False
    lookups.forget("b")
    store.keys = {"one"}
    assert answer(lookups, "one", "c") is True


def test_a_key_of_a_request_that_ends_before_it_is_sent_is_answered_for_others(lookups, store):
    store.keys = {"one"}
    lookups.ask("one", "a")
    lookups.ask("one", "b")
    lookups.forget("a")
    lookups.send()
    settled(lookups)
    assert lookups.ask("one", "b") is True


def test_what_no_request_needs_any_more_is_not_asked(lookups, store):
    lookups.ask("one", "a")
    lookups.forget("a")
    lookups.send()
    settled(lookups)
    assert store.asked == []


def test_an_error_of_the_store_is_a_miss_and_the_next_question_is_asked(lookups, store, caplog):
    store.error = OSError("the disk is gone")
    assert answer(lookups, "one") is False
    assert "the disk is gone" in caplog.text
    store.error = None
    store.keys = {"two"}
    assert answer(lookups, "two") is True


def test_work_that_fails_is_logged_and_ends_nothing(lookups, store, caplog):
    lookups.do(lambda: 1 // 0)
    assert answer(lookups, "one") is False
    assert "ZeroDivisionError" in caplog.text


def test_closing_waits_for_the_thread(store):
    found: Lookups[str] = Lookups(store.stored)
    before = threading.active_count()
    found.close()
    assert threading.active_count() == before - 1


def test_the_answer_of_a_forgotten_request_is_kept_for_nobody(lookups, store):
    store.open.clear()
    lookups.ask("one", "a")
    lookups.send()
    lookups.forget("a")
    store.open.set()
    settled(lookups)
    store.keys = {"one"}
    assert answer(lookups, "one", "b") is True
