"""What a chunk, a segment or a snapshot is taken to be."""

from mutants.mutant import Mutant

NAMES = "model/test_segment_names.py::"

IDENTITY = (
    Mutant(
        name="a-segment-is-taken-by-the-name-of-its-file",
        breaks="a segment under another's name is refused",
        file="python/kvpager/runtime/segments/saved.py",
        old="        if note.name != name:\n",
        new="        if False:\n",
        killers=(
            NAMES + "test_a_segments_file_under_anothers_name_is_refused_by_what_it_says_of_itself",
        ),
    ),
    Mutant(
        name="a-segments-digest-is-not-compared",
        breaks="a segment's ids are those its digest was made of",
        file="python/kvpager/runtime/segments/saved.py",
        old="        if note.digest not in (digest_of(ids), old_digest_of(ids)):\n",
        new="        if False:\n",
        killers=(NAMES + "test_a_segment_whose_digest_is_of_other_ids_is_refused",),
    ),
    Mutant(
        name="segments-are-told-apart-by-their-digest",
        breaks="two texts are two segments, whatever their digests",
        file="python/kvpager/runtime/segments/shelf.py",
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
)
