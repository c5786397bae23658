"""Connectors: nothing wrong is loaded, nothing is asked forever, and no scheduler waits."""

from mutants.mutant import Mutant

HOME = "python/kvpager/connectors/"
TIER = "connectors/test_vllm_tier.py::"
LOOKUPS = "connectors/test_lookups.py::"
FIELDS = "connectors/test_identity.py::"
LMCACHE = "connectors/test_lmcache.py::"
SGLANG = "connectors/test_sglang.py::"

CONNECTORS = (
    Mutant(
        name="a-load-that-failed-stays-a-hit",
        breaks="a failed load is a miss, never tried forever",
        file=HOME + "vllm.py",
        old="        self._lookups.missed(load.missed)\n",
        new="",
        killers=(
            TIER + "test_chunks_that_were_loaded_are_kept_and_the_others_are_misses",
            TIER + "test_a_load_that_fails_is_not_tried_again_by_the_same_request",
        ),
    ),
    Mutant(
        name="a-load-is-whole-whatever-was-refused",
        breaks="vLLM uses no chunk that was not loaded",
        file=HOME + "vllm.py",
        old="success=not load.missed,",
        new="success=True,",
        killers=(
            TIER + "test_a_damaged_chunk_is_refused_and_leaves_its_destination_as_it_was",
            TIER + "test_a_full_queue_fails_jobs_at_once_and_loses_nothing_else",
        ),
    ),
    Mutant(
        name="adapters-are-told-apart-by-name-alone",
        breaks="chunks of one adapter are never another's",
        file=HOME + "vllm.py",
        old='    return key_of_adapter(adapter.digest or b"", block)\n',
        new="    return block\n",
        killers=(TIER + "test_chunks_of_adapters_are_found_by_the_same_weights_alone",),
    ),
    Mutant(
        name="a-reset-may-have-changed-the-weights-unnoticed",
        breaks="after a reset of vLLM's caches the store is not used",
        file=HOME + "vllm.py",
        old="            self._stopped = True\n",
        new="            self._stopped = False\n",
        killers=(TIER + "test_a_reset_stops_the_use_of_the_store",),
    ),
    Mutant(
        name="an-answer-on-its-way-undoes-a-miss",
        breaks="a load that failed is a miss though the store says otherwise meanwhile",
        file=HOME + "lookups.py",
        old="if answer is not None and answer.stored is None:",
        new="if answer is not None:",
        killers=(
            LOOKUPS + "test_a_load_that_failed_is_a_miss_though_the_store_is_just_being_asked",
        ),
    ),
    Mutant(
        name="a-time-that-was-set-back-hides-a-change",
        breaks="weights that were exchanged in place are hashed again",
        file=HOME + "identity.py",
        old='        "ctime_ns": found.st_ctime_ns,',
        new='        "ctime_ns": 0,',
        killers=(
            FIELDS
            + "test_a_file_that_changed_is_hashed_again_though_size_and_time_are_as_they_were",
        ),
    ),
    Mutant(
        name="the-layout-of-k-and-v-does-not-count",
        breaks="K/V in another layout are not found",
        file=HOME + "vllm_identity.py",
        old='    "kv_cache_layout",\n',
        new="",
        killers=(
            FIELDS + "test_every_field_makes_another_identity_and_is_named[cache.kv_cache_layout]",
        ),
    ),
    Mutant(
        name="scaled-positions-do-not-count-the-largest-length",
        breaks="K/V whose positions are scaled for another largest length are not found",
        file=HOME + "vllm_identity.py",
        old='        kept["vllm_max_model_len"] = model.max_model_len\n',
        new="        pass\n",
        killers=(FIELDS + "test_the_largest_length_counts_where_positions_are_scaled",),
    ),
    Mutant(
        name="lmcache-takes-a-refused-chunk-for-loaded",
        breaks="LMCache uses no chunk that was refused",
        file=HOME + "lmcache.py",
        old="                if result is ReadResult.HIT:\n",
        new="                if result is not ReadResult.MISS:\n",
        killers=(
            LMCACHE + "test_a_damaged_chunk_is_refused_and_leaves_its_object_as_it_was",
            LMCACHE + "test_a_file_that_was_swapped_is_refused",
        ),
    ),
    Mutant(
        name="lmcaches-weights-are-looked-at-once",
        breaks="weights that are exchanged while LMCache runs make another model",
        file=HOME + "lmcache_models.py",
        old="            if stamp != model.stamp:\n",
        new="            if model.stamp is None:\n",
        killers=(LMCACHE + "test_weights_that_are_exchanged_while_the_server_runs_are_noticed",),
    ),
    Mutant(
        name="lmcaches-dtype-does-not-count",
        breaks="chunks of another dtype are not found",
        file=HOME + "lmcache.py",
        old='"dtypes": names}',
        new='"dtypes": []}',
        killers=(
            LMCACHE + "test_chunks_of_another_dtype_are_not_found_though_they_have_the_same_size",
        ),
    ),
    Mutant(
        name="sglang-takes-a-refused-page-for-loaded",
        breaks="SGLang uses no page that was refused",
        file=HOME + "sglang.py",
        old="[result is ReadResult.HIT for",
        new="[result is not ReadResult.MISS for",
        killers=(
            SGLANG + "test_a_damaged_page_is_refused_and_leaves_host_memory_as_it_was",
            SGLANG + "test_a_file_that_was_swapped_is_refused",
        ),
    ),
    Mutant(
        name="sglangs-dtype-does-not-count",
        breaks="pages of another dtype are not found",
        file=HOME + "sglang.py",
        old='    *("dtype", "layout",',
        new='    *("layout",',
        killers=(SGLANG + "test_pages_of_another_pool_are_not_found[dtype]",),
    ),
    Mutant(
        name="code-beside-weights-does-not-count",
        breaks="K/V that other code computed are not found",
        file=HOME + "identity.py",
        old="            files |= {file for file in beside if file.is_file()}\n",
        new="",
        killers=(FIELDS + "test_code_and_quantisation_beside_weights_count",),
    ),
)
