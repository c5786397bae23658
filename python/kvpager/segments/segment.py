"""A segment: a text whose K/V were computed alone, in chunks of a namespace of its own."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from kvpager._runtime.execution.batch import PADDING_TOKEN
from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.scheduling.prefill import prefill_all
from kvpager._runtime.scheduling.recompute import recomputing_damage
from kvpager._runtime.text.transcript import Transcript
from kvpager._support.tokens import TokenIds
from kvpager.errors import InvalidArgumentError


class Segment:
    """Made by `Engine.cache_segment`. Its K/V are of positions 0, 1, ..., without text before it.

    They are kept in sealed chunks, which can be evicted like any others, so that an unused segment
    needs no block. Padding fills the last chunk; no token before it attends to it.
    `Engine.assemble` moves the keys to their positions in a text.

    Attributes:
        name: its key in `Engine.segments`.
        digest: hex digest of its token ids; also a key.
        tokens: its ids, int32 [n]; n may be 0.
    """

    def __init__(
        self, core: EngineCore, name: str, tokens: TokenIds, transcript: Transcript | None
    ) -> None:
        """transcript: holds the tokens and their padding; None for a segment without tokens."""
        self._core = core
        self._transcript = transcript
        self.name = name
        self.tokens = tokens
        self.digest = digest_of(tokens)

    @property
    def closed(self) -> bool:
        """Whether its chunks were released, by `Segments.remove` or with its engine."""
        return self._core.closed or (self._transcript is not None and self._transcript.closed)

    @property
    def transcript(self) -> Transcript | None:
        """The transcript with its chunks, padding included; None for a segment without tokens.

        Computes them again if the engine has dropped them.
        """
        if self._transcript is not None and self._transcript.uncomputed.size:
            prefill_all(self._core, [(self._transcript, self._transcript.tokens)], None)
        return self._transcript

    def read_kv(self, layer: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K/V of its tokens [start, stop) at one layer, as they were computed.

        See `kvpager.pager.Sequence.read_kv`.

        Raises:
            CorruptSnapshotError: a restored chunk is damaged, and cannot be computed again.
        """
        transcript = self.transcript
        assert transcript is not None
        sequence = transcript.sequence
        return recomputing_damage(
            self._core, [sequence], lambda: sequence.read_kv(layer, start, stop)
        )

    def check_open(self, core: EngineCore) -> None:
        """Raises InvalidArgumentError unless it is one of this engine, and was not removed."""
        if self._core is not core:
            raise InvalidArgumentError(f"{self!r} is no segment of this engine")
        if self.closed:
            raise InvalidArgumentError(
                f"{self!r} was removed; cache it again with engine.cache_segment(ids)"
            )

    def close(self) -> None:
        """Releases its chunks. Sessions assembled from it keep theirs."""
        if self._transcript is not None:
            self._transcript.close()

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        return f"Segment({self.name!r}, {len(self.tokens)} tokens)"


def digest_of(tokens: TokenIds) -> str:
    """Hex digest of token ids (BLAKE2b, 256 bits), resistant to collisions."""
    ids = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    return hashlib.blake2b(ids, digest_size=32).hexdigest()


def padded(tokens: TokenIds, chunk_tokens: int) -> TokenIds:
    """The ids with padding up to the end of a chunk."""
    missing = -len(tokens) % chunk_tokens
    return np.concatenate([tokens, np.full(missing, PADDING_TOKEN, dtype=np.int32)])


def namespace_of(salt: str) -> str:
    """The salt of an engine's segments, so that no prompt finds their chunks."""
    return f"{salt}\0segment"
