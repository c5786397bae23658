"""Threads and memory: how many there are decides how long it takes, nothing else."""

from mutants.mutant import Mutant

POOL = "cpp/kernels/foundation_test.cc::"
AUTO = "python/test_plan_auto.py::"
THREADS = "csrc/base/thread_pool.cc"

MACHINE = (
    Mutant(
        name="a-run-ends-before-its-helpers",
        breaks="a run is over when the last of its items is",
        file=THREADS,
        old="      left.wait(lock, [&] { return joined.load(std::memory_order_acquire) == 0; });\n",
        new="",
        killers=(POOL + "a run ends when the last of its items has, whichever thread it is on",),
    ),
    Mutant(
        name="one-helper-too-few-is-woken",
        breaks="as many threads work as the work is worth",
        file=THREADS,
        old="    notify(std::min<int64_t>(count, wanted) - 1);\n",
        new="    notify(std::min<int64_t>(count, wanted) - 2);\n",
        killers=(POOL + "as many threads as are wanted come, whether they were awake or asleep",),
    ),
    Mutant(
        name="a-wake-up-is-lost",
        breaks="a run that opens while a thread goes to sleep wakes it",
        file=THREADS,
        old="opened.wait(lock, "
        "[&] { return generation.load(std::memory_order_relaxed) != seen; });",
        new="opened.wait(lock);",
        killers=(POOL + "a run that opens while a worker goes to sleep is not missed",),
    ),
    Mutant(
        name="a-worker-waits-awake-for-ever",
        breaks="threads do not spin: one that was called ahead of its work waits a bounded time",
        file=THREADS,
        old="constexpr auto kAwake = std::chrono::microseconds(50);",
        new="constexpr auto kAwake = std::chrono::seconds(50);",
        killers=(POOL + "workers that are called ahead of a run that does not come go to sleep",),
    ),
    Mutant(
        name="a-thread-more-than-the-work-is-worth",
        breaks="work too small to wake anybody for wakes nobody",
        file=THREADS,
        old="nanoseconds / impl_->waking_nanoseconds;",
        new="nanoseconds / impl_->waking_nanoseconds + 1;",
        killers=(POOL + "work too small to wake anybody for stays on the thread that brings it",),
    ),
    Mutant(
        name="an-automatic-pool-takes-what-is-left-alone",
        breaks='pool_tokens="auto" leaves a margin of the free memory alone',
        file="python/kvpager/plan/auto.py",
        old="    fits = (free_bytes - margin - other) // (kv.chunk_bytes + slot)\n",
        new="    fits = (free_bytes - other) // (kv.chunk_bytes + slot)\n",
        killers=(AUTO + "TestChoice::test_what_is_chosen_fits_beside_everything_else",),
    ),
    Mutant(
        name="an-automatic-pool-forgets-its-summaries",
        breaks='pool_tokens="auto" counts the summaries of what is in the pool',
        file="python/kvpager/plan/auto.py",
        old="    fits = (free_bytes - margin - other) // (kv.chunk_bytes + slot)\n",
        new="    fits = (free_bytes - margin - other) // kv.chunk_bytes\n",
        killers=(AUTO + "TestChoice::test_what_is_chosen_fits_beside_everything_else",),
    ),
    Mutant(
        name="an-automatic-pool-decides-rows",
        breaks='M, which decides bits, is that of a large pool where pool_tokens is "auto"',
        file="python/kvpager/config.py",
        old="return rows <= 64 or self.pool_is_auto or self.pool_size >= _POOL_PER_ROW * rows",
        new="return rows <= 64 or (\n"
        "            not self.pool_is_auto and self.pool_size >= _POOL_PER_ROW * rows\n"
        "        )",
        killers=(AUTO + "TestConfig::test_rows_never_follow_from_free_memory",),
    ),
)
