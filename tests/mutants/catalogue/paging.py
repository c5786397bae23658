"""Where bytes live: nothing there may change a result, lose a chunk or claim what is not so."""

from mutants.mutant import Mutant

IDLE_TAILS = "python/test_idle_tails.py::"
PAGER_POOL = "python/test_pager_pool.py::"
RESIDENCY = "cpp/pager/residency_test.cc::"
DISK_TIER = "python/test_disk_tier.py::"
FREEZE = "cpp/pager/freeze_test.cc::"
FAULTS = "cpp/pager/faults_test.cc::"
CHUNK_NAMER = "cpp/core/chunk_namer_test.cc::"

PLACEMENT = (
    "cpp/pager/residency_test.cc::"
    "attention outputs have the same bits wherever chunks live and whatever was evicted"
)
SHARING = "cpp/pager/sharing_test.cc::"
ALLOCATIONS = "cpp/pager/allocations_test.cc::"
REFUSALS = "cpp/pager/refusals_test.cc::"
FORWARD = "cpp/pager/forward_test.cc::"

PAGING = (
    Mutant(
        name="pinned-chunks-are-victims",
        breaks="3: a pinned chunk is resident and never a victim",
        file="csrc/pager/eviction.cc",
        old="record.resident() && record.pins == 0 &&",
        new="record.resident() &&",
        killers=(
            "cpp/pager/pins_test.cc::"
            "pinned chunks stay under every policy, through eviction storms and pressure",
            PAGER_POOL + "test_pins_hold_under_every_policy_and_only_for_the_half_open_range",
        ),
    ),
    Mutant(
        name="an-address-outlives-what-lay-there",
        breaks="7: a chunk that moves between two layers of a forward is read where it is then",
        file="csrc/pager/host_attend.cc",
        old="  if (addresses_stale_) {\n",
        new="  if (false) {\n",
        killers=(
            RESIDENCY
            + "chunks that leave the pool between two layers of a forward are found elsewhere",
        ),
    ),
    Mutant(
        name="write-through-misses-a-layer",
        breaks="4: a chunk comes back with the bytes it was sealed with",
        file="csrc/pager/host_bytes.cc",
        old="bytes, static_cast<size_t>(layout_.chunk_bytes()));\n"
        "  } else if (to.disk.value() >= 0) {",
        new="bytes,\n"
        "                static_cast<size_t>(layout_.chunk_bytes() - layout_.slice_bytes()));\n"
        "  } else if (to.disk.value() >= 0) {",
        killers=(PLACEMENT,),
    ),
    Mutant(
        name="chunk-tables-of-a-large-forward-are-kept",
        breaks="what a forward needed beyond the budget of scratch is given back when it ends",
        file="csrc/pager/host_bytes.cc",
        old="  forget(parts_);\n",
        new="",
        killers=(
            "python/test_scratch.py::test_chunk_tables_of_many_long_sequences_are_given_back",
        ),
    ),
    Mutant(
        name="a-trim-writes-into-the-sealed-chunk",
        breaks="4: sealed bytes never change; a trim into a chunk takes a copy of its rows",
        file="csrc/pager/host_bytes.cc",
        old="    std::memcpy(to, bytes, static_cast<size_t>(layout_.chunk_bytes()));\n",
        new="    std::memcpy(to, bytes, static_cast<size_t>(layout_.slice_bytes()));\n",
        killers=(
            "cpp/pager/trim_test.cc::"
            "trimming inside a shared chunk never changes what the others see",
        ),
    ),
    Mutant(
        name="a-fork-takes-an-empty-tail",
        breaks="a fork has the tokens of its parent, the unsealed ones too",
        file="csrc/pager/sequences.cc",
        old="    backend_.load(ledger_[parent.frontier[static_cast<size_t>(i)].record], "
        "copies[i]);\n",
        new="",
        killers=(
            SHARING + "a fork shares sealed chunks, copies the tail, and the two go their own ways",
            "model/test_sessions.py::test_a_fork_continues_alike_and_apart",
        ),
    ),
    Mutant(
        name="blocks-being-read-are-reused",
        breaks="5: a block that an attention call reads is not reused before it ends",
        file="csrc/pager/eviction.cc",
        old="    if (record.readers > 0) return Verdict::kStays;\n    const uint64_t arrives",
        new="    const uint64_t arrives",
        killers=(DISK_TIER + "test_what_a_call_reads_is_not_evicted_for_what_else_it_reads",),
    ),
    Mutant(
        name="what-is-lent-to-a-save-is-spilled",
        breaks="5: what is lent to a save stays where it is",
        file="csrc/pager/eviction.cc",
        old="record.borrows > 0 || host_slot_is_read(record, readers);",
        new="host_slot_is_read(record, readers);",
        killers=(
            FREEZE
            + "a save in progress makes no forward wait for room, and nothing it reads moves",
        ),
    ),
    Mutant(
        name="a-failed-commit-keeps-its-homes",
        breaks="6: every mutator is all-or-nothing",
        file="csrc/pager/sealing.cc",
        old="    if (seal.has_home) residency_.free_home(seal.home);\n",
        new="",
        killers=(
            FAULTS
            + "a failing write-through aborts the commit at every visit, and the retry succeeds",
        ),
    ),
    Mutant(
        name="a-failed-restore-keeps-its-references",
        breaks="12: a refused restore leaves the pager as it was",
        file="csrc/pager/restore.cc",
        old="residency_.release(ids_[i]);",
        new="static_cast<void>(i);",
        killers=(
            FAULTS + "a failing restore takes back the references it took to chunks that were here",
        ),
    ),
    Mutant(
        name="a-restore-counts-what-it-uses-as-room",
        breaks="6: room that was found is room that is owned",
        file="csrc/pager/restore.cc",
        old="  References references(residency_);\n"
        "  for (const Planned& planned : plan_) {\n"
        "    if (planned.existing.value() >= 0) references.add(planned.existing);\n"
        "  }\n"
        '  BlockLease tail(residency_, partial_ ? 1 : 0, "restore");\n',
        new='  BlockLease tail(residency_, partial_ ? 1 : 0, "restore");\n'
        "  References references(residency_);\n"
        "  for (const Planned& planned : plan_) {\n"
        "    if (planned.existing.value() >= 0) references.add(planned.existing);\n"
        "  }\n",
        killers=(
            REFUSALS + "a restore does not count the cached chunks it is about to use as room for "
            "its tail",
        ),
    ),
    Mutant(
        name="a-failed-restore-reverses-what-is-forgotten-first",
        breaks="the end of a chain is forgotten before its beginning",
        file="csrc/pager/restore.cc",
        old="    for (size_t i = ids_.size(); i-- > 0;) ",
        new="    for (size_t i = 0; i < ids_.size(); ++i) ",
        killers=(
            REFUSALS
            + "a restore that cannot read its tail leaves the cached chunks in their order",
        ),
    ),
    Mutant(
        name="cached-chunks-are-room-wherever-they-are",
        breaks="6: a refused begin leaves cached chunks as they were",
        file="csrc/pager/blocks.cc",
        old=" - (config_.blocks_are_homes() ? ledger_.cached() : 0);",
        new=" - ledger_.cached();",
        killers=(REFUSALS + "a refused begin forgets no cached chunk, wherever homes are",),
    ),
    Mutant(
        name="a-lease-takes-without-asking",
        breaks="6: a refused pin leaves cached chunks as they were",
        file="csrc/pager/lease.h",
        old="    residency.require_blocks(count, action);\n",
        new="    if (count < 0) residency.require_blocks(count, action);\n",
        killers=(REFUSALS + "a refused pin forgets no cached chunk",),
    ),
    Mutant(
        name="a-refused-reserve-takes-the-forwards-promise",
        breaks="6: a refused reserve changes nothing",
        file="csrc/pager/windows.cc",
        old="  if (wanted > sequence.reserved) {\n",
        new="  sequence.reserved_by_forward = 0;\n  if (wanted > sequence.reserved) {\n",
        killers=(REFUSALS + "a refused reserve leaves what the running forward was promised",),
    ),
    Mutant(
        name="frozen-sequences-can-be-named",
        breaks="what a save writes from is known to nobody else",
        file="csrc/pager/sequences.cc",
        old="  if (found == sequences_.end() || found->second.frozen) {\n",
        new="  if (found == sequences_.end()) {\n",
        killers=(FREEZE + "what a save writes from is no sequence that a number names",),
    ),
    Mutant(
        name="spills-are-not-counted",
        breaks="bytes_paged_out is what went from host memory to disk",
        file="csrc/pager/blocks.cc",
        old="  counters_.bytes_paged_out += layout_.chunk_bytes();\n",
        new="",
        killers=(
            DISK_TIER + "test_bytes_paged_out_are_those_that_host_memory_sent_to_disk",
            RESIDENCY
            + "bytes paged out are those that went from host memory to disk, and nothing else",
        ),
    ),
    Mutant(
        name="a-commit-allocates-behind-its-promise",
        breaks="6: a commit that finds no memory seals nothing",
        file="csrc/pager/sealing.cc",
        old="  if (!seals_.empty()) ledger_.expect(static_cast<int64_t>(seals_.size()));\n",
        new="",
        killers=(ALLOCATIONS + "the index of names grows at a commit or the commit is none",),
    ),
    Mutant(
        name="a-recall-without-memory-fails-the-commit",
        breaks="6: what is done only ahead of need fails nobody",
        file="csrc/pager/commit.cc",
        old="  } catch (const std::bad_alloc&) {  // only ahead of need\n",
        new="  } catch (const PagerError&) {\n",
        killers=(
            ALLOCATIONS + "rows become positions or none does, at every allocation of a commit",
        ),
    ),
    Mutant(
        name="a-lease-keeps-what-nobody-took-over",
        breaks="1: every block is free or owned by one record",
        file="csrc/pager/lease.h",
        old="    for (; next_ < items_.size(); ++next_) Kind::free(residency_, items_[next_]);\n",
        new="",
        killers=(
            ALLOCATIONS + "a snapshot is restored or nothing of it, at every allocation",
            ALLOCATIONS + "a forward begins or does not, at every allocation",
        ),
    ),
    Mutant(
        name="rejected-rows-become-positions",
        breaks="14: rows that were not accepted are as if they had never been",
        file="csrc/pager/commit.cc",
        old="    count.push_back(part.commit_count);\n",
        new="    count.push_back(std::max<int64_t>(0, part.commit_count - 1));\n",
        killers=(
            FORWARD + "rows become positions, chunk by chunk, whatever the split into forwards",
        ),
    ),
    Mutant(
        name="values-may-be-infinite",
        breaks="14: non-finite keys or values abort the forward, naming layer and position",
        file="csrc/kernels/rows.cc",
        old="if (!row_fits(table, k, layout.k_dtype, row) || "
        "!row_fits(table, v, layout.v_dtype, row)) {",
        new="if (!row_fits(table, k, layout.k_dtype, row)) {",
        killers=(
            FORWARD
            + "keys and values that are not finite abort the forward, naming layer and position",
            PAGER_POOL
            + "test_keys_or_values_that_are_not_finite_abort_the_forward_with_layer_and_position",
        ),
    ),
    Mutant(
        name="an-abort-keeps-the-forwards-blocks",
        breaks="14: an aborted forward leaves every sequence as it was",
        file="csrc/pager/running_forward.cc",
        old="  end_parts(forward_.get());\n",
        new="  for (ForwardPart& part : forward_->parts) part.sequence->part = -1;\n",
        killers=(
            FORWARD + "an abort at any point leaves every sequence as it was, and a retry succeeds",
        ),
    ),
    Mutant(
        name="any-row-count-is-exact",
        breaks="10: rows of a forward of another count are worth `decode`, not `exact`",
        file="csrc/pager/commit.cc",
        old="         (rows == options_.rows ||",
        new="         (rows > 0 || rows == options_.rows ||",
        killers=(
            FORWARD
            + "a forward of fewer than M rows makes chunks of provenance decode, which nobody "
            "adopts",
        ),
    ),
    Mutant(
        name="decode-chunks-can-be-found",
        breaks="10: only exact chunks are findable by hash",
        file="csrc/pager/sealing.cc",
        old="  if (seal.provenance == Provenance::kExact) ledger_.publish(",
        new="  ledger_.publish(",
        killers=(
            FORWARD
            + "a forward of fewer than M rows makes chunks of provenance decode, which nobody "
            "adopts",
        ),
    ),
    Mutant(
        name="provenance-is-forgotten-at-the-next-chunk",
        breaks="10: provenance is transitive: what follows approximate rows is not exact",
        file="csrc/pager/sealing.cc",
        old="    seal.provenance = std::max(sequence.provenance, provenance);\n",
        new="    seal.provenance = provenance;\n",
        killers=(
            SHARING + "only exact chunks are adopted, and what follows another kind is never exact",
        ),
    ),
    Mutant(
        name="a-name-without-its-provenance",
        breaks="10: other provenance has other hashes",
        file="csrc/core/chunk_namer.cc",
        old="      message[4] = static_cast<uint64_t>(link.provenance);\n",
        new="      message[4] = 0;\n",
        killers=(
            CHUNK_NAMER
            + "a name depends on every token, their order and number, the parent and the "
            "provenance",
        ),
    ),
    Mutant(
        name="a-hash-alone-is-believed",
        breaks="prefix reuse compares token ids, not only a name",
        file="csrc/core/ledger.cc",
        old="      !std::equal(tokens, tokens + count, record.tokens.begin())) {",
        new="      tokens == nullptr) {",
        killers=(
            "cpp/core/ledger_test.cc::"
            "a name alone is not believed: tokens and their number are compared",
        ),
    ),
    Mutant(
        name="names-without-a-key",
        breaks="names cannot be computed, or collided, without the salt",
        file="csrc/core/chunk_namer.cc",
        old="  return Blake2b(kNameBytes, key.data(), kNameBytes, kChunkPerson);\n",
        new="  (void)key;\n  return Blake2b(kNameBytes, nullptr, 0, kChunkPerson);\n",
        killers=(
            "python/test_chunk_names.py::test_nobody_without_the_salt_can_compute_a_name",
            CHUNK_NAMER + "namespace and salt of a name cannot be moved into one another",
        ),
    ),
    Mutant(
        name="lanes-mix-their-messages",
        breaks="several names made at a time are those of each alone",
        file="csrc/core/blake2b_v3.cc",
        old="word_at(from[3] + 8 * i)};",
        new="word_at(from[2] + 8 * i)};",
        killers=(
            "cpp/core/blake2b_test.cc::"
            "several messages at a time have the digests of each alone, at every length",
        ),
    ),
    Mutant(
        name="salts-share",
        breaks="tenants with other salts share no chunk",
        file="csrc/core/chunk_namer.cc",
        old="  message += salt;\n",
        new="",
        killers=(
            SHARING + "salts, tenants, do not share",
            "model/test_pure_function_of_tokens.py::test_a_salt_shares_nothing",
        ),
    ),
    Mutant(
        name="equal-names-swap-bytes",
        breaks="10: a chunk whose bytes differ from those of its name is not replaced by them",
        file="csrc/pager/sealing.cc",
        old="if (!found || !(residency_.checksums(*found) == checksums(seal))) return;",
        new="if (!found) return;",
        killers=(
            SHARING
            + "a chunk with the same tokens but other bytes is never swapped for the one that was "
            "there",
        ),
    ),
    Mutant(
        name="scores-of-the-gone-steer-the-next",
        breaks="a sequence that is gone steers nobody's eviction",
        file="csrc/pager/residency.cc",
        old="    record.score = 0;  // a closed sequence has no say in later evictions\n",
        new="",
        killers=(
            RESIDENCY
            + "scores of a sequence that is gone do not steer the eviction of the next one's "
            "chunks",
        ),
    ),
    Mutant(
        name="admission-forgets-its-promises",
        breaks="2: what is reserved for one sequence is not there for another",
        file="csrc/pager/home_budget.cc",
        old="  const int64_t all = total_of(committed, more);",
        new="  const int64_t all = total_of(referenced, more);",
        killers=(
            "cpp/pager/admission_test.cc::"
            "what is reserved for one sequence is not there for another",
        ),
    ),
    Mutant(
        name="a-spilled-chunk-is-not-verified",
        breaks="bytes that come back from disk are compared with what was written",
        file="csrc/pager/chunk_files.cc",
        old="  if (slice_checksum(slice, layout_.slice_bytes(layer)) != written) {",
        new="  if (slice == nullptr || written == ~uint64_t{}) {",
        killers=(DISK_TIER + "test_a_flipped_bit_on_disk_is_named_with_its_chunk_and_layer",),
    ),
    Mutant(
        name="a-tail-leaves-the-pool-without-its-bytes",
        breaks="an idle session's open chunk comes back bit for bit",
        file="csrc/pager/blocks.cc",
        old="    backend_.write_home(record.block, home, &record.checksums);\n",
        new="",
        killers=(
            IDLE_TAILS
            + "test_many_idle_sequences_share_a_small_pool_and_every_bit_is_as_in_a_large_one"
            "[q8-host-cpu]",
        ),
    ),
    Mutant(
        name="a-tail-leaves-during-its-forward",
        breaks="the open chunks of a running forward stay in the pool",
        file="csrc/pager/begin.cc",
        old="      held_.add(use.record);\n",
        new="",
        killers=(
            IDLE_TAILS + "test_tails_of_the_running_forward_and_pinned_ones_stay_in_the_pool",
        ),
    ),
    Mutant(
        name="a-tail-takes-the-home-of-a-chunk-that-seals",
        breaks="homes that a forward needs are not given to open chunks",
        file="csrc/pager/begin.cc",
        old='  const HomesAside homes(residency_.budget(), new_homes, "begin");\n',
        new='  HomesAside(residency_.budget(), new_homes, "begin");\n',
        killers=(IDLE_TAILS + "test_homes_that_a_forward_needs_are_not_given_to_tails",),
    ),
)
