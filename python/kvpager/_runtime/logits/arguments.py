"""Checks numbers that a caller gave: Python's, numpy's, or torch's with no dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import SupportsFloat, SupportsIndex, TypeAlias

import numpy as np
import torch

from kvpager._support.arguments import is_integer, is_number, refusal

Number: TypeAlias = SupportsFloat | SupportsIndex

_ARRAYS = (np.generic, np.ndarray, torch.Tensor)


def plain(value: object) -> object:
    """The Python number of a numpy scalar or of an array or tensor [] ; else `value` itself."""
    if isinstance(value, _ARRAYS):
        return value.item() if not value.ndim else value
    return value


def as_biases(value: object) -> dict[int, float]:
    """{token id: bias} in the order of ids. Raises InvalidArgumentError.

    -inf forbids a token; NaN and infinity are refused.
    """
    if not isinstance(value, Mapping):
        raise refusal("logit_bias", value, "a dictionary {token id: bias}")
    biases = {}
    for token, given in value.items():
        token_id, bias = plain(token), plain(given)
        if not is_integer(token_id) or int(token_id) < 0:
            raise refusal("logit_bias", value, f"token ids as keys, not {token!r}")
        if not is_number(bias) or not bias < float("inf"):
            raise refusal(f"logit_bias[{token_id}]", given, "a finite number, or -inf to forbid it")
        biases[int(token_id)] = float(bias)
    return dict(sorted(biases.items()))


def as_ids(value: object, name: str) -> tuple[int, ...]:
    """Token ids, of a tuple or list of them. Raises InvalidArgumentError."""
    given = value if isinstance(value, (tuple, list)) else [value]
    ids = []
    for one in map(plain, given):
        if not is_integer(one) or int(one) < 0:
            raise refusal(name, value, "token ids")
        ids.append(int(one))
    return tuple(ids)
