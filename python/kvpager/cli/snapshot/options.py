"""What several verbs take, and how they end."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvpager.cli.failure import CliError
from kvpager.cli.models import positive
from kvpager.errors import PagerError

_SNAPSHOT = "a snapshot file, or STORE/NAME for one that a directory store keeps"
_MOST_THREADS = 16  # a disk is busy long before

DIFFERENT = 1  # exit code: what was looked for was found
IMPOSSIBLE = 3  # exit code: it could not be looked for


class ImpossibleError(CliError):
    """It could not be found out, which is another answer than yes or no."""

    exit_code = IMPOSSIBLE


def add_snapshot(
    parser: argparse.ArgumentParser, name: str = "snapshot", metavar: str = "SNAPSHOT"
) -> None:
    """A positional argument that names a snapshot; see `address.find_snapshot`."""
    parser.add_argument(name, metavar=metavar, help=_SNAPSHOT)


def add_threads(parser: argparse.ArgumentParser) -> None:
    """--threads, of reading and checksums."""
    parser.add_argument(
        "--threads",
        type=positive,
        default=min(_MOST_THREADS, len(os.sched_getaffinity(0))),
        metavar="N",
        help="that read and check at a time (default: one per processor, %(default)s here)",
    )


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
