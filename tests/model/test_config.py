"""Options are checked when given; a refusal names the field, the value and what is expected."""

from __future__ import annotations

import dataclasses
import re

import pytest

from kvpager import Dense, InvalidArgumentError, PagerConfig, TopK
from kvpager._support.option_table import parse_bytes
from kvpager.config import AUTO_BYTES, Window, describe_selection, physical_memory


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("4GiB", 4 << 30),
        ("1.5 GB", 1_500_000_000),
        ("512MB", 512_000_000),
        ("2 KiB", 2048),
        ("7B", 7),
    ],
)
def test_sizes_are_read_with_their_units(text, expected):
    assert parse_bytes("host_bytes", text) == expected


@pytest.mark.parametrize("text", ["", "4 gigs", "GiB", "-1GiB", -1, 1.5, None, True, "1e9", "4gib"])
def test_sizes_that_say_nothing_are_refused(text):
    with pytest.raises(InvalidArgumentError, match=r"host_bytes is .*4GiB"):
        parse_bytes("host_bytes", text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pool_tokens": 0}, r"pool_tokens is 0; expected an integer from 1"),
        ({"pool_tokens": "2048"}, r"pool_tokens is '2048'"),
        ({"pool_tokens": 2050}, r"pool_tokens is 2050; expected a multiple .* 2112"),
        ({"pool_tokens": True}, r"pool_tokens is True"),
        ({"chunk_tokens": 48}, r"chunk_tokens is 48; expected one of 16, 32, 64"),
        ({"rows": 0}, r"rows is 0"),
        ({"rows": 5000}, r"rows is 5000"),
        ({"small_rows": "few"}, r"small_rows is 'few'; expected \"proven\", \"fixed\""),
        ({"small_rows": (16, 4)}, r"small_rows is \(16, 4\); .*ascending"),
        ({"small_rows": (4, 4)}, r"small_rows is \(4, 4\); .*ascending"),
        ({"small_rows": (0, 4)}, r"small_rows is \(0, 4\); .*from 1"),
        ({"small_rows": (True,)}, r"small_rows is \(True,\)"),
        ({"small_rows": 4}, r"small_rows is 4; expected"),
        ({"exact": True}, r"exact is True; expected \"all\", \"reuse\" or False"),
        ({"exact": "none"}, r"exact is 'none'"),
        ({"exact": 0}, r"exact is 0; expected"),
        ({"selection": Dense}, r"selection is .*instance and not the class"),
        ({"selection": "dense"}, r"selection is 'dense'"),
        ({"host_bytes": "lots"}, r"host_bytes is 'lots'"),
        ({"summary_bytes": -5}, r"summary_bytes is -5"),
        ({"policy": "fifo"}, r"policy is 'fifo'; expected one of 'qk', 'lru'"),
        ({"recall_chunks": -1}, r"recall_chunks is -1"),
        ({"hysteresis": float("nan")}, r"hysteresis is nan"),
        ({"hysteresis": -0.1}, r"hysteresis is -0.1"),
        ({"kv_dtype": "int8"}, r"kv_dtype is 'int8'"),
        ({"debug_shuffle_seed": 0}, r"debug_shuffle_seed is 0"),
        ({"debug_poison": 1}, r"debug_poison is 1"),
        ({"disk_bytes": "1GiB"}, r"disk_path is None; expected a folder"),
        ({"disk_path": "/nowhere at all"}, r"disk_path is '/nowhere at all'"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        PagerConfig(**{"pool_tokens": 2048, **options})


def test_a_spill_folder_without_a_budget_is_refused(tmp_path):
    with pytest.raises(InvalidArgumentError, match="disk_bytes is 0; expected a budget"):
        PagerConfig(pool_tokens=2048, disk_path=tmp_path)
    config = PagerConfig(pool_tokens=2048, disk_path=tmp_path, disk_bytes="1MiB")
    assert (config.disk_path, config.disk_bytes) == (str(tmp_path), 1 << 20)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(chunks=0), r"TopK.chunks is 0"),
        (lambda: TopK(chunks=4, sinks=-1), r"TopK.sinks is -1"),
        (lambda: TopK(chunks=4, recent=0), r"TopK.recent is 0"),
        (lambda: TopK(chunks=4, always=[(5, 5)]), r"TopK.always .*half-open"),
        (lambda: TopK(chunks=4, always=[5]), r"TopK.always .*half-open"),
        (lambda: Window(recent=0), r"Window.recent is 0"),
    ],
)
def test_selections_out_of_range_are_refused(make, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_a_pool_that_cannot_hold_one_frontier_is_refused_with_the_least_that_can():
    with pytest.raises(InvalidArgumentError, match=r"pool_tokens is 128; expected at least 192"):
        PagerConfig(pool_tokens=128, rows=64)
    assert PagerConfig(pool_tokens=192, rows=64).pool_blocks == 3
    with pytest.raises(InvalidArgumentError, match=r"by default, on cpu"):
        PagerConfig(pool_tokens=128).resolve_rows()


def test_a_recent_window_shorter_than_a_forward_is_refused_naming_both():
    with pytest.raises(
        InvalidArgumentError, match=r"TopK.recent is 256; expected at least rows \(512\)"
    ):
        PagerConfig(pool_tokens=4096, rows=512, selection=TopK(chunks=8))
    with pytest.raises(InvalidArgumentError, match=r"Window.recent is 10.*by default.*16"):
        PagerConfig(pool_tokens=4096, selection=Window(recent=10)).resolve_rows()


@pytest.mark.parametrize(
    ("options", "choices"),
    [
        ({}, (256, 64)),
        ({"selection": TopK(chunks=8)}, (256, 64)),
        ({"selection": TopK(chunks=8, recent=255)}, (64,)),
        ({"selection": Window(recent=32)}, (32,)),
        ({"pool_tokens": 1024}, (256, 64)),
        ({"pool_tokens": 960}, (64,)),
        ({"pool_tokens": 64, "chunk_tokens": 16}, (32,)),
        ({"pool_tokens": 192}, (64,)),
        ({"rows": 48}, (48,)),
        ({"rows": 3, "small_rows": (1, 2)}, (3,)),
        ({"small_rows": (4, 16)}, (256, 64)),
        ({"small_rows": (4, 100)}, (256,)),
        ({"small_rows": "fixed"}, (256, 64)),
    ],
)
def test_the_most_rows_are_chosen_so_that_the_rest_of_the_configuration_works(options, choices):
    config = PagerConfig(**{"pool_tokens": 4096, **options})
    assert config.row_choices() == choices
    assert config.resolve_rows() == choices[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 16}, r"small_rows is \(4, 16\); expected row counts below rows \(16\)"),
        ({"selection": Window(recent=20)}, r"small_rows is \(4, 16\).*by default, on cpu\) \(16\)"),
    ],
)
def test_small_row_counts_that_are_not_below_the_most_rows_are_refused(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        PagerConfig(pool_tokens=4096, small_rows=(4, 16), **options).row_choices()


def test_auto_budgets_follow_the_machine():
    config = PagerConfig(pool_tokens=2048)
    assert config.host_budget_on("cpu") == physical_memory() // 4
    assert config.summary_budget == AUTO_BYTES
    assert (
        PagerConfig(pool_tokens=2048, host_bytes=0, summary_bytes="1MiB").host_budget_on("cpu") == 0
    )


def test_a_copy_changes_what_is_named_and_suggests_names():
    config = PagerConfig(pool_tokens=2048)
    assert config.replace(policy="lru") == PagerConfig(pool_tokens=2048, policy="lru")
    with pytest.raises(InvalidArgumentError, match="did you mean hysteresis"):
        config.replace(histeresis=0.2)


def test_configurations_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PagerConfig(pool_tokens=2048).rows = 3


def test_every_option_says_what_it_is():
    options = {option.name: option for option in PagerConfig.options()}
    assert list(options) == [field.name for field in dataclasses.fields(PagerConfig)]
    assert all(option.help and option.accepts and option.type for option in options.values())
    assert options["pool_tokens"].default == "auto"
    assert options["policy"].default == "qk"


def test_a_selection_has_one_description():
    assert describe_selection(Dense()) == "dense()"
    a = TopK(chunks=4, always=[(64, 128), (0, 32)])
    b = TopK(chunks=4, always=((0, 32), (64, 128)))
    assert describe_selection(a) == describe_selection(b)
    assert describe_selection(a) != describe_selection(TopK(chunks=5))


def test_a_scorer_is_no_option_any_more():
    for options in (TopK, PagerConfig):
        with pytest.raises(InvalidArgumentError, match="has no option 'scorer'"):
            options(scorer="bits2")


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (
            lambda: PagerConfig(pool_token=512),
            "PagerConfig has no option 'pool_token'; did you mean p",
        ),
        (lambda: TopK(4, sink=1), "TopK has no option 'sink'; did you mean sinks"),
        (lambda: Window(recant=1), "Window has no option 'recant'; did you mean recent"),
        (lambda: Dense(chunks=1), "Dense has no option 'chunks'; known: "),
    ],
)
def test_a_misspelt_option_is_named_with_the_closest_one(make, hint):
    with pytest.raises(InvalidArgumentError, match=re.escape(hint)):
        make()
