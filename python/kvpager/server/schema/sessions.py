"""`/v1/sessions` and llama.cpp's `/slots`."""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, field_validator

from kvpager.server.schema.common import AnswerPart, Body, Json, Name


class SessionInfo(AnswerPart):
    """A conversation: of a `session_id`, of a response, or of a client that named none.

    `bytes` are those on disk that only it needs; `tier` says where it is.
    """

    id: str
    object: Literal["session"] = "session"
    tokens: int
    bytes: int
    bytes_shared: int
    tier: Literal["memory", "disk", "memory+disk"]
    created: float
    last_used: float
    age_s: float
    pinned: bool
    ttl_s: float | None
    error: str | None


class SessionList(AnswerPart):
    """A tenant's conversations, the one used last first; `after` its last id come the next."""

    object: Literal["list"] = "list"
    data: list[SessionInfo]
    has_more: bool


class Chunk(AnswerPart):
    """A chunk of a conversation, as `kvpager.ChunkInfo` has it."""

    model_config = ConfigDict(from_attributes=True)

    chunk: int
    start: int
    stop: int
    sealed: bool
    resident: bool
    on_host: bool
    on_disk: bool
    in_snapshot: bool
    released: bool
    damaged: bool
    provenance: str
    k_dtype: str
    v_dtype: str
    qk_score: float
    selected: int
    recalled: int
    pins: int
    references: int

    @field_validator("qk_score", mode="after")
    @classmethod
    def _of_json(cls, value: float) -> float:
        return value if isfinite(value) else 0.0


class Ledger(AnswerPart):
    """The chunks of a conversation."""

    id: str
    tokens: int
    chunks: list[Chunk]


class SaveRequest(Body):
    """`ttl`: how long it lives after its last use, such as "12h"; by default as the store says."""

    ttl: Annotated[str, Field(pattern=r"^(never|\d+(\.\d+)?[smhdw]?)$")] | None = None


class Saved(AnswerPart):
    """The report of a save."""

    id: str
    tokens: int
    chunks: int
    chunks_written: int
    bytes_written: int
    bytes_shared: int
    seconds: float


class SessionMessages(AnswerPart):
    """The messages of a conversation, as its model has them.

    `response_id` is of an answer that is being computed; its question is not among the messages
    yet, but in `GET /v1/responses/{response_id}/input_items`.
    """

    id: str
    object: Literal["session.messages"] = "session.messages"
    tokens: int
    response_id: str | None
    data: list[Json]


class ForkRequest(Body):
    """`id`: of the copy; `messages`: how many it has, from the beginning, by default all."""

    id: Name
    messages: Annotated[int, Field(ge=1)] | None = None


class RenameRequest(Body):
    """`id`: the new name."""

    id: Name


class TrimRequest(Body):
    """`tokens`: how many are kept, from the beginning."""

    tokens: Annotated[int, Field(ge=1)]


class SlotRequest(Body):
    """llama.cpp's body: the name of the file."""

    filename: Name | None = None
