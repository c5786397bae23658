"""What K/V in fewer bits cost in quality: of a language model's text, and of needles.

A window is so many tokens of modules that the model was not trained on, up to the end of one; the
logits that predict its last tokens are compared with those of the same model with K/V in its own
dtype. All of a window runs with the K/V of the format, as in use: also what is prefilled attends to
codes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvpager import Engine, PagerConfig
from kvpager.execution.batch import Batch
from kvpager.execution.core import EngineCore
from kvpager.needles import shipped_model_path
from kvpager.pager import Sequence as Text
from kvpager.scheduling.recompute import run
from kvpager_bench import harness, library_text, repairs, subjects
from kvpager_bench.budgets import CHUNK_TOKENS, FULL, OURS, ROWS, Budget, Retriever, ask, found_of
from kvpager_bench.divergence import Sample, pooled, sample
from kvpager_bench.hard_keys import PLAIN, TRAINED
from kvpager_bench.harness import NOT_APPLICABLE, Cell, Column, Report
from kvpager_bench.kv_formats import FORMATS, NATIVE, Format
from kvpager_bench.labels import KVPAGER
from kvpager_bench.peers import kv_caches
from kvpager_bench.peers.environments import PeerError
from kvpager_bench.places import results_dir, scratch_folder
from kvpager_bench.report import load_report

Ids: TypeAlias = npt.NDArray[np.int32]

CODER = "tiny-coder"  # trained on Python's library, but for the modules of the windows
END_OF_TEXT = "<|endoftext|>"
SCORED = 512  # tokens at the end of a window
PERCENTS = (100, 25, 10)  # of the context that attention reads
WINDOWS = {4096: 8, 16384: 4, 32768: 2}
FEWEST = 2  # windows: fewer have no standard error
ROOM = 2048  # tokens of the pool beside the context
SAME_MODEL = 1e-6  # nats, at most, between systems with the same weights and K/V in float32
NEEDLES = 16
DOCUMENTS = 2
NEEDLE_PERCENTS = (100, 10)
# Beside whose format ours of as many bits stands.
OF_BITS = (("q8", "8"), ("q4", "4"))

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
NEEDLE_COLUMNS = (
    Column("keys", text=True),
    Column("format", text=True),
    Column("context", "tokens"),
    Column("read", "% of the context"),
    Column("found"),
    Column("asked"),
    Column("mass_recall", optional=True),
)


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
    with closing(core.pager.sequence(salt=core.namespace)) as sequence:
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
        row = report.add(
            context=self.context,
            windows=len(self.windows),
            tokens=len(told_all.kl),
            perplexity=told_all.perplexity,
            kl=float(told_all.kl.mean()),
            kl_se=repairs.estimate(told_all.kl, self.scored).error,
            kl_p99=float(np.quantile(told_all.kl, 0.99)),
            same_top=100 * float(told_all.same_top.mean()),
            kl_of_all=float(pooled(self.samples(of_all, logits)).kl.mean()),
            **told,
        )
        print(
            f"{row['by']}, {row['format']}, {harness.tokens_name(self.context)}, {row['read']}% "
            f"read: KL {row['kl']:.3g}, perplexity {row['perplexity']:.5g}",
            flush=True,
        )
        return row


def measure(
    report: Report, model: Any, cut: Cut, formats: Sequence[Format], percents: Sequence[int]
) -> list[torch.Tensor]:
    """Every format with every share of the context read; the native logits with all of it."""
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
            cut.add(
                report,
                expected,
                of_all,
                logits,
                by=KVPAGER,
                format=kept.name,
                read=percent,
                token_bytes=layout.token_bytes,
            )
    return of_all


def measure_peer(
    report: Report,
    peer: kv_caches.Caches,
    model: Any,
    cut: Cut,
    of_all: Sequence[torch.Tensor],
    threads: int,
) -> None:
    """Another system's caches, each beside its own without codes, on the same windows."""
    try:
        with kv_caches.logits(peer, model, cut.windows, cut.scored, threads) as caches:
            expected = [read() for read in next(iter(caches.values()))]
            for name, readers in caches.items():
                cut.add(
                    report,
                    expected,
                    of_all,
                    [read() for read in readers],
                    by=peer.by,
                    format=name,
                    read=100,
                    token_bytes=NOT_APPLICABLE,
                )
    except PeerError as error:
        report.skip(peer.title, str(error))


def judge(report: Report) -> None:
    """Whether formats stand in the order of their bits, and what rotation is worth."""
    kl = {
        (row["format"], row["context"]): report.number(row, "kl")
        for row in report.rows
        if (row["by"], row["read"]) == (KVPAGER, 100)
    }
    contexts = sorted({int(report.number(row, "context")) for row in report.rows})

    def judge_order(claim: str, less: str, more: str) -> None:
        pairs = [(kl.get((less, c)), kl.get((more, c))) for c in contexts]
        told = [(a, b) for a, b in pairs if a is not None and b is not None]
        if told:
            report.judge(
                claim,
                all(a < b for a, b in told),
                "; ".join(f"{a:.2g} and {b:.2g} nats" for a, b in told),
            )

    judge_order("keys of 8 bits and values of 4 cost more than 8 bits for both", "q8", "k8v4")
    judge_order("4 bits for both cost more than for values alone", "k8v4", "q4")
    judge_order("q8 is nearer to native with rotation than without", "q8", "q8 not rotated")
    judge_order("q4 is nearer to native with rotation than without", "q4", "q4 not rotated")
    judge_order("q4 is nearer to native with layer 0 in floats", "q4", "q4 every layer")
    for row in report.rows:
        if row["by"] == KVPAGER:
            continue
        context = int(report.number(row, "context"))
        if row["format"] in kv_caches.PLAIN:
            apart = report.number(row, "kl_of_all")
            report.judge(
                f"{row['by']} has the same model at {harness.tokens_name(context)}",
                apart < SAME_MODEL,
                f"mean KL {apart:.2g} nats with K/V in floats",
            )
        bits = kv_caches.BITS.get(str(row["format"]))
        for ours, as_many in OF_BITS:
            if bits == as_many and (ours, context) in kl and kl[ours, context] > 0:
                report.compare(
                    f"KL from K/V in floats at {harness.tokens_name(context)}, {bits} bits",
                    ours=kl[ours, context],
                    theirs=report.number(row, "kl"),
                    peer=f"{row['by']}, {row['format']}",
                    unit="nats",
                    aim=None,
                    lower_is_better=True,
                )


def texts_report(
    name: str,
    arguments: argparse.Namespace,
    formats: Sequence[Format],
    record: Mapping[str, Any],
) -> None:
    """quality_formats: a language model's text."""
    lengths, scored = arguments.lengths, SCORED
    counts = {length: WINDOWS.get(length, FEWEST) for length in lengths}
    percents: tuple[int, ...] = tuple(arguments.percents)
    if arguments.quick:
        counts, scored, percents = dict.fromkeys(lengths, FEWEST), 128, (100, 10)
    folder = arguments.model or shipped_model_path(CODER)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    modules = tokenised(folder, library_text.held_out_texts())
    report = Report(
        name=name,
        question="What K/V in fewer bits cost in the quality of a language model",
        columns=COLUMNS,
        settings={
            "formats": {kept.name: kept.settings for kept in formats},
            "model": folder.name,
            "scored": scored,
            "windows": {str(length): count for length, count in counts.items()},
            "modules": list(library_text.HELD_OUT),
            "chunk_tokens": CHUNK_TOKENS,
            "rows": ROWS,
            "caches": kv_caches.SETTINGS,
        },
        environment=record,
    )
    if arguments.keep:
        keep_lengths(report, results_dir() / f"{name}.json", lengths)
    for context, count in counts.items():
        cut = Cut(context, windows(modules, context, count), scored)
        of_all = measure(report, model, cut, formats, percents)
        if context in arguments.peer_lengths:
            for peer in kv_caches.PEERS:
                measure_peer(report, peer, model, cut, of_all, arguments.threads)
    judge(report)
    report.finish()


def keep_lengths(report: Report, path: Path, lengths: Sequence[int]) -> None:
    """Takes over the rows of other lengths from a file, if it is of the same settings.

    Its settings then say of each length when it was measured, and of which commit.

    Raises ValueError: there is no such file, or it was measured otherwise.
    """
    if not path.is_file():
        raise ValueError(f"--keep: there is no {path.name} to keep lengths of")
    before = load_report(path)
    own = ("windows", "formats", "measured")
    for name, value in report.settings.items():
        if name not in own and before.settings.get(name) != value:
            raise ValueError(
                f"--keep: {path.name} was measured with {name} {before.settings.get(name)!r}; "
                f"expected {value!r}"
            )
    environment = before.environment
    told = before.settings.get("measured") or dict.fromkeys(
        before.settings["windows"], f"{environment['date'][:10]}, {environment['commit'][:12]}"
    )
    mine = {str(length) for length in lengths}
    kept = {length: when for length, when in told.items() if length not in mine}
    for row in before.rows:
        if str(row["context"]) in kept:
            report.add(**row)
    windows = {length: before.settings["windows"][length] for length in kept}
    now = f"{report.environment['date'][:10]}, {report.environment['commit'][:12]}"
    report.settings = {
        **report.settings,
        "formats": {**before.settings["formats"], **report.settings["formats"]},
        "windows": dict(sorted((windows | report.settings["windows"]).items(), key=_by_number)),
        "measured": dict(sorted((kept | dict.fromkeys(mine, now)).items(), key=_by_number)),
    }


def _by_number(item: tuple[str, Any]) -> int:
    return int(item[0])


def tokenised(model: Path, texts: Sequence[tuple[str, str]]) -> list[list[int]]:
    """Each text's ids, END_OF_TEXT behind it where the tokenizer has one, as in training."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    end = tokenizer.get_vocab().get(END_OF_TEXT)
    behind = [] if end is None else [end]
    return [
        [*tokenizer.encode(text, add_special_tokens=False, verbose=False), *behind]
        for _, text in texts
    ]


def needles_report(
    name: str,
    arguments: argparse.Namespace,
    formats: Sequence[Format],
    record: Mapping[str, Any],
) -> None:
    """quality_needles: retrieval models, which are right or wrong."""
    context, documents = (4096, 1) if arguments.quick else (16384, DOCUMENTS)
    report = Report(
        name=name,
        question="What is found with K/V in fewer bits",
        columns=NEEDLE_COLUMNS,
        settings={
            "formats": {kept.name: kept.settings for kept in formats},
            "needles": NEEDLES,
            "documents": documents,
        },
        environment=record,
    )
    seeds = range(arguments.seed, arguments.seed + documents)
    asked = [subjects.questions(context, NEEDLES, seed, quiet=context // 8) for seed in seeds]
    for keys in (TRAINED, PLAIN):
        retriever = Retriever(keys)
        queries = [retriever.queries(one) for one in asked]
        for percent in NEEDLE_PERCENTS:
            for kept in formats:
                if kept.saved is not None:
                    continue
                policy = FULL if percent == 100 else OURS
                told = [
                    ask(retriever, one, q, Budget(context, percent), policy, kept.fields)
                    for one, q in zip(asked, queries)
                ]
                masses = [mass for _, mass in told if not isinstance(mass, str)]
                row = report.add(
                    keys=keys,
                    format=kept.name,
                    context=context,
                    read=percent,
                    found=sum(found_of(a, one.answers) for (a, _), one in zip(told, asked)),
                    asked=sum(len(one.answers) for one in asked),
                    mass_recall=float(np.mean(masses)) if masses else NOT_APPLICABLE,
                )
                print(
                    f"{keys}, {kept.name}, {percent}% read: {row['found']} of {row['asked']}",
                    flush=True,
                )
    judge_needles(report)
    report.finish()


def judge_needles(report: Report) -> None:
    """Whether a format finds what the model finds with K/V in its own dtype."""
    native = {
        (row["keys"], row["read"]): report.number(row, "found")
        for row in report.rows
        if row["format"] == NATIVE
    }
    for name in FORMATS:
        rows = [row for row in report.rows if row["format"] == name != NATIVE]
        if rows:
            lost = max(native[r["keys"], r["read"]] - report.number(r, "found") for r in rows)
            asked = report.number(rows[0], "asked")
            report.judge(
                f"{name} finds every needle that K/V in the model's dtype find",
                lost <= 0,
                f"at most {max(lost, 0):.0f} of {asked:.0f} fewer",
            )
