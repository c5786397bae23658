"""Lets libraries of quantisation pack their weights, which some do in a model's first forward."""

from __future__ import annotations

from typing import Any

import torch

from kvpager.errors import InvalidArgumentError, UnsupportedModelError
from kvpager.held import is_quantised
from kvpager.hf.attention import running
from kvpager.hf.decoder import decoder_of
from kvpager.hf.observe import Recorder, packed_inputs

_COUNTS = (64, 1)  # rows: a kernel for one row may want its weights in another order


def settle_weights(model: Any) -> None:
    """Runs a model with quantised weights on a few rows; others are left alone.

    The digest of its weights and the watch over them then concern what forwards compute with, and
    not what was loaded.

    Raises:
        UnsupportedModelError: it does not run.
    """
    if not any(map(is_quantised, model.modules())):
        return
    for count in _COUNTS:
        tokens = torch.zeros(count, dtype=torch.int64, device=model.device)
        with torch.inference_mode(), running(Recorder()):
            try:
                decoder_of(model)(**packed_inputs(tokens, tokens.clone()))
            except (InvalidArgumentError, UnsupportedModelError):
                raise
            except Exception as error:
                raise UnsupportedModelError(
                    f"{type(model).__name__} has quantised weights and does not run on {count} "
                    f"rows under torch.inference_mode() ({type(error).__name__}: {error}); load it "
                    "as the library asks for this device, or without quantising its weights"
                ) from error
