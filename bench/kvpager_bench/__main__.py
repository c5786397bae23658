"""`kvpager bench`: what it is asked for, and what it shows."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvpager.cli.failure import CliError, UsageError
from kvpager.cli.options import natural
from kvpager.cli.output import check_output, emit_result, note
from kvpager.cli.parser import Parser, common_options, suggestion
from kvpager.cli.terminal import look
from kvpager_bench import suite as suites
from kvpager_bench.display import display, summary_lines
from kvpager_bench.peers import environments
from kvpager_bench.places import module_environment, results_dir
from kvpager_bench.question import QUESTIONS, Question, suite
from kvpager_bench.report import MissingNumberError
from kvpager_bench.suite import FULL, QUICK, STANDARD, SUFFIXES, Plan

TABLES, PEERS = "tables", "peers"
_PEER_ACTIONS = ("list", "install", "remove")
_EPILOG = """\
other uses:
  kvpager bench tables                        pages and pictures anew, from what was measured
  kvpager bench peers [list]                  peers that need an environment of their own
  kvpager bench peers install|remove [PEER...]
  kvpager bench QUESTION -- OPTIONS           options of one question; `-- --help` lists them

Figures go to DIR/NAME.json, what a question prints to DIR/logs/NAME.log. A peer that cannot be had
is left out and named. Exit codes: 0, also when an aim was missed (which is said); 1 a question
failed; 2 wrong command line; 130 interrupted, with what was finished kept.
"""


def main(words: Sequence[str]) -> int:
    """Runs the command line behind `kvpager bench`; returns the exit code.

    Raises:
        CliError: what is asked for is none, or cannot be done.
    """
    at = words.index("--") if "--" in words else len(words)
    args = _parser().parse_all(words[:at])
    args.extra = list(words[at + 1 :])
    check_output(args)
    if args.list:
        return _list(args)
    if args.words[:1] == [TABLES]:
        return _tables(args)
    if args.words[:1] == [PEERS]:
        return _peers(args)
    return _measure(args, _plan(args))


def _parser() -> Parser:
    parser = Parser(
        prog="kvpager bench",
        parents=[common_options()],
        description="Measures on this machine, from a checkout of the sources, every figure "
        "beside a peer's or a roofline's of the same run. Without a QUESTION, the suite: "
        "under 40 minutes on 2 quiet cores.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words", nargs="*", metavar="QUESTION", help="what to measure; --list names them all"
    )
    parser.add_argument("--list", action="store_true", help="the questions there are, and stop")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", action="store_true", help="small sizes, to see that it works; files NAME-quick"
    )
    size.add_argument("--full", action="store_true", help="every size; files NAME-full")
    parser.add_argument("--all", action="store_true", help="every question, not the suite's alone")
    parser.add_argument(
        "--threads", type=natural, metavar="N", help="of kvpager and of every peer (default: 2)"
    )
    parser.add_argument(
        "--results", metavar="DIR", help="where figures go (default: bench/results)"
    )
    return parser


def _size(args: argparse.Namespace) -> str:
    return QUICK if args.quick else FULL if args.full else STANDARD


def _plan(args: argparse.Namespace) -> Plan:
    if args.threads == 0:
        raise UsageError("--threads 0: expected at least 1")
    questions = _questions(args)
    if args.extra and len(questions) != 1:
        raise UsageError(
            f"options after -- are of one question; expected one QUESTION, got {len(questions)}"
        )
    if any(word.partition("=")[0] == "--results" for word in args.extra):
        raise UsageError("--results is after --; expected it before, where reports are looked for")
    return Plan(
        questions,
        _results(args),
        size=_size(args),
        threads=args.threads,
        extra=tuple(args.extra),
    )


def _questions(args: argparse.Namespace) -> tuple[Question, ...]:
    for name in args.words:
        if name not in QUESTIONS:
            hint = suggestion(name, [*QUESTIONS, TABLES, PEERS])
            raise UsageError(f"there is no question {name!r}{hint}")
    if args.all:
        if args.words:
            raise UsageError(f"--all asks every question; expected no {args.words[0]!r} beside it")
        return tuple(QUESTIONS.values())
    return tuple(QUESTIONS[name] for name in dict.fromkeys(args.words)) or suite()


def _results(args: argparse.Namespace) -> Path:
    return Path(args.results if args.results is not None else results_dir()).resolve()


def _list(args: argparse.Namespace) -> int:
    _refuse_more(args, "--list", args.words)
    shown = look(args)
    table = shown.table("Questions")
    table.add_column("question", no_wrap=True)
    table.add_column("asks", ratio=1)
    table.add_column("minutes", justify="right")
    table.add_column("suite")
    table.add_column("beside")
    for question in QUESTIONS.values():
        table.add_row(
            question.name,
            question.asks,
            f"{question.minutes:g}",
            "yes" if question.in_suite else "",
            ", ".join(question.peers),
        )
    values = {"questions": [vars(question) for question in QUESTIONS.values()]}
    emit_result(args, values, lambda _: shown.render(table))
    return 0


def _measure(args: argparse.Namespace, plan: Plan) -> int:
    if {"-h", "--help"} & set(plan.extra):
        return _help_of(plan)
    with display(args, plan) as watcher:
        summary = suites.ask_all(plan, watcher)
    emit_result(args, summary.to_json(), lambda shown: summary_lines(shown, summary))
    if summary.interrupted:
        raise KeyboardInterrupt
    return 1 if summary.failed else 0


def _help_of(plan: Plan) -> int:
    return subprocess.run(
        plan.command(plan.questions[0]), check=False, env=module_environment()
    ).returncode


def _tables(args: argparse.Namespace) -> int:
    from kvpager_bench.tables import write_all

    _refuse_more(args, TABLES, args.words[1:])
    try:
        written = write_all(_results(args), SUFFIXES[_size(args)])
    except MissingNumberError as error:
        raise CliError(str(error)) from error
    lines = [f"wrote {path}" for path in written.files]
    if written.missing:
        lines.append(f"not measured: {', '.join(written.missing)}")
    values = {"files": [*map(str, written.files)], "missing": list(written.missing)}
    emit_result(args, {"command": "bench tables", **values}, lambda _: lines)
    return 0


def _peers(args: argparse.Namespace) -> int:
    action, *names = args.words[1:] or ["list"]
    if action not in _PEER_ACTIONS:
        raise UsageError(f"peers {action!r} is unknown{suggestion(action, _PEER_ACTIONS)}")
    for name in names:
        if name not in environments.PEERS:
            hint = suggestion(name, environments.PEERS)
            raise UsageError(f"there is no peer {name!r}{hint}")
    _refuse_more(args, f"peers {action}", [])
    failures = {}
    for name in names or environments.PEERS:
        if action == "install":
            try:
                environments.install(name, lambda line: note(args, line))
            except environments.PeerError as error:
                failures[name] = str(error)
                note(args, f"{name}: {error}")
        elif action == "remove":
            environments.remove(name)
    _tell_peers(args, names or list(environments.PEERS), failures)
    return 1 if failures else 0


def _tell_peers(args: argparse.Namespace, names: list[str], failures: dict[str, str]) -> None:
    found = {name: environments.find(name) for name in names}
    states = {
        name: {
            "title": peer.title,
            "gives": peer.recipe.gives,
            "installed": isinstance(peer, environments.Peer),
            "reason": peer.reason if isinstance(peer, environments.Missing) else None,
            "failure": failures.get(name),
        }
        for name, peer in found.items()
    }
    shown = look(args)
    table = shown.table(f"Peers in {environments.root()}")
    for column in ("peer", "version", "for"):
        table.add_column(column)
    table.add_column("installed", ratio=1)
    for name, state in states.items():
        said = "yes" if state["installed"] else f"no: {state['reason']}"
        table.add_row(name, str(state["title"]), str(state["gives"]), said)
    values = {"folder": str(environments.root()), "peers": states}
    emit_result(args, values, lambda _: shown.render(table))


def _refuse_more(args: argparse.Namespace, what: str, words: list[str]) -> None:
    given = [*words, *args.extra]
    if given:
        raise UsageError(f"{what} takes nothing after it; got {given[0]!r}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
