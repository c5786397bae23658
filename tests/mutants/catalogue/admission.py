"""Mutants of a scheduler's admission, of the counts of prompts, and of the salts of sessions."""

from __future__ import annotations

from mutants.mutant import Mutant

ADMITTED = "model/test_admission.py::"
COUNTS = "model/test_prompt_counts.py::"
SALTS = "model/test_salts_of_sessions.py::"

ADMISSION = (
    Mutant(
        name="overtaking-has-no-end",
        breaks="a request without room is overtaken a bounded number of times",
        file="python/kvpager/requests/waiting.py",
        old="            self._overtaken += 1\n",
        new="            self._overtaken += 0\n",
        killers=(ADMITTED + "test_a_request_without_room_is_overtaken_only_so_often",),
    ),
    Mutant(
        name="priorities-count-for-nothing",
        breaks="requests of a lower number are admitted earlier",
        file="python/kvpager/requests/waiting.py",
        old='            as_integer(priority, "priority", -(1 << 31)),\n',
        new="            0,\n",
        killers=(
            ADMITTED + "test_lower_priorities_are_admitted_first_and_equal_ones_in_their_order",
        ),
    ),
    Mutant(
        name="tenants-take-no-turns",
        breaks="a tenant's queue makes nobody else wait for all of it",
        file="python/kvpager/requests/waiting.py",
        old="            flow.finish = max(flow.finish, start) + request.planned\n",
        new="            flow.finish = max(flow.finish, start)\n",
        killers=(ADMITTED + "test_requests_of_one_priority_are_admitted_in_turns_of_tenants",),
    ),
    Mutant(
        name="a-tenant-takes-every-place",
        breaks="a tenant leaves places to others",
        file="python/kvpager/requests/scheduler.py",
        old="if count >= self.most_of_one}",
        new="if count > self._limit}",
        killers=(ADMITTED + "test_places_are_kept_free_of_one_tenant",),
    ),
    Mutant(
        name="prompts-share-rows-whoever-sent-them",
        breaks="a tenant's many prompts take no more rows than another's one",
        file="python/kvpager/_runtime/scheduling/packing.py",
        old="            feed.account.served += count\n",
        new="",
        killers=(ADMITTED + "test_prompts_of_tenants_share_rows_however_many_they_are",),
    ),
    Mutant(
        name="the-queue-is-never-full",
        breaks="no more requests wait than may",
        file="python/kvpager/requests/scheduler.py",
        old="waiting >= self._most_waiting:\n",
        new="waiting > self._most_waiting:\n",
        killers=(ADMITTED + "test_beyond_max_waiting_a_submission_is_refused_and_changes_nothing",),
    ),
    Mutant(
        name="deadlines-pass-unseen",
        breaks="a request ends when its time is over",
        file="python/kvpager/requests/scheduler.py",
        old="request.deadline > self.clock():\n",
        new="request.deadline + 9 > self.clock():\n",
        killers=(ADMITTED + "test_a_request_that_waits_too_long_ends_with_timeout",),
    ),
    Mutant(
        name="damage-counts-as-found",
        breaks="a damaged chunk that is computed again counts as computed",
        file="python/kvpager/_runtime/scheduling/recompute.py",
        old="            mark(start, size)\n",
        new="            mark(start, 0)\n",
        killers=(COUNTS + "test_a_damaged_chunk_of_a_restored_session_was_computed",),
    ),
    Mutant(
        name="pending-tokens-count-as-found",
        breaks="a session's pending token counts as computed",
        file="python/kvpager/requests/request.py",
        old="            self._prompt.mark(self._held, self.prompt_tokens - self._held)\n",
        new="",
        killers=(
            COUNTS + "test_what_a_given_session_holds_is_found_and_its_pending_token_computed",
        ),
    ),
    Mutant(
        name="sessions-have-the-engines-salt",
        breaks="sessions of different salts share no chunk",
        file="python/kvpager/_runtime/execution/core.py",
        old="        salt = self.tenant.namespace if namespace is None else namespace\n",
        new="        salt = self.tenant.namespace\n",
        killers=(
            SALTS + "test_sessions_of_another_salt_share_no_chunk_and_those_of_one_share",
            SALTS + "test_requests_of_a_salt_share_with_sessions_of_it",
        ),
    ),
    Mutant(
        name="drafts-have-the-engines-salt",
        breaks="a draft's cache has the salt of its text",
        file="python/kvpager/drafts/companion.py",
        old="caches.core.transcript(salt)",
        new="caches.core.transcript()",
        killers=(SALTS + "test_a_drafts_cache_has_the_salt_of_its_text",),
    ),
    Mutant(
        name="what-an-interrupted-step-held-is-lost",
        breaks="a step that an interrupt ends loses no request",
        file="python/kvpager/requests/scheduler.py",
        old="        if self._cut_short:\n            self._gather()\n",
        new="",
        killers=("model/test_scheduler.py::test_a_step_that_an_interrupt_ends_loses_no_request",),
    ),
    Mutant(
        name="a-failed-matcher-is-followed",
        breaks="how often a grammar was used changes no token",
        file="python/kvpager/grammar.py",
        old="            if not self._matcher.is_error():\n",
        new="            if True:\n",
        killers=("model/test_grammar.py::test_how_often_a_grammar_was_used_changes_no_token",),
    ),
    Mutant(
        name="an-append-gives-up-the-admission",
        breaks="a sequence keeps the room that it was admitted with",
        file="python/kvpager/pager/pager.py",
        old="        self.core.reserve(self.uid, max(self._admitted, start + len(ids)))\n",
        new="        self.core.reserve(self.uid, start + len(ids))\n",
        killers=(
            "python/test_pager_arguments.py::"
            "TestAppend::test_leaves_a_sequence_the_room_it_was_admitted_with",
        ),
    ),
    Mutant(
        name="a-text-that-is-too-long-ends-a-run",
        breaks="an error of one prompt of a run is that prompt's alone",
        file="python/kvpager/requests/scheduler.py",
        old="            if not among_others:\n",
        new="            if True:\n",
        killers=(
            "model/test_requests_that_fail.py::"
            "test_one_text_beyond_a_models_positions_fails_alone_in_a_run",
        ),
    ),
)
