"""What is found with a part of the cache: ours, an oracle, a window, mean keys, and kvpress.

    kvpager bench quality

A document with 16 needles is prefilled and each is asked for; an answer counts if all four tokens
are right. A budget is a share of the document's chunks: as many tokens per layer and kv head as a
policy may read for one row. kvpager selects per row and keeps everything, so that budget is what it
reads; a press of kvpress keeps as many tokens and drops all others for good, before the question is
known. Top-k spends one chunk of its budget on sinks and two on the recent window.

Attention-mass recall is measured at the layer that retrieves: the share of the question's softmax,
over the whole document, that lies in the chunks selected for it, averaged over query heads.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvpager import Dense, Engine, PagerConfig, TopK
from kvpager.config import Window
from kvpager_bench import harness, subjects
from kvpager_bench.hard_keys import PLAIN, RETRIEVING_LAYER, TRAINED, load_with_keys
from kvpager_bench.harness import NOT_APPLICABLE, Column, Report
from kvpager_bench.peers import environments as peers
from kvpager_bench.places import scratch_folder

CHUNK_TOKENS = 64
ANSWER_TOKENS = 4
NEEDLES = 16
ROWS = 64
SINK_CHUNKS, RECENT_CHUNKS = 1, 2
FULL, OURS, ORACLE, WINDOW, MEAN = (
    "full attention",
    "kvpager",
    "oracle",
    "sliding window",
    "mean keys",
)
SCORERS = {OURS: "bits2", ORACLE: "exact", MEAN: "mean"}
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


@dataclass(frozen=True)
class Budget:
    """How many chunks of a context may be read for a row."""

    context: int
    percent: float

    @property
    def chunks(self) -> int:
        least = SINK_CHUNKS + RECENT_CHUNKS + 1
        return max(least, int(self.context * self.percent / 100) // CHUNK_TOKENS)

    @property
    def tokens(self) -> int:
        return self.chunks * CHUNK_TOKENS

    def selection(self, policy: str) -> Dense | TopK | Window:
        """What `policy` may read: as many tokens as any other one."""
        sinks = SINK_CHUNKS * CHUNK_TOKENS
        if policy == FULL:
            return Dense()
        if policy == WINDOW:
            # A window of W tokens touches one chunk more than W / CHUNK_TOKENS.
            return Window(recent=self.tokens - sinks - CHUNK_TOKENS, sinks=sinks)
        return TopK(
            chunks=self.chunks - SINK_CHUNKS - RECENT_CHUNKS,
            sinks=sinks,
            recent=(RECENT_CHUNKS - 1) * CHUNK_TOKENS,
            scorer=SCORERS[policy],
        )

    @property
    def compression_ratio(self) -> float:
        """The share of the document that a press drops, to keep as many tokens."""
        return 1 - self.tokens / self.context


def found_of(answers: list[list[int]], expected: list[list[int]]) -> int:
    """Exact matches: every token of an answer is right."""
    if len(answers) != len(expected):
        raise harness.MissingNumberError(f"{len(answers)} answers to {len(expected)} questions")
    return sum(answer == right for answer, right in zip(answers, expected))


def mass_recall(
    q: np.ndarray[Any, Any], k: np.ndarray[Any, Any], chunks: list[list[int]], scaling: float
) -> float:
    """Share of softmax(q k) that lies in the selected chunks, averaged over query heads.

    Args:
        q: [q_heads, dim] of one row.
        k: [tokens, kv_heads, dim] of everything before it.
        chunks: the selected chunks per kv head.
        scaling: of the dot products.
    """
    group = q.shape[0] // k.shape[1]
    shares = []
    for head in range(q.shape[0]):
        scores = (k[:, head // group].astype(np.float64) @ q[head].astype(np.float64)) * scaling
        weights = np.exp(scores - scores.max())
        selected = np.zeros(len(weights), dtype=bool)
        for chunk in chunks[head // group]:
            selected[chunk * CHUNK_TOKENS : (chunk + 1) * CHUNK_TOKENS] = True
        shares.append(weights[selected].sum() / weights.sum())
    return float(np.mean(shares))


class Retriever:
    """A model with its stock twin, which says what a question's queries are."""

    def __init__(self, keys: str) -> None:
        self.keys = keys
        self.model = load_with_keys(keys)
        self.stock = subjects.beside(self.model)
        config = self.model.config
        self.shape = (config.num_attention_heads, config.head_dim)

    def queries(self, asked: subjects.Questions) -> list[np.ndarray[Any, Any]]:
        """[q_heads, dim] of each prompt's last row at the retrieving layer, by full attention."""
        cache, _ = subjects.stock_prefill(self.stock, asked.document.ids, subjects.PREFILL_TOKENS)
        seen: list[torch.Tensor] = []
        projection = self.stock.model.layers[RETRIEVING_LAYER].self_attn.q_proj
        hook = projection.register_forward_hook(lambda _m, _i, output: seen.append(output))
        try:
            for prompt in asked.prompts:
                subjects.stock_step(self.stock, copy.deepcopy(cache), prompt)
        finally:
            hook.remove()
        return [rows[0, -1].reshape(self.shape).numpy() for rows in seen]


def ask(
    retriever: Retriever,
    asked: subjects.Questions,
    queries: list[np.ndarray[Any, Any]],
    budget: Budget,
    policy: str,
) -> tuple[list[list[int]], float | str]:
    """The answers under a policy, and its mass recall where chunks are selected by score."""
    config = PagerConfig(
        pool_tokens=budget.context + 2048,
        chunk_tokens=CHUNK_TOKENS,
        rows=ROWS,
        selection=budget.selection(policy),
    )
    answers = []
    recalls = []
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(retriever.model, config))
        session = stack.enter_context(engine.session())
        session.prefill(asked.document.ids)
        sequence = session.sequence
        keys = sequence.read_kv(RETRIEVING_LAYER, 0, sequence.length)[0].float().numpy()
        for prompt, q in zip(asked.prompts, queries):
            with session.fork() as fork:
                fork.append(prompt)
                answers.append(
                    [int(token) for token in fork.generate(ANSWER_TOKENS, stream="tokens")]
                )
            if policy in SCORERS:
                chosen = sequence.select(RETRIEVING_LAYER, torch.from_numpy(q))
                recalls.append(mass_recall(q, keys, chosen, q.shape[1] ** -0.5))
    return answers, float(np.mean(recalls)) if recalls else NOT_APPLICABLE


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
    parser.add_argument("--seed", type=int, default=1)
    arguments: argparse.Namespace = parser.parse_args()
    record = harness.start(arguments)
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
