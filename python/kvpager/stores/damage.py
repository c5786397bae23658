"""Records damaged chunks in packs/<id>.damaged, one JSON list of chunk numbers.

A pack never changes, so the list is a file of its own. No other snapshot shares such a chunk, and a
save of the same content writes it again.
"""

from __future__ import annotations

import json

from kvpager import _core
from kvpager.stores.budget import make_room
from kvpager.stores.catalogue import Catalogue
from kvpager.stores.chunk_index import Place
from kvpager.stores.durable import write_atomically
from kvpager.stores.settings import StoreSettings


def check_places(
    catalogue: Catalogue, settings: StoreSettings, chain: bytes, content: bytes
) -> list[Place]:
    """Reads all copies of a chunk again, records damaged ones. REQUIRES: the store's lock."""
    found = []
    for place in catalogue.sound_places(chain, content):
        pack = _core.SnapshotReader.open(catalogue.pack_path(place.pack))
        alone = _core.SnapshotReader.gather([(pack, place.chunk)], place.pack)
        if alone.verify(1):
            note_damage(catalogue, settings, place)
            found.append(place)
    return found


def note_damage(catalogue: Catalogue, settings: StoreSettings, place: Place) -> None:
    """Records that a chunk is damaged. REQUIRES: the store's lock."""
    if place.pack not in catalogue.packs:
        return
    damaged = sorted({*catalogue.packs[place.pack].damaged, place.chunk})
    text = json.dumps(damaged)
    make_room(catalogue, settings, len(text), wanted=frozenset({place.pack}))
    write_atomically(catalogue.damage_path(place.pack), text, settings.mode)
    catalogue.refresh()
