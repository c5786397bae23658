"""What is found with a part of the cache, and with K/V in fewer bits.

    kvpager bench quality
    kvpager bench quality -- --parts formats,needles    # K/V in fewer bits: half an hour

"budgets": a document with 16 needles is prefilled and each is asked for; an answer counts if all
four tokens are right. A budget is a share of the document's chunks: as many tokens per layer and kv
head as a policy may read for one row. kvpager selects per row and keeps everything, so that budget
is what it reads; a press of kvpress keeps as many tokens and drops all others for good, before the
question is known. Top-k spends one chunk of its budget on sinks and two on the recent window.

Attention-mass recall is measured at the layer that retrieves: the share of the question's softmax,
over the whole document, that lies in the chunks selected for it, averaged over query heads.

"formats" and "needles" (format_quality.py) keep K/V in fewer bits, and compare with K/V in the
model's own dtype: the distribution over the next token in modules of Python's library that a small
language model was not trained on, by context, format and share of the context read; and the
needles that are found. Other systems' caches run the same windows with the same weights, each
beside its own cache without codes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvpager_bench import format_quality, harness, subjects
from kvpager_bench.budgets import (
    ANSWER_TOKENS,
    CHUNK_TOKENS,
    FULL,
    MEAN,
    ORACLE,
    OURS,
    RECENT_CHUNKS,
    SCORERS,
    SINK_CHUNKS,
    WINDOW,
    Budget,
    Retriever,
    ask,
    found_of,
)
from kvpager_bench.hard_keys import PLAIN, RETRIEVING_LAYER, TRAINED
from kvpager_bench.harness import NOT_APPLICABLE, Column, Report
from kvpager_bench.kv_formats import FORMATS, UnknownFormatError, formats_of
from kvpager_bench.peers import environments as peers
from kvpager_bench.places import scratch_folder

BUDGETS, TEXTS, FOUND = "budgets", "formats", "needles"
PARTS = (BUDGETS, TEXTS, FOUND)
LENGTHS = (4096, 16384, 32768)
PEER_LENGTHS = (4096, 16384)
NEEDLES = 16
PRESSES = ("SnapKV", "ExpectedAttention", "KNorm", "StreamingLLM")
SCRIPT = "kvpress_answers"

COLUMNS = (
    Column("keys", text=True),
    Column("context", "tokens"),
    Column("policy", text=True),
    Column("budget", "% of the cache kept"),
    Column("kept", "tokens per layer and head"),
    Column("found"),
    Column("asked"),
    Column("mass_recall", optional=True),
)


def ask_kvpress(
    retriever: Retriever,
    asked: subjects.Questions,
    budgets: list[Budget],
    threads: int,
    unsuited: dict[str, str],
) -> Iterator[tuple[str, Budget, int, list[list[int]]]]:
    """(press, budget, tokens kept, answers) of every press at every budget.

    unsuited: filled with the presses that were left out because they do not support the model.
    Raises peers.PeerError, and RuntimeError for a press that kept more than its budget.
    """
    cells = [(press, budget) for press in PRESSES for budget in budgets]
    with scratch_folder() as folder:
        path = folder / "model"
        retriever.stock.save_pretrained(path)
        answer = peers.call(
            "kvpress",
            SCRIPT,
            {
                "model": str(path),
                "document": asked.document.ids.tolist(),
                "prompts": asked.prompts,
                "answer_tokens": ANSWER_TOKENS,
                "presses": [[press, budget.compression_ratio] for press, budget in cells],
                "threads": threads,
            },
            900,
        )
    unsuited.update(answer["unsuited"])
    for (press, budget), kept, answers in zip(cells, answer["kept"], answer["answers"]):
        if press in unsuited:
            continue
        require_equal_budget(press, budget, kept)
        yield press, budget, max(kept), answers


def require_equal_budget(press: str, budget: Budget, kept: list[int]) -> None:
    """A press keeps in every layer what the budget says, give or take a rounded token."""
    if any(abs(tokens - budget.tokens) > 1 for tokens in kept):
        raise RuntimeError(f"kvpress {press} kept {kept} tokens; the budget is {budget.tokens}")


def judge(report: Report) -> None:
    """Shares of the oracle's answers, and needles found with little."""

    def found(keys: str, policy: str, percent: float) -> float:
        for row in report.rows:
            if (row["keys"], row["policy"], row["budget"]) == (keys, policy, percent):
                return report.number(row, "found")
        return float("nan")

    names = sorted({str(row["keys"]) for row in report.rows})
    for keys in names:
        ours, oracle = found(keys, OURS, 10), found(keys, ORACLE, 10)
        if oracle > 0 and ours > 0:
            report.compare(
                f"needles found with 10% of the cache read, {keys} keys",
                ours=ours,
                theirs=oracle,
                peer="oracle",
                unit="of 16",
                aim=0.95,
            )
        for press in PRESSES:
            theirs = found(keys, f"kvpress {press}", 10)
            if theirs > 0 and ours > 0:
                report.compare(
                    f"needles found with 10% of the cache kept, {keys} keys",
                    ours=ours,
                    theirs=theirs,
                    peer=f"kvpress {press}",
                    unit="of 16",
                    aim=None,
                )
        with_all = found(keys, FULL, 100)
        report.judge(
            f"{keys} keys: with 6% of the cache every needle is found that full attention finds",
            found(keys, OURS, 6) >= with_all,
            f"{found(keys, OURS, 6):.0f} of {NEEDLES}; full attention {with_all:.0f}",
        )


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument("--parts", type=harness.parse_list, default=[BUDGETS])
    parser.add_argument("--seed", type=int, default=1, help="of documents with needles")
    parser.add_argument("--formats", type=harness.parse_list, default=list(FORMATS))
    parser.add_argument("--lengths", type=harness.parse_ints, help="tokens, of formats")
    parser.add_argument(
        "--peer-lengths",
        type=harness.parse_ints,
        default=list(PEER_LENGTHS),
        help="those of them that peers run, too",
    )
    parser.add_argument(
        "--percents",
        type=harness.parse_ints,
        default=list(format_quality.PERCENTS),
        help="of formats: shares of the context that attention reads",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="of formats: keep what was measured before of other lengths, by the same settings",
    )
    parser.add_argument("--model", type=Path, help="of formats: a folder; by default tiny-coder")
    arguments: argparse.Namespace = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"--parts has {unknown[0]!r}; expected some of {', '.join(PARTS)}")
    record = harness.start(arguments)
    if BUDGETS in arguments.parts:
        budgets_report(arguments, record)
    if TEXTS not in arguments.parts and FOUND not in arguments.parts:
        return
    try:
        formats = formats_of(arguments.formats)
    except UnknownFormatError as error:
        parser.error(str(error))
    if TEXTS in arguments.parts:
        arguments.lengths = arguments.lengths or (LENGTHS[:1] if arguments.quick else LENGTHS)
        name = harness.report_name("quality_formats", arguments)
        format_quality.texts_report(name, arguments, formats, record)
    if FOUND in arguments.parts:
        name = harness.report_name("quality_needles", arguments)
        format_quality.needles_report(name, arguments, formats, record)


def budgets_report(arguments: argparse.Namespace, record: dict[str, Any]) -> None:
    """quality: what each policy finds with a part of the cache."""
    context, percents, variants = 16384, [2, 5, 6, 10, 20, 50], [TRAINED, PLAIN]
    if arguments.quick:
        context, percents, variants = 4096, [10, 50], [TRAINED]
    if arguments.full:
        context = 32768
    report = Report(
        name=harness.report_name("quality", arguments),
        question="What is found with a part of the cache",
        columns=COLUMNS,
        settings={
            "needles": NEEDLES,
            "chunk_tokens": CHUNK_TOKENS,
            "sink_chunks": SINK_CHUNKS,
            "recent_chunks": RECENT_CHUNKS,
            "scorers": SCORERS,
            "presses": PRESSES,
            "retrieving_layer": RETRIEVING_LAYER,
        },
        environment=record,
    )
    budgets = {percent: Budget(context, percent) for percent in percents}
    for keys in variants:
        measure(report, keys, context, budgets, arguments)
    judge(report)
    report.finish()


def measure(
    report: Report,
    keys: str,
    context: int,
    budgets: dict[int, Budget],
    arguments: argparse.Namespace,
) -> None:
    """All policies on one document with one kind of keys."""
    retriever = Retriever(keys)
    # Where a window of a tenth of the context does not reach; half of it holds half of the needles.
    quiet = context // 8
    asked = subjects.questions(context, NEEDLES, arguments.seed, quiet=quiet)
    queries = retriever.queries(asked)

    def add(policy: str, percent: float, kept: int, answers: list[list[int]], mass: Any) -> None:
        row = report.add(
            keys=keys,
            context=context,
            policy=policy,
            budget=percent,
            kept=kept,
            found=found_of(answers, asked.answers),
            asked=len(asked.answers),
            mass_recall=mass,
        )
        print(f"{keys}, {policy}, {percent}%: {row['found']} of {row['asked']}", flush=True)

    whole = Budget(context, 100)
    first, mass = ask(retriever, asked, queries, whole, FULL)
    add(FULL, 100, context, first, mass)
    for policy in (OURS, ORACLE, MEAN, WINDOW):
        for percent, budget in budgets.items():
            answers, mass = ask(retriever, asked, queries, budget, policy)
            add(policy, percent, budget.tokens, answers, mass)
            if policy == OURS and percent == min(budgets):
                again, _ = ask(retriever, asked, queries, budget, policy)
                harness.require_deterministic(iter([answers, again]).__next__, policy)
    title = peers.PEERS["kvpress"].title
    found = peers.find("kvpress")
    if isinstance(found, peers.Missing):
        report.skip(title, found.reason)
        return
    percent_of = {budget: percent for percent, budget in budgets.items()}
    unsuited: dict[str, str] = {}
    try:
        for press, budget, kept, answers in ask_kvpress(
            retriever, asked, list(budgets.values()), arguments.threads, unsuited
        ):
            add(f"kvpress {press}", percent_of[budget], kept, answers, NOT_APPLICABLE)
        for press, why in unsuited.items():
            report.skip(f"kvpress {press}, {keys} keys", why)
    except peers.PeerError as error:
        report.skip(title, str(error))


if __name__ == "__main__":
    main()
