"""Text is reused, decoded and speculated to the bits of a cold run, whatever its length."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from reference_models import CHUNK, ROWS, build, make_engine, prompt

from kvpager import TopK
from kvpager.cli.needles import shipped_model_path
from kvpager.pager import ROW_COMMIT
from kvpager.stores import DirectoryStore
from kvpager.verify.recording import cold_run


@pytest.fixture(scope="module")
def model():
    return build("qwen3", "float32")  # whose sums show their order best


@pytest.fixture
def engine(model, closing):
    return closing(make_engine(model, pool_tokens=256))


@contextmanager
def watched(engine):
    """The forwards an engine runs: of each, its row count and what it commits (sequence, position).

    Counted at the pager, which no way to run the model goes round.
    """
    begin, seen = engine.pager.begin_spans, []

    def watch(spans, tokens, **options):
        rows = [
            (sequence.uid, at)
            for sequence, position, count, kind in spans
            if kind == ROW_COMMIT
            for at in range(position, position + count)
        ]
        seen.append((len(tokens), rows))
        return begin(spans, tokens, **options)

    with mock.patch.object(engine.pager, "begin_spans", watch):
        yield seen


def apart(engine, salt):
    """A session that shares chunks with those of its salt alone."""
    return engine.adopt(engine.pager.sequence(salt=salt))


def assert_is_cold(session, cold, what):
    """Tokens, K/V and the logits after the last committed token."""
    assert session.tokens.tolist() == cold.tokens[: session.length].tolist(), what
    for layer, (keys, values) in enumerate(zip(cold.keys, cold.values)):
        ours = session.sequence.read_kv(layer, 0, session.committed)
        for name, mine, whole in zip(("keys", "values"), ours, (keys, values)):
            assert_same_bits(mine, whole[: session.committed], f"{what}: {name}, layer {layer}")
    assert_same_bits(session.logits, cold.logits[session.committed - 1], f"{what}: logits")


@pytest.mark.parametrize("selection", ["dense", "topk"])
def test_a_prompt_of_every_length_is_reused_continued_and_decoded_with_the_same_bits(
    model, closing, selection
):
    options = {"selection": TopK(chunks=1, sinks=CHUNK, recent=ROWS)} if selection == "topk" else {}
    engine = closing(make_engine(model, pool_tokens=256, **options))
    ids = prompt(2 * ROWS + 2 * CHUNK + 5)
    cold = cold_run(engine, ids, "cold")
    every = range(1, 2 * ROWS + CHUNK + 2)
    if selection == "topk":
        every = [length for length in every if min(length % CHUNK, -length % CHUNK) < 2]
    for length in every:
        with apart(engine, f"length {length}") as first:
            first.prefill(ids[:length])  # alone, whatever row its last token falls on
            assert_is_cold(first, cold, f"{length} tokens")
            for token in ids[length : length + 3]:
                first.append([token])
            reused = engine.stats()["prefix_tokens_reused"]
            with apart(engine, f"length {length}") as second:
                second.prefill(ids[: length + 3])
                full = (length + 3) // CHUNK * CHUNK
                assert engine.stats()["prefix_tokens_reused"] - reused == full
                assert_is_cold(second, cold, f"{full} of {length + 3} tokens reused")
            first.append(ids[length + 3 :])
            assert_is_cold(first, cold, f"continued after {length + 3} tokens")


WAYS = [{}, {"temperature": 1.0, "seed": 3}, {"speculate": "prompt-lookup"}]


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_generated_text_is_reused_to_the_last_full_chunk(engine, how):
    ids = np.tile(prompt(11), 3)  # says the same thing again, so that lookup finds something
    with engine.session() as session:
        session.prefill(ids)
        assert len(session.generate(3 * CHUNK, eos=None, **how).tokens.tolist()) == 3 * CHUNK
        text = session.tokens
        assert {info.provenance for info in session.ledger()} == {"exact"}
    before = engine.stats()["prefix_tokens_reused"]
    with engine.session() as again:
        again.prefill(text)
        # The last token was chosen, and no forward has taken it: its chunk is not full.
        assert engine.stats()["prefix_tokens_reused"] - before == (len(text) - 1) // CHUNK * CHUNK
        assert_is_cold(again, cold_run(engine, text, "cold"), "generated text")


class Echo:
    """Guesses what a text would be under this engine, with a wrong token every now and then."""

    def __init__(self, text):
        self.text = text

    def propose(self, tokens, count):
        guess = self.text[len(tokens) : len(tokens) + count].copy()
        guess[3::4] = (guess[3::4] + 1) % 300
        return guess


@pytest.mark.parametrize("how", WAYS[:2], ids=str)
def test_speculated_text_is_the_text_of_plain_decoding(engine, how):
    ids, count = prompt(CHUNK - 3), 5 * CHUNK
    with apart(engine, "plain") as session:
        session.prefill(ids)
        plain = list(session.generate(count, eos=None, logprobs=True, **how, stream="tokens"))
        text = session.tokens
    for speculate in (lambda: Echo(text), "prompt-lookup"):
        with apart(engine, f"speculated {speculate}") as session:
            session.prefill(ids)
            forwards = engine.stats()["model_forwards"]
            found = list(
                session.generate(
                    count, eos=None, logprobs=True, speculate=speculate, **how, stream="tokens"
                )
            )
            forwards = engine.stats()["model_forwards"] - forwards
            assert found == plain
            assert_is_cold(session, cold_run(engine, text, f"cold {how}"), "speculated")
            if speculate != "prompt-lookup":
                assert session.speculation.accepted > count // 3
                assert session.speculation.proposed > session.speculation.accepted
                assert forwards < count * 2 // 3


@pytest.mark.parametrize("left", [1, 3, CHUNK])
def test_a_speculating_stream_may_be_left_anywhere(engine, left, tmp_path):
    """By then a forward may have accepted more than was told; nothing of it may show."""
    how = {"temperature": 1.0, "seed": 4, "eos": None}
    ids = prompt(CHUNK + 1)
    with apart(engine, "plain") as session:
        session.prefill(ids)
        session.generate(3 * CHUNK, **how).tokens.tolist()
        text = session.tokens
    cold = cold_run(engine, text, "cold")
    session = engine.session()
    session.prefill(ids)
    stream = session.generate(3 * CHUNK, speculate=lambda: Echo(text), **how, stream="tokens")
    for _ in range(left):
        next(stream)
    told = len(ids) + left
    assert_is_cold(session, cold, "left")
    twin = session.fork()
    session.save(tmp_path / "left")
    for one in (twin, engine.restore(tmp_path / "left"), session):
        assert one.tokens.tolist() == text[:told].tolist()
        assert [*one.fork().generate(9, **how, stream="tokens")] == text[told : told + 9].tolist()
        assert_is_cold(one, cold, "gone on from")
        other = [*one.fork().generate(9, eos=None, stream="tokens")]  # greedy: another text
        with apart(engine, f"greedy {told}") as plain:
            plain.prefill(text[:told])
            assert other == plain.generate(9, eos=None).tokens.tolist()
    next(stream)  # of `session`: goes on where it was left
    assert session.tokens.tolist() == text[: told + 1].tolist()
    greedy = [*session.generate(4, eos=None, stream="tokens")]
    with apart(engine, f"greedy {told + 1}") as plain:
        plain.prefill(text[: told + 1])
        assert greedy == plain.generate(4, eos=None).tokens.tolist()


def test_text_decoded_row_by_row_is_sealed_with_the_bits_of_a_cold_run(model, closing):
    engine = closing(make_engine(model, pool_tokens=256, exact="reuse", linear="torch"))
    assert engine.row_counts.ladder[0] > 1  # else one row is as good as M, and nothing is owed
    with watched(engine) as forwards, engine.session() as session:
        session.prefill(prompt(CHUNK + 3))
        session.generate(4 * CHUNK, temperature=1.0, seed=2, eos=None).tokens.tolist()
        text = session.tokens
        sealed = session.committed // CHUNK
        assert {info.provenance for info in session.ledger()[:sealed]} == {"exact"}
    assert 1 in {rows for rows, _ in forwards}  # it did decode so
    before = engine.stats()["prefix_tokens_reused"]
    with engine.session() as again:
        again.prefill(text)
        assert engine.stats()["prefix_tokens_reused"] - before == sealed * CHUNK
        assert_is_cold(again, cold_run(engine, text, "cold"), "sealed again")


def test_generated_text_is_found_in_a_store_by_another_engine(model, tmp_path, closing):
    store = DirectoryStore(tmp_path / "store")
    with make_engine(model) as engine, engine.session() as session:
        session.prefill(prompt(20))
        session.generate(40, temperature=1.0, seed=1, eos=None).tokens.tolist()
        session.save("turn", store=store)
        text = session.tokens
    engine = closing(make_engine(model, store=store))
    again = engine.session()
    again.prefill(text)
    assert again.restored_tokens_consumed == (len(text) - 1) // CHUNK * CHUNK
    assert_is_cold(again, cold_run(engine, text, "cold"), "found in a store")


def test_sessions_that_begin_alike_share_chunks_at_the_same_time(engine):
    common = prompt(5 * CHUNK)
    prompts = [np.concatenate([common, prompt(20, seed=i)]) for i in range(6)]
    with engine.session() as first:
        first.prefill(common)
    before = engine.stats()["prefix_tokens_reused"]
    sessions = [engine.session() for _ in prompts]
    threads = [
        threading.Thread(target=session.prefill, args=(ids,))
        for session, ids in zip(sessions, prompts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.stats()["prefix_tokens_reused"] - before == len(prompts) * len(common)
    for i, (session, ids) in enumerate(zip(sessions, prompts)):
        chunks = session.ledger()[: len(common) // CHUNK]
        assert {info.references for info in chunks} == {len(prompts)}
        assert_is_cold(session, cold_run(engine, ids, f"cold {i}"), f"session {i}")
    for session in sessions:
        session.close()


def test_sampled_and_greedy_generation_are_the_same_forwards(engine):
    ids = prompt(3 * CHUNK + 2)
    with engine.session() as first:
        first.prefill(ids)
    shapes = []
    for how in ({}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "top_k": 20, "seed": 1}):
        with watched(engine) as forwards, engine.session() as session:
            session.prefill([*ids, 7, 8])
            session.generate(20, eos=None, **how).tokens.tolist()
            assert_is_cold(session, cold_run(engine, session.tokens, f"cold {how}"), str(how))
        own = [
            (rows, [position for uid, position in work if uid == session.sequence.uid])
            for rows, work in forwards
        ]
        shapes.append([shape for shape in own if shape[1]])
    assert shapes[0] == shapes[1] == shapes[2]
    assert {rows for rows, _ in shapes[0]} <= set(engine.row_counts.ladder)
    assert shapes[0][0][1] == [48, 49, 50, 51]  # after what was reused


def test_no_test_is_skipped_for_want_of_a_model():
    for file in Path(__file__).parent.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        skips = re.findall(r"^.*\bpytest\.(?:mark\.)?(?:skip|importorskip|xfail).*$", text, re.M)
        # What a processor cannot do, a device, an architecture that another release of
        # transformers has, and what has a command of its own are all that tests of models may lack.
        allowed = ('"this processor', 'f"{device}: ', '"this release of transformers has no ')
        allowed += (
            'f"this release of transformers has no ',
            "run `make pytest-quantised`",
            '"with a GPU, ',
        )
        lacking = [line for line in skips if not any(reason in line for reason in allowed)]
        assert file.name == Path(__file__).name or not lacking, f"{file.name}: {lacking}"


def test_the_model_comes_with_the_repository_and_with_the_package():
    folder = shipped_model_path()
    assert (folder / "model.safetensors").stat().st_size > 1 << 20
    in_tree = Path(__file__).parents[2] / "models" / folder.name
    assert (in_tree / "model.safetensors").read_bytes() == (
        folder / "model.safetensors"
    ).read_bytes()


_SCORE_IN_A_FRESH_PROCESS = """
import json, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from reference_models import build, make_engine
job = json.load(sys.stdin)
with make_engine(build(job["architecture"], job["dtype"]), threads=job["threads"]) as engine:
    for ids in job["texts"]:
        before = engine.stats()["model_forwards"]
        bits = engine.score(ids).logprobs.view(np.uint32).tolist()
        print(json.dumps([bits, engine.stats()["model_forwards"] - before]))
"""


def test_a_fresh_process_scores_token_ids_to_the_bits_generation_told(engine):
    texts, told = [], []
    for how in ({}, {"temperature": 1.0, "seed": 9}):
        with engine.session() as session:
            session.prefill(prompt(23))
            stream = session.generate(60, eos=None, logprobs=True, **how, stream="tokens")
            told.append(np.array([token.logprob for token in stream], dtype=np.float32))
            texts.append(session.tokens.tolist())
    job = {"architecture": "qwen3", "dtype": "float32", "threads": torch.get_num_threads()}
    done = subprocess.run(
        [sys.executable, "-c", _SCORE_IN_A_FRESH_PROCESS, str(Path(__file__).parent)],
        input=json.dumps(job | {"texts": texts}),  # token ids, and nothing else
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_WAIT_POLICY": "passive"},
    )
    for ids, generated, line in zip(texts, told, done.stdout.splitlines()[-2:]):
        bits, forwards = json.loads(line)
        scored = np.array(bits, dtype=np.uint32).view(np.float32)
        assert forwards == -(-(len(ids) - 1) // ROWS)  # whole forwards of given tokens: no decoding
        assert_same_bits(generated, scored[-60:], "log-probabilities")
        agreement = engine.score(ids).against(generated)
        assert (agreement.tokens, agreement.differing) == (60, 0)
        assert (agreement.max_abs_delta, agreement.approx_kl, agreement.clip_fraction) == (0, 0, 0)


@pytest.mark.parametrize(("layer", "row"), [(0, CHUNK), (2, 39)])
def test_one_flipped_bit_of_one_element_fails_a_comparison(engine, layer, row):
    """The comparison that the tests here rest on, with a K/V and a logit that are almost right."""
    with engine.session() as session:
        session.prefill(prompt(40))
        cold = cold_run(engine, prompt(40), "cold")
        assert_is_cold(session, cold, "untouched")
        for tensor in (cold.keys[layer][row], cold.values[layer][row], cold.logits[39]):
            element = tensor.view(torch.int32).reshape(-1)[3:4]
            element ^= 1
            with pytest.raises(AssertionError, match=r"1 of \d+ elements differ"):
                assert_is_cold(session, cold, "flipped")
            element ^= 1
        assert_is_cold(session, cold, "put back")


# First and last rows of a chunk, one row on either side of M, and lengths between.
SWEPT = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS - 1, 2 * ROWS]


@pytest.mark.parametrize("start", SWEPT)
def test_decode_is_swept_by_decoding(engine, start):
    """Every token from `generate`: short, long, across a chunk's end and across M; B = 1."""
    for count in (1, 3, CHUNK + 2):
        with watched(engine) as forwards, apart(engine, f"{start}+{count}") as session:
            session.prefill(prompt(start))
            fed = len(forwards)
            seen = {}
            for _ in session.generate(
                count, temperature=1.0, seed=start, eos=None, stream="tokens"
            ):
                seen[session.committed - 1] = session.logits
            decoded = [work for _, work in forwards[fed:]]
            assert [[p for _, p in work] for work in decoded] == [
                [position] for position in range(start, start + count - 1)
            ]
            cold = cold_run(engine, session.tokens, f"cold {start}+{count}")
            assert_is_cold(session, cold, f"{count} tokens after {start}")
            for position, logits in seen.items():
                assert_same_bits(logits, cold.logits[position], f"logits after {position}")


@pytest.mark.parametrize("count", [2, 7, ROWS + 1])
def test_many_sessions_of_different_lengths_decode_with_the_bits_of_each_alone(
    model, closing, count
):
    """B = N, padded and full, each session at another row of a chunk and of M."""
    engine = closing(make_engine(model, pool_tokens=64 * CHUNK))
    sessions = [apart(engine, f"session {i}") for i in range(count)]
    engine.prefill_many((s, prompt(1 + 5 * i % 37, seed=i)) for i, s in enumerate(sessions))
    with watched(engine) as forwards:
        for _ in engine.generate_many(sessions, CHUNK + 1, temperature=1.0, seed=2, eos=None):
            pass
    assert max(len({uid for uid, _ in work}) for _, work in forwards) == min(count, ROWS)
    for i, session in enumerate(sessions):
        cold = cold_run(engine, session.tokens, f"cold {i}")
        assert_is_cold(session, cold, f"session {i} of {count}")
