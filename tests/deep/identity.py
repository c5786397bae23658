"""A model that is changed anywhere, and a store whose files were swapped or put back.

    python -m deep.identity [--only PART ...] [--most N] --json FILE

Every tensor, module, attribute and setting of a model is changed under an open engine, in every way
there is, and put back. Whenever that changes a bit of what transformers computes, the engine
refuses to adopt, to restore and to compute, or has the bits of a new engine. In a store, files of
other models, salts and turns are put in the place of each other, and old ones put back after a
newer save: a name gives a text that was saved for this engine, with its bits, or a typed error.
"""

from __future__ import annotations

import argparse
import copy
import logging
import random
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adapters import with_adapters
from reference_models import build, make_engine, prompt
from torch.nn.modules import module as torch_module

from deep.interposer import workplace
from deep.record import chosen, write
from kvpager import DirectoryStore, Engine, PagerError, Session

IDS = prompt(60)  # past every window
FORM = {
    "return_dict"
}  # settings of how a model answers its caller; transformers' own heads need it
MODELS: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: build(name) for name in ("llama", "qwen3", "gemma2", "smollm3")},
    "qwen3_moe": lambda: build("qwen3_moe"),
    "llama with adapters": lambda: with_adapters("a", "b"),
}

Undo = Callable[[], object]
Change = Callable[[], Undo]


@dataclass
class Tried:
    """What became of the changes of one subject.

    Attributes:
        changes: tried.
        without_effect: of these, those after which transformers computed the same bits.
        refused: of the others, those that the engine refused; the rest have a new engine's bits.
        wrong: changes that were served with other bits, or met an untyped error.
    """

    changes: int = 0
    without_effect: int = 0
    refused: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def put(holder: Any, key: str, value: Any) -> Undo:
    """Sets an item of a dictionary, or an attribute in an object's own dictionary."""
    values = holder if isinstance(holder, dict) else vars(holder)
    there, before = key in values, values.get(key)

    def undo() -> None:
        if there:
            values[key] = before
        else:
            values.pop(key, None)

    values[key] = value
    return undo


def _write(tensor: torch.Tensor, through_data: bool) -> Undo:
    before = tensor.detach().clone()

    def set_to(values: torch.Tensor) -> None:
        with torch.no_grad():
            (tensor.data if through_data else tensor).copy_(values)

    set_to(_other(before))
    return lambda: set_to(before)


def _other(values: torch.Tensor) -> torch.Tensor:
    if values.dtype == torch.bool:
        return ~values
    return values + 1


def _replace_data(tensor: torch.Tensor, values: torch.Tensor) -> Undo:
    before, tensor.data = tensor.data, values

    def undo() -> None:
        tensor.data = before

    return undo


def tensor_changes(model: Any) -> Iterator[tuple[str, Change]]:
    """Of every parameter and buffer."""
    for where, module in model.named_modules():
        for kind in ("_parameters", "_buffers"):
            for key, tensor in vars(module)[kind].items():
                if tensor is None:
                    continue
                name = f"{where}.{key}"
                held = vars(module)[kind]
                yield f"{name} written in place", lambda t=tensor: _write(t, False)
                yield f"{name} written through .data", lambda t=tensor: _write(t, True)
                yield (
                    f"{name} with other data",
                    lambda t=tensor: _replace_data(t, _other(t.detach())),
                )
                if tensor.ndim == 2 and tensor.shape[0] == tensor.shape[1]:
                    yield (
                        f"{name} with its data transposed",
                        lambda t=tensor: _replace_data(t, t.data.t()),
                    )
                make = torch.nn.Parameter if kind == "_parameters" else torch.Tensor.clone
                yield (
                    f"{name} replaced",
                    lambda h=held, k=key, t=tensor, m=make: put(h, k, m(_other(t.detach()))),
                )
                yield f"{name} taken away", lambda h=held, k=key: put(h, k, None)


def _louder(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output * 1.5 if output.is_floating_point() else output
    if isinstance(output, tuple) and type(output) is tuple:
        return tuple(map(_louder, output))
    return output


def _hook(module: Any, given: Any, output: Any) -> Any:
    return _louder(output)


def _pre_hook(module: Any, given: Any) -> Any:
    return _louder(given)


def _registered(register: Callable[[Any], Any], hook: Any) -> Undo:
    handle = register(hook)
    return lambda: handle.remove()


def _patched(forward: Any) -> Any:
    def louder(self: Any, *given: Any, **named: Any) -> Any:
        return _louder(forward(self, *given, **named))

    return louder


def _reclassed(module: Any) -> Undo:
    own = type(module)
    module.__class__ = type(own.__name__, (own,), {"forward": _patched(own.forward)})

    def undo() -> None:
        module.__class__ = own

    return undo


def _copied(module: Any) -> Any:
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.copy_(_other(tensor))
    twin.forward = types.MethodType(_patched(type(module).forward), twin)
    return twin


def _of_class(kind: type) -> Undo:
    own = kind.forward  # type: ignore[attr-defined]
    kind.forward = _patched(own)  # type: ignore[attr-defined]

    def undo() -> None:
        kind.forward = own  # type: ignore[attr-defined]

    return undo


def module_changes(model: Any) -> Iterator[tuple[str, Change]]:
    """Of every module, every class of one, and of all modules at once."""
    for where, module in model.named_modules():
        name = where or "the model"
        yield f"{name} with a hook", lambda m=module: _registered(m.register_forward_hook, _hook)
        yield (
            f"{name} with a pre-hook",
            lambda m=module: _registered(m.register_forward_pre_hook, _pre_hook),
        )
        yield (
            f"{name} with another forward",
            lambda m=module: put(m, "forward", types.MethodType(_patched(type(m).forward), m)),
        )
        yield f"{name} of another class", lambda m=module: _reclassed(m)
        for key, part in vars(module)["_modules"].items():
            if part is not None:
                held = vars(module)["_modules"]
                yield (
                    f"{name}: {key} replaced",
                    lambda h=held, k=key, p=part: put(h, k, _copied(p)),
                )
    kinds = {type(module) for module in model.modules()}
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        yield f"forward of {kind.__name__}", lambda k=kind: _of_class(k)
    for register in (
        torch_module.register_module_forward_hook,
        torch_module.register_module_forward_pre_hook,
    ):
        hook = _pre_hook if "pre" in register.__name__ else _hook
        yield register.__name__, lambda r=register, h=hook: _registered(r, h)


def _another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 2 + 1
    if isinstance(value, str):
        return value + "_"
    if isinstance(value, (list, tuple)):
        return type(value)(map(_another, value))
    return 3 if value is None else value


def setting_changes(model: Any) -> Iterator[tuple[str, Change]]:
    """Of every plain attribute of every module, and of the configuration."""
    holders = [(name or "the model", module) for name, module in model.named_modules()]
    holders.append(("config", model.config))
    for name, holder in holders:
        for key, value in list(vars(holder).items()):
            other = _another(value)
            if (
                key in FORM
                or other is value
                or (value is not None and type(other) is not type(value))
            ):
                continue
            yield (
                f"{name}.{key} {value!r:.30} made {other!r:.30}",
                lambda h=holder, k=key, o=other: put(h, k, o),
            )


def changes_of(model: Any) -> dict[str, Change]:
    return dict([*tensor_changes(model), *module_changes(model), *setting_changes(model)])


def stock_bits(model: Any) -> bytes | None:
    """What transformers computes; None: it cannot."""
    try:
        with torch.inference_mode():
            logits = model(torch.as_tensor(IDS)[None], use_cache=False)[0][0]
    except Exception:
        return None
    return bytes(logits.numpy().tobytes())


class ModelTrial:
    """An open engine of a model, with a text in its pager and another in a store."""

    def __init__(self, make: Callable[[], Any], folder: Path) -> None:
        self.model = make()
        self.engine = make_engine(self.model)
        self.store = DirectoryStore(folder / "store")
        self.held = self.engine.session()
        self._begin()

    def _begin(self) -> None:
        self.held.update(IDS)
        self.expected = stock_bits(self.model)
        with self.engine.session() as session:
            session.prefill(IDS)
            session.save("saved", store=self.store, overwrite=True)

    def attempts(self) -> dict[str, Callable[[], bytes]]:
        def adopt() -> bytes:
            with self.engine.session() as session:
                session.prefill(IDS)
                return bits(session)

        def restore() -> bytes:
            with self.engine.restore("saved", store=self.store) as session:
                return bits(session)

        def compute() -> bytes:
            with self.held.fork() as session:
                session.append([7])
                session.trim(len(IDS))
                return bits(session)

        return {"adopt": adopt, "restore": restore, "compute": compute}

    def new_engines_bits(self) -> bytes | None:
        try:
            with make_engine(self.model) as engine, engine.session() as session:
                session.prefill(IDS)
                return bits(session)
        except Exception:
            return None

    def attempt(self, change: Change, tried: Tried, name: str) -> None:
        tried.changes += 1
        undo = change()
        try:
            effect = stock_bits(self.model) != self.expected
            served = {}
            for what, attempt in self.attempts().items():
                try:
                    served[what] = attempt()
                except PagerError:  # noqa: PERF203  # as it should be
                    pass
                except Exception as error:
                    tried.wrong.append(f"{name}: {what}: {type(error).__name__}: {error!s:.200}")
            tried.without_effect += not effect
            tried.refused += effect and not served
            if effect and served:
                new = self.new_engines_bits()
                tried.wrong += [
                    f"{name}: {what}: served with other bits than a new engine's"
                    for what, found in served.items()
                    if found != new
                ]
        finally:
            undo()
        self._go_on(tried, name)

    def _go_on(self, tried: Tried, name: str) -> None:
        """What was put back is no change; what torch counts as one is asked to be named."""
        try:
            self.held.update(IDS)
            self.engine.core.runner.unchanged.check_model(thorough=True)
        except PagerError:
            self.engine.weights_changed()
            self._begin()
        if stock_bits(self.model) != self.expected:
            tried.wrong.append(f"{name}: this test did not put it back")


def bits(session: Session) -> bytes:
    return bytes(session.logits.numpy().tobytes())


def try_model(make: Callable[[], Any], folder: Path, most: int | None) -> Tried:
    tried = Tried()
    trial = ModelTrial(make, folder)
    changes = changes_of(trial.model)
    names = list(changes)
    if most is not None and most < len(names):
        names = random.Random(0).sample(names, most)
    for name in names:
        trial.attempt(changes[name], tried, name)
    trial.engine.close()
    return tried


@dataclass
class Owner:
    """An engine, and the texts that were saved for it."""

    engine: Engine
    texts: dict[bytes, bytes] = field(default_factory=dict)  # tokens to the logits after them

    def save(self, store: DirectoryStore, name: str, ids: np.ndarray[Any, Any]) -> None:
        with self.engine.session() as session:
            session.prefill(ids)
            session.save(name, store=store, overwrite=True)
            self.texts[session.tokens.tobytes()] = bits(session)


def try_store(folder: Path) -> Tried:
    """Every file of a store in the place of every other one, and older ones put back."""
    tried = Tried()
    models = [build("llama"), build("llama", hidden_act="gelu"), build("qwen3")]
    owners = {
        f"{number}{salt}": Owner(make_engine(model, salt=salt))
        for number, model in enumerate(models)
        for salt in ("", "a")
    }
    past, now = DirectoryStore(folder / "store"), folder / "now"
    for turn, length in enumerate((40, 75)):
        for key, owner in owners.items():
            for text in range(2):
                ids = prompt(length, seed=text)  # of two owners the same text
                owner.save(past, f"of-{key}-{text}", ids)
        if not turn:
            _copy(folder / "store", folder / "past")
    past.gc()
    _copy(folder / "store", now)
    kinds = {kind: sorted((now / kind).iterdir()) for kind in ("snapshots", "packs")}
    swaps = [
        (source, target)
        for files in kinds.values()
        for source in files
        for target in files
        if source != target and source.suffix == target.suffix
    ]
    replays = [
        (old, now / old.relative_to(folder / "past"))
        for kind in kinds
        for old in sorted((folder / "past" / kind).iterdir())
    ]
    for source, target in [*swaps, *replays]:
        before = target.read_bytes() if target.exists() else None
        if before == source.read_bytes():
            continue
        target.write_bytes(source.read_bytes())
        tried.changes += 1
        _look(owners, now, tried, f"{source.parent.parent.name}/{source.name} as {target.name}")
        if before is None:
            target.unlink()
        else:
            target.write_bytes(before)
    for owner in owners.values():
        owner.engine.close()
    return tried


def _look(owners: dict[str, Owner], folder: Path, tried: Tried, what: str) -> None:
    store = DirectoryStore(folder, create=False)
    refused = 0
    for key, owner in owners.items():
        owner.engine.pager.reset()
        for other in owners:
            for text in range(2):
                name = f"of-{other}-{text}"
                try:
                    with owner.engine.restore(name, store=store) as session:
                        known = owner.texts.get(session.tokens.tobytes())
                        if known is None or bits(session) != known:
                            tried.wrong.append(f"{what}: {key} is given {name}: no text of its own")
                except PagerError:
                    refused += key == other
                except Exception as error:
                    tried.wrong.append(f"{what}: {name}: {type(error).__name__}: {error!s:.200}")
    tried.refused += refused > 0
    tried.without_effect += not refused


def _copy(source: Path, target: Path) -> None:
    for path in sorted(source.rglob("*")):
        if path.is_file():
            copied = target / path.relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(path.read_bytes())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[""], metavar="PART")
    parser.add_argument("--most", type=int, help="changes of each model (default: all)")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    outcomes: dict[str, Tried] = {}
    with workplace() as folder:
        for name in chosen([*MODELS, "files of a store"], options.only):
            here = folder / name.replace(" ", "-")
            here.mkdir()
            started = time.monotonic()
            if name in MODELS:
                outcome = try_model(MODELS[name], here, options.most)
            else:
                outcome = try_store(here)
            outcome.seconds = round(time.monotonic() - started, 1)
            outcomes[name] = outcome
            print(
                f"{name:24} {outcome.changes:5} changes {outcome.without_effect:5} without effect "
                f"{outcome.refused:5} refused {len(outcome.wrong):4} wrong "
                f"{outcome.seconds:7.1f} s",
                flush=True,
            )
            for line in outcome.wrong[:20]:
                print(f"    {line}", flush=True)
            write(options.json, "subject", outcomes, most=options.most)
    return int(any(outcome.wrong for outcome in outcomes.values()))


if __name__ == "__main__":
    raise SystemExit(main())
