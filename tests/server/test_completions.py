"""Completions: text and token ids, echoed log-probabilities, several prompts."""

from __future__ import annotations

import numpy as np
import pytest

from server.running import CODER, GREEDY


@pytest.fixture
def complete(server):
    def create(prompt, **options):
        return server.openai.completions.create(
            model=CODER, prompt=prompt, **{**GREEDY, "max_tokens": 8, **options}
        )

    return create


def test_text_and_its_token_ids_are_completed_alike(complete, engine):
    ids = engine.tokenizer.encode("import os\n")
    text = complete("import os\n").choices[0].text
    assert complete(ids).choices[0].text == text
    (alone,) = engine.run([ids], 8)
    assert text == alone.text


def test_echo_gives_the_log_probabilities_of_score_to_the_bit(complete, engine):
    prompt = "def reverse(items):\n    return"
    choice = complete(prompt, echo=True, logprobs=2, max_tokens=0).choices[0]
    score = engine.score(prompt, top_logprobs=2)
    assert choice.text == prompt
    assert choice.logprobs.token_logprobs[0] is None
    told = np.array(choice.logprobs.token_logprobs[1:], dtype=np.float32)
    assert told.tobytes() == score.logprobs.tobytes()
    with_answer = complete(prompt, echo=True, logprobs=2).choices[0]
    assert with_answer.logprobs.token_logprobs[: len(told) + 1] == choice.logprobs.token_logprobs
    assert with_answer.text.startswith(prompt)


def test_offsets_point_into_the_text(complete):
    choice = complete("import os\n", echo=True, logprobs=0).choices[0]
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset):
        assert choice.text[offset:].startswith(token)


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_count_characters_and_not_pieces_of_them(complete, server, stream):
    prompt = "# π🎉é\n"
    ids = server.service.engine.tokenizer.encode("π🎉", add_special_tokens=False)
    bias = {str(token): 100 for token in ids}
    options = {"logprobs": 0, "logit_bias": bias, "max_tokens": 12, "temperature": 1.0, "seed": 3}
    if stream:
        chunks = [chunk.choices[0] for chunk in complete(prompt, stream=True, **options)]
        text = "".join(chunk.text for chunk in chunks)
        lists = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
        offsets = [offset for one in lists for offset in one.text_offset]
        tokens = [token for one in lists for token in one.tokens]
    else:
        choice = complete(prompt, echo=True, **options).choices[0]
        text, tokens, offsets = choice.text, choice.logprobs.tokens, choice.logprobs.text_offset
        assert text.startswith(prompt)
    assert any(token.startswith("bytes:") for token in tokens)
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(text)
    for token, offset in zip(tokens, offsets):
        if not token.startswith("bytes:"):
            assert text[offset:].startswith(token)


def test_an_echo_alone_has_as_many_choices_as_asked_for(complete):
    choices = complete("import os\n", echo=True, max_tokens=0, n=2).choices
    assert [(choice.index, choice.text) for choice in choices] == [
        (i, "import os\n") for i in (0, 1)
    ]


def test_more_prompts_than_ever_wait_are_refused_and_not_asked_to_come_again(server):
    answer = server.post("/v1/completions", prompt=["a"] * 2000, n=2)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert "has 2000 texts with n = 2; expected at most" in answer.json()["error"]["message"]


def test_several_prompts_have_several_choices_in_their_order(complete):
    both = complete(["import os\n", "import re\n"], n=2)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    for prompt, first in (("import os\n", 0), ("import re\n", 2)):
        assert both.choices[first].text == complete(prompt).choices[0].text


def test_a_stream_has_the_text_of_a_completion_that_is_not_streamed(complete):
    streamed = "".join(chunk.choices[0].text for chunk in complete("import os\n", stream=True))
    assert streamed == complete("import os\n").choices[0].text


@pytest.mark.parametrize("most", [0, 6])
def test_a_stream_of_several_prompts_and_an_echo_is_the_answer_that_is_not_streamed(complete, most):
    prompts = ["import os\n", "import re\nx"]
    options = {"n": 2, "echo": True, "logprobs": 2, "max_tokens": most, "temperature": 1, "seed": 4}
    whole = complete(prompts, **options)
    usage = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = complete(prompts, stream=True, stream_options=usage, **options)
    assert last.usage == whole.usage
    assert last.choices == []
    for choice in whole.choices:
        told = [one.choices[0] for one in chunks if one.choices[0].index == choice.index]
        assert "".join(one.text for one in told) == choice.text
        lists = [one.logprobs for one in told if one.logprobs is not None]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [value for one in lists for value in getattr(one, name)]
            assert joined == getattr(choice.logprobs, name)
        assert [one.finish_reason for one in told if one.finish_reason] == [choice.finish_reason]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"grammar": "root ::= other"}, "grammar"),
        ({"ebnf": "root ::= (" * 9000}, "ebnf"),
        ({"guided_grammar": 'root ::= "a"\n' + 'r ::= "a"\n' * 400}, "guided_grammar"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [999_999]}, "prompt[0][0]"),
    ],
)
def test_what_cannot_be_done_is_a_400_that_names_the_field(server, options, param):
    answer = server.post("/v1/completions", **{"prompt": "x", "max_tokens": 1, **options})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
