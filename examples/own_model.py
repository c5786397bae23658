"""A model of one's own over the pager: 600 tokens through a pool of 256, layer by layer."""

import torch
from torch.nn.functional import silu

import kvpager
from kvpager.pager import ROW_COMMIT, Sequence

LAYERS, HEADS, KV_HEADS, DIM, ROWS = 2, 8, 2, 64, 64
torch.manual_seed(0)
layout = kvpager.Layout(layers=LAYERS, kv_heads=KV_HEADS, k_dim=DIM, v_dim=DIM)
pager = kvpager.Pager(layout, kvpager.PagerConfig(pool_tokens=256, host_bytes="64MiB"), rows=ROWS)
embed = torch.randn(1000, HEADS * DIM)
queries = torch.randn(LAYERS, HEADS * DIM, HEADS * DIM) / 32
keys_values = torch.randn(LAYERS, HEADS * DIM, 2 * KV_HEADS * DIM) / 32


def forward(sequence: Sequence, ids: torch.Tensor) -> torch.Tensor:
    """Runs rows [n] after those the sequence holds, n <= ROWS; returns [n, HEADS * DIM]."""
    n, x = len(ids), embed[ids]
    positions = range(sequence.length, sequence.length + n)
    with pager.begin([sequence] * n, positions, ids.tolist(), [ROW_COMMIT] * n) as running:
        for layer in range(LAYERS):
            q = (x @ queries[layer]).view(n, HEADS, DIM)
            k, v = (x @ keys_values[layer]).view(n, 2, KV_HEADS, DIM).unbind(1)
            seen = running.attend(layer, q, k, v, scaling=DIM**-0.5)  # [n, HEADS, DIM]
            x = x + silu(seen.reshape(n, -1))
        running.commit()
    return x


ids = torch.randint(1000, (600,))
sequence = pager.sequence()
sequence.reserve(len(ids))  # room below the pool, or CapacityError
starts = range(0, len(ids), ROWS)
paged = torch.cat([forward(sequence, ids[start : start + ROWS]) for start in starts])
chunks = sequence.ledger()
print(f"{sum(chunk.resident for chunk in chunks)} of {len(chunks)} chunks are in the pool")
print(f"the next token: {int((embed @ paged[-1]).argmax())}")
