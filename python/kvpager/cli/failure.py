"""How a command ends when it cannot do what was asked."""

from __future__ import annotations


class CliError(Exception):
    """A failure told in one line on stderr."""

    exit_code = 1


class UsageError(CliError):
    """The command line itself is wrong."""

    exit_code = 2
