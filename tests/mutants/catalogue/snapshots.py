"""Files: what is read is verified, what is saved is the content and nothing else."""

from mutants.mutant import Mutant

STORE_PERMISSIONS = "python/test_store_permissions.py::"
ENCRYPTION = "python/test_store_encryption.py::"
OWN_STORES = "python/test_own_stores.py::"
MANIFEST = "cpp/snapshot/manifest_test.cc::"
STORE_INDEX = "python/test_store_index.py::"
STORE_DAMAGE = "python/test_store_damage.py::"
FREEZE = "cpp/pager/freeze_test.cc::"
RESTORE = "cpp/pager/restore_test.cc::"
FINGERPRINT = "model/test_fingerprint.py::"
FAULTS = "cpp/snapshot/faults_test.cc::"
DISK_TIER = "python/test_disk_tier.py::"
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
            STORE_PERMISSIONS + "test_a_file_that_is_replaced_keeps_the_permissions_that_it_lacks",
        ),
    ),
    Mutant(
        name="small-files-have-the-umasks-permissions",
        breaks="every file of a store is its owner's alone",
        file="python/kvpager/stores/files.py",
        old="            set_mode(file.fileno(), kept_mode(path, mode))",
        new="            set_mode(file.fileno(), 0o644)",
        killers=(STORE_PERMISSIONS + "test_everything_in_a_store_is_its_owners_alone",),
    ),
    Mutant(
        name="a-file-is-readable-in-anothers-place",
        breaks="an encrypted file is read in its own place alone",
        file="python/kvpager/stores/access.py",
        old='return "/".join(Path(path).parts[-2:]) if self._in_store else ""',
        new='return ""',
        killers=(ENCRYPTION + "test_a_file_in_anothers_place_or_cut_off_is_refused",),
    ),
    Mutant(
        name="a-header-is-believed",
        breaks="every byte of an encrypted file is authenticated",
        file="python/kvpager/stores/encryption.py",
        old="            self._aead.decrypt(_HEADER_NONCE, header[-TAG_BYTES:], signed)",
        new="            pass",
        killers=(ENCRYPTION + "test_any_changed_byte_of_a_snapshots_files_is_refused",),
    ),
    Mutant(
        name="blocks-have-one-nonce",
        breaks="no nonce is used twice under one key",
        file="python/kvpager/stores/encryption.py",
        old='    return block.to_bytes(NONCE_BYTES, "little")',
        new="    return bytes(NONCE_BYTES)",
        killers=(ENCRYPTION + "test_no_nonce_is_used_twice_under_one_key",),
    ),
    Mutant(
        name="encrypted-files-have-their-snapshots-names",
        breaks="no file of an encrypted store has the name of a snapshot",
        file="python/kvpager/stores/encryption.py",
        old="return hmac.new(self._names, base.encode(), hashlib.sha256).hexdigest()[:40] + suffix",
        new="return name",
        killers=(ENCRYPTION + "test_no_file_has_a_token_a_key_a_value_or_a_name_of_a_text",),
    ),
    Mutant(
        name="the-index-of-an-encrypted-store-has-names",
        breaks="the index of an encrypted store has no name in clear",
        file="python/kvpager/stores/access.py",
        old="return self.secret.hide(text) if isinstance(self.secret, Secret) else text",
        new="return text",
        killers=(
            ENCRYPTION + "test_no_file_has_a_token_a_key_a_value_or_a_name_of_a_text",
            ENCRYPTION + "test_a_segments_name_is_in_no_file",
        ),
    ),
    Mutant(
        name="tenants-have-one-key",
        breaks="a tenant's store is opened by that tenant's key alone",
        file="python/kvpager/stores/encryption.py",
        old='b"tenant\\0" + self._tenant',
        new='b"tenant\\0"',
        killers=(ENCRYPTION + "test_without_its_key_a_store_is_refused_by_name",),
    ),
    Mutant(
        name="a-source-may-return-fewer-bytes",
        breaks="a source of ranges that returns too few bytes is an error of that read",
        file="csrc/bindings/python_files.cc",
        old="static_cast<uint64_t>(view->len) != bytes",
        new="static_cast<uint64_t>(view->len) > bytes",
        killers=(
            OWN_STORES
            + "test_what_a_source_raises_or_returns_wrongly_is_an_error_of_that_read_alone",
        ),
    ),
    Mutant(
        name="packs-are-files-whatever-opens-the-manifest",
        breaks="packs are read through the opener of their manifest",
        file="csrc/snapshot/packs.cc",
        old="opener ? opener(path) : open_files().open(path)",
        new="open_files().open(path)",
        killers=(
            MANIFEST + "AManifestAndItsPacksAreReadThroughAnOpenerAsFromFiles",
            OWN_STORES + "test_manifest_and_packs_are_both_opened_through_the_opener",
        ),
    ),
    Mutant(
        name="what-is-no-file-is-no-manifest",
        breaks="what lies among manifests and is no regular file may need any pack",
        file="python/kvpager/stores/catalogue.py",
        old="            self._put_snapshot(manifest, notes.get(name))\n",
        new="            pass\n",
        killers=(STORE_DAMAGE + "test_gc_keeps_the_packs_of_what_it_cannot_read",),
    ),
    Mutant(
        name="an-index-is-believed-whatever-the-files-are",
        breaks="who dies between a file and the index is found out",
        file="python/kvpager/stores/catalogue.py",
        old="if tuple(self._state()) == self._folders():\n            self._retry()",
        new="if tuple(self._state()) != ('', ''):\n            self._retry()",
        killers=(STORE_INDEX + "test_who_dies_between_a_file_and_the_index_is_found_out",),
    ),
    Mutant(
        name="packs-go-though-a-manifest-was-not-looked-at",
        breaks="no pack is removed while a manifest that changed could not be looked at",
        file="python/kvpager/stores/catalogue.py",
        old="return self._is_behind or any(",
        new="return any(",
        killers=(STORE_INDEX + "test_a_manifest_that_cannot_be_looked_at_costs_no_pack",),
    ),
    Mutant(
        name="files-changed-in-place-go-unseen",
        breaks="what is listed or opened has the files that were read",
        file="python/kvpager/stores/catalogue.py",
        old="return all(stamp == (self._stamp_of(path) or _NO_STAMP) for",
        new="return True or all(stamp == (self._stamp_of(path) or _NO_STAMP) for",
        killers=(STORE_INDEX + "test_what_was_changed_by_hand_is_seen_when_it_is_asked_for",),
    ),
    Mutant(
        name="a-question-reads-every-row",
        breaks="no call but a whole list looks at every row",
        file="python/kvpager/stores/index.py",
        old="CREATE INDEX use_of_pack ON use (pack, top);\n",
        new="",
        killers=(STORE_INDEX + "test_no_call_but_a_whole_list_looks_at_every_row",),
    ),
    Mutant(
        name="a-child-uses-its-parents-connection",
        breaks="a forked child opens a connection of its own",
        file="python/kvpager/stores/index.py",
        old="        if self._made_in.forked:\n            _abandoned.append(self._database)\n",
        new="        if False:\n            _abandoned.append(self._database)\n",
        killers=(STORE_INDEX + "test_a_forked_child_has_a_connection_of_its_own",),
    ),
    Mutant(
        name="a-full-disk-fails-what-is-saved",
        breaks="a save whose index cannot be written is a save",
        file="python/kvpager/stores/locked.py",
        old="                self._contents.index.close()\n",
        new="                raise\n",
        killers=(STORE_INDEX + "test_a_save_whose_index_cannot_be_written_is_a_save",),
    ),
    Mutant(
        name="a-store-that-lost-its-settings-is-new",
        breaks="a store with packs and no store.json is an error, not one without a budget",
        file="python/kvpager/stores/settings.py",
        old="        if there := [name for name in inside if not is_temporary(name)]:",
        new="        if there := [name for name in inside if False]:",
        killers=(
            STORE_DAMAGE
            + "test_a_store_without_its_settings_is_an_error_and_not_one_without_a_budget",
        ),
    ),
    Mutant(
        name="a-hash-forgets-a-block",
        breaks="checksums are XXH3, at every length",
        file="csrc/hash/xxh3_stripes.h",
        old="    sums.scramble(secret + kSecretBytes - kStripe);\n",
        new="    if (block > 0) sums.scramble(secret + kSecretBytes - kStripe);\n",
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
            "model/test_snapshots.py::"
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
        old="  digest.add(meta.fingerprint.data(), meta.fingerprint.size());\n",
        new="""\
  digest.add(meta.fingerprint.data(), meta.fingerprint.size());
  digest.add(meta.session.data(), meta.session.size());
""",
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
            FREEZE + "the first positions of a sequence are saved as if it had never held more",
        ),
    ),
    Mutant(
        name="the-chain-is-not-proved",
        breaks="a restore proves that tokens, fingerprint and salt are those of the chunks",
        file="csrc/pager/restore_checks.cc",
        old="      if (names[i] == name(first + i)) continue;\n",
        new="      continue;\n",
        killers=(
            RESTORE + "another salt, fingerprint or layout is refused, naming what differs, and "
            "nothing changes",
            "hostile/test_corruption_classes.py::"
            "test_tokens_or_chunk_table_of_another_file_do_not_give_the_chain",
        ),
    ),
    Mutant(
        name="approximate-chunks-restored-as-exact",
        breaks="10: what is restored as approximate is never served as exact",
        file="csrc/pager/restore.cc",
        old="worst_(worst_of(released_worth_, provenance))",
        new="worst_(worst_of(released_worth_, Provenance::kExact))",
        killers=(
            RESTORE
            + "what is restored as approximate is never served as exact, nor what follows it",
            FINGERPRINT + "test_a_session_restored_as_approximate_shares_nothing_as_exact",
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
            FREEZE
            + "what is frozen stays as it was while the sequence goes on, is trimmed and closed",
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
            FAULTS + "AFailureAtAnyStepLeavesNothingAndKeepsTheOldSnapshot",
            FAULTS + "AFailureAtAnyStepOfWritingAContentLeavesNothingAndKeepsTheOldSnapshot",
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
        old="  return !ledger_[found].damaged || ",
        new="  return found.value() >= 0 || ",
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
        killers=(DISK_TIER + "test_nobody_adopts_a_chunk_that_came_back_damaged",),
    ),
    Mutant(
        name="a-chunk-on-disk-is-healed-in-name-only",
        breaks="who computes a damaged chunk again writes it to its slot again",
        file="csrc/pager/sealing.cc",
        old="  backend_.write_home(block, Home{SlotId(), record.disk}, &seal->checksums);\n",
        new="  static_cast<void>(block);\n",
        killers=(DISK_TIER + "test_computing_a_damaged_chunk_again_heals_it_for_all_who_use_it",),
    ),
    Mutant(
        name="a-restore-keeps-the-damaged-slot",
        breaks="a chunk that is read from a sound snapshot gives its damaged slot back",
        file="csrc/pager/residency.cc",
        old="  if (record.on_disk()) {\n",
        new="  if (false) {\n",
        killers=(
            DISK_TIER + "test_a_snapshot_of_the_same_bytes_takes_the_place_of_a_damaged_chunk",
        ),
    ),
    Mutant(
        name="the-spill-files-room-is-not-reserved",
        breaks="a full disk is refused when a pager is made",
        file="csrc/memory/disk_spill.cc",
        old="if (const int error = reserve(fd_, slots * slot_bytes)) {",
        new="if (const int error = 0) {",
        killers=(DISK_TIER + "test_the_spill_files_room_is_taken_when_the_pager_is_made",),
    ),
    Mutant(
        name="a-dry-run-removes",
        breaks="a dry run of a collection touches no file",
        file="python/kvpager/stores/catalogue.py",
        old="            self._spared.append(path)\n",
        new="            self._spared.append(path)\n            remove(path)\n",
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
        file="python/kvpager/_model/weights/held.py",
        old="else [*model.named_parameters(), *model.named_buffers()]\n",
        new="else [*model.named_parameters()]\n",
        killers=(FINGERPRINT + "test_the_digest_sees_every_weight_and_survives_a_round_trip",),
    ),
    Mutant(
        name="waived-fields-stay-exact",
        breaks="10: K/V computed under other numerics are approximate",
        file="python/kvpager/_model/identity/fingerprint.py",
        old='    return "approximate" if different else "exact"\n',
        new='    return "exact"\n',
        killers=(
            FINGERPRINT + "test_a_session_restored_as_approximate_shares_nothing_as_exact",
            FINGERPRINT + "test_numerics_are_refused_unless_approximate_results_are_accepted",
        ),
    ),
)
