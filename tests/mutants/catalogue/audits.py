"""Mutants of the audit of other servers."""

from __future__ import annotations

from mutants.mutant import Mutant

TESTS = "server/test_audit.py::"
COMPARE = "python/kvpager/audit/compare.py"
RUN = "python/kvpager/audit/run.py"

AUDITS = (
    Mutant(
        name="an-audit-compares-behind-another-token",
        breaks="a near tie that flips is not called corrupt",
        file=COMPARE,
        old="pairs if other is None else pairs[: other + 1]",
        new="pairs",
        killers=(TESTS + "test_rounding_that_flips_near_ties_is_neither_exact_nor_corrupt",),
    ),
    Mutant(
        name="an-audit-looks-at-tokens-of-both-alone",
        breaks="another token that the reference does not list is corruption",
        file=COMPARE,
        old="apart = max(apart, *missing, 0.0)",
        new="apart = max(apart, *(0 * each for each in missing), 0.0)",
        killers=(TESTS + "test_what_is_wrong_after_a_restart_alone_is_found_with_its_first_token",),
    ),
    Mutant(
        name="an-audit-overlooks-a-nan",
        breaks="a log-probability that is not a number is corruption",
        file=COMPARE,
        old="        if bad is not None:\n",
        new="        if bad is not None and bad < 0:\n",
        killers=(TESTS + "test_log_probabilities_that_are_no_numbers_are_corruption",),
    ),
    Mutant(
        name="an-audit-asks-once-where-a-nan-cannot-be-written",
        breaks="a text is judged where its log-probabilities cannot be sent",
        file="python/kvpager/audit/asking.py",
        old="            if not error.status or error.status in _BUSY or not asked:\n",
        new="            if error.status or not asked:\n",
        killers=(TESTS + "test_where_a_server_cannot_write_its_numbers_the_text_is_judged",),
    ),
    Mutant(
        name="an-audit-does-not-name-the-other-prompt",
        breaks="the answer to another prompt is named",
        file=COMPARE,
        old="            return number\n",
        new="            return None\n",
        killers=(TESTS + "test_an_answer_to_another_prompt_is_named",),
    ),
    Mutant(
        name="an-audit-compares-with-the-model-before-the-restart",
        breaks="other weights alone are not corruption of a cache",
        file=RUN,
        old="[new if isinstance(new, Answer) else old for new, old in pairs]",
        new="[old for new, old in pairs]",
        killers=(
            TESTS + "test_a_cache_of_other_weights_is_corrupt_and_other_weights_alone_are_not",
        ),
    ),
    Mutant(
        name="an-audit-calls-a-server-without-a-cache-exact",
        breaks="a server that reuses nothing is not called exact",
        file="python/kvpager/audit/report.py",
        old="count is None or count > 0 for",
        new="True for",
        killers=(TESTS + "test_a_server_that_reuses_nothing_is_not_called_exact",),
    ),
    Mutant(
        name="an-audit-believes-in-every-salt",
        breaks="a salt is used where the server honours it",
        file="python/kvpager/audit/asking.py",
        old="salted = bool(warm) and not answer.cached_tokens",
        new="salted = bool(warm)",
        killers=(TESTS + "test_cold_runs_are_made_as_the_server_allows",),
    ),
    Mutant(
        name="an-audit-sends-any-key",
        breaks="a key that cannot be sent is not shown",
        file="python/kvpager/audit/client.py",
        old="        if key is not None and not (",
        new="        if key == 0 and not (",
        killers=(TESTS + "test_a_key_that_cannot_be_sent_is_not_shown",),
    ),
)
