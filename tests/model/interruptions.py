"""KeyboardInterrupt at a chosen moment of a call: at the n-th return of any function."""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager

_RETURNS = ("return", "c_return")


@contextmanager
def interrupted(moment):
    """Raises KeyboardInterrupt in this thread at the `moment`-th return, counted from 0."""
    left = moment

    def watch(frame, event, argument):
        nonlocal left
        if event not in _RETURNS or frame.f_code is _leave.__code__:
            return
        if not left:
            sys.setprofile(None)
            raise KeyboardInterrupt
        left -= 1

    with _without_collection():
        sys.setprofile(watch)
        try:
            yield
        finally:
            _leave()


def returns_of(call):
    """How many returns a call has, and so moments to interrupt it at."""
    count = 0

    def watch(frame, event, argument):
        nonlocal count
        count += event in _RETURNS

    with _without_collection():
        sys.setprofile(watch)
        try:
            call()
        finally:
            sys.setprofile(None)
    return count


@contextmanager
def _without_collection():
    """Keeps the garbage collector's callbacks out: what is raised in one reaches nobody."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _leave():
    sys.setprofile(None)
