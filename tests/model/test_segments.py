"""Sessions put together from segments: what is exact, what is moved, and what a repair computes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers
from bits import assert_same_bits, assert_same_session
from damage import damage_chunk, packs
from reference_models import CHUNK, VOCAB, build, make_engine

from kvpager import DirectoryStore, InvalidArgumentError, PagerError, TopK
from kvpager._model.seam.causal_lm import handed
from kvpager.config import Window
from kvpager.segments import (
    DEFAULT_REPAIR,
    Combined,
    Deviation,
    FullRepair,
    NoRepair,
    QueryGuided,
    SeamTail,
    SegmentHead,
)
from kvpager.segments.pieces import lay_out
from kvpager.segments.stitching import Stitcher

SYSTEM, A, B, C, QUESTION = 21, 50, 3 * CHUNK, 37, 9
POLICIES = [
    NoRepair(),
    SegmentHead(5),
    SeamTail(5),
    Deviation(0.2),
    Deviation(0.2, of="key", layers=2),
    QueryGuided(0.2),
    Combined(SegmentHead(2), QueryGuided(0.1)),
    FullRepair(),
]


class Chosen:
    """A policy that chooses these positions."""

    def __init__(self, *positions):
        self.positions = list(positions)

    def choose(self, text):
        mask = np.zeros(text.tokens, dtype=bool)
        mask[self.positions] = True
        return mask


def ids(count, seed):
    return np.random.default_rng(seed).integers(8, VOCAB, size=count).astype(np.int32)


SYSTEM_IDS, QUESTION_IDS = ids(SYSTEM, 1), ids(QUESTION, 2)
DOCUMENTS = {"a": ids(A, 3), "b": ids(B, 4), "c": ids(C, 5)}
PARTS = [SYSTEM_IDS, "b", "a", "c", QUESTION_IDS]
TEXT = np.concatenate([SYSTEM_IDS, DOCUMENTS["b"], DOCUMENTS["a"], DOCUMENTS["c"], QUESTION_IDS])
FIRST = SYSTEM + B  # where the second document begins
QUESTION_AT = len(TEXT) - QUESTION


@pytest.fixture(scope="module")
def model():
    return build("llama")


def with_segments(model, **options):
    engine = make_engine(model, **options)
    for name, document in DOCUMENTS.items():
        engine.cache_segment(document, name=name)
    return engine


@pytest.fixture(scope="module")
def engine(model):
    with with_segments(model) as engine:
        yield engine


@pytest.fixture(scope="module")
def cold(engine):
    """A full prefill of the text."""
    with engine.session() as session:
        session.prefill(TEXT)
        yield session


def keys_and_values(session, start, stop):
    layers = range(session.core.facts.layout.layers)
    return [session.sequence.read_kv(layer, start, stop) for layer in layers]


def assert_same_kv(actual, expected, start, stop, what):
    pairs = zip(keys_and_values(actual, start, stop), keys_and_values(expected, start, stop))
    for layer, (ours, theirs) in enumerate(pairs):
        for name, one, other in zip(("keys", "values"), ours, theirs):
            assert_same_bits(one, other, f"{what}: {name} of layer {layer}")


@pytest.mark.parametrize("pool_tokens", [96, 2048])
def test_recomputing_everything_is_a_full_prefill_to_the_bit(model, pool_tokens):
    with with_segments(model, pool_tokens=pool_tokens) as engine:
        session = engine.assemble(PARTS, repair=FullRepair())
        expected = engine.session()
        expected.prefill(TEXT)
        assert_same_session(session, expected, "assembled")
        assert {chunk.provenance for chunk in session.ledger()} == {"exact"}
        assert session.assembly.exact == len(TEXT)


def test_rows_of_a_repair_have_the_bits_of_a_prefill_when_all_before_them_have(engine, cold):
    # Through the repair's own forwards, which an assembly leaves to the prefill.
    parts = [SYSTEM_IDS, *(engine.segments[name] for name in "bac"), QUESTION_IDS]
    pieces = lay_out(parts)
    with engine.session() as session:
        session.prefill(SYSTEM_IDS)
        stitcher = Stitcher(engine.core, pieces, TEXT)
        everything = np.ones(len(TEXT), dtype=bool)
        stitcher.extend(session.sequence, QUESTION_AT, everything)
        assert stitcher.rows == QUESTION_AT - SYSTEM
        assert_same_kv(session, cold, 0, QUESTION_AT, "repaired")
        assert session.ledger()[-1].provenance == "approximate"


def test_rows_given_between_computed_ones_do_not_change_these(model):
    # The segment at position 0 is what a prefill computes, so that what follows it is as well.
    with make_engine(model) as engine:
        engine.cache_segment(TEXT[:QUESTION_AT], name="all")
        pieces = lay_out([engine.segments["all"], QUESTION_IDS])
        live = np.random.default_rng(0).random(len(TEXT)) < 0.3
        with engine.session() as session, engine.session() as expected:
            expected.prefill(TEXT[:QUESTION_AT])
            session.transcript.reserve(len(TEXT))
            Stitcher(engine.core, pieces, TEXT).extend(session.sequence, QUESTION_AT, live)
            assert_same_kv(session, expected, 0, QUESTION_AT, "scattered")


def test_a_segment_at_the_beginning_and_what_follows_it_are_exact(engine):
    with engine.session() as expected:
        expected.prefill(np.concatenate([DOCUMENTS["a"], QUESTION_IDS]))
        with engine.assemble(["a", QUESTION_IDS]) as session:
            assert_same_session(session, expected, "assembled")
            assert {chunk.provenance for chunk in session.ledger()} == {"exact"}
            assert session.assembly.rows == QUESTION
            assert session.assembly.shared == A


def test_what_nothing_repairs_is_the_segment_with_rotated_keys(engine):
    with engine.assemble(PARTS, repair=NoRepair()) as session:
        starts = {"b": SYSTEM, "a": FIRST, "c": FIRST + A}
        for name, start in starts.items():
            segment = engine.segments[name]
            old = np.arange(len(segment))
            move = engine.core.key_mover.at(old, old + start)
            for layer in range(engine.layout.layers):
                keys, values = segment.read_kv(layer, 0, len(segment))
                ours = session.sequence.read_kv(layer, start, start + len(segment))
                assert_same_bits(ours[0], move.move(layer, keys), f"keys of {name}")
                assert_same_bits(ours[1], values, f"values of {name}")


@pytest.mark.parametrize("policy", POLICIES[1:-1], ids=repr)
def test_each_recomputed_token_is_what_transformers_computes_over_the_merged_kv(model, policy):
    with with_segments(model) as engine:
        session = engine.assemble(PARTS, repair=policy)
        merged = keys_and_values(session, 0, len(TEXT))
        moved = engine.assemble(PARTS, repair=NoRepair())
        before = keys_and_values(moved, 0, len(TEXT))
    changed = {
        position
        for (keys, _), (others, _) in zip(merged[1:], before[1:])
        for position in np.flatnonzero((keys != others).any(dim=2).any(dim=1).numpy())
        if SYSTEM <= position < QUESTION_AT
    }
    assert 0 < len(changed) <= session.assembly.recomputed + session.assembly.exact - SYSTEM
    config = copy.deepcopy(model.config)  # which from_config writes to
    stock = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    stock.eval().load_state_dict(model.state_dict())
    for position in sorted(changed)[:: max(1, len(changed) // 12)]:
        cache = transformers.DynamicCache(config=stock.config)
        for layer, (keys, values) in enumerate(merged):
            past = (part[:position].transpose(0, 1).unsqueeze(0) for part in (keys, values))
            cache.update(*past, layer)
        with torch.inference_mode():
            stock(
                torch.tensor([[int(TEXT[position])]]),
                position_ids=torch.tensor([[position]]),
                **handed(stock, cache),
            )
        for layer, (keys, values) in enumerate(merged):
            computed = (cache.layers[layer].keys[0, :, -1], cache.layers[layer].values[0, :, -1])
            for ours, theirs in zip((keys[position], values[position]), computed):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("policy", POLICIES[:-1], ids=repr)
def test_only_the_exact_beginning_is_ever_found_by_others(model, policy):
    with with_segments(model) as engine:
        session = engine.assemble(PARTS, repair=policy)
        exact = session.assembly.exact
        assert SYSTEM <= exact < FIRST
        for chunk in session.ledger():
            expected = "exact" if chunk.stop <= exact else "approximate"
            assert chunk.provenance == expected
        before = engine.pager.stats()["rows_committed"]
        with engine.session() as other:
            other.prefill(TEXT)
            computed = engine.pager.stats()["rows_committed"] - before
            assert computed == len(TEXT) - exact // CHUNK * CHUNK


def test_segments_are_never_found_as_the_beginning_of_a_prompt(model):
    with make_engine(model) as engine:
        engine.cache_segment(DOCUMENTS["b"], name="b")
        with engine.session() as session:
            session.prefill(DOCUMENTS["b"])
            assert session.tokens_computed == B


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_every_token_is_counted_once_and_rows_are_those_computed(model, policy):
    with with_segments(model) as engine:
        before = engine.core.runner.rows_used
        session = engine.assemble(PARTS, repair=policy)
        used = engine.core.runner.rows_used - before
        done = session.assembly
        assert done.tokens == len(TEXT) == session.length
        assert done.tokens == done.exact + done.moved + done.recomputed + done.fresh
        assert done.rows == done.exact - done.shared + done.recomputed + done.fresh
        probing = isinstance(policy, (QueryGuided, Deviation, Combined))
        assert (done.probe_rows > 0) == probing
        if not isinstance(policy, Deviation):  # which probes some layers alone
            assert used == done.rows + done.probe_rows
        if not isinstance(policy, FullRepair):  # never a hidden full prefill
            assert done.rows < len(TEXT) / 1.5


def test_the_default_computes_the_heads_of_all_later_segments(engine):
    class Seen:
        def choose(self, text):
            self.chosen = DEFAULT_REPAIR.choose(text)
            return self.chosen

    seen = Seen()
    with (
        engine.assemble(PARTS, repair=seen) as session,
        engine.assemble(PARTS, repair=NoRepair()) as before,
    ):
        for start in (SYSTEM, FIRST, FIRST + A):
            assert seen.chosen[start]
            ours, moved = (keys_and_values(one, start, start + 1) for one in (session, before))
            for (keys, _), (others, _) in zip(ours[1:], moved[1:]):
                assert not torch.equal(keys, others)


def test_a_change_to_a_later_segment_leaves_what_was_recomputed_before_it_as_it_is(model):
    with with_segments(model) as engine:
        changed = DOCUMENTS["c"].copy()
        changed[3] = 7
        engine.cache_segment(changed, name="other")
        rows = [*range(FIRST, FIRST + 9), FIRST + 20, FIRST + A - 1, FIRST + A, FIRST + A + 5]
        for policy in (SegmentHead(7), SeamTail(4), Deviation(0.25), Chosen(*rows)):
            one = engine.assemble(PARTS, repair=policy)
            other = engine.assemble([SYSTEM_IDS, "b", "a", "other"], repair=policy)
            # What a policy chooses within a segment may depend on all of that segment.
            stop = FIRST + A + (0 if isinstance(policy, Deviation) else 3)
            assert_same_kv(one, other, 0, stop, repr(policy))
            one.close()
            other.close()


def test_a_recomputed_row_never_depends_on_how_many_rows_a_forward_takes_at_a_time(model):
    policy = Chosen(*range(SYSTEM + 3, QUESTION_AT, 3))
    sessions = []
    for pool in (96, 2048):
        with with_segments(model, pool_tokens=pool) as engine:
            session = engine.assemble(PARTS, repair=policy)
            sessions.append((keys_and_values(session, 0, len(TEXT)), session.logits))
    (small, logits), (large, others) = sessions
    for layer, (ours, theirs) in enumerate(zip(small, large)):
        for name, one, other in zip(("keys", "values"), ours, theirs):
            assert_same_bits(one, other, f"{name} of layer {layer}")
    assert_same_bits(logits, others, "logits")


def test_a_windowed_selection_recomputes_densely(model):
    rows = {}
    for selection in (None, Window(recent=64, sinks=CHUNK)):
        options = {} if selection is None else {"selection": selection}
        with with_segments(model, **options) as engine:
            session = engine.assemble(PARTS, repair=Chosen(*range(FIRST + 3, FIRST + 9)))
            # Documents are shorter than the window: they are the same, and so is what sees them.
            rows[selection] = keys_and_values(session, FIRST + 3, FIRST + 9)
    dense, windowed = rows.values()
    for ours, theirs in zip(windowed, dense):
        assert_same_bits(ours[0], theirs[0], "keys")
        assert_same_bits(ours[1], theirs[1], "values")


@pytest.mark.parametrize("exact", ["reuse", False])
def test_engines_that_promise_less_assemble_as_well(model, exact):
    with with_segments(model, exact=exact) as engine:
        session = engine.assemble(PARTS, repair=SegmentHead(4))
        worth = {chunk.provenance for chunk in session.ledger()}
        assert worth == ({"exact", "approximate"} if exact else {"approximate", "decode"})
        assert len(session.generate(2 * CHUNK, eos=None).tokens.tolist()) == 2 * CHUNK
        engine.pager.check_invariants()


@pytest.mark.parametrize(
    ("architecture", "dtype", "rounding"),
    [
        ("llama", "float32", 1e-5),
        ("smollm3", "bfloat16", 2**-7),
        ("gemma2", "bfloat16", 2**-7),
        ("qwen3", "bfloat16", 2**-7),
    ],
)
def test_moved_keys_are_those_of_a_prefill_within_one_rounding(architecture, dtype, rounding):
    with make_engine(build(architecture, dtype)) as engine:
        document = ids(60, 3)
        engine.cache_segment(document, name="a")
        text = np.concatenate([SYSTEM_IDS, document])
        session = engine.assemble([SYSTEM_IDS, "a"], repair=NoRepair())
        with engine.session() as cold:
            cold.prefill(text)
            ours, values = session.sequence.read_kv(0, SYSTEM, len(text))
            theirs, expected = cold.sequence.read_kv(0, SYSTEM, len(text))
        assert ours.dtype == getattr(torch, dtype)
        assert_same_bits(values, expected, "values of the first layer")
        torch.testing.assert_close(
            ours, theirs, rtol=rounding, atol=rounding * float(theirs.abs().max())
        )


def test_recomputing_everything_is_a_full_prefill_under_a_selection_too(model):
    with with_segments(model, selection=TopK(chunks=2, recent=64, sinks=CHUNK)) as engine:
        session = engine.assemble(PARTS, repair=FullRepair())
        with engine.session() as cold:
            cold.prefill(TEXT)
            assert_same_session(session, cold, "assembled")


def test_on_a_device_a_session_is_assembled_to_the_same_bits(model):
    made = {}
    for device in ("cpu", "shim"):
        with with_segments(model, device=device, pool_tokens=256) as engine:
            session = engine.assemble(PARTS, repair=Combined(SegmentHead(3), QueryGuided(0.1)))
            made[device] = (keys_and_values(session, 0, len(TEXT)), session.logits)
            made[device, "done"] = session.assembly.recomputed
    assert made["cpu", "done"] == made["shim", "done"]
    for layer, (ours, theirs) in enumerate(zip(made["cpu"][0], made["shim"][0])):
        for name, one, other in zip(("keys", "values"), ours, theirs):
            assert_same_bits(one, other, f"{name} of layer {layer}")
    assert_same_bits(made["cpu"][1], made["shim"][1], "logits")


def test_a_segment_larger_than_the_pool_can_be_moved(model):
    long = ids(40 * CHUNK + 5, 9)
    with make_engine(model) as engine:
        engine.cache_segment(long, name="long")
        session = engine.assemble([SYSTEM_IDS, "long", QUESTION_IDS], repair=SegmentHead(4))
        assert len(long) > 5 * engine.config.pool_tokens
        assert session.assembly.moved == len(long) - 4
        assert len(session.generate(5, eos=None).tokens.tolist()) == 5
        engine.pager.check_invariants()


def test_an_assembled_session_goes_on_like_any_other(model, tmp_path):
    with with_segments(model) as engine:
        session = engine.assemble(PARTS)
        answer = session.generate(20, eos=None).tokens.tolist()
        twin = engine.assemble(PARTS)
        assert twin.generate(20, eos=None).tokens.tolist() == answer
        twin.trim(len(TEXT))
        assert twin.generate(20, eos=None).tokens.tolist() == answer
        session.save(tmp_path / "one.kvsnap")
        with engine.restore(tmp_path / "one.kvsnap") as restored:
            assert_same_session(restored, session, "restored")
            worth = [chunk.provenance for chunk in restored.ledger()]
            assert worth == [chunk.provenance for chunk in session.ledger()]
        with session.fork() as fork:
            assert fork.assembly == session.assembly


def test_a_saved_segment_is_loaded_by_another_engine_and_not_computed_again(model, tmp_path):
    store = DirectoryStore(tmp_path)
    with with_segments(model, store=store) as engine:
        for name in DOCUMENTS:
            engine.segments.save(name)
        session = engine.assemble(PARTS, repair=SegmentHead(4))
        expected = keys_and_values(session, 0, len(TEXT))
    with make_engine(model, store=store) as engine:
        session = engine.assemble(PARTS, repair=SegmentHead(4))
        assert session.assembly.rows == SYSTEM + QUESTION + 3 * 4
        for layer, (ours, theirs) in enumerate(
            zip(keys_and_values(session, 0, len(TEXT)), expected)
        ):
            for name, one, other in zip(("keys", "values"), ours, theirs):
                assert_same_bits(one, other, f"{name} of layer {layer}")
        # The same text under another name: its chunks are found by what they hold.
        again = engine.cache_segment(DOCUMENTS["a"], name="again")
        assert again.transcript.tokens_computed == 0


def test_a_damaged_chunk_of_a_saved_segment_is_computed_again(model, tmp_path):
    store = DirectoryStore(tmp_path)
    with with_segments(model, store=store) as engine:
        for name in DOCUMENTS:
            engine.segments.save(name)
        expected = keys_and_values(engine.assemble(PARTS), 0, len(TEXT))
    with make_engine(model, store=store) as engine:
        for pack in packs(store):
            damage_chunk(pack, engine, 1, layer=2)
        session = engine.assemble(PARTS)
        assert sum(engine.segments[name].transcript.damage.tokens for name in DOCUMENTS) > 0
        for ours, theirs in zip(keys_and_values(session, 0, len(TEXT)), expected):
            assert_same_bits(ours[0], theirs[0], "keys")
            assert_same_bits(ours[1], theirs[1], "values")


def test_a_text_is_cached_once_however_often_it_is_named(model):
    with make_engine(model) as engine:
        one = engine.cache_segment(DOCUMENTS["a"], name="a")
        assert engine.cache_segment(DOCUMENTS["a"], name="a") is one
        assert engine.cache_segment(DOCUMENTS["a"]) is one
        assert one.digest in engine.segments
        other = engine.cache_segment(DOCUMENTS["a"], name="twin")
        assert other is not one
        assert other.transcript.tokens_computed == 0
        with pytest.raises(InvalidArgumentError, match="another text of 50 tokens"):
            engine.cache_segment(DOCUMENTS["b"], name="a")
        assert list(engine.segments) == ["a", "twin"]


def test_segments_hold_no_block_while_nobody_uses_them(model):
    with make_engine(model) as engine:
        for number in range(30):
            engine.cache_segment(ids(CHUNK + 3, 100 + number), name=f"d{number}")
        engine.pager.evict_all()
        stats = engine.pager.stats()
        assert stats["free_blocks"] == stats["pool_blocks"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "parts hold no tokens"),
        ([[], []], "parts hold no tokens"),
        ("ab", "parts is 'ab'; expected a list of parts"),
        (["nobody"], "segment is 'nobody'; expected one of 'b', 'a'"),
        ([[1, 2], "a", [VOCAB]], r"parts\[2\]\[0\] is 300"),
        ([[1.5], "a"], r"parts\[0\] has dtype float64"),
    ],
    ids=str,
)
def test_parts_that_cannot_be_are_refused_before_anything_is_computed(model, parts, message):
    with make_engine(model) as engine:
        engine.cache_segment(DOCUMENTS["b"], name="b")
        engine.cache_segment(DOCUMENTS["a"], name="a")
        before = engine.stats()["model_forwards"]
        with pytest.raises(InvalidArgumentError, match=message):
            engine.assemble(parts)
        assert engine.stats()["model_forwards"] == before


def test_of_many_segments_a_message_names_those_like_the_one_that_is_not_there(model):
    with make_engine(model) as engine:
        for number in range(9):
            engine.cache_segment([], name=f"page-{number}" + "x" * 10 * number)
        expected = "segment is 'pages-0'; expected one of 9 names, such as 'page-0'"
        with pytest.raises(InvalidArgumentError, match=f"{expected}: cache it") as raised:
            engine.segments["pages-0"]
        assert "page-8" not in str(raised.value)
        with pytest.raises(InvalidArgumentError, match="one of 9 names, such as 'page-0', 'page-1"):
            engine.segments.remove("nobody")


@pytest.mark.parametrize("policy", ["head", SegmentHead, 3])
def test_what_is_no_policy_is_refused(engine, policy):
    with pytest.raises(InvalidArgumentError, match="repair is "):
        engine.assemble(PARTS, repair=policy)


def test_a_policy_that_answers_with_something_else_leaves_nothing_behind(engine):
    class Wrong:
        def choose(self, text):
            return np.zeros(3, dtype=bool)

    before = engine.pager.stats()["sequences"]
    with pytest.raises(InvalidArgumentError, match=r"chose bool of shape \[3\]; expected bool"):
        engine.assemble(PARTS, repair=Wrong())
    assert engine.pager.stats()["sequences"] == before


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_an_interruption_while_a_text_is_put_together_leaves_nothing_behind(engine, call):
    seen = []

    def interrupt(done, total):
        seen.append((done, total))
        if len(seen) == call:
            raise KeyboardInterrupt

    before = engine.pager.stats()
    with pytest.raises(KeyboardInterrupt):
        engine.assemble(
            PARTS, repair=Combined(SegmentHead(3), QueryGuided(0.1)), progress=interrupt
        )
    after = engine.pager.stats()
    for name in ("sequences", "open_blocks", "reserved_chunks"):
        assert after[name] == before[name], name
    engine.pager.check_invariants()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SegmentHead(-1), "tokens is -1"),
        (lambda: SeamTail(1.5), "tokens is 1.5"),
        (lambda: Deviation(1.2), "fraction is 1.2"),
        (lambda: Deviation(0.1, of="both"), "of is 'both'"),
        (lambda: Deviation(0.1, layers=0), "layers is 0"),
        (lambda: Deviation(0.1, widen=0.5), "widen is 0.5"),
        (lambda: QueryGuided(True), "fraction is True"),
        (lambda: QueryGuided(0.1, rows=0), "rows is 0"),
        (lambda: Combined(3), "repair is 3"),
    ],
)
def test_a_policy_names_the_argument_that_cannot_be(make, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_a_model_whose_every_layer_has_a_window_is_refused():
    with (
        make_engine(build("mistral")) as engine,
        pytest.raises(PagerError, match="every layer of the model looks back 40 tokens"),
    ):
        engine.cache_segment(DOCUMENTS["a"])


def test_a_removed_segment_is_refused_and_sessions_made_with_it_stay(model):
    with make_engine(model) as engine:
        segment = engine.cache_segment(DOCUMENTS["a"], name="a")
        session = engine.assemble([SYSTEM_IDS, segment, QUESTION_IDS])
        engine.segments.remove("a")
        assert segment.closed
        with pytest.raises(InvalidArgumentError, match="was removed"):
            engine.assemble([segment])
        assert len(session.generate(3, eos=None).tokens.tolist()) == 3
        with pytest.raises(InvalidArgumentError, match="name is 'a'; expected one of"):
            engine.segments.remove("a")
