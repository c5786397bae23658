"""`--file-mode`: who else may read the files that a command writes."""

from __future__ import annotations

import argparse

from kvpager.errors import InvalidArgumentError
from kvpager.stores.permissions import parse_mode


def add_mode(parser: argparse._ActionsContainer) -> None:
    """--file-mode, None where it is not given."""
    parser.add_argument(
        "--file-mode",
        dest="mode",
        type=_mode,
        metavar="OCTAL",
        help="permissions of the snapshot files that are written, whatever the umask, such as 640 "
        "for the group to read them (default: 600, as they hold prompts; a store remembers what it "
        "was told); a file that is replaced keeps the permissions that it lacks",
    )


def _mode(text: str) -> int:
    try:
        return parse_mode("mode", text)
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
