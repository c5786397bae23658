"""The command: plans, runs every part in its own process, compares, reports."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvpager.cli.demo.child import run_child
from kvpager.cli.demo.compare import Difference, differing_bits
from kvpager.cli.demo.plan import Plan, needle_plan, random_plan
from kvpager.cli.demo.summary import selection_name, summarise, text
from kvpager.cli.demo.turn import PLAN_FILE, logits_file, trace_file
from kvpager.cli.failure import CliError, UsageError
from kvpager.cli.models import given_model, load_config
from kvpager.cli.output import check_writable, emit_result, note, write_file
from kvpager.cli.pager_options import config_to_json, pager_config
from kvpager.config import PagerConfig
from kvpager.report import Episode, draw_png
from kvpager.report.trace import load_episodes
from kvpager.stores.permissions import PRIVATE, make_folder


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    config = pager_config(args, auto_pool=False)
    plot = None if args.plot == "none" else Path(args.plot)
    check_writable("--plot", None if plot is None else args.plot)
    model = given_model(args)
    plan = _plan(args, config, model)
    with _workdir(args.workdir) as workdir:
        plan.save(workdir / PLAN_FILE)
        turns, reference = _run_parts(args, config, model, plan, workdir)
        difference = _compare(plan, reference, workdir)
        episodes = [
            episode
            for turn in range(1, args.turns + 1)
            for episode in load_episodes(trace_file(workdir, turn))
        ]
    summary = summarise(args, config, model, plan, turns, reference, difference)
    if plot is not None:
        write_file(plot, draw_png(episodes, config.chunk_tokens, _title(summary)))
        summary["plot"] = str(plot)
    _report(args, summary, episodes)
    return 1 if difference.differing else 0


def _plan(args: argparse.Namespace, config: PagerConfig, model: Path) -> Plan:
    if args.turns < 2:
        raise UsageError("--turns is 1; expected 2 or more: the second is the first that restores")
    if args.needles < args.turns:
        raise UsageError(
            f"--needles is {args.needles}; expected at least one for each of {args.turns} turns"
        )
    about = load_config(model)
    shape = {"context": args.context, "turns": args.turns, "vocab": about.vocab_size}
    if _is_retriever(about):
        # Needles lie where only a recall finds them: not in the sinks, not near the end.
        tail = min(config.pool_size, args.context // 2)
        avoid = [(0, 2 * config.chunk_tokens), (args.context - tail, args.context)]
        plan = needle_plan(**shape, needles=args.needles, seed=args.seed, avoid=avoid)
    else:
        plan = random_plan(**shape, questions=args.needles, seed=args.seed)
    longest = getattr(about, "max_position_embeddings", None)
    if longest is not None and plan.tokens > longest:
        raise CliError(
            f"--context {args.context}: the conversation has {plan.tokens} tokens, and this model "
            f"takes {longest}; lower --context"
        )
    return plan


def _is_retriever(about: Any) -> bool:
    """Whether a model speaks the needle task's language: the shipped one or its like."""
    from kvpager.needles import shipped_model_path

    try:
        shipped = load_config(shipped_model_path())
    except FileNotFoundError:
        return False
    return (about.model_type, about.vocab_size) == (shipped.model_type, shipped.vocab_size)


@contextmanager
def _workdir(given: str | None) -> Iterator[Path]:
    if given is None:
        with tempfile.TemporaryDirectory(prefix="kvpager-demo-") as name:
            yield Path(name)
        return
    folder = Path(given)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_folder(given, PRIVATE)  # the conversation is in it
    except OSError as error:
        raise CliError(f"--workdir {folder}: {error.strerror}") from error
    yield folder


def _run_parts(
    args: argparse.Namespace, config: PagerConfig, model: Path, plan: Plan, workdir: Path
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    job = {
        "model": str(model),
        "dtype": args.dtype,
        "threads": args.threads,
        "config": config_to_json(config),
        "quiet": args.quiet,
    }
    turns = []
    for turn in range(1, args.turns + 1):
        doing = (
            f"prefill {len(plan.document):,} tokens through a pool of {config.pool_size:,}"
            if turn == 1
            else f"a new process restores turn {turn - 1}"
        )
        asks = len(plan.turns[turn - 1])
        note(args, f"turn {turn} of {args.turns}: {doing}, ask {asks} questions, save")
        turns.append(run_child(f"turn {turn}", {**job, "role": "turn", "turn": turn}, workdir))
    note(args, "reference: a cold start, the whole conversation uninterrupted, every bit compared")
    return turns, run_child("reference", {**job, "role": "reference"}, workdir)


def _compare(plan: Plan, reference: dict[str, Any], workdir: Path) -> Difference:
    """Logits of every answered token against the uninterrupted ones, and what K/V came to."""
    total = Difference(**reference["kv"])
    last = len(plan.turns)
    for turn in range(1, last + 1):
        mine = np.load(logits_file(workdir, f"turn {turn}"))
        whole = np.load(logits_file(workdir, f"uninterrupted {turn}"))
        total.add(differing_bits(mine, whole, f"turn {turn}: logits"))
        if turn == last:
            cold = np.load(logits_file(workdir, "cold"))
            total.add(differing_bits(mine[:1], cold, "cold start: logits"))
    return total


def _title(summary: dict[str, Any]) -> str:
    return (
        f"{summary['context']:,} tokens through a pool of {summary['pool_tokens']:,} "
        f"({selection_name(summary)})"
    )


def _report(args: argparse.Namespace, summary: dict[str, Any], episodes: list[Episode]) -> None:
    emit_result(args, summary, lambda: text(args, summary, episodes))
