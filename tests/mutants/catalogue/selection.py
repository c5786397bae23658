"""What a row attends to: its own query, sealed summaries, the configuration; never residency."""

from mutants.mutant import Mutant

SELECT = "cpp/kernels/select_test.cc::"
PAGER_POOL = "python/test_pager_pool.py::"
PAGER_PLACEMENT = "python/test_pager_placement.py::"

DEFINITION = (
    "cpp/kernels/select_test.cc::"
    "selection equals the definition at every position, window and configuration"
)
PLACEMENT = (
    "cpp/pager/residency_test.cc::"
    "attention outputs have the same bits wherever chunks live and whatever was evicted"
)
SCAN = (
    "cpp/pager/scan_test.cc::"
    "a score is that of a row and a chunk alone, whatever rows and threads share a scan"
)

SELECTION = (
    Mutant(
        name="candidates-inside-the-recent-window",
        breaks="8: the recent window of row p starts at floor((p + 1 - R) / C)",
        file="csrc/kernels/select.cc",
        old="std::max<int64_t>(0, position + 1 - selection.recent) / chunk_tokens;",
        new="std::max<int64_t>(0, position + chunk_tokens - selection.recent) / chunk_tokens;",
        killers=(DEFINITION,),
    ),
    Mutant(
        name="ties-all-taken",
        breaks="8: the order of chunks is total; of equal scores the first ids are taken",
        file="csrc/kernels/select.cc",
        old="chosen = order > threshold || (order == threshold && ties-- > 0);",
        new="chosen = order >= threshold;",
        killers=(
            SELECT + "equal scores are taken in order of chunk id",
            PAGER_POOL + "test_ties_are_broken_by_chunk_id_every_time",
        ),
    ),
    Mutant(
        name="nan-score-is-the-best",
        breaks="8: NaN has a place in the order, below everything",
        file="csrc/kernels/select.cc",
        old="  if ((bits & ~kSign) > kInfinity) return 0;\n",
        new="  if ((bits & ~kSign) > kInfinity) return ~uint64_t{0};\n",
        killers=(SELECT + "both zeros are equal, NaN is the worst score and infinity the best",),
    ),
    Mutant(
        name="selection-of-another-row",
        breaks="8: a row selects by its own query, not by one of its forward",
        file="csrc/pager/scan.cc",
        old="read_query(q, row.row, ",
        new="read_query(q, rows.front().row, ",
        killers=(
            PAGER_PLACEMENT + "test_threads_packing_and_padding_change_no_bit",
            "model/test_pure_function_of_tokens.py::"
            "test_a_prefill_in_pieces_of_any_length_gives_the_same_bits[topk]",
        ),
    ),
    Mutant(
        name="selection-of-what-is-resident",
        breaks="8: what is attended to does not follow what is resident",
        file="csrc/pager/host_select.cc",
        old="      const double* of_chunk = scan_.scores(i, h);\n",
        new="""\
      const double* of_chunk = scan_.scores(i, h);
      const Sequence& sequence = *forward.parts[p].sequence;
      std::vector<double> seen;
      for (int64_t chunk = row.range.begin; chunk < row.range.end; ++chunk) {
        const bool resident = ledger_[sequence.use(chunk).record].resident();
        seen.push_back(resident ? of_chunk[chunk - row.range.begin] : -1e30);
      }
      of_chunk = seen.data();
""",
        killers=(PLACEMENT, PAGER_POOL + "test_what_is_resident_is_not_what_is_attended_to"),
    ),
    Mutant(
        name="a-summary-is-kept-if-there-is-one",
        breaks="9: a slot's summary is that of the chunk now in it, not of the one before",
        file="csrc/pager/sealing.cc",
        old="    backend_.summarize(block, seal->summary);\n",
        new="    const std::byte* kept = backend_.summary(seal->summary);\n"
        "    if (std::all_of(kept, kept + 64, [](std::byte b) { return b == "
        "std::byte{0}; })) {\n"
        "      backend_.summarize(block, seal->summary);\n"
        "    }\n",
        killers=(PAGER_POOL + "test_a_sequence_in_reused_records_has_its_own_summaries",),
    ),
    Mutant(
        name="a-restored-chunk-finds-a-stale-summary",
        breaks="9: a restored chunk has the summary that was saved with it",
        file="csrc/pager/residency.cc",
        old="  record.summary_pending = true;\n",
        new="  record.summary_pending = false;\n",
        killers=(
            PAGER_POOL + "test_restored_chunks_score_as_they_did",
            "cpp/pager/restore_test.cc::"
            "a prefix adopted from a restored sequence that never ran has its summaries",
        ),
    ),
    Mutant(
        name="summary-of-the-page-before",
        breaks="9: a summary is that of its own layer and kv head",
        file="csrc/pager/config.cc",
        old="bits2::summarize(layout.of_layer(layer), chunk + layout.page_offset(layer, head),",
        new="bits2::summarize(layout.of_layer(layer), "
        "chunk + layout.page_offset(layer, head > 0 ? head - 1 : 0),",
        killers=(
            PAGER_PLACEMENT
            + "test_top_k_takes_the_sinks_the_recent_window_always_and_the_best_of_the_rest",
        ),
    ),
    Mutant(
        name="every-piece-of-a-scan-has-the-room-of-the-first",
        breaks="8: every candidate has the score of its own summary, however many there are",
        file="csrc/pager/scan.cc",
        old="first_[slot] + (item.begin - range.begin));",
        new="first_[slot]);",
        killers=(SCAN,),
    ),
    Mutant(
        name="candidates-after-the-last-whole-piece-are-not-scored",
        breaks="8: every candidate has the score of its own summary, however many there are",
        file="csrc/pager/scan.cc",
        old="begin < all.end; begin += kPiece",
        new="begin + kPiece <= all.end; begin += kPiece",
        killers=(SCAN,),
    ),
    Mutant(
        name="rows-that-share-a-scan-share-its-beginning",
        breaks="8: a row's candidates have the scores of their own summaries, in any company",
        file="csrc/pager/scan.cc",
        old="scores + std::max<int64_t>(0, rows[order_[i]].range.begin - all.begin);",
        new="scores;",
        killers=(SCAN,),
    ),
    Mutant(
        name="the-next-forward-has-the-summaries-of-this-one",
        breaks="9: a summary is found by its own sequence's forwards alone",
        file="csrc/pager/host_attend.cc",
        old="  parts_.assign(forward->parts.size(), {});\n",
        new="  parts_.resize(forward->parts.size());\n",
        killers=(
            "cpp/pager/forward_test.cc::"
            "what a forward looked up for its sequence is nothing to the next one's",
        ),
    ),
    Mutant(
        name="summary-cache-outlives-its-forward",
        breaks="8: a row's candidates have the scores of their own summaries",
        file="csrc/pager/scan.cc",
        old="bases[static_cast<size_t>(i)] + offset;",
        new="bases[static_cast<size_t>(i - item.begin)] + offset;",
        killers=(
            PAGER_PLACEMENT
            + "test_top_k_takes_the_sinks_the_recent_window_always_and_the_best_of_the_rest",
        ),
    ),
)
