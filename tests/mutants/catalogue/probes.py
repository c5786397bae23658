"""What is found out about a model when an engine starts, and the seam to it."""

from mutants.mutant import Mutant

STOCK_TRANSFORMERS = "model/test_stock_transformers.py::"
SESSIONS = "model/test_sessions.py::"
REFUSALS = "model/test_refusals.py::"
COUNTS = "model/test_row_counts.py::"
REUSE = "model/test_reuse.py::"
SEAM = "model/test_checks_of_the_seam.py::"
BETWEEN = "model/test_operations_between_modules.py::"
MIXTURES = "model/test_counts_of_mixtures.py::"

PROBES = (
    Mutant(
        name="row-count-follows-the-work",
        breaks="10: every exact forward is padded to a proven row count, also to decode one token",
        file="python/kvpager/_model/seam/rows.py",
        old="    return ladder[at]\n",
        new="    return used\n",
        killers=(
            REUSE + "test_decode_is_swept_by_decoding",
            REUSE + "test_generated_text_is_reused_to_the_last_full_chunk",
            "model/test_pure_function_of_tokens.py::"
            "test_decoding_token_by_token_gives_the_bits_of_a_prefill[llama-float32]",
        ),
    ),
    Mutant(
        name="row-counts-unproven",
        breaks="a smaller row count is used only where it gives the bits of M rows",
        file="python/kvpager/_model/proof/prove.py",
        old="                alive = [count for count in alive if count not in differing]\n",
        new="",
        killers=(
            REUSE + "test_decode_is_swept_by_decoding",
            COUNTS + "test_one_product_with_other_bits_at_one_count_drops_this_count_and_is_named",
        ),
    ),
    Mutant(
        name="counts-of-mixtures-are-not-checked-at-start",
        breaks="a mixture's counts are used where a short text has the bits of M in them",
        file="python/kvpager/_model/facts/row_counts.py",
        old="    if not _to_be_checked(checked, found):\n",
        new="    if found is not None:\n",
        killers=(
            MIXTURES + "test_a_count_that_a_short_text_finds_other_bits_in_is_dropped_and_named",
        ),
    ),
    Mutant(
        name="a-difference-at-start-is-ignored",
        breaks="a count that a short text finds other bits in is not used",
        file="python/kvpager/_model/facts/row_counts.py",
        old='    fixed = find_out(checked, "fixed")\n',
        new="    fixed = found\n",
        killers=(
            MIXTURES + "test_a_count_that_a_short_text_finds_other_bits_in_is_dropped_and_named",
        ),
    ),
    Mutant(
        name="only-the-head-is-checked-at-start",
        breaks="a mixture's forwards are checked in the counts below M, not its head alone",
        file="python/kvpager/_model/facts/count_trial.py",
        old="        rows = counts.smaller or (counts.rows,)\n",
        new="        rows = (counts.rows,)\n",
        killers=(
            MIXTURES + "test_a_count_that_a_short_text_finds_other_bits_in_is_dropped_and_named",
        ),
    ),
    Mutant(
        name="keys-and-values-are-not-compared-at-start",
        breaks="the short check compares raw bits of K/V",
        file="python/kvpager/_model/facts/count_trial.py",
        old="            return self._difference_of_kv(texts) or other_logits\n",
        new="            return other_logits\n",
        killers=(MIXTURES + "test_keys_and_values_are_compared_as_raw_bits",),
    ),
    Mutant(
        name="m-alone-is-taken-without-a-check",
        breaks="a mixture that differs in forwards of M too is refused",
        file="python/kvpager/_model/facts/row_counts.py",
        old="    _require_one_way(checked, fixed, watch)\n",
        new="",
        killers=(MIXTURES + "test_a_model_whose_rows_depend_on_their_place_in_m_is_refused",),
    ),
    Mutant(
        name="a-count-that-was-asked-for-is-dropped-silently",
        breaks="a count of small_rows that gives other bits is refused by name",
        file="python/kvpager/_model/facts/row_counts.py",
        old="    if not isinstance(small_rows, str):\n",
        new="    if small_rows is None:\n",
        killers=(MIXTURES + "test_a_count_that_was_asked_for_is_refused_by_name",),
    ),
    Mutant(
        name="head-rows-not-padded",
        breaks="7: logits come from a proven number of head rows (what logits_to_keep=1 breaks)",
        file="python/kvpager/_model/seam/causal_lm.py",
        old="    index = wanted + [wanted[0]] * (count - len(wanted))\n",
        new="    index = wanted\n",
        killers=(
            STOCK_TRANSFORMERS + "test_more_rows_than_the_head_takes_give_each_row_the_same_bits",
            REUSE + "test_decode_is_swept_by_decoding",
        ),
    ),
    Mutant(
        name="head-rows-of-a-view-not-padded",
        breaks="7: the first rows, which are not copied, are padded like the others",
        file="python/kvpager/_model/seam/causal_lm.py",
        old="        return hidden[:count]\n",
        new="        return hidden[: len(wanted)]\n",
        killers=(COUNTS + "test_logits_of_the_first_rows_are_those_of_rows_that_were_gathered",),
    ),
    Mutant(
        name="row-counts-of-the-head-unproven",
        breaks="7: logits come from a number of head rows that gives the bits of the others",
        file="python/kvpager/_model/proof/prove.py",
        old="""\
        of_head, dropped_of_head = _settle(
            [Part(model, head, HEAD_COUNTS[-1]), after],
            [] if small_rows == "fixed" else others,
            tuple,
        )
""",
        new="""\
        of_head, dropped_of_head = ([] if small_rows == "fixed" else others), ()
""",
        killers=(COUNTS + "test_a_head_has_row_counts_of_its_own",),
    ),
    Mutant(
        name="parts-are-tried-on-rows-that-lie-otherwise",
        breaks="a part is tried on rows that lie in memory as those of a forward do",
        file="python/kvpager/_model/proof/rowwise.py",
        old="_laid_out(next(fresh).movedim(0, dim), x)",
        new="next(fresh).movedim(0, dim)",
        killers=(
            COUNTS
            + "test_parts_are_tried_on_rows_that_lie_in_memory_as_those_of_a_forward_do[float32]",
        ),
    ),
    Mutant(
        name="experts-that-share-a-product-accepted",
        breaks="an expert implementation that depends on neighbours is refused, with the remedy",
        file="python/kvpager/_model/seam/support.py",
        old='if is_recurrent(model) or not has_experts(model) or implementation == "batched_mm":\n',
        new='if implementation != "unknown":\n',
        killers=(
            REFUSALS + "test_experts_that_share_a_matrix_product_are_refused_until_they_do_not",
        ),
    ),
    Mutant(
        name="rows-are-not-tried-among-other-rows",
        breaks="a model whose rows see one another is refused",
        file="python/kvpager/_model/proof/whole.py",
        old="        if what := self._difference(rows, kept=rows - rows // 4):\n",
        new="        if what := None:\n",
        killers=(REFUSALS + "test_rows_that_see_one_another_between_modules_are_refused",),
    ),
    Mutant(
        name="parts-are-not-tried-beside-other-rows",
        breaks="experts that depend on neighbours are found by trial, whatever they are called",
        file="python/kvpager/_model/proof/units.py",
        old="        if probe.independent():\n            return\n",
        new="        if probe is not None:\n            return\n",
        killers=(
            COUNTS + "test_experts_that_depend_on_neighbours_are_refused_whatever_they_call_"
            "themselves[bfloat16]",
            REFUSALS + "test_an_activation_whose_bits_follow_the_row_index_is_refused",
        ),
    ),
    Mutant(
        name="moving-frequencies-accepted",
        breaks="RoPE that follows the longest position of a forward is refused",
        file="python/kvpager/_model/seam/support.py",
        old='_MOVING_ROPE = ("dynamic", "longrope")\n',
        new='_MOVING_ROPE = ("longrope",)\n',
        killers=(REFUSALS + "test_rope_that_follows_the_longest_position_is_refused[dynamic]",),
    ),
    Mutant(
        name="sliding-windows-ignored",
        breaks="attention is what the model's own call asks for",
        file="python/kvpager/_model/seam/attention.py",
        old="        window=sliding_window,\n",
        new="        window=None,\n",
        killers=(
            STOCK_TRANSFORMERS + "test_logits_of_a_prompt_larger_than_the_pool_are_those_of_"
            "transformers[mistral-float32]",
        ),
    ),
    Mutant(
        name="unknown-attention-options-ignored",
        breaks="an attention option that is not implemented is refused, never ignored",
        file="python/kvpager/_model/seam/attention.py",
        old="    if unknown:\n",
        new="    if unknown is None:\n",
        killers=(REFUSALS + "test_an_attention_option_that_is_not_implemented_is_refused",),
    ),
    Mutant(
        name="weights-may-change-under-an-engine",
        breaks="an engine refuses to go on with weights that are not those of its fingerprint",
        file="python/kvpager/_model/watch/model_watch.py",
        old="        if sum(map(_VERSION, self._counted)) != self._versions:\n",
        new="        if self._versions < 0:\n",
        killers=(
            "model/test_changed_models.py::"
            "test_a_changed_model_is_noticed_before_anything_is_adopted_saved_or_committed",
        ),
    ),
    Mutant(
        name="a-mode-of-torch-is-not-asked-for",
        breaks="an engine computes nothing within a mode that may change it",
        file="python/kvpager/_runtime/execution/unchanged.py",
        old="        refuse_modes()\n",
        new="",
        killers=(
            "model/test_torch_modes.py::"
            "test_a_forward_within_a_mode_is_refused_and_nothing_is_computed",
        ),
    ),
    Mutant(
        name="rounding-is-not-looked-at",
        breaks="an engine refuses to go on with another rounding mode",
        file="python/kvpager/_model/weights/numerics.py",
        old="            _ONE + _SMALL == _ONE and _ONE - _SMALL == _ONE\n",
        new="            True\n",
        killers=(SESSIONS + "test_another_rounding_mode_under_an_engine_is_refused",),
    ),
    Mutant(
        name="threads-may-change-under-an-engine",
        breaks="an engine refuses to go on with another number of threads",
        file="python/kvpager/_runtime/execution/unchanged.py",
        old='        if threads != self._threads and self._device.type == "cpu":\n',
        new="        if threads < 1:\n",
        killers=(SESSIONS + "test_changing_torchs_threads_under_an_engine_is_refused",),
    ),
    Mutant(
        name="operations-between-modules-untried",
        breaks="what a model does between its modules is tried in every row count",
        file="python/kvpager/_model/proof/prove.py",
        old="[*parts, between, WholeModel(model, seen)]",
        new="[*parts, WholeModel(model, seen)]",
        killers=(
            BETWEEN + "test_a_mixture_with_a_gate_of_one_number_per_row_scores_what_it_generated",
            BETWEEN + "test_rows_at_the_end_of_m_that_fill_no_vector_are_refused",
        ),
    ),
    Mutant(
        name="element-wise-functions-tried-on-any-numbers",
        breaks="an element-wise function is tried on numbers that tell its code paths apart",
        file="python/kvpager/_model/proof/telling.py",
        old="    return found if any(x.ndim and len(x) for x in found) else []\n",
        new="    return []\n",
        killers=(
            BETWEEN + "test_numbers_are_found_that_tell_one_path_of_an_operation_from_another",
        ),
    ),
    Mutant(
        name="rows-of-m-not-compared-in-an-operation",
        breaks="a row keeps its bits at every place of an operation of M rows",
        file="python/kvpager/_model/proof/between.py",
        old="            if not self._keeps_rows(pair):\n",
        new="            if pair is None:\n",
        killers=(BETWEEN + "test_rows_at_the_end_of_m_that_fill_no_vector_are_refused",),
    ),
    Mutant(
        name="unknown-operations-accepted",
        breaks="an operation that nothing is known of leaves M as the only row count",
        file="python/kvpager/_model/proof/between.py",
        old="pair.whole.kind == UNKNOWN and pair.has_rows and not pair.whole.in_part:",
        new="pair.whole.kind == UNKNOWN and not pair.has_rows:",
        killers=(BETWEEN + "test_an_operation_that_nothing_is_known_of_leaves_m_alone",),
    ),
    Mutant(
        name="threads-not-in-the-fingerprint",
        breaks="another number of threads is another fingerprint",
        file="python/kvpager/_model/identity/fingerprint.py",
        old='"threads": torch.get_num_threads() if on_cpu else 0',
        new='"threads": 0',
        killers=(SEAM + "test_another_number_of_threads_is_another_fingerprint",),
    ),
    Mutant(
        name="whole-model-compared-in-one-row",
        breaks="the whole model is compared in most rows of a count",
        file="python/kvpager/_model/proof/whole.py",
        old="kept=count - count // 4)",
        new="kept=1)",
        killers=(SEAM + "test_the_whole_model_is_compared_in_many_rows_of_a_count",),
    ),
    Mutant(
        name="attention-dropout-accepted",
        breaks="attention with dropout is refused",
        file="python/kvpager/_model/seam/attention.py",
        old="    if dropout:\n",
        new="    if dropout is None:\n",
        killers=(SEAM + "test_attention_with_dropout_is_refused_and_without_is_not",),
    ),
    Mutant(
        name="several-batch-entries-accepted",
        breaks="a forward is one batch entry",
        file="python/kvpager/_model/seam/attention.py",
        old="    if query.shape[0] != 1 and not whole:\n",
        new="    if query.shape[0] > 99:\n",
        killers=(SEAM + "test_attention_over_several_batch_entries_is_refused[2]",),
    ),
    Mutant(
        name="layers-may-attend-twice",
        breaks="a layer that attends twice is refused",
        file="python/kvpager/_model/seam/observe.py",
        old="        if layer in self.calls:\n",
        new="        if layer is None:\n",
        killers=(SEAM + "test_a_layer_that_attends_twice_is_refused_by_its_number",),
    ),
    Mutant(
        name="hidden-states-not-rounded-for-the-head",
        breaks="hidden states of another dtype are rounded to the head's",
        file="python/kvpager/_model/seam/causal_lm.py",
        old="        hidden = hidden.to(self._dtype)  # some decoders end in float32\n",
        new="",
        killers=(SEAM + "test_hidden_states_of_another_dtype_are_rounded_to_the_heads",),
    ),
    Mutant(
        name="repairs-share-rounded-down",
        breaks="a repair's share of tokens is rounded up",
        file="python/kvpager/segments/policies.py",
        old="math.ceil(",
        new="math.floor(",
        killers=(
            "python/test_repair_shares.py::test_the_share_of_each_segments_deviating_tokens_is_rounded_up",
        ),
    ),
)
