"""A transformers cache: calls are transactions, rows are their text's, others are untouched."""

from mutants.mutant import Mutant

ROOM = "python/kvpager/transformers_cache/"
SAME = "model/test_transformers_cache.py::"
CALLS = "model/test_transformers_cache_calls.py::"
SAVING = "model/test_transformers_cache_calls.py::"

FAILS = CALLS + "test_a_call_that_fails_anywhere_leaves_the_cache_as_it_was"
PADDED = SAME + "test_a_batch_with_left_padding_generates_what_a_stock_cache_does[llama]"

TRANSFORMERS_CACHES = (
    Mutant(
        name="parts-of-a-failed-call-stay",
        breaks="after an exception a transformers cache is as it was before the call",
        file=ROOM + "call.py",
        old="                sequence.trim(length)\n",
        new="                pass\n",
        killers=(FAILS,),
    ),
    Mutant(
        name="a-window-is-not-kept-for-undoing",
        breaks="a failed call is undone where chunks were released meanwhile",
        file=ROOM + "call.py",
        old="        if window and added > rewind and self.before.sequences:\n",
        new="        if window < 0 and added > rewind and self.before.sequences:\n",
        killers=(FAILS,),
    ),
    Mutant(
        name="an-interrupted-call-stays-open",
        breaks="a call without the cache has stock bits, also after an interrupt of one with it",
        file=ROOM + "hooks.py",
        old="        if call is not None and call.runs():\n            return\n",
        new="        if call is not None:\n            return\n",
        killers=(FAILS,),
    ),
    Mutant(
        name="an-ended-call-concerns-its-model",
        breaks="a collected cache whose call was interrupted leaves no trace",
        file=ROOM + "layers.py",
        old="        if call is None or call.forward is None:\n            return False\n",
        new="        if call is None or call.forward is None:\n            return True\n",
        killers=(CALLS + "test_a_collected_cache_whose_call_was_interrupted_leaves_no_trace",),
    ),
    Mutant(
        name="calls-nobody-saw-are-answered",
        breaks="a compiled model, or a layer alone, is refused rather than run without the text",
        file=ROOM + "host.py",
        old="        if call is None or call.texts is not texts or not call.answers():\n",
        new="        if call is not None and (call.texts is not texts or not call.answers()):\n",
        killers=(
            CALLS + "test_a_compiled_model_is_refused",
            CALLS + "test_a_layer_that_is_run_alone_with_a_cache_is_refused",
        ),
    ),
    Mutant(
        name="padding-is-part-of-the-text",
        breaks="left padding of a batch is neither kept nor attended to",
        file=ROOM + "rows.py",
        old="                (None, 0, padding, ROW_PADDING),\n"
        "                (entry.sequence, position, read, ROW_READ),\n"
        "                (entry.sequence, position + read, rows - read, ROW_COMMIT),\n",
        new="                (None, 0, 0, ROW_PADDING),\n"
        "                (entry.sequence, position, read, ROW_READ),\n"
        "                (entry.sequence, position + read, rows - read + padding, ROW_COMMIT),\n",
        killers=(PADDED,),
    ),
    Mutant(
        name="tokens-fed-again-are-not-compared",
        breaks="a prompt that goes another way than the cached text is refused",
        file=ROOM + "rows.py",
        old="    if differing.size:\n",
        new="    if differing.size < 0:\n",
        killers=(
            SAME + "test_a_prompt_that_goes_another_way_is_refused_until_the_cache_is_cropped",
        ),
    ),
    Mutant(
        name="a-whole-prompt-is-computed-again",
        breaks="a prompt that was restored whole costs one row",
        file=ROOM + "hooks.py",
        old="min(max(rows.known, rows.padding), rows.columns - call.keep)",
        new="min(rows.padding, rows.columns - call.keep)",
        killers=(
            SAVING + "test_a_prompt_that_was_restored_whole_is_answered_without_computing_it_again",
        ),
    ),
    Mutant(
        name="one-cache-in-two-threads",
        breaks="two threads do not write one text",
        file=ROOM + "host.py",
        old="                if call.texts is texts:\n",
        new="                if call.texts is None:\n",
        killers=(CALLS + "test_one_cache_in_two_threads_is_refused_and_forks_take_turns",),
    ),
    Mutant(
        name="changed-weights-are-saved",
        breaks="a snapshot of a cache is of the weights that its fingerprint names",
        file=ROOM + "opening.py",
        old="    host.known.watch.check(thorough=True)\n",
        new="",
        killers=(SAVING + "test_what_cannot_be_saved_is_refused_and_says_why",),
    ),
    Mutant(
        name="what-collects-for-transformers-counts-as-a-change",
        breaks="asking a model for hidden states does not make it another one",
        file="python/kvpager/_model/watch/looks.py",
        old="        or is_known_to_look(hook)\n",
        new="",
        killers=(CALLS + "test_asking_for_hidden_states_does_not_count_as_another_model",),
    ),
)
