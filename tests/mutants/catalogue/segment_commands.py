"""`kvpager segment`, and segments in `kvpager generate`."""

from mutants.mutant import Mutant

TESTS = "python/test_segment_cli.py::"
CLI = "python/kvpager/cli/"

SEGMENT_COMMANDS = (
    Mutant(
        name="a-text-that-is-there-is-added-again",
        breaks="adding the same text again computes and writes nothing",
        file=CLI + "segment.py",
        old="            there.add(name)\n",
        new="            there.discard(name)\n",
        killers=(
            TESTS + "test_adding_the_same_text_again_computes_and_writes_nothing",
            TESTS + "test_several_files_are_a_segment_each_called_as_the_files",
        ),
    ),
    Mutant(
        name="a-taken-name-is-overwritten",
        breaks="another text under a taken name is refused without --replace",
        file=CLI + "segment.py",
        old="        if other is not None and not replace:\n",
        new="        if other is None and replace:\n",
        killers=(
            TESTS + "test_another_text_under_a_taken_name_is_refused_with_the_remedy",
            TESTS + "test_nothing_is_added_where_one_of_the_names_is_taken",
            TESTS + "test_a_segment_of_other_numerics_is_refused_until_it_is_replaced",
        ),
    ),
    Mutant(
        name="a-damaged-segment-counts-as-there",
        breaks="adding the text of a damaged segment puts it right",
        file=CLI + "segment.py",
        old="        if other is None and entry.error is None:",
        new="        if other is None:",
        killers=(TESTS + "test_a_damaged_segment_is_put_right_by_adding_its_text_again",),
    ),
    Mutant(
        name="padding-is-counted-as-text",
        breaks="what add tells as computed are tokens of the text",
        file=CLI + "segment.py",
        old="        max(0, computed - padding),\n",
        new="        computed,\n",
        killers=(TESTS + "test_add_computes_a_text_and_ls_shows_it",),
    ),
    Mutant(
        name="every-segment-begins-a-text",
        breaks="a tokenizer's beginning of a text is at the beginning alone",
        file=CLI + "segment.py",
        old="special_tokens=False)",
        new="special_tokens=True)",
        killers=(TESTS + "test_a_tokenizer_begins_the_text_and_no_segment_of_it",),
    ),
    Mutant(
        name="a-question-begins-a-text",
        breaks="a tokenizer's beginning of a text is at the beginning alone",
        file=CLI + "generate.py",
        old="    begins = args.restore is None and segments is None\n",
        new="    begins = args.restore is None\n",
        killers=(TESTS + "test_a_tokenizer_begins_the_text_and_no_segment_of_it",),
    ),
    Mutant(
        name="a-session-is-listed-as-a-segment",
        breaks="segment ls tells segments from sessions by what they say, not by their names",
        file=CLI + "segment_store.py",
        old="                continue  # a session with such a name\n",
        new="                problem = None\n",
        killers=(
            TESTS + "test_ls_tells_segments_from_sessions_and_snapshot_ls_marks_them",
            TESTS + "test_a_mistyped_name_offers_the_closest_and_removes_nothing",
        ),
    ),
    Mutant(
        name="a-note-of-a-newer-release-spoils-its-snapshot",
        breaks="a segment that this release cannot use is a sound snapshot all the same",
        file="python/kvpager/stores/segments.py",
        old="    except PagerError:  # loading the segment reports it\n        return None\n",
        new="    except PagerError:\n        raise\n",
        killers=(TESTS + "test_a_note_that_no_release_has_written_is_a_problem_and_not_a_crash",),
    ),
    Mutant(
        name="listing-loads-torch",
        breaks="segment ls and rm need no torch",
        file=CLI + "segment_store.py",
        old="from kvpager.stores import DirectoryStore, StoreEntry\n",
        new="from kvpager import Session  # noqa\n"
        "from kvpager.stores import DirectoryStore, StoreEntry\n",
        killers=(TESTS + "test_ls_and_rm_need_no_torch",),
    ),
    Mutant(
        name="pins-do-not-hold",
        breaks="a pinned segment is removed with --force alone",
        file=CLI + "snapshot/store.py",
        old="in pinned and not force:\n",
        new="in pinned and not address.store:\n",
        killers=(TESTS + "test_a_pinned_segment_needs_force",),
    ),
    Mutant(
        name="segments-in-alphabetical-order",
        breaks="segments stand in the order they are given",
        file=CLI + "session_options.py",
        old="[prefix, *self.names, question]",
        new="[prefix, *sorted(self.names), question]",
        killers=(
            TESTS + "test_segments_stand_in_the_order_they_are_given_between_prefix_and_prompt",
        ),
    ),
    Mutant(
        name="the-default-repair-whatever-was-asked",
        breaks="--repair full gives a full prefill",
        file=CLI + "session_options.py",
        old="repair=self.repair,",
        new="repair=None,",
        killers=(TESTS + "test_repairing_everything_gives_the_answer_of_a_full_prefill",),
    ),
    Mutant(
        name="only-the-first-of-several-policies",
        breaks="policies joined by + recompute what any of them chooses",
        file="python/kvpager/segments/policy_text.py",
        old="return policies[0] if len(policies) == 1 else Combined(*policies)",
        new="return policies[0] if policies else Combined(*policies)",
        killers=(TESTS + "test_every_policy_has_a_text",),
    ),
)
