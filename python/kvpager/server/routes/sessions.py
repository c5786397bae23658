"""`/v1/sessions`: a tenant's conversations, looked at and moved."""

from __future__ import annotations

import contextlib
from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvpager.errors import CorruptSnapshotError, UnsupportedVersionError
from kvpager.server import transfers
from kvpager.server.bodies import JsonRoute, arriving
from kvpager.server.conversations import Conversations, Kept, seen_of
from kvpager.server.errors import ApiError, bad_request, not_found, without_folders
from kvpager.server.routes.caller import Caller, TheCaller
from kvpager.server.schema.common import NAME_PATTERN
from kvpager.server.schema.sessions import (
    Chunk,
    Deleted,
    ForkRequest,
    Ledger,
    Saved,
    SaveRequest,
    SessionInfo,
    SessionList,
    TrimRequest,
)
from kvpager.server.session_list import listed
from kvpager.server.threads import in_thread
from kvpager.stores import FileStore, SaveReport

router = APIRouter(route_class=JsonRoute, prefix="/v1/sessions")
_SNAPSHOT = "application/octet-stream"
SessionName = Annotated[str, Path(pattern=NAME_PATTERN)]
CacheSalt = Annotated[str | None, Query(description="the cache_salt that it was computed under")]


@router.get("")
async def sessions(caller: TheCaller) -> SessionList:
    """All conversations, the one used last first."""
    return SessionList(data=await in_thread(lambda: listed(caller.conversations)))


@router.get("/{name}")
async def session(name: SessionName, caller: TheCaller) -> SessionInfo:
    """One conversation."""

    def find() -> SessionInfo:
        for one in listed(caller.conversations):
            if one.id == name:
                return one
        raise not_found("session", name, "id", "session_not_found")

    return await in_thread(find)


@router.get("/{name}/ledger")
async def ledger(name: SessionName, caller: TheCaller, cache_salt: CacheSalt = None) -> Ledger:
    """Its chunks: where each one is, its score, and what its bits are worth."""
    service = caller.service
    salt, on_corrupt = service.salt(caller.tenant, cache_salt), service.settings.on_corrupt

    def told(kept: Kept) -> Ledger:
        chunks = [Chunk.model_validate(chunk) for chunk in kept.session.ledger()]
        return Ledger(id=name, tokens=kept.length, chunks=chunks)

    look = caller.conversations.look
    return await in_thread(lambda: look(name, salt, on_corrupt, told, keep=False))


@router.post("/{name}/save")
async def save(
    name: SessionName, body: SaveRequest, caller: TheCaller, cache_salt: CacheSalt = None
) -> Saved:
    """Saves a conversation. One that is saved already is written no second time."""
    service, source = caller.service, _stored(caller)
    salt, on_corrupt = service.salt(caller.tenant, cache_salt), service.settings.on_corrupt
    report = await in_thread(lambda: source.save(name, salt, on_corrupt, body.ttl))
    return _saved(name, report)


@router.post("/{name}/restore")
async def restore(
    name: SessionName, caller: TheCaller, cache_salt: CacheSalt = None
) -> SessionInfo:
    """Brings a saved conversation into memory. Its chunks are read when they are needed."""

    def load() -> None:
        forked, _ = _fork(caller, name, cache_salt)
        forked.close()

    await in_thread(load)
    return await session(name, caller)


@router.post("/{name}/fork")
async def fork(
    name: SessionName, body: ForkRequest, caller: TheCaller, cache_salt: CacheSalt = None
) -> SessionInfo:
    """A copy under another name; the two share chunks. It is saved too."""

    def copy() -> None:
        if caller.conversations.has(body.id):
            raise ApiError(409, f"id is {body.id!r}, which exists", param="id", code="exists")
        forked, kept = _fork(caller, name, cache_salt)
        _keep(caller, body.id, Kept(forked, kept.seen, kept.salt, dict(kept.notes)))

    await in_thread(copy)
    return await session(body.id, caller)


@router.post("/{name}/trim")
async def trim(
    name: SessionName, body: TrimRequest, caller: TheCaller, cache_salt: CacheSalt = None
) -> SessionInfo:
    """Keeps its first tokens alone."""

    def cut() -> None:
        forked, kept = _fork(caller, name, cache_salt)
        try:
            forked.trim(body.tokens)
        except BaseException:
            forked.close()
            raise
        _keep(caller, name, Kept(forked, (), kept.salt, {}))

    await in_thread(cut)
    return await session(name, caller)


@router.post("/{name}/pin")
async def pin(name: SessionName, caller: TheCaller) -> SessionInfo:
    """Exempts a saved conversation from expiry and eviction."""
    await in_thread(lambda: _saved_one(caller, name).pin(name))
    return await session(name, caller)


@router.post("/{name}/unpin")
async def unpin(name: SessionName, caller: TheCaller) -> SessionInfo:
    """Lets it expire or be evicted again."""
    await in_thread(lambda: _saved_one(caller, name).unpin(name))
    return await session(name, caller)


@router.delete("/{name}")
async def delete(name: SessionName, caller: TheCaller) -> Deleted:
    """Deletes it, in memory and on disk."""
    await in_thread(lambda: caller.conversations.delete(name))
    return Deleted(id=name)


@router.get(
    "/{name}/export",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/octet-stream": {}}}},
)
async def export(
    name: SessionName, request: Request, caller: TheCaller, cache_salt: CacheSalt = None
) -> Response:
    """The conversation as one snapshot file, in one piece: two exports need not be equal bytes."""
    headers = {
        "content-disposition": f'attachment; filename="{name}.kvsnap"',
        "accept-ranges": "none",
    }
    if getattr(request.state, "head", False):
        await session(name, caller)
        return Response(media_type=_SNAPSHOT, headers=headers)
    held = contextlib.ExitStack()
    path = held.enter_context(caller.service.transfers.one(caller.tenant.name)) / "session.kvsnap"

    def write() -> int:
        forked, _ = _fork(caller, name, cache_salt)
        with forked:
            forked.save(path)
        return path.stat().st_size

    try:
        headers["content-length"] = str(await in_thread(write))
        file = held.enter_context(path.open("rb"))
        path.unlink()
    except BaseException:
        held.close()
        raise
    return _Export(
        transfers.send(file, caller.service.settings.transfer_timeout),
        held,
        media_type=_SNAPSHOT,
        headers=headers,
    )


class _Export(StreamingResponse):
    """A stream that lets go of what it holds when it ends, also where its client went away."""

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
    """Takes a conversation from a snapshot file, the body. Of a bad one nothing stays."""
    salt = caller.service.salt(caller.tenant, cache_salt)
    with caller.service.transfers.one(caller.tenant.name) as folder:
        path = folder / f"{name}.kvsnap"
        await transfers.receive(arriving(request), path)

        def take() -> None:
            try:
                _check_sound(path)
                restored = caller.service.engine.restore(path, salt=salt)
            except (CorruptSnapshotError, UnsupportedVersionError) as error:
                told = without_folders(str(error))
                raise bad_request(f"the body is no sound snapshot: {told}", "body") from error
            caller.conversations.take(name, Kept(restored, seen_of(restored), salt))

        await in_thread(take)
    return await session(name, caller)


def is_import(path: str) -> bool:
    """Whether requests of a path bring a snapshot file."""
    return path.startswith(f"{router.prefix}/") and path.endswith("/import")


def _check_sound(path: FilePath) -> None:
    """Reads every chunk of a snapshot. Raises CorruptSnapshotError."""
    damage = FileStore().open(str(path)).verify(1)
    if damage:
        raise CorruptSnapshotError(damage[0][2])


def _fork(caller: Caller, name: str, cache_salt: str | None) -> tuple[Any, Kept]:
    service = caller.service
    salt = service.salt(caller.tenant, cache_salt)
    return caller.conversations.fork(name, salt, service.settings.on_corrupt)


def _keep(caller: Caller, name: str, kept: Kept) -> None:
    caller.conversations.keep(name, kept, save=True)


def _stored(caller: Caller) -> Conversations:
    """The tenant's conversations. Raises ApiError where nothing is saved."""
    if caller.conversations.store is None:
        raise ApiError(
            400, "this server saves nothing; start it with --store FOLDER", code="no_store"
        )
    return caller.conversations


def _saved_one(caller: Caller, name: str) -> Any:
    source = _stored(caller)
    if name not in source.entries():
        raise not_found("saved session", name, "id", "session_not_found")
    return source.store


def _saved(name: str, report: SaveReport | None) -> Saved:
    assert report is not None
    return Saved(
        id=name,
        tokens=report.tokens,
        chunks=report.chunks,
        chunks_written=report.chunks_written,
        bytes_written=report.bytes_written,
        bytes_shared=report.bytes_shared,
        seconds=report.seconds,
    )
