"""Text in and text out: encoding, streamed text, stop strings, tokenizers of two kinds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import text_models
import torch

from kvpager import Engine, InvalidArgumentError
from kvpager._runtime.text.answer import AnswerText
from kvpager._runtime.text.tokenizer import Detokenizer, Tokenizer, text_of

TOKENIZERS = {"bytes": text_models.byte_level, "metaspace": text_models.metaspace}
SAMPLED = {"temperature": 1.0, "seed": 5, "eos": None}
TEXTS = [
    "A cache keeps keys and values.",
    "naïve — 世界 🎉🏳️‍🌈 \n\n  two  spaces\ttab",
    "مرحبا بالعالم  नमस्ते",
    " leads with a space and ends with one ",
]


@pytest.fixture(params=sorted(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]()


@pytest.fixture
def engine(tokenizer: Any) -> Iterator[Engine]:
    with Engine(text_models.model(), tokenizer=tokenizer, pool_tokens=2048, rows=32) as made:
        yield made


@pytest.fixture
def silent() -> Iterator[Engine]:
    """An engine without a tokenizer."""
    with Engine(text_models.model(), pool_tokens=2048, rows=32) as made:
        yield made


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_of_a_text_are_the_text(tokenizer: Any, text: str) -> None:
    wrapped = Tokenizer(tokenizer, text_models.VOCAB)
    ids = wrapped.encode(text, "text", special_tokens=False)
    pieces = Detokenizer(wrapped)
    assert "".join(map(pieces.push, ids)) == wrapped.decode(ids)


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_a_character_over_several_calls_comes_whole_with_the_call_that_completes_it(
    tokenizer: Any, length: int
) -> None:
    wrapped = Tokenizer(tokenizer, text_models.VOCAB)
    text = "é世界🎉\ufffd 🎉🎉🎉🎉 naïve\ufffd\ufffd🎉"
    ids = wrapped.encode(text, "text", special_tokens=False)
    calls = range(0, len(ids), length)
    told = [text_of(ids[at : at + length], ids[:at], wrapped) for at in calls]
    assert "".join(told) == wrapped.decode(ids) == text


def test_the_pieces_of_any_tokens_are_their_text_behind_what_stands_before(tokenizer: Any) -> None:
    wrapped = Tokenizer(tokenizer, text_models.VOCAB)
    random = np.random.default_rng(0)
    # A decoder of single bytes takes back what it made of those before a broken one.
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    plain = [token for token, name in enumerate(names) if not name.startswith("<0x")]
    for _ in range(40):
        ids = random.choice(plain, 60).astype(np.int32)
        ids[-1] = wrapped.encode("a", "text", special_tokens=False)[-1]  # completes nothing
        whole = wrapped.decode(ids)
        before = wrapped.decode(ids[:8])
        if before.endswith("\ufffd"):
            continue
        assert before + text_of(ids[8:], ids[:8], wrapped) == whole


def test_no_piece_has_half_a_character(tokenizer: Any) -> None:
    wrapped = Tokenizer(tokenizer, text_models.VOCAB)
    pieces = Detokenizer(wrapped)
    for token in wrapped.encode("世界🎉", "text", special_tokens=False):
        assert "\ufffd" not in pieces.push(token)


def test_text_is_prefilled_as_the_tokenizer_encodes_it(engine: Engine, tokenizer: Any) -> None:
    session = engine.session()
    session.prefill("A cache keeps")
    first = tokenizer.encode("A cache keeps")
    assert session.tokens.tolist() == first
    session.append(" keys.")  # goes on: no token that begins a text
    rest = tokenizer.encode(" keys.", add_special_tokens=False)
    assert session.tokens.tolist() == first + rest
    session.update("A cache keeps values.")
    assert session.tokens.tolist() == tokenizer.encode("A cache keeps values.")


def test_all_that_takes_ids_takes_text(engine: Engine, tokenizer: Any) -> None:
    ids = tokenizer.encode("A cache keeps keys")
    with_ids, with_text = engine.score(ids), engine.score("A cache keeps keys")
    assert with_ids.logprobs.tobytes() == with_text.logprobs.tobytes()
    sessions = [engine.session(), engine.session()]
    engine.prefill_many([(sessions[0], "A cache keeps keys"), (sessions[1], ids)])
    assert sessions[0].tokens.tolist() == sessions[1].tokens.tolist() == ids
    done = engine.run(["A cache keeps keys", ids], 6, **SAMPLED)
    assert done[0].tokens.tolist() == done[1].tokens.tolist()
    assert engine.cache_segment("keys and values", name="kv").tokens.tolist() == tokenizer.encode(
        "keys and values", add_special_tokens=False
    )


@pytest.mark.parametrize("length", [1, 7])
def test_what_a_tokenizer_returns_is_taken_without_its_padding(
    engine: Engine, tokenizer: Any, length: int
) -> None:
    texts = ["A cache", "A cache keeps keys and values, and more of them"]
    tokenizer.pad_token = tokenizer.eos_token
    alone = engine.run([tokenizer.encode(text) for text in texts], length, **SAMPLED)
    for side in ("left", "right"):
        tokenizer.padding_side = side
        for kind in ("pt", "np", None):
            batch = tokenizer(texts, padding=True, return_tensors=kind)
            padded = engine.run(batch, length, **SAMPLED)
            for one, other in zip(alone, padded):
                assert one.tokens.tolist() == other.tokens.tolist()
                assert one.prompt_tokens == other.prompt_tokens
    session = engine.session()
    session.prefill(tokenizer(texts[1], return_tensors="pt"))
    assert session.tokens.tolist() == tokenizer.encode(texts[1])
    session.update(tokenizer(texts[0], padding="max_length", max_length=40))
    assert session.tokens.tolist() == tokenizer.encode(texts[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention_mask": [1]}, "without input_ids"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "in the middle"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 1]}, r"shape \[2\]"),
        ({"input_ids": [[1], [2]], "attention_mask": [[1], [1]]}, r"shape \[2, 1\]"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "empty"),
    ],
)
def test_a_batch_that_cannot_be_understood_is_refused(
    silent: Engine, given: Any, message: str
) -> None:
    session = silent.session()
    with pytest.raises(InvalidArgumentError, match=message):
        session.prefill(given)
    assert session.length == 0


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("one text", "a list of prompts"),
        ({"input_ids": [1, 2, 3]}, "the ids of one prompt"),
        ({"input_ids": [[1]], "attention_mask": [[1], [1]]}, "1 rows of input_ids and 2"),
        (5, "a list of prompts"),
        ({"ids": [[1]]}, "without input_ids"),
    ],
)
def test_prompts_that_are_no_list_of_prompts_are_refused(
    engine: Engine, prompts: Any, message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        engine.run(prompts, 3)


def test_a_completion_has_the_text_of_its_tokens(engine: Engine, tokenizer: Any) -> None:
    session = engine.session()
    session.prefill("A cache keeps")
    before = len(session.tokens)
    bytes_ = [i for i in range(len(tokenizer)) if tokenizer.convert_ids_to_tokens(i)[:3] == "<0x"]
    done = session.generate(30, suppress_tokens=bytes_, **SAMPLED)
    assert done.finish_reason == "length"
    assert (done.prompt_tokens, len(done.tokens)) == (before, 30)
    assert done.tokens.tolist() == session.tokens[before:].tolist()
    decoded = tokenizer.decode(session.tokens, skip_special_tokens=True)
    assert decoded.endswith((done.text, done.text + "\ufffd"))  # begun, for the next call
    assert str(done) == done.text


def test_streamed_text_is_the_text_of_the_completion(engine: Engine) -> None:
    session = engine.session()
    session.prefill("A cache keeps")
    done = session.fork().generate(40, **SAMPLED)
    stream = session.generate(40, stream=True, **SAMPLED)
    assert stream.completion is None
    pieces = list(stream)
    assert all(pieces)
    assert "".join(pieces) == done.text
    assert stream.completion is not None
    assert stream.completion.text == done.text
    assert stream.completion.tokens.tolist() == done.tokens.tolist()
    assert stream.completion.finish_reason == done.finish_reason == "length"


def test_text_that_was_not_asked_for_costs_no_bits(engine: Engine, silent: Engine) -> None:
    ids = engine.core.read_ids("A cache keeps keys and values")
    texts = []
    for each in (engine, silent):
        session = each.session()
        session.prefill(ids)
        texts.append(session.generate(20, logprobs=True, **SAMPLED))
    with_text, without = texts
    assert with_text.tokens.tolist() == without.tokens.tolist()
    assert with_text.logprobs is not None
    assert without.logprobs is not None
    assert with_text.logprobs.tobytes() == without.logprobs.tobytes()
    assert without.text is None


def stop_in(text: str) -> str:
    """Four characters out of the middle of a text, which occur there for the first time."""
    return next(text[i : i + 4] for i in range(8, len(text)) if text.find(text[i : i + 4]) == i)


def test_a_stop_string_ends_the_text_before_it_and_the_tokens_behind(engine: Engine) -> None:
    session = engine.session()
    session.prefill("A cache keeps")
    whole = session.fork().generate(60, **SAMPLED)
    assert whole.text is not None
    stop = stop_in(whole.text)
    one = session.fork().generate(60, stop=stop, **SAMPLED)
    assert one.finish_reason == "stop"
    assert one.text == whole.text[: whole.text.index(stop)]
    count = len(one.tokens)
    assert one.tokens.tolist() == whole.tokens[:count].tolist()
    fork = session.fork()
    pieces = fork.generate(60, stop=["no such text", stop], stream=True, **SAMPLED)
    assert "".join(pieces) == one.text
    assert fork.length == session.length + count
    (packed,) = engine.run([session.fork()], 60, stop=stop, **SAMPLED)
    assert (packed.text, packed.finish_reason) == (one.text, "stop")
    assert packed.tokens.tolist() == one.tokens.tolist()


def test_strings_and_ids_can_both_end_a_generation(engine: Engine) -> None:
    session = engine.session()
    session.prefill("A cache keeps")
    whole = session.fork().generate(60, **SAMPLED)
    assert whole.text is not None
    part = whole.tokens[4:6].tolist()
    done = session.fork().generate(60, stop=["no such text", part], **SAMPLED)
    assert (done.finish_reason, len(done.tokens)) == ("stop", 6)


class Spelled:
    """Pieces given one by one, in place of a tokenizer's."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = list(pieces)

    def push(self, token: int) -> str:
        return self.pieces[token]

    def finish(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("pieces", "stops", "told"),
    [
        (["ab", "cd"], (), ["ab", "cd"]),
        (["ab", "c", "x"], ("bcd",), ["a", "", "bcx"]),
        (["ab", "c", "d", "e"], ("bcd",), ["a", "", "", ""]),
        (["aab", "aac"], ("aaa", "aac"), ["aab", ""]),
        (["aa", "a", "b"], ("aab",), ["", "a", ""]),
        (["xyz"], ("z", "y"), ["x"]),
        (["", "a", ""], ("b",), ["", "a", ""]),
    ],
)
def test_text_is_held_back_while_it_may_begin_a_stop_string(
    pieces: list[str], stops: tuple[str, ...], told: list[str]
) -> None:
    answer = AnswerText(Spelled(*pieces), stops)  # type: ignore[arg-type]
    assert [answer.push(i) for i in range(len(pieces))] == told
    whole = "".join(pieces)
    ends = [whole.index(stop) for stop in stops if stop in whole]
    assert answer.stopped_by == min(
        (stop for stop in stops if stop in whole), key=whole.index, default=None
    )
    answer.finish()
    assert answer.text == whole[: min(ends, default=len(whole))]


def test_an_abandoned_stream_says_what_it_came_to(engine: Engine) -> None:
    session = engine.session()
    session.prefill("A cache keeps")
    stream = session.generate(40, stream="tokens", **SAMPLED)
    taken = [next(stream) for _ in range(3)]
    stream.close()
    assert stream.completion is not None
    assert stream.completion.finish_reason == "cancelled"
    assert stream.completion.tokens.tolist() == taken
    assert list(stream) == []
    assert session.generate(1, **SAMPLED).finish_reason == "length"


@pytest.mark.parametrize("stream", [1, "text", None, "token"])
def test_a_stream_of_another_kind_is_refused(engine: Engine, stream: Any) -> None:
    session = engine.session()
    session.prefill("A cache keeps")
    with pytest.raises(InvalidArgumentError, match=r"stream is .*expected False, True"):
        session.generate(3, stream=stream)


def test_without_a_tokenizer_text_is_refused_by_name(silent: Engine) -> None:
    session = silent.session()
    session.prefill([5, 6, 7])
    for call in (
        lambda: session.append("text"),
        lambda: session.generate(3, stream=True),
        lambda: session.generate(3, stop="x"),
        lambda: session.generate(3, stop=[[1], "x"]),
        lambda: session.chat("hello"),
        lambda: silent.run(["text"], 3),
        lambda: silent.score("text"),
        lambda: silent.cache_segment("text"),
    ):
        with pytest.raises(InvalidArgumentError, match="tokenizer"):
            call()
    assert session.tokens.tolist() == [5, 6, 7]


@pytest.mark.parametrize("value", ["a name", 5, object()])
def test_a_tokenizer_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"tokenizer is .*AutoTokenizer"):
        Engine(text_models.model(), tokenizer=value, pool_tokens=2048)


def test_a_token_that_the_model_does_not_have_is_refused(silent: Engine) -> None:
    wrapped = Tokenizer(text_models.byte_level(), 5)
    with pytest.raises(InvalidArgumentError, match=r"ids \(as token ids\)\[0\] is .*0 to 4"):
        wrapped.encode("hello", "ids", special_tokens=False)


@pytest.mark.parametrize(
    "ids",
    [
        (5, 6, 7),
        np.array([5, 6, 7], dtype=np.uint16),
        torch.tensor([[5, 6, 7]]),
        range(5, 8),
        (np.int64(i) for i in (5, 6, 7)),
        [torch.tensor(5), np.int8(6), 7],
        {"input_ids": [5, 6, 7]},
    ],
    ids=["tuple", "uint16", "tensor", "range", "generator", "scalars", "mapping"],
)
def test_ids_are_taken_in_any_form(silent: Engine, ids: Any) -> None:
    session = silent.session()
    session.prefill(ids)
    assert session.tokens.tolist() == [5, 6, 7]


@pytest.mark.parametrize("integer", [np.int64, np.uint8, np.array, torch.tensor])
def test_integers_of_numpy_and_torch_are_integers(silent: Engine, integer: Any) -> None:
    session = silent.session()
    session.prefill(range(5, 25))
    done = session.generate(integer(4), seed=integer(3), temperature=1.0, eos=integer(2))
    session.trim(integer(20))
    again = session.generate(4, seed=3, temperature=1.0, eos=2)
    assert again.tokens.tolist() == done.tokens.tolist()
    assert session.regenerate(integer(2), from_position=integer(20)).prompt_tokens == 20
    (packed,) = silent.run([range(5, 25)], integer(4), seed=integer(3), temperature=1.0, eos=2)
    assert packed.tokens.tolist() == done.tokens.tolist()


@pytest.mark.parametrize("wrong", [True, np.bool_(True), 4.0, "4", None, np.array([4]), -1])
def test_what_is_no_integer_is_refused(silent: Engine, wrong: Any) -> None:
    session = silent.session()
    session.prefill(range(5, 25))
    with pytest.raises(InvalidArgumentError, match=r"max_new_tokens is .*an integer, 1 or more"):
        session.generate(wrong)
    with pytest.raises(InvalidArgumentError, match=r"position is .*expected 0 to 20"):
        session.trim(wrong)
    assert session.length == 20


def test_an_engine_without_options_has_a_pool_for_the_longest_text() -> None:
    with Engine(text_models.model()) as engine:
        assert engine.config.pool_tokens >= 4096
        assert engine.plan is not None
        session = engine.session()
        session.prefill([5, 6, 7])
        assert session.generate(3).finish_reason in ("length", "eos")


def test_several_completions_of_a_prompt_share_its_chunks(engine: Engine) -> None:
    prompt = "A cache keeps keys and values of all tokens. " * 8
    other = "A pager moves them. " * 8
    second = iter(engine.core.read_ids(other).tolist())
    done = engine.run([prompt, second], 10, n=3, temperature=1.0, seed=5, eos=None)
    assert [(each.index, each.choice) for each in done] == [
        (index, choice) for index in range(2) for choice in range(3)
    ]
    assert len({tuple(each.tokens.tolist()) for each in done[:3]}) == 3
    assert done[0].seed == done[3].seed == 5
    for each in done:
        session = engine.session()
        session.prefill((prompt, other)[each.index])
        alone = session.generate(10, temperature=1.0, seed=each.seed, eos=None)
        assert alone.tokens.tolist() == each.tokens.tolist()
    whole = engine.stats()["prefix_tokens_reused"]
    assert whole >= 2 * 2 * (done[0].prompt_tokens // 64 * 64)


def test_several_completions_of_a_session_are_its_own_and_its_forks(engine: Engine) -> None:
    session = engine.session()
    session.prefill("A cache keeps")
    before = session.tokens.tolist()
    twin = session.fork()
    done = engine.run([session], 6, n=3, temperature=1.0, seed=5, eos=None)
    assert done[0].session is session
    assert session.tokens.tolist() == [*before, *done[0].tokens.tolist()]
    assert [each.session.closed for each in done if each.session] == [False, True, True]
    kept = engine.run([twin], 6, n=2, temperature=1.0, seed=5, eos=None, keep_sessions=True)
    assert kept[1].session is not None
    assert kept[1].session.tokens.tolist() == [*before, *done[1].tokens.tolist()]
    for wrong in (0, True, 1.5):
        with pytest.raises(InvalidArgumentError, match=r"n is .*; expected 1 to 65536"):
            engine.run([twin], 6, n=wrong)  # type: ignore[arg-type]
