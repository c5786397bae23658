"""What a demo showed: one mapping for machines, a table and a picture for people."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from kvpager._version import __version__
from kvpager.cli.demo.compare import Difference
from kvpager.cli.demo.plan import Plan
from kvpager.cli.terminal import Look, look
from kvpager.config import PagerConfig, describe_selection
from kvpager.report import Episode, draw_blocks
from kvpager.words import byte_size, duration


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
        "pool_tokens": config.pool_size,
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
    shown = look(args)
    tables = shown.render(_turn_table(summary, shown), _fact_table(summary, shown))
    picture = draw_blocks(episodes, shown.width, colour=shown.colour, unicode=shown.unicode)
    return f"{tables}\n{picture}\n{_verdict(summary)}\n"


def _turn_table(summary: dict[str, Any], shown: Look) -> Table:
    table = shown.table(
        "each turn (#) is a process of its own; load: imports and model; recalled: chunks"
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
            duration(turn["imports_s"] + turn["model_load_s"] + turn["engine_s"]),
            restore,
            duration(turn["first_token_s"]),
            f"{turn['decode_tokens_per_s']:.0f}",
            f"{turn['chunks_recalled']:,}",
            byte_size(turn["snapshot_bytes"]),
        ]
        if known:
            row.append(f"{turn['needles_found']}/{turn['needles_asked']}")
            row.append(f"{turn['needles_paged_out_at_start']}/{turn['needles_asked']}")
            row.append(f"{turn['needles_paged_out_when_asked']}")
        table.add_row(*row)
    return table


def _fact_table(summary: dict[str, Any], shown: Look) -> Table:
    table = shown.table(f"{summary['model']}, {summary['threads']} threads")
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
            f"{byte_size(summary['resident_bytes'])} of {byte_size(summary['full_cache_bytes'])} "
            f"that a full cache holds ({share:.1f}%)"
        ),
    )
    yield (
        "beside the pool",
        (
            f"{byte_size(summary['summary_bytes'])} key summaries, "
            f"{byte_size(summary['staging_bytes'])} staging"
        ),
    )
    yield "host, disk", f"{byte_size(summary['host_bytes'])}, {byte_size(summary['disk_bytes'])}"
    yield "prefill", f"{summary['prefill_tokens_per_s']:,.0f} tokens/s"
    yield "first token, cold", f"{duration(summary['cold_first_token_s'])} (prefills it all again)"
    yield (
        "first token, warm",
        (
            f"{duration(summary['warm_first_token_s'])} (restored): "
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


def selection_name(summary: dict[str, Any]) -> str:
    """The selection as a person would say it."""
    selection: str = summary["selection"].replace("always=(), ", "")
    return selection
