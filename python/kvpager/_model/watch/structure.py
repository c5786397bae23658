"""What a model is made of beside the bytes of its weights, and whether it still is.

Modules, hooks, adapters' settings, patched methods and the configuration are objects in
dictionaries and lists. They are remembered by identity and compared natively, within microseconds;
only what is another object is looked at here.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvpager import _core
from kvpager._model.seam.attention import NAME
from kvpager._model.watch.looks import called_by, changes_nothing
from kvpager._model.watch.reach import FOR_GRADIENTS, USED, Reach, class_dictionary
from kvpager._model.weights.held import Held, name_of

_TENSORS = ("_parameters", "_buffers")
# Kinds of what a forward may set up for itself, once.
_SETTLING = frozenset({"module", "attributes", "value", "globals", "compared"})
_INNARDS = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")  # of a function
# Of a configuration: says how the model is called or used, not what it computes. Who attends
# outside an engine's forward is the owner's business.
_CALLED = frozenset(
    {"_name_or_path", "name_or_path", "architectures", "dtype", "torch_dtype"}
    | {"transformers_version"}  # with dtype and architectures written by save_pretrained
    | {"use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "return_dict"}
    | {"_attn_implementation", "_attn_implementation_internal", "output_attentions"}
    | {"output_hidden_states", "_output_attentions", "_commit_hash", "id2label", "label2id"}
)


class Structure:
    """The objects a model is made of, and those that its code reads, as they were.

    Attributes:
        reach: what the code reads.
    """

    def __init__(self, model: Any, held: Held) -> None:
        """`held`: what the model computes with."""
        self._table = _core.ObjectTable()
        self._places: list[tuple[str, Any, Any]] = []  # (name, kind, container)
        self._before: list[Any] = []  # copies of the containers, which keep what was in them
        self._objects: list[tuple[str, Any]] = []  # whose types are remembered
        self._module_of: dict[int, torch.nn.Module] = {}  # by the number of its place
        self._configs: dict[int, tuple[str, PreTrainedConfig]] = {}
        for name, module in model.named_modules():
            self._add_module(name, module)
        of_weights = {id(one): (name, one) for name, one in held.containers}
        for name, container in of_weights.values():
            self._add(name, "value", container)
        # Another tensor's dictionary may take the place of one, with all that is in it.
        self._made = [tensor for _, tensor in held.made_of_others]
        self._made_names = [name for name, _ in held.made_of_others]
        self._made_of = [vars(tensor) for tensor in self._made]
        for name in ("_global_forward_hooks", "_global_forward_pre_hooks"):
            self._add(f"torch's {name}", "hooks", getattr(torch_module, name))
        self.reach = Reach(model, [*of_weights, *self._configs])
        self._add_reached()

    def changed(self, ignored: frozenset[str] = frozenset()) -> str | None:
        """What is no longer as it was, in words; None if all is.

        ignored: names of attributes of modules that may differ for now.
        """
        return next((what for what, _ in self._changes(ignored)), None)

    def has_settled(self) -> bool:
        """Whether it was changed, and only in what a forward may set up for itself.

        Then another `Structure` has to take its place.
        """
        kinds = {kind for _, kind in self._changes()}
        return bool(kinds) and kinds <= _SETTLING

    def _changes(self, ignored: frozenset[str] = frozenset()) -> Iterator[tuple[str, str]]:
        for number in self._table.changed():
            what = self._difference(number, ignored)
            if what is not None:
                yield what, self._places[number][1]
            elif not ignored:  # other objects, but equal ones, or of no consequence
                self._before[number] = _copied(self._places[number][2])
                self._table.refresh(number)
        if self._made and list(map(id, map(vars, self._made))) != list(map(id, self._made_of)):
            pairs = zip(self._made_names, self._made, self._made_of)
            name = next(name for name, tensor, before in pairs if vars(tensor) is not before)
            yield f"{name} was exchanged for another tensor", "tensor"
        for number in self._table.changed_types():
            name, module = self._objects[number]
            yield f"module {name or '(the model)'} has become a {type(module).__name__}", "type"
        if list(map(_INNARDS, self._functions)) != self._innards:
            both = zip(self.reach.functions, self._innards)
            name = next(name for (name, one), before in both if _INNARDS(one) != before)
            yield f"the code or defaults of {name} were replaced", "code"
        for (name, read), before in zip(self.reach.compared, self._compared):
            now = read()
            if not _alike(now, before):
                yield f"{name} is {_shortened(repr(now))}, and was otherwise", "compared"

    def _add_module(self, name: str, module: torch.nn.Module) -> None:
        self._objects.append((name, module))
        self._table.add_type(module)
        own = vars(module)
        self._module_of[len(self._places)] = module
        self._add(name, "module", own)
        for key, value in own.items():
            if key in (*_TENSORS, "_modules") or "hooks" in key:
                if isinstance(value, dict):
                    kind = "hooks" if "hooks" in key else key
                    self._add(name, kind, value)
            elif isinstance(value, PreTrainedConfig):
                self._add_config(f"{name}.{key}" if name else key, value)

    def _add_config(self, name: str, config: PreTrainedConfig) -> None:
        if id(config) in self._configs:
            return
        self._configs[id(config)] = name, config
        self._add(name, "config", vars(config))
        for key, value in vars(config).items():
            if isinstance(value, PreTrainedConfig):
                self._add_config(f"{name}.{key}", value)

    def _add_reached(self) -> None:
        reach = self.reach
        for name, config in self._configs.values():
            for key, value in vars(config).items():
                if key not in _CALLED:
                    reach.value(f"{name}.{key}", value)
        for name, kind, container in reach.containers:
            self._add(name, kind, container)
        for each in reach.classes:
            self._add(each.__name__, each, class_dictionary(each))
        for home, values, _ in reach.globals.values():
            self._add(home, "globals", values)
        reach.compared.append(("the attention that transformers calls", _attention))
        self._functions = [function for _, function in reach.functions]
        self._innards = list(map(_INNARDS, self._functions))
        self._compared = [read() for _, read in reach.compared]

    def _add(self, name: str, kind: Any, container: Any) -> None:
        self._table.add(container)
        self._places.append((name, kind, container))
        self._before.append(_copied(container))

    def _difference(self, number: int, ignored: frozenset[str]) -> str | None:
        name, kind, container = self._places[number]
        before = self._before[number]
        where = name or "the model"
        if kind == "hooks":
            return _hook_difference(where, before, container)
        if kind in (*_TENSORS, "_modules"):
            return _part_difference(name, kind, before, container)
        old, new = dict(_items(before)), dict(_items(container))
        for key in _different_keys(old, new):
            if self._incidental(number, key) or not self._is_read(
                number, key, added=key not in old
            ):
                continue
            if kind == "module" and key in ignored:
                continue
            was, now = _described(old, key), _described(new, key)
            label = f"{where}[{key!r}]" if kind == "value" else f"{where}.{key}"
            if isinstance(kind, type):
                return f"{label} was replaced by {now}"
            return f"{label} was replaced" if now == was else f"{label} is {now}, and was {was}"
        return None

    def _is_read(self, number: int, key: Any, *, added: bool) -> bool:
        """Whether some code of the model's may look for an item of a container."""
        reach, (_, kind, container) = self.reach, self._places[number]
        if kind == "globals":
            return key in reach.globals[id(container)][2] and not changes_nothing(
                container.get(key)
            )
        if isinstance(kind, type):
            return reach.looks_up(kind, key) and not changes_nothing(container.get(key))
        if kind == "module" and added:
            own = type(self._module_of[number])
            return key in reach.names or hasattr(own, key) or not reach.is_known(own)
        return True

    def _incidental(self, number: int, key: Any) -> bool:
        """Whether an item of a container is no forward's business."""
        kind = self._places[number][1]
        if isinstance(key, str) and key.startswith("_kvpager"):
            return True
        if kind == "module":
            own = type(self._module_of[number])
            return key in USED or (key in FOR_GRADIENTS and self.reach.is_known(own))
        return kind == "config" and key in _CALLED


def _hook_difference(where: str, before: Any, container: Any) -> str | None:
    for key in _different_keys(before, container):
        for hook, done in ((before.get(key), "removed"), (container.get(key), "added")):
            if hook is not None and before.get(key) is not container.get(key):
                called = called_by(hook)
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


def _attention() -> Any:
    return ALL_ATTENTION_FUNCTIONS.get(NAME)


def _alike(one: Any, other: Any) -> bool:
    """Whether two contents are one object or equal, as far as they can be compared."""
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # objects compare as they please
        return False


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


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    yield from value.items() if isinstance(value, dict) else enumerate(value)


def _copied(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _described(values: dict[Any, Any], key: Any) -> str:
    if key not in values:
        return "missing"
    value = values[key]
    return _shortened(repr(value)) if _plain(value) else name_of(value)


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
