"""The demo, children of commands, and what a distribution holds."""

from mutants.mutant import Mutant

DEMO = "python/test_demo.py::"

COMMANDS = (
    Mutant(
        name="the-demo-compares-no-keys-and-values",
        breaks="kvpager demo compares every byte of K/V that a turn saved",
        file="python/kvpager/cli/demo_part.py",
        old="        found += _compare_kv(",
        new="        _compare_kv(",
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
        name="a-child-outlives-its-parent",
        breaks="a fresh process ends with the one that started it",
        file="python/kvpager/children.py",
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
