"""Row counts that were proven before, of a model that is the same in all that they depend on.

They depend on the model (weights, configuration, where weights begin in a cache line), on the code
that runs it, on torch and its settings, and on the processor. A model that anything is hooked into,
whose weights are quantised, whose modules hold an object that nothing is known of, or whose classes
are in no file is proven anew each time.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import transformers
from torch.nn.modules import module as torch_module

from kvpager import _core, numerics
from kvpager._version import __version__
from kvpager.execution.core import EngineCore
from kvpager.held import is_quantised
from kvpager.hf import Dropped, RowCounts, RowProof
from kvpager.hf.additions import hooked
from kvpager.hf.mask_windows import mask_windows_by_name, note_mask_window
from kvpager.hf.recurrent import is_recurrent
from kvpager.opening.module_state import UnknownStateError, module_state
from kvpager.remembered import recall, remember

_log = logging.getLogger(__name__)

_KIND = "row_counts"
_LINE = 64  # bytes of a cache line: torch chooses some kernels by where in it a weight begins
# What environment variables that matrix libraries read begin with.
_LIBRARIES = ("ATEN_", "DNNL_", "GOMP_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "TORCH_")
# Whose objects that can be called say by their type what they do: annotations, torch's own.
_TELLING = (
    "abc",
    "builtins",
    "collections",
    "torch",
    "transformers",
    "types",
    "typing",
    "typing_extensions",
)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CACHED = type(functools.cache(lambda: None))
_TOLD_ELSEWHERE = (FunctionType, staticmethod, classmethod, type, _CACHED)
# What torch.compile and transformers exchange in torch.nn.Module, and no forward calls.
_APART_FROM_FORWARDS = ("__init__", "__setstate__", "smart_apply")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


class ProvenBefore:
    """What was found out about a model's rows, under everything that it depends on."""

    def __init__(self, core: EngineCore, weights: str) -> None:
        """weights: the digest of the model's, as in its fingerprint."""
        self._model = core.model
        self._choices = core.row_choices
        self._key = _key(core, weights)

    def recall(self) -> RowProof | None:
        """The proof, with windows noted at their modules; None: it has to be made."""
        if self._key is None:
            return None
        found = recall(_KIND, self._key)
        try:
            proof = RowProof(
                RowCounts(
                    found["rows"],
                    smaller=tuple(found["smaller"]),
                    head=tuple(found["head"]),
                ),
                tuple(Dropped(rows, where) for rows, where in found["dropped"]),
            )
            windows = [
                (self._model.get_submodule(name), window) for name, window in found["windows"]
            ]
        except (AttributeError, KeyError, TypeError, ValueError):
            return None
        if proof.counts.rows not in self._choices:
            return None
        for module, window in windows:
            note_mask_window(module, window)
        return proof

    def remember(self, proof: RowProof) -> None:
        """Keeps a proof for other processes."""
        if self._key is None:
            return
        value = {
            "rows": proof.counts.rows,
            "smaller": proof.counts.smaller,
            "head": proof.counts.head,
            "dropped": [(one.rows, one.where) for one in proof.dropped],
            "windows": mask_windows_by_name(self._model),
        }
        remember(_KIND, self._key, value)


def _key(core: EngineCore, weights: str) -> dict[str, Any] | None:
    model, config = core.model, core.config
    if model.device.type != "cpu" or config.exact is False or is_recurrent(model):
        return None
    if any(map(is_quantised, model.modules())) or hooked(model):
        return None
    if any(getattr(torch_module, name) for name in _GLOBAL_HOOKS):
        return None
    try:
        code, state = _code_of(model), _digest(*module_state(model))
    except UnknownStateError as error:
        _log.info("row counts are proven at every start: %s", error)
        return None
    environment = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(_LIBRARIES)
    }
    return {
        "kvpager": __version__,
        "weights": weights,
        "dtype": str(model.dtype),
        "structure": _digest(*((name, str(type(one))) for name, one in model.named_modules())),
        "state": state,
        "placement": _digest(
            *((name, one.data_ptr() % _LINE, one.stride()) for name, one in _tensors(model))
        ),
        "code": code,
        "torch": [torch.__version__, torch.version.git_version],
        "transformers": transformers.__version__,
        "processor": numerics.describe_processor(model.device),
        "settings": [*map(str, numerics.settings(model.device).items())],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "environment": environment,
        "isa": _core.isa_name(),
        "linear": core.products,
        "rows": list(core.row_choices),
        "small_rows": config.small_rows,
        "exact": config.exact,
        "chunk_tokens": config.chunk_tokens,
    }


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _digest(*values: Any) -> str:
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _code_of(model: torch.nn.Module) -> str:
    """A digest of the code that a forward runs, as far as Python shows it.

    It is of the functions of the model's classes and of the modules that these are defined in, by
    their files, lines and defaults, of what else can be called there, and of each file's size and
    time of change; kvpager's own files too.

    Raises:
        UnknownStateError: a class is in no file, a function holds what it was made with, or
            something can be called that nothing is known of.
    """
    kinds = {kind for one in model.modules() for kind in type(one).__mro__}
    kinds = {kind for kind in kinds if kind.__module__ != "builtins"}
    homes = {sys.modules.get(kind.__module__) for kind in kinds} | {torch.nn.functional}
    found: set[tuple[Any, ...]] = set()
    files = {Path(_core.__file__), *_OWN.rglob("*.py")}
    for home in homes:
        if home is None or getattr(home, "__file__", None) is None:
            raise UnknownStateError(f"{home} has a class of it and is in no file")
        for owner in (home, *(kind for kind in kinds if kind.__module__ == home.__name__)):
            for name, functions in _functions(owner):
                if not _is_known(owner, name, functions[-1]):
                    raise UnknownStateError(f"{owner}.{name} holds what it was made with")
                for function in functions:
                    code, place = function.__code__, (str(owner), name)
                    found.add((*place, code.co_filename, code.co_firstlineno, _defaults(function)))
                    files.add(Path(code.co_filename))
            found.update((str(owner), name, told) for name, told in _others(owner))
    stamps = [(str(file), *_stamp(file)) for file in sorted(files) if file.is_file()]
    return _digest(sorted(found), stamps)


_OWN = Path(__file__).parents[1]


def _stamp(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


def _functions(owner: Any) -> Iterator[tuple[str, list[FunctionType]]]:
    """The functions of a module or a class, each with those that it wraps, innermost last."""
    for name, member in list(vars(owner).items()):
        function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
        function = function.__wrapped__ if isinstance(function, _CACHED) else function
        wrapped = []
        while isinstance(function, FunctionType):
            wrapped.append(function)
            function = inspect.getattr_static(function, "__wrapped__", None)
        if wrapped:
            yield name, wrapped


def _others(owner: Any) -> Iterator[tuple[str, str]]:
    """What else a module or a class holds that can be called, but classes: by its name."""
    for name, member in list(vars(owner).items()):
        if not callable(member) or isinstance(member, _TOLD_ELSEWHERE):
            continue
        if isinstance(member, BuiltinFunctionType):
            yield name, f"{member.__module__}.{member.__qualname__}"
        elif type(member).__module__.partition(".")[0] in _TELLING:
            yield name, f"{type(member).__module__}.{type(member).__qualname__}"
        else:
            raise UnknownStateError(f"{owner}.{name} is a {type(member).__qualname__}")


def _defaults(function: FunctionType) -> str:
    """Plain ones by their values, others by their types."""
    given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    return repr([each if isinstance(each, _PLAIN) else type(each) for each in given])


def _is_known(owner: Any, name: str, function: FunctionType) -> bool:
    """Whether a function's file and line say all about it.

    Not of one that was made within another function and holds what it was made with, in a class or
    in a module of another package.
    """
    if "<locals>" not in function.__qualname__:
        return True
    if isinstance(owner, type):
        held = {*function.__code__.co_freevars} - {"__class__"} or function.__defaults__
        return not held or name in _APART_FROM_FORWARDS
    package = sys.modules.get(owner.__name__.partition(".")[0], owner)
    file = Path(function.__code__.co_filename)
    return any(Path(root) in file.parents for root in getattr(package, "__path__", ()))
