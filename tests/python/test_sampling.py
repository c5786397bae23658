"""What the options do to logits, compared with transformers' own processors, and how they save."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import GenerationMixin

from kvpager import InvalidArgumentError, NonFiniteError
from kvpager._runtime.scheduling.generation_config import (
    DEFAULTS_OF_TRANSFORMERS,
    HONOURED,
    IGNORED,
    REFUSED,
    REFUSED_OF_SAMPLING,
    options_of,
)
from kvpager._runtime.scheduling.options import sampling_of, with_defaults
from kvpager.sampling import Sampling, log_probability, top_log_probabilities

VOCAB = 500


def random_logits(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(VOCAB, generator=generator)).to(dtype)


def random_text(seed, length=60):
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


class Model(GenerationMixin):
    """What `options_of` and transformers' list of processors need of a model."""

    class config:  # noqa: N801  # transformers' name
        is_encoder_decoder = False

    def __init__(self, own=None):
        self.generation_config = GenerationConfig() if own is None else own


def theirs(config, tokens, start, logits):
    """Scores [vocab] after the processors that transformers builds for a config."""
    config = GenerationConfig(**(GenerationConfig._get_default_generation_params() | config))
    config._eos_token_tensor = None
    processors = Model()._get_logits_processor(config, input_ids_seq_length=start, device="cpu")
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    return processors(ids, logits.float()[None].clone())[0].numpy()


def ours(config, tokens, start, logits):
    """Likewise of a generation; -inf for a token that is not kept."""
    options = with_defaults({"generation_config": GenerationConfig(**config)}, Model())
    sampling = sampling_of(options, VOCAB)
    sampling = Sampling.from_json(sampling.to_json() | {"start": start})
    values = sampling.adjust(logits, len(tokens), tokens)
    if sampling.temperature == 0:
        return values
    kept, _ = sampling.candidates(values)
    scores = np.full(VOCAB, -math.inf)
    scores[kept] = values[kept] / sampling.temperature
    return scores


CONFIGS = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"do_sample": True},  # with top_k 50, the default of transformers
    {"do_sample": True, "top_k": 0},
    {"do_sample": True, "top_k": 7, "temperature": 0.3},
    {"do_sample": True, "top_k": 0, "top_p": 0.8},
    {"do_sample": True, "top_k": 0, "min_p": 0.05},
    {"do_sample": True, "top_k": 30, "top_p": 0.9, "min_p": 0.1, "temperature": 1.7},
    {"do_sample": True, "min_p": 0.02, "repetition_penalty": 1.2, "temperature": 0.6},
    {"sequence_bias": {(3,): 4.5, (17,): -2.0}, "repetition_penalty": 1.5},
    {"bad_words_ids": [[4], [9]], "do_sample": True},
    {"suppress_tokens": [1, 2, 3], "repetition_penalty": 1.1},
    {"begin_suppress_tokens": [5, 6, 7], "do_sample": True, "top_k": 0},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("begins", [True, False])
def test_scores_and_kept_tokens_are_those_of_transformers(config, begins):
    for seed in range(4):
        tokens, logits = random_text(seed), random_logits(seed)
        start = len(tokens) if begins else 40
        expected = theirs(config, tokens, start, logits)
        found = ours(config, tokens, start, logits)
        assert np.array_equal(np.isinf(found), np.isinf(expected))
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_presence_and_frequency_count_the_tokens_produced_alone():
    logits = torch.zeros(10)
    tokens = np.array([1, 2, 2, 5, 5, 5, 7], dtype=np.int32)
    values = Sampling(presence_penalty=0.5, frequency_penalty=2.0, start=3).adjust(
        logits, len(tokens), tokens
    )
    assert values.tolist() == [0, 0, 0, 0, 0, -6.5, 0, -2.5, 0, 0]


def test_greedy_honours_penalties_and_bias():
    logits = torch.tensor([0.0, 3.0, 2.9, 1.0])
    tokens = np.array([0, 1], dtype=np.int32)
    assert Sampling().choose(logits, 2) == 1
    for options in (
        {"repetition_penalty": 1.2},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"logit_bias": {2: 0.5}},
        {"logit_bias": {1: -math.inf}},
        {"begin_suppress_tokens": (1,), "start": 2},
    ):
        assert Sampling(**options).choose(logits, 2, tokens) == 2, options
    assert Sampling(begin_suppress_tokens=(1,), start=1).choose(logits, 2, tokens) == 1


def test_choosing_changes_neither_logits_nor_tokens():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        logits, tokens = random_logits(3, dtype), random_text(3)
        before, text = logits.clone(), tokens.copy()
        options = {"repetition_penalty": 2.0, "presence_penalty": 1.0, "logit_bias": {1: 5.0}}
        Sampling(temperature=1.0, **options).choose(logits, len(tokens), tokens)
        assert torch.equal(logits, before)
        assert np.array_equal(tokens, text)


def test_options_at_their_defaults_change_no_bit_of_a_choice():
    """The reference is what `choose` was before it had them."""
    for seed in range(50):
        logits = random_logits(seed, (torch.float32, torch.bfloat16)[seed % 2])
        values = logits.to(torch.float64).numpy()
        order = np.argsort(-values, kind="stable")
        weights = np.cumsum(np.exp((values[order] - values[order[0]]) / 0.9))
        u = (int(np.random.Philox(key=seed, counter=77).random_raw()) >> 11) * 2.0**-53
        drawn = int(order[np.searchsorted(weights, u * weights[-1], "right")])
        assert Sampling(temperature=0.9, seed=seed).choose(logits, 77) == drawn
        assert Sampling(seed=seed).choose(logits, 77) == int(order[0])


def test_a_draw_with_penalties_follows_the_distribution():
    logits, tokens = torch.tensor([1.0, 1.0, 0.5, -1.0]), np.array([0, 3, 0], dtype=np.int32)
    options = {"repetition_penalty": 2.0, "frequency_penalty": 0.1, "logit_bias": {2: 0.25}}
    drawn = np.bincount(
        [
            Sampling(temperature=0.8, seed=seed, **options).choose(logits, 3, tokens)
            for seed in range(3000)
        ],
        minlength=4,
    )
    adjusted = torch.tensor([1 / 2 - 0.2, 1.0, 0.75, -2.0 - 0.1], dtype=torch.float64)
    expected = torch.softmax(adjusted / 0.8, 0).numpy()
    np.testing.assert_allclose(drawn / 3000, expected, atol=0.03)


def test_infinities_after_penalties_and_a_vocabulary_forbidden_whole_are_refused():
    with pytest.raises(NonFiniteError, match="after bias"):
        Sampling(logit_bias=dict.fromkeys(range(3), -math.inf)).choose(torch.zeros(3), 4)
    for value in (math.nan, math.inf):
        with pytest.raises(NonFiniteError, match="position 4 hold NaN"):
            Sampling(logit_bias={1: -math.inf}).choose(torch.tensor([0.0, value]), 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"min_p": True}, "min_p is True"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan"),
        ({"frequency_penalty": "much"}, "frequency_penalty is 'much'"),
        ({"logit_bias": [1, 2]}, r"logit_bias is \[1, 2\]"),
        ({"logit_bias": {1: math.inf}}, r"logit_bias\[1\] is inf"),
        ({"logit_bias": {1: math.nan}}, r"logit_bias\[1\] is nan"),
        ({"logit_bias": {1: True}}, r"logit_bias\[1\] is True"),
        ({"logit_bias": {-1: 0.5}}, "token ids as keys, not -1"),
        ({"logit_bias": {"1": 0.5}}, "token ids as keys, not '1'"),
        ({"logit_bias": {True: 0.5}}, "token ids as keys, not True"),
        ({"begin_suppress_tokens": [1, -2]}, "begin_suppress_tokens is"),
        ({"start": -1}, "start is -1"),
        ({"temperature": True}, "temperature is True"),
        ({"top_k": True}, "top_k is True"),
        ({"top_k": np.float64(3)}, "top_k is 3.0"),
        ({"top_p": np.array([0.5])}, "top_p is array"),
        ({"top_p": torch.tensor(True)}, "top_p is True"),
    ],
)
def test_values_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Sampling(**options)


@pytest.mark.parametrize("made", [np.array, torch.tensor, lambda value: np.array(value)[()]])
def test_numbers_of_numpy_and_torch_are_taken(made):
    plain = {
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.75,
        "seed": 9,
        "min_p": 0.125,
        "repetition_penalty": 1.25,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }
    given = {name: made(value) for name, value in plain.items()}
    biases = {"logit_bias": {3: 0.5}, "begin_suppress_tokens": (4,)}
    given |= {"logit_bias": {np.int64(3): made(0.5)}, "begin_suppress_tokens": [np.int32(4)]}
    found = Sampling(**given)
    assert found == Sampling(**plain, **biases)
    assert {type(value) for value in found.to_json().values()} == {int, float, dict, list}
    assert hash(found) == hash(Sampling(**plain, **biases))


def test_what_is_saved_has_only_the_new_options_that_are_set():
    old = Sampling(temperature=0.7, top_k=4, top_p=0.9, seed=12)
    assert json.dumps(old.to_json()) == '{"temperature": 0.7, "top_k": 4, "top_p": 0.9, "seed": 12}'
    assert Sampling.from_json({"temperature": 0.7, "top_k": 4, "top_p": 0.9, "seed": 12}) == old
    every = Sampling(
        temperature=0.7,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={7: -math.inf, 2: 1.5},
        begin_suppress_tokens=(1, 2),
        start=40,
    )
    written = json.dumps(every.to_json(), allow_nan=False)
    assert Sampling.from_json(json.loads(written)) == every


@pytest.mark.parametrize(
    "values",
    [
        {"logit_bias": {"x": 1.0}},
        {"logit_bias": {"1": "much"}},
        {"logit_bias": {"9" * 40: 1.0}},
        {"logit_bias": 5},
        {"begin_suppress_tokens": ["a"]},
        {"start": "0"},
        {"min_p": None},
        {"best_of": 4},
    ],
)
def test_saved_values_that_cannot_be_are_refused(values):
    with pytest.raises(InvalidArgumentError):
        Sampling.from_json(values)


def test_alternatives_are_the_most_likely_tokens_in_a_fixed_order():
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, -math.inf])
    top = top_log_probabilities(logits, 3)
    assert [token for token, _ in top] == [1, 3, 2]
    assert [value for _, value in top] == [
        float(np.float32(log_probability(logits, token))) for token in (1, 3, 2)
    ]
    assert len(top_log_probabilities(logits, 20)) == 5
    assert top_log_probabilities(logits, 20)[-1] == (4, -math.inf)
    # Tokens that float32 cannot tell apart are in the order of their ids.
    close = torch.tensor([0.0, 1.0, 1.0 + 1e-12], dtype=torch.float64)
    assert [token for token, _ in top_log_probabilities(close, 2)] == [1, 2]
    assert [token for token, _ in top_log_probabilities(close, 1)] == [1]


# Set to something that changes the text.
SET = {
    "num_beams": 4,
    "num_beam_groups": 2,
    "num_return_sequences": 3,
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 3,
    "encoder_repetition_penalty": 1.5,
    "min_length": 5,
    "min_new_tokens": 5,
    "max_time": 2.0,
    "forced_bos_token_id": 1,
    "forced_eos_token_id": 2,
    "exponential_decay_length_penalty": (5, 1.1),
    "token_healing": True,
    "guidance_scale": 1.5,
    "watermarking_config": object(),
    "constraints": [object()],
    "force_words_ids": [[1]],
    "assistant_ensemble_weight": 0.5,
    "top_h": 0.4,
    "typical_p": 0.9,
    "epsilon_cutoff": 1e-3,
    "eta_cutoff": 1e-3,
}


def test_every_field_of_a_generation_config_is_honoured_or_ignored_or_refused():
    """A new transformers with a field that is in none of the tables fails here: decide its kind."""
    tables = (set(HONOURED), set(IGNORED), set(REFUSED), set(REFUSED_OF_SAMPLING))
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields - set().union(*tables) == set()
    assert sum(map(len, tables)) == len(set().union(*tables))  # each in one
    assert all(len(reason) > 10 for reason in IGNORED.values())
    assert set(SET) == set(REFUSED) | set(REFUSED_OF_SAMPLING)


@pytest.mark.parametrize("name", sorted(SET))
def test_a_field_that_would_change_the_text_is_refused_with_its_value(name):
    config = GenerationConfig(do_sample=True)
    setattr(config, name, SET[name])
    with pytest.raises(InvalidArgumentError, match=rf"{name}=.*Honoured are do_sample"):
        options_of(config, Model())


def test_one_error_names_every_refused_field():
    config = GenerationConfig(num_beams=3, no_repeat_ngram_size=2)
    config.sequence_bias = {(1, 2): 1.0, (5,): 1.0}
    config.bad_words_ids = [[1], [2, 3, 4]]
    with pytest.raises(InvalidArgumentError) as caught:
        options_of(config, Model())
    for part in ("num_beams=3", "no_repeat_ngram_size=2", "sequence_bias of 1", "bad_words_ids of"):
        assert part in str(caught.value)


def test_a_field_that_no_table_has_is_refused_if_transformers_reads_it(monkeypatch):
    plain = vars(GenerationConfig())

    def with_a_new_field(self, **fields):
        vars(self).update(plain, **{"new_field": None} | fields)

    monkeypatch.setattr(GenerationConfig, "__init__", with_a_new_field)
    assert options_of(GenerationConfig(), Model()) is not None
    with pytest.raises(InvalidArgumentError, match="new_field=7"):
        options_of(GenerationConfig(new_field=7), Model())


def test_fields_that_change_no_text_are_ignored_and_so_is_what_transformers_does_not_read():
    plain = options_of(GenerationConfig(), Model())
    config = GenerationConfig(
        pad_token_id=0, use_cache=False, return_dict_in_generate=True, chat_format="chatml"
    )
    assert options_of(config, Model()) == plain
    greedy = GenerationConfig()
    for name in REFUSED_OF_SAMPLING:
        setattr(greedy, name, SET[name])
    assert options_of(greedy, Model()) == plain  # read by sampling alone


def test_the_defaults_are_those_of_transformers():
    theirs = GenerationConfig._get_default_generation_params()
    for name, value in DEFAULTS_OF_TRANSFORMERS.items():
        assert theirs.pop(name) == value
    neutral = REFUSED | REFUSED_OF_SAMPLING | dict.fromkeys(IGNORED, ())
    for name, value in theirs.items():  # the others change no text
        assert value in (None, False, 1.0) or name in IGNORED or value in neutral[name], name


def test_what_a_config_leaves_out_is_the_models_own():
    own = GenerationConfig(do_sample=True, temperature=0.6, top_k=20, eos_token_id=[7, 8])
    assert options_of("model", Model(own)) == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 1.0,
        "eos": [7, 8],
    }
    assert options_of(GenerationConfig(top_k=3), Model(own))["top_k"] == 3
    assert options_of(GenerationConfig(do_sample=False), Model(own))["temperature"] == 0.0
    assert options_of(GenerationConfig(), Model(own))["temperature"] == 0.6


def test_options_by_name_come_before_a_config():
    config = GenerationConfig(
        do_sample=True, top_k=5, top_p=0.5, stop_strings="END", max_new_tokens=9
    )
    chosen = with_defaults({"generation_config": config, "top_k": 2, "min_p": 0.1}, Model())
    assert (chosen["top_k"], chosen["top_p"], chosen["min_p"]) == (2, 0.5, 0.1)
    assert chosen["stop"] == ["END"]
    assert chosen["max_new_tokens"] == 9


@pytest.mark.parametrize("config", ["mine", {"top_k": 5}, 3])
def test_what_is_no_config_is_refused(config):
    with pytest.raises(InvalidArgumentError, match="expected a transformers GenerationConfig"):
        options_of(config, Model())
