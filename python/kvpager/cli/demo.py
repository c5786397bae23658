"""`kvpager demo`: a long prompt, turns in separate processes, proof that no bit differs."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpager._version import __version__
from kvpager.cli.failure import CliError, UsageError
from kvpager.cli.models import given_model, load_config
from kvpager.cli.options import add_model_options, natural, positive
from kvpager.cli.output import emit_result, note
from kvpager.cli.pager_options import ALIASES, add_pager_options, config_to_json, pager_config
from kvpager.cli.parser import Parser
from kvpager.cli.terminal import Look, look
from kvpager.config import PagerConfig, describe_selection
from kvpager.needles import NeedleTask, shipped_model_path
from kvpager.words import byte_size, duration

if TYPE_CHECKING:
    from rich.table import Table

ANSWER_TOKENS = 4
_DEFAULTS = {"pool_tokens": 2048, "selection": "topk", "chunks": 32, "host_bytes": "4GiB"}

# Token ids to append, and of a needle its answer and the range [start, stop) of its positions.
Question = dict[str, Any]


def add(commands: Any, common: Parser) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "demo",
        parents=[common],
        help="prefill, save, restore in new processes, compare every bit",
        description="Prefills a long document through a small pool, then asks about it over "
        "several turns, each a process of its own that restores what the one before saved. At the "
        "end every logit and every byte of K/V is compared with a conversation that was never "
        "interrupted; exit code 1 if a single bit differs.",
    )
    add_model_options(parser, default="the shipped retrieval model")
    group = parser.add_argument_group("conversation")
    group.add_argument(
        "--context", type=positive, default=32768, metavar="TOKENS", help="default: 32768"
    )
    group.add_argument(
        "--needles",
        type=positive,
        default=16,
        metavar="N",
        help="questions, over all turns; default: 16",
    )
    group.add_argument(
        "--turns", type=positive, default=3, metavar="N", help="2 or more; default: 3"
    )
    group.add_argument(
        "--seed", type=natural, default=0, metavar="N", help="of the document; default: 0"
    )
    add_pager_options(parser, _DEFAULTS, ALIASES)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    config = pager_config(args, auto_pool=False)
    model = given_model(args)
    document, questions = _conversation(args, config, model)
    with tempfile.TemporaryDirectory(prefix="kvpager-demo-") as workdir:
        job = {
            "model": str(model),
            "dtype": args.dtype,
            "threads": args.threads,
            "config": config_to_json(config),
            "quiet": args.quiet,
            "document": document,
            "questions": questions,
            "workdir": workdir,
        }
        turns = []
        for turn in range(1, args.turns + 1):
            doing = (
                f"prefill {len(document):,} tokens through a pool of {config.pool_size:,}"
                if turn == 1
                else f"a new process restores turn {turn - 1}"
            )
            asked = len(questions[turn - 1])
            note(args, f"turn {turn} of {args.turns}: {doing}, ask {asked} questions, save")
            turns.append(run_part(f"turn {turn}", {**job, "turn": turn}))
        note(args, "reference: a cold start, the whole conversation uninterrupted, bits compared")
        reference = run_part("reference", {**job, "turn": None})
    values = _summary(args, config, model, turns, reference)
    emit_result(args, values, lambda: _text(look(args), values))
    return 1 if values["differing_bits"] else 0


def run_part(name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Runs a turn, or the reference, in a fresh process. Raises CliError, which names it."""
    from kvpager.children import ChildError, run_children

    job = {**job, "started_at": time.time()}
    workdir = Path(job["workdir"])
    try:
        (part,) = run_children(
            "kvpager.cli.demo_part", [({}, job)], workdir, shown=not job["quiet"]
        )
    except ChildError as error:
        raise CliError(f"{name}: {error}") from error
    return dict(part)


def _conversation(
    args: argparse.Namespace, config: PagerConfig, model: Path
) -> tuple[list[int], list[list[Question]]]:
    """A document, and the questions of every turn."""
    if args.turns < 2:
        raise UsageError("--turns is 1; expected 2 or more: the second is the first that restores")
    if args.needles < args.turns:
        raise UsageError(
            f"--needles is {args.needles}; expected at least one for each of {args.turns} turns"
        )
    about = load_config(model)
    if _finds_needles(about):
        document, questions = _needles(args, config, about.vocab_size)
    else:  # for an unknown model only bits can be compared
        rng = np.random.default_rng(args.seed)
        document = rng.integers(0, about.vocab_size, args.context).tolist()
        drawn = rng.integers(0, about.vocab_size, (args.needles, 4)).tolist()
        questions = [{"ids": ids, "answer": None, "needle": None} for ids in drawn]
    tokens = len(document) + sum(len(each["ids"]) + ANSWER_TOKENS for each in questions)
    longest = getattr(about, "max_position_embeddings", None)
    if longest is not None and tokens > longest:
        raise CliError(
            f"--context {args.context}: the conversation has {tokens} tokens, and this model "
            f"takes {longest}; lower --context"
        )
    shares = np.array_split(np.arange(len(questions)), args.turns)
    return document, [[questions[i] for i in share] for share in shares]


def _finds_needles(about: Any) -> bool:
    """Whether a model was trained on the needle task, as the shipped one was."""
    try:
        shipped = load_config(shipped_model_path())
    except FileNotFoundError:
        return False
    return (about.model_type, about.vocab_size) == (shipped.model_type, shipped.vocab_size)


def _needles(
    args: argparse.Namespace, config: PagerConfig, vocab: int
) -> tuple[list[int], list[Question]]:
    """Needles lie where only a recall finds them: not in the sinks, not near the end."""
    task = NeedleTask(vocab, args.seed)
    tail = min(config.pool_size, args.context // 2)
    avoid = [(0, 2 * config.chunk_tokens), (args.context - tail, args.context)]
    try:
        document = task.document(args.context, args.needles, avoid=avoid)
    except ValueError as error:
        given = f"--context {args.context} with --needles {args.needles}"
        raise UsageError(f"{given}: {error}") from error
    return document.ids.tolist(), [
        {
            "ids": task.query(document.keys[needle]).tolist(),
            "answer": task.answer(document.values[needle]).tolist(),
            "needle": document.span(needle),
        }
        for needle in task.rng.permutation(args.needles)
    ]


def _summary(
    args: argparse.Namespace,
    config: PagerConfig,
    model: Path,
    turns: list[dict[str, Any]],
    reference: dict[str, Any],
) -> dict[str, Any]:
    """Everything, JSON-able. Times in seconds, sizes in bytes."""
    first, last = turns[0], turns[-1]
    warm, cold = last["first_token_s"], reference["cold_first_token_s"]
    most = {
        name: max(turn[name] for turn in turns)
        for name in ("resident_bytes", "summary_bytes_used", "host_bytes_used", "disk_bytes_used")
    }
    sums = ("needles_asked", "needles_found", "needles_paged_out_at_start")
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
        "full_cache_bytes": last["tokens"] * last["token_bytes"],
        "pool_bytes": last["pool_bytes"],
        **most,
        "prefill_tokens_per_s": args.context / first["prefill_s"],
        "cold_first_token_s": cold,
        "warm_first_token_s": warm,
        "cold_over_warm": cold / warm,
        "turns": turns,
        **{name: sum(turn[name] for turn in turns) for name in sums},
        "uninterrupted": reference,
        "differing_bits": reference["differing_bits"],
        "compared_bits": reference["compared_bits"],
        "first_difference": reference["first_difference"],
    }


def _text(shown: Look, values: dict[str, Any]) -> str:
    """For a terminal, or a file."""
    facts = shown.table(f"{values['model']}, {values['threads']} threads")
    facts.add_column("")
    facts.add_column("", overflow="fold")
    facts.show_header = False
    for fact in _facts(values):
        facts.add_row(*fact)
    verdict = "Not one bit differs from the conversation that was never interrupted."
    if values["differing_bits"]:
        verdict = (
            f"FAILED: {values['differing_bits']:,} bits differ from the uninterrupted run; the "
            f"first is at {values['first_difference']}"
        )
    return f"{shown.render(_turn_table(values, shown), facts)}{verdict}\n"


def _turn_table(values: dict[str, Any], shown: Look) -> Table:
    table = shown.table(
        "each turn (#) is a process of its own; load: imports and model; recalled: chunks"
    )
    table.add_column("#", min_width=1, no_wrap=True)
    columns = ("load", "restore", "first\ntoken", "tok/s", "recalled", "saved", "needles\nfound")
    for name in (*columns, "paged out\nat start"):
        table.add_column(name, justify="right", no_wrap=True)
    for turn in values["turns"]:
        asked = turn["needles_asked"]
        table.add_row(
            f"{turn['turn']}",
            duration(turn["load_s"]),
            f"{1000 * turn['restore_s']:.1f} ms" if "restore_s" in turn else "-",
            duration(turn["first_token_s"]),
            f"{turn['tokens_per_s']:.0f}",
            f"{turn['chunks_recalled']:,}",
            byte_size(turn["snapshot_bytes"]),
            f"{turn['needles_found']}/{asked}" if asked else "-",
            f"{turn['needles_paged_out_at_start']}/{asked}" if asked else "-",
        )
    return table


def _facts(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    resident, full = values["resident_bytes"], values["full_cache_bytes"]
    selection = values["selection"].replace("always=(), ", "")
    yield "context", f"{values['context']:,} tokens, {values['turns'][-1]['tokens']:,} at the end"
    yield (
        "pool",
        f"{values['pool_tokens']:,} tokens, selection {selection}, scorer {values['scorer']}",
    )
    yield (
        "resident K/V",
        f"{byte_size(resident)} of {byte_size(full)} that a full cache holds "
        f"({100 * resident / full:.1f}%); {byte_size(values['summary_bytes_used'])} key summaries",
    )
    below = (byte_size(values[name]) for name in ("host_bytes_used", "disk_bytes_used"))
    yield "host, disk", ", ".join(below)
    yield "prefill", f"{values['prefill_tokens_per_s']:,.0f} tokens/s"
    yield "first token, cold", f"{duration(values['cold_first_token_s'])} (prefills it all again)"
    yield (
        "first token, warm",
        f"{duration(values['warm_first_token_s'])} (restored): "
        f"{values['cold_over_warm']:,.0f} times sooner",
    )
    if values["needles_asked"]:
        yield (
            "needles found",
            f"{values['needles_found']} of {values['needles_asked']} "
            f"(uninterrupted: {values['uninterrupted']['needles_found']})",
        )
    else:
        yield "needles", "none: nothing is known of what this model can look up"
    yield (
        "differing bits",
        f"{values['differing_bits']:,} of {values['compared_bits']:,} "
        "(logits and K/V, against the uninterrupted run)",
    )
