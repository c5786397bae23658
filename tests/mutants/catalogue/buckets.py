"""Object stores: what a bucket, its writers and its collectors may not lose, and what is cached."""

from mutants.mutant import Mutant

STORES = "python/kvpager/stores/"
CACHE = "python/test_object_store_cache.py::"
SERVER = "python/test_object_store.py::"
LEASES = "python/test_leases.py::"
BUCKETS_OF_SERVERS = "server/test_bucket_store.py::"
ENCRYPTION = "python/test_object_store_encryption.py::"

BUCKETS = (
    Mutant(
        name="a-collector-looks-at-no-lease",
        breaks="a pack that a writer is about to need is not deleted",
        file=STORES + "leases.py",
        old="kept = needed | self._leased",
        new="kept = set(needed)",
        killers=(
            LEASES + "test_no_order_of_the_steps_of_a_writer_and_two_collections_loses_a_pack",
        ),
    ),
    Mutant(
        name="a-pack-that-is-needed-again-is-pardoned",
        breaks="a condemned pack stays condemned until it is deleted",
        file=STORES + "leases.py",
        old="        known = self._known\n        kept = needed | self._leased\n",
        new="        kept = needed | self._leased\n"
        "        known = self._known = {p: t for p, t in self._known.items() if p not in kept}\n",
        killers=(LEASES + "test_a_condemned_pack_stays_condemned_while_a_snapshot_needs_it",),
    ),
    Mutant(
        name="an-old-lease-publishes",
        breaks="a writer publishes nothing after half of its lease",
        file=STORES + "leases.py",
        old="if self._age() > self._seconds / 2:",
        new="if self._age() > self._seconds * 2:",
        killers=(
            LEASES + "test_a_lease_ends_by_the_buckets_clock_and_is_not_used_after_half_of_it",
        ),
    ),
    Mutant(
        name="condemned-packs-are-shared",
        breaks="a writer shares no condemned pack",
        file=STORES + "uploading.py",
        old="return (shared & condemned.keys()) or",
        new="return (shared & condemned.keys() & set()) or",
        killers=(CACHE + "test_a_pack_that_another_machine_deleted_is_not_shared",),
    ),
    Mutant(
        name="packs-are-taken-for-there",
        breaks="a writer shares only packs that it finds in the bucket",
        file=STORES + "uploading.py",
        old="self._missing(shared - proven)",
        new="self._missing(shared - shared)",
        killers=(CACHE + "test_a_pack_that_another_machine_deleted_is_not_shared",),
    ),
    Mutant(
        name="whoever-has-a-name-is-replaced",
        breaks="a snapshot of another salt that this machine does not know is not replaced",
        file=STORES + "uploading.py",
        old="                check(owner_of(session), origin)\n",
        new="",
        killers=(
            SERVER + "test_a_name_of_another_salt_is_refused_also_if_this_machine_has_not_seen_it",
        ),
    ),
    Mutant(
        name="the-cache-has-no-budget",
        breaks="the cache never has more bytes of payload than its budget",
        file=STORES + "range_cache.py",
        old="excess = 0 if self.byte_budget is None else",
        new="excess = 0 if self.byte_budget != -1 else",
        killers=(
            SERVER + "test_the_cache_never_has_more_than_its_budget_and_what_does_not_fit_is_read_"
            "all_the_same",
        ),
    ),
    Mutant(
        name="what-was-read-is-believed",
        breaks="bytes that were evicted while they were read are not used",
        file=STORES + "range_cache.py",
        old='if len(data) != last - first or not self._cache.is_present(source["id"]):',
        new="if len(data) != last - first:",
        killers=(CACHE + "test_a_range_that_is_evicted_while_it_is_read_is_fetched_again",),
    ),
    Mutant(
        name="each-thread-fetches-for-itself",
        breaks="a range that several threads want at once is fetched once",
        file=STORES + "range_cache.py",
        old="for one in flights]",
        new="for one in flights[:0]]",
        killers=(SERVER + "test_a_range_that_several_threads_want_is_fetched_once",),
    ),
    Mutant(
        name="a-reboot-loses-nothing",
        breaks="what was fetched and not synced is not believed after a reboot",
        file=STORES + "range_cache.py",
        old='"SELECT * FROM range WHERE ready AND NOT saved"',
        new='"SELECT * FROM range WHERE ready AND NOT saved AND NOT ready"',
        killers=(
            CACHE + "test_after_a_reboot_what_was_fetched_is_dropped_and_what_was_saved_stays",
        ),
    ),
    Mutant(
        name="a-dead-process-keeps-its-room",
        breaks="what a dead process reserved in the cache is free again",
        file=STORES + "range_cache.py",
        old="if one != self._owner and not self._is_alive(one)]",
        new="if one != self._owner and not one]",
        killers=(
            SERVER + "test_processes_share_a_cache_and_what_a_dead_one_reserved_is_free_again",
        ),
    ),
    Mutant(
        name="a-whole-pack-is-read-for-a-chunk",
        breaks="a restore reads the bytes that it needs and no others",
        file=STORES + "range_cache.py",
        old="self._fetcher.read(self._files, first, last)\n",
        new="self._fetcher.read(self._files, FRONT_BYTES, self._end)[first - FRONT_BYTES :][\n"
        "            : last - first\n        ]\n",
        killers=(SERVER + "test_a_restore_reads_the_bytes_it_needs_and_no_others",),
    ),
    Mutant(
        name="damage-stays-in-the-cache",
        breaks="a damaged range of the cache is fetched again once it is reported",
        file=STORES + "object.py",
        old="            self.mirror.cache.forget(pack)\n",
        new="            pass\n",
        killers=(SERVER + "test_a_damaged_range_is_fetched_again_once_it_is_reported",),
    ),
    Mutant(
        name="a-restart-forgets-what-is-pending",
        breaks="a snapshot that is to be uploaded later is uploaded after a restart",
        file=STORES + "object.py",
        old="        if self.mirror.pending():\n",
        new="        if not self.mirror.pending():\n",
        killers=(
            SERVER + "test_a_saved_snapshot_that_is_uploaded_later_survives_outage_and_restart",
        ),
    ),
    Mutant(
        name="an-outage-hides-the-cache",
        breaks="what the cache has can be opened while the bucket cannot be reached",
        file=STORES + "object.py",
        old="            if self.mirror.recorded(manifest_object(name)) is None:\n",
        new="            if name:\n",
        killers=(
            SERVER + "test_an_outage_names_address_request_and_cause_and_leaves_what_is_cached",
        ),
    ),
    Mutant(
        name="notes-are-this-machines",
        breaks="a pin and a time to live are changed as they are in the bucket",
        file=STORES + "object.py",
        old='                sidecar = Sidecar.of(values, f"{self.address}/{path}")\n',
        new="                sidecar = Sidecar(pinned=True)\n",
        killers=(SERVER + "test_pins_and_times_to_live_are_the_buckets",),
    ),
    Mutant(
        name="companions-stay-behind",
        breaks="a snapshot that is saved without a companion has none afterwards",
        file=STORES + "uploading.py",
        old="        self._store.delete_objects(self._stale())\n",
        new="",
        killers=(CACHE + "test_a_deleted_companion_of_a_replaced_snapshot_is_deleted",),
    ),
    Mutant(
        name="another-buckets-cache-is-taken",
        breaks="a folder is the cache of one bucket alone",
        file=STORES + "mirror.py",
        old="if address and address != self._bucket.address:",
        new="if not address and address != self._bucket.address and address:",
        killers=(CACHE + "test_the_folder_of_another_bucket_is_refused",),
    ),
    Mutant(
        name="a-key-is-ignored-for-a-bucket",
        breaks="what is to be encrypted is not written to a bucket as it is",
        file=STORES + "mirror.py",
        old="        self.access = Access(self.opened, secret)\n",
        new="        self.access = Access(self.opened)\n",
        killers=(ENCRYPTION + "test_no_object_and_no_cached_file_has_anything_of_a_text",),
    ),
    Mutant(
        name="a-new-ttl-makes-a-bucket-plain",
        breaks="a bucket that is encrypted stays so",
        file=STORES + "object.py",
        old="                changed = dataclasses.replace(settings, ttl_seconds=ttl)\n",
        new="                changed = _Settings(ttl)\n",
        killers=(ENCRYPTION + "test_a_bucket_is_refused_without_its_key",),
    ),
    Mutant(
        name="a-damaged-block-with-metadata-stays",
        breaks="all that the cache has of an encrypted pack is fetched again once it is reported",
        file=STORES + "object.py",
        old="                    self.mirror.mend(pack)\n",
        new="                    pass\n",
        killers=(
            ENCRYPTION
            + "test_a_damaged_block_of_the_cache_is_fetched_again_once_it_is_reported"
            + "[mirror/packs]",
        ),
    ),
    Mutant(
        name="a-command-makes-a-bucket-a-store",
        breaks="a command that looks at a store makes none",
        file=STORES + "object.py",
        old="            if version is None and not create:\n",
        new="            if version and not create:\n",
        killers=(SERVER + "test_commands_take_a_bucket_where_they_take_a_folder",),
    ),
    Mutant(
        name="a-save-waits-for-its-own-pack",
        breaks="a pack that is being published is read at once",
        file=STORES + "range_cache.py",
        old="        self.own = LocalRanges(path)\n",
        new="        self.own = LocalRanges(path, lock=True)\n",
        killers=(CACHE + "test_a_save_waits_for_nobody_and_its_pack_is_known_at_once",),
    ),
    Mutant(
        name="an-outage-is-forgotten",
        breaks="requests to an unreachable bucket fail at once",
        file=STORES + "bucket.py",
        old="            if outage is None:\n",
        new="            if outage is not None or outage is None:\n",
        killers=(SERVER + "test_requests_to_an_unreachable_bucket_fail_at_once_but_one_a_second",),
    ),
    Mutant(
        name="one-objects-failure-is-an-outage",
        breaks="a bucket that answers other requests is no unreachable one",
        file=STORES + "bucket.py",
        old="            if answers == self._answers:\n",
        new="            if answers is not None:\n",
        killers=(SERVER + "test_one_object_that_fails_does_not_make_the_bucket_unreachable",),
    ),
    Mutant(
        name="one-choice-is-computed-apart",
        breaks="every choice is computed where its saved keys and values cannot be read",
        file="python/kvpager/server/turn.py",
        old=" and self._may_go_apart() and not own.apart:",
        new=" and self._may_go_apart() and not self._apart:",
        killers=(
            BUCKETS_OF_SERVERS
            + "test_each_choice_is_computed_where_what_is_saved_of_it_cannot_be_read",
        ),
    ),
    Mutant(
        name="a-stored-response-is-computed-apart",
        breaks="a response with store: true can be fetched",
        file="python/kvpager/server/response_turn.py",
        old="super()._may_go_apart() and not comes_back",
        new="super()._may_go_apart()",
        killers=(BUCKETS_OF_SERVERS + "test_a_response_that_could_not_be_kept_is_not_said_to_be",),
    ),
    Mutant(
        name="an-outage-ends-a-turn-with-a-breakpoint",
        breaks="a turn whose prefixes cannot be saved is answered",
        file="python/kvpager/server/turn.py",
        old='        except UnreachableError as error:\n            _log.warning("the beginning',
        new='        except NotImplementedError as error:\n            _log.warning("the beginning',
        killers=(
            BUCKETS_OF_SERVERS
            + "test_a_turn_with_a_breakpoint_goes_on_while_the_bucket_cannot_be_reached",
        ),
    ),
    Mutant(
        name="an-outage-ends-a-turn",
        breaks="a turn whose conversation cannot be looked up is computed",
        file="python/kvpager/server/conversations.py",
        old='            return self.fork(name, salt, "fail") if self.has(name) else None',
        new="            if not self.has(name):\n                return None\n"
        "        except StorageError:\n            raise\n"
        '        try:\n            return self.fork(name, salt, "fail")',
        killers=(BUCKETS_OF_SERVERS + "test_turns_go_on_while_the_bucket_cannot_be_reached",),
    ),
    Mutant(
        name="unreadable-keys-end-a-turn",
        breaks="a prompt is computed where its saved keys and values cannot be read",
        file="python/kvpager/server/turn.py",
        old="if isinstance(completion.error, StorageError) and self",
        new="if isinstance(completion.error, NotImplementedError) and self",
        killers=(
            BUCKETS_OF_SERVERS
            + "test_a_prompt_is_computed_where_what_is_saved_of_it_cannot_be_read",
        ),
    ),
)
