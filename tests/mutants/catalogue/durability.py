"""Power failures: what was reported saved, or deleted, stays so."""

from mutants.mutant import Mutant

STORE_PROCESSES = "python/test_store_processes.py::"
STORE_INDEX = "python/test_store_index.py::"

POWER = (
    "hostile/test_power_and_failing_calls.py::"
    "test_a_power_failure_loses_nothing_that_was_reported_saved"
)
CALLS = (
    "hostile/test_power_and_failing_calls.py::"
    "test_any_system_call_that_fails_is_a_typed_error_that_costs_nothing"
)

DURABILITY = (
    Mutant(
        name="a-save-shares-chunks-behind-a-damaged-one",
        breaks="no save points to a chunk that is known to be damaged",
        file="python/kvpager/stores/sharing.py",
        old="    end = min(damaged, default=pack.chunks)\n",
        new="    end = pack.chunks\n",
        killers=(
            "python/test_store_room.py::test_a_run_ends_before_damage_and_before_other_content",
        ),
    ),
    Mutant(
        name="a-replaced-snapshot-still-counts-the-chunks-it-no-longer-needs",
        breaks="an index says of every chunk how many snapshots need it",
        file="python/kvpager/stores/catalogue.py",
        old="                if pack not in others or not np.array_equal(chunks, others[pack]):\n",
        new="                if pack not in others:\n",
        killers=("python/test_store_index.py::test_what_an_index_says_is_what_the_files_say",),
    ),
    Mutant(
        name="the-folder-above-a-new-store-is-not-synced",
        breaks="a store that was just made is there after a power failure",
        file="python/kvpager/stores/settings.py",
        old="            sync_folder(str(one))\n",
        new="            pass\n",
        killers=(POWER,),
    ),
    Mutant(
        name="settings-last-before-the-folders",
        breaks="what says that a folder is a store is not there without its two folders",
        file="python/kvpager/stores/settings.py",
        old="            sync_folder(folder)  #",
        new="            pass  #",
        killers=(POWER,),
    ),
    Mutant(
        name="a-deletion-of-a-file-is-not-synced",
        breaks="a file that was reported deleted does not come back",
        file="python/kvpager/stores/file.py",
        old="            sync_folder(os.fspath(Path(path).parent))\n",
        new="",
        killers=(POWER,),
    ),
    Mutant(
        name="a-snapshots-data-are-not-synced",
        breaks="what was reported saved opens to the bit after a power failure",
        file="csrc/snapshot/output_file.cc",
        old='  sync(file_.get(), "cannot sync the file to disk");\n',
        new="",
        killers=(POWER,),
    ),
    Mutant(
        name="a-snapshots-name-is-not-synced",
        breaks="what was reported saved is there after a power failure",
        file="csrc/snapshot/output_file.cc",
        old='error_of("snapshot.fsync", [&] { return ::fsync(folder_.get()); });',
        new="0;",
        killers=(POWER,),
    ),
    Mutant(
        name="a-failed-write-is-removed-outside-the-lock",
        breaks="a failed save leaves the index as the files are",
        file="csrc/snapshot/writer.cc",
        old="      file.give_up();\n",
        new="      file.discard();\n",
        killers=(
            "cpp/snapshot/write_content_test.cc::AProgressCallbackThatThrowsUndoesTheSave",
            "python/test_store_index.py::test_a_write_that_fails_leaves_the_index_as_the_files_are",
        ),
    ),
    Mutant(
        name="a-failed-copy-is-not-accounted-for",
        breaks="a failed collection leaves the index as the files are",
        file="python/kvpager/stores/collection.py",
        old="                        compaction.undo(catalogue)\n",
        new="                        pass\n",
        killers=(
            "python/test_store_index.py::test_a_write_that_fails_leaves_the_index_as_the_files_are",
        ),
    ),
    Mutant(
        name="a-failed-look-is-a-swept-file",
        breaks="a save that meets an error leaves no temporary file",
        file="csrc/snapshot/output_file.cc",
        old='    if (error != ENOENT) fail(error, "cannot look at the temporary file");\n',
        new="",
        killers=(
            "cpp/snapshot/faults_test.cc::AFailureAtAnyStepLeavesNothingAndKeepsTheOldSnapshot",
        ),
    ),
    Mutant(
        name="a-dead-writers-file-is-left",
        breaks="what a dead writer left beside a single file goes with the next save",
        file="python/kvpager/stores/lock.py",
        old="                    Path(path).unlink()\n",
        new="",
        killers=(
            STORE_PROCESSES
            + "test_a_temporary_of_a_dead_writer_is_swept_by_the_next_save_beside_it",
        ),
    ),
    Mutant(
        name="a-living-writers-file-is-swept",
        breaks="a file that is being written stays",
        file="python/kvpager/stores/lock.py",
        old="if regular and file.lock(fcntl.LOCK_EX | fcntl.LOCK_NB):",
        new="if regular:",
        killers=(
            STORE_PROCESSES + "test_what_is_being_written_or_is_no_file_of_ours_is_not_swept",
        ),
    ),
    Mutant(
        name="who-waits-for-a-store-waits-for-ever",
        breaks="a lock that is held for longer than lock_timeout is an error",
        file="csrc/bindings/locks.cc",
        old="if (waited.count() >= timeout_seconds_) {",
        new="if (waited.count() >= 1e6) {",
        killers=(STORE_PROCESSES + "test_who_waits_for_a_stopped_holder_is_told_who_it_is",),
    ),
    Mutant(
        name="opening-a-store-waits-as-long-as-it-likes",
        breaks="lock_timeout holds from the opening of a store on",
        file="python/kvpager/stores/settings.py",
        old='exclusive(f"{folder}/lock", lock_timeout)',
        new='exclusive(f"{folder}/lock", 12)',
        killers=(STORE_PROCESSES + "test_opening_a_store_waits_no_longer_than_it_was_told",),
    ),
    Mutant(
        name="a-store-is-made-before-its-time-out-is-looked-at",
        breaks="a time-out that is no time changes nothing",
        file="python/kvpager/stores/directory.py",
        old='self._lock_timeout = checked_timeout("lock_timeout", lock_timeout)',
        new="self._lock_timeout = lock_timeout",
        killers=(
            STORE_PROCESSES + "test_a_time_out_that_is_no_time_is_refused_before_a_store_is_made",
        ),
    ),
    Mutant(
        name="a-save-without-room-on-the-disk-costs-the-next-call",
        breaks="a call after a save that failed reads no folder",
        file="python/kvpager/stores/saving.py",
        old="            self.release()\n            catalogue.settle()\n",
        new="            self.release()\n",
        killers=(
            STORE_INDEX
            + "test_a_save_that_finds_no_room_on_the_disk_leaves_the_index_as_the_files_are",
        ),
    ),
    Mutant(
        name="companions-of-a-save-that-failed-go-without-the-lock",
        breaks="a call after a save that failed reads no folder",
        file="python/kvpager/stores/directory.py",
        old="                saving.undo()\n",
        new="                saving.release()\n",
        killers=(
            STORE_INDEX
            + "test_a_save_that_finds_no_room_on_the_disk_leaves_the_index_as_the_files_are",
        ),
    ),
)
