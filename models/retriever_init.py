"""A structured start for the tiny retriever: the circuit it needs, in rough form.

Layer 0 (RoPE) gets heads that look 1, 2, 3 and 4 tokens back and write what they see into a
subspace each. Layer 1 (NoPE) matches (this token, 1 back, 2 back) against (1 back, 2 back, 3 back)
of every earlier position and copies that position's token: a 3-gram induction head. Training turns
this sketch into exact retrieval within minutes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import SmolLM3ForCausalLM
from transformers.models.smollm3.modeling_smollm3 import SmolLM3Attention

NOISE = 0.02


@torch.no_grad()
def initialise_retriever(
    model: SmolLM3ForCausalLM, *, offset_strength: float, match_strength: float
) -> None:
    """Overwrites both layers' attention weights in place.

    offset_strength: size of layer 0's positional biases.
    match_strength: scale of layer 1's query and key weights.
    REQUIRES: two layers, RoPE in the first only, head_dim = hidden_size / 2, attention biases.
    """
    look_back, retrieve = (layer.self_attn for layer in model.model.layers)
    hidden, dim = model.config.hidden_size, look_back.head_dim
    heads = look_back.q_proj.out_features // dim
    kv_heads = look_back.k_proj.out_features // dim
    group = heads // kv_heads

    initialise_look_back(look_back, model.model.rotary_emb.inv_freq, offset_strength)
    basis = orthogonal(hidden, hidden)
    token = basis[:dim]  # the view of a token's embedding that is matched on
    back = [orthogonal(hidden, dim) for _ in range(heads)]  # where "h + 1 tokens back" is written
    set_weight(look_back.v_proj.weight, token.repeat(kv_heads, 1), NOISE)
    set_weight(look_back.o_proj.weight, 0.08 * torch.cat(back, dim=1), 0.2 * NOISE)

    queries, keys = [], []
    for _ in range(kv_heads):
        second, third = orthogonal(dim, dim), orthogonal(dim, dim)  # keep the grams apart
        keys.append(back[0].T + second @ back[1].T + third @ back[2].T)
        queries += [token + second @ back[0].T + third @ back[1].T] * group
    set_weight(retrieve.k_proj.weight, match_strength * torch.cat(keys), NOISE)
    set_weight(retrieve.q_proj.weight, match_strength * torch.cat(queries), NOISE)
    copied = [basis[(dim * head) % hidden :][:dim] for head in range(kv_heads)]
    set_weight(retrieve.v_proj.weight, torch.cat(copied), NOISE)
    written = [0.15 * copied[head // group].T for head in range(heads)]
    set_weight(retrieve.o_proj.weight, torch.cat(written, dim=1), 0.2 * NOISE)

    for layer in model.model.layers:
        layer.mlp.down_proj.weight.mul_(0.3)


@torch.no_grad()
def initialise_look_back(
    attention: SmolLM3Attention, frequencies: Tensor, offset_strength: float
) -> None:
    """Gives head h of a layer with RoPE biases that make it look h + 1 tokens back.

    frequencies: [head_dim / 2], of the RoPE. offset_strength: size of the biases.
    """
    dim = attention.head_dim
    heads = attention.q_proj.out_features // dim
    kv_heads = attention.k_proj.out_features // dim
    # A key bias (s, 0) and the same vector turned back by h + 1 positions as query bias: their
    # product peaks where the query is h + 1 tokens behind the key's position.
    size = torch.full_like(frequencies, offset_strength)
    attention.k_proj.bias.copy_(torch.cat([size, torch.zeros_like(size)]).repeat(kv_heads))
    turned = [-(head + 1) * frequencies for head in range(heads)]
    attention.q_proj.bias.copy_(
        torch.cat([torch.cat([size * angle.cos(), size * angle.sin()]) for angle in turned])
    )
    attention.q_proj.weight.mul_(0.1)
    attention.k_proj.weight.mul_(0.1)


def orthogonal(rows: int, columns: int) -> Tensor:
    """[rows, columns] with orthonormal rows or columns, whichever are fewer."""
    size = max(rows, columns)
    square: Tensor = torch.linalg.qr(torch.randn(size, size)).Q
    return square[:rows, :columns].contiguous()


def set_weight(weight: Tensor, value: Tensor, noise: float) -> None:
    """Overwrites `weight` with `value` and normal noise of standard deviation `noise`."""
    weight.copy_(value + noise * torch.randn_like(value))
