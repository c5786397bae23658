"""`kvpager generate`: a user's own prompt and model, saved and restored."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvpager.cli.failure import CliError, UsageError
from kvpager.cli.models import load_model, load_tokenizer
from kvpager.cli.option_flags import flag_of
from kvpager.cli.options import (
    add_model_options,
    add_prompt_options,
    as_unicode,
    natural,
    positive,
    prompt_ids,
    read_json,
    read_prompt,
    read_text,
)
from kvpager.cli.output import emit_result, note, write_stdout
from kvpager.cli.pager_options import add_pager_options, pager_config
from kvpager.cli.parser import Commands, Parser, option
from kvpager.cli.session_options import NEEDS, add_session_options, restored, session_places
from kvpager.cli.terminal import shows_progress
from kvpager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpager import Completion, Session


# Of kvpager.speculation.speculation, which needs torch.
PROPOSERS = ("prompt-lookup", "draft")
DRAFT = PROPOSERS[1]

# Numbers of kvpager.sampling.Sampling, which needs torch: name, type, metavar, help.
_SAMPLING: tuple[tuple[str, Callable[[str], float], str, str], ...] = (
    ("temperature", float, "T", "0 is greedy"),
    ("top_k", natural, "K", "0 is off"),
    ("top_p", float, "P", "1 is off"),
    ("min_p", float, "P", "keeps tokens at least this many times as likely as the most likely one"),
    (
        *("repetition_penalty", float, "X"),
        "divides positive logits, and multiplies negative ones, of tokens that occur in the text, "
        "prompt included",
    ),
    ("presence_penalty", float, "X", "subtracted from the logits of tokens that were produced"),
    ("frequency_penalty", float, "X", "likewise, times the number of their occurrences"),
)


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add(
        "generate",
        run,
        "continue a prompt, or a saved session",
        "Continues a prompt, or a session that was saved with --save, and prints what came of it. "
        "A restored session is not prefilled again, and has the bits of one that was never saved.",
    )
    add_model_options(parser)
    about = "One of these; with --restore it is appended, and may be left out."
    prompt = add_prompt_options(parser, about)
    about = (
        "a user's message, by the model's chat template; with --restore the conversation goes on"
    )
    option(prompt, "--message TEXT", about)
    about = (
        'the whole conversation, from a JSON file: [{"role": "user", "content": "..."}, ...]; with '
        "--restore as far as it is not the saved one"
    )
    option(prompt, "--messages FILE", about)
    chat = parser.add_argument_group("messages")
    about = (
        'what a control token in a message is, such as "<|im_end|>": text (default), or a token of '
        "the chat template"
    )
    option(chat, "--control-tokens", about, choices=("text", "tokens"), default="text")
    about = "go on with the last message, which is an assistant's"
    option(chat, "--continue-final-message", about)
    add_session_options(parser)
    _add_generation_options(parser)
    add_pager_options(parser)
    parser.needs = {"--continue-final-message": ["--messages"], **NEEDS}
    parser.show_first(
        *("--json", "--quiet", "--model", "--prompt", "--prompt-file", "--message", "--messages"),
        *("--restore", "--save", "--store", "--max-new-tokens", "--temperature", "--seed"),
        *("--stop", "--json-schema", "--pool-tokens", "--chunks", "--kv-dtype"),
    )


def _add_generation_options(parser: Parser) -> None:
    about = (
        "What is not given is as the model's generation_config has it where that samples, else the "
        "likeliest token is taken."
    )
    sampling = parser.add_argument_group("sampling", about)
    option(sampling, "--max-new-tokens N", "at most", type=positive, default=64)
    for name, kind, metavar, about in _SAMPLING:
        option(sampling, f"{flag_of(name)} {metavar}", about, type=kind)
    repeated: dict[str, Any] = {"action": "append", "default": []}
    about = "added to the logit of a token id, -inf to forbid it; may be repeated"
    option(sampling, "--logit-bias ID=BIAS", about, type=_bias, **repeated)
    about = (
        "of the draws (default: a fresh one, or what follows from a restored session's; printed)"
    )
    option(sampling, "--seed N", about, type=natural)
    generation = parser.add_argument_group("generation")
    about = "ends the text, which goes up to it; may be given many times"
    option(generation, "--stop TEXT", about, **repeated)
    form = generation.add_mutually_exclusive_group()
    option(form, "--json-schema FILE", "the text is JSON that this JSON schema allows")
    option(form, "--regex PATTERN", "the text matches this pattern as a whole")
    about = (
        "the same tokens in fewer forwards: where the text repeats itself "
        f"({PROPOSERS[0]}, default where only --speculate is given), or as the model of --draft "
        f"guesses ({DRAFT})"
    )
    more = {"nargs": "?", "const": PROPOSERS[0], "choices": PROPOSERS}
    option(generation, "--speculate HOW", about, **more)
    about = (
        "folder of a small model with the same vocabulary that guesses how the text goes on "
        f"(--speculate {DRAFT}); what it holds of the text is saved and restored with the session"
    )
    option(generation, "--draft PATH", about)
    about = (
        "log-probability of each token under the model; with --format json what `kvpager score "
        "--against` takes"
    )
    option(generation, "--logprobs", about)


def _bias(text: str) -> tuple[int, float]:
    """An ID=BIAS, for argparse."""
    token, _, bias = text.partition("=")
    try:
        return natural(token), float(bias)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no ID=BIAS, such as 198=-1.5 or 198=-inf"
        ) from error


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    prompt, messages = read_prompt(args), _read_messages(args)
    if prompt is None and messages is None and args.restore is None:
        raise UsageError(
            "a prompt is missing; give --prompt, --prompt-file, --ids, --message, --messages or "
            "--restore"
        )
    _check_speculation(args)
    options = _options(args)
    schema = None if args.json_schema is None else read_text("--json-schema", args.json_schema)
    config = pager_config(args)
    if args.speculate and config.exact != "all":
        raise UsageError(
            f"--speculate: --exact is {config.exact!r}, under which a token's bits depend on how "
            "many rows its forward has; use --exact all, or no --speculate"
        )
    store, place, source = session_places(args)
    model = load_model(args.model, args.dtype, config.device)
    draft = None if args.draft is None else _load_draft(args, config.device)
    tokenizer = load_tokenizer(args.model)
    given = prompt_ids(args, prompt, tokenizer, special_tokens=source is None)
    if given is not None and not given:
        raise CliError("the prompt is empty; expected text of at least one token")
    if tokenizer is None:
        _refuse_text(args, messages)
    options["grammar"] = _grammar(args, schema)
    options["stream"] = "tokens" if tokenizer is None else True

    from kvpager import Engine

    with Engine(
        model,
        config,
        tokenizer=tokenizer,
        threads=args.threads,
        store=store,
        draft=draft,
        progress=shows_progress(args),
    ) as engine:
        start = time.perf_counter()
        session = restored(args, engine, source)
        values = _generate(args, session, given, messages, options, start)
        if args.save:
            kind, bar = args.save_kv_dtype, shows_progress(args)
            saved = session.save(args.save, store=place, kv_dtype=kind, progress=bar)
            values |= {
                "saved_to": args.save,
                "saved_bytes": saved.bytes_written,
                "saved_shared_bytes": saved.bytes_shared,
            }
    if args.format == "json" or args.output is not None:  # else it is shown as it comes
        shown = " ".join(map(str, values["ids"])) if values["text"] is None else values["text"]
        emit_result(args, values, lambda _: [shown])
    note(args, "; ".join(_facts(values)))
    return 0


def _check_speculation(args: argparse.Namespace) -> None:
    if args.draft is not None and args.speculate is None:
        args.speculate = DRAFT
    if args.draft is not None and args.speculate != DRAFT:
        raise UsageError(f"--draft has no meaning with --speculate {args.speculate}")
    if args.draft is None and args.speculate == DRAFT:
        raise UsageError(f"--speculate {DRAFT}: no draft model; give --draft PATH")


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `Session.generate`, looked at before a model is loaded. Raises UsageError."""
    from kvpager.sampling import Sampling  # loads torch

    if "" in args.stop:
        raise UsageError("--stop is empty; expected text")
    given = {name: getattr(args, name) for name, *_ in _SAMPLING}
    sampling = {name: value for name, value in given.items() if value is not None}
    if args.logit_bias:
        sampling["logit_bias"] = dict(args.logit_bias)
    try:
        Sampling(**sampling, seed=args.seed or 0)
    except InvalidArgumentError as error:
        name, _, rest = str(error).partition(" ")
        raise UsageError(f"{flag_of(name)} {rest}") from error
    others = ("stop", "seed", "speculate", "logprobs")
    return sampling | {name: getattr(args, name) for name in others}


def _read_messages(args: argparse.Namespace) -> str | list[Any] | None:
    """A message or all of them, before a model is loaded; None where none was given."""
    if args.messages is None:
        return as_unicode("--message", args.message)
    messages: list[Any] = read_json("--messages", args.messages)
    from kvpager._runtime.text.conversation import checked_messages  # loads torch

    try:
        checked_messages(messages)
    except InvalidArgumentError as error:
        raise CliError(f"--messages {args.messages}: {error}") from error
    return messages


def _refuse_text(args: argparse.Namespace, messages: object) -> None:
    """Raises CliError where something is asked for that a model without a tokenizer cannot do."""
    for words, given in (
        ("--stop needs", args.stop),
        ("messages need", messages is not None),
        ("--json-schema needs", args.json_schema is not None),
        ("--regex needs", args.regex is not None),
    ):
        if given:
            raise CliError(f"--model {args.model} has no tokenizer, which {words}")


def _grammar(args: argparse.Namespace, schema: str | None) -> Any | None:
    """Of --json-schema, whose text is given, or --regex. Raises CliError."""
    from kvpager.grammar import Grammar

    try:
        if schema is not None:
            return Grammar.json_schema(schema)
        return None if args.regex is None else Grammar.regex(args.regex)
    except InvalidArgumentError as error:
        name = "--regex" if schema is None else f"--json-schema {args.json_schema}"
        raise CliError(str(error).replace("grammar", name, 1)) from error


def _load_draft(args: argparse.Namespace, device: str) -> Any:
    """The model of --draft. Raises CliError, which names that option."""
    try:
        return load_model(args.draft, args.dtype, device)
    except CliError as error:
        raise CliError(str(error).replace("--model", "--draft", 1)) from error


def _generate(
    args: argparse.Namespace,
    session: Session,
    given: list[int] | None,
    messages: str | list[Any] | None,
    options: dict[str, Any],
    start: float,
) -> dict[str, Any]:
    """Appends the prompt and generates; returns the result, JSON-able.

    prompt_ids are all tokens before the generated ones; logprobs one per generated token, each
    exactly a float32; seed that of the draws, None where the text is greedy.
    """
    computed = session.tokens_computed
    if messages is None:
        reused, prefilled = session.length, len(given or ())
        if given is not None:
            session.append(given, progress=not args.quiet)
        if args.restore is None:  # but for what a store knew of the prompt
            reused = session.restored_tokens
            prefilled -= reused
        stream: Any = session.generate(args.max_new_tokens, **options)
    else:
        stream = session.chat(
            messages,
            args.max_new_tokens,
            progress=not args.quiet,
            control_tokens=args.control_tokens,
            continue_final_message=args.continue_final_message,
            **options,
        )
        prefilled = session.tokens_computed - computed
        reused = session.length - prefilled
    before = session.tokens.tolist()
    done = _shown(args, stream)
    generated = time.perf_counter()
    first = done.first_token_s or 0.0
    speculation = None
    if args.speculate:
        stats = session.speculation
        rates = {"acceptance": stats.acceptance, "tokens_per_forward": stats.tokens_per_forward}
        speculation = asdict(stats) | rates
    return {
        "command": "generate",
        "prompt_ids": before,
        "ids": done.tokens.tolist(),
        "text": done.text,
        "finish_reason": done.finish_reason,
        "messages": session.messages if messages is not None else None,
        "logprobs": None if done.logprobs is None else done.logprobs.tolist(),
        "seed": session.sampling.seed if session.sampling.temperature else None,
        "speculation": speculation,
        "reused_tokens": reused,
        "prefilled_tokens": prefilled,
        "time_to_first_token_s": generated - start - done.total_s + first,
        "generate_s": done.total_s - first,
        "restored_tokens": session.restored_tokens,
        "restored_tokens_consumed": session.restored_tokens_consumed,
        "recomputed_tokens": session.recomputed_tokens,
        **dict.fromkeys(("saved_to", "saved_bytes", "saved_shared_bytes")),
        "fingerprint": dict(session.core.facts.fingerprint),
    }


def _shown(args: argparse.Namespace, stream: Any) -> Completion:
    """Runs a generation, and prints what it produces as it comes if that is asked for."""
    streaming = args.format == "terminal" and args.output is None
    space = ""
    for piece in stream:
        if streaming and isinstance(piece, str):
            write_stdout(piece)
        elif streaming:
            write_stdout(f"{space}{piece if isinstance(piece, int) else piece.id}")
            space = " "
    if streaming:
        write_stdout("\n")
    done: Completion = stream.completion
    return done


def _facts(values: Mapping[str, Any]) -> Iterator[str]:
    """What a line for a person says."""
    yield f"{values['reused_tokens']:,} tokens reused, {values['prefilled_tokens']:,} prefilled"
    if restored_tokens := values["restored_tokens"]:
        consumed = values["restored_tokens_consumed"]
        yield f"{consumed:,} of {restored_tokens:,} restored tokens consumed"
    if values["recomputed_tokens"]:
        yield f"{values['recomputed_tokens']:,} damaged ones computed again"
    yield f"first token after {1000 * values['time_to_first_token_s']:.0f} ms"
    if (more := len(values["ids"]) - 1) > 0:
        yield f"{more / values['generate_s']:.1f} tokens/s after it"
    if (stats := values["speculation"]) is not None:
        yield (
            f"{stats['tokens_per_forward']:.2f} tokens per forward, {stats['accepted']:,} of "
            f"{stats['proposed']:,} proposed ones accepted"
        )
    if values["seed"] is not None:
        yield f"--seed {values['seed']}"
    if logprobs := values["logprobs"]:
        yield f"mean log-probability {sum(logprobs) / len(logprobs):.4f}"
    if values["saved_to"]:
        shared = values["saved_shared_bytes"]
        told = f" ({shared:,} shared)" if shared else ""
        yield f"saved {values['saved_bytes']:,} bytes{told} to {values['saved_to']}"
