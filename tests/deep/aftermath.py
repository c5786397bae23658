"""What must hold of a world after an operation on it was made to fail, or interrupted."""

from __future__ import annotations

import contextlib
from pathlib import Path

from small_store import Author

from deep.operations import Operation
from deep.worlds import STORE, Held, held, left_over
from kvpager.errors import PagerError
from kvpager.stores import DirectoryStore


class AlreadyDoneError(Exception):
    """There is nothing to be done any more."""


def check_holds(
    operation: Operation, author: Author, folder: Path, *, done: bool, failed: bool
) -> None:
    """Every bit of what was there, or of what the operation leaves.

    done: what the operation leaves is allowed. failed: so is what was there; both: either.
    """
    allowed = [operation.done] * (done or operation.partly) + [operation.before] * failed
    found = held(author, folder)
    assert found in allowed, f"holds {_sizes(found)} of {[_sizes(one) for one in allowed]}"


def check_goes_through(operation: Operation, author: Author, folder: Path) -> None:
    """The operation can be repeated, `gc` takes nothing of it, and nothing is left over."""
    with contextlib.suppress(AlreadyDoneError):
        _once_more(operation, author, folder)
    found = held(author, folder)
    assert found == operation.done, f"afterwards it holds {_sizes(found)}"
    if (folder / STORE / "store.json").exists():
        DirectoryStore(folder / STORE, create=False).gc()
        assert held(author, folder) == operation.done, "gc took something"
    left = left_over(folder)
    assert not left, f"left over: {left}"


def _once_more(operation: Operation, author: Author, folder: Path) -> None:
    try:
        operation.run(author, folder)
    except PagerError as error:
        said = str(error)
        if operation.again and ("there is no" in said or "No such file" in said):
            raise AlreadyDoneError from error
        raise AssertionError(f"refused the second time too: {said}") from error


def _sizes(held: Held) -> dict[str, int]:
    return {name: len(tokens) for name, tokens in held.items()}
