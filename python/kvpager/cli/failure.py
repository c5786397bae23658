"""Errors that end a command, and its exit codes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvpager.errors import PagerError


class CliError(Exception):
    """A failure, reported in one line on stderr."""

    exit_code = 1


class UsageError(CliError):
    """The command line itself is wrong."""

    exit_code = 2


DIFFERENT = 1  # a difference or damage was found
IMPOSSIBLE = 3  # the check could not be made
INTERRUPTED = 130  # 128 + SIGINT, as in shells
UNREAD = 141  # 128 + SIGPIPE: the reader of stdout closed it
TERMINATED = 143  # 128 + SIGTERM


class ImpossibleError(CliError):
    """The check could not be made, which is neither yes nor no."""

    exit_code = IMPOSSIBLE


@contextmanager
def or_impossible() -> Iterator[None]:
    """Failures inside the block exit with IMPOSSIBLE, so that scripts can distinguish them."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (CliError, PagerError, OSError) as error:
        if isinstance(error, CliError) and error.exit_code != CliError.exit_code:
            raise
        raise ImpossibleError(str(error)) from error
