"""What earlier systems got wrong when they stitched segments together cannot happen here.

Each row of TABLE is a defect that was seen, and the tests that would fail if it came back. Those
that belong to no other file are below.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bits import assert_same_bits, assert_same_session
from reference_models import CHUNK, VOCAB, build, make_engine

from kvpager.segments import DEFAULT_REPAIR, NoRepair, QueryGuided, SegmentHead
from mutants.mutant import exists

HERE = "model/test_defects_stitching.py"
SEGMENTS = "model/test_segments.py"
ROTARY = "model/test_rotary.py"
BENCH = "python/test_bench_segments.py"

TABLE = {
    "chunks encoded alone are filed under the chained hash of a prefix": [
        f"{HERE}::test_chunks_encoded_alone_are_no_hit_for_the_text_they_were_put_into",
        f"{SEGMENTS}::test_only_the_exact_beginning_is_ever_found_by_others",
        f"{SEGMENTS}::test_segments_are_never_found_as_the_beginning_of_a_prompt",
    ],
    "the tail before a seam is computed, the head after it never": [
        f"{HERE}::test_the_default_computes_the_heads_of_all_later_segments_the_last_included",
    ],
    "a mode that promises 15% runs a full prefill": [
        f"{HERE}::test_a_repair_forwards_the_rows_it_says_and_never_all",
        f"{SEGMENTS}::test_every_token_is_counted_once_and_rows_are_those_computed",
    ],
    "keys are never rotated again when a segment moves": [
        f"{HERE}::test_a_segment_that_moves_has_its_keys_rotated",
        f"{SEGMENTS}::test_what_nothing_repairs_is_the_segment_with_rotated_keys",
        f"{ROTARY}::test_attention_to_a_moved_segment_is_that_of_relative_positions",
    ],
    "scattered rows attend to the future": [
        f"{HERE}::test_a_scattered_row_never_sees_what_comes_after_it",
        f"{SEGMENTS}::"
        "test_a_change_to_a_later_segment_leaves_what_was_recomputed_before_it_as_it_is",
        f"{SEGMENTS}::test_each_recomputed_token_is_what_transformers_computes_over_the_merged_kv",
    ],
    "a time to the first token leaves out the look-up, after a warm-up with the prompt": [
        f"{BENCH}::TestFirstToken::test_every_repetition_has_documents_and_a_question_of_its_own",
        f"{BENCH}::TestFirstToken::test_no_way_finds_what_another_one_has_computed",
        f"{BENCH}::TestFirstToken::"
        "test_the_parts_of_a_turn_are_within_it_and_only_a_policy_that_measures_probes",
    ],
}


@pytest.mark.parametrize("defect", TABLE)
def test_every_defect_has_its_tests(defect):
    assert TABLE[defect]
    for name in TABLE[defect]:
        assert exists(name), name


SYSTEM, LENGTHS = 19, (3 * CHUNK, 70, 41)


def ids(count, seed):
    return np.random.default_rng(seed).integers(8, VOCAB, size=count).astype(np.int32)


SYSTEM_IDS, QUESTION_IDS = ids(SYSTEM, 1), ids(6, 2)
DOCUMENTS = [ids(length, 10 + length) for length in LENGTHS]
TEXT = np.concatenate([SYSTEM_IDS, *DOCUMENTS, QUESTION_IDS])
STARTS = [SYSTEM + sum(LENGTHS[:number]) for number in range(len(LENGTHS))]


@pytest.fixture
def engine():
    with make_engine(build("llama"), pool_tokens=512) as engine:
        yield engine


def parts(engine, documents=DOCUMENTS):
    return [SYSTEM_IDS, *(engine.cache_segment(document) for document in documents), QUESTION_IDS]


def test_chunks_encoded_alone_are_no_hit_for_the_text_they_were_put_into(engine):
    """Filed under the chained hash of the prefix, they were served as exact."""
    engine.assemble(parts(engine), repair=NoRepair())
    with engine.session() as session, make_engine(build("llama"), pool_tokens=512) as other:
        session.prefill(TEXT)
        assert session.tokens_computed >= len(TEXT) - SYSTEM // CHUNK * CHUNK
        apart = other.session()
        apart.prefill(TEXT)
        assert_same_session(session, apart, "after an assembly of the same text")


class Seen:
    """A policy that remembers what another one chose."""

    def __init__(self, policy):
        self.policy = policy

    def choose(self, text):
        self.chosen = self.policy.choose(text)
        return self.chosen


def test_the_default_computes_the_heads_of_all_later_segments_the_last_included(engine):
    """The tail before a seam was computed, which is right already, and the head after it never."""
    seen = Seen(DEFAULT_REPAIR)
    session = engine.assemble(parts(engine), repair=seen)
    for start in STARTS:
        assert seen.chosen[start]
    before = engine.assemble(parts(engine), repair=NoRepair())
    for start in STARTS:
        for layer in range(1, engine.layout.layers):
            (ours, _), (moved, _) = (
                one.sequence.read_kv(layer, start, start + 1) for one in (session, before)
            )
            assert not torch.equal(ours, moved)


@pytest.mark.parametrize("policy", [SegmentHead(4), QueryGuided(0.1)], ids=repr)
def test_a_repair_forwards_the_rows_it_says_and_never_all(engine, policy):
    """A mode that promised 15% ran a full prefill and kept 15% of it."""
    given = parts(engine)
    before = engine.core.runner.rows_used
    session = engine.assemble(given, repair=policy)
    rows = engine.core.runner.rows_used - before
    done = session.assembly
    assert rows == done.rows + done.probe_rows
    assert rows < len(TEXT) / 2


def test_a_segment_that_moves_has_its_keys_rotated(engine):
    """They were used with the positions they were computed at."""
    segment = engine.cache_segment(DOCUMENTS[1])
    session = engine.assemble(parts(engine), repair=NoRepair())
    with engine.session() as cold:
        cold.prefill(TEXT)
        start, stop = STARTS[1], STARTS[1] + LENGTHS[1]
        ours, _ = session.sequence.read_kv(0, start, stop)
        computed, _ = cold.sequence.read_kv(0, start, stop)  # layer 0's depend on position alone
        stored, _ = segment.read_kv(0, 0, LENGTHS[1])
    torch.testing.assert_close(ours, computed, rtol=1e-5, atol=1e-5)
    assert (stored - computed).abs().max() > 0.1


def test_a_scattered_row_never_sees_what_comes_after_it(engine):
    """A mask aligned at the bottom right let recomputed tokens attend to the future."""
    changed = DOCUMENTS[2].copy()
    changed[0] = changed[0] % (VOCAB - 9) + 8
    positions = [STARTS[0] + 1, STARTS[0] + 30, STARTS[1] + 2, STARTS[1] + 69]

    class Scattered:
        def choose(self, text):
            chosen = np.zeros(text.tokens, dtype=bool)
            chosen[positions] = True
            return chosen

    one = engine.assemble(parts(engine), repair=Scattered())
    other = engine.assemble(parts(engine, [*DOCUMENTS[:2], changed]), repair=Scattered())
    for layer in range(engine.layout.layers):
        for name, ours, theirs in zip(
            ("keys", "values"),
            one.sequence.read_kv(layer, 0, STARTS[2]),
            other.sequence.read_kv(layer, 0, STARTS[2]),
        ):
            assert_same_bits(ours, theirs, f"{name} of layer {layer}")
