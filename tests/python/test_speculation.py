"""Speculation without a model: what is proposed, how much of it, and what is refused."""

from __future__ import annotations

import tracemalloc
from itertools import count as counting

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpager.errors import InvalidArgumentError
from kvpager.speculation.prompt_lookup import PromptLookup
from kvpager.speculation.proposal_length import ProposalLength
from kvpager.speculation.speculation import (
    Proposed,
    Proposer,
    SpeculationStats,
    resolve_speculation,
)

VOCAB = 100


def ids(*values):
    return np.array(values, dtype=np.int32)


def padded_to(*ladder):
    """The row count that so many used rows are run with."""
    return lambda used: next(count for count in ladder if count >= used)


# Prompt lookup.


def continuation_by_trying_all(tokens, count, max_ngram, min_ngram):
    """The definition: the longest n-gram first, the most recent place first, copied token by token
    so that what is proposed may itself be continued."""
    text = list(tokens)
    for ngram in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        for start in range(len(text) - ngram - 1, -1, -1):
            if text[start : start + ngram] == text[-ngram:]:
                for place in range(start + ngram, start + ngram + count):
                    text.append(text[place])
                return text[len(tokens) :]
    return []


@st.composite
def edits(draw):
    """Appends and trims of a text over few ids, so that n-grams repeat."""
    alphabet = draw(st.integers(1, 4))
    append = st.lists(st.integers(0, alphabet - 1), max_size=40)
    return draw(st.lists(append | st.integers(0, 60), min_size=1, max_size=12))


@given(edits(), st.integers(1, 6), st.integers(0, 20), st.integers(1, 30))
def test_prompt_lookup_is_its_definition_after_any_appends_and_trims(
    changes, min_ngram, further, count
):
    lookup = PromptLookup(max_ngram=min_ngram + further, min_ngram=min_ngram)
    text = []
    for change in changes:
        text = text + change if isinstance(change, list) else text[:change]
        expected = continuation_by_trying_all(text, count, min_ngram + further, min_ngram)
        assert lookup.propose(ids(*text), count) == expected


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(500, 3000))
def test_prompt_lookup_is_its_definition_in_long_texts(seed, alphabet, length):
    generator = np.random.default_rng(seed)
    text = generator.integers(0, alphabet, length).astype(np.int32)
    if seed % 2:  # nearly all the same: every place agrees for long
        text[:] = 0
        text[-int(generator.integers(1, 20))] = 1
    expected = continuation_by_trying_all(text.tolist(), 4, 12, 2)
    assert PromptLookup(max_ngram=12, min_ngram=2).propose(text, 4) == expected


def test_the_longest_ngram_goes_before_a_more_recent_one():
    text = ids(1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 9, 3, 4, 70, 1, 2, 3, 4)
    assert PromptLookup(max_ngram=4, min_ngram=2).propose(text, 1) == [50]
    assert PromptLookup(max_ngram=3, min_ngram=2).propose(text, 1) == [60]
    assert PromptLookup(max_ngram=2, min_ngram=2).propose(text, 1) == [70]


def test_the_most_recent_of_equal_ngrams_is_continued():
    assert PromptLookup(min_ngram=2).propose(ids(1, 2, 50, 1, 2, 60, 1, 2), 3) == [60, 1, 2]


def test_a_period_is_continued_beyond_the_text():
    assert PromptLookup(min_ngram=1).propose(ids(7, 8, 9, 8, 9), 5) == [8, 9, 8, 9, 8]
    assert PromptLookup(min_ngram=1).propose(ids(5, 5), 3) == [5, 5, 5]


def test_a_text_without_repetition_gets_no_proposal():
    assert PromptLookup(min_ngram=1).propose(ids(*range(50)), 4) == []
    assert PromptLookup(min_ngram=2).propose(ids(1, 2, 3, 1), 4) == []


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_a_text_too_short_to_repeat_gets_no_proposal(length):
    assert PromptLookup(min_ngram=3).propose(ids(*[5] * length), 4) == []


def test_prompt_lookup_keeps_nothing_between_calls_and_little_during_one():
    text = np.random.default_rng(0).integers(0, 40, 131072).astype(np.int32)
    lookup = PromptLookup()
    lookup.propose(text, 8)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    lookup.propose(text, 8)
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 1024
    assert peak - before < 4 * len(text)
    assert vars(lookup) == {"max_ngram": 16, "min_ngram": 3}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_ngram": 0}, "max_ngram is 0; expected an integer from 1"),
        ({"min_ngram": 0}, "min_ngram is 0"),
        ({"min_ngram": 2.0}, "min_ngram is 2.0"),
        ({"max_ngram": True}, "max_ngram is True"),
        ({"max_ngram": 10**6}, "max_ngram is 1000000"),
        ({"max_ngram": 2, "min_ngram": 3}, "min_ngram is 3; expected at most max_ngram, 2"),
    ],
)
def test_ngrams_that_cannot_be_are_refused(options, words):
    with pytest.raises(InvalidArgumentError, match=words):
        PromptLookup(**options)


# How many tokens are proposed.


def play(length, outcomes):
    """What is chosen where each outcome says how many of the chosen tokens could be accepted."""
    chosen = []
    for outcome in outcomes:
        count = length.choose(room=63, used=1, fit=padded_to(4, 16, 64))
        chosen.append(count)
        if count:
            length.observe(count, min(count, outcome))
    return chosen


def test_while_all_is_accepted_proposals_grow_to_all_the_room():
    chosen = play(ProposalLength(), [1000] * 12)
    assert chosen[0] < 16
    assert chosen[-1] == 63


def test_while_nothing_is_accepted_proposals_stop_but_for_rarer_and_rarer_trials():
    chosen = play(ProposalLength(), [0] * 1000)
    proposed = [at for at, count in enumerate(chosen) if count]
    assert sum(chosen[:20]) < 60
    assert len([at for at in proposed if at >= 500]) <= 10
    assert max(chosen[20:]) <= 4
    gaps = np.diff([at for at in proposed if at >= 20])
    assert list(gaps) == sorted(gaps)
    assert gaps[-1] == 65


def test_a_trial_that_succeeds_brings_proposals_back():
    length = ProposalLength()
    play(length, [0] * 300)
    chosen = play(length, [1000] * 100)
    first = next(at for at, count in enumerate(chosen) if count)
    assert first <= 65
    assert all(chosen[first:])
    assert chosen[first + 8] > 16


def test_half_accepted_texts_get_a_few_tokens_at_a_time():
    outcomes = np.random.default_rng(3).geometric(0.5, 400) - 1
    chosen = play(ProposalLength(), outcomes.tolist())
    assert 1 <= np.median(chosen) <= 4


def test_rows_that_would_be_padding_are_used_and_a_larger_count_is_only_taken_if_it_pays():
    length = ProposalLength()
    free = length.choose(room=56, used=1, fit=padded_to(8, 64))
    dear = length.choose(room=56, used=8, fit=padded_to(8, 64))
    assert 1 <= free <= 7
    assert dear == 0


def test_a_full_forward_has_no_room_for_proposals():
    length = ProposalLength()
    assert length.choose(room=0, used=64, fit=padded_to(64)) == 0
    assert length.choose(room=-3, used=64, fit=padded_to(64)) == 0


@given(
    st.lists(st.tuples(st.integers(-2, 300), st.integers(1, 64), st.integers(0, 80)), max_size=60)
)
def test_a_choice_keeps_to_its_room_and_depends_on_what_was_observed_alone(rounds):
    fit = padded_to(4, 16, 64, 512)
    one, other = ProposalLength(), ProposalLength()
    for room, used, outcome in rounds:
        count = one.choose(room=room, used=used, fit=fit)
        assert count == other.choose(room=room, used=used, fit=fit)
        assert 0 <= count <= max(0, room)
        for length in (one, other):
            length.observe(count, min(count, outcome))
        assert 0 <= one.acceptance <= 1


# What a proposer may do.


class Scripted:
    """Proposes what it was told to, whatever it is."""

    def __init__(self, answer):
        self.answer = answer
        self.asked = []

    def propose(self, tokens, count):
        self.asked.append((tokens, count))
        return self.answer(count) if callable(self.answer) else self.answer


def speculation(answer):
    return Proposed(Scripted(answer), VOCAB)


def propose(subject, tokens=(1, 2, 3), room=8):
    return subject.propose(ids(*tokens), room=room, used=1, fit=padded_to(16, 64))


@pytest.mark.parametrize(
    "answer",
    [[4, 5], (4, 5), np.array([4, 5]), torch.tensor([4, 5]), range(4, 6), iter([4, 5])],
    ids=["list", "tuple", "array", "tensor", "range", "iterator"],
)
def test_any_sequence_of_integers_is_taken(answer):
    got = propose(speculation(answer))
    assert got == [4, 5]
    assert all(type(token) is int for token in got)


def test_a_proposer_may_have_nothing_to_propose():
    assert propose(speculation([])) == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([100], r"returned 100 at \[0\]; expected a token id from 0 to 99"),
        ([1, -1], r"returned -1 at \[1\]"),
        ([1.0], r"returned 1.0 at \[0\]; expected integers"),
        (["1"], r"returned '1' at \[0\]; expected integers"),
        ([True], r"returned True at \[0\]"),
        ([None], r"returned None at \[0\]"),
        (None, r"returned None; expected a sequence of token ids"),
        (7, r"returned 7; expected a sequence"),
        (lambda count: [1] * (count + 1), r"returned more than \d+ ids; expected at most"),
    ],
)
def test_what_is_no_proposal_is_refused_with_the_proposers_name(answer, words):
    subject = speculation(answer)
    with pytest.raises(InvalidArgumentError, match=r"Scripted\.propose " + words):
        propose(subject)
    assert subject.stats == SpeculationStats()


def test_an_endless_proposal_is_refused_and_not_waited_for():
    with pytest.raises(InvalidArgumentError, match=r"returned more than \d+ ids"):
        propose(speculation(counting()))


def test_what_a_proposer_raises_surfaces_with_its_name_and_cause():
    def fails(count):
        raise KeyError("no draft model")

    with pytest.raises(InvalidArgumentError, match=r"Scripted\.propose raised KeyError") as caught:
        propose(speculation(fails))
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_interrupt_in_a_proposer_is_an_interrupt():
    def interrupted(count):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        propose(speculation(interrupted))


def test_a_proposer_cannot_change_the_text_it_is_shown():
    text = ids(1, 2, 3)

    class Vandal:
        def propose(self, tokens, count):
            tokens[0] = 9
            return []

    with pytest.raises(InvalidArgumentError, match=r"Vandal\.propose raised ValueError"):
        Proposed(Vandal(), VOCAB).propose(text, room=4, used=1, fit=padded_to(16))
    assert text.tolist() == [1, 2, 3]
    text[0] = 5  # and its owner still can


def test_a_proposer_is_not_asked_where_there_is_no_room():
    proposer = Scripted([4])
    subject = Proposed(proposer, VOCAB)
    assert propose(subject, room=0) == []
    assert proposer.asked == []


# Its record.


def test_statistics_count_forwards_with_and_without_proposals():
    subject = speculation([4, 5, 6])
    subject.observe(3, 2)
    subject.observe(0, 0)
    subject.observe(3, 3)
    assert subject.stats == SpeculationStats(forwards=3, proposed=6, accepted=5, tokens=8)
    assert subject.stats.acceptance == 5 / 6
    assert subject.stats.tokens_per_forward == 8 / 3


def test_statistics_add_up_and_none_are_zero():
    total = sum([SpeculationStats(1, 2, 1, 2), SpeculationStats(3, 4, 0, 3)], SpeculationStats())
    assert total == SpeculationStats(4, 6, 1, 5)
    assert SpeculationStats().acceptance == 0
    assert SpeculationStats().tokens_per_forward == 0


# What `speculate=` may be.


def resolve(speculate, exact="all"):
    return resolve_speculation(speculate, vocab_size=VOCAB, exact=exact)


def test_nothing_speculates_unless_asked_to():
    assert resolve(None) is None
    assert resolve(None, exact=False) is None


def test_prompt_lookup_is_known_by_name_and_each_session_has_its_own():
    fresh = resolve("prompt-lookup")
    one, other = fresh(), fresh()
    assert one is not other
    assert propose(one, [1, 2, 3, 4, 50, 1, 2, 3, 4])[0] == 50


@pytest.mark.parametrize("speculate", [PromptLookup, lambda: PromptLookup(max_ngram=4)])
def test_a_class_or_a_function_makes_proposers(speculate):
    assert propose(resolve(speculate)(), [1, 2, 3, 4, 50, 1, 2, 3, 4])[0] == 50


@pytest.mark.parametrize(
    ("speculate", "words"),
    [
        (
            "prompt_lookup",
            'speculate is \'prompt_lookup\'; expected "prompt-lookup", "draft", a callable',
        ),
        (True, "speculate is True; expected"),
        (4, "speculate is 4; expected"),
        (PromptLookup(), r"an instance of PromptLookup, which sessions would share.*lambda:"),
    ],
)
def test_what_cannot_propose_is_refused_at_the_call(speculate, words):
    with pytest.raises(InvalidArgumentError, match=words):
        resolve(speculate)


@pytest.mark.parametrize("made", [None, 3, PromptLookup])
def test_a_callable_that_makes_no_proposer_is_refused(made):
    fresh = resolve(lambda: made)
    with pytest.raises(InvalidArgumentError, match=r"speculate returned .*expected an object with"):
        fresh()


@pytest.mark.parametrize("exact", ["reuse", False])
def test_speculation_needs_bits_that_do_not_depend_on_row_counts(exact):
    with pytest.raises(InvalidArgumentError, match=r'exact is .*use exact="all"'):
        resolve("prompt-lookup", exact)


def test_whatever_has_propose_is_a_proposer():
    assert isinstance(PromptLookup(), Proposer)
    assert isinstance(Scripted([]), Proposer)
    assert not isinstance(object(), Proposer)
