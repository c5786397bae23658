"""The server apart from HTTP: an engine, its stepping thread, tenants and their conversations."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpager.engine import Engine
from kvpager.requests.scheduler import Scheduler
from kvpager.server.accepted import Accepted
from kvpager.server.background import BackgroundResponses
from kvpager.server.bodies import Budget
from kvpager.server.conversations import Conversations
from kvpager.server.errors import ApiError, not_found, retry_after
from kvpager.server.ids import new_id
from kvpager.server.metrics import Gauges, Metrics
from kvpager.server.monitor import Monitor, Recent
from kvpager.server.settings import AUTO, OFF, ServerSettings
from kvpager.server.tenants import Tenant, Tenants
from kvpager.server.threads import Workers
from kvpager.server.token_texts import TokenTexts
from kvpager.server.transfers import Transfers
from kvpager.stores import DirectoryStore
from kvpager.text.tokenizer import Rendering, Tokenizer
from kvpager.text.tool_calls import format_of_template, tool_call_format, unknown_format
from kvpager.text.tool_formats import ToolCallFormat

if TYPE_CHECKING:
    from kvpager.server.exchange import Exchange

_log = logging.getLogger(__name__)
_CHARACTERS_PER_TOKEN = 16  # few texts have a third of it
_LEAST_CHARACTERS = 1 << 16


class Service:
    """What the endpoints work on.

    Attributes:
        engine: the model and its pager; the caller closes it.
        settings: of the server.
        names: of the model, the first one in answers.
        root: where the model is from.
        tenants: who may use it.
        bodies: bytes of bodies that are being read.
        workers: threads that read requests.
        transfers: exports and imports under way.
        draining: whether new requests are refused, because the server ends.
        hurried: whether `drain` waits no longer.
    """

    def __init__(
        self, engine: Engine, settings: ServerSettings, *, names: tuple[str, ...], root: str
    ) -> None:
        """Opens the tenants' stores.

        Raises:
            InvalidArgumentError: api_keys or store cannot be used; says why.
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
        # One that rests holds a block of the pool, which running requests need.
        quarter = max(1, engine.config.pool_blocks // 4)
        self._most_kept = min(settings.kept_sessions, quarter)
        self.recent = Recent()
        self.monitor = Monitor(self)
        self._exchanges: dict[int, Exchange] = {}
        self.background_responses = BackgroundResponses(Accepted(settings.store_path(names[0])))
        self.bodies = Budget(2 * settings.max_request_bytes)
        self.workers = Workers(settings.read_timeout)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.transfers = Transfers(settings.store_path(names[0]), settings.max_transfers)
        self._conversations = {one.name: self._opened(one) for one in self.tenants.all()}
        self._serving = engine.serve(settings.max_running, max_waiting=settings.max_waiting)
        self._keep_places()

    @property
    def scheduler(self) -> Scheduler:
        """What the stepping thread steps."""
        return self._serving.scheduler

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's."""
        return self.engine.core.tokenizer

    @property
    def model(self) -> str:
        """Its name in answers."""
        return self.names[0]

    @cached_property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: of all that the bits of an answer depend on."""
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
        """How the model writes calls of tools; None: tools are refused."""
        asked = self.settings.tool_calls
        if asked == AUTO:
            return format_of_template(self._template)
        return None if asked == OFF else tool_call_format(asked)

    @property
    def no_tools(self) -> str:
        """Why tools are refused, where they are."""
        if self.settings.tool_calls == OFF:
            return "the server was started with --tool-calls off"
        return unknown_format(self._template)

    @cached_property
    def call_marks(self) -> dict[int, str]:
        """Control tokens that are marks of calls, which the text of an answer leaves out."""
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
        """How the chat template is asked for a request's prompt.

        Args:
            tools: that the model is shown.
            variables: further ones of the template.
            continues: whether the answer goes on with the last message.
            generation_prompt: whether the template begins an answer.
        """
        given = dict(variables or {})
        if tools is not None:
            given["tools"] = list(tools)
        return Rendering(given, self.settings.control_tokens, continues, generation_prompt)

    @cached_property
    def most_tokens(self) -> int | None:
        """The longest text, prompt and answer, of positions and memory; None: no limit is known."""
        core = self.engine.core
        if core.pager.window:  # chunks behind it are released
            return core.positions.most
        held = int(self.engine.stats()["home_chunks"]) * core.layout.chunk_tokens
        return held if core.positions.most is None else min(held, core.positions.most)

    @property
    def most_characters(self) -> int:
        """The longest text of a prompt that is given to the tokenizer."""
        most = self.settings.max_prompt_chars
        if most is None and self.most_tokens is not None:
            return max(_LEAST_CHARACTERS, _CHARACTERS_PER_TOKEN * self.most_tokens)
        return self.settings.max_request_bytes if most is None else most

    def conversations(self, tenant: Tenant) -> Conversations:
        """A tenant's conversations."""
        return self._conversations[tenant.name]

    def _opened(self, tenant: Tenant) -> Conversations:
        """A tenant's conversations, with its store."""
        folder = self.settings.store_path(self.names[0])
        return Conversations(
            self.engine,
            tenant,
            _store(folder, tenant, self.settings),
            on_kept=self._release_surplus,
            on_restore=self.metrics.restored,
        )

    def _keep_places(self) -> None:
        """Keeps a quarter of the places that run free of any one tenant, where there are several.

        A request of another tenant then waits for no answer to end.
        """
        most, several = self.scheduler.most_running, len(self.tenants.all()) > 1
        self.scheduler.most_of_one = max(1, most - -(-most // 4)) if several else most

    async def reload_keys(self) -> None:
        """Reads the keys again. A file that cannot be read leaves those that hold; the log says so.

        Requests of a tenant that is left out go on, and its conversations stay on disk.
        """
        path = self.settings.api_keys
        if path is None:
            _log.warning("there is no file of api_keys to read again")
            return

        def read() -> tuple[Tenants, dict[str, Conversations]]:
            tenants = Tenants.read(path, self.settings.api_key)
            opened = {
                one.name: self._opened(one)  # its store takes the budget that holds now
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
        """Raises ApiError 503 while the server ends."""
        if self.draining:
            raise ApiError(
                503,
                "the server is being stopped",
                kind="server_error",
                code="shutting_down",
                headers=retry_after(5),
            )

    def salt(self, tenant: Tenant, cache_salt: str | None) -> str | None:
        """The salt of a request's chunks; None: the engine's own."""
        parts = [part for part in (tenant.salt, cache_salt) if part]
        return "\0".join(parts) if parts else None

    def own_name(self) -> str:
        """A name for a conversation that its client has not named."""
        return new_id("conversation-")

    def gauges(self) -> Gauges:
        """What is so now. Any thread may ask."""
        stats, scheduler = self.engine.stats(), self.scheduler
        stores = self._store_bytes()
        sources = self._conversations.values()
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

    def _store_bytes(self) -> dict[str, int]:
        """Bytes of each tenant's store."""
        return {
            name: int(source.store.stats()["bytes"] or 0)
            for name, source in self._conversations.items()
            if source.store is not None
        }

    def release_idle(self) -> bool:
        """Evicts a tenant's least recently used conversation from memory; False if there is none.

        Of the tenant with the most of them, so that one makes room for itself first.
        """
        kept = [
            (-len(source.names()), first.used, source)
            for source in self._conversations.values()
            for name in source.names()[:1]
            if (first := source.kept(name)) is not None
        ]
        return min(kept, key=lambda one: one[:2])[2].release_oldest() if kept else False

    def _release_surplus(self) -> None:
        sources = self._conversations.values()
        while sum(len(source.names()) for source in sources) > self._most_kept:
            if not self.release_idle():
                return

    def begun(self, exchange: Exchange) -> None:
        """Notes a request that runs."""
        self._exchanges[id(exchange)] = exchange

    def ended(self, exchange: Exchange) -> None:
        """Forgets it. May be called twice."""
        self._exchanges.pop(id(exchange), None)

    def exchanges_of(self, source: Conversations) -> list[Exchange]:
        """The requests of a tenant that run."""
        return [one for one in list(self._exchanges.values()) if one.plan.conversations is source]

    def background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs what must not end with the request that asked for it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def drain(self) -> None:
        """Refuses new requests, and waits for running ones as long as the settings allow."""
        self.draining = self.background_responses.stopping = True
        deadline = time.monotonic() + self.settings.drain_seconds
        while not (self.scheduler.idle or self.hurried) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Lets running requests end, and ends them when they have had their time."""
        await self.drain()
        await self._serving.aclose()

    def hurry(self) -> None:
        """Lets `drain` wait no longer."""
        self.hurried = True

    async def close(self) -> None:
        """Ends running requests, and frees everything but the engine."""
        self.draining = self.background_responses.stopping = True
        await self._serving.aclose()
        await self.background_responses.ended()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=self.settings.drain_seconds + 5)
        for source in self._conversations.values():
            source.close()
        self.workers.close()
        self.transfers.close()


def _store(folder: str | None, tenant: Tenant, settings: ServerSettings) -> DirectoryStore | None:
    if folder is None:
        return None
    path = Path(folder) / tenant.name
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    budget = settings.store_budget_of(tenant)
    return DirectoryStore(path, byte_budget=budget, ttl=settings.store_ttl)
