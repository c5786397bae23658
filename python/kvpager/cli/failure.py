"""How a command ends when it cannot do what was asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvpager.errors import PagerError


class CliError(Exception):
    """A failure told in one line on stderr."""

    exit_code = 1


class UsageError(CliError):
    """The command line itself is wrong."""

    exit_code = 2


DIFFERENT = 1  # exit code: what was looked for was found
IMPOSSIBLE = 3  # exit code: it could not be looked for


class ImpossibleError(CliError):
    """It could not be found out, which is another answer than yes or no."""

    exit_code = IMPOSSIBLE


@contextmanager
def or_impossible() -> Iterator[None]:
    """Failures inside end with IMPOSSIBLE, so that a script can tell them from an answer."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (CliError, PagerError, OSError) as error:
        if isinstance(error, CliError) and error.exit_code != CliError.exit_code:
            raise
        raise ImpossibleError(str(error)) from error
