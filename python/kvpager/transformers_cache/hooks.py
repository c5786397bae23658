"""Hooks on a live model that find a cache among the arguments of a call.

They are functions without state: a copy of the model, or one that was pickled with them, has hooks
that find nothing. A call without one of our caches passes through.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from kvpager._model.seam.attention import current, replace
from kvpager._model.seam.causal_lm import CACHE_ARGUMENTS, decoder_of
from kvpager._model.seam.hooks import remove_hooks
from kvpager.errors import InvalidArgumentError, UnsupportedModelError
from kvpager.transformers_cache.call import CacheCall, joined
from kvpager.transformers_cache.layers import CacheAttention
from kvpager.transformers_cache.rows import Rows, rows_of

if TYPE_CHECKING:
    from kvpager.transformers_cache.cache import Cache

# Per column, and cut with them; everything else has to be the same for all parts of a prompt.
_CUT = ("input_ids", "position_ids", "token_type_ids")

_signatures: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


class Hooks:
    """The hooks on one model and its decoder; they go with the last reference to this."""

    _on: ClassVar[weakref.WeakValueDictionary[int, Hooks]] = weakref.WeakValueDictionary()

    def __init__(self, model: Any) -> None:
        self.model = weakref.ref(model)
        decoder = decoder_of(model)
        modules = [decoder] if decoder is model else [model, decoder]
        references = [weakref.ref(module) for module in modules]
        self._removal = weakref.finalize(self, _remove, references)
        self._removal.atexit = False
        _remove(references)  # those that a copy of a model has from the original
        if decoder is not model:
            model.register_forward_pre_hook(before_model, with_kwargs=True)
            model.register_forward_hook(after_model, with_kwargs=True, always_call=True)
        decoder.register_forward_pre_hook(before_decoder, with_kwargs=True)
        decoder.register_forward_hook(after_decoder, with_kwargs=True, always_call=True)

    @classmethod
    def of(cls, model: Any) -> Hooks:
        """The hooks on a model, which all its caches share."""
        known = cls._on.get(id(model))
        if known is None or known.model() is not model:
            known = cls(model)
            cls._on[id(model)] = known
        return known


def before_model(module: Any, args: Any, kwargs: Any) -> None:
    """Begins the transaction of a call of the whole model."""
    cache = _cache_in(module, args, kwargs)
    _forget_interrupted()
    if cache is None:
        return
    arguments = _named(module, args, kwargs)
    keep = arguments.get("logits_to_keep", 0)
    _require_possible(module, cache, arguments)
    cache.host.begin(
        cache.texts,
        module,
        keep if isinstance(keep, int) and keep > 0 else None,
        sys._getframe(1),  # noqa: SLF001  # torch's, which runs the call
    )


def before_decoder(module: Any, args: Any, kwargs: Any) -> Any:
    """Runs all parts of a prompt but the last, which it hands on."""
    cache = _cache_in(module, args, kwargs)
    _forget_interrupted()
    if cache is None:
        return None
    call = cache.host.call
    frame = sys._getframe(1)  # noqa: SLF001  # torch's, which runs the decoder
    arguments = _named(module, args, kwargs)
    if call is not None and call.expected:
        call.expected = False
        call.enter(frame)
        return None
    if call is None or call.texts is not cache.texts or call.forward is not None or call.ran:
        _require_possible(module, cache, arguments)
        call = cache.host.begin(cache.texts, module, None, frame)
    try:
        last = _run_but_last(module, cache, call, arguments)
        call.enter(frame)
    except BaseException:
        cache.host.end(call, undo=True)
        raise
    return (), last


def after_decoder(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
    """Commits the part that has run; undoes the call if it failed."""
    cache = _cache_in(module, args, kwargs)
    call = None if cache is None else cache.host.call
    if cache is None or call is None or not call.is_decoders(sys._getframe(1)):  # noqa: SLF001
        return None
    try:
        if output is None:
            cache.host.end(call, undo=True)
            return None
        call.commit()
        if call.nested:
            return None
        output = joined(call.outputs, output, call.keep)
        call.outputs = []
        if call.owner is module:
            cache.host.end(call)
    except BaseException:
        cache.host.end(call, undo=True)
        raise
    return output


def after_model(module: Any, args: Any, kwargs: Any, output: Any) -> None:
    """Ends the transaction."""
    cache = _cache_in(module, args, kwargs)
    call = None if cache is None else cache.host.call
    if cache is None or call is None or not call.is_owners(sys._getframe(1)):  # noqa: SLF001
        return
    if output is not None and not call.ran:
        cache.host.end(call, undo=True)
        raise UnsupportedModelError(
            f"{type(module).__name__} did not hand its cache to its decoder, "
            f"{type(decoder_of(module)).__name__}, so that nothing was kept"
        )
    cache.host.end(call, undo=output is None)


def _run_but_last(module: Any, cache: Cache, call: CacheCall, arguments: dict[str, Any]) -> Any:
    """The arguments of the last part, whose forward has begun."""
    rows = rows_of(
        call.before,
        cache.host.pager,
        arguments.get("input_ids"),
        arguments.get("attention_mask"),
        arguments.get("position_ids"),
    )
    most = cache.host.most_columns(len(rows.entries))
    start = 0
    if call.keep is not None:  # rows of known tokens nobody asks about
        start = max(0, min(max(rows.known, rows.padding), rows.columns - call.keep))
    if start == 0 and rows.columns <= most:
        call.begin(rows, 0, rows.columns)
        return arguments
    if rows.columns - start > most:
        call.make_room(rows)
    while rows.columns - start > most:
        part = _part(module, arguments, rows, start, start + most)
        call.begin(rows, start, start + most)
        call.expected = call.nested = True
        output = module(**part)
        call.nested = False
        start += most
        wanted = call.keep is None or rows.columns - start < call.keep
        if wanted or (not isinstance(output, tuple) and output.get("hidden_states") is not None):
            call.outputs.append(output)
    part = _part(module, arguments, rows, start, rows.columns)
    call.begin(rows, start, rows.columns)
    return part


def _part(
    module: Any, arguments: dict[str, Any], rows: Rows, start: int, stop: int
) -> dict[str, Any]:
    """The arguments of the decoder for columns [start, stop) of a call."""
    part = dict(arguments)
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            continue
        if name in _CUT:
            part[name] = value[..., start:stop]
        elif name == "attention_mask":
            part[name] = value[:, : rows.first + stop]
        elif value.ndim > 1 and value.shape[1] == rows.columns:
            raise InvalidArgumentError(
                f"{name} has a value for each of {rows.columns} tokens, which have to be run in "
                f"parts of at most {stop - start}; call the model in such parts, as "
                f"generate(prefill_chunk_size={stop - start}) does, or raise the cache's rows"
            )
    return part


def _require_possible(module: Any, cache: Cache, arguments: dict[str, Any]) -> None:
    cache.require_model(module)
    wanted = arguments.get("output_attentions")
    if module.config.output_attentions if wanted is None else wanted:
        raise InvalidArgumentError(
            "output_attentions is True; attention over a pager makes no matrix of weights: leave "
            "it out, or use another cache"
        )
    if module.training:
        raise InvalidArgumentError("the model is in training mode; call model.eval()")


def _cache_in(module: Any, args: Any, kwargs: Any) -> Cache | None:
    """Our cache among the arguments of a call.

    None in a graph that torch compiles, for which a layer then refuses the cache.
    """
    if torch.compiler.is_compiling():
        return None
    named = _named(module, args, kwargs)
    found = next((named[name] for name in CACHE_ARGUMENTS if named.get(name) is not None), None)
    return found if getattr(type(found), "_of_kvpager", False) else None


def _forget_interrupted() -> None:
    """Undoes a call that an interrupt has ended in this thread, after which nothing else was."""
    if torch.compiler.is_compiling():
        return
    attention = current()
    while isinstance(attention, CacheAttention):
        call = attention.call()
        if call is not None and call.runs():
            return
        if call is not None:
            call.undo()
        if current() is attention:
            replace(attention.outer)
        attention = current()


def _named(module: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    if not args:
        return kwargs
    kind = type(module)
    names = _signatures.get(kind)
    if names is None:
        parameters = inspect.signature(kind.forward).parameters.values()
        places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = tuple(one.name for one in parameters if one.kind in places)[1:]  # without self
        _signatures[kind] = names
    return {**dict(zip(names, args)), **kwargs}


def _remove(modules: Iterable[weakref.ref[Any]]) -> None:
    own = (before_model, after_model, before_decoder, after_decoder)
    remove_hooks([module for one in modules if (module := one()) is not None], own)
