"""Files: what is read is verified, what is saved is the content and nothing else."""

from mutants.mutant import Mutant

CORRUPTION = "cpp/snapshot/corruption_test.cc::"
ROUND_TRIP = "cpp/snapshot/round_trip_test.cc::"
DAMAGE = "cpp/pager/damage_test.cc::"
PIECES = (
    "cpp/snapshot/verify_test.cc::"
    "DamageInTheFirstAndLastOfEachReadIsFoundAndWhatIsLeftForAShortLastReadToo"
)

SNAPSHOTS = (
    Mutant(
        name="a-replaced-file-is-opened-further",
        breaks="a file that is replaced keeps the permissions that it lacks",
        file="csrc/snapshot/output_file.cc",
        old=" wanted &= there.st_mode;",
        new=" wanted &= 0666;",
        killers=(
            "python/test_store_permissions.py::"
            "test_a_file_that_is_replaced_keeps_the_permissions_that_it_lacks",
        ),
    ),
    Mutant(
        name="small-files-have-the-umasks-permissions",
        breaks="every file of a store is its owner's alone",
        file="python/kvpager/stores/durable.py",
        old="            set_mode(file.fileno(), kept_mode(path, mode))",
        new="            set_mode(file.fileno(), 0o644)",
        killers=(
            "python/test_store_permissions.py::test_everything_in_a_store_is_its_owners_alone",
        ),
    ),
    Mutant(
        name="what-is-no-file-is-no-manifest",
        breaks="what lies among manifests and is no regular file may need any pack",
        file="python/kvpager/stores/catalogue.py",
        old="            self._add_irregular(file, sidecars)\n",
        new="            pass\n",
        killers=("python/test_store_irregular.py::test_gc_keeps_the_packs_of_what_it_cannot_read",),
    ),
    Mutant(
        name="a-store-that-lost-its-settings-is-new",
        breaks="a store with packs and no store.json is an error, not one without a budget",
        file="python/kvpager/stores/creation.py",
        old="        if there := [name for name in inside if not is_temporary(name)]:",
        new="        if there := [name for name in inside if False]:",
        killers=(
            "python/test_store_irregular.py::"
            "test_a_store_without_its_settings_is_an_error_and_not_one_without_a_budget",
        ),
    ),
    Mutant(
        name="a-hash-forgets-a-block",
        breaks="checksums are XXH3, at every length",
        file="csrc/hash/xxh3_stripes.h",
        old="    sums.scramble(kSecret + kSecretBytes - kStripe);\n",
        new="    if (block > 0) sums.scramble(kSecret + kSecretBytes - kStripe);\n",
        killers=("cpp/hash/xxh3_test.cc::the published vectors",),
    ),
    Mutant(
        name="slices-are-read-unverified",
        breaks="every layer of every chunk is verified when it is read",
        file="csrc/snapshot/chunk_source.cc",
        old="  const uint64_t computed = slice_checksum(slice, layout().slice_bytes(layer));\n"
        "  if (computed == expected) return {};",
        new="  const uint64_t computed = slice_checksum(slice, layout().slice_bytes(layer));\n"
        "  if (computed != 0) return {};",
        killers=(
            CORRUPTION + "AFlippedByteOfThePayloadFailsItsSliceAndNoOther",
            "model/test_defects_snapshots.py::"
            "test_a_flipped_bit_is_an_error_that_names_its_place_and_costs_nothing_else",
        ),
    ),
    Mutant(
        name="summaries-are-read-unverified",
        breaks="a damaged summary is found, and made again from its chunk",
        file="csrc/snapshot/chunk_source.cc",
        old="  const uint64_t computed = xxh3_64(summary, static_cast<size_t>(summary_bytes()));\n"
        "  if (computed == expected) return {};",
        new="  const uint64_t computed = xxh3_64(summary, static_cast<size_t>(summary_bytes()));\n"
        "  if (computed != 0) return {};",
        killers=(
            CORRUPTION + "EveryFlippedByteOfTheSummariesFailsTheirReadAndLeavesThePayloadUsable",
            "model/test_recompute.py::test_damaged_summaries_are_made_again_from_their_chunks",
        ),
    ),
    Mutant(
        name="a-size-is-believed",
        breaks="12: the reader validates a size before it allocates for it",
        file="csrc/snapshot/metadata.cc",
        old="""\
  expect_size(section, bytes_of(count, stride, "chunks.size", path),
              str(count, " chunks for ", meta->tokens.size(), " tokens, ", stride, " bytes each"),
              path);
""",
        new="",
        killers=(
            "cpp/snapshot/attacks_test.cc::"
            "EverySectionOfAManifestDroppedDoubledSwappedOrResizedIsATypedError",
        ),
    ),
    Mutant(
        name="hints-enter-the-digest",
        breaks="11: scores and ages are outside the logical digest",
        file="csrc/snapshot/metadata.cc",
        old="{encode_layout(meta), meta.fingerprint, encode_tokens(meta.tokens),",
        new="{encode_layout(meta), meta.fingerprint, meta.session, encode_tokens(meta.tokens),",
        killers=(
            ROUND_TRIP + "TheLogicalDigestFollowsContentAndIgnoresHintsSessionAndUnknownParts",
        ),
    ),
    Mutant(
        name="rows-after-the-tail-are-saved",
        breaks="11: a snapshot is a function of content, not of what was in a block before",
        file="csrc/pager/freeze.cc",
        old="  zero_rows_after(layout_, tail->data(), valid);\n",
        new="",
        killers=(
            "cpp/pager/freeze_test.cc::"
            "the first positions of a sequence are saved as if it had never held more",
        ),
    ),
    Mutant(
        name="the-chain-is-not-proved",
        breaks="a restore proves that tokens, fingerprint and salt are those of the chunks",
        file="csrc/pager/restore_checks.cc",
        old="      if (names[i] != name(first + i)) refuse_link(reader, first + i);\n",
        new="",
        killers=(
            "cpp/pager/restore_test.cc::"
            "another salt, fingerprint, layout or scorer is refused, naming what differs, and "
            "nothing changes",
            "hostile/test_corruption_classes.py::"
            "test_tokens_or_chunk_table_of_another_file_do_not_give_the_chain",
        ),
    ),
    Mutant(
        name="the-chain-of-an-old-snapshot-is-not-verified",
        breaks="the hashes of files of before 1.2 still show what is damaged or mixed up",
        file="csrc/pager/restore_checks.cc",
        old="    if (!(hash == legacy_hash(chunk.chain_hash))) refuse_link(reader, i);\n",
        new="",
        killers=(
            "python/test_golden_snapshots.py::"
            "test_the_chain_of_hashes_of_an_old_snapshot_is_still_verified",
        ),
    ),
    Mutant(
        name="an-old-snapshot-keeps-its-hashes-for-names",
        breaks="chunks of files of before 1.2 are renamed as they are read",
        file="csrc/pager/restore.cc",
        old="restore.plan(file_namespace == options_.namespace_key && !meta.legacy_names);",
        new="restore.plan(file_namespace == options_.namespace_key);",
        killers=(
            "python/test_golden_snapshots.py::"
            "test_what_was_renamed_as_it_was_read_is_found_by_its_new_names",
        ),
    ),
    Mutant(
        name="approximate-chunks-restored-as-exact",
        breaks="10: what is restored as approximate is never served as exact",
        file="csrc/pager/restore.cc",
        old="worst_(worst_of(released_worth_, provenance))",
        new="worst_(worst_of(released_worth_, Provenance::kExact))",
        killers=(
            "cpp/pager/restore_test.cc::"
            "what is restored as approximate is never served as exact, nor what follows it",
            "model/test_fingerprint.py::"
            "test_a_session_restored_as_approximate_shares_nothing_as_exact",
        ),
    ),
    Mutant(
        name="a-frozen-sequence-holds-no-chunks",
        breaks="a frozen sequence keeps what it saves while the session goes on",
        file="csrc/pager/freeze.cc",
        old="  for (const ChunkUse& use : kept.sealed) residency_.add_reference(use.record);\n",
        new="  for (const ChunkUse& use : kept.sealed) {\n"
        "    --ledger_[use.record].references;\n"
        "    residency_.add_reference(use.record);\n"
        "  }\n",
        killers=(
            "cpp/pager/freeze_test.cc::"
            "what is frozen stays as it was while the sequence goes on, is trimmed and closed",
        ),
    ),
    Mutant(
        name="a-short-last-read-is-not-verified",
        breaks="verifying finds all damage there is, in the last layers of a chunk too",
        file="csrc/snapshot/verify.cc",
        old="for (int64_t layer = 0; layer < layout.layers; layer += most) {",
        new="for (int64_t layer = 0; layer + most <= layout.layers; layer += most) {",
        killers=(PIECES,),
    ),
    Mutant(
        name="the-last-chunk-of-a-read-is-not-verified",
        breaks="verifying finds all damage there is, in the last chunk of a read too",
        file="csrc/snapshot/verify.cc",
        old="""\
        for (int64_t i = 0; i < piece.count; ++i) {
          check_slices(""",
        new="""\
        for (int64_t i = 0; i < std::max<int64_t>(1, piece.count - 1); ++i) {
          check_slices(""",
        killers=(PIECES,),
    ),
    Mutant(
        name="a-save-is-not-synced",
        breaks="a snapshot that has its name is on the disk",
        file="csrc/snapshot/output_file.cc",
        old='  sync(file_.get(), "cannot sync the file to disk");\n',
        new="",
        killers=(
            "cpp/snapshot/faults_test.cc::AFailureAtAnyStepLeavesNothingAndKeepsTheOldSnapshot",
            "cpp/snapshot/faults_test.cc::"
            "AFailureAtAnyStepOfWritingAContentLeavesNothingAndKeepsTheOldSnapshot",
        ),
    ),
    Mutant(
        name="a-healed-chunk-keeps-no-token-ids",
        breaks="a chunk that was computed anew keeps its token ids itself",
        file="csrc/pager/residency.cc",
        old="  record.tokens = std::move(tokens);  // no longer the snapshot's\n",
        new="  static_cast<void>(tokens);\n",
        killers=(
            DAMAGE
            + "chunks that were computed anew hold on to nothing of the snapshot that rotted",
        ),
    ),
    Mutant(
        name="a-chunk-of-a-copy-holds-on-to-the-rotten-file",
        breaks="no metadata is kept for the sake of a chunk that is read from elsewhere",
        file="csrc/pager/residency.cc",
        old="  set_source(&record, reader, in_file);\n  record.damaged = false;\n",
        new="  record.source = reader;\n"
        "  record.source_chunk = in_file;\n"
        "  record.damaged = false;\n",
        killers=(
            DAMAGE
            + "chunks that are read from a sound copy hold on to nothing of the file that rotted",
        ),
    ),
    Mutant(
        name="a-name-heals-a-damaged-chunk",
        breaks="10: a damaged chunk is read from another file only where the bytes are the same",
        file="csrc/pager/restore.cc",
        old="  return residency_.checksums(found) == chunk(i).slice_checksum;\n",
        new="  return !residency_.checksums(found).empty();\n",
        killers=(
            DAMAGE
            + "a file with other bytes under the same names heals nothing and is itself restored",
        ),
    ),
    Mutant(
        name="scratch-of-a-prompt-is-kept",
        breaks="what a forward of many rows needed is given back when it ends",
        file="csrc/pager/host_bytes.cc",
        old="  workspace_.release();\n  scan_.release();\n",
        new="",
        killers=(
            "python/test_scratch.py::"
            "test_scratch_of_many_rows_is_told_and_given_back_when_the_forward_ends",
        ),
    ),
    Mutant(
        name="damage-on-disk-is-forgotten",
        breaks="nobody adopts a chunk that came back from disk with other bytes",
        file="csrc/pager/chunk_files.cc",
        old="    record.damaged = true;\n    throw StorageError",
        new="    throw StorageError",
        killers=("python/test_disk_tier.py::test_nobody_adopts_a_chunk_that_came_back_damaged",),
    ),
    Mutant(
        name="a-chunk-on-disk-is-healed-in-name-only",
        breaks="who computes a damaged chunk again writes it to its slot again",
        file="csrc/pager/sealing.cc",
        old="  backend_.write_home(block, Home{SlotId(), record.disk}, &seal->checksums);\n",
        new="  static_cast<void>(block);\n",
        killers=(
            "python/test_disk_tier.py::"
            "test_computing_a_damaged_chunk_again_heals_it_for_all_who_use_it",
        ),
    ),
    Mutant(
        name="a-restore-keeps-the-damaged-slot",
        breaks="a chunk that is read from a sound snapshot gives its damaged slot back",
        file="csrc/pager/residency.cc",
        old="  if (record.on_disk()) {\n",
        new="  if (false) {\n",
        killers=(
            "python/test_disk_tier.py::"
            "test_a_snapshot_of_the_same_bytes_takes_the_place_of_a_damaged_chunk",
        ),
    ),
    Mutant(
        name="the-spill-files-room-is-not-reserved",
        breaks="a full disk is refused when a pager is made",
        file="csrc/memory/disk_spill.cc",
        old="if (const int error = reserve(fd_, slots * slot_bytes)) {",
        new="if (const int error = 0) {",
        killers=(
            "python/test_disk_tier.py::test_the_spill_files_room_is_taken_when_the_pager_is_made",
        ),
    ),
    Mutant(
        name="a-dry-run-removes",
        breaks="a dry run of a collection touches no file",
        file="python/kvpager/stores/catalogue.py",
        old="            self.spared.append(path)\n",
        new="            self.spared.append(path)\n            remove(path)\n",
        killers=(
            "python/test_store_room.py::"
            "test_a_dry_run_lists_the_files_that_a_collection_then_removes_and_touches_none",
            "python/test_cli_store.py::test_gc_dry_run_lists_what_would_go_and_leaves_it",
        ),
    ),
    Mutant(
        name="a-writer-is-discarded-while-it-writes",
        breaks="a call of a writer that is in use is refused and changes nothing",
        file="csrc/bindings/snapshot.cc",
        old="      if (busy_.test_and_set()) {\n",
        new="      if (busy_.test_and_set() && false) {\n",
        killers=(
            "python/test_snapshot_writer.py::"
            "test_a_writer_that_is_discarded_while_it_writes_refuses_and_finishes",
        ),
    ),
    Mutant(
        name="weights-digest-without-buffers",
        breaks="equal fingerprint means equal weights: buffers are weights too",
        file="python/kvpager/held.py",
        old="in [*model.named_parameters(), *model.named_buffers()]:",
        new="in [*model.named_parameters()]:",
        killers=(
            "model/test_fingerprint.py::test_the_digest_sees_every_weight_and_survives_a_round_trip",
        ),
    ),
    Mutant(
        name="waived-fields-stay-exact",
        breaks="10: K/V computed under other numerics are approximate",
        file="python/kvpager/fingerprint.py",
        old='    return "approximate" if different else "exact"\n',
        new='    return "exact"\n',
        killers=(
            "model/test_fingerprint.py::"
            "test_a_session_restored_as_approximate_shares_nothing_as_exact",
            "model/test_fingerprint.py::"
            "test_numerics_are_refused_unless_approximate_results_are_accepted",
        ),
    ),
)
