"""Text of a grammar: always of it, reproducible, the same in company and with guesses."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import text_models
import torch

from kvpager import Engine, InvalidArgumentError
from kvpager._runtime.logits.processors import Processors
from kvpager.cli.needles import shipped_model_path
from kvpager.grammar import Constraint, Grammar, compiler_of
from kvpager.sampling import Sampling, choose_after

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CROWDED = ".*(x|a|e|i).{100}y"
SAMPLED = {"temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def engine():
    model, tokenizer = text_models.model(), text_models.byte_level()
    with Engine(model, tokenizer=tokenizer, pool_tokens=4096, rows=32) as made:
        yield made


def written(engine, grammar, most=80, **options):
    with engine.session() as session:
        session.prefill("Say something")
        return session.generate(most, grammar=grammar, **options)


@pytest.mark.parametrize("seed", range(4))
def test_json_is_of_its_schema_whatever_is_drawn(engine, seed):
    done = written(engine, Grammar.json_schema(PERSON), 400, temperature=1.5, seed=seed)
    if done.finish_reason == "length":  # a number without end is of the schema too
        assert done.text.startswith("{")
        return
    values = json.loads(done.text)
    assert set(values) == {"name", "age"}
    assert isinstance(values["age"], int)


def test_a_pattern_matches_the_whole_text(engine):
    done = written(engine, Grammar.regex("[0-9]{3}-[a-f]{2}"), **SAMPLED)
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", done.text)
    assert done.finish_reason == ("eos" if engine_has_end(engine) else "stop")


def engine_has_end(engine):
    return engine.model.generation_config.eos_token_id is not None


def test_without_end_tokens_a_complete_text_ends_by_itself(engine):
    done = written(engine, Grammar.regex("[0-9]{3}"), eos=None, **SAMPLED)
    assert re.fullmatch("[0-9]{3}", done.text)
    assert done.finish_reason == "stop"


def test_a_choice_is_one_of_its_texts_and_the_likeliest_where_it_is_greedy(engine):
    texts = ["yes", "no", "perhaps"]
    for seed in range(3):
        assert written(engine, Grammar.choice(texts), temperature=1.0, seed=seed).text in texts
    assert (
        written(engine, Grammar.choice(texts)).text == written(engine, Grammar.choice(texts)).text
    )


def test_the_same_seed_gives_the_same_tokens_alone_and_in_company(engine):
    grammar = Grammar.json_schema(PERSON)
    alone = written(engine, grammar, 60, **SAMPLED).tokens.tolist()
    prompts = ["Say something", "Another", "A third one"]
    together = engine.run(prompts, 60, grammar=grammar, **SAMPLED)
    assert together[0].tokens.tolist() == alone
    plain = engine.run(prompts[:1], 60, **SAMPLED)
    assert plain[0].tokens.tolist() != alone


def test_guesses_change_no_token(engine):
    grammar = Grammar.regex("(ab){2,40}")
    plain = written(engine, grammar, 60, **SAMPLED)
    guessed = written(engine, grammar, 60, speculate="prompt-lookup", **SAMPLED)
    assert guessed.tokens.tolist() == plain.tokens.tolist()


def test_a_constraint_follows_the_text_back(engine):
    tokenizer, size = engine.core.tokenizer, engine.vocab_size
    constraint = compiler_of(tokenizer, size, frozenset()).constraint(Grammar.regex("ab|ba"), 0)
    (a,), (b,) = (tokenizer.wrapped.encode(text, add_special_tokens=False) for text in "ab")

    def allows(token, *text):
        values = constraint(np.array(text, dtype=np.int32), np.zeros(size))
        return values[token] == 0

    assert allows(b, a)
    assert not allows(a, a)
    assert allows(a, b)  # another beginning than before
    assert not allows(b, b)
    assert allows(a)


def test_a_request_that_had_to_release_its_chunks_goes_on_in_its_grammar():
    model, tokenizer = text_models.model(), text_models.byte_level()
    grammar = Grammar.regex("[ab]{40}")
    with Engine(model, tokenizer=tokenizer, pool_tokens=4096, rows=32) as roomy:
        expected = [one.text for one in roomy.run(["x" * 40] * 4, 41, grammar=grammar, **SAMPLED)]
    with Engine(model, tokenizer=tokenizer, pool_tokens=256, rows=32) as tight:
        found = [one.text for one in tight.run(["x" * 40] * 4, 41, grammar=grammar, **SAMPLED)]
    assert found == expected


def test_penalties_and_bias_choose_within_the_grammar(engine):
    for wanted, other in ("ab", "ba"):
        (token,) = engine.tokenizer.encode(other, add_special_tokens=False)
        done = written(engine, Grammar.choice(["a", "b"]), logit_bias={token: -100.0})
        assert done.text == wanted


def test_logits_are_not_rounded_on_their_way():
    given = []

    def constrain(tokens, values):
        given.append(values)
        return values

    sampling, logits = Sampling(repetition_penalty=1.3), torch.randn(50)
    text = np.array([1, 2, 3], dtype=np.int32)
    choose_after(text, logits, sampling, Processors((), constrain))
    assert given[0].tobytes() == sampling.adjust(logits, 3, text).tobytes()


def test_a_conversation_goes_on_after_an_answer_of_a_grammar(engine):
    with engine.session() as session:
        first = session.chat("Who?", 60, grammar=Grammar.choice(["Ada", "Grace"]))
        assert session.messages[-1]["content"] == first.text in ("Ada", "Grace")
        session.chat("Sure?", 4)


def test_the_shipped_model_writes_json_of_a_schema():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = shipped_model_path("tiny-coder")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2, 30]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    with Engine(
        model, tokenizer=tokenizer, rows=16, small_rows="fixed", pool_tokens=1024
    ) as engine:
        done = engine.session().chat("A number.", 30, grammar=Grammar.json_schema(schema))
    assert json.loads(done.text)["n"] in (1, 2, 30)
    assert done.finish_reason == "eos"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Grammar.json_schema({"type": "nothing"}), "grammar"),
        (lambda: Grammar.json_schema("{"), "no JSON"),
        (lambda: Grammar.json_schema(3), "expected an object"),
        (lambda: Grammar.regex("("), "grammar"),
        (lambda: Grammar.choice([]), "texts"),
        (lambda: Grammar.lark("x: y"), "grammar"),
    ],
)
def test_a_grammar_that_cannot_be_is_refused_at_once(make, says):
    with pytest.raises(InvalidArgumentError, match=says):
        make()


def test_what_is_no_grammar_is_refused(engine):
    with pytest.raises(InvalidArgumentError, match=r"grammar is 'x'"):
        written(engine, "x")
    with (
        Engine(text_models.model(), pool_tokens=1024, rows=32) as silent,
        pytest.raises(InvalidArgumentError, match="no tokenizer"),
    ):
        silent.run([np.array([5, 6])], 2, grammar=Grammar.regex("a"))


@pytest.fixture
def crowded_pattern():
    """A pattern whose states do not fit what llguidance keeps for it, after some generations."""
    return Grammar.regex(CROWDED)


def test_how_often_a_grammar_was_used_changes_no_token(engine, crowded_pattern):
    nested = Grammar.json_schema({"type": "string", "pattern": "^(a+)+$", "minLength": 3000})
    for _ in range(2):
        assert written(engine, nested, **SAMPLED).text.startswith('"aaaaaaaa')
    first = written(engine, crowded_pattern, 150, temperature=1.0, seed=0)
    for seed in range(1, 40):
        done = written(engine, crowded_pattern, 150, temperature=1.0, seed=seed)
        assert done.finish_reason == "length" or re.fullmatch(CROWDED, done.text, re.DOTALL)
    again = written(engine, crowded_pattern, 150, temperature=1.0, seed=0)
    assert again.tokens.tolist() == first.tokens.tolist()
    assert again.finish_reason == first.finish_reason


def test_a_grammar_that_llguidance_cannot_follow_is_an_error_and_no_empty_answer():
    made = []

    class Failed:
        """Of llguidance, once its lexer is full: it allows nothing but the end."""

        def __init__(self):
            made.append(self)

        def compute_bitmask(self):
            return bytes(8)

        def is_stopped(self):
            return True

        def is_error(self):
            return True

        def get_error(self):
            return "lexer error: too many expressions constructed"

    constraint = Constraint("grammar", Failed, 0, has_end=False)
    for ask in (
        lambda: constraint(np.zeros(0, np.int32), np.zeros(64)),
        lambda: constraint.ended([]),
    ):
        made.clear()
        with pytest.raises(InvalidArgumentError, match="grammar: lexer error: too many"):
            ask()
        assert len(made) == 2  # another one follows the text before it is given up
