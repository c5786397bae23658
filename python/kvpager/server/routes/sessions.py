"""`/v1/sessions`: a tenant's conversations, looked at and moved."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path as FilePath
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import FileResponse
from starlette.background import BackgroundTask

from kvpager.errors import CorruptSnapshotError, UnsupportedVersionError
from kvpager.server.bodies import JsonRoute
from kvpager.server.conversations import Conversations, Kept
from kvpager.server.errors import ApiError, bad_request, not_found
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
from kvpager.stores import SaveReport

router = APIRouter(route_class=JsonRoute, prefix="/v1/sessions")
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

    return await in_thread(lambda: caller.conversations.look(name, salt, on_corrupt, told))


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


@router.get("/{name}/export", response_class=FileResponse)
async def export(
    name: SessionName, caller: TheCaller, cache_salt: CacheSalt = None
) -> FileResponse:
    """The conversation as one snapshot file."""
    handle = tempfile.TemporaryDirectory(prefix="kvpager-export-")
    path = FilePath(handle.name) / f"{name}.kvsnap"

    def write() -> None:
        forked, _ = _fork(caller, name, cache_salt)
        with forked:
            forked.save(path)

    try:
        await in_thread(write)
    except BaseException:
        handle.cleanup()
        raise
    return FileResponse(
        path,
        media_type="application/octet-stream",
        filename=path.name,
        background=BackgroundTask(handle.cleanup),
    )


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
    """Takes a conversation from a snapshot file; the body is the file."""
    salt = caller.service.salt(caller.tenant, cache_salt)
    with tempfile.TemporaryDirectory(prefix="kvpager-import-") as folder:
        path = FilePath(folder) / f"{name}.kvsnap"
        with path.open("wb") as file:
            async for part in request.stream():
                await asyncio.to_thread(file.write, part)

        def take() -> None:
            try:
                restored = caller.service.engine.restore(path, salt=salt)
            except (CorruptSnapshotError, UnsupportedVersionError) as error:
                raise bad_request(f"the body is no sound snapshot: {error}", "body") from error
            _keep(caller, name, Kept(restored, (), salt, {}))

        await in_thread(take)
    return await session(name, caller)


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
