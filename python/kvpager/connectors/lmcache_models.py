"""Whose K/V LMCache's chunks are: a store for each model and layout.

Imports nothing of LMCache.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from logging import Logger
from typing import Any, NamedTuple

from kvpager._support.arguments import refusal
from kvpager.connectors.identity import (
    as_json,
    log_identity,
    message_of,
    model_identity,
    model_stamp,
)
from kvpager.stores.chunks import ChunkQueue, ChunkStore, JobDone

FORMAT = 1  # another one where what is hashed, or how chunks are stored, changes

_CHECK_SECONDS = 1.0  # files are not looked at more often; no engine restarts within it
_DECORATION = "##"  # begins what LMCache's connectors append to a model's name


@dataclass(frozen=True)
class Options:
    """Parameters of the adapter (`adapter_params`).

    Attributes:
        path: folder of the store.
        byte_budget: bytes, "200GiB" or "unlimited"; of all users of the folder together.
        ttl: how long a chunk lives after its last use; None: the store's setting.
        threads: that read and write, for each layout.
        depth: most stores and loads that wait or run, for each layout.
        deadline_seconds: after which a load is given up.
        models: by name, what identifies a model: "folder" of its files if the name is not their
            path, "weights" in place of their digests, and any other field. These models are
            identified at start, others when their name is first seen.
    """

    path: str
    byte_budget: int | str
    ttl: float | str | None = None
    threads: int = 2
    depth: int = 64
    deadline_seconds: float = 30.0
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, params: Mapping[str, Any]) -> Options:
        """Raises InvalidArgumentError if a parameter is missing or unknown."""
        names = [one.name for one in fields(cls)]
        for name in params:
            if name not in names:
                raise refusal("adapter_params", name, f"one of {', '.join(names)}")
        for name in ("path", "byte_budget"):
            if name not in params:
                raise refusal(name, None, "a value in adapter_params")
        models = params.get("models", {})
        if not isinstance(models, Mapping) or not all(
            isinstance(about, Mapping) for about in models.values()
        ):
            raise refusal("models", models, "an object of objects")
        return cls(**params)


class Chunks(NamedTuple):
    """Chunks of one model in one layout."""

    store: ChunkStore
    queue: ChunkQueue


@dataclass(eq=False)
class _Model:
    """identity: None while it is not known. layouts: as JSON, those that have chunks."""

    checked: float = float("-inf")
    stamp: Any = None
    identity: Mapping[str, Any] | None = None
    layouts: set[str] = field(default_factory=set)


class Models:
    """The models of LMCache's keys.

    All methods but `finished` are called on one thread; none waits for digests of weights.
    """

    def __init__(
        self, options: Options, version: str, log: Logger, on_done: Callable[[], object]
    ) -> None:
        """Opens the folder, and identifies the models of the options.

        Args:
            options: of the adapter.
            version: of LMCache.
            log: what is found out goes there.
            on_done: is called when `finished` has jobs.

        Raises:
            InvalidArgumentError: a model of the options cannot be identified.
        """
        self._options = options
        self._engine = f"lmcache {version}"
        self._log = log
        self._on_done = on_done
        self.folder = ChunkStore(
            options.path, {"engine": self._engine}, byte_budget=options.byte_budget, ttl=options.ttl
        )
        self._models: dict[str, _Model] = {}
        self._chunks: dict[str, Chunks] = {}  # by identity with layout
        self._identifier = ThreadPoolExecutor(1, "kvpager-identity")
        try:
            self._queue(self.folder).close()  # refuses options that are out of range
            for name in options.models:
                model = self._models[name] = _Model(time.monotonic(), self._stamp(name))
                self._identify(name, model)
        except BaseException:
            self.close()
            raise

    def places(
        self, keys: Sequence[Any], layouts: Sequence[str]
    ) -> Iterator[tuple[Chunks, list[int]]]:
        """Chunks for keys in layouts, with indices; without models that are not identified."""
        places: dict[tuple[_Model, str], list[int]] = {}
        for i, (key, layout) in enumerate(zip(keys, layouts)):
            model = self._identified(key.model_name)
            if model is not None:
                places.setdefault((model, layout), []).append(i)
        for (model, layout), indices in places.items():
            yield self._open(model, layout), indices

    def known(self, keys: Sequence[Any]) -> Iterator[tuple[Chunks, str, list[int]]]:
        """All chunks of the keys' models, with layout and indices."""
        models: dict[_Model, list[int]] = {}
        for i, key in enumerate(keys):
            model = self._identified(key.model_name)
            if model is not None:
                models.setdefault(model, []).append(i)
        for model, indices in models.items():
            for layout in sorted(model.layouts):
                yield self._open(model, layout), layout, indices

    def finished(self) -> Iterator[JobDone]:
        """Jobs of all queues that have ended. May be called on any thread."""
        for chunks in list(self._chunks.values()):
            yield from chunks.queue.finished()

    def identified(self) -> dict[str, bool]:
        """Names that were seen, and whether their models are identified."""
        return {name: model.identity is not None for name, model in list(self._models.items())}

    def close(self) -> None:
        """Ends jobs early; nothing is written to their destinations after it returns."""
        self._identifier.shutdown(cancel_futures=True)
        for chunks in self._chunks.values():
            chunks.queue.close()
            chunks.store.close()
        self.folder.close()

    def _identified(self, name: str) -> _Model | None:
        """A name's model as its files are now; None: it is not identified, or not yet."""
        model = self._models.setdefault(name, _Model())
        now = time.monotonic()
        if now - model.checked > _CHECK_SECONDS:
            model.checked = now
            stamp = self._stamp(name)
            if stamp != model.stamp:
                model.stamp, model.identity = stamp, None
                self._identifier.submit(self._try_to_identify, name, model)
        return None if model.identity is None else model

    def _try_to_identify(self, name: str, model: _Model) -> None:
        try:
            self._identify(name, model)
        except Exception as error:  # whatever is wrong with its files
            self._log.warning("kvpager: chunks of %s bypass the store: %s", name, message_of(error))

    def _identify(self, name: str, model: _Model) -> None:
        start, stamp = time.monotonic(), model.stamp
        folder, about = self._about(name)
        weights = about.pop("weights", None)
        found = model_identity(folder) if weights is None else {"weights": {"named": weights}}
        identity = {
            "format": FORMAT,
            "engine": self._engine,
            "decoration": name.partition(_DECORATION)[2],
            "also": as_json(about),
            **found,
        }
        others = [dict(other) for other, _, _ in self.folder.identities()]
        layouts = {
            json.dumps(other.pop("layout"), sort_keys=True)
            for other in others
            if "layout" in other and {**other, "layout": None} == {**identity, "layout": None}
        }
        if self._stamp(name) != stamp or model.stamp != stamp:
            model.checked, model.stamp = float("-inf"), None  # the next call asks again
            return
        model.layouts, model.identity = layouts, identity
        self._log.info("kvpager: identified %s in %.1f s", name, time.monotonic() - start)

    def _stamp(self, name: str) -> Any:
        folder, about = self._about(name)
        if "weights" in about:
            return "named"
        try:
            return model_stamp(folder)
        except Exception as error:  # `_identify` meets it too, and says so
            return message_of(error)

    def _about(self, name: str) -> tuple[str, dict[str, Any]]:
        """The folder or name of a model's files, and what else the options say of it."""
        name = name.partition(_DECORATION)[0]
        about = dict(self._options.models.get(name, {}))
        return str(about.pop("folder", name)), about

    def _open(self, model: _Model, layout: str) -> Chunks:
        identity = {**(model.identity or {}), "layout": json.loads(layout)}
        name = json.dumps(identity, sort_keys=True)
        found = self._chunks.get(name)
        if found is None:
            store = ChunkStore(self._options.path, identity)
            log_identity(self._log, store, identity)
            found = self._chunks[name] = Chunks(store, self._queue(store))
        model.layouts.add(layout)
        return found

    def _queue(self, store: ChunkStore) -> ChunkQueue:
        return ChunkQueue(
            store,
            threads=self._options.threads,
            depth=self._options.depth,
            deadline_seconds=self._options.deadline_seconds,
            on_done=self._on_done,
        )
