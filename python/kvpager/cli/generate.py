"""`kvpager generate`: a user's own prompt and model, saved and restored."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpager.cli.answer import Answer
from kvpager.cli.failure import CliError, UsageError
from kvpager.cli.models import (
    add_model_options,
    load_model,
    load_tokenizer,
    natural,
    positive,
)
from kvpager.cli.output import check_writable, emit, emit_json, note, shows_progress
from kvpager.cli.pager_options import ALIASES, DEFAULTS, add_pager_options, pager_config
from kvpager.cli.parser import Parser
from kvpager.cli.prompts import add_prompt_options, prompt_ids, read_prompt
from kvpager.cli.segment_parts import SegmentParts, add_segment_options, segment_parts
from kvpager.cli.session_places import SessionPlaces, add_session_options, session_places
from kvpager.cli.text import TextPieces

if TYPE_CHECKING:
    from kvpager import Engine, Session

# Of kvpager.runtime.speculation, which needs torch.
PROPOSERS = ("prompt-lookup", "draft")
DRAFT = PROPOSERS[1]


def add(commands: Any, common: Parser) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "generate", parents=[common], help="continue a prompt, or a saved session"
    )
    add_model_options(parser, default="none: it has to be given")
    add_prompt_options(parser, "One of these; with --restore it is appended, and may be left out.")
    add_session_options(parser)
    add_segment_options(parser)
    _add_generation_options(parser)
    add_pager_options(parser, DEFAULTS, ALIASES)
    parser.set_defaults(run=run, parser=parser)


def _add_generation_options(parser: Parser) -> None:
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-new-tokens", type=positive, default=64, metavar="N")
    sampling.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 (default): greedy"
    )
    sampling.add_argument("--top-k", type=natural, default=0, metavar="K", help="0 (default): off")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 (default): off")
    sampling.add_argument(
        "--seed",
        type=natural,
        metavar="N",
        help="of the draws (default: a fresh one, or what follows from a restored session's; "
        "printed)",
    )
    generation = parser.add_argument_group("generation")
    generation.add_argument(
        "--speculate",
        nargs="?",
        const=PROPOSERS[0],
        choices=PROPOSERS,
        metavar="HOW",
        help="the same tokens in fewer forwards: where the text repeats itself "
        f"({PROPOSERS[0]}, default where only --speculate is given), or as the model of --draft "
        f"guesses ({DRAFT})",
    )
    generation.add_argument(
        "--draft",
        metavar="PATH",
        help="folder of a small model with the same vocabulary that guesses how the text goes on "
        f"(--speculate {DRAFT}); what it holds of the text is saved and restored with the session",
    )
    generation.add_argument(
        "--logprobs",
        action="store_true",
        help="log-probability of each token under the model; with --format json what "
        "`kvpager score --against` takes",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if args.model is None:
        raise UsageError("--model is missing; expected the folder of a transformers causal LM")
    prompt = read_prompt(args)
    if prompt is None and args.restore is None:
        raise UsageError("a prompt is missing; give --prompt, --prompt-file, --ids or --restore")
    if args.draft is not None and args.speculate is None:
        args.speculate = DRAFT
    if (args.draft is not None) != (args.speculate == DRAFT):
        raise UsageError(
            f"--draft has no meaning with --speculate {args.speculate}"
            if args.draft is not None
            else f"--speculate {DRAFT}: no draft model; give --draft PATH"
        )
    config = pager_config(args)
    if args.speculate and config.exact != "all":
        raise UsageError(
            f"--speculate: --exact is {config.exact!r}, under which a token's bits depend on how "
            "many rows its forward has; use --exact all, or no --speculate"
        )
    segments = segment_parts(args)
    places = session_places(args)
    check_writable("--output", args.output)
    model = load_model(args.model, args.dtype, config.device)
    draft = None if args.draft is None else _load_draft(args, config.device)
    tokenizer = load_tokenizer(args.model)
    begins = args.restore is None and segments is None
    given = prompt_ids(args, prompt, tokenizer, special_tokens=begins)

    from kvpager import Engine

    with Engine(
        model,
        config,
        threads=args.threads,
        store=places.store,
        draft=draft,
        progress=shows_progress(args),
    ) as engine:
        start = time.perf_counter()
        begun = _begin(args, places, segments, engine, given, tokenizer)
        answer = _answer(args, places, begun, tokenizer, start)
    _report(args, answer)
    return 0


def _load_draft(args: argparse.Namespace, device: str) -> Any:
    """The model of --draft. Raises CliError, which names that option."""
    try:
        return load_model(args.draft, args.dtype, device)
    except CliError as error:
        raise CliError(str(error).replace("--model", "--draft", 1)) from error


class _Begun(NamedTuple):
    """A session that holds the prompt, and how many of its tokens were there or computed."""

    session: Session
    reused: int
    prefilled: int


def _begin(
    args: argparse.Namespace,
    places: SessionPlaces,
    segments: SegmentParts | None,
    engine: Engine,
    given: list[int] | None,
    tokenizer: Any | None,
) -> _Begun:
    if segments is not None:
        assert given is not None
        session = segments.assemble(args, engine, given, tokenizer)
        assert session.assembly is not None
        rows = session.assembly.rows
        return _Begun(session, reused=session.assembly.tokens - rows, prefilled=rows)
    session = places.restore(engine)
    reused = session.length
    if given is not None:
        session.append(given, progress=not args.quiet)
    if args.restore is not None:
        return _Begun(session, reused, prefilled=len(given or ()))
    reused = session.restored_tokens  # what a store knew of the prompt
    return _Begun(session, reused, prefilled=len(given or ()) - reused)


def _answer(
    args: argparse.Namespace,
    places: SessionPlaces,
    begun: _Begun,
    tokenizer: Any | None,
    start: float,
) -> Answer:
    session = begun.session
    before = session.tokens.tolist()
    stream = session.generate(
        args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        speculate=args.speculate,
        logprobs=args.logprobs,
    )
    pieces = TextPieces(tokenizer)
    streaming = args.format == "terminal" and args.output is None
    ids: list[int] = []
    logprobs: list[float] = []
    first = 0.0
    for produced in stream:
        first = first or time.perf_counter()
        token = produced
        if not isinstance(produced, int):
            token = produced.id
            logprobs.append(produced.logprob)
        ids.append(token)
        if streaming:
            sys.stdout.write(pieces.push(token))
            sys.stdout.flush()
    if streaming:
        sys.stdout.write(pieces.finish() + "\n")
        sys.stdout.flush()
    generated = time.perf_counter()
    saved = places.save(session, progress=shows_progress(args))
    return Answer(
        prompt_ids=before,
        ids=ids,
        text=None if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=True),
        logprobs=logprobs if args.logprobs else None,
        seed=session.sampling.seed if args.temperature else None,
        speculation=session.speculation if args.speculate else None,
        reused_tokens=begun.reused,
        prefilled_tokens=begun.prefilled,
        assembly=session.assembly,
        time_to_first_token_s=first - start,
        generate_s=generated - first,
        restored_tokens=session.restored_tokens,
        restored_tokens_consumed=session.restored_tokens_consumed,
        recomputed_tokens=session.recomputed_tokens,
        saved_to=args.save,
        saved_bytes=None if saved is None else saved.bytes_written,
        saved_shared_bytes=None if saved is None else saved.bytes_shared,
        fingerprint=session.engine.fingerprint,
    )


def _report(args: argparse.Namespace, answer: Answer) -> None:
    if args.format == "json":
        emit_json(args, answer.to_json())
    elif args.output is not None:
        shown = " ".join(map(str, answer.ids)) if answer.text is None else answer.text
        emit(args, shown + "\n")
    note(args, answer.summary())
