"""argparse, with one-line errors that name the closest known word."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from kvpager.cli.failure import UsageError

_Subparsers = argparse._SubParsersAction  # noqa: SLF001  # no public name


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would print its usage and exit; accepts no abbreviations.

    passes_on: the name under which what follows `--` is kept, unread; None where nothing may.
    """

    passes_on: str | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raises UsageError with the message and where to read on."""
        raise UsageError(f"{message}; see `{self.prog} --help`")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but an unknown option comes before anything that is missing."""
        given = [str(argument) for argument in (sys.argv[1:] if args is None else args)]
        if self.passes_on is not None:
            at = given.index("--") if "--" in given else len(given)
            namespace = argparse.Namespace() if namespace is None else namespace
            setattr(namespace, self.passes_on, given[at + 1 :])
            args = given = given[:at]
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
        if unknown:
            parser: Parser = getattr(args, "parser", self)
            parser._refuse_unknown(unknown)
        return args

    def _refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        options = [argument for argument in unknown if argument.startswith("-")]
        if not options:
            self.error(f"unexpected argument {unknown[0]!r}")
        name = options[0].split("=", 1)[0]
        known = [text for action in self._actions for text in action.option_strings]
        hint = suggestion(name, known)
        self.error(f"unknown option {name}" + (hint if "did you mean" in hint else ""))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            hint = suggestion(str(value), known)
            raise argparse.ArgumentError(action, f"unknown {value!r}{hint}")


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a refusal: the closest known word, or all of them where none is close."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else "; expected " + ", ".join(names)
