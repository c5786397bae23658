"""Any argument of the public interface, given as something else: an error that names it, or taken.

Every call below is tried with each of its arguments replaced by each of `ODD`, the others sound.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import text_models
import torch

import kvpager
from kvpager import DirectoryStore, Engine, InvalidArgumentError, PagerConfig, PagerError, TopK
from kvpager.drafts import DraftModel
from kvpager.grammar import Grammar
from kvpager.pager import ROW_COMMIT
from kvpager.requests import Scheduler
from kvpager.sampling import Sampling

IDS = list(range(3, 40))
NAN, INF = float("nan"), float("inf")


def odd() -> list[Any]:
    """Anew for every argument, because some can be gone through once."""
    integers = torch.tensor([1, 2])
    plain: list[Any] = [
        *(None, True, False, 0, -1, 5, 2**63, 10**30, 1.5, NAN, INF, 1j),
        *("", "x", "a\0b", "\ud800", b"x", {"role": "user"}, [{"role": 5, "content": []}]),
        *([], [[]], [1.5], ["a"], [None], [object()], (), {}, {1: 2}, {"a": 1}, set(), {5}),
    ]
    arrays = [
        *(np.array([1.5, 2.0]), np.array([1, 2]), np.array(["a"]), np.array(3), np.int64(3)),
        *(integers, torch.tensor([1.5]), torch.tensor(3), integers.to_sparse()),
        *(integers.to("meta"), torch.zeros(3, device="meta")),
    ]
    others = [
        object(),
        ValueError("x"),
        lambda: None,
        lambda one: one,
        iter([1]),
        (one for one in ["a"]),
        range(3),
    ]
    return plain + arrays + others


@dataclass
class World:
    """What the calls need, made once."""

    engine: Engine
    store: DirectoryStore
    folder: Path

    def __post_init__(self) -> None:
        self.session = self.engine.session()
        self.session.prefill(IDS)
        self.session.save("held", store=self.store)
        self.session.save(self.path("held"))
        self.cache = kvpager.Cache(self.engine.model, pool_tokens=512)
        with torch.no_grad():
            self.engine.model(torch.tensor([IDS]), past_key_values=self.cache)

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def state(self) -> tuple[Any, ...]:
        """What no refused call may change."""
        keys = self.session.sequence.read_kv(0, 0, len(IDS))[0]
        return self.session.tokens.tolist(), keys.numpy().tobytes(), len(self.session.ledger())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("odd")
    tokenizer = text_models.byte_level()
    with Engine(text_models.model(), tokenizer=tokenizer, pool_tokens=512, rows=32) as engine:
        world = World(engine, DirectoryStore(str(folder / "store")), folder)
        yield world
        world.cache.close()


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the values are paths, and are taken."""
    monkeypatch.chdir(tmp_path)


def session_for(world: World, name: str) -> kvpager.Session:
    """A fork; for a chat, which drops no text, one without any."""
    return world.engine.session() if name == "chat" else world.session.fork()


def of_session(name: str) -> Callable[[World, dict[str, Any]], None]:
    """A method of a session, whose iterator is gone through."""

    def call(world: World, given: dict[str, Any]) -> None:
        with session_for(world, name) as session:
            if name == "regenerate":
                session.generate(3)
            _finish(getattr(session, name)(**given))

    return call


def of_sequence(name: str) -> Callable[[World, dict[str, Any]], None]:
    def call(world: World, given: dict[str, Any]) -> None:
        _finish(getattr(world.session.sequence.fork(), name)(**given))

    return call


def of_engine(name: str) -> Callable[[World, dict[str, Any]], None]:
    return lambda world, given: _finish(getattr(world.engine, name)(**given))


def of_pager(name: str) -> Callable[[World, dict[str, Any]], None]:
    return lambda world, given: _finish(getattr(world.engine.pager, name)(**given))


def of_store(name: str) -> Callable[[World, dict[str, Any]], None]:
    return lambda world, given: _finish(getattr(world.store, name)(**given))


def of_cache(name: str) -> Callable[[World, dict[str, Any]], None]:
    def call(world: World, given: dict[str, Any]) -> None:
        with world.cache.fork() as cache:
            getattr(cache, name)(**given)

    return call


def of_class(kind: Any) -> Callable[[World, dict[str, Any]], None]:
    return lambda world, given: _finish(kind(**given))


def save(world: World, given: dict[str, Any]) -> None:
    handle = world.session.save(store=world.store, **given)
    if isinstance(handle, kvpager.SaveHandle):
        handle.result()


def begin(world: World, given: dict[str, Any]) -> None:
    pager = world.engine.pager
    span = (pager.sequence(), given["position"], given["count"], given["kind"])
    tokens = IDS[:1] * pager.rows
    with pager.begin_spans([span], tokens, dense=given["dense"]):
        pass


def commit(world: World, given: dict[str, Any]) -> None:
    pager = world.engine.pager
    sequence = pager.sequence()
    count = pager.rows
    with pager.begin_spans([(sequence, 0, count, ROW_COMMIT)], IDS[:1] * count) as forward:
        forward.commit({sequence: given["accepted"]})


def restore_sequence(world: World, given: dict[str, Any]) -> None:
    snapshot = kvpager.open_snapshot(world.path("held"))
    world.engine.pager.restore(snapshot, **given).close()


def scheduled(name: str) -> Callable[[World, dict[str, Any]], None]:
    def call(world: World, given: dict[str, Any]) -> None:
        with world.engine.scheduler() as scheduler, session_for(world, name) as session:
            first = {"session": session} if name == "chat" else {"prompt": IDS}
            request = getattr(scheduler, name)(**{**first, **given})
            while not scheduler.idle:
                scheduler.step()
            if request.completion.error is not None:
                raise request.completion.error

    return call


def _finish(result: Any) -> None:
    if isinstance(result, Iterator) and not isinstance(result, tuple):
        for _ in result:
            pass
    elif isinstance(result, (kvpager.Session, Scheduler)):
        result.close()


def defaults(kind: Any, **required: Any) -> dict[str, Any]:
    """The fields of an options class, as `kind(**required)` has them."""
    made = kind(**required)
    return {field.name: getattr(made, field.name) for field in dataclasses.fields(kind)}


GENERATION = {
    "max_new_tokens": 2,
    "seed": 1,
    "logprobs": False,
    "stream": False,
    "temperature": 1.0,
    "top_k": 3,
    "top_p": 0.9,
    "min_p": 0.1,
    "eos": None,
    "stop": ["zz"],
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {3: 1.0},
    "logits_processor": None,
    "suppress_tokens": [4],
    "begin_suppress_tokens": [4],
    "speculate": None,
    "top_logprobs": 0,
    "logprob_temperature": 1.0,
    "grammar": None,
    "generation_config": None,
}
CHAT = {"messages": "hello", "max_new_tokens": 2, "tools": None, "chat_template_kwargs": None}
TEXT = {"ids": IDS, "progress": None}
KEEPING = {
    "name_or_path": "held",
    "upto": 3,
    "overwrite": True,
    "kv_dtype": None,
    "wait": True,
    "progress": None,
}
QUEUEING = {"priority": 0, "timeout_s": None, "on_token": None, "on_finish": None}

CALLS: dict[str, tuple[Callable[[World, dict[str, Any]], None], dict[str, Any]]] = {
    "Session.prefill": (of_session("prefill"), TEXT),
    "Session.append": (of_session("append"), TEXT),
    "Session.update": (of_session("update"), TEXT),
    "Session.generate": (of_session("generate"), GENERATION),
    "Session.chat": (of_session("chat"), {**CHAT, "seed": 1, "stream": False}),
    "Session.regenerate": (of_session("regenerate"), {"max_new_tokens": 2, "from_position": 10}),
    "Session.trim": (of_session("trim"), {"position": 3}),
    "Session.trim_messages": (of_session("trim_messages"), {"count": 0}),
    "Session.pin": (of_session("pin"), {"start": 0, "stop": 16}),
    "Session.save": (save, KEEPING),
    "Engine.session": (of_engine("session"), {"salt": "", "store": None}),
    "Engine.restore": (
        lambda world, given: world.engine.restore(
            **{"name_or_path": "held", "store": world.store, **given}
        ).close(),
        {"on_mismatch": "refuse", "on_corrupt": "fail", "salt": "", "store": None},
    ),
    "Engine.cache_segment": (of_engine("cache_segment"), {**TEXT, "name": None}),
    "Engine.assemble": (
        of_engine("assemble"),
        {"parts": [IDS], "repair": None, "progress": None},
    ),
    "Engine.prefill_many": (of_engine("prefill_many"), {"prompts": [], "progress": None}),
    "Engine.generate_many": (
        of_engine("generate_many"),
        {"sessions": [], "max_new_tokens": 2, "seed": 1, "logprobs": False},
    ),
    "Engine.run": (
        of_engine("run"),
        {
            "prompts": [IDS],
            "max_new_tokens": 2,
            "n": 1,
            "seed": 1,
            "logprobs": False,
            "max_sessions": 2,
            "keep_sessions": False,
            "on_token": None,
            "progress": None,
        },
    ),
    "Engine.scheduler": (of_engine("scheduler"), {"max_sessions": 2, "max_waiting": 3}),
    "Engine.score": (
        of_engine("score"),
        {"ids": IDS, "top_logprobs": 2, "temperature": 0.5, "progress": None},
    ),
    "Engine.logprobs": (
        of_engine("logprobs"),
        {
            "texts": [IDS],
            "masks": None,
            "temperature": 0.5,
            "entropy": True,
            "top_logprobs": 2,
            "grad": False,
            "progress": None,
        },
    ),
    "Engine.snapshots": (
        lambda world, given: (
            list(world.engine.snapshots(**{"store": world.store, **given})) and None
        ),
        {"salt": None},
    ),
    "Scheduler.submit": (scheduled("submit"), {"max_new_tokens": 2, "seed": 1, **QUEUEING}),
    "Scheduler.chat": (scheduled("chat"), {**CHAT, "seed": 1, **QUEUEING}),
    "PagerConfig": (of_class(PagerConfig), defaults(PagerConfig, pool_tokens=512)),
    "TopK": (of_class(TopK), defaults(TopK, chunks=4)),
    "Sampling": (of_class(Sampling), defaults(Sampling)),
    "DraftModel": (
        lambda world, given: DraftModel(world.engine.model, **given) and None,
        {"guess_cost": None},
    ),
    "Grammar.json_schema": (of_class(Grammar.json_schema), {"schema": {"type": "object"}}),
    "Grammar.regex": (of_class(Grammar.regex), {"pattern": "a+"}),
    "Grammar.choice": (of_class(Grammar.choice), {"texts": ["a"]}),
    "Grammar.lark": (of_class(Grammar.lark), {"text": 'start: "a"'}),
    "DirectoryStore": (
        lambda world, given: DirectoryStore(**{"path": world.path("other"), **given}) and None,
        {"byte_budget": None, "ttl": None, "create": True, "mode": None, "lock_timeout": 1},
    ),
    "DirectoryStore of a path": (of_class(DirectoryStore), {"path": "/proc/none"}),
    "DirectoryStore.pin": (of_store("pin"), {"name": "held"}),
    "DirectoryStore.entries": (of_store("entries"), {"companions": False}),
    "DirectoryStore.delete": (of_store("delete"), {"name": "none", "salt": "", "force": False}),
    "DirectoryStore.set_ttl": (of_store("set_ttl"), {"name": "held", "ttl": "never"}),
    "DirectoryStore.gc": (of_store("gc"), {"remove_damaged": False, "dry_run": True}),
    "Cache.crop": (of_cache("crop"), {"tokens_to_remove": -3}),
    "Cache.keep_prefix": (of_cache("keep_prefix"), {"ids": IDS}),
    "Cache.reorder_cache": (of_cache("reorder_cache"), {"beam_idx": [0]}),
    "Cache.batch_repeat_interleave": (of_cache("batch_repeat_interleave"), {"repeats": 2}),
    "Cache.batch_select_indices": (of_cache("batch_select_indices"), {"indices": [0]}),
    "Cache.ledger": (of_cache("ledger"), {"entry": 0}),
    "Pager.sequence": (of_pager("sequence"), {"salt": ""}),
    "Pager.chain_hashes": (of_pager("chain_hashes"), {"tokens": IDS, "salt": ""}),
    "Pager.open_snapshot": (of_pager("open_snapshot"), {"path": "held"}),
    "Pager.restore": (restore_sequence, {"upto": 3, "salt": "", "provenance": "approximate"}),
    "Pager.begin_spans": (begin, {"position": 0, "count": 32, "kind": ROW_COMMIT, "dense": False}),
    "Forward.commit": (commit, {"accepted": 0}),
    "Sequence.trim": (of_sequence("trim"), {"position": 3}),
    "Sequence.pin": (of_sequence("pin"), {"start": 0, "stop": 16}),
    "Sequence.reserve": (of_sequence("reserve"), {"total_tokens": 64}),
    "Sequence.freeze": (of_sequence("freeze"), {"upto": None}),
    "Sequence.read_kv": (of_sequence("read_kv"), {"layer": 0, "start": 0, "stop": 3}),
    "Sequence.adopt_prefix": (
        lambda world, given: world.engine.pager.sequence().adopt_prefix(**given) and None,
        {"tokens": IDS},
    ),
}
# What an error calls an argument that is a part of something else.
CALLED = {
    "name": ("snapshot",),
    "name_or_path": ("name",),
    "parts": ("segment",),
    "position": ("spans",),
    "count": ("spans", "rows"),
    "kind": ("spans", "row"),
    "accepted": ("commit: layer",),
    "sessions": ("session",),
    "schema": ("grammar",),
    "text": ("grammar",),
    "pattern": ("grammar",),
}


@pytest.mark.parametrize("what", CALLS)
def test_an_argument_of_another_kind_is_an_error_that_names_it(world: World, what: str) -> None:
    call, sound = CALLS[what]
    before = world.state()
    unnamed = []
    for name in sound:
        for value in odd():
            try:
                call(world, {**sound, name: value})
            except InvalidArgumentError as error:  # noqa: PERF203
                if not any(said in str(error) for said in (name, *CALLED.get(name, ()))):
                    unnamed.append(f"{name}={value!r}: {error}")
            except PagerError:
                pass  # such as a file that does not exist
            except Exception as error:
                unnamed.append(f"{name}={value!r}: {type(error).__name__}: {error}")
    assert unnamed == []
    assert world.state() == before
    world.engine.pager.check_invariants()


@pytest.mark.parametrize("what", CALLS)
def test_the_arguments_that_are_replaced_are_sound(world: World, what: str) -> None:
    call, sound = CALLS[what]
    with contextlib.suppress(kvpager.StorageError):  # of what is deleted, or opened, there is none
        call(world, dict(sound))
