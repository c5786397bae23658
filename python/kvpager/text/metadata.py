"""The user's own values beside a conversation."""

from __future__ import annotations

import json

from kvpager.errors import InvalidArgumentError


def check_metadata(values: object) -> None:
    """Raises InvalidArgumentError unless `values` is a dict that JSON gives back as it is."""
    expected = "a dict of JSON values with strings as keys"
    if not isinstance(values, dict):
        raise InvalidArgumentError(f"metadata is {values!r}; expected {expected}")
    try:
        same = json.loads(json.dumps(values, allow_nan=False)) == values
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"metadata: {error}; expected {expected}") from error
    if not same:  # a tuple, or a key that is no string
        raise InvalidArgumentError(f"metadata is {values!r}; expected {expected}")
