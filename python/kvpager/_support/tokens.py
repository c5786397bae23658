"""Checks a caller's token ids: lists, arrays, tensors, and what tokenizers return."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvpager._support.arguments import listed
from kvpager.errors import InvalidArgumentError

TokenIds: TypeAlias = npt.NDArray[np.int32]
TokenIdsLike: TypeAlias = (
    Iterable[SupportsIndex] | npt.NDArray[np.integer] | torch.Tensor | Mapping[str, Any]
)
TextOrIds: TypeAlias = str | TokenIdsLike

_EXPECTED = "a list, an array or a tensor of integers, or what a tokenizer returns"


def as_token_ids(ids: TokenIdsLike, vocab_size: int, name: str = "ids") -> TokenIds:
    """A private int32 array [n], n >= 1, of the ids of one text.

    Args:
        ids: a list, an iterator, an array or a tensor of shape [n] or [1, n], or what a tokenizer
            returns for one text, from whose `input_ids` the padding is left out.
        vocab_size: ids have to be below it.
        name: the argument's name in error messages.

    Raises:
        InvalidArgumentError: no tokens, another shape, not integers, or an id outside the
            vocabulary.
    """
    if isinstance(ids, (str, bytes)):
        raise InvalidArgumentError(
            f"{name} is text; expected token ids: give the engine a tokenizer, Engine(model, "
            "tokenizer=...), or run the tokenizer first"
        )
    array = _as_array(ids, name)
    if array.ndim == 2 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 1:
        raise InvalidArgumentError(
            f"{name} has shape {list(array.shape)}; expected [n] or [1, n]: one text per call. "
            "Engine.run takes many"
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


def as_prompts(prompts: Any, name: str = "prompts") -> list[Any]:
    """One entry per prompt, of a list, an array [prompts, n], or a tokenizer's padded batch.

    The entries are not checked; those of a batch are without its padding.

    Raises:
        InvalidArgumentError: text, ids of a single prompt, or a batch that is not whole.
    """
    if isinstance(prompts, (str, bytes)):
        raise InvalidArgumentError(f"{name} is a single text; expected a list of prompts")
    if isinstance(prompts, Mapping):
        rows = prompts.get("input_ids")
        if rows is None:
            raise InvalidArgumentError(
                f"{name} is a mapping without input_ids; expected what a tokenizer returns"
            )
        masks = prompts.get("attention_mask")
        texts = listed(rows, f"{name}.input_ids", "the ids of several prompts")
        if texts and not np.ndim(texts[0]):
            raise InvalidArgumentError(f"{name} has the ids of one prompt; expected several")
        padding = (
            [None] * len(texts)
            if masks is None
            else listed(masks, f"{name}.attention_mask", "a mask of each prompt")
        )
        if len(padding) != len(texts):
            raise InvalidArgumentError(
                f"{name} has {len(texts)} rows of input_ids and {len(padding)} of attention_mask"
            )
        return [
            row if mask is None else {"input_ids": row, "attention_mask": mask}
            for row, mask in zip(texts, padding)
        ]
    # What can be iterated over once may be read several times.
    each_prompt = listed(prompts, name, "a list of prompts")
    return [list(each) if isinstance(each, Iterator) else each for each in each_prompt]


def _as_array(ids: TokenIdsLike, name: str) -> npt.NDArray[Any]:
    if isinstance(ids, torch.Tensor):
        if ids.dtype == torch.bfloat16:  # numpy has none, and it is refused anyway
            raise InvalidArgumentError(f"{name} has dtype bfloat16; expected integers")
        if ids.layout != torch.strided or ids.is_meta:
            raise InvalidArgumentError(
                f"{name} is a {'meta' if ids.is_meta else 'sparse'} tensor; expected {_EXPECTED}"
            )
        return ids.detach().cpu().numpy()
    if isinstance(ids, Mapping):
        return _without_padding(ids, name)
    try:
        return np.asarray(list(ids) if isinstance(ids, Iterator) else ids)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgumentError(
            f"{name} is no sequence of token ids ({error}); expected {_EXPECTED}"
        ) from error


def _without_padding(batch: Mapping[str, Any], name: str) -> npt.NDArray[Any]:
    """`input_ids` of a tokenizer's answer for one text, where `attention_mask` is not 0."""
    if "input_ids" not in batch:
        raise InvalidArgumentError(
            f"{name} is a mapping without input_ids; expected token ids, or what a tokenizer "
            "returns"
        )
    array = _as_array(batch["input_ids"], f"{name}.input_ids")
    if batch.get("attention_mask") is None:
        return array
    mask = _as_array(batch["attention_mask"], f"{name}.attention_mask")
    if mask.shape != array.shape:
        raise InvalidArgumentError(
            f"{name}.attention_mask has shape {list(mask.shape)}; expected that of input_ids, "
            f"{list(array.shape)}"
        )
    if array.ndim == 2 and array.shape[0] == 1:
        array, mask = array[0], mask[0]
    if array.ndim != 1:
        return array  # refused by its shape
    used = np.flatnonzero(mask)
    if used.size and used[-1] - used[0] + 1 != used.size:
        raise InvalidArgumentError(
            f"{name}.attention_mask leaves out tokens in the middle; expected padding at one end"
        )
    return array[used]
