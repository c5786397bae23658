"""Sessions, speculation and modes: one text, one set of bits, whatever way it came about."""

from mutants.mutant import Mutant

REUSE = "model/test_reuse.py::"
SESSIONS = "model/test_sessions.py::"

RUNTIME = (
    Mutant(
        name="experts-are-gathered-for-as-many-rows-as-any",
        breaks="by default an engine's forwards have the rows that a plan of its model gives them",
        file="python/kvpager/_model/facts/checked_model.py",
        old="    return config.row_choices(device, partial(suits_experts, shape))\n",
        new="    return config.row_choices(device)\n",
        killers=(
            "model/test_row_counts.py::"
            "test_by_default_models_with_experts_have_the_rows_that_a_plan_gives_them",
        ),
    ),
    Mutant(
        name="a-restore-is-silently-prefilled-again",
        breaks="13: a restore that cannot be consumed raises at the first prefill",
        file="python/kvpager/_runtime/scheduling/prefill.py",
        old="        check_extends(feed.transcript, feed.ids)\n",
        new="        try:\n"
        "            check_extends(feed.transcript, feed.ids)\n"
        "        except RestoreNotConsumedError:\n"
        "            empty = core.pager.sequence(salt=core.tenant.namespace)\n"
        "            feed.transcript.replace_sequence(empty)\n",
        killers=(
            SESSIONS + "test_a_restore_that_the_prompt_cannot_use_is_refused_not_computed_again",
            "model/test_snapshots.py::test_what_was_restored_is_consumed_or_the_prefill_is_refused",
        ),
    ),
    Mutant(
        name="the-pending-token-is-not-saved",
        breaks="a restored session goes on where the saved one stood",
        file="python/kvpager/_runtime/snapshots/freezing.py",
        old='        "pending": transcript.pending if upto == length else None,\n',
        new='        "pending": None,\n',
        killers=(SESSIONS + "test_a_restored_session_goes_on_with_the_same_bits",),
    ),
    Mutant(
        name="the-sampler-is-not-saved",
        breaks="a restored session draws what the saved one would have drawn",
        file="python/kvpager/_runtime/snapshots/freezing.py",
        old='        "sampling": dict(sorted(transcript.sampling.to_json().items())),\n',
        new='        "sampling": {},\n',
        killers=(SESSIONS + "test_a_restored_session_goes_on_with_the_same_bits",),
    ),
    Mutant(
        name="guesses-are-believed",
        breaks="speculation gives the tokens of plain decoding: sampling confirms each guess",
        file="python/kvpager/_runtime/scheduling/packing.py",
        old="            if token != share.guess[accepted]:\n                break\n",
        new="            if token < 0:\n                break\n",
        killers=(REUSE + "test_speculated_text_is_the_text_of_plain_decoding",),
    ),
    Mutant(
        name="guesses-are-drawn-at-the-position-before",
        breaks="a guess is confirmed by the draw of its own position",
        file="python/kvpager/_runtime/scheduling/packing.py",
        old="token = sampling.choose(logits[accepted], position)",
        new="token = sampling.choose(logits[accepted], position - 1)",
        killers=(REUSE + "test_speculated_text_is_the_text_of_plain_decoding",),
    ),
    Mutant(
        name="rejected-guesses-stay",
        breaks="14: rows of rejected guesses are as if they had never been",
        file="python/kvpager/_runtime/execution/runner.py",
        old="                forward.commit(accepted, provenance=batch.provenance)\n",
        new="                forward.commit(None, provenance=batch.provenance)\n",
        killers=(REUSE + "test_speculated_text_is_the_text_of_plain_decoding",),
    ),
    Mutant(
        name="what-is-ahead-survives-a-change",
        breaks="a speculating session may be forked, saved or changed anywhere, as in plain decode",
        file="python/kvpager/_runtime/text/transcript.py",
        old="            self.sequence.trim(self.committed)\n            self._accepted = None\n",
        new="            self._accepted = None\n",
        killers=(REUSE + "test_a_speculating_stream_may_be_left_anywhere",),
    ),
    Mutant(
        name="other-sampling-takes-what-is-ahead",
        breaks="tokens accepted under one sampling are not handed out under another",
        file="python/kvpager/_runtime/text/transcript.py",
        old="            and sampling == accepted.sampling\n",
        new="",
        killers=(REUSE + "test_a_speculating_stream_may_be_left_anywhere",),
    ),
    Mutant(
        name="provisional-rows-are-sealed",
        breaks='with exact="reuse" a chunk is sealed from rows of exact forwards alone',
        file="python/kvpager/_runtime/text/transcript.py",
        old="        if self._provisional is None:\n            return\n",
        new="        return\n",
        killers=(REUSE + "test_text_decoded_row_by_row_is_sealed_with_the_bits_of_a_cold_run",),
    ),
    Mutant(
        name="a-prefix-is-taken-by-its-hash",
        breaks="what a hash finds in a store is taken only if its token ids are the prompt's",
        file="python/kvpager/_runtime/scheduling/feed.py",
        old="    if not np.array_equal(tokens, ids[: len(tokens)]):",
        new="    if not len(tokens):",
        killers=("model/test_store_prefix.py::test_other_tokens_under_a_known_hash_are_not_taken",),
    ),
    Mutant(
        name="recomputed-chunks-are-not-proved",
        breaks="a damaged chunk computed again is taken only with the bits that were saved",
        file="csrc/pager/sealing.cc",
        old="if (!found || !(residency_.checksums(*found) == checksums(seal))) return;",
        new="if (!found) return;\n"
        "  if (!ledger_[*found].damaged && !(residency_.checksums(*found) == "
        "checksums(seal))) return;",
        killers=(
            "model/test_recompute.py::test_computed_bits_that_are_not_the_saved_ones_are_refused",
        ),
    ),
    Mutant(
        name="a-fork-forgets-what-is-pending",
        breaks="a fork goes on with the token its parent sampled last",
        file="python/kvpager/_runtime/text/transcript.py",
        old="        twin._pending, twin._logits = self._pending, self._logits\n",
        new="        twin._logits = self._logits\n",
        killers=(SESSIONS + "test_a_fork_continues_alike_and_apart",),
    ),
    Mutant(
        name="layers-share-an-output",
        breaks="what a forward gave at one layer is not written over at the next",
        file="python/kvpager/pager/forward.py",
        old="                else np.empty(shape, dtype=q.dtype)\n",
        new='                else vars(self).setdefault("_out", np.empty(shape, dtype=q.dtype))\n',
        killers=(
            "python/test_pager_rows.py::test_what_a_forward_was_given_and_gave_is_the_callers_"
            "alone_between_layers_and_forwards",
        ),
    ),
    Mutant(
        name="logits-outlive-their-tokens",
        breaks="logits are those after the session's last token, also after a trim",
        file="python/kvpager/_runtime/text/transcript.py",
        old="        if self._logits is not None and self._logits[0] == self.next_position:\n"
        "            return self._logits[1]\n",
        new="        if self._logits is not None:\n            return self._logits[1]\n",
        killers=(SESSIONS + "test_logits_are_not_taken_for_those_of_other_tokens_after_a_failure",),
    ),
    Mutant(
        name="logprobs-in-another-precision",
        breaks="generation tells the log-probability that scoring gives",
        file="python/kvpager/_runtime/scheduling/stream.py",
        old="logprob = float(np.float32(distribution.log_probability(token)))",
        new="logprob = float(logits.float().log_softmax(-1)[token])",
        killers=(REUSE + "test_a_fresh_process_scores_token_ids_to_the_bits_generation_told",),
    ),
)
