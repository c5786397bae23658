"""Caches that are cut together, and texts that are edited: nothing is lost that need not be."""

from mutants.mutant import Mutant

GROUP = "python/test_cache_group.py::"
TRIM = "model/test_trim_and_update.py::"
REAL = "model/test_companions.py::"
REFUSING = "model/test_companions_that_refuse.py::"
PAIRS = GROUP + "test_a_trim_takes_from_each_cache_what_the_pair_of_answers_says"

COMPANIONS = (
    Mutant(
        name="either-refusal-empties-all",
        breaks="what a companion cannot do does not touch the primary cache",
        file="python/kvpager/companions.py",
        old="                answers.append(_cut(companion, position))\n",
        new="                answers.append(_cut(companion, position))\n"
        "                if isinstance(answers[-1], Refused):\n"
        "                    self.primary.reset()\n",
        killers=(PAIRS, GROUP + "test_of_two_companions_only_the_one_that_refuses_begins_anew"),
    ),
    Mutant(
        name="a-primary-that-begins-anew-leaves-its-companions",
        breaks="where the primary has to begin anew, all do",
        file="python/kvpager/companions.py",
        old="                companion.reset()\n                answers.append(None)\n",
        new="                answers.append(None)\n",
        killers=(PAIRS,),
    ),
    Mutant(
        name="what-refused-is-left-as-it-was",
        breaks="a cache that cannot be cut begins anew, instead of holding another text",
        file="python/kvpager/companions.py",
        old="    if isinstance(answer, Refused):\n        cache.reset()\n    elif",
        new="    if",
        killers=(PAIRS,),
    ),
    Mutant(
        name="nobody-goes-back-to-the-checkpoint",
        breaks="a recurrent state is rewound to the checkpoint that its trim names",
        file="python/kvpager/companions.py",
        old="        cache.rewind(answer.position)\n",
        new="        pass\n",
        killers=(
            GROUP + "test_the_primary_goes_back_to_its_checkpoint_and_the_companion_no_further_"
            "than_the_cut",
            GROUP + "test_a_companion_goes_back_to_its_checkpoint_and_the_primary_does_not_notice",
        ),
    ),
    Mutant(
        name="a-success-is-believed",
        breaks="a trim that says Ok and has not rewound its state is found out",
        file="python/kvpager/companions.py",
        old="    if cache.length > position:\n",
        new="    if cache.length < 0:\n",
        killers=(GROUP + "test_a_success_that_left_the_state_where_it_was_is_not_believed",),
    ),
    Mutant(
        name="a-companion-that-failed-is-used-on",
        breaks="a companion that failed in a trim begins anew",
        file="python/kvpager/companions.py",
        old="                companion.reset()\n                answers.append(Refused(",
        new="                answers.append(Refused(",
        killers=(GROUP + "test_a_companion_that_fails_is_its_own_affair_and_begins_anew",),
    ),
    Mutant(
        name="the-first-failure-ends-the-trim",
        breaks="what a companion raises comes through when no cache is beyond the cut",
        file="python/kvpager/companions.py",
        old="                    failures.append(failure)\n",
        new="                    raise\n",
        killers=(
            GROUP + "test_what_is_raised_from_a_companion_comes_through_when_no_cache_is_beyond_"
            "the_cut",
        ),
    ),
    Mutant(
        name="tokens-after-the-cut-count-as-lost",
        breaks="tokens_reprefilled counts what a trim kept and has to be computed again",
        file="python/kvpager/companions.py",
        old="max(0, min(before, position) - cache.length)",
        new="max(0, before - cache.length)",
        killers=(
            PAIRS,
            GROUP + "test_what_a_trim_cost_is_counted_once_for_each_cache_and_only_up_to_the_cut",
        ),
    ),
    Mutant(
        name="a-refused-trim-loses-the-text",
        breaks="the text survives every trim; what no cache holds of it is owed",
        file="python/kvpager/_runtime/text/transcript.py",
        old="        self._uncomputed = (position, tokens)\n",
        new="        self._uncomputed = (position, tokens[:0])\n",
        killers=(
            TRIM + "test_a_refused_cut_costs_the_cache_and_not_the_text",
            TRIM + "test_owed_tokens_give_the_logits_of_a_cold_run",
        ),
    ),
    Mutant(
        name="owed-tokens-outlive-the-cut",
        breaks="a trim takes tokens that are owed away like any others",
        file="python/kvpager/_runtime/text/transcript.py",
        old="            self._uncomputed = (committed, self.uncomputed[: position - committed])\n",
        new="            pass\n",
        killers=(TRIM + "test_owed_tokens_can_be_cut_edited_and_forked",),
    ),
    Mutant(
        name="owed-tokens-are-computed-only-in-one-mode",
        breaks="what is owed is computed before the next token, in every mode",
        file="python/kvpager/_runtime/text/transcript.py",
        old="        if self.uncomputed.size:\n            return True\n",
        new='        if self.uncomputed.size and self.config.exact == "reuse":\n'
        "            return True\n",
        killers=(
            TRIM + "test_owed_tokens_are_computed_before_the_next_one_is_generated",
            TRIM + "test_a_scheduler_computes_what_sessions_owe_beside_those_that_owe_nothing",
        ),
    ),
    Mutant(
        name="a-fork-owes-nothing",
        breaks="what is owed is owed by a fork too",
        file="python/kvpager/_runtime/text/transcript.py",
        old="        twin._uncomputed = self._uncomputed\n",
        new="        twin._uncomputed = None\n",
        killers=(
            TRIM + "test_owed_tokens_can_be_cut_edited_and_forked",
            "model/test_modes.py::test_what_is_owed_is_forked_and_saved",
        ),
    ),
    Mutant(
        name="an-edit-keeps-what-came-before-it-too-long",
        breaks="an update keeps the common beginning and not a token more",
        file="python/kvpager/_runtime/scheduling/trim.py",
        old="    kept = int(different[0]) if different.size else common\n",
        new="    kept = int(different[-1]) if different.size else common\n",
        killers=(
            TRIM + "test_an_edited_text_has_the_bits_of_a_cold_run_and_what_is_before_the_edit_"
            "is_kept",
        ),
    ),
    Mutant(
        name="an-edit-computes-everything-anew",
        breaks="an update computes what follows the edit and nothing before it",
        file="python/kvpager/_runtime/scheduling/trim.py",
        old="    trim(core, transcript, kept)\n",
        new="    trim(core, transcript, 0)\n",
        killers=(
            TRIM + "test_an_edited_text_has_the_bits_of_a_cold_run_and_what_is_before_the_edit_"
            "is_kept",
        ),
    ),
    Mutant(
        name="an-update-drops-before-it-looks",
        breaks="a text that cannot be is refused before anything is dropped",
        file="python/kvpager/session.py",
        old="        check_progress(progress)\n        self.core.positions",
        new="        self.core.positions",
        killers=(TRIM + "test_a_text_that_cannot_be_is_refused_before_anything_is_dropped",),
    ),
    Mutant(
        name="regenerate-drops-before-it-looks",
        breaks="what cannot be generated is refused before anything is dropped",
        file="python/kvpager/session.py",
        old="        generation = Generation.checked("
        "self.core, max_new_tokens, chosen, logprobs=logprobs)\n"
        "        generation.check_seed(seed)\n"
        "        room",
        new="        generation = Generation.checked(self.core, max_new_tokens, {})\n        room",
        killers=(TRIM + "test_what_cannot_be_generated_is_refused_before_anything_is_dropped",),
    ),
    Mutant(
        name="regenerate-gives-the-old-text-up-first",
        breaks="text in whose place there is no room for another is not given up",
        file="python/kvpager/session.py",
        old="                transcript.set_text(text)\n",
        new="",
        killers=(TRIM + "test_text_whose_chunks_a_fork_holds_as_well_is_not_given_up_either",),
    ),
    Mutant(
        name="a-cut-that-failed-beside-it-leaves-the-text",
        breaks="the text is cut where its primary cache was, whatever a companion raises",
        file="python/kvpager/_runtime/scheduling/trim.py",
        old="        if transcript.committed <= position:\n"
        "            transcript.finish_cut(position, held)\n",
        new="        pass\n    transcript.finish_cut(position, held)\n",
        killers=(TRIM + "test_a_companion_that_fails_does_not_keep_the_text_from_being_cut",),
    ),
    Mutant(
        name="what-others-hold-still-counts-as-lost",
        breaks="tokens_reprefilled counts what has to be computed again, not what is found",
        file="python/kvpager/_runtime/text/transcript.py",
        old="        self.trims.tokens_reprefilled -= found\n",
        new="",
        killers=(TRIM + "test_what_was_lost_is_not_counted_where_others_hold_it_still",),
    ),
    Mutant(
        name="what-was-owed-before-counts-as-found",
        breaks="tokens_reprefilled gives back no more than it has counted",
        file="python/kvpager/_runtime/text/transcript.py",
        old="lost if kept < lost else min(self._reprefilled_to, position)\n",
        new="position if kept < position else 0\n",
        killers=(TRIM + "test_tokens_that_were_owed_before_a_cut_are_no_loss_of_it",),
    ),
    Mutant(
        name="a-text-found-with-others-runs-an-empty-forward",
        breaks="what is owed may be found with others to the last token",
        file="python/kvpager/_runtime/scheduling/packing.py",
        old="        if packing.used:  # shared chunks may have provided all uncomputed tokens\n"
        "            packing.run()\n",
        new="        packing.run()\n",
        killers=(TRIM + "test_what_was_lost_is_not_counted_where_others_hold_it_still",),
    ),
    Mutant(
        name="a-window-forgets-that-it-let-go",
        breaks="a window that has let go of what lies behind it says so, and begins anew",
        file="python/kvpager/_runtime/scheduling/trim.py",
        old="        if 0 < kept < earliest:\n",
        new="        if kept < 0:\n",
        killers=(
            REAL + "test_target_and_draft_are_cut_as_far_as_each_can_be",
            REAL + "test_a_window_can_be_cut_from_its_earliest_position_on_and_not_before",
        ),
    ),
    Mutant(
        name="a-window-refuses-what-it-could-do",
        breaks="a trim within rewind_tokens succeeds where all layers are windowed",
        file="python/kvpager/_runtime/scheduling/trim.py",
        old="        if 0 < kept < earliest:\n",
        new="        if 0 < kept <= earliest > 0:\n",
        killers=(REAL + "test_a_window_can_be_cut_from_its_earliest_position_on_and_not_before",),
    ),
    Mutant(
        name="a-state-is-said-to-be-anywhere",
        breaks="a trim of recurrent layers names the place from which they go on",
        file="python/kvpager/_runtime/scheduling/trim.py",
        old="            kept = transcript.states.nearest(position)\n",
        new="            pass\n",
        killers=(
            REFUSING + "test_a_hybrid_that_has_no_state_at_the_cut_says_so_and_changes_nothing",
            REAL + "test_a_recurrent_target_goes_back_to_the_state_before_the_cut_and_has_no_draft",
        ),
    ),
    Mutant(
        name="the-state-stays-where-it-was",
        breaks="a recurrent state is rewound with the K/V",
        file="python/kvpager/_runtime/scheduling/trim.py",
        old="        transcript.provisional = False\n"
        "        if transcript.states is not None:\n"
        "            transcript.states.rewind(position)\n",
        new="        transcript.provisional = False\n",
        killers=(
            REAL + "test_a_recurrent_target_goes_back_to_the_state_before_the_cut_and_has_no_draft",
        ),
    ),
    Mutant(
        name="companions-are-not-cut",
        breaks="a session's companions are cut with it",
        file="python/kvpager/_runtime/scheduling/trim.py",
        old="CacheGroup(PrimaryCache(transcript), transcript.companions, transcript.trims)",
        new="CacheGroup(PrimaryCache(transcript), [], transcript.trims)",
        killers=(
            REAL + "test_target_and_draft_are_cut_as_far_as_each_can_be",
            TRIM + "test_a_companion_that_fails_does_not_keep_the_text_from_being_cut",
        ),
    ),
    Mutant(
        name="a-refused-prompt-leaves-what-it-shares",
        breaks="a prompt that does not fit leaves the session its text",
        file="python/kvpager/_runtime/scheduling/feed.py",
        old="core.pager.sequence(salt=transcript.sequence.salt), text=text\n",
        new="core.pager.sequence(salt=transcript.sequence.salt)\n",
        killers=(TRIM + "test_a_prompt_that_does_not_fit_leaves_an_empty_session_empty",),
    ),
    Mutant(
        name="what-is-ahead-must-fit-into-what-is-asked-for",
        breaks="an abandoned stream leaves nothing that a shorter generation would notice",
        file="python/kvpager/_runtime/text/transcript.py",
        old="max([self.sequence.length, *self._reserved.values()])",
        new="max(self._reserved.values())",
        killers=(TRIM + "test_less_may_be_generated_than_an_abandoned_stream_has_ahead",),
    ),
    Mutant(
        name="a-text-cut-to-nothing-has-a-last-token",
        breaks="a stream whose text was cut to nothing says so, and ends alone",
        file="python/kvpager/_runtime/scheduling/packing.py",
        old="        if last < 0:",
        new="        if last < -1:",
        killers=(
            TRIM + "test_a_suspended_generator_whose_text_was_cut_to_nothing_says_so",
            TRIM + "test_a_request_whose_session_was_cut_to_nothing_ends_alone",
        ),
    ),
    Mutant(
        name="a-requests-text-cannot-be-generated-again",
        breaks="regenerate knows where a scheduled request began",
        file="python/kvpager/requests/request.py",
        old="        transcript.generation_start = self.prompt_tokens\n",
        new="",
        killers=(TRIM + "test_regenerate_after_a_scheduled_request_drops_what_that_produced",),
    ),
    Mutant(
        name="rows-out-of-reach-are-computed-again",
        breaks="provisional rows are given up where their window still is",
        file="python/kvpager/_runtime/text/transcript.py",
        old="self.forget_from(boundary if within_reach else self._provisional)",
        new="self.forget_from(boundary)",
        killers=(REAL + "test_rows_to_be_computed_again_are_those_whose_window_is_there",),
    ),
    Mutant(
        name="a-cut-forgets-which-rows-are-provisional",
        breaks="nothing provisional is ever sealed, whatever was cut before",
        file="python/kvpager/_runtime/text/transcript.py",
        old="            if self._provisional is not None and position <= self._provisional:\n"
        "                self._provisional = None\n",
        new="            self._provisional = None\n",
        killers=(TRIM + "test_a_text_that_was_cut_and_goes_on_has_the_bits_of_a_cold_run",),
    ),
    Mutant(
        name="a-cut-needs-a-block",
        breaks="a text can be cut anywhere, whatever room there is",
        file="python/kvpager/_runtime/scheduling/trim.py",
        old="            if boundary == position or 0 < boundary < earliest:\n"
        "                raise\n",
        new="            raise\n",
        killers=(
            TRIM + "test_a_cut_for_which_the_pool_has_no_block_gives_up_the_rest_of_its_chunk",
        ),
    ),
)
