"""`/v1/sessions`: a tenant's conversations; and llama.cpp's `/slots`: slot N is `slot-N`."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvpager._runtime.scheduling.chat import keep_messages
from kvpager._runtime.snapshots.freezing import freeze
from kvpager._support.arguments import refusal
from kvpager.errors import CorruptSnapshotError, InvalidArgumentError, UnsupportedVersionError
from kvpager.server import transfers
from kvpager.server.bodies import arriving, in_thread
from kvpager.server.conversations import (
    Conversations,
    Kept,
    described,
    listed,
    names_with,
    seen_of,
)
from kvpager.server.errors import ApiError, bad_request, not_found, without_folders
from kvpager.server.routes.caller import Caller, JsonRoute, TheCaller
from kvpager.server.schema.common import NAME_PATTERN, Deleted
from kvpager.server.schema.sessions import (
    Chunk,
    ForkRequest,
    Ledger,
    RenameRequest,
    Saved,
    SaveRequest,
    SessionInfo,
    SessionList,
    SessionMessages,
    SlotRequest,
    TrimRequest,
)
from kvpager.server.turn import CALLED, ServedTurn
from kvpager.stores import FileStore, SaveReport

if TYPE_CHECKING:
    from kvpager._core import SnapshotImage
    from kvpager.session import Session

router = APIRouter(route_class=JsonRoute, prefix="/v1/sessions")
slots_router = APIRouter(route_class=JsonRoute)
Action = Literal["save", "restore", "erase"]
Key = tuple[str, str | None, str]  # name, salt, on_corrupt
_REPORTED = [name for name in Saved.model_fields if name != "id"]
_SNAPSHOT, _JSON = "application/octet-stream", "application/json"
_HEADINGS = {"user": "You"}
SessionName = Annotated[str, Path(pattern=NAME_PATTERN)]
CacheSalt = Annotated[str | None, Query(description="the cache_salt that it was computed under")]


@router.get("")
async def sessions(
    caller: TheCaller,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(description="id of the last one seen")] = None,
    contains: Annotated[str | None, Query(description="text in their ids, in any case")] = None,
    *,
    chosen: Annotated[bool, Query(description="only those whose id a client chose")] = False,
) -> SessionList:
    """Returns conversations, the most recently used first."""
    named = names_with(contains, chosen=chosen)
    found = await in_thread(lambda: listed(caller.conversations, limit + 1, after, named))
    return SessionList(data=found[:limit], has_more=len(found) > limit)


@router.get("/{name}")
async def session(name: SessionName, caller: TheCaller) -> SessionInfo:
    """Returns one conversation."""

    def find() -> SessionInfo:
        found = described(caller.conversations, name, caller.conversations.entry(name))
        if found is None:
            raise not_found("session", name, "id", "session_not_found")
        return found

    return await in_thread(find)


@router.get("/{name}/ledger")
async def ledger(name: SessionName, caller: TheCaller, cache_salt: CacheSalt = None) -> Ledger:
    """Returns its chunks: their tiers, scores and provenance."""

    def listed_chunks(kept: Kept) -> Ledger:
        chunks = [Chunk.model_validate(chunk) for chunk in kept.session.ledger()]
        return Ledger(id=name, tokens=kept.length, chunks=chunks)

    key, look = _key(caller, name, cache_salt), caller.conversations.look
    return await in_thread(lambda: look(*key, listed_chunks, keep=False))


@router.get("/{name}/messages")
async def messages(
    name: SessionName, caller: TheCaller, cache_salt: CacheSalt = None
) -> SessionMessages:
    """Returns its messages, and the id of a response that continues it now."""
    return await in_thread(lambda: _messages(caller, _key(caller, name, cache_salt)))


@router.post("/{name}/save")
async def save(
    name: SessionName, body: SaveRequest, caller: TheCaller, cache_salt: CacheSalt = None
) -> Saved:
    """Saves a conversation; chunks that are saved already are not written again."""
    source, key = _stored(caller), _key(caller, name, cache_salt)
    report = await in_thread(lambda: source.save(*key, body.ttl))
    return Saved(id=name, **{field: getattr(report, field) for field in _REPORTED})


@router.post("/{name}/restore")
async def restore(
    name: SessionName, caller: TheCaller, cache_salt: CacheSalt = None
) -> SessionInfo:
    """Restores a saved conversation. Its chunks are read on demand."""
    key, look = _key(caller, name, cache_salt), caller.conversations.look
    await in_thread(lambda: look(*key, lambda kept: None))
    return await session(name, caller)


@router.post("/{name}/fork")
async def fork(
    name: SessionName, body: ForkRequest, caller: TheCaller, cache_salt: CacheSalt = None
) -> SessionInfo:
    """Copies it, or its first messages, under another name; the two share chunks."""

    def copy() -> None:
        _check_new(caller, body.id)
        _copy(caller, _key(caller, name, cache_salt), body.id, save=True, messages=body.messages)

    await in_thread(copy)
    return await session(body.id, caller)


@router.post("/{name}/rename")
async def rename(
    name: SessionName, body: RenameRequest, caller: TheCaller, cache_salt: CacheSalt = None
) -> SessionInfo:
    """Gives it another name; 409 while it is answered."""

    def move() -> None:
        _check_new(caller, body.id)
        if any(isinstance(one, ServedTurn) for one in caller.conversations.under_way(name)):
            raise _conflict(f"session {name!r} is being answered; rename it afterwards", "busy")
        key, source = _key(caller, name, cache_salt), caller.conversations
        source.rename(name, body.id, *key[1:])

    await in_thread(move)
    return await session(body.id, caller)


@router.post("/{name}/trim")
async def trim(
    name: SessionName, body: TrimRequest, caller: TheCaller, cache_salt: CacheSalt = None
) -> SessionInfo:
    """Keeps only its first tokens."""

    def cut() -> None:
        forked, kept = caller.conversations.fork(*_key(caller, name, cache_salt))
        try:
            forked.trim(body.tokens)
        except BaseException:
            forked.close()
            raise
        caller.conversations.keep(name, Kept(forked, (), kept.salt, {}), save=True)

    await in_thread(cut)
    return await session(name, caller)


@router.post("/{name}/pin")
async def pin(name: SessionName, caller: TheCaller) -> SessionInfo:
    """Exempts a saved conversation from expiry and eviction."""
    await in_thread(lambda: _saved_one(caller, name).pin(name))
    return await session(name, caller)


@router.post("/{name}/unpin")
async def unpin(name: SessionName, caller: TheCaller) -> SessionInfo:
    """Makes it subject to expiry and eviction again."""
    await in_thread(lambda: _saved_one(caller, name).unpin(name))
    return await session(name, caller)


@router.delete("/{name}")
async def delete(name: SessionName, caller: TheCaller) -> Deleted:
    """Deletes it, in memory and on disk."""
    await in_thread(lambda: caller.conversations.delete(name))
    return Deleted(id=name, object="session")


@router.get(
    "/{name}/export",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"application/octet-stream": {}, _JSON: {}, "text/markdown": {}}},
    },
)
async def export(
    name: SessionName,
    request: Request,
    caller: TheCaller,
    cache_salt: CacheSalt = None,
    format: Annotated[Literal["snapshot", "json", "markdown"], Query()] = "snapshot",  # noqa: A002
) -> Response:
    """Returns the conversation as a file: a snapshot, or its messages as JSON or Markdown.

    Two snapshots may differ in bytes. No file is made: the frozen session is read as fast as its
    client reads.
    """
    suffix = {"snapshot": "kvsnap", "json": "json", "markdown": "md"}[format]
    service, disposition = caller.service, f'attachment; filename="{name}.{suffix}"'
    if format != "snapshot":
        found = await messages(name, caller, cache_salt)
        text = found.model_dump_json(indent=2) if format == "json" else as_markdown(found)
        kind = _JSON if format == "json" else "text/markdown"
        return Response(text, media_type=kind, headers={"content-disposition": disposition})
    headers = {"content-disposition": disposition, "accept-ranges": "none"}
    if getattr(request.state, "head", False):
        await session(name, caller)
        return Response(media_type=_SNAPSHOT, headers=headers)

    def frozen() -> SnapshotImage:
        key, look = _key(caller, name, cache_salt), caller.conversations.look
        with look(*key, lambda kept: kept.session.fork(), keep=False) as forked:
            return freeze(forked.core, forked.transcript, name).image()

    with contextlib.ExitStack() as held:
        held.enter_context(service.transfers.one(caller.tenant.name))
        image = await in_thread(frozen)
        headers["content-length"] = str(image.file_bytes)
        sent = transfers.send(image, service.settings.transfer_timeout)
        return _Export(sent, held.pop_all(), media_type=_SNAPSHOT, headers=headers)


class _Export(StreamingResponse):
    """A stream that releases its resources when it ends or its client goes away."""

    def __init__(self, content: Any, held: contextlib.ExitStack, **options: Any) -> None:
        super().__init__(content, **options)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await super().__call__(scope, receive, send)


@router.post(
    "/{name}/import",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
            },
        }
    },
)
async def import_(
    name: SessionName, request: Request, caller: TheCaller, cache_salt: CacheSalt = None
) -> SessionInfo:
    """Imports a conversation from a snapshot file, the body; an invalid one changes nothing."""
    salt = caller.service.salt(caller.tenant, cache_salt)
    under_way = caller.service.transfers
    with under_way.one(caller.tenant.name):
        async with under_way.received(arriving(request)) as path:

            def take() -> None:
                try:
                    _check_sound(path)
                    restored = caller.service.engine.restore(path, salt=salt)
                except (CorruptSnapshotError, UnsupportedVersionError) as error:
                    reason = without_folders(str(error).removeprefix(f"{path}: "))
                    raise bad_request(
                        f"the body is not a valid snapshot: {reason}", "body"
                    ) from error
                caller.conversations.take(name, Kept(restored, seen_of(restored), salt))

            await in_thread(take)
    return await session(name, caller)


@slots_router.post("/slots/{slot}", response_model=None)
async def slots(
    slot: Annotated[int, Path(ge=0, lt=1 << 31)],
    action: Annotated[Action, Query()],
    caller: TheCaller,
    body: SlotRequest | None = None,
) -> Any:
    """Saves the conversation `slot-N` under a name, restores it from there, or erases it."""
    name, source = f"slot-{slot}", caller.conversations
    file = None if body is None else body.filename
    if action != "erase" and file is None:
        raise bad_request(f"filename is missing; expected it with action={action}", "filename")
    if action != "erase":
        _stored(caller)

    def work() -> dict[str, Any]:
        if file is None or action == "erase":
            kept = source.kept(name)
            source.delete(name)
            return {"id_slot": slot, "n_erased": 0 if kept is None else kept.length}
        begun = time.perf_counter()
        origin, target = (name, file) if action == "save" else (file, name)
        tokens, report = _copy(caller, _key(caller, origin, None), target, save=action == "save")
        if report is not None:
            counts = {"n_saved": tokens, "n_written": report.bytes_written}
        else:
            entry = source.entry(file)
            read = 0 if entry is None else entry.bytes_own + entry.bytes_shared
            counts = {"n_restored": tokens, "n_read": read}
        timings = {f"{action}_ms": 1000 * (time.perf_counter() - begun)}
        return {"id_slot": slot, "filename": file, **counts, "timings": timings}

    return await in_thread(work)


def as_markdown(found: SessionMessages) -> str:
    """Returns a conversation as Markdown, with a heading for each message."""
    parts = [f"# {found.id}"]
    for message in found.data:
        parts.append(f"## {_HEADINGS.get(message['role'], message['role'].capitalize())}")
        parts += [text for text in [message.get("content")] if text]
        if calls := message.get("tool_calls"):
            parts.append(f"```json\n{json.dumps(calls, indent=2, ensure_ascii=False)}\n```")
    return "\n\n".join(parts) + "\n"


def _messages(caller: Caller, key: Key) -> SessionMessages:
    """A conversation's messages; none of one whose first answer is not there yet."""
    name, source = key[0], caller.conversations
    running = [one.response_id for one in source.under_way(name) if isinstance(one, ServedTurn)]

    def read(kept: Kept) -> SessionMessages:
        said = kept.session.messages
        if said and CALLED in kept.notes:
            said[-1] = kept.notes[CALLED]
        response = running[-1] if running else None
        return SessionMessages(id=name, tokens=kept.length, response_id=response, data=said)

    try:
        return source.look(*key, read, keep=False)
    except ApiError:
        if not running:
            raise
        return SessionMessages(id=name, tokens=0, response_id=running[-1], data=[])


def _copy(
    caller: Caller, key: Key, to: str, *, save: bool, messages: int | None = None
) -> tuple[int, SaveReport | None]:
    """Keeps a fork under another name; returns its tokens and the report of its save.

    messages: how many are kept, from the beginning; None: all, and text that is of none.
    """
    session, kept = caller.conversations.fork(*key)
    seen, notes = kept.seen, dict(kept.notes)
    if messages is not None:
        count = len(session.messages)
        try:
            _keep_messages(caller, session, messages, count)
        except BaseException:
            session.close()
            raise
        if messages < count:
            notes, seen = {}, seen[:messages] if len(seen) == count else ()
    copy = Kept(session, seen, kept.salt, notes)
    return copy.length, caller.conversations.keep(to, copy, save=save)


def _keep_messages(caller: Caller, session: Session, messages: int, count: int) -> None:
    """Cuts a session behind the first of its `count` messages. Raises InvalidArgumentError."""
    if not 1 <= messages <= count:
        raise refusal("messages", messages, f"1 to {count}, as many as there are")
    rendering = caller.service.rendering(None, {}, generation_prompt=False)
    if not keep_messages(session.core, session.transcript, messages, rendering):
        raise InvalidArgumentError(
            f"messages is {messages}, and the chat template now begins the conversation otherwise "
            "than it did; expected the template's variables and tools of its turns"
        )


def _check_new(caller: Caller, name: str) -> None:
    """Raises ApiError if a conversation has this name, or will have it."""
    if caller.conversations.has(name) or caller.conversations.under_way(name):
        raise _conflict(f"id is {name!r}, which exists", "exists", "id")


def _conflict(text: str, code: str, param: str | None = None) -> ApiError:
    return ApiError(409, text, kind="invalid_request_error", param=param, code=code)


def is_import(path: str) -> bool:
    """Returns whether requests of a path send a snapshot file."""
    return path.startswith(f"{router.prefix}/") and path.endswith("/import")


def _check_sound(path: str) -> None:
    """Reads every chunk of a snapshot. Raises CorruptSnapshotError."""
    damage = FileStore().open(path).verify(1)
    if damage:
        raise CorruptSnapshotError(damage[0][2])


def _key(caller: Caller, name: str, cache_salt: str | None) -> Key:
    """Returns what `Conversations` finds a conversation by."""
    service = caller.service
    return name, service.salt(caller.tenant, cache_salt), service.settings.on_corrupt


def _stored(caller: Caller) -> Conversations:
    """Returns the tenant's conversations. Raises ApiError without a store."""
    if caller.conversations.store is None:
        raise ApiError(
            400, "this server saves nothing; start it with --store FOLDER", code="no_store"
        )
    return caller.conversations


def _saved_one(caller: Caller, name: str) -> Any:
    source = _stored(caller)
    if source.entry(name) is None:
        raise not_found("saved session", name, "id", "session_not_found")
    return source.store
