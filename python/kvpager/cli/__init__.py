"""The `kvpager` command.

Results go to stdout (or `--output`), everything else to stderr. Exit codes: 0, 1 for a failure, 2
for a wrong command line, 130 when interrupted, 141 when stdout was closed by its reader, 143 when
terminated; `snapshot verify` and `snapshot diff` have a further one, 3, and say so. A failure is
one line; KVPAGER_DEBUG=1 shows where it came from.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType

# Before torch loads its OpenMP runtime, whose threads otherwise spin between operations and take
# the cores from everything else.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from kvpager.cli.failure import INTERRUPTED, TERMINATED, UNREAD, CliError
from kvpager.errors import PagerError

__all__ = ["main"]


class _TerminatedError(BaseException):
    """SIGTERM, as an exception, so that what was begun is cleaned up."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the process's own) and returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    previous = _on_sigterm(_terminate)
    try:
        # Imported here, so that an interrupt while modules load is handled like any other.
        from kvpager.cli.commands import parse
        from kvpager.cli.output import check_output, noting

        args = parse(arguments)
        check_output(args)
        with noting(args, "kvpager.stores.catalogue"):
            code: int = args.run(args)
    except KeyboardInterrupt:
        return _failed("interrupted", INTERRUPTED)
    except _TerminatedError:
        return _failed("terminated", TERMINATED)
    except BrokenPipeError:  # stdout's reader has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except CliError as error:
        return _failed(str(error), error.exit_code)
    except (PagerError, OSError) as error:
        return _failed(str(error), 1)
    finally:
        _on_sigterm(previous)
    return code


def _failed(message: str, code: int) -> int:
    if os.environ.get("KVPAGER_DEBUG", "") not in ("", "0"):
        traceback.print_exc()
    if sys.stderr is not None:  # print would take stdout then
        print("kvpager: " + " ".join(message.split()), file=sys.stderr)
    return code


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _TerminatedError


def _on_sigterm(handler: signal._HANDLER) -> signal._HANDLER:
    try:
        return signal.signal(signal.SIGTERM, handler)
    except ValueError:  # not the main thread: signals belong to the embedding program
        return handler
