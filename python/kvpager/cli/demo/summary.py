"""What a demo showed: one mapping for machines, a table and a picture for people."""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvpager._version import __version__
from kvpager.cli.demo.compare import Difference
from kvpager.cli.demo.plan import Plan
from kvpager.config import PagerConfig, describe_selection
from kvpager.report import Episode, draw_blocks

_WIDTH_WITHOUT_TERMINAL = 100


def summarise(
    args: argparse.Namespace,
    config: PagerConfig,
    model: Path,
    plan: Plan,
    turns: list[dict[str, Any]],
    reference: dict[str, Any],
    difference: Difference,
) -> dict[str, Any]:
    """Everything, JSON-able. Times in seconds, sizes in bytes."""
    first, last = turns[0], turns[-1]
    warm, cold = last["first_token_s"], reference["cold_first_token_s"]
    return {
        "command": "demo",
        "version": __version__,
        "model": str(model),
        "context": args.context,
        "pool_tokens": config.pool_tokens,
        "chunk_tokens": config.chunk_tokens,
        "rows": first["rows"],
        "threads": first["threads"],
        "selection": describe_selection(config.selection),
        "scorer": config.scorer_name,
        "seed": args.seed,
        "needles_known": plan.turns[0][0].answer is not None,
        "full_cache_bytes": last["tokens"] * last["token_bytes"],
        "pool_bytes": last["pool_bytes"],
        "resident_bytes": max(turn["resident_bytes"] for turn in turns),
        "summary_bytes": max(turn["summary_bytes_used"] for turn in turns),
        "staging_bytes": max(turn["staging_bytes"] for turn in turns),
        "host_bytes": max(turn["host_bytes_used"] for turn in turns),
        "disk_bytes": max(turn["disk_bytes_used"] for turn in turns),
        "prefill_tokens_per_s": args.context / first["prefill_s"],
        "cold_first_token_s": cold,
        "warm_first_token_s": warm,
        "cold_over_warm": cold / warm,
        "turns": turns,
        "needles_asked": sum(turn["needles_asked"] for turn in turns),
        "needles_found": sum(turn["needles_found"] for turn in turns),
        "needles_paged_out_at_start": sum(turn["needles_paged_out_at_start"] for turn in turns),
        "needles_paged_out_when_asked": sum(turn["needles_paged_out_when_asked"] for turn in turns),
        "uninterrupted": {name: value for name, value in reference.items() if name != "kv"},
        "differing_bits": difference.differing,
        "compared_bits": difference.compared,
        "first_difference": difference.first,
        "kv_comparison": asdict(Difference(**reference["kv"])),
        "plot": None,
    }


def text(args: argparse.Namespace, summary: dict[str, Any], episodes: list[Episode]) -> str:
    """For a terminal, or a file: no colour and no fine characters where stdout has none."""
    terminal = args.output is None and sys.stdout.isatty()
    colour = terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    encoding = "utf-8" if args.output else (sys.stdout.encoding or "ascii")
    unicode = encoding.lower().replace("-", "") == "utf8"
    width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 24)).columns
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=colour,
        color_system="256" if colour else None,
        no_color=not colour,
        highlight=False,
    )
    console.print(_turn_table(summary, unicode))
    console.print(_fact_table(summary, unicode))
    picture = draw_blocks(episodes, width, colour=colour, unicode=unicode)
    file = console.file
    assert isinstance(file, io.StringIO)
    return f"{file.getvalue()}\n{picture}\n{_verdict(summary)}\n"


def _turn_table(summary: dict[str, Any], unicode: bool) -> Table:
    table = _table(
        unicode, "each turn (#) is a process of its own; load: imports and model; recalled: chunks"
    )
    known = summary["needles_known"]
    table.add_column("#", min_width=1, no_wrap=True)
    for name in ("load", "restore", "first\ntoken", "tok/s", "recalled", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    if known:
        table.add_column("needles\nfound", justify="right", no_wrap=True)
        table.add_column("paged out\nat start", justify="right", no_wrap=True)
        table.add_column("at\nask", justify="right", no_wrap=True)
    for turn in summary["turns"]:
        restore = f"{1000 * turn['restore_s']:.1f} ms" if "restore_s" in turn else "-"
        row = [
            f"{turn['turn']}",
            _seconds(turn["imports_s"] + turn["model_load_s"] + turn["engine_s"]),
            restore,
            _seconds(turn["first_token_s"]),
            f"{turn['decode_tokens_per_s']:.0f}",
            f"{turn['chunks_recalled']:,}",
            _bytes(turn["snapshot_bytes"]),
        ]
        if known:
            row.append(f"{turn['needles_found']}/{turn['needles_asked']}")
            row.append(f"{turn['needles_paged_out_at_start']}/{turn['needles_asked']}")
            row.append(f"{turn['needles_paged_out_when_asked']}")
        table.add_row(*row)
    return table


def _fact_table(summary: dict[str, Any], unicode: bool) -> Table:
    table = _table(unicode, f"{summary['model']}, {summary['threads']} threads")
    table.add_column("")
    table.add_column("", overflow="fold")
    for name, value in _facts(summary):
        table.add_row(name, value)
    table.show_header = False
    return table


def _facts(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    share = 100 * summary["resident_bytes"] / summary["full_cache_bytes"]
    last = summary["turns"][-1]
    yield "context", f"{summary['context']:,} tokens, {last['tokens']:,} at the end"
    yield (
        "pool",
        (
            f"{summary['pool_tokens']:,} tokens, selection {selection_name(summary)}, "
            f"scorer {summary['scorer']}"
        ),
    )
    yield (
        "resident K/V",
        (
            f"{_bytes(summary['resident_bytes'])} of {_bytes(summary['full_cache_bytes'])} "
            f"that a full cache holds ({share:.1f}%)"
        ),
    )
    yield (
        "beside the pool",
        (
            f"{_bytes(summary['summary_bytes'])} key summaries, "
            f"{_bytes(summary['staging_bytes'])} staging"
        ),
    )
    yield "host, disk", f"{_bytes(summary['host_bytes'])}, {_bytes(summary['disk_bytes'])}"
    yield "prefill", f"{summary['prefill_tokens_per_s']:,.0f} tokens/s"
    yield "first token, cold", f"{_seconds(summary['cold_first_token_s'])} (prefills it all again)"
    yield (
        "first token, warm",
        (
            f"{_seconds(summary['warm_first_token_s'])} (restored): "
            f"{summary['cold_over_warm']:,.0f} times sooner"
        ),
    )
    if summary["needles_known"]:
        yield (
            "needles found",
            (
                f"{summary['needles_found']} of {summary['needles_asked']} "
                f"(uninterrupted: {summary['uninterrupted']['needles_found']})"
            ),
        )
    else:
        yield "needles", "none: nothing is known of what this model can look up"
    yield (
        "differing bits",
        (
            f"{summary['differing_bits']:,} of {summary['compared_bits']:,} "
            "(logits and K/V, against the uninterrupted run)"
        ),
    )
    if summary["plot"]:
        yield "picture", summary["plot"]


def _verdict(summary: dict[str, Any]) -> str:
    if summary["differing_bits"]:
        return (
            f"FAILED: {summary['differing_bits']:,} bits differ from the uninterrupted run; the "
            f"first is at {summary['first_difference']}"
        )
    return "Not one bit differs from the conversation that was never interrupted."


def _table(unicode: bool, title: str) -> Table:
    from rich import box

    return Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD if unicode else box.ASCII2,
        pad_edge=False,
        collapse_padding=True,
    )


def selection_name(summary: dict[str, Any]) -> str:
    """The selection as a person would say it."""
    selection: str = summary["selection"].replace("always=(), ", "")
    return selection


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
