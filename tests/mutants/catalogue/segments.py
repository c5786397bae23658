"""Segments: what is exact, what a repair computes, and what its rows see."""

from mutants.mutant import Mutant

SEGMENTS = "model/test_segments.py::"
DEFECTS = "model/test_defects_stitching.py::"
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
        killers=(
            SEGMENTS + "test_only_the_exact_beginning_is_ever_found_by_others",
            DEFECTS + "test_chunks_encoded_alone_are_no_hit_for_the_text_they_were_put_into",
        ),
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
            DEFECTS + "test_a_segment_that_moves_has_its_keys_rotated",
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
        killers=(DEFECTS + "test_a_repair_forwards_the_rows_it_says_and_never_all",),
    ),
    Mutant(
        name="the-default-leaves-heads-as-they-are",
        breaks="the heads of all later segments are computed again",
        file=ROOM + "policies.py",
        old="chosen[piece.start : min(piece.start + self.tokens, piece.stop)] = True\n",
        new="chosen[max(piece.start, piece.stop - self.tokens) : piece.stop] = True\n",
        killers=(
            DEFECTS + "test_the_default_computes_the_heads_of_all_later_segments_the_last_included",
        ),
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
)
