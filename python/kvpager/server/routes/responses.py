"""`/v1/responses`: answers saved as snapshots under their ids."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from sse_starlette import ServerSentEvent

from kvpager.server.errors import ApiError, bad_request, not_found
from kvpager.server.responding import event_stream, json_response, respond
from kvpager.server.response_events import events_again
from kvpager.server.response_journal import RecordedResponse
from kvpager.server.response_turn import INPUT, NOTE, PIECES, ResponseTurn, numbered_event
from kvpager.server.routes.caller import Caller, JsonRoute, TheCaller
from kvpager.server.schema.common import NAME_PATTERN, Deleted
from kvpager.server.schema.responses import (
    InputItems,
    InputTokens,
    InputTokensRequest,
    Response,
    ResponseRequest,
)

router = APIRouter(route_class=JsonRoute)
ResponseId = Annotated[str, Path(pattern=NAME_PATTERN)]
_AGAIN_SECONDS = 0.2


@router.post(
    "/v1/responses",
    response_model=None,
    responses={200: {"model": Response}},
)
async def create(request: Request, body: ResponseRequest, caller: TheCaller) -> Any:
    """Answers an input; with `stream` as server-sent events, with `background` later."""
    caller.service.check_model(body.model)
    turn = await caller.read(lambda: ResponseTurn(caller, body))
    if not body.background:
        on_error = caller.service.metrics.error
        return await respond(request, turn, streamed=body.stream, on_error=on_error)
    await turn.begin()
    caller.service.background_responses.start(caller.tenant.name, turn)
    if body.stream:
        return event_stream(_numbered(caller, turn, padded=turn.padded), turn.headers)
    return json_response(turn.response, turn.headers)


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(body: InputTokensRequest, caller: TheCaller) -> InputTokens:
    """Counts the tokens that the prompt of a response would have."""
    caller.service.check_model(body.model)
    turn = await caller.read(lambda: ResponseTurn(caller, body))
    return InputTokens(input_tokens=await caller.read(turn.count_prompt))


@router.get("/v1/responses/{response_id}", response_model=None)
async def retrieve(
    response_id: ResponseId,
    caller: TheCaller,
    *,
    stream: Annotated[bool, Query()] = False,
    starting_after: Annotated[int, Query(ge=-1)] = -1,
    include_obfuscation: Annotated[bool, Query()] = False,
) -> Any:
    """Returns a kept or running response; with `stream` its events.

    Goes on with one whose replica has died.
    """
    found = await _found(response_id, caller)
    if stream:
        return event_stream(_numbered(caller, found, starting_after, padded=include_obfuscation))
    return _notes_of(found)[NOTE]


@router.get("/v1/responses/{response_id}/input_items")
async def input_items(
    response_id: ResponseId,
    caller: TheCaller,
    *,
    after: Annotated[str | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Annotated[Literal["asc", "desc"], Query()] = "desc",
) -> InputItems:
    """Returns the items of a response's own input, not those of earlier responses."""
    items = _notes_of(await _found(response_id, caller)).get(INPUT, [])
    items = items if order == "asc" else items[::-1]
    if after is not None:
        place = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise not_found("item", after, "after")
        items = items[place + 1 :]
    shown = items[:limit]
    return InputItems(
        data=shown,
        first_id=shown[0]["id"] if shown else None,
        last_id=shown[-1]["id"] if shown else None,
        has_more=len(items) > limit,
    )


async def _found(response_id: str, caller: Caller) -> ResponseTurn | dict[str, Any]:
    """Returns a response that is computed, here or by another replica, or the notes of one kept.

    One that is recorded, and that nobody computes, goes on here.

    Raises:
        ApiError: 404, there is none; 409, it was begun by another model.
    """
    responses, tenant = caller.service.background_responses, caller.tenant.name
    async with responses.opening(tenant, response_id):
        running = responses.get(tenant, response_id)
        if running is not None:
            return running
        try:
            notes = await asyncio.to_thread(caller.conversations.notes, response_id)
        except ApiError:
            notes = {}
        if NOTE in notes:
            return notes
        recorded, store = None, caller.conversations.store
        if store is not None:
            recorded = RecordedResponse(store.journals, response_id)
        if recorded is None or not await responses.threads.run(recorded.read):
            raise not_found("response", response_id, "response_id", "response_not_found")
        request = recorded.request
        if recorded.end is not None:
            return {NOTE: recorded.end, INPUT: request["input_items"], PIECES: []}
        if request["fingerprint"] != caller.service.fingerprint:
            raise ApiError(
                409,
                f"response {response_id} was begun by a server of another model or other numerics "
                f"({request['fingerprint']}, and this is {caller.service.fingerprint})",
                code="fingerprint_mismatch",
                headers={"x-should-retry": "false"},
            )

        def resumed() -> ResponseTurn:
            body = ResponseRequest.model_validate_json(json.dumps(request["body"]))
            return ResponseTurn(caller, body, recorded)

        turn = await caller.read(resumed)
        responses.start(tenant, turn)
        return turn


def _notes_of(found: ResponseTurn | dict[str, Any]) -> dict[str, Any]:
    return found if isinstance(found, dict) else found.notes()


async def _numbered(
    caller: Caller, found: ResponseTurn | dict[str, Any], after: int = -1, *, padded: bool
) -> AsyncIterator[ServerSentEvent]:
    """Yields the events after number `after`, wherever the response is computed meanwhile."""
    response_id = _notes_of(found)[NOTE]["id"]
    while True:
        log = None if isinstance(found, dict) else found.log
        if log is None:
            notes = _notes_of(found)
            events = events_again(notes[NOTE], notes[PIECES], after)
        else:
            events = log.events(after)
        async for number, one in events:
            after = number
            yield numbered_event(number, one, padded=padded)
        if log is None or log.ended or caller.service.draining:
            return
        await asyncio.sleep(_AGAIN_SECONDS)  # it could not be begun here, or was taken over
        try:
            found = await _found(response_id, caller)
        except ApiError:
            return


@router.delete("/v1/responses/{response_id}")
async def delete(response_id: ResponseId, caller: TheCaller) -> Deleted:
    """Deletes a response and its K/V; responses that continue it keep shared chunks."""
    responses, tenant = caller.service.background_responses, caller.tenant.name
    await _found(response_id, caller)
    await responses.cancel(tenant, response_id)
    known, store = responses.forget(tenant, response_id), caller.conversations.store
    if store is not None:
        known = await responses.threads.run(store.journals.delete, response_id) or known
    try:
        await asyncio.to_thread(caller.conversations.delete, response_id)
    except ApiError:
        if not known:
            raise
    return Deleted(id=response_id, object="response")


@router.post("/v1/responses/{response_id}/cancel", response_model=None)
async def cancel(
    response_id: ResponseId, caller: TheCaller, *, keep: Annotated[bool, Query()] = False
) -> Any:
    """Cancels a response that is computed, here or by another replica.

    With `keep` what was produced so far is the answer, `incomplete` for the reason `stopped`;
    before its first token, and at another replica, it is cancelled.
    """
    await _found(response_id, caller)
    responses, tenant = caller.service.background_responses, caller.tenant.name
    found = await responses.cancel(tenant, response_id, keep=keep)
    if found is None:
        raise bad_request(
            f"response_id is {response_id!r}, which is not computed in the background any more",
            "response_id",
        )
    return json_response(found.response)
