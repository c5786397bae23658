"""A session whose chunks come through Python, as from a remote store, while attention runs."""

from __future__ import annotations

import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from reference_models import CHUNK, build, make_engine, prompt

from kvpager import StorageError
from kvpager.stores import SnapshotReader

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "own_store.py"))
TOKENS = 20 * CHUNK + 3
# Of 20 chunks most are read again in each forward.
COLD = {"pool_tokens": 8 * CHUNK, "host_bytes": 0, "summary_bytes": "1MiB", "threads": 2}
WARM = {"pool_tokens": 32 * CHUNK, "threads": 2}


class Remote(EXAMPLE["DictStore"]):
    """The example's store; its reads can be made to fail."""

    def __init__(self):
        super().__init__({})
        self.refuses = False

    def open(self, name):
        return SnapshotReader.open(name, opener=lambda path: Remotely(self, self._held(path)))


class Remotely:
    def __init__(self, store, held):
        self.store, self.held, self.size = store, held, held.size

    def read(self, offset, size):
        if self.store.refuses:
            raise OSError("the network is down")
        return self.held.read(offset, size)

    def will_need(self, offset, size):
        pass


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def store(model):
    store = Remote()
    with make_engine(model, **WARM) as engine, engine.session() as session:
        session.prefill(prompt(TOKENS))
        session.save("before", store=store)
    return store


@pytest.fixture(scope="module")
def answer(model):
    with make_engine(model, **WARM) as engine, engine.session() as session:
        session.prefill(prompt(TOKENS))
        return session.generate(24).tokens.tolist()


def test_threads_that_answer_at_once_have_the_bits_of_a_run_in_memory(model, store, answer):
    with make_engine(model, **COLD) as engine:

        def answered(_):
            with engine.restore("before", store=store) as session:
                return session.generate(24).tokens.tolist()

        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(answered, range(3)))
    assert found == [answer] * 3


def test_a_source_that_fails_in_a_forward_fails_that_call_alone(model, store, answer):
    with make_engine(model, **COLD) as engine, engine.restore("before", store=store) as session:
        begun = session.generate(4).tokens.tolist()
        store.refuses = True
        try:
            with pytest.raises(StorageError, match="the network is down"):
                session.generate(20)
        finally:
            store.refuses = False
        assert begun + session.generate(20).tokens.tolist() == answer
