"""The quality of repaired stitched documents, and their time to the first token.

    kvpager bench segments
    kvpager bench segments -- --prompts 200 --lengths 4096,16384    # what is published

"segments" asks questions that no document answers alone (two_hop.py): a value is defined in one
document and referred to in another, and the model that was trained on it takes the first hop
while it reads the second document. Documents are cached alone, put together in another order for
every prompt, and repaired by each policy; beside each stands a full prefill of the same prompt. An
answer counts if the greedy tokens are the expected ones. Logits are those of its first token.

Cost is counted in rows of the model. A probe, with which a policy finds out what to repair, is
among them. Rows are given as if nobody had computed the system prompt before.

"segments_first_token" times the first token over documents of which every repetition has fresh
ones (stitched_turns.py), on the same model and on a larger one with random weights: what that
computes is meaningless, what it costs is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvpager_bench import harness, repairs, stitched_quality, stitched_turns, subjects
from kvpager_bench.harness import NOT_APPLICABLE, Cell, Column, Report
from kvpager_bench.repairs import Outcome, Way
from kvpager_bench.stitched_quality import Answers
from kvpager_bench.stitched_turns import COLD, FLOOR, PREFIX, STITCHED

QUALITY, FIRST_TOKEN = "quality", "first-token"
PARTS = (QUALITY, FIRST_TOKEN)
CONTEXT = 1024
PER_SET = 4  # prompts over the same documents
PROMPTS = 64  # of the suite; what is published has 200
SHARES = (0.01, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)
RECOVERED = 0.9  # of the gap between no repair and a full prefill, by the default
FASTER = 3.0  # times, at FASTER_FROM tokens and more
FASTER_FROM = 16384
SHAPES = (subjects.TWO_HOP, "untied-fp32")  # of first tokens

COLUMNS = (
    Column("context", "tokens"),
    Column("policy", text=True),
    Column("share", "% asked for", optional=True),
    Column("prompts"),
    Column("recomputed", "% of documents"),
    Column("rows"),
    Column("probe_rows"),
    Column("cost", "% of a full prefill's rows"),
    Column("exact_match", "%"),
    Column("exact_match_se", "%", digits=2),
    Column("recovered", "% of the gap", optional=True),
    Column("recovered_se", "%", digits=2, optional=True),
    Column("kl", "nats"),
    Column("kl_se", "nats", digits=2),
    Column("mean_error"),
    Column("mean_error_se", digits=2),
    Column("max_error"),
    Column("change", "of mean_error", digits=2, optional=True),
    Column("change_se", digits=2, optional=True),
    Column("same_bits", "prompts"),
)
FIRST_TOKEN_COLUMNS = (
    Column("shape", text=True),
    Column("context", "tokens"),
    Column("documents"),
    Column("way", text=True),
    Column("runs"),
    Column("first_token_ms", "ms"),
    Column("fastest_ms", "ms"),
    Column("slowest_ms", "ms"),
    Column("assemble_ms", "ms"),
    Column("probe_ms", "ms"),
    Column("rows"),
    Column("probe_rows"),
    Column("recomputed", "% of documents"),
    Column("faster", "x full prefill"),
)


def measure_quality(
    model: Any, context: int, prompts: int, shares: Sequence[float], seed: int, report: Report
) -> None:
    """A row per way, all of the same prompts."""

    def said(done: int) -> None:
        print(f"{context} tokens: {done} of {prompts} prompts", flush=True)

    ways = repairs.ways(shares)
    add_quality(
        report,
        context,
        stitched_quality.measure(model, context, prompts // PER_SET, PER_SET, ways, seed, said),
    )


def add_quality(report: Report, context: int, answers: Answers) -> None:
    """A row per way."""
    told = answers.told
    full = np.asarray(answers.full, dtype=np.float64)
    unrepaired = told[Way(repairs.NONE)]
    none = repairs.column(unrepaired, "right")
    rows_of_full = repairs.column(told[Way(repairs.FULL)], "rows").mean()
    before: dict[str, Sequence[Outcome]] = {}
    for way, outcomes in told.items():

        def mean(name: str, outcomes: Sequence[Outcome] = outcomes) -> float:
            return float(repairs.column(outcomes, name).mean())

        right = repairs.column(outcomes, "right")
        exact_match = repairs.estimate(100 * right, PER_SET)
        kl = repairs.estimate(repairs.column(outcomes, "kl"), PER_SET)
        error = repairs.estimate(repairs.column(outcomes, "mean_error"), PER_SET)
        recovered = repairs.recovered(right, none, full, PER_SET)
        change = None
        if way.share is not None:
            change = repairs.step(before.get(way.policy, unrepaired), outcomes, PER_SET)
            before[way.policy] = outcomes
        report.add(
            context=context,
            policy=way.policy,
            share=NOT_APPLICABLE if way.share is None else 100 * way.share,
            prompts=len(outcomes),
            recomputed=100 * mean("recomputed") / (mean("recomputed") + mean("moved")),
            rows=mean("rows"),
            probe_rows=mean("probe_rows"),
            cost=100 * (mean("rows") + mean("probe_rows")) / rows_of_full,
            exact_match=exact_match.mean,
            exact_match_se=exact_match.error,
            recovered=NOT_APPLICABLE if recovered is None else 100 * recovered.mean,
            recovered_se=NOT_APPLICABLE if recovered is None else 100 * recovered.error,
            kl=kl.mean,
            kl_se=kl.error,
            mean_error=error.mean,
            mean_error_se=error.error,
            max_error=mean("max_error"),
            change=change.mean if change else NOT_APPLICABLE,
            change_se=change.error if change else NOT_APPLICABLE,
            same_bits=int(mean("same_bits") * len(outcomes) + 0.5),
        )


def judge_quality(report: Report) -> None:
    """Verdicts on every context: bits, growth, and the default beside other policies."""
    for context in dict.fromkeys(int(report.number(row, "context")) for row in report.rows):
        rows = [row for row in report.rows if row["context"] == context]
        at = harness.tokens_name(context)
        whole = [row for row in rows if row["recomputed"] == 100]
        report.judge(
            f"{at}: with everything recomputed the logits are a full prefill's to the bit",
            bool(whole) and all(row["same_bits"] == row["prompts"] for row in whole),
            ", ".join(f"{row['policy']} {row['same_bits']} of {row['prompts']}" for row in whole),
        )
        for family in repairs.FAMILIES:
            _judge_growth(report, at, [row for row in rows if row["policy"] == family])
        named = {str(row["policy"]): row for row in rows if row["share"] == NOT_APPLICABLE}
        default = named[repairs.DEFAULT]
        if default["recovered"] != NOT_APPLICABLE:
            report.judge(
                f"{at}: the default repair recovers {RECOVERED:.0%} of the exact matches that are "
                "lost without repair",
                report.number(default, "recovered") >= 100 * RECOVERED,
                f"{default['recovered']:.1f} ± {default['recovered_se']:.1f}% by "
                f"{default['recomputed']:.1f}% of the tokens; "
                + "; ".join(
                    f"{name} {named[name]['recovered']:.1f}%"
                    for name in (repairs.TAIL_TOKENS, repairs.TAIL_ROWS, repairs.TAIL_16)
                ),
            )
        for peer in (repairs.FULL, repairs.TAIL_TOKENS, repairs.TAIL_ROWS, repairs.TAIL_16):
            for name, unit, lower in (("exact_match", "%", False), ("kl", "nats", True)):
                ours, theirs = (report.number(row, name) for row in (default, named[peer]))
                if ours > 0 and theirs > 0:
                    report.compare(
                        f"{'KL' if lower else 'exact match'} after the default repair, {at}",
                        ours=ours,
                        theirs=theirs,
                        peer="full prefill" if peer == repairs.FULL else peer,
                        unit=unit,
                        aim=RECOVERED if peer == repairs.FULL and not lower else None,
                        lower_is_better=lower,
                    )


def _judge_growth(report: Report, at: str, rows: Sequence[Mapping[str, Cell]]) -> None:
    """Whether no step to a larger share makes the mean error larger, by a standard error."""
    steps = [
        (report.number(row, "change"), report.number(row, "change_se"), row["share"])
        for row in rows
    ]
    grown = [f"to {share:g}%: {by:+.2g} ± {error:.1g}" for by, error, share in steps if by > error]
    report.judge(
        f"{at}: the mean error does not grow with the share recomputed ({rows[0]['policy']})",
        not grown,
        "; ".join(grown) or f"{len(steps)} steps, none up by more than its standard error",
    )


def measure_first_token(
    shape: str, model: Any, context: int, runs: int, seed: int, report: Report
) -> None:
    """A row per way."""
    told = stitched_turns.measure(shape, model, context, runs, seed)
    cold = told[COLD].timing.median
    documents = stitched_turns.document_count(context)
    for way, turns in told.items():
        timing = turns.timing
        recomputed, moved = turns.median("recomputed"), turns.median("moved")
        report.add(
            shape=shape,
            context=context,
            documents=documents,
            way=way,
            runs=runs,
            first_token_ms=1e3 * timing.median,
            fastest_ms=1e3 * timing.fastest,
            slowest_ms=1e3 * timing.slowest,
            assemble_ms=1e3 * turns.median("assemble_s"),
            probe_ms=1e3 * turns.median("probe_s"),
            rows=turns.median("rows"),
            probe_rows=turns.median("probe_rows"),
            recomputed=100 * recomputed / (recomputed + moved) if moved else 100.0,
            faster=cold / timing.median,
        )
        print(f"{shape}, {context} tokens, {way}: {1e3 * timing.median:.1f} ms", flush=True)


def judge_first_token(report: Report) -> None:
    """Stitched beside computing all of it, and beside what a prefix cache can keep."""
    rows = {(row["shape"], row["context"], row["way"]): row for row in report.rows}
    for (shape, context, way), row in rows.items():
        if way != STITCHED:
            continue
        at = f"{harness.tokens_name(int(context))} of cached documents, {shape}"
        for peer in (COLD, PREFIX, FLOOR):
            aims = peer == COLD and int(context) >= FASTER_FROM
            report.compare(
                f"first token of {at}",
                ours=report.number(row, "first_token_ms"),
                theirs=report.number(rows[shape, context, peer], "first_token_ms"),
                peer=peer,
                unit="ms",
                aim=FASTER if aims else None,
                lower_is_better=True,
            )


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument("--parts", type=harness.parse_list, default=list(PARTS))
    parser.add_argument("--contexts", type=harness.parse_ints, help="tokens, of quality")
    parser.add_argument("--prompts", type=int, help=f"of quality, a multiple of {PER_SET}")
    parser.add_argument("--lengths", type=harness.parse_ints, help="tokens, of first tokens")
    parser.add_argument("--shapes", type=harness.parse_list, help="of first tokens")
    parser.add_argument("--runs", type=int, default=5, help="of first tokens")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if unknown := [part for part in arguments.parts if part not in PARTS]:
        parser.error(f"--parts has {unknown[0]!r}; expected some of {', '.join(PARTS)}")
    quick, full = arguments.quick, arguments.full
    prompts = arguments.prompts or (2 * PER_SET if quick else PROMPTS)
    if prompts < 2 * PER_SET or prompts % PER_SET:
        parser.error(f"--prompts is {prompts}; expected {2 * PER_SET} or more of {PER_SET} each")
    record = harness.start(arguments)
    shapes = arguments.shapes or ([subjects.TWO_HOP] if quick else list(SHAPES))
    contexts = arguments.contexts or ([CONTEXT, 4096] if full else [CONTEXT])
    lengths = arguments.lengths or (
        [2048] if quick else [4096, 16384, 32768] if full else [FASTER_FROM]
    )
    shares = (0.15, 1.0) if quick else SHARES
    if QUALITY in arguments.parts:
        report = Report(
            harness.report_name("segments", arguments),
            "What is right after a repair, by policy and tokens recomputed",
            COLUMNS,
            {
                "documents": stitched_quality.DOCUMENTS,
                "facts": stitched_quality.FACTS,
                "local_facts": stitched_quality.LOCAL_FACTS,
                "system_tokens": stitched_quality.SYSTEM_TOKENS,
                "prompts_per_set": PER_SET,
                "chunk_tokens": stitched_quality.CHUNK_TOKENS,
                "default": repr(repairs.FIXED[repairs.DEFAULT]),
                "seed": arguments.seed,
            },
            {**record, "threads": 1},
        )
        # No time is measured, and forwards as small as these are fastest on one thread.
        torch.set_num_threads(1)
        model = subjects.load_model(subjects.TWO_HOP)
        for context in contexts:
            measure_quality(model, context, prompts, shares, arguments.seed, report)
        judge_quality(report)
        report.finish()
    if FIRST_TOKEN in arguments.parts:
        torch.set_num_threads(arguments.threads)
        times = Report(
            harness.report_name("segments_first_token", arguments),
            "Time to the first token over cached documents in a new order",
            FIRST_TOKEN_COLUMNS,
            {
                "chunk_tokens": stitched_turns.CHUNK_TOKENS,
                "system_share": 1 / stitched_turns.SYSTEM_SHARE,
                "default": repr(repairs.FIXED[repairs.DEFAULT]),
                "seed": arguments.seed,
            },
            record,
        )
        for shape in shapes:
            model = subjects.load_model(shape)
            for length in lengths:
                measure_first_token(shape, model, length, arguments.runs, arguments.seed, times)
        judge_first_token(times)
        times.finish()


if __name__ == "__main__":
    main()
