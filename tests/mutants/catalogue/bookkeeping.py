"""Books kept up to date instead of counted anew: whatever they say has to be what counting says."""

from mutants.mutant import Mutant

PAGER_SPANS = "python/test_pager_spans.py::"
LEDGER = "cpp/core/ledger_test.cc::"
ORDER = "cpp/core/eviction_order_test.cc::"
SPANS = "cpp/pager/spans_test.cc::"
COUNTED = LEDGER + "what is open or pinned is counted, whatever happens to it first"
NAMED = (
    SPANS + "whoever leaves the pool is whom the policy names, whatever has happened since it came"
)
CUT = SPANS + "a forward is the same however its rows are cut into spans"
WHOLE = (
    "python/test_pager_spans.py::"
    "test_a_span_seals_the_chunks_it_fills_whole_and_under_their_own_names"
)

BOOKKEEPING = (
    Mutant(
        name="preconditions-are-not-checked",
        breaks="a checking build ends at a precondition that does not hold",
        file="csrc/include/kvpager/require.h",
        old="#ifdef KVPAGER_CHECK_INVARIANTS\n",
        new="#ifdef KVPAGER_CHECKS_NOTHING\n",
        killers=(
            "cpp/core/require_test.cc::"
            "a precondition that does not hold ends a checking build with its words and its line",
        ),
    ),
    Mutant(
        name="the-frontier-takes-blocks-before-what-it-reads",
        breaks="a begin that is refused for want of blocks forgets no cached chunk",
        file="csrc/pager/begin.cc",
        old="    hold_visible(*next, &readers, &missing);\n",
        new="",
        killers=(
            "cpp/pager/refusals_test.cc::"
            "a refused begin forgets none for the rows that it would have added",
        ),
    ),
    Mutant(
        name="victims-in-the-order-before-the-forward",
        breaks="who leaves the pool is whom the policy names by what it knows now",
        file="csrc/pager/running_forward.cc",
        old="  residency_.invalidate_eviction();  // nothing is read any more\n",
        new="",
        killers=(NAMED,),
    ),
    Mutant(
        name="an-unpinned-chunk-never-leaves",
        breaks="3: a pin that was released keeps nothing",
        file="csrc/pager/pins.cc",
        old="    residency_.note_evictable(sequence.use(chunk).record);\n",
        new="",
        killers=(NAMED,),
    ),
    Mutant(
        name="what-a-layer-read-never-leaves",
        breaks="who was read by an attention call may leave when it has ended",
        file="csrc/pager/eviction.cc",
        old="note_all(ledger_, &victims_, evictable_unread, ",
        new="note_all(ledger_, &victims_, evictable, ",
        killers=(
            "python/test_disk_tier.py::test_what_one_layer_read_gives_way_to_what_the_next_reads",
        ),
    ),
    Mutant(
        name="an-old-note-is-believed",
        breaks="who leaves the pool is whom the policy names by what it knows now",
        file="csrc/core/eviction_order.cc",
        old="  if (notes_.size() == notes_.capacity()) {\n"
        "    invalidate();\n"
        "  } else {\n"
        "    push(note);\n"
        "  }",
        new="  if (notes_.size() < notes_.capacity()) push(note);",
        killers=(
            ORDER + "an order that has no room left becomes stale and loses nothing silently",
        ),
    ),
    Mutant(
        name="who-is-noted-twice-is-two",
        breaks="2: no more blocks are promised than can be had",
        file="csrc/core/eviction_order.h",
        old="noted_twice ? Verdict::kOutdated : judge(next)",
        new="judge(next)",
        killers=(ORDER + "a record that is noted twice is counted once",),
    ),
    Mutant(
        name="a-dropped-record-stays-counted",
        breaks="3: what is free to be pinned is what is neither open nor pinned",
        file="csrc/core/ledger.cc",
        old="  if (record.cached) uncache(id);\n  held_ -= record.held() ? 1 : 0;\n",
        new="  if (record.cached) uncache(id);\n  held_ -= record.pins > 0 ? 1 : 0;\n",
        killers=(COUNTED,),
    ),
    Mutant(
        name="a-pinned-record-is-uncounted-when-sealed",
        breaks="3: what is free to be pinned is what is neither open nor pinned",
        file="csrc/core/ledger.cc",
        old="  held_ -= record.held() ? 0 : 1;\n",
        new="  --held_;\n",
        killers=(COUNTED,),
    ),
    Mutant(
        name="a-tag-is-taken-for-a-hash",
        breaks="10: a hash finds a candidate, and only its own",
        file="csrc/core/ledger.cc",
        old="entry.tag == tag && (*this)[entry.record].name == name",
        new="entry.tag == tag",
        killers=(
            LEDGER + "records are found whatever was dropped before, also those whose names "
            "begin alike",
        ),
    ),
    Mutant(
        name="a-span-leaves-out-the-last-token-of-a-chunk",
        breaks="10: a chunk's name covers all of its token ids",
        file="csrc/pager/sealing.cc",
        old="    const int64_t count = std::min(rows.count, stop - at);\n",
        new="    const int64_t count = std::min(rows.count, stop - at - 1);\n",
        killers=(WHOLE,),
    ),
    Mutant(
        name="a-span-sees-one-chunk-too-few",
        breaks="7: a row sees everything up to itself",
        file="csrc/pager/begin.cc",
        old="  const int64_t last = span.position + span.count - 1;\n",
        new="  const int64_t last = span.position + std::max<int64_t>(0, span.count - 2);\n",
        killers=(CUT,),
    ),
    Mutant(
        name="rows-of-a-second-span-are-not-committed",
        breaks="14: all rows that were accepted become positions",
        file="csrc/pager/commit.cc",
        old="    left -= more;\n",
        new="    left = 0;\n",
        killers=(CUT, PAGER_SPANS + "test_spans_of_one_sequence_may_lie_apart"),
    ),
    Mutant(
        name="a-refused-forward-keeps-its-sequences",
        breaks="6: a refused forward leaves every sequence as it was",
        file="csrc/pager/running_forward.cc",
        old="    part.sequence->part = -1;\n  }\n",
        new="  }\n",
        killers=(PAGER_SPANS + "test_a_sequence_that_a_refused_forward_named_is_free_again",),
    ),
)
