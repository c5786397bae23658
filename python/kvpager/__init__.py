"""kvpager: pages the KV cache of long conversations through a hard-bounded pool.

`Engine` runs a transformers model, `Cache` is for its own `generate`, and `Pager` serves a stack
that runs its own. What is less often needed is in submodules:

- `kvpager.pager`: sequences, forwards and rows of the lower level.
- `kvpager.requests`: many prompts at once, step by step.
- `kvpager.stores`: snapshots that share chunks, budgets, garbage collection.
- `kvpager.grammar`: text that follows a JSON schema or another grammar.
- `kvpager.segments`: texts computed once and used at any position.
- `kvpager.companions`, `kvpager.drafts`, `kvpager.speculation`: caches of other models beside a
  text's own, and guesses of the next tokens.
- `kvpager.connectors`: kvpager's stores inside vLLM, its forwards inside TRL.
- `kvpager.verify`: the contract as relations that anybody can check.
- `kvpager.errors`: all errors; the rare ones are only there.

Names are loaded when first used, so that `import kvpager` costs nothing until torch is needed.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpager._model.layout import Layout
    from kvpager._model.watch.looks import only_looks
    from kvpager._runtime.scheduling.agreement import Agreement
    from kvpager._runtime.scheduling.completion import Completion
    from kvpager._runtime.scheduling.options import GenerationOptions
    from kvpager._runtime.scheduling.score import Score
    from kvpager._runtime.scheduling.stream import GeneratedToken
    from kvpager._runtime.snapshots.saving import SaveHandle
    from kvpager.config import Dense, PagerConfig, PagerOptions, TopK, Window
    from kvpager.engine import Engine
    from kvpager.errors import (
        CapacityError,
        CorruptSnapshotError,
        FingerprintMismatchError,
        InvalidArgumentError,
        ModelChangedError,
        NonFiniteError,
        PagerError,
        PrefixMismatchError,
        RestoreNotConsumedError,
        StorageError,
        UnsupportedModelError,
        UnsupportedVersionError,
    )
    from kvpager.pager import Pager, open_snapshot
    from kvpager.session import Reuse, Session
    from kvpager.stores import DirectoryStore, FileStore, SaveReport
    from kvpager.transformers_cache.cache import Cache

_HOME = {
    "Agreement": "kvpager._runtime.scheduling.agreement",
    "Cache": "kvpager.transformers_cache.cache",
    "CapacityError": "kvpager.errors",
    "Completion": "kvpager._runtime.scheduling.completion",
    "CorruptSnapshotError": "kvpager.errors",
    "Dense": "kvpager.config",
    "DirectoryStore": "kvpager.stores",
    "Engine": "kvpager.engine",
    "FileStore": "kvpager.stores",
    "FingerprintMismatchError": "kvpager.errors",
    "GeneratedToken": "kvpager._runtime.scheduling.stream",
    "GenerationOptions": "kvpager._runtime.scheduling.options",
    "InvalidArgumentError": "kvpager.errors",
    "Layout": "kvpager._model.layout",
    "ModelChangedError": "kvpager.errors",
    "NonFiniteError": "kvpager.errors",
    "Pager": "kvpager.pager",
    "PagerConfig": "kvpager.config",
    "PagerError": "kvpager.errors",
    "PagerOptions": "kvpager.config",
    "PrefixMismatchError": "kvpager.errors",
    "RestoreNotConsumedError": "kvpager.errors",
    "Reuse": "kvpager.session",
    "SaveHandle": "kvpager._runtime.snapshots.saving",
    "SaveReport": "kvpager.stores",
    "Score": "kvpager._runtime.scheduling.score",
    "Session": "kvpager.session",
    "StorageError": "kvpager.errors",
    "TopK": "kvpager.config",
    "UnsupportedModelError": "kvpager.errors",
    "UnsupportedVersionError": "kvpager.errors",
    "Window": "kvpager.config",
    "only_looks": "kvpager._model.watch.looks",
    "open_snapshot": "kvpager.pager",
}
_SUBMODULES = frozenset(
    {
        "companions",
        "config",
        "connectors",
        "drafts",
        "errors",
        "grammar",
        "pager",
        "requests",
        "sampling",
        "segments",
        "speculation",
        "stores",
        "verify",
    }
)

__version__ = "0.1.0"

logging.getLogger("kvpager").addHandler(logging.NullHandler())


def _fix_workspace() -> None:
    """Gives cuBLAS one size of workspace for all products, unless it has been asked for already.

    In another engine's process its products are its own business.
    """
    if "vllm" in sys.modules:
        return
    torch = sys.modules.get("torch")
    if torch is None or (torch.version.cuda and not torch.cuda.is_initialized()):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


_fix_workspace()

__all__ = [
    "Agreement",
    "Cache",
    "CapacityError",
    "Completion",
    "CorruptSnapshotError",
    "Dense",
    "DirectoryStore",
    "Engine",
    "FileStore",
    "FingerprintMismatchError",
    "GeneratedToken",
    "GenerationOptions",
    "InvalidArgumentError",
    "Layout",
    "ModelChangedError",
    "NonFiniteError",
    "Pager",
    "PagerConfig",
    "PagerError",
    "PagerOptions",
    "PrefixMismatchError",
    "RestoreNotConsumedError",
    "Reuse",
    "SaveHandle",
    "SaveReport",
    "Score",
    "Session",
    "StorageError",
    "TopK",
    "UnsupportedModelError",
    "UnsupportedVersionError",
    "Window",
    "__version__",
    "only_looks",
    "open_snapshot",
]


if not TYPE_CHECKING:  # checkers know the names above and no others

    def __getattr__(name: str) -> Any:
        if name in _SUBMODULES:
            return importlib.import_module(f"kvpager.{name}")
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_SUBMODULES})
