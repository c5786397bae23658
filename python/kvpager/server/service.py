"""The server apart from HTTP: an engine, its stepping thread, tenants and their conversations."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any

from kvpager._runtime.text.tokenizer import Rendering, Tokenizer
from kvpager._runtime.text.tool_calls import format_of_template, tool_call_format, unknown_format
from kvpager._runtime.text.tool_formats import ToolCallFormat
from kvpager.engine import Engine
from kvpager.requests.scheduler import Scheduler
from kvpager.server.background import BackgroundResponses
from kvpager.server.bodies import BodyBudget, ReadingThreads
from kvpager.server.conversations import Conversations
from kvpager.server.errors import ApiError, not_found, retry_after
from kvpager.server.histories import Histories
from kvpager.server.metrics import Gauges, Metrics
from kvpager.server.settings import AUTO, OFF, ServerSettings
from kvpager.server.tenants import Tenant, Tenants
from kvpager.server.token_texts import TokenTexts
from kvpager.server.transfers import Transfers
from kvpager.stores import StoreKey
from kvpager.stores.opening import NamedStore, open_store

_log = logging.getLogger(__name__)
_CHARACTERS_PER_TOKEN = 16  # few texts have a third of it
_LEAST_CHARACTERS = 1 << 16
_MOST_USED = 0.75  # of the chunks that have room below the pool, before conversations leave memory


class Service:
    """The engine, the tenants and the limits that the endpoints use.

    Attributes:
        engine: the model and its pager; the caller closes it.
        settings: of the server.
        names: the model's names; answers have the first.
        root: the model's origin.
        tenants: with their keys.
        bodies: bytes of bodies that are being read.
        workers: threads that read requests.
        transfers: exports and imports under way.
        draining: whether new requests are refused because the server is stopping.
        hurried: whether `drain` stops waiting.
    """

    def __init__(
        self, engine: Engine, settings: ServerSettings, *, names: tuple[str, ...], root: str
    ) -> None:
        """Opens the tenants' stores.

        Raises:
            InvalidArgumentError: api_keys or store cannot be used.
            StorageError: a store cannot be opened.
        """
        self.engine = engine
        self.settings = settings
        self.names = names
        self.root = root
        self.tenants = Tenants.read(settings.api_keys, settings.api_key)
        self.started = time.time()
        self.metrics = Metrics(names[0])
        self.metrics.watch(self.gauges)
        self.draining = False
        self.hurried = False
        self._most_kept = settings.kept_sessions
        if not (engine.config.host_bytes or engine.config.disk_bytes):
            # Then an idle conversation holds a block of the pool, which running requests need.
            self._most_kept = min(self._most_kept, max(1, engine.config.pool_blocks // 4))
        self.background_responses = BackgroundResponses()
        self.bodies = BodyBudget(2 * settings.max_request_bytes)
        self.workers = ReadingThreads(settings.read_timeout)
        self.histories = Histories()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.transfers = Transfers(settings.store_folder(names[0]), settings.max_transfers)
        self._conversations = {one.name: self._opened(one) for one in self.tenants.all()}
        self._serving = engine.serve(settings.max_running, max_waiting=settings.max_waiting)
        self._keep_places()

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of the stepping thread."""
        return self._serving.scheduler

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's tokenizer."""
        return self.engine.core.tokenizer

    @property
    def model(self) -> str:
        """The model's name in answers."""
        return self.names[0]

    @cached_property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: a digest of everything that an answer's bits depend on."""
        text = json.dumps(dict(self.engine.fingerprint), sort_keys=True, default=str)
        return "kvp_" + blake2b(text.encode(), digest_size=8).hexdigest()

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The texts of single tokens. REQUIRES: there is a tokenizer."""
        tokenizer = self.tokenizer
        assert tokenizer is not None
        return TokenTexts(tokenizer)

    @cached_property
    def tool_call_format(self) -> ToolCallFormat | None:
        """The model's format of tool calls; None: tools are refused."""
        asked = self.settings.tool_calls
        if asked == AUTO:
            return format_of_template(self._template)
        return None if asked == OFF else tool_call_format(asked)

    @property
    def no_tools(self) -> str:
        """The reason why tools are refused, where they are."""
        if self.settings.tool_calls == OFF:
            return "the server was started with --tool-calls off"
        return unknown_format(self._template)

    @cached_property
    def call_marks(self) -> dict[int, str]:
        """Control tokens that mark calls; the text of an answer omits them."""
        form, tokenizer = self.tool_call_format, self.engine.tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {}) if form is not None else {}
        return {
            number: token.content
            for number, token in added.items()
            if form is not None and token.special and token.content in form.marks
        }

    @property
    def _template(self) -> object:
        return getattr(self.engine.tokenizer, "chat_template", None)

    def rendering(
        self,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None = None,
        *,
        continues: bool = False,
        generation_prompt: bool = True,
    ) -> Rendering:
        """Returns the arguments of the chat template for a request's prompt.

        Args:
            tools: shown to the model.
            variables: more variables of the template.
            continues: whether the answer continues the last message.
            generation_prompt: whether the template begins an answer.
        """
        given = dict(variables or {})
        if tools is not None:
            given["tools"] = list(tools)
        return Rendering(given, self.settings.control_tokens, continues, generation_prompt)

    @cached_property
    def most_tokens(self) -> int | None:
        """Most tokens of prompt and answer that positions and memory allow; None: no limit."""
        core = self.engine.core
        if core.pager.window:  # chunks behind it are released
            return core.positions.most
        held = int(self.engine.stats()["home_chunks"]) * core.facts.layout.chunk_tokens
        return held if core.positions.most is None else min(held, core.positions.most)

    @property
    def most_characters(self) -> int:
        """Most characters of a prompt."""
        most = self.settings.max_prompt_chars
        if most is None and self.most_tokens is not None:
            return max(_LEAST_CHARACTERS, _CHARACTERS_PER_TOKEN * self.most_tokens)
        return self.settings.max_request_bytes if most is None else most

    def conversations(self, tenant: Tenant) -> Conversations:
        """Returns a tenant's conversations."""
        return self._conversations[tenant.name]

    def _opened(self, tenant: Tenant) -> Conversations:
        """Opens a tenant's store and conversations."""
        folder = self.settings.store_path(self.names[0])
        store: NamedStore | None = None
        if folder is not None:
            budget, ttl = self.settings.store_budget_of(tenant), self.settings.store_ttl
            file = self.settings.store_key
            key = None if file is None else StoreKey.from_file(file, tenant=tenant.name)
            address = f"{folder.rstrip('/')}/{tenant.name}"
            if (local := self.settings.store_folder(self.names[0])) is not None:
                local.mkdir(parents=True, exist_ok=True, mode=0o700)
            store = open_store(address, byte_budget=budget, ttl=ttl, key=key)
        return Conversations(
            self.engine,
            tenant,
            store,
            shared=self.settings.shared_store,
            on_kept=self._release_surplus,
            on_restore=self.metrics.restored,
        )

    def _keep_places(self) -> None:
        """Leaves a quarter of the running places free of any one tenant, if there are several.

        Another tenant's request then need not wait until an answer ends.
        """
        most, several = self.scheduler.most_running, len(self.tenants.all()) > 1
        self.scheduler.most_of_one = max(1, most - -(-most // 4)) if several else most

    async def reload_keys(self) -> None:
        """Reads the keys again; if that fails, logs it and keeps the old ones.

        Requests of a removed tenant continue, and its conversations stay on disk.
        """
        path = self.settings.api_keys
        if path is None:
            _log.warning("there is no file of api_keys to read again")
            return

        def read() -> tuple[Tenants, dict[str, Conversations]]:
            tenants = Tenants.read(path, self.settings.api_key)
            opened = {
                one.name: self._opened(one)  # with its current budget
                for one in tenants.all()
                if one.name not in self._conversations or self.conversations(one).tenant != one
            }
            return tenants, opened

        try:
            tenants, opened = await asyncio.to_thread(read)
        except Exception as error:
            _log.error("the keys that were read before hold on: %s", error)
            return
        for name, conversations in opened.items():
            known = self._conversations.setdefault(name, conversations)
            known.tenant = conversations.tenant
        self.tenants = self.tenants.renewed(tenants)
        self._keep_places()
        _log.info("read %d keys from %s", len(tenants.by_digest), path)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for another model's name."""
        if name is not None and name not in self.names:
            raise not_found("model", name, "model", "model_not_found")

    def check_open(self) -> None:
        """Raises ApiError 503 while the server is stopping."""
        if self.draining:
            text = "the server is being stopped"
            raise ApiError(503, text, code="shutting_down", headers=retry_after(5))

    def salt(self, tenant: Tenant, cache_salt: str | None) -> str | None:
        """Returns the salt of a request's chunks; None: the engine's own."""
        parts = [part for part in (tenant.salt, cache_salt) if part]
        return "\0".join(parts) if parts else None

    def head(self, name: str) -> dict[str, Any]:
        """Returns fields of a completion and of each of its chunks."""
        return {
            "id": name,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def gauges(self) -> Gauges:
        """Reads the current values. Any thread may call it."""
        stats, scheduler = self.engine.stats(), self.scheduler
        sources = self._conversations.values()
        stores = {
            source.tenant.name: int(source.store.stats()["bytes"] or 0)
            for source in sources
            if source.store is not None
        }
        return Gauges(
            running=scheduler.running,
            waiting=scheduler.waiting,
            usage=1 - stats["free_blocks"] / stats["pool_blocks"],
            tiers={
                "resident": stats["resident_bytes"],
                "host": stats["host_bytes_used"],
                "disk": stats["disk_bytes_used"],
                "snapshot": sum(stores.values()),
            },
            stores=stores,
            sessions=sum(len(source.names()) for source in sources),
        )

    def release_idle(self) -> bool:
        """Evicts a tenant's least recently used conversation from memory; False if there is none.

        It belongs to the tenant with the most of them, so each makes room for itself first.
        """
        kept = [
            (-len(source.names()), first.used, source)
            for source in self._conversations.values()
            for name in source.names()[:1]
            if (first := source.kept(name)) is not None
        ]
        return min(kept, key=lambda one: one[:2])[2].release_oldest() if kept else False

    def _release_surplus(self) -> None:
        while self._has_surplus:
            if not self.release_idle():
                return

    @property
    def _has_surplus(self) -> bool:
        """Whether conversations in memory are too many, or leave too little room to requests."""
        if sum(len(source.names()) for source in self._conversations.values()) > self._most_kept:
            return True
        stats = self.engine.stats()
        return bool(stats["home_chunks_used"] > _MOST_USED * stats["home_chunks"])

    def background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs work that must not end with its request."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self) -> None:
        """Refuses new requests, and waits for running ones as long as the settings allow."""
        self.draining = self.background_responses.stopping = True
        self.background_responses.stop_following()
        deadline = time.monotonic() + self.settings.drain_seconds
        while not (self.scheduler.idle or self.hurried) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Drains, then ends the requests that still run."""
        await self.drain()
        await self._serving.aclose()

    async def close(self) -> None:
        """Ends running requests, and frees everything but the engine."""
        self.draining = self.background_responses.stopping = True
        await self._serving.aclose()
        await self.background_responses.ended()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=self.settings.drain_seconds + 5)
        for source in self._conversations.values():
            source.close()
        self.background_responses.threads.close()
        self.workers.close()
