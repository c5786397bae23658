"""What a chunk, a segment or a snapshot is taken to be."""

from mutants.mutant import Mutant

OWN_CODE = "model/test_own_code.py::"
NAMES = "model/test_segment_names.py::"
TENANTS = "model/test_tenants.py::"
SALTS = "model/test_salts.py::"
RENEWED = "model/test_weights_changed.py::"
REACHED = "model/test_reached_code.py::test_what_code_reads_may_not_change_under_an_engine"
READING = "model/test_reading.py::"
BEHAVIOUR = "model/test_behaviour.py::"
CHANGED = "model/test_changed_models.py::"
NOTICED = CHANGED + "test_a_changed_model_is_noticed_before_anything_is_adopted_saved_or_committed"

IDENTITY = (
    Mutant(
        name="a-segment-is-taken-by-the-name-of-its-file",
        breaks="a segment under another's name is refused",
        file="python/kvpager/segments/saved.py",
        old="        if note.name != name:\n",
        new="        if False:\n",
        killers=(
            NAMES + "test_a_segments_file_under_anothers_name_is_refused_by_what_it_says_of_itself",
        ),
    ),
    Mutant(
        name="a-segments-digest-is-not-compared",
        breaks="a segment's ids are those its digest was made of",
        file="python/kvpager/segments/saved.py",
        old="        if note.digest != digest_of(ids):\n",
        new="        if False:\n",
        killers=(NAMES + "test_a_segment_whose_digest_is_of_other_ids_is_refused",),
    ),
    Mutant(
        name="segments-are-told-apart-by-their-digest",
        breaks="two texts are two segments, whatever their digests",
        file="python/kvpager/segments/shelf.py",
        old="        elif not np.array_equal(segment.tokens, tokens):\n",
        new="        elif segment.digest != digest:\n",
        killers=(NAMES + "test_texts_that_collide_in_a_digest_are_two_segments",),
    ),
    Mutant(
        name="a-manifest-is-opened-under-any-name",
        breaks="a directory store's snapshot is opened by the name it was saved under",
        file="python/kvpager/stores/directory.py",
        old="            if why is not None:\n                raise CorruptSnapshotError(why)\n",
        new="",
        killers=(
            NAMES + "test_a_snapshot_under_anothers_name_in_a_directory_store_is_refused",
            NAMES + "test_a_segment_under_anothers_name_is_refused_and_never_assembled",
        ),
    ),
    Mutant(
        name="hooks-may-be-added-under-an-engine",
        breaks="a hook that is added under an open engine is noticed",
        file="python/kvpager/_model/watch/structure.py",
        old='        if kind == "hooks":\n',
        new='        if kind == "hooks":\n            return None\n        if kind == "hooks":\n',
        killers=(f"{NOTICED}[hook added]", f"{NOTICED}[pre-hook added]"),
    ),
    Mutant(
        name="adapters-settings-are-not-looked-into",
        breaks="another scaling of an adapter is noticed",
        file="python/kvpager/_model/watch/reach.py",
        old='            self.containers.append((name, "value", value))\n',
        new="            pass\n",
        killers=(f"{NOTICED}[another scaling]", REACHED + "[table of a module]"),
    ),
    Mutant(
        name="globals-of-code-are-not-watched",
        breaks="a function that a forward calls, patched under an engine, is a change",
        file="python/kvpager/_model/watch/structure.py",
        old='            self._add(home, "globals", values)\n',
        new="            pass\n",
        killers=(REACHED + "[function two calls away]", REACHED + "[constant of a module]"),
    ),
    Mutant(
        name="tensors-beside-buffers-are-not-watched",
        breaks="a steering vector that is written in place is a change",
        file="python/kvpager/_model/watch/model_watch.py",
        old="        hold_too(held, self._structure.reach.tensors)\n",
        new="",
        killers=(REACHED + "[vector]", REACHED + "[vector deep inside]"),
    ),
    Mutant(
        name="closures-are-not-watched",
        breaks="a variable of a closure that a forward reads is watched",
        file="python/kvpager/_model/watch/structure.py",
        old="            if not _alike(now, before):\n",
        new="            if type(now) is not type(before):\n",
        killers=(REACHED + "[variable of a closure]", REACHED + "[slot of an object]"),
    ),
    Mutant(
        name="models-may-change-themselves",
        breaks="a model that changes itself in every forward is refused",
        file="python/kvpager/_model/identity/settled.py",
        old="        watch.check()\n",
        new="        watch.learn()\n",
        killers=(
            "model/test_reached_code.py::"
            "test_a_model_that_changes_itself_in_every_forward_is_refused",
        ),
    ),
    Mutant(
        name="code-may-read-numbers",
        breaks="code of a user's that reads numbers of a tensor is refused at the start, by name",
        file="python/kvpager/_model/identity/reading.py",
        old="        if (why := unfit(func)) and not _is_without_chance(func, args, kwargs):\n",
        new="        if (why := unfit(func)) and not why:\n",
        killers=(READING + "test_code_that_reads_numbers_of_a_tensor_is_refused_by_name",),
    ),
    Mutant(
        name="code-may-draw-from-shared-generators",
        breaks="code of a user's that draws random numbers is refused at the start",
        file="python/kvpager/_model/identity/reading.py",
        old="        if not changed:\n",
        new="        if changed or not changed:\n",
        killers=(
            READING + "test_code_that_draws_by_chance_or_by_the_clock_is_refused[random_branch]",
        ),
    ),
    Mutant(
        name="a-refusal-may-be-caught-by-the-model",
        breaks="code that catches what a look at its reading raises is refused all the same",
        file="python/kvpager/_model/identity/reading.py",
        old="        if self._refused:  # which",
        new="        if not self._name:  # which",
        killers=(READING + "test_code_that_reads_numbers_of_a_tensor_is_refused_by_name[caught]",),
    ),
    Mutant(
        name="closures-of-hooks-are-not-digested",
        breaks="two hooks of one name with other closures are two models",
        file="python/kvpager/_model/identity/description.py",
        old="            yield from (variable.encode(), (content_of(cell),))\n",
        new="            yield variable.encode()\n",
        killers=(OWN_CODE + "test_what_code_holds_is_part_of_the_fingerprint",),
    ),
    Mutant(
        name="what-code-reads-is-no-part-of-the-fingerprint",
        breaks="a table that a module holds, and that made-up tokens do not meet, is digested",
        file="python/kvpager/_model/identity/description.py",
        old="        for key, value in sorted(reach.attributes_of(module)):\n",
        new="        for key, value in ():\n",
        killers=(OWN_CODE + "test_what_code_holds_is_part_of_the_fingerprint",),
    ),
    Mutant(
        name="data-may-be-put-in-the-place-of-others",
        breaks="a parameter with other memory is noticed",
        file="python/kvpager/_model/watch/model_watch.py",
        old="        if list(map(_ADDRESS, self._tensors)) != self._addresses:\n",
        new="        if False:\n",
        killers=(f"{NOTICED}[data replaced]",),
    ),
    Mutant(
        name="weights-are-not-read-again",
        breaks="weights that are written through .data are noticed",
        file="python/kvpager/_model/watch/contents.py",
        old="        found = self._watch.sample(_THOROUGH if thorough else 1)\n",
        new="        found = -1\n",
        killers=(f"{NOTICED}[data of one tensor written]", f"{NOTICED}[data of one norm written]"),
    ),
    Mutant(
        name="nothing-is-read-in-turns",
        breaks="one element of a weight that is written through .data is seen within a round",
        file="python/kvpager/_model/watch/contents.py",
        old="            found = self._watch.sweep(self._bytes)\n",
        new="            found = self._watch.sweep(0)\n",
        killers=(
            CHANGED + "test_one_element_among_millions_is_seen_within_a_round_by_reading_in_turns",
        ),
    ),
    Mutant(
        name="the-model-is-not-looked-at-after-a-forward",
        breaks="what a changed model computes is not committed",
        file="python/kvpager/_runtime/execution/runner.py",
        old="                self.unchanged.check_model()\n                with computing(None)",
        new="                with computing(None)",
        killers=(
            CHANGED
            + "test_a_change_by_another_thread_while_a_forward_runs_is_not_committed[hook added]",
        ),
    ),
    Mutant(
        name="chunks-of-the-model-before-are-adopted",
        breaks="nothing is adopted under a changed model",
        file="python/kvpager/_runtime/scheduling/feed.py",
        old="        core.runner.unchanged.check_model(thorough=True)\n",
        new="",
        killers=(f"{NOTICED}[hook added]",),
    ),
    Mutant(
        name="a-changed-model-is-saved-under-its-old-name",
        breaks="nothing is saved under a changed model",
        file="python/kvpager/_runtime/snapshots/freezing.py",
        old="    core.runner.unchanged.check_model(thorough=True)\n",
        new="",
        killers=(f"{NOTICED}[hook added]",),
    ),
    Mutant(
        name="adapters-are-no-part-of-the-fingerprint",
        breaks="another active adapter is another fingerprint",
        file="python/kvpager/_model/identity/description.py",
        old="    if not found:\n",
        new="    if found:\n",
        killers=(
            CHANGED + "test_adapters_have_fingerprints_of_their_own_that_every_process_gives",
        ),
    ),
    Mutant(
        name="rows-of-a-digest-attend-to-themselves",
        breaks="another scaling, which no row shows that attends to itself, is another model",
        file="python/kvpager/_model/identity/behaviour.py",
        old="        if count > 0:\n",
        new="        if count > len(q):\n",
        killers=(BEHAVIOUR + "test_rows_that_mix_see_every_key_up_to_their_own_and_no_other",),
    ),
    Mutant(
        name="arguments-of-attention-are-not-digested",
        breaks="every argument of an attention call is part of the fingerprint",
        file="python/kvpager/_model/identity/behaviour.py",
        old="        _add_arguments(summary, calls, [part.seen.rows for part in parts])\n",
        new="        pass\n",
        killers=(BEHAVIOUR + "test_every_argument_of_a_call_is_part_of_the_digest",),
    ),
    Mutant(
        name="what-a-model-does-is-not-looked-at",
        breaks="two models that differ in what a hook does have two fingerprints",
        file="python/kvpager/_model/identity/behaviour.py",
        old="    _add(summary, torch.cat([part.seen.hidden for part in parts]))\n"
        "    _add(summary, torch.cat([part.logits for part in parts]))\n",
        new="",
        killers=(
            CHANGED + "test_a_hook_with_the_same_name_and_another_effect_is_seen_by_what_it_does",
        ),
    ),
    Mutant(
        name="another-behaviour-alone-is-waived",
        breaks="behaviour is waived only with the numerics it follows",
        file="python/kvpager/_model/identity/fingerprint.py",
        old="waivable = name in WAIVABLE or (numerics and name in FOLLOWING)",
        new="waivable = name in WAIVABLE or name in FOLLOWING",
        killers=(
            "model/test_fingerprint.py::test_behaviour_is_waived_with_numerics_and_never_alone",
        ),
    ),
    Mutant(
        name="what-was-computed-of-the-old-model-stays",
        breaks="after weights_changed nothing of the old model is used",
        file="python/kvpager/_runtime/execution/core.py",
        old="        self.pager.close()\n"
        "        self._take(facts, self.runner if only_values else None)\n",
        new="        self.facts = facts\n        self.make_runner()\n",
        killers=(RENEWED + "test_nothing_of_the_old_model_is_found_again",),
    ),
    Mutant(
        name="checkpoints-of-a-module-of-no-library-are-no-change",
        breaks="what code of no library reads in any mode is a part of the model",
        file="python/kvpager/_model/watch/structure.py",
        old="key in USED or (key in FOR_GRADIENTS and self.reach.is_known(own))",
        new="key in USED or key in FOR_GRADIENTS",
        killers=(
            "model/test_changed_models.py"
            "::test_a_changed_model_is_noticed_before_anything_is_adopted_saved_or_committed"
            "[checkpoints of a module of no library]",
        ),
    ),
    Mutant(
        name="recorded-forwards-of-another-model-are-taken-as-compared",
        breaks="the bits of a recorded forward are compared again when more than weights changed",
        file="python/kvpager/_runtime/execution/core.py",
        old="self.runner if only_values else None",
        new="self.runner",
        killers=(
            "model/test_logprobs_with_gradients.py"
            "::test_a_recorded_forward_is_compared_once_until_more_than_weights_change",
        ),
    ),
    Mutant(
        name="states-of-the-old-model-stay",
        breaks="after weights_changed no checkpoint of the old model is used",
        file="python/kvpager/_runtime/execution/core.py",
        old="        self.checkpoints.clear()\n",
        new="",
        killers=(RENEWED + "test_recurrent_states_are_forgotten_with_the_chunks",),
    ),
    Mutant(
        name="row-counts-of-the-old-model-stay",
        breaks="after weights_changed an engine has the row counts and the layout of a new one",
        file="python/kvpager/_model/facts/opening.py",
        old="known=facts if facts.watch.same_places() else None)",
        new="known=facts)",
        killers=(f"{RENEWED}test_everything_after_it_has_the_bits_of_a_new_engine[another dtype]",),
    ),
    Mutant(
        name="a-refused-model-is-half-known",
        breaks="a weights_changed that fails leaves the engine as it was",
        file="python/kvpager/_model/facts/opening.py",
        old="    _check_draft(core, checked.vocab_size)\n",
        new='    object.__setattr__(facts, "vocab_size", checked.vocab_size)\n'
        "    _check_draft(core, checked.vocab_size)\n",
        killers=(RENEWED + "test_another_vocabulary_than_the_drafts_is_refused",),
    ),
    Mutant(
        name="segments-keep-no-text",
        breaks="a segment is computed again when it is used after weights_changed",
        file="python/kvpager/segments/segment.py",
        old="        if self._transcript is not None and self._transcript.uncomputed.size:\n",
        new="        if False:\n",
        killers=(RENEWED + "test_segments_are_computed_again_when_they_are_used",),
    ),
    Mutant(
        name="salts-are-not-stretched",
        breaks="a guess at a salt costs a slow function",
        file="python/kvpager/_support/salts.py",
        old="        return cls(given, stretched(given))\n",
        new="        return cls(given, given)\n",
        killers=(SALTS + "test_a_guess_at_a_salt_cannot_be_tried_on_a_file_without_stretching_it",),
    ),
    Mutant(
        name="anybodys-snapshot-is-replaced",
        breaks="a snapshot of another salt or model is not replaced unasked",
        file="python/kvpager/stores/saving.py",
        old="        if self.owner is None and not self._overwrite and origin",
        new="        if self.owner and not self._overwrite and origin",
        killers=(
            TENANTS + "test_a_snapshot_of_another_salt_is_not_overwritten_unasked",
            TENANTS + "test_a_snapshot_of_another_model_is_not_overwritten_unasked",
        ),
    ),
    Mutant(
        name="everybodys-snapshots-are-listed",
        breaks="an engine lists what its own salt has saved",
        file="python/kvpager/stores/origin.py",
        old="    return digest is None or digest in ",
        new="    return digest is not None or digest in ",
        killers=(TENANTS + "test_an_engine_lists_what_its_own_salt_has_saved",),
    ),
    Mutant(
        name="anybodys-snapshot-is-deleted",
        breaks="a snapshot of another salt is not deleted unasked",
        file="python/kvpager/stores/directory.py",
        old="            if not force and origin is not None and",
        new="            if force and origin is not None and",
        killers=(TENANTS + "test_a_snapshot_of_another_salt_is_not_deleted_unasked",),
    ),
)
