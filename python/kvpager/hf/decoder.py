"""The part of a causal LM that turns token ids into hidden states."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel


def decoder_of(model: Any) -> Any:
    """The decoder of a causal LM, which takes `input_ids` and gives hidden states first.

    `get_decoder` finds it by name, and some architectures call their output embeddings "decoder".
    """
    found = model.get_decoder()
    return found if isinstance(found, PreTrainedModel) else model.base_model
