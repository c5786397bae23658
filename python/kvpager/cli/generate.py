"""`kvpager generate`: a user's own prompt and model, saved and restored."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpager.cli.failure import CliError, UsageError
from kvpager.cli.models import (
    add_model_options,
    load_model,
    load_tokenizer,
    natural,
    parse_ids,
    positive,
)
from kvpager.cli.output import check_writable, emit, emit_json, note
from kvpager.cli.pager_options import add_pager_options, pager_config
from kvpager.cli.parser import Parser
from kvpager.cli.session_places import SessionPlaces, add_session_options, session_places
from kvpager.cli.text import TextPieces

if TYPE_CHECKING:
    from kvpager import Session

_DEFAULTS = {"pool_tokens": 2048, "chunks": 32}


def add(commands: Any, common: Parser) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "generate", parents=[common], help="continue a prompt, or a saved session"
    )
    add_model_options(parser, default="none: it has to be given")
    prompt = parser.add_argument_group(
        "prompt", "One of these; with --restore it is appended, and may be left out."
    ).add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text, through the model's tokenizer")
    prompt.add_argument("--prompt-file", metavar="FILE", help="the same, from a UTF-8 file")
    prompt.add_argument("--ids", metavar="IDS", help='token ids such as "1,2,3"')
    add_session_options(parser)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-new-tokens", type=positive, default=64, metavar="N")
    sampling.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 (default): greedy"
    )
    sampling.add_argument("--top-k", type=natural, default=0, metavar="K", help="0 (default): off")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 (default): off")
    sampling.add_argument(
        "--seed", type=natural, metavar="N", help="of the draws (default: the session's, or 0)"
    )
    add_pager_options(parser, _DEFAULTS, {"pool_tokens": ["--pool"], "host_bytes": ["--host"]})
    parser.set_defaults(run=run, parser=parser)


@dataclass
class _Answer:
    """What was generated, and what it cost."""

    ids: list[int]
    text: str | None
    reused_tokens: int
    prefilled_tokens: int
    time_to_first_token_s: float
    generate_s: float
    restored_tokens: int
    restored_tokens_consumed: int
    recomputed_tokens: int
    saved_bytes: int | None
    saved_shared_bytes: int | None


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if args.model is None:
        raise UsageError("--model is missing; expected the folder of a transformers causal LM")
    if (
        args.restore is None
        and args.prompt is None
        and args.prompt_file is None
        and args.ids is None
    ):
        raise UsageError("a prompt is missing; give --prompt, --prompt-file, --ids or --restore")
    config = pager_config(args)
    given = parse_ids(args.ids) if args.ids is not None else None
    text = _prompt_text(args)
    places = session_places(args)
    check_writable("--output", args.output)
    model = load_model(args.model, args.dtype)
    tokenizer = load_tokenizer(args.model)
    if text is not None:
        if tokenizer is None:
            raise CliError(
                f"--model {args.model} has no tokenizer, so text cannot be read; give token ids "
                "with --ids"
            )
        given = tokenizer(text, add_special_tokens=args.restore is None)["input_ids"]

    from kvpager import Engine

    with Engine(
        model, config, threads=args.threads, store=places.store, progress=_bars(args)
    ) as engine:
        start = time.perf_counter()
        session = places.restore(engine)
        answer = _answer(args, places, session, given, tokenizer, start)
    _report(args, answer)
    return 0


def _bars(args: argparse.Namespace) -> bool:
    return not args.quiet and sys.stderr.isatty()


def _prompt_text(args: argparse.Namespace) -> str | None:
    if args.prompt_file is None:
        text: str | None = args.prompt
        return text
    try:
        return Path(args.prompt_file).read_text(encoding="utf-8")
    except OSError as error:
        raise CliError(f"--prompt-file {args.prompt_file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CliError(f"--prompt-file {args.prompt_file}: not UTF-8 ({error.reason})") from error


def _answer(
    args: argparse.Namespace,
    places: SessionPlaces,
    session: Session,
    given: list[int] | None,
    tokenizer: Any | None,
    start: float,
) -> _Answer:
    reused = session.length
    if given is not None:
        session.append(given, progress=not args.quiet)
    if args.restore is None:  # what a store knew of the prompt
        reused = session.restored_tokens
    stream = session.generate(
        args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    pieces = TextPieces(tokenizer)
    streaming = args.format == "terminal" and args.output is None
    ids, first = [], 0.0
    for token in stream:
        first = first or time.perf_counter()
        ids.append(token)
        if streaming:
            sys.stdout.write(pieces.push(token))
            sys.stdout.flush()
    if streaming:
        sys.stdout.write(pieces.finish() + "\n")
        sys.stdout.flush()
    saved = places.save(session, progress=_bars(args))
    return _Answer(
        ids=ids,
        text=None if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=True),
        reused_tokens=reused,
        prefilled_tokens=len(given or ()) - (reused if args.restore is None else 0),
        time_to_first_token_s=first - start,
        generate_s=time.perf_counter() - first,
        restored_tokens=session.restored_tokens,
        restored_tokens_consumed=session.restored_tokens_consumed,
        recomputed_tokens=session.recomputed_tokens,
        saved_bytes=None if saved is None else saved.bytes_written,
        saved_shared_bytes=None if saved is None else saved.bytes_shared,
    )


def _report(args: argparse.Namespace, answer: _Answer) -> None:
    values = {"command": "generate", **vars(answer), "saved_to": args.save}
    if args.format == "json":
        emit_json(args, values)
    elif args.output is not None:
        shown = " ".join(map(str, answer.ids)) if answer.text is None else answer.text
        emit(args, shown + "\n")
    note(args, "; ".join(_summary(args, answer)))


def _summary(args: argparse.Namespace, answer: _Answer) -> Iterator[str]:
    yield f"{answer.reused_tokens:,} tokens reused, {answer.prefilled_tokens:,} prefilled"
    if answer.restored_tokens:
        consumed, restored = answer.restored_tokens_consumed, answer.restored_tokens
        yield f"{consumed:,} of {restored:,} restored tokens consumed"
    if answer.recomputed_tokens:
        yield f"{answer.recomputed_tokens:,} damaged ones computed again"
    yield f"first token after {1000 * answer.time_to_first_token_s:.0f} ms"
    if len(answer.ids) > 1:
        yield f"{(len(answer.ids) - 1) / answer.generate_s:.1f} tokens/s after it"
    if args.save:
        shared = f" ({answer.saved_shared_bytes:,} shared)" if answer.saved_shared_bytes else ""
        yield f"saved {answer.saved_bytes:,} bytes{shared} to {args.save}"
