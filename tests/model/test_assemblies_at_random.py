"""Whatever segments and ids a text is put together from, it is theirs, and worth what it says."""

from __future__ import annotations

import numpy as np
import pytest
from bits import assert_same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_models import CHUNK, VOCAB, build, make_engine

from kvpager.segments import (
    Combined,
    Deviation,
    FullRepair,
    NoRepair,
    QueryGuided,
    SeamTail,
    SegmentHead,
)

POOL_TOKENS = 96
LENGTHS = [0, 1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 5, POOL_TOKENS + CHUNK + 3]
POLICIES = [
    NoRepair(),
    FullRepair(),
    SegmentHead(3),
    SeamTail(2),
    Deviation(0.2),
    Deviation(0.1, of="key", layers=2),
    QueryGuided(0.2, rows=4),
    Combined(SegmentHead(1), QueryGuided(0.1)),
]


class AtRandom:
    """A policy that chooses each token with a probability."""

    def __init__(self, seed, share):
        self.seed, self.share = seed, share

    def choose(self, text):
        return np.random.default_rng(self.seed).random(text.tokens) < self.share

    def __repr__(self):
        return f"AtRandom({self.seed}, {self.share})"


# A part: ids to compute, or one of a few segments, so that some are used more than once.
PARTS = st.lists(
    st.one_of(
        st.tuples(st.just("ids"), st.sampled_from(LENGTHS[:7]), st.integers(0, 3)),
        st.tuples(st.just("segment"), st.sampled_from(LENGTHS), st.integers(0, 1)),
    ),
    min_size=1,
    max_size=5,
)
REPAIRS = st.one_of(
    st.sampled_from(POLICIES),
    st.builds(AtRandom, st.integers(0, 99), st.sampled_from([0.05, 0.3, 0.9])),
)


def ids(length, seed):
    return np.random.default_rng([length, seed]).integers(3, VOCAB, size=length).astype(np.int32)


class Texts:
    """An engine, and a dictionary of what it was told."""

    def __init__(self, engine):
        self.engine = engine
        self.known = {}

    def part(self, kind, length, seed):
        tokens = ids(length, seed)
        if kind == "ids":
            return tokens, tokens
        name = f"s{length}-{seed}"
        if name not in self.known:
            self.known[name] = self.engine.cache_segment(tokens, name=name)
        return (name if seed else self.known[name]), tokens

    def check(self, parts, repair):
        asked, tokens = zip(*(self.part(*part) for part in parts))
        text = np.concatenate(tokens)
        if not len(text):
            return
        engine = self.engine
        with engine.assemble(asked, repair=repair) as session:
            engine.pager.check_invariants()
            assert session.tokens.tolist() == text.tolist()
            assert session.committed == len(text)
            done = session.assembly
            assert done.tokens == done.exact + done.moved + done.recomputed + done.fresh
            for chunk in session.ledger():
                expected = "exact" if chunk.stop <= done.exact else "approximate"
                assert chunk.provenance == expected
            self.check_exact(session, text)
            assert len(session.generate(2, eos=None).tokens.tolist()) == 2
        engine.pager.check_invariants()

    def check_exact(self, session, text):
        """What is said to be exact is what a prefill computes; segments' values are their own."""
        exact = session.assembly.exact
        layer = self.engine.layout.layers - 1
        if exact:
            with self.engine.session() as cold:
                cold.prefill(text[:exact])
                for name, one, other in zip(
                    ("keys", "values"),
                    session.sequence.read_kv(layer, 0, exact),
                    cold.sequence.read_kv(layer, 0, exact),
                ):
                    assert_same_bits(one, other, f"exact {name}")
        if exact == len(text):
            cold_logits = session.logits
            with self.engine.session() as cold:
                cold.prefill(text)
                assert_same_bits(cold_logits, cold.logits, "logits")


@pytest.fixture(scope="module")
def texts():
    with make_engine(build("llama"), pool_tokens=POOL_TOKENS) as engine:
        yield Texts(engine)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(parts=PARTS, repair=REPAIRS)
def test_any_assembly_is_its_parts_and_worth_what_its_ledger_says(texts, parts, repair):
    texts.check(parts, repair)


@pytest.mark.deep
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(parts=PARTS, repair=REPAIRS)
def test_a_thousand_assemblies_are_their_parts_and_worth_what_their_ledgers_say(
    texts, parts, repair
):
    texts.check(parts, repair)
