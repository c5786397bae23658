"""`/v1/sessions` and llama.cpp's `/slots`."""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, field_validator

from kvpager.server.schema.common import Answer, Body, Name


class SessionInfo(Answer):
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


class SessionList(Answer):
    """All of a tenant's conversations, the one used last first."""

    object: Literal["list"] = "list"
    data: list[SessionInfo]


class Chunk(Answer):
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


class Ledger(Answer):
    """Where each chunk of a conversation is, and what is known of it."""

    id: str
    tokens: int
    chunks: list[Chunk]


class SaveRequest(Body):
    """`ttl`: how long it lives after its last use, such as "12h"; by default as the store says."""

    ttl: Annotated[str, Field(pattern=r"^(never|\d+(\.\d+)?[smhdw]?)$")] | None = None


class Saved(Answer):
    """What was written."""

    id: str
    tokens: int
    chunks: int
    chunks_written: int
    bytes_written: int
    bytes_shared: int
    seconds: float


class ForkRequest(Body):
    """`id`: of the copy."""

    id: Name


class TrimRequest(Body):
    """`tokens`: how many are kept, from the beginning."""

    tokens: Annotated[int, Field(ge=1)]


class Deleted(Answer):
    """What is left of a deleted conversation."""

    id: str
    object: Literal["session"] = "session"
    deleted: Literal[True] = True


class SlotRequest(Body):
    """llama.cpp's body: the name of the file."""

    filename: Name | None = None


class SlotSaved(Answer):
    """llama.cpp's answer to `save`."""

    id_slot: int
    filename: str
    n_saved: int
    n_written: int
    timings: dict[str, float]


class SlotRestored(Answer):
    """llama.cpp's answer to `restore`."""

    id_slot: int
    filename: str
    n_restored: int
    n_read: int
    timings: dict[str, float]


class SlotErased(Answer):
    """llama.cpp's answer to `erase`."""

    id_slot: int
    n_erased: int
