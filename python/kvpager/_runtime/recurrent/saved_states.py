"""States of recurrent layers in a companion snapshot: one chunk per state, read when needed.

A chunk has one layer for each recurrent layer, and a last one for the hidden states of the last
token; a layer's slice is the bytes of its tensors, one after the other. The chunk's token ids are
the 32 bytes of the name of the text before the state, by which a state is found.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvpager import _core
from kvpager._model.layout import Layout
from kvpager._model.seam.state import RecurrentState, Slot, StateShape
from kvpager._support.salts import salt_digest
from kvpager.errors import (
    CorruptSnapshotError,
    FingerprintMismatchError,
    PagerError,
    UnsupportedVersionError,
)
from kvpager.pager import SALT_FIELD, SnapshotInfo
from kvpager.stores.companions import STATES, CompanionSnapshot

_VERSION = 1
_NAME_BYTES = 32  # of a text's name; one token id per byte
_DIMS = (16, 64, 256)  # head_dim of the layout: a slice is whole pages of it
_MOST_HEADS = 1024
_ALIGNMENT = 16  # bytes; of a tensor within a slice

_log = logging.getLogger(__name__)


class StateFormat:
    """The place in a chunk of each tensor of one model's states."""

    def __init__(self, shape: StateShape) -> None:
        self.shape = shape
        self._places: list[tuple[Slot, int, int]] = []  # slot, slice, offset within it
        layers = [*dict.fromkeys(slot.layer for slot in shape.slots), shape.hidden.layer]
        filled = [0] * len(layers)
        for slot in (*shape.slots, shape.hidden):
            at = layers.index(slot.layer)
            self._places.append((slot, at, filled[at]))
            filled[at] += -(-slot.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.layout = _layout(len(layers), max(filled))
        self._slice_bytes = self.layout.chunk_bytes // len(layers)

    def pack(self, state: RecurrentState) -> np.ndarray[Any, Any]:
        """[chunk_bytes] uint8: a copy."""
        chunk = np.zeros(self.layout.chunk_bytes, dtype=np.uint8)
        for (slot, at, offset), tensor in zip(self._places, (*state.tensors, state.hidden)):
            start = at * self._slice_bytes + offset
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            chunk[start : start + slot.nbytes] = flat.view(torch.uint8).numpy()
        return chunk

    def unpack(self, position: int, chunk: np.ndarray[Any, Any]) -> RecurrentState:
        """The state of a chunk that `pack` made; a copy."""
        tensors = []
        for slot, at, offset in self._places:
            start = at * self._slice_bytes + offset
            raw = torch.from_numpy(chunk[start : start + slot.nbytes].copy())
            tensors.append(raw.view(slot.dtype).reshape(slot.shape))
        return RecurrentState(position, tuple(tensors[:-1]), tensors[-1])


def _layout(slices: int, slice_bytes: int) -> Layout:
    """The layout with the smallest pages whose slices have at least `slice_bytes` bytes."""
    for dim in _DIMS:
        page = 2 * dim * _NAME_BYTES * 4  # float32 keys and values
        heads = max(1, -(-slice_bytes // page))
        if heads <= _MOST_HEADS // 16 or dim == _DIMS[-1]:
            return Layout(
                layers=slices,
                kv_heads=heads,
                k_dim=dim,
                v_dim=dim,
                chunk_tokens=_NAME_BYTES,
                k_dtype="float32",
                v_dtype="float32",
            )
    raise AssertionError


def freeze_states(
    format_: StateFormat,
    states: Sequence[tuple[bytes, RecurrentState]],
    *,
    exact: bool,
    fingerprint: str,
    salt: str = "",
) -> CompanionSnapshot:
    """Packs states, each with the name of the text before it, for a save.

    exact: whether they are those of a cold run. fingerprint: of the engine, JSON text. salt: of the
    texts' names.
    """
    hashes = [one for one, _ in states]
    content = _core.loose_content(
        layout=format_.layout.native(),
        tokens=np.frombuffer(b"".join(hashes), dtype=np.uint8).astype(np.int32),
        # Not the name of the text's own chunk, because one store may hold both.
        chain_hashes=[_state_name(one) for one in hashes],
        exact=[exact] * len(states),
        payload=[format_.pack(state) for _, state in states],
    )
    session = {
        SALT_FIELD: salt_digest(salt),
        "version": _VERSION,
        "positions": [state.position for _, state in states],
        "state": format_.shape.to_json(),
    }
    return CompanionSnapshot(
        kind=STATES,
        content=content,
        fingerprint=fingerprint,
        session=json.dumps(session, sort_keys=True, separators=(",", ":")),
    )


def _state_name(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=32, person=b"kvpager state").digest()


class SavedStates:
    """The states of an opened snapshot; each is read and verified when it is needed."""

    def __init__(
        self, format_: StateFormat, snapshot: SnapshotInfo, names: Mapping[bytes, bytes]
    ) -> None:
        """`names`: maps the saver's name of a text to its name here.

        Raises:
            FingerprintMismatchError, CorruptSnapshotError: not such states, or damaged.
        """
        self._format = format_
        self._reader = snapshot.reader
        self._chunk = {
            names[key]: (chunk, position)
            for chunk, (key, position) in enumerate(_contents(format_, snapshot))
            if key in names
        }

    def held(self, hashes: Sequence[bytes]) -> list[int]:
        """Positions with a state, of a text with these names."""
        return [self._chunk[key][1] for key in hashes if key in self._chunk]

    def read(self, key: bytes) -> RecurrentState | None:
        """The state after the text of this name; None if there is none.

        Drops a damaged one, with a warning.
        """
        if key not in self._chunk:
            return None
        chunk, position = self._chunk[key]
        try:
            return self._format.unpack(position, self._reader.read_chunk(chunk))
        except (PagerError, OSError) as error:
            del self._chunk[key]
            _log.warning("no state at position %d, the one before it is used: %s", position, error)
            return None


def _contents(format_: StateFormat, snapshot: SnapshotInfo) -> list[tuple[bytes, int]]:
    """(name of the text before it, position) of each chunk."""
    path, session = snapshot.path, snapshot.session
    if session.get("version") != _VERSION:
        raise UnsupportedVersionError(
            f"{path}: session.version is {session.get('version')!r}; this release reads {_VERSION}"
        )
    expected = format_.shape.to_json()
    if session.get("state") != expected or snapshot.layout != format_.layout:
        raise FingerprintMismatchError(
            f"{path}: its states are {session.get('state')!r}, and this engine's {expected!r}; "
            "they are computed again",
            field="state",
            expected=expected,
            found=session.get("state"),
        )
    positions: Any = session.get("positions")
    chunks = snapshot.reader.sealed_chunks
    sound = isinstance(positions, list) and all(type(one) is int and one > 0 for one in positions)
    if not sound or len(positions) != chunks or len(snapshot.tokens) != chunks * _NAME_BYTES:
        raise CorruptSnapshotError(
            f"{path}: session.positions is {positions!r}; expected one position for each of "
            f"{chunks} states"
        )
    ids = snapshot.tokens
    if ids.size and not (int(ids.min()) >= 0 and int(ids.max()) < 256):
        raise CorruptSnapshotError(f"{path}: tokens are not the bytes of names")
    raw = ids.astype(np.uint8).tobytes()
    return [
        (raw[i * _NAME_BYTES : (i + 1) * _NAME_BYTES], position)
        for i, position in enumerate(positions)
    ]
