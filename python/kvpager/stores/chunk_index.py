"""The chunks of a store and their places, by chain hash and content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """A chunk of a pack."""

    pack: str
    chunk: int


class ChunkIndex:
    """Places of sealed chunks, by (chain hash, content id). One content can have several."""

    def __init__(self) -> None:
        self._by_hash: dict[bytes, dict[bytes, list[Place]]] = {}

    def add(self, pack: str, chain_hashes: Sequence[bytes], content_ids: Sequence[bytes]) -> None:
        """Adds a pack's chunks."""
        for chunk, (chain, content) in enumerate(zip(chain_hashes, content_ids)):
            places = self._by_hash.setdefault(chain, {}).setdefault(content, [])
            places.append(Place(pack, chunk))

    def discard(
        self, pack: str, chain_hashes: Sequence[bytes], content_ids: Sequence[bytes]
    ) -> None:
        """Removes what `add` with the same arguments added."""
        for chunk, (chain, content) in enumerate(zip(chain_hashes, content_ids)):
            contents = self._by_hash[chain]
            contents[content].remove(Place(pack, chunk))
            if not contents[content]:
                del contents[content]
            if not contents:
                del self._by_hash[chain]

    def places(self, chain: bytes, content: bytes) -> list[Place]:
        """Places of chunks with exactly these bytes."""
        return self._by_hash.get(chain, {}).get(content, [])
