"""Recurrent layers: states that are copied, exact, found by their text, and given back with it."""

from mutants.mutant import Mutant

SESSIONS = "model/test_recurrent.py::"
MODELS = "model/test_recurrent_models.py::"
SNAPSHOTS = "model/test_recurrent_snapshots.py::"
CHECKPOINTS = "python/test_checkpoints.py::"

RECURRENT = (
    Mutant(
        name="a-forward-works-on-the-state-itself",
        breaks="a state is as it was after a forward that fails",
        file="python/kvpager/_model/seam/recurrent.py",
        old="tensor.to(self._device, copy=True)",
        new="tensor.to(self._device)",
        killers=(
            SESSIONS + "test_a_forward_that_fails_leaves_the_state_as_it_was[qwen3_next-one]",
        ),
    ),
    Mutant(
        name="a-tail-is-extended",
        breaks="what is sealed was computed by one forward of a whole chunk",
        file="python/kvpager/_runtime/scheduling/aligned.py",
        old="    if core.rows > 1 and transcript.committed % size:",
        new="    if core.rows < 1 and transcript.committed % size:",
        killers=(
            SESSIONS + "test_a_prompt_fed_in_pieces_is_a_cold_runs[qwen3_next]",
            SESSIONS + "test_what_generation_seals_and_what_follows_it_is_a_cold_runs[qwen3_next]",
        ),
    ),
    Mutant(
        name="states-are-shared-by-texts-that-are-not-exact",
        breaks="10: what is not exact is never found by hash",
        file="python/kvpager/_runtime/recurrent/cursor.py",
        old='namespace=b"" if exact else uuid.uuid4().bytes',
        new='namespace=b""',
        killers=(
            SNAPSHOTS + "test_what_is_restored_as_approximate_shares_no_state",
            SESSIONS + "test_without_exactness_a_text_goes_on_from_its_live_state[qwen3_next]",
        ),
    ),
    Mutant(
        name="states-may-be-nan",
        breaks="14: what is not finite aborts a forward and is not kept",
        file="python/kvpager/_model/seam/state.py",
        old="    if not bool(sound.all()):",
        new="    if False:",
        killers=(SESSIONS + "test_a_state_that_is_not_finite_is_refused_and_not_kept",),
    ),
    Mutant(
        name="the-last-hidden-states-are-of-the-first-row",
        breaks="logits of a text that is known to its end are those a forward gave",
        file="python/kvpager/_runtime/execution/runner.py",
        old="batch.before.position + rows, hidden[-1])",
        new="batch.before.position + rows, hidden[0])",
        killers=(SESSIONS + "test_a_prompt_that_is_known_to_its_end_needs_no_forward",),
    ),
    Mutant(
        name="the-end-of-a-prompt-is-no-checkpoint",
        breaks="a prompt that was computed to its end needs no forward again",
        file="python/kvpager/_runtime/scheduling/aligned.py",
        old="    if ends:\n        states.keep_base()\n",
        new="",
        killers=(SESSIONS + "test_a_prompt_that_is_known_to_its_end_needs_no_forward",),
    ),
    Mutant(
        name="attention-believes-the-layer-of-its-module",
        breaks="layers that share one attention have K/V of their own",
        file="python/kvpager/_model/seam/state.py",
        old="        at = self._place.layer\n",
        new="        at = layer\n",
        killers=(MODELS + "test_generation_is_that_of_transformers[zamba2]",),
    ),
    Mutant(
        name="a-layer-may-attend-again-behind-a-state",
        breaks="a model that is called within its own forward is an error",
        file="python/kvpager/_model/seam/state.py",
        old="        require_first(at, self._attended)\n",
        new="",
        killers=(
            MODELS + "test_a_model_that_is_called_within_its_own_forward_is_an_error_and_no_other_"
            "bits[zamba2]",
        ),
    ),
    Mutant(
        name="modules-that-layers-share-attend-once",
        breaks="layers that share one attention have K/V of their own",
        file="python/kvpager/_runtime/execution/runner.py",
        old="owned_by(self._owner, directed=True)",
        new="owned_by(self._owner)",
        killers=(MODELS + "test_generation_is_that_of_transformers[zamba]",),
    ),
    Mutant(
        name="forwards-need-not-repeat-themselves",
        breaks="a model whose forwards differ is refused",
        file="python/kvpager/_model/proof/aligned.py",
        old='    trial.require_same(trial.run(first.state, trial.rows), second, "from a state")\n',
        new="",
        killers=(MODELS + "test_forwards_that_do_not_repeat_themselves_are_refused[later]",),
    ),
    Mutant(
        name="states-are-believed-to-be-gone-on-from",
        breaks="a model whose layers ignore their state is found out",
        file="python/kvpager/_model/proof/aligned.py",
        old="        return not any(all(map(same_bits, carried, other)) for other in "
        "self._without(state, rows))",
        new="        return bool(carried)",
        killers=(
            MODELS
            + "test_layers_that_go_on_by_single_tokens_have_forwards_of_one_row[falcon_mamba]",
            MODELS + "test_layers_that_ignore_their_state_are_refused",
        ),
    ),
    Mutant(
        name="states-may-be-taken-up-wrongly",
        breaks="a model that goes on from a state otherwise than in one forward is refused",
        file="python/kvpager/_model/proof/aligned.py",
        old="            carried <= _CLOSE * _distance(other, whole) for other in",
        new="            carried >= 0 for other in",
        killers=(MODELS + "test_layers_that_take_their_state_up_wrongly_are_refused",),
    ),
    Mutant(
        name="where-weights-lie-is-not-told",
        breaks="equal fingerprint: equal bits",
        file="python/kvpager/_model/identity/fingerprint.py",
        old="        if parameter.data_ptr() % line\n",
        new="        if parameter.data_ptr() % 4\n",
        killers=(MODELS + "test_where_weights_lie_is_part_of_the_fingerprint",),
    ),
    Mutant(
        name="checkpoints-are-kept-twice-as-rarely",
        breaks="a cut costs no more tokens than lie between checkpoints",
        file="python/kvpager/_runtime/recurrent/checkpoints.py",
        old="position % (self._every * self._size) == 0",
        new="position % (2 * self._every * self._size) == 0",
        killers=(
            SESSIONS + "test_a_cut_costs_no_more_tokens_than_lie_between_checkpoints",
            CHECKPOINTS + "test_states_are_due_at_every_kth_chunk_boundary",
        ),
    ),
    Mutant(
        name="the-largest-gap-is-made",
        breaks="the checkpoint whose loss costs least goes first",
        file="python/kvpager/_runtime/recurrent/checkpoints.py",
        old="key=lambda key: (gap(key), held[key].used)",
        new="key=lambda key: (-gap(key), held[key].used)",
        killers=(
            CHECKPOINTS + "test_the_one_whose_loss_makes_the_smallest_gap_goes_first",
            CHECKPOINTS + "test_evenly_spaced_checkpoints_stay_even_where_room_is_short",
        ),
    ),
    Mutant(
        name="a-text-in-use-loses-its-newest-checkpoint",
        breaks="the newest checkpoint of a text in use never goes",
        file="python/kvpager/_runtime/recurrent/checkpoints.py",
        old="self._held.keys() - others - {key}))",
        new="self._held.keys() - {key}))",
        killers=(CHECKPOINTS + "test_the_newest_of_a_text_in_use_never_goes",),
    ),
    Mutant(
        name="a-checkpoint-that-goes-leaves-a-hole",
        breaks="gaps are measured along the text, whatever went before",
        file="python/kvpager/_runtime/recurrent/checkpoints.py",
        old="                checkpoint.before = dropped.before\n",
        new="                checkpoint.before = None\n",
        killers=(CHECKPOINTS + "test_what_went_before_counts_in_a_gap",),
    ),
    Mutant(
        name="states-of-another-fingerprint-are-taken",
        breaks="states of another model or salt are refused",
        file="python/kvpager/_runtime/recurrent/cursor.py",
        old='            on_mismatch="approximate" if self._namespace else "refuse",\n',
        new='            on_mismatch="approximate",\n',
        killers=(SNAPSHOTS + "test_states_of_another_release_are_refused",),
    ),
    Mutant(
        name="states-of-any-worth-are-taken",
        breaks="10: an exact text goes on from exact states alone",
        file="python/kvpager/_runtime/recurrent/cursor.py",
        old="        if not self._namespace and set(",
        new="        if self._namespace and set(",
        killers=(SNAPSHOTS + "test_states_that_are_not_exact_are_refused_for_a_text_that_is",),
    ),
    Mutant(
        name="states-are-found-by-the-savers-hashes",
        breaks="states saved under another release are found by the text they are of",
        file="python/kvpager/_runtime/recurrent/saved_states.py",
        old="            names[key]: (chunk, position)",
        new="            key: (chunk, position)",
        killers=(SNAPSHOTS + "test_what_is_restored_as_approximate_shares_no_state",),
    ),
    Mutant(
        name="states-after-the-saved-text-are-saved",
        breaks="a save of a text's beginning has nothing of the rest",
        file="python/kvpager/_runtime/recurrent/cursor.py",
        old="        hashes = self._hashes(min(upto, self._sequence.length))",
        new="        hashes = self._hashes(self._sequence.length)",
        killers=(SNAPSHOTS + "test_a_save_of_a_beginning_has_the_states_of_that_beginning",),
    ),
    Mutant(
        name="loose-chunks-have-no-checksums",
        breaks="what is saved is what was there when it was frozen",
        file="csrc/snapshot/loose_content.cc",
        old="    record.slice_checksum = std::move(checksums);\n",
        new="",
        killers=(
            "cpp/snapshot/loose_content_test.cc::"
            "LooseChunksThatChangedAfterTheyWereGivenAreNotSaved",
        ),
    ),
)
