"""Where the chunks of a conversation are, from its first token to its last answer.

    kvpager bench residency
    kvpager bench residency -- --context 32768 --pool-tokens 4096

The shipped model reads a document forward by forward, through a pool of an eighth of it and host
memory for three eighths; what neither holds is on disk. Then it is asked for needles, in no order,
that lie outside the pool. After each forward and each answer the ledger says of every chunk which
is the fastest tier that has it. Nothing is timed: with the same options the report is the same on
every machine whose bits are.
"""

from __future__ import annotations

import argparse
from itertools import groupby

import numpy as np

from kvpager import Engine, PagerConfig, Session, TopK
from kvpager.pager import TIER_DISK, TIER_HOST, TIER_RESIDENT
from kvpager_bench import harness, subjects
from kvpager_bench.harness import NOT_APPLICABLE, Cell, Column, Report
from kvpager_bench.labels import PREFILL, QUESTION
from kvpager_bench.places import scratch_folder

CHUNK_TOKENS = 64
CHUNKS = 8
FORWARD_TOKENS = 256
ANSWER_TOKENS = 4
TIERS = {TIER_RESIDENT: "pool", TIER_HOST: "host", TIER_DISK: "disk"}  # from the fastest

COLUMNS = (
    Column("moment"),
    Column("after", text=True),
    Column("tokens"),
    Column("pool", "chunks"),
    Column("host", "chunks"),
    Column("disk", "chunks"),
    Column("asked", "chunk", optional=True),
    Column("asked_was_in", text=True),
    Column("places", text=True),  # as `runs` writes them
)


def where(session: Session) -> list[str]:
    """The fastest tier that has each chunk, in logical order."""
    held = session.sequence.residency()["tiers"].tolist()
    return [next(name for tier, name in TIERS.items() if tiers & tier) for tiers in held]


def runs(places: list[str]) -> str:
    """How many neighbouring chunks each tier has, by its first letter: "160d 64h 32p"."""
    return " ".join(f"{len(list(same))}{place[0]}" for place, same in groupby(places))


class Record:
    """The rows of a report, one after the other."""

    def __init__(self, session: Session, report: Report) -> None:
        self._session, self._report = session, report

    def add(self, after: str, asked: Cell = NOT_APPLICABLE, was: str = NOT_APPLICABLE) -> None:
        places = where(self._session)
        self._report.add(
            moment=len(self._report.rows),
            after=after,
            tokens=self._session.length,
            **{name: places.count(name) for name in TIERS.values()},
            asked=asked,
            asked_was_in=was,
            places=runs(places),
        )


def converse(engine: Engine, subject: subjects.Questions, report: Report) -> int:
    """Reads the document, asks every question in no order; returns how many were answered."""
    answered = 0
    ids = subject.document.ids
    with engine.session() as session:
        record = Record(session, report)
        for stop in range(FORWARD_TOKENS, len(ids) + FORWARD_TOKENS, FORWARD_TOKENS):
            session.prefill(ids[:stop])
            record.add(PREFILL)
        for number in np.random.default_rng(1).permutation(len(subject.prompts)).tolist():
            asked = int(subject.document.positions[number]) // CHUNK_TOKENS
            was = where(session)[asked]
            session.append(subject.prompts[number])
            answer = list(session.generate(ANSWER_TOKENS, eos=None, stream="tokens"))
            answered += answer == subject.answers[number]
            record.add(QUESTION, asked, was)
    return answered


def judge(report: Report, answered: int) -> None:
    asked = [row for row in report.rows if row["after"] == QUESTION]
    limit = report.settings["pool_tokens"] // CHUNK_TOKENS
    most = max(int(report.number(row, "pool")) for row in report.rows)
    report.judge(
        "the pool never has more chunks than fit", most <= limit, f"at most {most} of {limit}"
    )
    slower = [row for row in asked if row["asked_was_in"] != "pool"]
    report.judge(
        "every answer is found, wherever its chunk is",
        answered == len(asked),
        f"{answered} of {len(asked)}, of which {len(slower)} chunks were outside the pool",
    )


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--pool-tokens", type=int, default=2048)
    parser.add_argument("--host-tokens", type=int, default=6144)
    parser.add_argument("--questions", type=int, default=12)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.context, arguments.pool_tokens, arguments.host_tokens = 4096, 1024, 1024
        arguments.questions = 3
    record = harness.start(arguments)
    measure(arguments, record)


def measure(arguments: argparse.Namespace, environment: dict[str, object]) -> None:
    report = Report(
        harness.report_name("residency", arguments),
        "Where the chunks of a conversation are, from its first token to its last answer",
        COLUMNS,
        {
            "subject": subjects.SHIPPED,
            "context": arguments.context,
            "pool_tokens": arguments.pool_tokens,
            "host_tokens": arguments.host_tokens,
            "chunk_tokens": CHUNK_TOKENS,
            "chunks": CHUNKS,
        },
        environment,
    )
    subject = subjects.questions(
        arguments.context, arguments.questions, seed=3, quiet=arguments.pool_tokens + 384
    )
    model = subjects.load_model(subjects.SHIPPED)
    token_bytes = 2 * model.config.num_hidden_layers * model.config.num_key_value_heads
    token_bytes *= subjects.head_dim(model.config) * model.dtype.itemsize
    with scratch_folder() as folder:
        config = PagerConfig(
            pool_tokens=arguments.pool_tokens,
            chunk_tokens=CHUNK_TOKENS,
            selection=TopK(chunks=CHUNKS),
            host_bytes=arguments.host_tokens * token_bytes,
            disk_path=str(folder),
            disk_bytes=2 * arguments.context * token_bytes,
        )
        with Engine(model, config) as engine:
            answered = converse(engine, subject, report)
    judge(report, answered)
    report.finish()


if __name__ == "__main__":
    main()
