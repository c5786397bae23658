"""Row counts that were proven before, of a model that is the same in all that they depend on.

They depend on the model (weights, configuration, where weights begin in a cache line), on the code
that runs it, on torch and its settings, and on the processor. Only a model whose forward runs
nothing but code of released versions of torch, transformers and peft is remembered: what other code
reads, from a file, a variable or a clock, nobody can know. A model that anything is hooked into,
whose weights are quantised, or whose modules hold an object that nothing is known of is proven
anew each time, too.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
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
from kvpager.hf.behaviour import behave
from kvpager.hf.mask_windows import mask_windows_by_name, note_mask_window
from kvpager.hf.recurrent import is_recurrent
from kvpager.opening.code_seen import (
    OWN,
    CodeSeen,
    KnownCode,
    OperatorsSeen,
    require_released_operators,
    seeing_code,
)
from kvpager.opening.findings import find_out_with
from kvpager.opening.module_state import UnknownStateError, module_state
from kvpager.opening.released_files import package_of, stamp
from kvpager.remembered import recall, remember, remembers

_log = logging.getLogger(__name__)

_KIND = "row_counts"
_LINE = 64  # bytes of a cache line: torch chooses some kernels by where in it a weight begins
# What environment variables that matrix libraries read begin with.
_LIBRARIES = (
    *("ATEN_", "BLIS_", "DNNL_", "GLIBC_", "GOMP_", "HF_", "KMP_", "MKL_", "OMP_", "ONEDNN_"),
    *("OPENBLAS_", "PEFT_", "PYTORCH_", "TORCH_", "TRANSFORMERS_"),
)
_PRELOADING = {"LD_PRELOAD", "LD_AUDIT", "DYLD_INSERT_LIBRARIES"}
# What files begin with of libraries that torch computes with, where they are not its own.
_COMPUTING = (
    *("libblas", "libblis", "libdnnl", "libgomp", "libiomp", "libm.", "libm-", "libmkl"),
    *("libmvec", "libomp", "libopenblas", "libsleef"),
)
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
    """What was found out about a model's rows, under everything that it depends on.

    It is taken and kept only of code that is known; see code_seen.py.
    """

    def __init__(self, core: EngineCore, weights: str) -> None:
        """weights: the digest of the model's, as in its fingerprint."""
        self._core = core
        self._known: KnownCode | None = None
        self._key: dict[str, Any] | None = None
        if not remembers():
            return
        try:
            self._known = KnownCode()
            self._key = _key(core, weights, self._known)
        except UnknownStateError as error:
            _proven_each_time(error)

    def take(self) -> bool:
        """Identifies the core's model with the proof that was remembered; whether there is one.

        The model runs once. What it runs then, and what comes out, have to be as they were.
        """
        found: Any = None if self._key is None else recall(_KIND, self._key)
        proof = self._proof(found)
        if proof is None:
            return False
        with seeing_code() as seen:
            find_out_with(self._core, proof)
        try:
            require_released_operators(found["operators"])
            if self._code(seen) == found["code"]:
                if self._core.numerics.behaviour == found["behaviour"]:
                    return True
                _log.warning("a proof of row counts is thrown away: the model computes otherwise")
        except (UnknownStateError, KeyError, RuntimeError, TypeError) as error:
            _proven_each_time(error)
        return False

    def remember(self) -> None:
        """Keeps the core's proof for other processes. Runs the model twice."""
        core, proof = self._core, self._core.row_proof
        if self._key is None or proof is None:
            return
        with OperatorsSeen() as operators:
            behave(core.model, proof.counts)
        with seeing_code() as seen:
            behaviour = behave(core.model, proof.counts).digest
        try:
            require_released_operators(operators.names)
            code = self._code(seen)
        except UnknownStateError as error:
            _proven_each_time(error)
            return
        core.numerics = core.numerics._replace(behaviour=behaviour)
        value = {
            "rows": proof.counts.rows,
            "smaller": proof.counts.smaller,
            "head": proof.counts.head,
            "dropped": [(one.rows, one.where) for one in proof.dropped],
            "windows": mask_windows_by_name(core.model),
            "operators": sorted(operators.names),
            "code": code,
            "behaviour": behaviour,
        }
        remember(_KIND, self._key, value)

    def _proof(self, found: Any) -> RowProof | None:
        """What was remembered, with windows noted at their modules; None: it is nothing."""
        model = self._core.model
        try:
            proof = RowProof(
                RowCounts(
                    found["rows"],
                    smaller=tuple(found["smaller"]),
                    head=tuple(found["head"]),
                ),
                tuple(Dropped(rows, where) for rows, where in found["dropped"]),
            )
            windows = [(model.get_submodule(name), window) for name, window in found["windows"]]
        except (AttributeError, KeyError, TypeError, ValueError):
            return None
        if proof.counts.rows not in self._core.row_choices:
            return None
        for module, window in windows:
            note_mask_window(module, window)
        return proof

    def _code(self, seen: CodeSeen) -> str:
        """A digest of what the modules hold whose functions ran."""
        assert self._known is not None
        return _digest(sorted(_contents(seen.modules(self._known), self._known)))


def _proven_each_time(why: object) -> None:
    _log.info("row counts are proven at every start: %s", why)


def _key(core: EngineCore, weights: str, known: KnownCode) -> dict[str, Any] | None:
    model, config = core.model, core.config
    if model.device.type != "cpu" or config.exact is False or is_recurrent(model):
        return None
    if any(map(is_quantised, model.modules())) or hooked(model):
        return None
    if any(getattr(torch_module, name) for name in _GLOBAL_HOOKS):
        return None
    if preloaded := sorted(_PRELOADING & {*os.environ}):
        raise UnknownStateError(f"{preloaded[0]} is set, which exchanges code")
    environment = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(_LIBRARIES)
    }
    return {
        "kvpager": __version__,
        "weights": weights,
        "dtype": str(model.dtype),
        "structure": _digest(*((name, str(type(one))) for name, one in model.named_modules())),
        "state": _digest(*module_state(model, known.holds)),
        "placement": _digest(
            *((name, one.data_ptr() % _LINE, one.stride()) for name, one in _tensors(model))
        ),
        "code": _code_of(model, known),
        "libraries": _digest([(file, *stamp(file)) for file in _libraries()]),
        "python": sys.version,
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


def _code_of(model: torch.nn.Module, known: KnownCode) -> str:
    """A digest of the code of a model's classes, and of kvpager's own.

    It is of the functions of the classes and of the modules that these are defined in, by their
    files, lines and defaults, of what else can be called there, and of plain values; and of each
    of kvpager's files' size and times of change.

    Raises:
        UnknownStateError: a class or a function is not of released code, a function holds what it
            was made with, or something can be called that nothing is known of.
    """
    kinds = {kind for one in model.modules() for kind in type(one).__mro__}
    kinds = {kind for kind in kinds if kind.__module__ not in ("builtins", "typing")}
    homes = {torch.nn.functional, torch.nn.modules.module}
    for kind in kinds:
        home = known.require_module(sys.modules.get(kind.__module__), kind)
        if getattr(home, kind.__qualname__, None) is not kind:
            raise UnknownStateError(f"{kind}, which was made while the program ran")
        homes.add(home)
    found = sorted(_contents([*homes, torch.Tensor, *kinds], known))
    files = sorted({_core.__file__, *map(str, OWN.rglob("*.py"))})
    return _digest(found, [(file, *stamp(file)) for file in files])


def _libraries() -> list[str]:
    """Files of machine code that a forward runs: torch's, and what computes for it elsewhere."""
    own = Path(torch.__file__).parent
    found = {*map(str, own.glob("*.so")), *map(str, own.glob("lib/*.so*"))}
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        path = line.rpartition(" ")[2]
        if path.startswith("/") and Path(path).name.startswith(_COMPUTING):
            found.add(path)
    return sorted(file for file in found if Path(file).is_file())


def _contents(owners: Iterable[Any], known: KnownCode) -> set[tuple[str, ...]]:
    """What modules and classes hold: functions by where they are, plain values, and others.

    Raises UnknownStateError.
    """
    found: set[tuple[str, ...]] = set()
    for owner in owners:
        name = owner.__name__ if isinstance(owner, ModuleType) else str(owner)
        for key, functions in _functions(owner):
            for function in functions:
                if not (
                    known.holds(function.__code__, function.__globals__)
                    or known.may_import(function)
                ):
                    file = function.__code__.co_filename
                    raise UnknownStateError(f"{name}.{key} of {file}, which is no released code")
                where = (function.__code__.co_filename, str(function.__code__.co_firstlineno))
                found.add((name, key, *where, _defaults(function)))
            if not _is_known(owner, key, functions[-1]):
                raise UnknownStateError(f"{name}.{key} holds what it was made with")
        found.update((name, key, told) for key, told in _others(owner))
    return found


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
    """The numbers that a module or a class holds, and what else can be called but classes."""
    for name, member in list(vars(owner).items()):
        if isinstance(member, (int, float, complex)):
            if not name.startswith("_") or not isinstance(member, bool):  # what is only noted
                yield name, repr(member)
        elif not callable(member) or isinstance(member, _TOLD_ELSEWHERE):
            continue
        elif isinstance(member, BuiltinFunctionType):
            yield name, f"{member.__module__}.{member.__qualname__}"
        elif type(member).__module__ == "torch._ops":
            yield name, str(member)
        elif package_of(type(member).__module__) in _TELLING:
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
