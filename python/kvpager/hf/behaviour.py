"""A digest of a model's results for a few made-up tokens.

Parameters and settings do not determine a forward completely: a hook, a patched method or an
inactive adapter may change it. The digest covers their effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from blake3 import blake3

from kvpager.hf.attention import running
from kvpager.hf.decoder import decoder_of
from kvpager.hf.head import Head
from kvpager.hf.observe import Observation, Recorder, packed_inputs
from kvpager.hf.rows import RowCounts

TOKENS = 16


def behaviour_digest(model: Any, counts: RowCounts) -> str:
    """Digest, in hex, of queries, keys, values, hidden states and logits of made-up tokens.

    The same in every process under an equal fingerprint: the tokens are always the same, and rows
    have the bits of every proven count, whatever M is. Rows attend to themselves alone.

    Args:
        model: whose attention is kvpager's (see attach.py).
        counts: that were proven for it.
    """
    tokens, positions = behaviour_tokens(model)
    summary = blake3()
    head = Head(model, counts.head)
    step = min(TOKENS, counts.rows)
    for start in range(0, TOKENS, step):
        used = min(step, TOKENS - start)
        padding = (0, counts.fit(used) - used)
        parts = [
            torch.nn.functional.pad(x[start : start + used], padding) for x in (tokens, positions)
        ]
        recorder = Recorder()
        with torch.inference_mode(), running(recorder):
            hidden = decoder_of(model)(**packed_inputs(*parts))[0][0]
            logits = head(hidden, range(used))
        calls = {layer: tuple(x[:used] for x in call) for layer, call in recorder.calls.items()}
        _add_forward(summary, calls, hidden[:used], logits)
    return str(summary.hexdigest())


def behaviour_tokens(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens and positions of `behaviour_digest`, [TOKENS] each, on the model's device."""
    generator = torch.Generator("cpu").manual_seed(3)  # the same tokens on every device
    vocab = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(vocab, (TOKENS,), generator=generator, device="cpu")
    positions = torch.arange(TOKENS, device="cpu") * 5
    positions %= getattr(model.config, "max_position_embeddings", None) or TOKENS
    return tokens.to(model.device), positions.to(model.device)


def behaviour_seen(model: Any, seen: Observation) -> str:
    """The same of one forward that was observed.

    It is `behaviour_digest` if that forward was of `behaviour_tokens`, in a proven count of rows.
    """
    with torch.inference_mode():
        logits = Head(model)(seen.hidden, range(min(TOKENS, seen.rows)))
    summary = blake3()
    _add_forward(summary, seen.layers, seen.hidden, logits)
    return str(summary.hexdigest())


def _add_forward(
    summary: Any,
    layers: Mapping[int, Sequence[torch.Tensor]],
    hidden: torch.Tensor,
    logits: torch.Tensor,
) -> None:
    for layer, call in sorted(layers.items()):
        summary.update(layer.to_bytes(4, "little"))
        _add(summary, call)
    _add(summary, (hidden, logits))


def _add(summary: Any, tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        summary.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        summary.update(raw.numpy().tobytes())
