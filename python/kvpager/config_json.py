"""A PagerConfig as JSON, for another process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvpager.config import Dense, PagerConfig, TopK, Window

SELECTIONS: Mapping[str, type[Dense] | type[TopK] | type[Window]] = {
    kind.kind: kind for kind in (Dense, TopK, Window)
}


def config_to_json(config: PagerConfig) -> dict[str, Any]:
    """Every option by name; `config_from_json` is the inverse."""
    values = dataclasses.asdict(config)
    values["selection"]["kind"] = config.selection.kind
    return values


def config_from_json(values: Mapping[str, Any]) -> PagerConfig:
    """The configuration that `config_to_json` described."""
    fields = dict(values["selection"])
    selection = SELECTIONS[fields.pop("kind")](**fields)
    return PagerConfig(**{**values, "selection": selection})
