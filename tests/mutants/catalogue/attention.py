"""Our kernels: one order of operations, and rows that know of no other row."""

from mutants.mutant import Mutant

PAGER_POOL = "python/test_pager_pool.py::"
PAGER_PLACEMENT = "python/test_pager_placement.py::"
THREAD_COUNT = "cpp/kernels/thread_count_test.cc::"
ATTEND = "cpp/kernels/attend_test.cc::"
IN_ORDER = (
    ATTEND + "attention equals the documented order in every bit and binary64 within tolerance"
)
ONE_ROW = ATTEND + "one row on many threads has its splits computed apart and the same bits"
NEXT = (
    "cpp/kernels/next_tile_test.cc::"
    "the tile that is fetched ahead is the one that comes next, and each walk's last has none"
)
WAVES = ATTEND + "waves, block addresses and neighbours of other sequences change no bit"
PLACEMENT = (
    "cpp/pager/residency_test.cc::"
    "attention outputs have the same bits wherever chunks live and whatever was evicted"
)

ATTENTION = (
    Mutant(
        name="physical-order-walk",
        breaks="7: chunks are walked in logical order, wherever their bytes are",
        file="csrc/kernels/attend_walk.cc",
        old="""\
  for (int64_t c = split * kChunksPerSplit; c < (split + 1) * kChunksPerSplit; ++c) {
    scratch.queries.clear();
""",
        new="""\
  std::vector<int64_t> walk_order;
  for (int64_t c = split * kChunksPerSplit; c < (split + 1) * kChunksPerSplit; ++c) {
    walk_order.push_back(c);
  }
  const auto address = [&](int64_t c) { return c < table.chunks ? table.slices[c] : nullptr; };
  if (dense) {
    std::stable_sort(walk_order.begin(), walk_order.end(),
                     [&](int64_t a, int64_t b) { return address(a) < address(b); });
  }
  for (const int64_t c : walk_order) {
    scratch.queries.clear();
""",
        killers=(
            WAVES,
            PLACEMENT,
            PAGER_POOL + "test_block_placement_and_history_permute_nothing",
            PAGER_PLACEMENT + "test_an_eighth_of_the_pool_gives_the_same_bits_as_all_of_it",
        ),
    ),
    Mutant(
        name="splits-by-staging-capacity",
        breaks="7: partial sums end at absolute chunk indices, not where memory for a wave ends",
        file="csrc/kernels/attend_walk.h",
        old="""\
    reset_states(problem, walk, states);
    walk_split(problem, walk, walk.splits[i], chunk_limit, states, scratch);
    done(i, states);
""",
        new="""\
    if (i == piece.begin || states_of(i - 1) != states) reset_states(problem, walk, states);
    walk_split(problem, walk, walk.splits[i], chunk_limit, states, scratch);
    if (i + 1 == piece.end || states_of(i + 1) != states) done(i, states);
""",
        killers=(
            IN_ORDER,
            WAVES,
            "cpp/pager/residency_test.cc::"
            "waves of staging are cut at splits when a forward of many sequences fills it",
        ),
    ),
    Mutant(
        name="splits-by-number-of-rows",
        breaks="7: partial sums do not follow the number of rows of the call",
        file="csrc/kernels/attend_walk.h",
        old="""\
    reset_states(problem, walk, states);
    walk_split(problem, walk, walk.splits[i], chunk_limit, states, scratch);
    done(i, states);
""",
        new="""\
    const size_t together = problem.params.rows > 8 && !walk.in_pieces() ? 2 : 1;
    if (i % together == 0) reset_states(problem, walk, states);
    walk_split(problem, walk, walk.splits[i], chunk_limit, states, scratch);
    if (i % together + 1 == together || i + 1 == piece.end) done(i, states);
""",
        killers=(
            ATTEND
            + "a row alone equals the row among sixty-four, in any order and on any number of "
            "threads",
        ),
    ),
    Mutant(
        name="partials-merged-backwards",
        breaks="7: splits are merged in ascending order on any number of threads",
        file="csrc/kernels/attend.cc",
        old="for (size_t i = impl.pieces[next].begin; i < impl.pieces[next].end; ++i) {",
        new="for (size_t i = impl.pieces[next].end; i-- > impl.pieces[next].begin;) {",
        killers=(ONE_ROW,),
    ),
    Mutant(
        name="a-walk-drops-a-split-between-its-pieces",
        breaks="7: every split of a walk is in one of its pieces, however many threads there are",
        file="csrc/kernels/attend.cc",
        old="      begin = end;\n    }\n    walk.end_piece",
        new="      begin = end + 1;\n    }\n    walk.end_piece",
        killers=(ONE_ROW,),
    ),
    Mutant(
        name="pieces-are-merged-before-they-are-done",
        breaks="7: splits are merged once they are done",
        file="csrc/kernels/attend.cc",
        old="next < walk.end_piece && impl.done[next].load(); ++next) {",
        new="next < walk.end_piece; ++next) {",
        killers=(
            THREAD_COUNT + "splits that are done before those ahead of them wait to be merged",
        ),
    ),
    Mutant(
        name="a-halved-wave-skips-a-split",
        breaks="7: a wave that is taken in parts is taken as a whole",
        file="csrc/kernels/attend.cc",
        old="attend_wave(params, middle, split_end, workspace, pool);",
        new="attend_wave(params, middle + 1, split_end, workspace, pool);",
        killers=(
            THREAD_COUNT
            + "splits computed apart that would take too much memory are taken in parts, same bits",
        ),
    ),
    Mutant(
        name="factors-of-the-first-sixteen",
        breaks="a query's state is rescaled by its own factor, also beyond the first sixteen",
        file="csrc/kernels/attend_isa.cc",
        old="soften(params, params.queries + i, count, scores + i * tokens, rescale + i);",
        new="soften(params, params.queries + i, count, scores + i * tokens, rescale);",
        killers=(
            ATTEND
            + "a row alone equals the row among sixty-four, in any order and on any number of "
            "threads",
        ),
    ),
    Mutant(
        name="a-longer-row-is-rescaled-twice",
        breaks="what a query sees beyond its block's common end is added to what it has",
        file="csrc/kernels/attend_isa.cc",
        old="add(q, 1, common_end, queries[q].end, Start::kContinue, 0);",
        new="add(q, 1, common_end, queries[q].end, Start::kRescale, 0);",
        killers=(
            ATTEND
            + "a row alone equals the row among sixty-four, in any order and on any number of "
            "threads",
        ),
    ),
    Mutant(
        name="odd-elements-keep-their-neighbours-bits",
        breaks="bfloat16 is widened exactly, in every tier",
        file="csrc/kernels/vec_isa.h",
        old="_mm256_castsi256_ps(_mm256_and_si256(pairs, high))};",
        new="_mm256_castsi256_ps(_mm256_or_si256(_mm256_and_si256(pairs, high), "
        "_mm256_andnot_si256(high, pairs)))};",
        killers=(ATTEND + "every instruction-set tier gives the same bits",),
    ),
    Mutant(
        name="later-rows-of-a-tile-begin-anew",
        breaks="7: rows of a tile that are read in parts are one sum",
        file="csrc/kernels/attend_product_isa.h",
        old="    rows.start = Start::kContinue;\n",
        new="    rows.start = product.start;\n",
        killers=(ATTEND + "every instruction-set tier gives the same bits",),
    ),
    Mutant(
        name="a-sum-is-continued-in-another-order",
        breaks="an element of a sum stays in its lane from tile to tile",
        file="csrc/kernels/attend_product_isa.h",
        old="    Source::template place<kWidth>(sum[q]);\n",
        new="",
        killers=(ATTEND + "every instruction-set tier gives the same bits",),
    ),
    Mutant(
        name="the-tile-after-the-next-is-fetched",
        breaks="what is fetched ahead is the tile that comes next",
        file="csrc/kernels/attend_walk.cc",
        old="  int64_t next = c + 1;\n",
        new="  int64_t next = c + 2;\n",
        killers=(NEXT,),
    ),
    Mutant(
        name="every-head-fetches-the-tile-of-the-first",
        breaks="what is fetched ahead is the tile that comes next",
        file="csrc/kernels/attend_walk.cc",
        old="next == nullptr ? nullptr : next + layout.page_bytes() * walk.head;",
        new="next;",
        killers=(NEXT,),
    ),
    Mutant(
        name="unwritten-rows-times-zero",
        breaks="keys after the row contribute nothing: skipped, never multiplied by zero",
        file="csrc/kernels/attend_isa.cc",
        old="    if (queries[q].end < common_end) common_end = queries[q].end;\n",
        new="    const int lanes = (queries[q].end + 15) & ~15;\n"
        "    if (lanes < common_end) common_end = lanes;\n",
        killers=(IN_ORDER, PAGER_POOL + "test_rows_after_the_committed_length_are_never_read"),
    ),
    Mutant(
        name="scores-masked-by-adding",
        breaks="the score of an unwritten row is replaced, not added to: NaN - inf is NaN",
        file="csrc/kernels/attend_isa.cc",
        old="    x = keep_range(x, query.begin - t, query.end - t, -__builtin_inff());\n",
        new="    x = add(x, keep_range(splat(0.0f), query.begin - t, query.end - t,\n"
        "                          -__builtin_inff()));\n",
        killers=(PAGER_POOL + "test_rows_after_the_committed_length_are_never_read",),
    ),
    Mutant(
        name="two-roundings-for-fmaf",
        breaks="the documented order of operations uses fused multiply-adds",
        file="csrc/kernels/attend_product_isa.h",
        old="sum[q][w] = fma(broadcast, wide[w], sum[q][w]);",
        new="sum[q][w] = add(mul(broadcast, wide[w]), sum[q][w]);",
        killers=(IN_ORDER,),
    ),
    Mutant(
        name="nan-in-padding-aborts",
        breaks="14: what is in a padding row concerns nobody",
        file="csrc/kernels/rows.cc",
        old="""\
    if (rows[row].slice == nullptr) continue;
    if (!row_fits""",
        new="""\
    if (!row_fits""",
        killers=(PAGER_PLACEMENT + "test_threads_packing_and_padding_change_no_bit",),
    ),
    Mutant(
        name="padding-output-unwritten",
        breaks="a padding row's output is zero, not what was in memory",
        file="csrc/kernels/attend.cc",
        old="""\
          std::memset(out, 0, static_cast<size_t>(v_dim * element));
          continue;
""",
        new="""\
          continue;
""",
        killers=(WAVES,),
    ),
    Mutant(
        name="sliding-window-one-short",
        breaks="a row with window w sees the keys after position - w",
        file="csrc/kernels/attend_walk.cc",
        old="begin = std::max<int64_t>(0, position - problem.params.window + 1 - start);",
        new="begin = std::max<int64_t>(0, position - problem.params.window + 2 - start);",
        killers=(
            IN_ORDER,
            "model/test_stock_transformers.py::"
            "test_logits_of_a_prompt_larger_than_the_pool_are_those_of_transformers"
            "[mistral-float32]",
        ),
    ),
)
