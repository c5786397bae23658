"""llama.cpp's `/slots`: slot N is the conversation `slot-N`, a file one of its own name."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query

from kvpager.server.bodies import JsonRoute
from kvpager.server.conversations import Kept
from kvpager.server.errors import ApiError, bad_request
from kvpager.server.routes.caller import Caller, TheCaller
from kvpager.server.schema.sessions import SlotErased, SlotRequest, SlotRestored, SlotSaved
from kvpager.server.threads import in_thread
from kvpager.stores import SaveReport

router = APIRouter(route_class=JsonRoute)
Action = Literal["save", "restore", "erase"]


@router.post("/slots/{slot}", response_model=None)
async def slots(
    slot: Annotated[int, Path(ge=0, lt=1 << 31)],
    action: Annotated[Action, Query()],
    caller: TheCaller,
    body: SlotRequest | None = None,
) -> Any:
    """Saves the conversation `slot-N` under a name, restores it from there, or erases it."""
    name = f"slot-{slot}"
    if action == "erase":
        return await in_thread(lambda: _erase(caller, slot, name))
    file = None if body is None else body.filename
    if file is None:
        raise bad_request(f"filename is missing; expected it with action={action}", "filename")
    if caller.conversations.store is None:
        raise ApiError(
            400, "this server saves nothing; start it with --store FOLDER", code="no_store"
        )
    if action == "save":
        return await in_thread(lambda: _save(caller, slot, name, file))
    return await in_thread(lambda: _restore(caller, slot, name, file))


def _save(caller: Caller, slot: int, name: str, file: str) -> SlotSaved:
    begun = time.perf_counter()
    tokens, report = _copy(caller, name, file, save=True)
    assert report is not None
    return SlotSaved(
        id_slot=slot,
        filename=file,
        n_saved=tokens,
        n_written=report.bytes_written,
        timings={"save_ms": 1000 * (time.perf_counter() - begun)},
    )


def _restore(caller: Caller, slot: int, name: str, file: str) -> SlotRestored:
    begun = time.perf_counter()
    tokens, _ = _copy(caller, file, name)
    entry = caller.conversations.entries().get(file)
    return SlotRestored(
        id_slot=slot,
        filename=file,
        n_restored=tokens,
        n_read=0 if entry is None else entry.bytes_own + entry.bytes_shared,
        timings={"restore_ms": 1000 * (time.perf_counter() - begun)},
    )


def _erase(caller: Caller, slot: int, name: str) -> SlotErased:
    kept = caller.conversations.kept(name)
    tokens = 0 if kept is None else kept.length
    caller.conversations.delete(name)
    return SlotErased(id_slot=slot, n_erased=tokens)


def _copy(
    caller: Caller, name: str, to: str, *, save: bool = False
) -> tuple[int, SaveReport | None]:
    """Keeps a fork under another name; the number of its tokens, and what was saved of it."""
    service = caller.service
    salt = service.salt(caller.tenant, None)
    session, kept = caller.conversations.fork(name, salt, service.settings.on_corrupt)
    tokens = session.length
    copy = Kept(session, kept.seen, kept.salt, dict(kept.notes))
    return tokens, caller.conversations.keep(to, copy, save=save)
