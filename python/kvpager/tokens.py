"""Checks a caller's token ids: lists, arrays or tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvpager.errors import InvalidArgumentError

TokenIds: TypeAlias = npt.NDArray[np.int32]
TokenIdsLike: TypeAlias = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor


def as_token_ids(ids: TokenIdsLike, vocab_size: int, name: str = "ids") -> TokenIds:
    """A private int32 array [n], n >= 1, of a list, an array or a tensor of shape [n] or [1, n].

    Raises:
        InvalidArgumentError: no tokens, another shape, not integers, or an id outside the
            vocabulary.
    """
    if isinstance(ids, (str, bytes)):
        raise InvalidArgumentError(f"{name} is text; expected token ids: run the tokenizer first")
    array = _as_array(ids, name)
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1:
        raise InvalidArgumentError(
            f"{name} has shape {list(array.shape)}; expected [n] or [1, n]: one sequence per call"
        )
    if array.size == 0:
        raise InvalidArgumentError(f"{name} is empty; expected at least one token id")
    if array.dtype == np.bool_ or not np.issubdtype(array.dtype, np.integer):
        raise InvalidArgumentError(f"{name} has dtype {array.dtype}; expected integers")
    outside = np.flatnonzero((array < 0) | (array >= vocab_size))
    if outside.size:
        first = int(outside[0])
        raise InvalidArgumentError(
            f"{name}[{first}] is {array[first]}; expected a token id from 0 to {vocab_size - 1}"
        )
    return array.astype(np.int32)  # always a copy: a caller may reuse its buffer


def _as_array(ids: TokenIdsLike, name: str) -> npt.NDArray[Any]:
    if isinstance(ids, torch.Tensor):
        if ids.dtype == torch.bfloat16:  # numpy has none, and it is refused anyway
            raise InvalidArgumentError(f"{name} has dtype bfloat16; expected integers")
        return ids.detach().cpu().numpy()
    try:
        return np.asarray(ids)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgumentError(
            f"{name} is no sequence of token ids ({error}); expected a list, an array or a tensor"
        ) from error
