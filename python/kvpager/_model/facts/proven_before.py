"""Row counts that were proven before, of a model that is the same in all that they depend on.

They depend on the model (weights, configuration, where weights begin in a cache line), on the code
that runs it, on torch and its settings, and on the processor. Only a model whose forward runs
nothing but code of released versions of torch, transformers and peft is remembered: what other code
reads, from a file, a variable or a clock, nobody can know. A model that anything is hooked into,
whose weights are quantised, or whose modules hold an object that nothing is known of is proven
at every start, too.
"""

from __future__ import annotations

import dataclasses
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

from kvpager import __version__, _core
from kvpager._model.facts.checked_model import CheckedModel
from kvpager._model.facts.code_seen import (
    OWN,
    CodeSeen,
    KnownCode,
    OperatorsSeen,
    require_released_operators,
    seeing_code,
)
from kvpager._model.facts.released_files import UnknownStateError, package_of, stamp
from kvpager._model.facts.row_counts import find_out_with
from kvpager._model.identity.behaviour import behave
from kvpager._model.identity.description import Additions, Description
from kvpager._model.model_facts import Findings
from kvpager._model.proof.prove import Dropped, RowProof
from kvpager._model.seam.attach import configurations
from kvpager._model.seam.attention import mask_windows, note_mask_window
from kvpager._model.seam.recurrent import is_recurrent
from kvpager._model.seam.rows import RowCounts
from kvpager._model.watch.reach import CACHED, Reach
from kvpager._model.weights import numerics
from kvpager._model.weights.held import is_quantised
from kvpager._support.remembered import recall, remember, remembers

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
_TYPES_SAY_ALL = (
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
_COVERED_OTHERWISE = (FunctionType, staticmethod, classmethod, type, CACHED)
# torch's own of every module, which other parts of a key cover, and what no forward reads.
_LEFT_OUT = (frozenset(vars(torch.nn.Module())) - {"training"}) | {"generation_config"}
# What torch.compile and transformers exchange in torch.nn.Module, and no forward calls.
_APART_FROM_FORWARDS = ("__init__", "__setstate__", "smart_apply")
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


class ProvenBefore:
    """Remembers findings about a model's rows, under everything that they depend on.

    It is taken and kept only of code that is known; see code_seen.py.
    """

    def __init__(self, checked: CheckedModel, weights: str, additions: Additions) -> None:
        """`weights`: the digest of the model's, as in its fingerprint."""
        self._checked = checked
        self._known: KnownCode | None = None
        self._key: dict[str, Any] | None = None
        if not remembers():
            return
        try:
            self._known = KnownCode()
            if not additions.hooked:
                self._key = _key(checked, weights, self._known)
        except UnknownStateError as error:
            _proven_each_time(error)

    def take(self) -> Findings | None:
        """What was found of the model before; None: nothing that holds.

        The model runs once. What it runs then, and what comes out, have to be as they were.
        """
        remembered: Any = None if self._key is None else recall(_KIND, self._key)
        proof = self._proof(remembered)
        if proof is None:
            return None
        with seeing_code() as seen:
            found = find_out_with(self._checked, proof)
        try:
            require_released_operators(remembered["operators"])
            if self._code(seen) == remembered["code"]:
                if found.behaviour == remembered["behaviour"]:
                    return found
                _log.warning("a proof of row counts is thrown away: the model computes otherwise")
        except (UnknownStateError, KeyError, RuntimeError, TypeError) as error:
            _proven_each_time(error)
        return None

    def remember(self, found: Findings) -> Findings:
        """Keeps a proof for other processes; adds the behaviour. Runs the model twice."""
        model, proof = self._checked.model, found.row_proof
        if self._key is None or proof is None:
            return found
        with OperatorsSeen() as operators:
            behave(model, proof.counts)
        with seeing_code() as seen:
            behaviour = behave(model, proof.counts).digest
        try:
            require_released_operators(operators.names)
            code = self._code(seen)
        except UnknownStateError as error:
            _proven_each_time(error)
            return found
        value = {
            "rows": proof.counts.rows,
            "smaller": proof.counts.smaller,
            "head": proof.counts.head,
            "dropped": [(one.rows, one.where) for one in proof.dropped],
            "windows": [*mask_windows(model).items()],
            "operators": sorted(operators.names),
            "code": code,
            "behaviour": behaviour,
        }
        remember(_KIND, self._key, value)
        return dataclasses.replace(found, behaviour=behaviour)

    def _proof(self, found: Any) -> RowProof | None:
        """What was remembered, with windows noted at their modules; None: it is nothing."""
        model = self._checked.model
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
        if proof.counts.rows not in self._checked.row_choices:
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


def _key(checked: CheckedModel, weights: str, known: KnownCode) -> dict[str, Any] | None:
    model, config = checked.model, checked.config
    if model.device.type != "cpu" or config.exact is False or is_recurrent(model):
        return None
    if any(map(is_quantised, model.modules())):
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
        "state": _digest(*_state(model, known)),
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
        "linear": checked.products,
        "rows": list(checked.row_choices),
        "small_rows": config.small_rows,
        "exact": config.exact,
        "chunk_tokens": config.chunk_tokens,
    }


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _state(model: torch.nn.Module, known: KnownCode) -> Iterator[Any]:
    """Digests of what modules and configurations hold next to weights and other modules.

    Raises UnknownStateError.
    """
    description = Description(model, Reach(model))
    for config in configurations(model):  # with whose attention and whose experts a model has
        yield type(config).__qualname__, description.of(vars(config))
    for name, module in model.named_modules():
        for key, value in sorted(vars(module).items()):
            if key not in _LEFT_OUT:
                yield name, key, description.of(value)
            for kind in description.opaque:
                raise UnknownStateError(f"{name}.{key} is a {kind.__module__}.{kind.__qualname__}")
    for function in description.functions:
        known.require(function, function.__qualname__)
        yield _where(function)


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
    """Lists what modules and classes hold: functions by place, plain values, and other callables.

    Raises UnknownStateError.
    """
    found: set[tuple[str, ...]] = set()
    for owner in owners:
        name = owner.__name__ if isinstance(owner, ModuleType) else str(owner)
        for key, functions in _functions(owner):
            for function in functions:
                if not known.may_import(function):
                    known.require(function, f"{name}.{key}")
                found.add((name, key, *_where(function)))
            if not _is_known(owner, key, functions[-1]):
                raise UnknownStateError(f"{name}.{key} holds what it was made with")
        found.update((name, key, what) for key, what in _others(owner))
    return found


def _functions(owner: Any) -> Iterator[tuple[str, list[FunctionType]]]:
    """The functions of a module or a class, each with those that it wraps, innermost last."""
    for name, member in list(vars(owner).items()):
        function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
        function = function.__wrapped__ if isinstance(function, CACHED) else function
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
        elif not callable(member) or isinstance(member, _COVERED_OTHERWISE):
            continue
        elif isinstance(member, BuiltinFunctionType):
            yield name, f"{member.__module__}.{member.__qualname__}"
        elif type(member).__module__ == "torch._ops":
            yield name, str(member)
        elif package_of(type(member).__module__) in _TYPES_SAY_ALL:
            yield name, f"{type(member).__module__}.{type(member).__qualname__}"
        else:
            raise UnknownStateError(f"{owner}.{name} is a {type(member).__qualname__}")


def _where(function: FunctionType) -> tuple[str, str, str]:
    """File and line of a function, and its defaults: plain ones by value, others by type."""
    code = function.__code__
    given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items()]
    defaults = repr([each if isinstance(each, _PLAIN) else type(each) for each in given])
    return code.co_filename, str(code.co_firstlineno), defaults


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
