"""Windows: what is behind them goes, what they show stays, and room is promised for no more."""

from mutants.mutant import Mutant

CPP = "cpp/pager/windows_test.cc::"
PYTHON = "python/test_pager_released.py::"
KEPT = CPP + "outputs are those of a pager that keeps all, in every tier"
TRIMS = CPP + "a trim goes back to every position that the window and the rewind leave, or to none"
PROMISE = CPP + "room is promised for what a sequence holds at a time, and the promise is kept"
PARTING = (
    CPP + "two sequences that part keep their promises; a fork that would break one is refused"
)
PINNED = CPP + "a pinned chunk and all that follow it stay until it is unpinned"
LIFE = CPP + "a life with a window does not depend on the pool, and keeps within it"
SHARES = CPP + "shares of attention are told of what is held, wherever they are computed"
LONG = PYTHON + "test_a_text_much_longer_than_all_tiers_runs_in_a_bounded_budget"

WINDOWS = (
    Mutant(
        name="a-chunk-goes-before-its-time",
        breaks="trims by up to `rewind` tokens succeed",
        file="csrc/pager/windows.cc",
        old="  return (length - options_.window - rewind) / layout_.chunk_tokens;\n",
        new="  return (length - options_.window - rewind + layout_.chunk_tokens - 1) / "
        "layout_.chunk_tokens;\n",
        killers=(
            TRIMS,
            PYTHON + "test_a_sequence_lets_go_of_what_neither_window_nor_rewind_reaches",
        ),
    ),
    Mutant(
        name="nothing-is-let-go",
        breaks="a windowed text of any length runs in a bounded budget",
        file="csrc/pager/commit.cc",
        old="    sequences_.release_behind_window(*part.sequence);\n",
        new="",
        killers=(PROMISE, LONG),
    ),
    Mutant(
        name="a-pinned-chunk-is-let-go",
        breaks="3: a pinned chunk stays, also behind the window",
        file="csrc/pager/windows.cc",
        old="         sequence.sealed[static_cast<size_t>(count)].pins == 0) {\n",
        new="         sequence.sealed[static_cast<size_t>(count)].pins < 1000) {\n",
        killers=(PINNED, PYTHON + "test_pinned_chunks_stay_until_they_are_unpinned"),
    ),
    Mutant(
        name="room-is-promised-for-all-of-a-text",
        breaks="reserve() promises what a windowed sequence can hold at a time",
        file="csrc/pager/windows.cc",
        old="  return std::min(more, std::max(at_a_time - own, of_a_forward));\n",
        new="  return std::max(more, std::min(at_a_time - own, of_a_forward));\n",
        killers=(PROMISE, LONG),
    ),
    Mutant(
        name="what-was-let-go-is-not-promised-again",
        breaks="a sequence that was admitted can grow to what was reserved",
        file="csrc/pager/commit.cc",
        old="    sequences_.reserve_again(*part.sequence);\n",
        new="",
        killers=(PYTHON + "test_a_promise_is_kept_chunk_by_chunk_beside_others", PROMISE),
    ),
    Mutant(
        name="a-fork-takes-its-parents-room",
        breaks="a sequence that was admitted can grow to what was reserved, forked or not",
        file="csrc/pager/sequences.cc",
        old='  const HomesAside homes(residency_.budget(), shared, "fork");\n',
        new="",
        killers=(PARTING,),
    ),
    Mutant(
        name="a-layer-looks-behind-the-pagers-window",
        breaks="a layer that looks further back than the pager keeps is refused",
        file="csrc/pager/running_forward.cc",
        old="      (attend_options.window == 0 || attend_options.window > options_.window)) {\n",
        new="      attend_options.window < 0) {\n",
        killers=(PYTHON + "test_a_layer_that_looks_further_back_than_the_pager_is_refused",),
    ),
    Mutant(
        name="shares-are-told-of-chunks-that-are-gone",
        breaks="what residency hears of a windowed sequence is of chunks that it holds",
        file="csrc/cuda/score_items.cuh",
        old="  if (p.kind == 0) return {part.held, least(",
        new="  if (p.kind == 0) return {0, least(",
        killers=(SHARES,),
    ),
    Mutant(
        name="what-was-released-was-all-exact",
        breaks="10: provenance is transitive, also over what was let go",
        file="csrc/pager/windows.cc",
        old="    ++sequence.released_worth[static_cast<size_t>(ledger_[id].provenance)];\n",
        new="    ++sequence.released_worth[0];\n",
        killers=(PYTHON + "test_chunks_that_were_not_exact_are_proven_as_what_they_were",),
    ),
    Mutant(
        name="a-wider-window-is-content-with-less",
        breaks="a pager whose window shows more than was saved refuses the snapshot",
        file="csrc/pager/restore_checks.cc",
        old="  if (options.window == 0 || options.window > before.window) {\n",
        new="  if (options.window == 0) {\n",
        killers=(PYTHON + "test_a_pager_that_would_look_behind_what_is_saved_refuses_the_window",),
    ),
    Mutant(
        name="damage-counts-chunks-from-the-file",
        breaks="damage is told by its place in the text",
        file="csrc/pager/chunk_files.cc",
        old="  if (error.chunk < 0 || in_file == chunk) return error;\n",
        new="  if (error.chunk < 0 || in_file >= 0) return error;\n",
        killers=(PYTHON + "test_damage_is_told_by_its_place_in_the_text",),
    ),
    Mutant(
        name="released-tokens-of-any-sign",
        breaks="what a session section says of released tokens is checked before it is used",
        file="python/kvpager/_runtime/released.py",
        old="    if int(ids.min()) < 0:\n",
        new="    if False:\n",
        killers=(PYTHON + "test_a_malformed_field_is_damage_and_named",),
    ),
)
