"""`kvpager demo`: a long prompt, turns in separate processes, proof that no bit differs."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvpager import __version__
from kvpager._support.words import byte_size, duration
from kvpager.cli.demo_talk import talk, talk_lines
from kvpager.cli.failure import DIFFERENT, CliError, UsageError
from kvpager.cli.models import given_model, load_config
from kvpager.cli.needles import NeedleTask, shipped_model_path
from kvpager.cli.options import add_model_options, natural, positive
from kvpager.cli.output import emit_result, note
from kvpager.cli.pager_options import add_pager_options, pager_config
from kvpager.cli.parser import Commands, option
from kvpager.cli.terminal import Look
from kvpager.config import PagerConfig, config_to_json, describe_selection

ANSWER_TOKENS = 4
_DEFAULTS = {"pool_tokens": 2048, "selection": "topk", "chunks": 32, "host_bytes": "4GiB"}

# Token ids to append, and of a needle its answer and the range [start, stop) of its positions.
Question = dict[str, Any]


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add(
        "demo",
        run,
        "prefill, save, restore in new processes, compare every bit",
        "Prefills a long document through a small pool, then asks about it over several turns, "
        "each a process of its own that restores what the one before saved. At the end every logit "
        "and every byte of K/V is compared with a conversation that was never interrupted; exit "
        "code 1 if a single bit differs. Unless --model is given, a second part follows: a "
        "conversation about a document, with a model that answers, if there is one.",
    )
    add_model_options(parser, default="the shipped retrieval model")
    group = parser.add_argument_group("conversation")
    option(group, "--context TOKENS", "of the document", type=positive, default=32768)
    option(group, "--needles N", "questions, over all turns", type=positive, default=16)
    option(group, "--turns N", "2 or more", type=positive, default=3)
    option(group, "--seed N", "of the document", type=natural, default=0)
    group = parser.add_argument_group("second part")
    about = "the part to run (default: both without --model, else the first: bits)"
    option(group, "--only", about, choices=("bits", "talk"))
    option(group, "--document FILE", "English text to talk about (default: kvpager's README)")
    add_pager_options(parser, _DEFAULTS)
    parser.show_first(
        *("--json", "--quiet", "--model", "--context", "--needles", "--turns", "--only"),
        *("--document", "--pool-tokens", "--chunks", "--kv-dtype"),
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if args.only == "talk" and args.model is not None:
        raise UsageError("--only talk has no meaning with --model, which the first part is for")
    values: dict[str, Any] = {"command": "demo", "version": __version__}
    if args.only != "talk":
        values |= _bits(args)
    if args.only != "bits" and args.model is None:
        values["talk"] = talk(args)
    emit_result(args, values, lambda shown: _lines(shown, values))
    parts = (values, values.get("talk", {}))
    return DIFFERENT if any(part.get("differing_bits") for part in parts) else 0


def _bits(args: argparse.Namespace) -> dict[str, Any]:
    """The first part: turns in separate processes, every bit compared."""
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
    return _summary(args, config, model, turns, reference)


def run_part(name: str, job: dict[str, Any]) -> dict[str, Any]:
    """Runs a turn, or the reference, in a fresh process. Raises CliError, which names it."""
    from kvpager._support.children import ChildError, run_children

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
    most = ("resident_bytes", "summary_bytes_used", "host_bytes_used", "disk_bytes_used")
    sums = ("needles_asked", "needles_found", "needles_paged_out_at_start")
    found = ("cold_first_token_s", "differing_bits", "compared_bits", "first_difference")
    return {
        "model": str(model),
        "context": args.context,
        "pool_tokens": config.pool_size,
        "chunk_tokens": config.chunk_tokens,
        "rows": first["rows"],
        "threads": first["threads"],
        "selection": describe_selection(config.selection),
        "seed": args.seed,
        "full_cache_bytes": last["tokens"] * last["token_bytes"],
        "pool_bytes": last["pool_bytes"],
        **{name: max(turn[name] for turn in turns) for name in most},
        **{name: sum(turn[name] for turn in turns) for name in sums},
        **{name: reference[name] for name in found},
        "prefill_tokens_per_s": args.context / first["prefill_s"],
        "warm_first_token_s": last["first_token_s"],
        "cold_over_warm": reference["cold_first_token_s"] / last["first_token_s"],
        "turns": turns,
        "uninterrupted": reference,
    }


def _lines(shown: Look, values: dict[str, Any]) -> Iterator[str]:
    if "turns" in values:
        yield from _bits_lines(shown, values)
    if "talk" in values:
        yield from talk_lines(shown, values["talk"])


def _bits_lines(shown: Look, values: dict[str, Any]) -> Iterator[str]:
    table = shown.table(
        "each turn (#) is a process of its own; load: imports and model; recalled: chunks",
        *("#", ">load", ">restore", ">first\ntoken", ">tok/s", ">recalled", ">saved"),
        *(">needles\nfound", ">paged out\nat start"),
    )
    for turn in values["turns"]:
        table.add_row(*_cells(turn))
    yield from shown.render(table)
    yield f"{values['model']}, {values['threads']} threads"
    yield from shown.fields(_facts(values), 17, indent="  ")
    if values["differing_bits"]:
        yield (
            f"FAILED: {values['differing_bits']:,} bits differ from the uninterrupted run; the "
            f"first is at {values['first_difference']}"
        )
    else:
        yield "Not one bit differs from the conversation that was never interrupted."


def _cells(turn: dict[str, Any]) -> Iterator[str]:
    yield f"{turn['turn']}"
    yield duration(turn["load_s"])
    yield f"{1000 * turn['restore_s']:.1f} ms" if "restore_s" in turn else "-"
    yield duration(turn["first_token_s"])
    yield f"{turn['tokens_per_s']:.0f}"
    yield f"{turn['chunks_recalled']:,}"
    yield byte_size(turn["snapshot_bytes"])
    for name in ("needles_found", "needles_paged_out_at_start"):
        yield f"{turn[name]}/{turn['needles_asked']}" if turn["needles_asked"] else "-"


def _facts(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    resident, full = values["resident_bytes"], values["full_cache_bytes"]
    selection = values["selection"].replace("always=(), ", "")
    yield "context", f"{values['context']:,} tokens, {values['turns'][-1]['tokens']:,} at the end"
    yield "pool", f"{values['pool_tokens']:,} tokens, selection {selection}"
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
