"""The demo, chat, children of commands, and what a distribution holds."""

from mutants.mutant import Mutant

DEMO = "python/test_demo.py::"
CHAT = "python/test_cli_chat.py::"

COMMANDS = (
    Mutant(
        name="the-demo-compares-no-keys-and-values",
        breaks="kvpager demo compares every byte of K/V that a turn saved",
        file="python/kvpager/cli/demo_part.py",
        old="        found += compare_kv(",
        new="        compare_kv(",
        killers=(DEMO + "test_one_flipped_bit_of_the_saved_values_fails_the_demo_and_is_located",),
    ),
    Mutant(
        name="the-demo-compares-no-logits",
        breaks="kvpager demo compares every logit of a turn",
        file="python/kvpager/cli/demo_part.py",
        old='        found += compare_bits(kept[number], logits, f"turn {number}: logits")\n',
        new="",
        killers=(DEMO + "test_one_flipped_logit_bit_fails_the_demo_and_is_located",),
    ),
    Mutant(
        name="a-damaged-conversation-ends-a-chat",
        breaks="kvpager chat computes damaged tokens again and goes on with the saved bits",
        file="python/kvpager/cli/chat/talk.py",
        old='on_corrupt="recompute"',
        new='on_corrupt="fail"',
        killers=(CHAT + "test_a_damaged_conversation_is_computed_again_to_the_bit_and_says_so",),
    ),
    Mutant(
        name="a-chat-loses-an-answer-that-was-cut-off",
        breaks="a closed window or SIGTERM loses nothing of a chat's answer",
        file="python/kvpager/cli/chat/loop.py",
        old="        finally:\n            end = time.perf_counter()\n",
        new="        else:\n            end = time.perf_counter()\n",
        killers=(CHAT + "test_an_answer_that_is_cut_off_is_saved[SIGTERM]",),
    ),
    Mutant(
        name="a-chat-overwrites-what-another-one-saved",
        breaks="two chats that go on with one conversation lose nothing",
        file="python/kvpager/cli/chat/talk.py",
        old="        if self.name is not None and self._is_anothers(self.name):\n",
        new="        if self.name is None and self._is_anothers(self.name):\n",
        killers=(CHAT + "test_two_that_go_on_with_one_conversation_lose_nothing",),
    ),
    Mutant(
        name="chats-take-all-of-the-disk",
        breaks="the conversations of kvpager chat take 10 GiB at most where no budget was given",
        file="python/kvpager/cli/chat/__init__.py",
        old="            budget = budget or _BUDGET\n",
        new="            pass\n",
        killers=(CHAT + "test_a_store_has_a_budget_that_is_kept_until_another_one_is_given",),
    ),
    Mutant(
        name="a-child-outlives-its-parent",
        breaks="a fresh process ends with the one that started it",
        file="python/kvpager/_support/children.py",
        old="    if stat.S_ISFIFO(os.fstat(0).st_mode):\n",
        new="    if stat.S_ISDIR(os.fstat(0).st_mode):\n",
        killers=(
            "python/test_cli_verify.py::test_a_fresh_process_ends_with_the_one_that_started_it",
        ),
    ),
    Mutant(
        name="the-benchmarks-are-in-the-sdist",
        breaks="an sdist has what builds the package, and no benchmark",
        file="pyproject.toml",
        old='"/python", "/tests/cpp"',
        new='"/python", "/bench", "/tests/cpp"',
        killers=(
            "python/test_distribution.py::"
            "test_an_sdist_has_what_builds_the_package_and_nothing_else",
        ),
    ),
)
