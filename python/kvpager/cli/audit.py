"""`kvpager audit`: whether a server's cache changes its answers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvpager.cli.failure import INTERRUPTED, CliError, UsageError
from kvpager.cli.options import natural, positive, read_text
from kvpager.cli.output import emit_result, note
from kvpager.cli.parser import Commands, option
from kvpager.cli.terminal import bar, shows_progress
from kvpager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpager.audit.run import OnStep

_CODES = {"exact": 0, "corrupt": 1, "unknown": 2, "not exact": 3}
_EPILOG = """\
The key is read from the environment variable OPENAI_API_KEY where --api-key-file is not given.
About 80 requests are sent, and those that fill the cache; nothing is sent anywhere else.

Exit codes: 0 every answer is the same, to the last digit; 1 corrupt; 2 wrong command line, or it
could not be told (no answer, nothing was reused); 3 not exact, but no more than rounding; 130
interrupted, after what was found so far.

  kvpager audit http://127.0.0.1:8000
  kvpager audit http://127.0.0.1:8000 --restart-command 'systemctl restart vllm'
"""


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add(
        "audit",
        run,
        "whether the prefix cache of any OpenAI-compatible server changes its answers",
        "Sends a running server (vLLM, SGLang, llama.cpp, Dynamo, kvpager) the same texts cold,\n"
        "warm, continued, streamed, in company, after eviction and after a restart, compares\n"
        "tokens and log-probabilities, and tells rounding from corruption.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option(parser, "url URL", "the server, such as http://127.0.0.1:8000, with or without /v1")
    group = parser.add_argument_group("server")
    option(group, "--model NAME", "of the server's models (default: the first it lists)")
    option(group, "--api-key-file FILE", "its first line is the key")
    option(group, "--timeout S", "seconds that one request may take", type=positive, default=120)
    group = parser.add_argument_group("audit")
    option(group, "--prompts N", "number of texts", type=positive, default=8)
    about = "length of a text, about; longer than some blocks of the server's cache"
    option(group, "--prompt-tokens N", about, type=positive, default=600)
    option(group, "--max-tokens N", "length of an answer", type=_answer, default=24)
    option(group, "--concurrency N", "requests at a time in company", type=positive, default=4)
    about = "tokens of other texts that fill the cache at most; 0 leaves that out"
    option(group, "--eviction-tokens N", about, type=natural, default=32768)
    about = "largest difference of log-probabilities that is rounding (default: from cold runs)"
    option(group, "--limit NATS", about, type=_nats)
    about = "restarts the server; ends when the old process is gone (default: no restart)"
    option(group, "--restart-command COMMAND", about)
    about = "seconds for that command, and then for the server to answer"
    option(group, "--restart-timeout S", about, type=positive, default=300)
    parser.needs = {"--restart-timeout": ["--restart-command"]}


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from kvpager.audit import AuditError, Plan, Report, Server, audit
    from kvpager.audit.table import parts

    try:
        server = Server(args.url, key=_key(args), timeout=args.timeout)
    except InvalidArgumentError as error:
        raise UsageError(str(error)) from error
    plan = Plan(
        prompts=args.prompts,
        prompt_tokens=args.prompt_tokens,
        max_tokens=args.max_tokens,
        concurrency=args.concurrency,
        eviction_tokens=args.eviction_tokens,
        limit=args.limit,
        restart_command=args.restart_command,
        restart_seconds=args.restart_timeout,
    )
    report = Report(server.url)
    code = None
    try:
        with _progress(args) as on_step:
            audit(server, plan, report, args.model, on_step)
    except AuditError as error:
        if not report.ways:
            raise UsageError(str(error)) from error
    except KeyboardInterrupt:
        if not report.ways:
            raise
        report.ended, code = "interrupted", INTERRUPTED
    values = {"command": "audit", **report.to_json()}
    emit_result(args, values, lambda shown: shown.render(*parts(report, shown.table)))
    return _CODES[report.verdict] if code is None else code


def _key(args: argparse.Namespace) -> str | None:
    if args.api_key_file is None:
        return os.environ.get("OPENAI_API_KEY", "").strip() or None
    key = read_text("--api-key-file", args.api_key_file).partition("\n")[0].strip()
    if not key:
        raise CliError(f"--api-key-file {args.api_key_file}: its first line is empty")
    return key


def _answer(text: str) -> int:
    """At least two tokens, so that an answer has halves."""
    value = positive(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 2")
    return value


def _nats(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of at least 0")
    return value


@contextmanager
def _progress(args: argparse.Namespace) -> Iterator[OnStep]:
    """A bar where stderr is a terminal, otherwise a line for each way."""
    if shows_progress(args):
        from rich.progress import MofNCompleteColumn, TimeElapsedColumn

        with bar("audit", MofNCompleteColumn(), TimeElapsedColumn()) as update:
            yield lambda name, done, total: update(
                description=name, completed=done, total=total or None
            )
        return
    named = set[str]()

    def line(name: str, done: int, total: int) -> None:
        if name not in named:
            named.add(name)
            note(args, name)

    yield line
