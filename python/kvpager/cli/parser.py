"""argparse, with one-line errors that name the closest known word, and options in one line each."""

from __future__ import annotations

import argparse
import difflib
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from kvpager.cli.failure import UsageError

_Subparsers = argparse._SubParsersAction  # noqa: SLF001  # no public name

Run = Callable[[argparse.Namespace], int]

_LEAST_WIDTH = 60  # columns of --help
_FLAG_WIDTH = 22


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would print its usage and exit; accepts no abbreviations.

    Attributes:
        unread: the name under which all arguments are kept as they are; None where they are read.
        needs: options that mean nothing unless one of others is given, too.
        common: options that --help shows, where --help-all shows all; None: --help does.
    """

    unread: str | None = None
    needs: Mapping[str, Sequence[str]] = MappingProxyType({})
    common: frozenset[str] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raises UsageError with the message and where to read on."""
        raise UsageError(f"{message}; see `{self.prog} --help`")

    def show_first(self, *options: str) -> None:
        """Has --help show these options alone, and adds --help-all, which shows every one."""
        every = sum(bool(one.option_strings) for one in self._actions)
        about = f"all {every} options, and all that is to say of them"
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help=about)
        self.common = frozenset((*options, "--help-all"))

    def format_help(self) -> str:
        """As argparse's; where there are `common` options, those alone, each in one line."""
        if self.common is None:
            return super().format_help()
        width = max(_LEAST_WIDTH, shutil.get_terminal_size().columns)
        needed = "".join(f" {_flag(one)}" for one in self._actions if one.required)
        lines = [f"usage: {self.prog}{needed} [OPTION ...]", ""]
        lines += [*textwrap.wrap(self.description or "", width), ""]
        for one in self._actions:
            if self.common.intersection(one.option_strings):
                about = (one.help or "").replace("%%", "%")
                about = textwrap.shorten(about, width - _FLAG_WIDTH - 3, placeholder=" ...")
                lines.append(f"  {_flag(one):<{_FLAG_WIDTH}} {about}")
        raw = self.formatter_class is argparse.RawDescriptionHelpFormatter
        epilog = (self.epilog or "").rstrip("\n")
        lines += ["", *(epilog.splitlines() if raw else textwrap.wrap(epilog, width))]
        return "\n".join(lines).rstrip("\n") + "\n"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but an unknown option comes before anything that is missing."""
        given = [str(argument) for argument in (sys.argv[1:] if args is None else args)]
        if self.unread is not None:
            namespace, _ = super().parse_known_args([], namespace)
            setattr(namespace, self.unread, given)
            return namespace, []
        if not any(isinstance(action, _Subparsers) for action in self._actions):
            options = given[: given.index("--")] if "--" in given else given
            unknown = [
                text
                for text in options
                if text.startswith("--")
                and text.split("=", 1)[0] not in self._option_string_actions
            ]
            if unknown:
                self._refuse_unknown(unknown)
        return super().parse_known_args(args, namespace)

    def parse_all(self, argv: Sequence[str]) -> argparse.Namespace:
        """The arguments, none of them unknown. Subparsers must set the default `parser`."""
        args: argparse.Namespace
        args, unknown = self.parse_known_args(argv)
        parser: Parser = getattr(args, "parser", self)
        if unknown:
            parser._refuse_unknown(unknown)
        for name, needed in parser.needs.items():
            if parser._is_given(name, args) and not any(
                parser._is_given(other, args) for other in needed
            ):
                parser.error(f"{name} has no meaning without {' or '.join(needed)}")
        return args

    def _is_given(self, name: str, args: argparse.Namespace) -> bool:
        action = self._option_string_actions[name]
        return bool(getattr(args, action.dest) != action.default)

    def _refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        options = [argument for argument in unknown if argument.startswith("-")]
        if not options:
            self.error(f"unexpected argument {unknown[0]!r}")
        name = options[0].split("=", 1)[0]
        known = [text for action in self._actions for text in action.option_strings]
        self.error(f"unknown option {name}{closest(name, known)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            hint = suggestion(str(value), map(str, action.choices))
            raise argparse.ArgumentError(action, f"unknown {value!r}{hint}")


def _flag(action: argparse.Action) -> str:
    """An option as it is typed: its long name and what stands for its value."""
    name = action.option_strings[0 if action.option_strings[0].startswith("--") else -1]
    if action.nargs == 0:
        return name
    value = str(action.metavar or "{")
    return f"{name} {name.rpartition('-')[2].upper() if value.startswith('{') else value}"


class _HelpAll(argparse.Action):
    """Prints the help of every option, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Prints it."""
        assert isinstance(parser, Parser)
        parser.common = None
        parser.print_help()
        parser.exit()


class Commands:
    """The commands of a parser."""

    def __init__(self, parser: Parser, word: str) -> None:
        self._parsers = parser.add_subparsers(metavar=word.upper(), required=True, title=word + "s")

    def add(self, name: str, run: Run | None, about: str, description: str, **more: Any) -> Parser:
        """Adds a command with the options of all; returns its parser.

        Args:
            name: of the command.
            run: returns the exit code; None of a command that has commands itself.
            about: for the list of commands.
            description: for its own help.
            more: for its parser.
        """
        more = {"parents": [common_options()], "help": about, "description": description} | more
        parser: Parser = self._parsers.add_parser(name, **more)
        parser.set_defaults(run=run, parser=parser)
        return parser


def common_options() -> Parser:
    """The options of every command."""
    parser = Parser(add_help=False)
    group = parser.add_argument_group("output")
    told = "json: one object on stdout and nothing else"
    option(group, "--format", told, choices=("terminal", "json"), default="terminal")
    option(group, "--json", "--format json", dest="format", action="store_const", const="json")
    option(group, "--output FILE", "write the result there, not to stdout")
    option(group, "-q --quiet", "no progress, no notes: errors alone on stderr")
    return parser


def option(to: argparse._ActionsContainer, words: str, about: str, **more: Any) -> None:
    """Adds an argument; the help text ends with its default unless it says that itself.

    Args:
        to: a parser or a group of one.
        words: "--turns N" takes a value, "--full" is a switch or one of `choices`, and "file FILE"
            has a place.
        about: for the help text.
        more: for `add_argument`.
    """
    *names, last = words.split()
    if not last.startswith("-"):
        more["metavar"] = last
    else:
        names.append(last)
        if not more.keys() & {"choices", "action"}:
            more["action"] = "store_true"
    if more.get("default") not in (None, "", []) and "default" not in about:
        about += f" (default: {more['default']})"
    to.add_argument(*names, help=about, **more)


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a refusal: the closest known word, or all of them where none is close."""
    names = list(known)
    return closest(name, names) or "; expected " + ", ".join(names)


def closest(name: str, known: Iterable[str], *, most: int = 1) -> str:
    """The end of a refusal with the closest known words; empty where none is close."""
    close = difflib.get_close_matches(name, list(known), n=most, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""
