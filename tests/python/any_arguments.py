"""Calls everything public of `kvpager._core` with one wrong argument at a time, the others sound.

What there is to call is read from the stub file, so that a new binding is tried without being named
here. A program of its own, because what it looks for ends the process: the last call is in the file
that it is given.
"""

from __future__ import annotations

import ast
import contextvars
import itertools
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_store import LAYOUT, Author, C, rows, text

from kvpager import _core
from kvpager.pager import ROW_PADDING

# What a caller can be expected to handle. Others, such as RuntimeError or MemoryError, say that a
# binding took what it should have refused.
TYPED = (TypeError, ValueError, OverflowError, IndexError, OSError, _core.PagerError)
# An address is a promise that there is memory.
UNTRIED = {("ByteWatch", "__init__", "ranges")}


class NoIndex:
    def __index__(self) -> int:
        raise IndexError("no number")


@dataclass(frozen=True)
class Call:
    owner: str  # class, or "" for a function of the module
    name: str
    arguments: tuple[tuple[str, str], ...]  # name and annotation, without self
    static: bool
    kind: str = "call"  # or "get", "set"


def calls() -> Iterator[Call]:
    stub = Path(__file__).parents[2] / "python/kvpager/_core.pyi"
    tree = ast.parse(stub.read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield _call("", node)
        elif isinstance(node, ast.ClassDef) and not issubclass(
            getattr(_core, node.name), Exception
        ):
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    yield _call(node.name, member)
                elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                    annotation = ast.unparse(member.annotation)
                    if "ClassVar" not in annotation:
                        arguments = (("value", annotation),)
                        yield Call(node.name, member.target.id, arguments, False, "set")


def _call(owner: str, node: ast.FunctionDef) -> Call:
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    nodes = [*node.args.args, *node.args.kwonlyargs]
    static = not owner or "staticmethod" in decorators
    arguments = tuple(
        (argument.arg, ast.unparse(argument.annotation))
        for argument in (nodes if static else nodes[1:])
        if argument.annotation is not None
    )
    kind = "call"
    if "property" in decorators:
        kind = "get"
    elif any(decorator.endswith(".setter") for decorator in decorators):
        kind = "set"
    return Call(owner, node.name, arguments, static, kind)


class Specimens:
    """Sound objects and arguments; most are made anew for each call, which may use them up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.author = Author()
        self.numbers = itertools.count()
        writer = self.instance("SnapshotWriter", folder / "sound.kvsnap")
        content = self.instance("SnapshotContent")
        writer.write_content(content, list(range(content.chunks)), "{}", "{}")
        writer.publish()
        writer.discard()

    def path(self) -> str:
        return str(self.folder / f"file-{next(self.numbers)}")

    def instance(self, kind: str, path: Path | None = None) -> Any:
        core = self.author.pager.core
        sequence = _core.OwnedSequence(core, None, "")
        if kind == "Layout":
            return LAYOUT.native()
        if kind == "Selection":
            return _core.Selection("dense")
        if kind == "PagerOptions":
            return _core.PagerOptions()
        if kind == "SnapshotContent":
            return self.author.content(text(2 * C + 3))
        if kind == "SnapshotImage":
            return _core.SnapshotImage(self.instance("SnapshotContent"), "{}", "{}")
        if kind == "SnapshotReader":
            return _core.SnapshotReader.open(str(self.folder / "sound.kvsnap"))
        if kind == "SnapshotWriter":
            return _core.SnapshotWriter(str(path or self.path()), LAYOUT.native())
        if kind == "Pager":
            return core
        if kind == "OwnedSequence":
            return sequence
        if kind == "OwnedPin":
            return _core.OwnedPin(sequence, 0, 0)
        if kind == "OwnedForward":
            return _core.OwnedForward(core, None, [(None, 0, C, 2)], [0] * C)
        if kind == "ChunkInfo":
            held = self.author.pager.sequence()
            held.append([1], *rows([1]))
            return core.ledger(held.uid)[0]
        if kind == "ByteWatch":
            return _core.ByteWatch([], 1, 0)
        if kind == "OwnedFile":
            return _core.OwnedFile(str(self.folder / "sound.kvsnap"), 0)
        if kind == "ExclusiveLock":
            return _core.ExclusiveLock(self.path(), 0.1)
        if kind == "ContextValue":
            return _core.ContextValue(contextvars.ContextVar("v"), 1)
        if kind == "Workers":
            return _core.Workers(1)
        if kind == "Device":
            return _core.Device("shim")
        if kind == "Program":
            four = (0, 0, "float32", [0, 0, 0, 1])
            steps = [("copy", [1, 1, 1, 4], 0, [four, four], False, None)]
            return _core.Program(_core.Workers(1), steps, [torch.zeros(4)], [])
        if kind == "Claim":
            return _core.Claim(_core.Place())
        return getattr(_core, kind)()

    def argument(self, name: str, annotation: str, owner: str) -> Any:
        by_name: dict[str, Callable[[], Any]] = {
            "path": self.path,
            "chunks": lambda: [(self.instance("SnapshotReader"), 0)],
            "variable": lambda: contextvars.ContextVar("v"),
            "container": list,
            "provenance": lambda: "exact",
            "which": lambda: [0],
            "sequences": lambda: [None],
            "positions": lambda: [0],
            "tokens": lambda: [0],
            "kinds": lambda: [ROW_PADDING],
            "before": lambda: None,
            "upto": lambda: C,
            "q_dtype": lambda: "float32",
            "k_dtype": lambda: "float32",
            "v_dtype": lambda: "float32",
        }
        if owner == "Pager" and name == "sequence":
            with_sequence = self.author.pager.sequence()
            self.kept = with_sequence
            return with_sequence.uid
        if name in by_name and not (name == "chunks" and "Sequence" not in annotation):
            return by_name[name]()
        if isinstance(getattr(_core, annotation, None), type):
            return self.instance(annotation)
        for part, value in (
            ("ArrayLike", [0]), ("Callable", None), ("equence", []), ("list", []), ("str", ""),
            ("SupportsInt", 1), ("SupportsFloat", 1.0), ("bool", False), ("Buffer", bytearray(4)),
            ("bytes", b""),
        ):  # fmt: skip
            if part in annotation:
                return value
        return None

    def wrong(self) -> list[Any]:
        numbers = [-1, 0, 2**31 - 1, 2**62, 2**63 - 1, 2**70, 1.5, math.nan, NoIndex()]
        words = ["x", "\ud800", "a\0b", "x" * 5000, "/", b"\xff", "/proc/self/mem"]
        groups: list[Any] = [
            [], [None], [object()], [[]], (None,), {}, [(None, 0)], [(None, 0, 1, 0)], [-1], ["x"],
            [(1, 2, 3)], np.zeros((2, 2, 2)), np.zeros(3, np.complex64), np.array(None),
            ([1], (1, 2, 3), 4), itertools.repeat(1, 3),
        ]  # fmt: skip
        cores = [self.instance(name) for name in ("Layout", "Pager", "OwnedSequence", "Place")]
        return [None, object(), *numbers, *words, *groups, *cores, lambda: None, type]


class Attempts:
    """What was called, and which of it was answered with an error that nobody expects."""

    def __init__(self, specimens: Specimens, last: Path) -> None:
        self.specimens = specimens
        self.count = 0
        self.untyped: list[str] = []
        self._last = last.open("w")

    def attempt(self, what: str, run: Callable[[], object]) -> None:
        self.count += 1
        self._last.seek(0)
        self._last.truncate()
        self._last.write(what)
        self._last.flush()
        try:
            run()
        except TYPED:
            pass
        except BaseException as error:
            self.untyped.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")

    def try_all(self, call: Call) -> None:
        what = f"{call.owner}.{call.name}"
        try:
            self._run(call, self._target(call), {})
        except TypeError as error:  # nothing would be tried then
            self.untyped.append(f"{what} with sound arguments: {error}")
        except Exception:  # of its state
            pass
        if call.kind == "get" or not call.arguments:
            self.attempt(what, lambda: self._run(call, self._target(call), {}))
            return
        for name, annotation in call.arguments:
            if (call.owner, call.name, name) in UNTRIED:
                continue
            for wrong in self.specimens.wrong():
                said = repr(wrong)[:60]
                self.attempt(
                    f"{what}({name}: {annotation} = {said})",
                    lambda: self._run(call, self._target(call), {name: wrong}),  # noqa: B023
                )

    def _target(self, call: Call) -> Any:
        if call.static or call.name == "__init__":
            return None
        return self.specimens.instance(call.owner)

    def _run(self, call: Call, target: Any, wrong: dict[str, Any]) -> object:
        values = {
            name: wrong[name]
            if name in wrong
            else self.specimens.argument(name, annotation, call.owner)
            for name, annotation in call.arguments
        }
        if call.kind == "get":
            return getattr(target, call.name)
        if call.kind == "set":
            return setattr(target, call.name, *values.values())
        if call.name == "__init__":
            return getattr(_core, call.owner)(**values)
        if call.name.startswith("__"):
            return getattr(target, call.name)(*values.values())
        where = getattr(_core, call.owner) if call.owner and call.static else target or _core
        return getattr(where, call.name)(**values)


def main() -> None:
    warnings.simplefilter("ignore")  # numpy's, of the numbers that it converts
    folder = Path(sys.argv[1])
    attempts = Attempts(Specimens(folder), Path(sys.argv[2]))
    for call in calls():
        attempts.try_all(call)
        _core.disarm_faults()
    attempts.specimens.author.pager.check_invariants()
    sys.stdout.write("".join(f"{line}\n" for line in attempts.untyped))
    sys.stdout.write(f"{attempts.count} calls\n")


if __name__ == "__main__":
    main()
