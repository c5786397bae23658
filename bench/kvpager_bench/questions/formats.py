"""What K/V in fewer bits cost in the quality of a language model.

    kvpager bench formats
    kvpager bench formats -- --lengths 4096 --formats native,q8 --percents 100
    kvpager bench formats -- --model FOLDER

A window is so many tokens of modules of Python's library that the model was not trained on, up to
the end of one; the logits that predict its last tokens are compared with those of the same model
with K/V in its own dtype, by context, format and share of the context that is read. All of a window
runs with the K/V of the format, as in use: also what is prefilled attends to codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvpager import Engine, PagerConfig
from kvpager._runtime.execution.batch import Batch
from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.scheduling.recompute import run
from kvpager.cli.needles import shipped_model_path
from kvpager.pager import Sequence as Text
from kvpager_bench import harness, library_text
from kvpager_bench.budgets import CHUNK_TOKENS, FULL, OURS, ROWS, Budget
from kvpager_bench.divergence import Sample, pooled, sample, standard_error
from kvpager_bench.harness import Cell, Column, Report
from kvpager_bench.places import scratch_folder
from kvpager_bench.study import Asked, Option, Study, Table

Ids: TypeAlias = npt.NDArray[np.int32]

NATIVE, KVPAGER = "native", "kvpager"
CODER = "tiny-coder"  # trained on Python's library, but for the modules of the windows
END_OF_TEXT = "<|endoftext|>"
WINDOWS = {4096: 8, 16384: 4, 32768: 2}
FEWEST = 2  # windows: fewer have no standard error
ROOM = 2048  # tokens of the pool beside the context

COLUMNS = (
    Column("by", text=True),
    Column("format", text=True),
    Column("context", "tokens"),
    Column("read", "% of the context"),
    Column("windows"),
    Column("tokens"),
    Column("token_bytes", "per token", optional=True),
    Column("perplexity", digits=5),
    Column("kl", "nats"),
    Column("kl_se", "nats", digits=2),
    Column("kl_p99", "nats"),
    Column("same_top", "%", digits=4),
    Column("kl_of_all", "nats"),
)


@dataclass(frozen=True)
class Format:
    """name: in tables. fields: of the PagerConfig.

    saved: the dtype of a file in which what comes before the scored tokens was meanwhile.
    """

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    saved: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """For a report."""
        return dict(self.fields) if self.saved is None else {"saved": self.saved}


FORMATS: Mapping[str, Format] = {
    kept.name: kept
    for kept in (
        Format(NATIVE),
        Format("bfloat16", {"kv_dtype": "bfloat16"}),
        Format("q8", {"kv_dtype": "q8"}),
        Format("q8 not rotated", {"kv_dtype": "q8", "kv_rotation": False}),
        Format("k8v4", {"kv_dtype": "k8v4"}),
        Format("q4", {"kv_dtype": "q4"}),
        Format("q4 not rotated", {"kv_dtype": "q4", "kv_rotation": False}),
        Format("q4 every layer", {"kv_dtype": "q4", "float_layers": ()}),
        Format("saved in q8", saved="q8"),
        Format("saved in q4", saved="q4"),
    )
}


def formats_of(names: Sequence[str]) -> tuple[Format, ...]:
    """The formats of these names behind the native one, in the order of FORMATS."""
    return tuple(kept for kept in FORMATS.values() if kept.name in (NATIVE, *names))


def windows(modules: Sequence[Sequence[int]], tokens: int, count: int) -> list[Ids]:
    """`count` windows [tokens], each up to the end of another module, of the longest.

    A module that is shorter than a window has those that follow it in front, whole or in part.

    modules: token ids of each. Raises ValueError where there are too few, or all are too short.
    """
    if not 1 <= count <= len(modules):
        raise ValueError(f"{count} windows of {len(modules)} modules; expected 1 to as many")
    if sum(map(len, modules)) < tokens:
        raise ValueError(f"all modules together are shorter than a window of {tokens} tokens")
    longest = sorted(range(len(modules)), key=lambda i: (-len(modules[i]), i))[:count]
    made = []
    for last in longest:
        parts: list[Sequence[int]] = [modules[last]]
        following = last
        while sum(map(len, parts)) < tokens:
            following = (following + 1) % len(modules)
            parts.insert(0, modules[following])
        made.append(np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])[-tokens:])
    return made


def last_logits(engine: Engine, ids: Ids, scored: int) -> torch.Tensor:
    """Logits [scored, vocab] that predict the last `scored` tokens of ids, in the model's dtype.

    By the forwards of a prefill, from an empty sequence.
    """
    core = engine.core
    with closing(core.pager.sequence(salt=core.tenant.namespace)) as sequence:
        return _logits_after(core, sequence, ids, scored)


def logits_after_a_file(engine: Engine, ids: Ids, scored: int, kv_dtype: str) -> torch.Tensor:
    """The same, with all before those tokens saved in `kv_dtype` and read again."""
    with scratch_folder() as folder:
        path = folder / "text.kvsnap"
        with engine.session() as session:
            session.prefill(ids[: -1 - scored])
            session.save(path, kv_dtype=kv_dtype)
        with engine.restore(path, on_mismatch="convert") as session:
            return _logits_after(engine.core, session.sequence, ids, scored)


def _logits_after(core: EngineCore, sequence: Text, ids: Ids, scored: int) -> torch.Tensor:
    fed = ids[:-1]
    first = len(fed) - scored
    rows = []
    sequence.reserve(len(fed))
    while (start := sequence.length) < len(fed):
        batch = Batch(core.rows)
        batch.commit(sequence, start, fed[start : start + core.rows])
        batch.wanted.extend(range(max(0, first - start), batch.used))
        logits = run(core, batch)
        if batch.wanted:
            rows.append(logits.clone())
    return torch.cat(rows)


def config_of(kept: Format, context: int, percent: int) -> PagerConfig:
    """Of a format with so much of a context read."""
    budget = Budget(context, percent)
    return PagerConfig(
        pool_tokens=context + ROOM,
        chunk_tokens=CHUNK_TOKENS,
        rows=ROWS,
        small_rows="fixed",  # none is needed, and proving them takes longer than a short window
        selection=budget.selection(FULL if percent == 100 else OURS),
        **kept.fields,
    )


@dataclass(frozen=True)
class Cut:
    """The windows of one length, and what the model itself says of their last `scored` tokens."""

    context: int
    windows: list[Ids]
    scored: int

    def tokens(self, window: int) -> Ids:
        """Of one window, those that are scored."""
        return self.windows[window][-self.scored :]

    def samples(
        self, expected: Sequence[torch.Tensor], logits: Sequence[torch.Tensor]
    ) -> list[Sample]:
        """Of each window, from logits [scored, vocab] of each."""
        return [sample(expected[i], logits[i], self.tokens(i)) for i in range(len(self.windows))]

    def add(
        self,
        report: Report,
        expected: Sequence[torch.Tensor],
        of_all: Sequence[torch.Tensor],
        logits: Sequence[torch.Tensor],
        **told: Cell,
    ) -> dict[str, Cell]:
        """A row. expected: of K/V in the model's own dtype. of_all: where all is read as well."""
        told_all = pooled(self.samples(expected, logits))
        return report.add(
            context=self.context,
            windows=len(self.windows),
            tokens=len(told_all.kl),
            perplexity=told_all.perplexity,
            kl=float(told_all.kl.mean()),
            kl_se=standard_error(told_all.kl, self.scored),
            kl_p99=float(np.quantile(told_all.kl, 0.99)),
            same_top=100 * float(told_all.same_top.mean()),
            kl_of_all=float(pooled(self.samples(of_all, logits)).kl.mean()),
            **told,
        )


def measure_cut(
    report: Report, model: Any, cut: Cut, formats: Sequence[Format], percents: Sequence[int]
) -> None:
    """Every format with every share of the context read."""
    of_all: list[torch.Tensor] = []
    repeated = False
    for percent in percents:
        expected: list[torch.Tensor] = []
        for kept in formats:
            if kept.saved is not None and percent != 100:
                continue
            with Engine(model, config_of(kept, cut.context, percent)) as engine:
                layout = engine.layout
                if kept.saved is None:
                    logits = [last_logits(engine, ids, cut.scored) for ids in cut.windows]
                else:
                    layout = layout.kept_as(kept.saved)
                    logits = [
                        logits_after_a_file(engine, ids, cut.scored, kept.saved)
                        for ids in cut.windows
                    ]
                if expected and not repeated:  # of the first format that is not native
                    repeated = True
                    again = [logits[0], last_logits(engine, cut.windows[0], cut.scored)]
                    bits = map(harness.digest, again)
                    harness.require_deterministic(bits.__next__, kept.name)
            expected = expected or logits
            of_all = of_all or logits
            told: dict[str, Cell] = {"by": KVPAGER, "format": kept.name, "read": percent}
            cut.add(report, expected, of_all, logits, token_bytes=layout.token_bytes, **told)


def judge(report: Report) -> None:
    """Whether formats stand in the order of their bits, and what rotation is worth."""
    kl = {
        (row["format"], row["context"]): report.number(row, "kl")
        for row in report.rows
        if row["read"] == 100
    }
    contexts = sorted({context for _, context in kl}, key=str)
    for claim, less, more in (
        ("keys of 8 bits and values of 4 cost more than 8 bits for both", "q8", "k8v4"),
        ("4 bits for both cost more than for values alone", "k8v4", "q4"),
        ("q8 is nearer to native with rotation than without", "q8", "q8 not rotated"),
        ("q4 is nearer to native with rotation than without", "q4", "q4 not rotated"),
        ("q4 is nearer to native with layer 0 in floats", "q4", "q4 every layer"),
    ):
        pairs = [(kl[less, c], kl[more, c]) for c in contexts if {(less, c), (more, c)} <= {*kl}]
        if pairs:
            said = "; ".join(f"{a:.2g} and {b:.2g} nats" for a, b in pairs)
            report.judge(claim, all(a < b for a, b in pairs), said)


def tokenised(model: Path, texts: Sequence[tuple[str, str]]) -> list[list[int]]:
    """Each text's ids, END_OF_TEXT behind it where the tokenizer has one, as in training."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    end = tokenizer.get_vocab().get(END_OF_TEXT)
    behind = [] if end is None else [end]
    return [
        [*tokenizer.encode(text, add_special_tokens=False, verbose=False), *behind]
        for _, text in texts
    ]


def measure(asked: Asked) -> None:
    o = asked.options
    formats = formats_of(o.formats)
    counts = {n: FEWEST if asked.quick else WINDOWS.get(n, FEWEST) for n in o.lengths}
    folder = o.model or shipped_model_path(CODER)
    asked.settings |= {
        "formats": {kept.name: kept.settings for kept in formats},
        "model": folder.name,
        "windows": {str(length): count for length, count in counts.items()},
    }
    report = asked.report()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    modules = tokenised(folder, library_text.held_out_texts())
    for context, count in counts.items():
        cut = Cut(context, windows(modules, context, count), o.scored)
        measure_cut(report, model, cut, formats, o.percents)
    judge(report)


STUDY = Study(
    measure,
    (
        Table(
            "quality_formats",
            "What K/V in fewer bits cost in the quality of a language model",
            COLUMNS,
        ),
    ),
    (
        Option("formats", list(FORMATS), among=FORMATS),
        Option("lengths", [4096, 16384, 32768], [4096], help="tokens of a window"),
        Option("scored", 512, 128, help="tokens at the end of a window"),
        Option("percents", [100, 25, 10], [100, 10], help="of the context that attention reads"),
        Option("model", None, help="a folder; by default tiny-coder", kind=Path),
    ),
    {"modules": list(library_text.HELD_OUT), "chunk_tokens": CHUNK_TOKENS, "rows": ROWS},
)

if __name__ == "__main__":
    STUDY.main()
