"""A structured start for the two-hop model: the circuit it needs, in rough form.

The residual stream is cut into six parts of equal width: the token itself, the tokens 1, 2, 3 and
4 back, and what a reference stands for. Layer 0 (RoPE) fills the parts of the earlier tokens.
Layer 1 (NoPE) is the first hop, taken by the rows of a document: (this token, 1 back) finds the
definition where (2 back, 3 back) are the same, and its value goes into the sixth part. The last
layer (NoPE) is the second hop, taken by the question: (1 back, 2 back) finds the reference where
(3 back, 4 back) are the same, and its sixth part becomes the next token. Layers between them start
out looking a few tokens back and weigh little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from retriever_init import initialise_look_back, orthogonal, set_weight
from torch import Tensor
from transformers import SmolLM3ForCausalLM
from transformers.models.smollm3.modeling_smollm3 import SmolLM3Attention

NOISE = 0.01
PARTS = 6
ANSWER_WEIGHT = 6.0  # of what the last layer finds, beside a token's own embedding
BETWEEN_STRENGTH = 4.0  # of the look-back of the layers between the hops


@torch.no_grad()
def initialise_two_hop(
    model: SmolLM3ForCausalLM, *, offset_strength: float, match_strength: float
) -> None:
    """Overwrites embeddings and attention weights in place.

    offset_strength: size of layer 0's positional biases.
    match_strength: scale of the hops' query and key weights.
    REQUIRES: three layers or more, RoPE in the first and not in the second and the last; four
    query heads; hidden_size / 3 of at most head_dim; attention biases.
    """
    first, resolve, *between, answer = (layer.self_attn for layer in model.model.layers)
    frequencies = model.model.rotary_emb.inv_freq
    hidden = model.config.hidden_size
    width = hidden // PARTS
    parts = torch.split(orthogonal(hidden, hidden), width)
    own, back, resolved = parts[0], parts[1:5], parts[5]

    embeddings = torch.randn(model.config.vocab_size, width)
    embeddings /= embeddings.norm(dim=1, keepdim=True)
    set_weight(model.model.embed_tokens.weight, embeddings @ own, NOISE)

    initialise_look_back(first, frequencies, offset_strength)
    # A layer's input is scaled to norm sqrt(hidden): what is copied gets the norm 1 it had.
    _copy(first, own, back, 1 / math.sqrt(hidden))
    unit = math.sqrt((PARTS - 1) / hidden)  # five parts are filled by now
    _match(resolve, [own, back[0]], [back[1], back[2]], match_strength)
    _copy(resolve, own, [resolved] * 4, unit / 4)
    for attention in between:
        initialise_look_back(attention, frequencies, BETWEEN_STRENGTH)
        attention.o_proj.weight.mul_(0.1)
    _match(answer, [back[0], back[1]], [back[2], back[3]], match_strength)
    _copy(answer, resolved, [own] * 4, ANSWER_WEIGHT * unit / 4)

    for layer in model.model.layers:
        layer.mlp.down_proj.weight.mul_(0.1)


def _match(
    attention: SmolLM3Attention, queries: list[Tensor], keys: list[Tensor], strength: float
) -> None:
    """Every head attends where the parts `keys` of a row equal the parts `queries` of its own."""
    for projection, parts in ((attention.q_proj, queries), (attention.k_proj, keys)):
        head = _padded(torch.cat(parts), attention.head_dim)
        copies = projection.out_features // attention.head_dim
        set_weight(projection.weight, strength * head.repeat(copies, 1), NOISE)


def _copy(
    attention: SmolLM3Attention, read: Tensor, write: Sequence[Tensor], weight: float
) -> None:
    """Head h writes what it attends to from part `read` to part `write[h]`, times `weight`."""
    dim = attention.head_dim
    kv_heads = attention.v_proj.out_features // dim
    set_weight(attention.v_proj.weight, _padded(read, dim).repeat(kv_heads, 1), NOISE)
    written = torch.cat([_padded(part, dim) for part in write]).T
    set_weight(attention.o_proj.weight, weight * written, 0.2 * NOISE)


def _padded(rows: Tensor, count: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(count - len(rows), rows.shape[1])])
