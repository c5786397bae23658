"""The code that a forward of a model runs: seen while it runs, and said to be known or not.

Known are Python's own library, kvpager, and torch, transformers and peft as they were released.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch.backends import PropModule
from torch.utils._python_dispatch import TorchDispatchMode

from kvpager._model.facts.released_files import (
    RELEASED,
    UnknownStateError,
    is_released,
    package_of,
    require_released_modules,
    required_packages,
)
from kvpager._support.process import without_collections

OWN = Path(__file__).parents[2]

_STDLIB = f"{sysconfig.get_paths()['stdlib']}{os.sep}"
_SITE = (f"{_STDLIB}site-packages", f"{_STDLIB}dist-packages")
# Whose functions in machine code may run.
_BUILTINS = frozenset({*sys.stdlib_module_names, *RELEASED, "kvpager", "numpy"})
_REGISTERED = re.compile(r"registered at (.+):\d+")
_FORWARD = torch.nn.Module.__call__.__code__


class KnownCode:
    """Decides whether code is known. Made at each start, because files change."""

    def __init__(self) -> None:
        """Raises UnknownStateError: a loaded file of torch, transformers or peft was changed."""
        require_released_modules()
        self._required = required_packages()
        self._held: dict[str, bool] = {}

    def holds(self, code: CodeType, names: dict[str, Any]) -> bool:
        """Whether a function with this code and these global names is known."""
        file = code.co_filename
        if file.startswith("<frozen "):
            return package_of(file[8:-1]) in sys.stdlib_module_names
        if file.startswith("<"):  # made from text, as dataclasses make methods
            file = getattr(_module_of(names), "__file__", None) or ""
        home = sys.modules.get(str(names.get("__name__")))
        if home and getattr(home, "__file__", None) == file and not _has_names(home, names):
            return False  # its code, with names of somebody else
        return self.holds_file(file)

    def holds_file(self, file: str) -> bool:
        """Whether all functions of a file are known."""
        if file not in self._held:
            stdlib = file.startswith(_STDLIB) and not file.startswith(_SITE)
            self._held[file] = stdlib or file.startswith(f"{OWN}{os.sep}") or is_released(file)
        return self._held[file]

    def require(self, function: FunctionType, what: object) -> None:
        """Raises UnknownStateError, in which `what` is named, unless a function is known."""
        code = function.__code__
        if not self.holds(code, function.__globals__):
            raise UnknownStateError(f"{what} of {code.co_filename}, which is no released code")

    def may_import(self, function: FunctionType) -> bool:
        """Whether released code imports a function that is not known, which then may not run."""
        return package_of(function.__module__ or "") in self._required

    def require_module(self, module: ModuleType | None, what: object) -> ModuleType:
        """The module, if its file is known; `what` is named in the error.

        Raises UnknownStateError.
        """
        file = getattr(module, "__file__", None)
        if module is None or file is None or not self.holds_file(file):
            raise UnknownStateError(f"{what} of {file or 'no file'}, which is no released code")
        return module


class CodeSeen:
    """Notes the functions that run in forwards: of Python and in machine code."""

    def __init__(self) -> None:
        self._codes: dict[CodeType, dict[str, Any]] = {}
        self._builtins: dict[str, str] = {}
        self._depth = 0  # of calls within a model's
        self.complete = False

    def modules(self, known: KnownCode) -> list[ModuleType]:
        """The modules whose functions ran, in the order of their names.

        Raises:
            UnknownStateError: some that ran are not known, or it could not be seen.
        """
        if not self.complete or not self._codes:
            raise UnknownStateError("a forward that another profiler looks at")
        found = {}
        for code, names in self._codes.items():
            if not known.holds(code, names):
                raise UnknownStateError(
                    f"{code.co_name} in {code.co_filename}, which is no released code"
                )
            module = _module_of(names)
            if module is not None and package_of(module.__name__) in RELEASED:
                found[module.__name__] = module
        for package, name in sorted(self._builtins.items()):
            if package not in _BUILTINS:
                raise UnknownStateError(f"{package}'s {name}, which is no released code")
        return [found[name] for name in sorted(found)]

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """As `sys.setprofile` calls it."""
        if event == "call":
            if self._depth or frame.f_code is _FORWARD:
                self._depth += 1
                self._codes.setdefault(frame.f_code, frame.f_globals)
        elif not self._depth:
            return
        elif event == "return":
            self._depth -= 1
        elif event == "c_call":
            owner = getattr(argument, "__self__", None)
            kind = owner if isinstance(owner, type) else type(owner)
            home = getattr(argument, "__module__", None) or kind.__module__
            self._builtins.setdefault(package_of(str(home)), str(argument))


@contextmanager
def seeing_code() -> Iterator[CodeSeen]:
    """Sees what runs in this thread within calls of modules of torch.

    Nothing is seen while somebody else's profiler runs.
    """
    seen = CodeSeen()
    if sys.getprofile() is not None:
        yield seen
        return
    with without_collections():
        sys.setprofile(seen.note)
        try:
            yield seen
            seen.complete = sys.getprofile() == seen.note
        finally:
            sys.setprofile(None)


class OperatorsSeen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the names of torch's operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def require_released_operators(names: Iterable[str]) -> None:
    """Raises UnknownStateError unless torch alone has registered kernels of these operators."""
    dump = torch._C._dispatch_dump  # noqa: SLF001
    built = _REGISTERED.search(dump("aten::mm"))
    root = "" if built is None else built[1].partition("build/")[0]
    for name in names:
        lines = dump(name).splitlines()
        kernels = [line for line in lines if not line.startswith("Meta")]  # computes shapes alone
        for place in _REGISTERED.findall("\n".join(kernels)) or ["nowhere"]:
            if not root or not place.startswith(root):
                raise UnknownStateError(f"operator {name} of {place}, which is not torch's")


def _module_of(names: dict[str, Any]) -> ModuleType | None:
    """The module whose global names these are; None: there is no such module any more."""
    module = sys.modules.get(str(names.get("__name__")))
    return module if isinstance(module, ModuleType) and _has_names(module, names) else None


def _has_names(module: ModuleType, names: dict[str, Any]) -> bool:
    """Whether these are the global names of a module's functions."""
    if isinstance(module, PropModule):  # stands in for the module, for torch's flags
        module = module.m
    return vars(module) is names
