"""What is found with a part of the cache.

    kvpager bench quality

A document with 16 needles is prefilled and each is asked for; an answer counts if all four tokens
are right. A budget is a share of the document's chunks: as many tokens per layer and kv head as a
policy may read for one row. kvpager selects per row and keeps everything, so that budget is what it
reads; a press of kvpress keeps as many tokens and drops all others for good, before the question is
known. Top-k spends one chunk of its budget on sinks and two on the recent window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvpager_bench import harness, subjects
from kvpager_bench.budgets import (
    ANSWER_TOKENS,
    CHUNK_TOKENS,
    FULL,
    OURS,
    PLAIN,
    RECENT_CHUNKS,
    SINK_CHUNKS,
    TRAINED,
    WINDOW,
    Budget,
    ask,
    found_of,
)
from kvpager_bench.harness import Column, Report
from kvpager_bench.peers import environments as peers
from kvpager_bench.places import scratch_folder
from kvpager_bench.study import Asked, Option, Study, Table

NEEDLES = 16
PRESSES = ("SnapKV", "KNorm", "StreamingLLM")
SCRIPT = "kvpress_answers"

COLUMNS = (
    Column("keys", text=True),
    Column("context", "tokens"),
    Column("policy", text=True),
    Column("budget", "% of the cache kept"),
    Column("kept", "tokens per layer and head"),
    Column("found"),
    Column("asked"),
)


def ask_kvpress(
    model: Any, told: subjects.Questions, budgets: list[Budget], asked: Asked
) -> Iterator[tuple[str, Budget, int, list[list[int]]]]:
    """(press, budget, tokens kept, answers) of every press at every budget.

    Raises peers.PeerError, and RuntimeError for a press that kept more than its budget.
    """
    cells = [(press, budget) for press in PRESSES for budget in budgets]
    with scratch_folder() as folder:
        path = folder / "model"
        model.save_pretrained(path)
        task = {
            "model": str(path),
            "document": told.document.ids.tolist(),
            "prompts": told.prompts,
            "answer_tokens": ANSWER_TOKENS,
            "presses": [[press, budget.compression_ratio] for press, budget in cells],
            "threads": asked.threads,
        }
        answer = peers.call("kvpress", SCRIPT, task, 900)
    for (press, budget), kept, answers in zip(cells, answer["kept"], answer["answers"]):
        require_equal_budget(press, budget, kept)
        yield press, budget, max(kept), answers


def require_equal_budget(press: str, budget: Budget, kept: list[int]) -> None:
    """A press keeps in every layer what the budget says, give or take a rounded token."""
    if any(abs(tokens - budget.tokens) > 1 for tokens in kept):
        raise RuntimeError(f"kvpress {press} kept {kept} tokens; the budget is {budget.tokens}")


def judge(report: Report) -> None:
    """Needles found with little."""

    def found(keys: str, policy: str, percent: float) -> float:
        for row in report.rows:
            if (row["keys"], row["policy"], row["budget"]) == (keys, policy, percent):
                return report.number(row, "found")
        return float("nan")

    for keys in sorted({str(row["keys"]) for row in report.rows}):
        ours = found(keys, OURS, 10)
        for press in PRESSES:
            policy = f"kvpress {press}"
            theirs = found(keys, policy, 10)
            if theirs > 0 and ours > 0:
                figure = f"needles found with 10% of the cache kept, {keys} keys"
                report.compare(figure, ours, theirs, policy, "of 16")
        with_all = found(keys, FULL, 100)
        report.judge(
            f"{keys} keys: with 6% of the cache every needle is found that full attention finds",
            found(keys, OURS, 6) >= with_all,
            f"{found(keys, OURS, 6):.0f} of {NEEDLES}; full attention {with_all:.0f}",
        )


def measure_keys(asked: Asked, keys: str) -> None:
    """All policies on one document with one kind of keys."""
    o, report, context = asked.options, asked.report(), asked.options.context
    budgets = {percent: Budget(context, percent) for percent in o.percents}
    model = subjects.load_model(subjects.SHIPPED if keys == TRAINED else keys)
    # Where a window of a tenth of the context does not reach; half of it holds half of the needles.
    told = subjects.questions(context, NEEDLES, o.seed, quiet=context // 8)

    def add(policy: str, percent: float, kept: int, answers: list[list[int]]) -> None:
        report.add(
            keys=keys,
            context=context,
            policy=policy,
            budget=percent,
            kept=kept,
            found=found_of(answers, told.answers),
            asked=len(told.answers),
        )

    add(FULL, 100, context, ask(model, told, Budget(context, 100), FULL))
    for policy in (OURS, WINDOW):
        for percent, budget in budgets.items():
            answers = ask(model, told, budget, policy)
            add(policy, percent, budget.tokens, answers)
            if policy == OURS and percent == min(budgets):
                again = ask(model, told, budget, policy)
                harness.require_deterministic(iter([answers, again]).__next__, policy)
    percent_of = {budget: percent for percent, budget in budgets.items()}
    try:
        for press, budget, kept, answers in ask_kvpress(model, told, [*percent_of], asked):
            add(f"kvpress {press}", percent_of[budget], kept, answers)
    except peers.PeerError as error:
        report.skip(peers.PEERS["kvpress"].title, str(error))


def measure(asked: Asked) -> None:
    for keys in asked.options.keys:
        measure_keys(asked, keys)
    judge(asked.report())


KEYS = (TRAINED, PLAIN)
STUDY = Study(
    measure,
    (Table("quality", "What is found with a part of the cache", COLUMNS),),
    (
        Option("keys", KEYS, [TRAINED], among=KEYS),
        Option("context", 16384, 4096, 32768),
        Option("percents", [2, 5, 6, 10, 20, 50], [10, 50], help="of the context"),
        Option("seed", 1, help="of documents with needles"),
    ),
    {
        "needles": NEEDLES,
        "chunk_tokens": CHUNK_TOKENS,
        "sink_chunks": SINK_CHUNKS,
        "recent_chunks": RECENT_CHUNKS,
        "presses": PRESSES,
    },
)

if __name__ == "__main__":
    STUDY.main()
