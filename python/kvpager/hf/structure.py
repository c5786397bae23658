"""What a model is made of beside the bytes of its weights, and whether it still is.

Modules, hooks, adapters' settings, patched methods and the configuration are objects in
dictionaries and lists. They are remembered by identity and compared natively, within microseconds;
only what is another object is looked at here.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig, PreTrainedModel

from kvpager import _core
from kvpager.held import Held
from kvpager.hf.looks import changes_nothing

_DEPTH = 3  # of lists and dictionaries in one another
_TENSORS = ("_parameters", "_buffers")
# Of a configuration: says how the model is called or used, not what it computes. Who attends
# outside an engine's forward is the owner's business.
_CALLED = frozenset(
    {"_name_or_path", "name_or_path", "architectures", "dtype", "torch_dtype"}
    | {"transformers_version"}  # with dtype and architectures written by save_pretrained
    | {"use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "return_dict"}
    | {"_attn_implementation", "_attn_implementation_internal", "output_attentions"}
    | {"output_hidden_states", "_output_attentions", "_commit_hash", "id2label", "label2id"}
)
# Of a module: the owner's business too.
_USED = frozenset({"warnings_issued", "generation_config"})


class Structure:
    """The objects a model is made of, as they were when this was made."""

    def __init__(self, model: Any, held: Held) -> None:
        """`held`: what the model computes with."""
        self._table = _core.ObjectTable()
        self._places: list[tuple[str, Any, Any]] = []  # (name, kind, container)
        self._before: list[Any] = []  # copies of the containers, which keep what was in them
        self._objects: list[tuple[str, Any]] = []  # whose types are remembered
        self._volatile: set[tuple[int, Any]] = set()
        self._configs: set[int] = set()
        for name, module in model.named_modules():
            self._add_module(name, module)
        for name, container in {id(one): (name, one) for name, one in held.containers}.values():
            self._add(name, "value", container)
        # Another tensor's dictionary may take the place of one, with all that is in it.
        self._made = [tensor for _, tensor in held.made_of_others]
        self._made_names = [name for name, _ in held.made_of_others]
        self._made_of = [vars(tensor) for tensor in self._made]
        for name in ("_global_forward_hooks", "_global_forward_pre_hooks"):
            self._add(f"torch's {name}", "hooks", getattr(torch_module, name))
        types = {type(module) for _, module in model.named_modules()}
        self._methods = [one for kind in sorted(types, key=name_of) for one in _methods_of(kind)]

    def changed(self) -> str | None:
        """What is no longer as it was, in words; None if all is."""
        for number in self._table.changed():
            what = self._difference(number)
            if what is not None:
                return what
            # Other objects, but equal ones, or of no consequence.
            self._before[number] = _copied(self._places[number][2])
            self._table.refresh(number)
        if self._made and list(map(id, map(vars, self._made))) != list(map(id, self._made_of)):
            return self._exchanged()
        for number in self._table.changed_types():
            name, module = self._objects[number]
            return f"module {name or '(the model)'} has become a {type(module).__name__}"
        for kind, name, method in self._methods:
            if getattr(kind, name, None) is not method:
                now = name_of(getattr(kind, name, None))
                return f"{kind.__name__}.{name} was replaced by {now}"
        return None

    def learn(self) -> None:
        """Takes for no consequence what the model has changed of itself, in a forward just now."""
        for number in self._table.changed():
            _, kind, container = self._places[number]
            if kind != "module":
                continue
            before = self._before[number]
            for key in _different_keys(before, container):
                if _plain(before.get(key)) and _plain(container.get(key)):
                    self._volatile.add((number, key))

    def _add_module(self, name: str, module: torch.nn.Module) -> None:
        self._objects.append((name, module))
        self._table.add_type(module)
        own = vars(module)
        self._add(name, "module", own)
        for key, value in own.items():
            if key in _USED:
                continue
            if key in (*_TENSORS, "_modules") or "hooks" in key:
                if isinstance(value, dict):
                    kind = "hooks" if "hooks" in key else key
                    self._add(name, kind, value)
            elif isinstance(value, PreTrainedConfig):
                self._add_config(f"{name}.{key}" if name else key, value)
            else:
                self._add_nested(f"{name}.{key}" if name else key, value, _DEPTH)

    def _add_config(self, name: str, config: PreTrainedConfig) -> None:
        if id(config) in self._configs:
            return
        self._configs.add(id(config))
        self._add(name, "config", vars(config))
        for key, value in vars(config).items():
            if isinstance(value, PreTrainedConfig):
                self._add_config(f"{name}.{key}", value)
            elif key not in _CALLED:
                self._add_nested(f"{name}.{key}", value, _DEPTH)

    def _add_nested(self, name: str, value: Any, depth: int) -> None:
        if depth == 0 or not isinstance(value, (dict, list)):
            return
        self._add(name, "value", value)
        for key, item in _items(value):
            self._add_nested(f"{name}[{key!r}]", item, depth - 1)

    def _add(self, name: str, kind: str, container: Any) -> None:
        self._table.add(container)
        self._places.append((name, kind, container))
        self._before.append(_copied(container))

    def _difference(self, number: int) -> str | None:
        name, kind, container = self._places[number]
        before = self._before[number]
        where = name or "the model"
        if kind == "hooks":
            return _hook_difference(where, before, container)
        if kind in (*_TENSORS, "_modules"):
            return _part_difference(name, kind, before, container)
        old, new = dict(_items(before)), dict(_items(container))
        for key in _different_keys(old, new):
            if (number, key) in self._volatile or _incidental(kind, key):
                continue
            if kind == "module" and key not in old and not hasattr(self._type_of(number), key):
                continue  # something that no method of the class looks for
            was, now = _told(old, key), _told(new, key)
            if now == was:
                return f"{where}[{key!r}] was replaced"
            if kind == "value":
                return f"{where}[{key!r}] is {now}, and was {was}"
            return f"{where}.{key} is {now}, and was {was}"
        return None

    def _exchanged(self) -> str:
        for name, tensor, before in zip(self._made_names, self._made, self._made_of):
            if vars(tensor) is not before:
                return f"{name} was exchanged for another tensor"
        raise AssertionError("unreachable: a dictionary is another")

    def _type_of(self, number: int) -> type:
        container = self._places[number][2]
        for _, module in self._objects:
            if vars(module) is container:
                return type(module)
        return object


def _methods_of(kind: type) -> Iterator[tuple[type, str, Any]]:
    """The methods of a class of modules that a forward may call, each with its name.

    Of whole models those that run them alone: the others are how they are used.
    """
    names = {"forward", "__call__", "_call_impl", "_wrapped_call_impl"}
    if not issubclass(kind, PreTrainedModel):
        own = (base for base in kind.__mro__ if issubclass(base, torch.nn.Module))
        between = [base for base in own if base is not torch.nn.Module]
        names |= {
            name
            for base in between
            for name, value in vars(base).items()
            if isinstance(value, FunctionType) and not name.startswith("__")
        }
    for name in sorted(names):
        if (method := getattr(kind, name, None)) is not None:
            yield kind, name, method


def _hook_difference(where: str, before: Any, container: Any) -> str | None:
    for key in _different_keys(before, container):
        for hook, done in ((before.get(key), "removed"), (container.get(key), "added")):
            if hook is not None and before.get(key) is not container.get(key):
                called = hook[1] if isinstance(hook, tuple) else hook
                if callable(called) and not changes_nothing(called):
                    return f"hook {name_of(called)} of {where} was {done}"
    return None


def _part_difference(name: str, kind: str, before: Any, container: Any) -> str | None:
    word = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "module"}[kind]
    for key in _different_keys(before, container):
        what = f"{word} {f'{name}.{key}' if name else key}"
        if key not in before:
            return f"{what} was added"
        if key not in container:
            return f"{what} was removed"
        old, new = before[key], container[key]
        tensors = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
        if tensors and kind_of(old) != kind_of(new):
            return f"{what} is {kind_of(new)}, and was {kind_of(old)}"
        return f"{what} was replaced"
    return None


def _different_keys(before: Any, now: Any) -> Iterator[Any]:
    """Keys of two dictionaries whose values are neither one object nor equal plain ones."""
    for key in dict.fromkeys((*before, *now)):
        both = key in before and key in now
        if not both or not (before[key] is now[key] or _equal(before[key], now[key])):
            yield key


def _equal(one: Any, other: Any) -> bool:
    """Whether two objects are equal and plain: as good as one."""
    return type(one) is type(other) and _plain(one) and bool(one == other)


def _plain(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset, list, set)):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return all(_plain(key) and _plain(item) for key, item in value.items())
    return value is None or isinstance(
        value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
    )


def kind_of(tensor: torch.Tensor) -> str:
    """Dtype and device of a tensor, in words."""
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def _incidental(kind: str, key: Any) -> bool:
    names = {"config": _CALLED, "module": _USED}.get(kind, frozenset())
    return key in names or (isinstance(key, str) and key.startswith("_kvpager"))


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    yield from value.items() if isinstance(value, dict) else enumerate(value)


def _copied(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _told(values: dict[Any, Any], key: Any) -> str:
    if key not in values:
        return "missing"
    value = values[key]
    return _shortened(repr(value)) if _plain(value) else name_of(value)


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def name_of(value: Any) -> str:
    """Of a function, class or other object, the same in every process."""
    function = getattr(value, "__func__", value)
    name = getattr(function, "__qualname__", None)
    if name is None:
        return f"a {type(value).__qualname__}"
    return f"{getattr(function, '__module__', '') or ''}.{name}".lstrip(".")
