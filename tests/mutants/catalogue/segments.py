"""Segments: what is exact, what a repair computes, and what its rows see."""

from mutants.mutant import Mutant

SEGMENTS = "model/test_segments.py::"
ROOM = "python/kvpager/segments/"

SEGMENT_MUTANTS = (
    Mutant(
        name="segments-are-filed-with-prompts",
        breaks="10: a segment's chunks are in a namespace of their own",
        file=ROOM + "segment.py",
        old='    return f"{salt}\\0segment"\n',
        new="    return salt\n",
        killers=(SEGMENTS + "test_segments_are_never_found_as_the_beginning_of_a_prompt",),
    ),
    Mutant(
        name="moved-chunks-are-called-exact",
        breaks="10, 18: what follows a moved token is approximate",
        file=ROOM + "stitching.py",
        old='        provenance: str = "approximate",\n',
        new='        provenance: str = "exact",\n',
        killers=(SEGMENTS + "test_only_the_exact_beginning_is_ever_found_by_others",),
    ),
    Mutant(
        name="a-segment-after-ids-is-a-true-prefix",
        breaks="18: only a segment at position 0 is exact",
        file=ROOM + "pieces.py",
        old="        exact = exact and (segment is None or start == 0)\n",
        new="        exact = exact and (segment is None or len(pieces) < 2)\n",
        killers=(SEGMENTS + "test_only_the_exact_beginning_is_ever_found_by_others",),
    ),
    Mutant(
        name="moved-keys-stay-as-they-were-computed",
        breaks="keys are rotated to where their tokens are",
        file=ROOM + "stitching.py",
        old="                k[layer, first:last] = move.move(layer, keys)\n",
        new="                k[layer, first:last] = keys\n",
        killers=(
            SEGMENTS + "test_what_nothing_repairs_is_the_segment_with_rotated_keys",
            SEGMENTS + "test_moved_keys_are_those_of_a_prefill_within_one_rounding",
        ),
    ),
    Mutant(
        name="a-repair-attends-as-the-configuration-says",
        breaks="recomputed rows attend densely, whatever is configured",
        file=ROOM + "stitching.py",
        old="        batch.dense, batch.provenance = True, provenance\n",
        new="        batch.dense, batch.provenance = False, provenance\n",
        killers=(SEGMENTS + "test_a_windowed_selection_recomputes_densely",),
    ),
    Mutant(
        name="the-chosen-tokens-are-not-computed",
        breaks="a repair computes what its policy chose, counted",
        file=ROOM + "assemble.py",
        old="        live = chosen | ~self._moved\n",
        new="        live = ~self._moved\n",
        killers=(SEGMENTS + "test_every_token_is_counted_once_and_rows_are_those_computed",),
    ),
    Mutant(
        name="a-repair-computes-everything",
        breaks="never a hidden full prefill",
        file=ROOM + "assemble.py",
        old="        live = chosen | ~self._moved\n",
        new="        live = chosen | True\n",
        killers=(SEGMENTS + "test_every_token_is_counted_once_and_rows_are_those_computed",),
    ),
    Mutant(
        name="the-default-leaves-heads-as-they-are",
        breaks="the heads of all later segments are computed again",
        file=ROOM + "policies.py",
        old="chosen[piece.start : min(piece.start + self.tokens, piece.stop)] = True\n",
        new="chosen[max(piece.start, piece.stop - self.tokens) : piece.stop] = True\n",
        killers=(SEGMENTS + "test_the_default_computes_the_heads_of_all_later_segments",),
    ),
    Mutant(
        name="a-segments-last-chunk-stays-open",
        breaks="a segment nobody uses holds no block",
        file=ROOM + "segment.py",
        old="    missing = -len(tokens) % chunk_tokens\n",
        new="    missing = 0 % chunk_tokens\n",
        killers=(SEGMENTS + "test_segments_hold_no_block_while_nobody_uses_them",),
    ),
    Mutant(
        name="what-follows-an-exact-beginning-is-repaired-instead",
        breaks="a text of which everything is computed again is a full prefill, and exact",
        file=ROOM + "assemble.py",
        old="        self._prefill(exact)\n",
        new="",
        killers=(SEGMENTS + "test_recomputing_everything_is_a_full_prefill_to_the_bit",),
    ),
    Mutant(
        name="a-message-has-the-names-of-all-segments",
        breaks="of many segments, a message names those like the one that is not there",
        file="python/kvpager/segments/shelf.py",
        old="len(names) <= _MOST_NAMED",
        new="True",
        killers=(
            SEGMENTS + "test_of_many_segments_a_message_names_those_like_the_one_that_is_not_there",
        ),
    ),
    Mutant(
        name="a-note-of-a-newer-release-spoils-its-snapshot",
        breaks="a segment that this release cannot use is a sound snapshot all the same",
        file="python/kvpager/stores/segments.py",
        old="    except PagerError:  # loading the segment reports it\n        return None\n",
        new="    except PagerError:\n        raise\n",
        killers=(
            "python/test_directory_store.py::"
            "test_a_segment_note_of_a_newer_release_is_a_sound_snapshot",
        ),
    ),
)
