"""`kvpager generate`: a user's own prompt and model, saved and restored."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpager.cli.failure import CliError, UsageError
from kvpager.cli.models import load_model, load_tokenizer
from kvpager.cli.options import (
    add_model_options,
    add_prompt_options,
    as_unicode,
    natural,
    positive,
    prompt_ids,
    read_prompt,
    read_text,
    require_model,
)
from kvpager.cli.output import emit_result, note, shows_progress, write_stdout
from kvpager.cli.pager_options import ALIASES, DEFAULTS, add_pager_options, pager_config
from kvpager.cli.parser import Parser
from kvpager.cli.session_options import (
    SegmentParts,
    SessionPlaces,
    add_segment_options,
    add_session_options,
    segment_parts,
    session_places,
)
from kvpager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpager import Completion, Engine, Session
    from kvpager.segments import Assembly
    from kvpager.speculation import SpeculationStats


# Of kvpager.speculation.speculation, which needs torch.
PROPOSERS = ("prompt-lookup", "draft")
DRAFT = PROPOSERS[1]


def add(commands: Any, common: Parser) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "generate",
        parents=[common],
        help="continue a prompt, or a saved session",
        description="Continues a prompt, or a session that was saved with --save, and prints what "
        "came of it. A restored session is not prefilled again, and has the bits of one that was "
        "never saved.",
    )
    add_model_options(parser, default="none: it has to be given")
    prompt = add_prompt_options(
        parser, "One of these; with --restore it is appended, and may be left out."
    )
    prompt.add_argument(
        "--message",
        metavar="TEXT",
        help="a user's message, by the model's chat template; with --restore the conversation goes "
        "on",
    )
    prompt.add_argument(
        "--messages",
        metavar="FILE",
        help='the whole conversation, from a JSON file: [{"role": "user", "content": "..."}, ...]; '
        "with --restore as far as it is not the saved one",
    )
    chat = parser.add_argument_group("messages")
    chat.add_argument(
        "--control-tokens",
        choices=("text", "tokens"),
        default="text",
        help='what a control token in a message is, such as "<|im_end|>": text (default), or a '
        "token of the chat template",
    )
    chat.add_argument(
        "--continue-final-message",
        action="store_true",
        help="go on with the last message, which is an assistant's",
    )
    add_session_options(parser)
    add_segment_options(parser)
    _add_generation_options(parser)
    add_pager_options(parser, DEFAULTS, ALIASES)
    parser.set_defaults(run=run, parser=parser)


def _add_generation_options(parser: Parser) -> None:
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-new-tokens", type=positive, default=64, metavar="N", help="default: 64"
    )
    sampling.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 (default): greedy"
    )
    sampling.add_argument("--top-k", type=natural, default=0, metavar="K", help="0 (default): off")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 (default): off")
    sampling.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="keep tokens at least this many times as likely as the most likely one; "
        "0 (default): off",
    )
    sampling.add_argument(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="X",
        help="divides positive logits, and multiplies negative ones, of tokens that occur in the "
        "text, prompt included; 1 (default): off",
    )
    sampling.add_argument(
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="subtracted from the logits of tokens that were produced; 0 (default): off",
    )
    sampling.add_argument(
        "--frequency-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="likewise, times the number of their occurrences",
    )
    sampling.add_argument(
        "--logit-bias",
        type=_bias,
        action="append",
        default=[],
        metavar="ID=BIAS",
        help="added to the logit of a token id, -inf to forbid it; may be repeated",
    )
    sampling.add_argument(
        "--seed",
        type=natural,
        metavar="N",
        help="of the draws (default: a fresh one, or what follows from a restored session's; "
        "printed)",
    )
    generation = parser.add_argument_group("generation")
    generation.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="ends the text, which goes up to it; may be given many times",
    )
    form = generation.add_mutually_exclusive_group()
    form.add_argument(
        "--json-schema", metavar="FILE", help="the text is JSON that this JSON schema allows"
    )
    form.add_argument("--regex", metavar="PATTERN", help="the text matches this pattern as a whole")
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


def _bias(text: str) -> tuple[int, float]:
    """An ID=BIAS. Raises argparse.ArgumentTypeError."""
    token, _, bias = text.partition("=")
    try:
        return natural(token), float(bias)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no ID=BIAS, such as 198=-1.5 or 198=-inf"
        ) from error


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    require_model(args)
    prompt, messages = read_prompt(args), _read_messages(args)
    if prompt is None and messages is None and args.restore is None:
        raise UsageError(
            "a prompt is missing; give --prompt, --prompt-file, --ids, --message, --messages or "
            "--restore"
        )
    if args.continue_final_message and args.messages is None:
        raise UsageError("--continue-final-message has no meaning without --messages")
    if args.draft is not None and args.speculate is None:
        args.speculate = DRAFT
    if (args.draft is not None) != (args.speculate == DRAFT):
        raise UsageError(
            f"--draft has no meaning with --speculate {args.speculate}"
            if args.draft is not None
            else f"--speculate {DRAFT}: no draft model; give --draft PATH"
        )
    _check_sampling(args)
    schema = None if args.json_schema is None else read_text("--json-schema", args.json_schema)
    config = pager_config(args)
    if args.speculate and config.exact != "all":
        raise UsageError(
            f"--speculate: --exact is {config.exact!r}, under which a token's bits depend on how "
            "many rows its forward has; use --exact all, or no --speculate"
        )
    if args.segments and messages is not None:
        raise UsageError("--segment has no meaning with messages; give --prompt")
    segments = segment_parts(args)
    places = session_places(args)
    model = load_model(args.model, args.dtype, config.device)
    draft = None if args.draft is None else _load_draft(args, config.device)
    tokenizer = load_tokenizer(args.model)
    begins = args.restore is None and segments is None
    given = prompt_ids(args, prompt, tokenizer, special_tokens=begins)
    if given is not None and not given:
        raise CliError("the prompt is empty; expected text of at least one token")
    needs = {
        "--stop needs": args.stop,
        "messages need": messages is not None,
        "--json-schema needs": schema is not None,
        "--regex needs": args.regex is not None,
    }
    needing = [words for words, given in needs.items() if given]
    if tokenizer is None and needing:
        raise CliError(f"--model {args.model} has no tokenizer, which {needing[0]}")
    args.grammar = _grammar(args, schema)

    from kvpager import Engine

    with Engine(
        model,
        config,
        tokenizer=tokenizer,
        threads=args.threads,
        store=places.store,
        draft=draft,
        progress=shows_progress(args),
    ) as engine:
        start = time.perf_counter()
        if messages is None:
            begun = _begin(args, places, segments, engine, given, tokenizer)
        else:
            begun = _Begun(places.restore(engine), reused=0, prefilled=0)
        answer = _generate(args, places, begun, messages, start)
    _report(args, answer)
    return 0


# Of kvpager.sampling.Sampling.
_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def _check_sampling(args: argparse.Namespace) -> None:
    """Looks at them before a model is loaded and a prompt computed. Raises UsageError."""
    from kvpager.sampling import Sampling  # loads torch

    if "" in args.stop:
        raise UsageError("--stop is empty; expected text")
    try:
        Sampling(
            **{name: getattr(args, name) for name in _SAMPLING},
            seed=args.seed or 0,
            logit_bias=dict(args.logit_bias),
        )
    except InvalidArgumentError as error:
        name, _, rest = str(error).partition(" ")
        raise UsageError(f"--{name.replace('_', '-')} {rest}") from error


def _read_messages(args: argparse.Namespace) -> str | list[Any] | None:
    """A message or all of them, before a model is loaded; None where none was given."""
    if args.messages is None:
        message: str | None = args.message
        return message if message is None else as_unicode("--message", message)
    text = read_text("--messages", args.messages)
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CliError(f"--messages {args.messages}: no JSON ({error})") from error
    from kvpager.text.conversation import checked_messages  # loads torch

    try:
        checked_messages(messages)
    except InvalidArgumentError as error:
        raise CliError(f"--messages {args.messages}: {error}") from error
    found: list[Any] = messages
    return found


def _grammar(args: argparse.Namespace, schema: str | None) -> Any | None:
    """Of --json-schema, whose text is given, or --regex. Raises CliError."""
    from kvpager.grammar import Grammar

    try:
        if schema is not None:
            return Grammar.json_schema(schema)
        return None if args.regex is None else Grammar.regex(args.regex)
    except InvalidArgumentError as error:
        option = "--regex" if schema is None else f"--json-schema {args.json_schema}"
        raise CliError(str(error).replace("grammar", option, 1)) from error


def _load_draft(args: argparse.Namespace, device: str) -> Any:
    """The model of --draft. Raises CliError, which names that option."""
    try:
        return load_model(args.draft, args.dtype, device)
    except CliError as error:
        raise CliError(str(error).replace("--model", "--draft", 1)) from error


class _Begun(NamedTuple):
    """A session that holds the prompt, and how many of its tokens were reused or computed."""

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


def _generate(
    args: argparse.Namespace,
    places: SessionPlaces,
    begun: _Begun,
    messages: str | list[Any] | None,
    start: float,
) -> Answer:
    session = begun.session
    options: dict[str, Any] = {
        **{name: getattr(args, name) for name in _SAMPLING},
        "logit_bias": dict(args.logit_bias),
        "stop": args.stop,
        "grammar": args.grammar,
        "seed": args.seed,
        "speculate": args.speculate,
        "logprobs": args.logprobs,
    }
    has_text = session.core.tokenizer is not None
    options["stream"] = True if has_text else "tokens"
    computed = session.tokens_computed
    if messages is None:
        stream = session.generate(args.max_new_tokens, **options)
    else:
        options["progress"] = not args.quiet
        options["control_tokens"] = args.control_tokens
        options["continue_final_message"] = args.continue_final_message
        stream = session.chat(messages, args.max_new_tokens, **options)
        new = session.tokens_computed - computed
        begun = begun._replace(reused=session.length - new, prefilled=new)
    before = session.tokens.tolist()
    done = _shown(args, stream, has_text=has_text)
    generated = time.perf_counter()
    saved = places.save(session, progress=shows_progress(args))
    first = done.first_token_s or 0.0
    return Answer(
        prompt_ids=before,
        ids=done.tokens.tolist(),
        text=done.text,
        finish_reason=done.finish_reason,
        messages=session.messages if messages is not None else None,
        logprobs=None if done.logprobs is None else done.logprobs.tolist(),
        seed=session.sampling.seed if args.temperature else None,
        speculation=session.speculation if args.speculate else None,
        reused_tokens=begun.reused,
        prefilled_tokens=begun.prefilled,
        assembly=session.assembly,
        time_to_first_token_s=generated - start - done.total_s + first,
        generate_s=done.total_s - first,
        restored_tokens=session.restored_tokens,
        restored_tokens_consumed=session.restored_tokens_consumed,
        recomputed_tokens=session.recomputed_tokens,
        saved_to=args.save,
        saved_bytes=None if saved is None else saved.bytes_written,
        saved_shared_bytes=None if saved is None else saved.bytes_shared,
        fingerprint=session.core.fingerprint,
    )


def _shown(args: argparse.Namespace, stream: Any, *, has_text: bool) -> Completion:
    """Runs a generation, and prints what it produces as it comes if that is asked for."""
    streaming = args.format == "terminal" and args.output is None
    space = ""
    for piece in stream:
        if streaming:
            token = piece if isinstance(piece, (str, int)) else piece.id
            write_stdout(f"{space}{token}")
            space = "" if has_text else " "
    if streaming:
        write_stdout("\n")
    done: Completion = stream.completion
    return done


def _report(args: argparse.Namespace, answer: Answer) -> None:
    if args.format == "json" or args.output is not None:  # else it is shown as it comes
        shown = " ".join(map(str, answer.ids)) if answer.text is None else answer.text
        emit_result(args, answer.to_json(), lambda: shown + "\n")
    note(args, answer.summary())


@dataclass(frozen=True)
class Answer:
    """The generated tokens, and what they cost.

    prompt_ids: all tokens before the generated ones. messages: of a conversation. logprobs: one per
    generated token, each exactly a float32; None unless asked for, as speculation. seed: of the
    draws; None where the text is greedy. assembly: of a text with segments.
    """

    prompt_ids: list[int]
    ids: list[int]
    text: str | None
    finish_reason: str
    messages: list[dict[str, Any]] | None
    logprobs: list[float] | None
    seed: int | None
    speculation: SpeculationStats | None
    reused_tokens: int
    prefilled_tokens: int
    assembly: Assembly | None
    time_to_first_token_s: float
    generate_s: float
    restored_tokens: int
    restored_tokens_consumed: int
    recomputed_tokens: int
    saved_to: str | None
    saved_bytes: int | None
    saved_shared_bytes: int | None
    fingerprint: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """One flat object, but for speculation, the assembly and the fingerprint."""
        values = {"command": "generate", **vars(self), "fingerprint": dict(self.fingerprint)}
        if self.assembly is not None:
            values["assembly"] = asdict(self.assembly)
        stats = self.speculation
        if stats is not None:
            values["speculation"] = asdict(stats) | {
                "acceptance": stats.acceptance,
                "tokens_per_forward": stats.tokens_per_forward,
            }
        return values

    def summary(self) -> str:
        """One line for a person."""
        return "; ".join(self._facts())

    def _facts(self) -> Iterator[str]:
        yield f"{self.reused_tokens:,} tokens reused, {self.prefilled_tokens:,} prefilled"
        if (made := self.assembly) is not None:
            yield (
                f"{made.exact:,} tokens exact, {made.moved:,} moved, {made.recomputed:,} "
                f"recomputed, {made.fresh:,} new"
            )
        if self.restored_tokens:
            consumed, restored = self.restored_tokens_consumed, self.restored_tokens
            yield f"{consumed:,} of {restored:,} restored tokens consumed"
        if self.recomputed_tokens:
            yield f"{self.recomputed_tokens:,} damaged ones computed again"
        yield f"first token after {1000 * self.time_to_first_token_s:.0f} ms"
        if len(self.ids) > 1:
            yield f"{(len(self.ids) - 1) / self.generate_s:.1f} tokens/s after it"
        if (stats := self.speculation) is not None:
            yield (
                f"{stats.tokens_per_forward:.2f} tokens per forward, {stats.accepted:,} of "
                f"{stats.proposed:,} proposed ones accepted"
            )
        if self.seed is not None:
            yield f"--seed {self.seed}"
        if self.logprobs:
            yield f"mean log-probability {sum(self.logprobs) / len(self.logprobs):.4f}"
        if self.saved_to:
            shared = f" ({self.saved_shared_bytes:,} shared)" if self.saved_shared_bytes else ""
            yield f"saved {self.saved_bytes:,} bytes{shared} to {self.saved_to}"
