"""Compares bits and texts of the same prompts through plain transformers and through kvpager.

    kvpager bench exactness --
    kvpager bench exactness -- --subjects untied-bf16 --prompts 30

Two ways to the same tokens, each against one prefill of all of them. "Prefix reuse": a kept
beginning, then the rest of the prompt, whose length is different each time, as the next message of
a conversation is. "One-token decode": logits of every generated token, against a prefill of prompt
and text, as whoever scores the text again computes them. A prompt forks when the text that follows
differs. Text is greedy, or sampled at temperature 1 with the same numbers on both sides (by inverse
distribution over the tokens in order of probability, which a small change of a flat distribution
moves at once).

What transformers does is measured by `plain_transformers.py`. kvpager does the same in two engines
that share nothing, so that nothing is equal because it was kept; its K/V are compared as well.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvpager import Agreement, Engine, PagerConfig, Session
from kvpager.cli.needles import NeedleTask
from kvpager.sampling import Sampling
from kvpager.verify.bits import Comparison, compare_bits
from kvpager_bench import harness, subjects
from kvpager_bench.harness import NOT_APPLICABLE, Column, Report
from kvpager_bench.plain_transformers import PeerRoute, compare_with_transformers, prefix_tokens
from kvpager_bench.study import Asked, Option, Study, Table

REUSE, DECODE = "prefix reuse", "one-token decode"
TEXTS = {"greedy": Sampling(), "sampled": Sampling(temperature=1.0, seed=1)}
POOL_TOKENS = 2048
NEEDLES = 8

COLUMNS = (
    Column("subject", text=True),
    Column("text", text=True),
    Column("way", text=True),
    Column("by", text=True),
    Column("prompts"),
    Column("forks"),
    Column("first_fork", "median token", optional=True),
    Column("logits_compared"),
    Column("differing_logits"),
    Column("differing_share", "%"),
    Column("differing_bits"),
    Column("kv_bits_compared", optional=True),
    Column("differing_kv_bits", optional=True),
    Column("logprobs_compared"),
    Column("differing_logprobs"),
    Column("max_abs_delta_logprob"),
    Column("approx_kl"),
    Column("clip_fraction"),
)


def make_prompts(subject: str, model: Any, count: int) -> list[np.ndarray[Any, Any]]:
    """For the trained model documents, every other one with a question; else random tokens."""
    prompts = []
    for number in range(count):
        length = 100 + 11 * number
        if subject.startswith(subjects.SHIPPED):
            task = NeedleTask(seed=1000 + number)
            document = task.document(length + 176, NEEDLES)
            asked = task.query(document.keys[number % NEEDLES]) if number % 2 else task.filler(4)
            prompts.append(np.concatenate([document.ids, asked]).astype(np.int32))
        else:
            prompts.append(subjects.random_ids(model, length, seed=number))
    return prompts


class OurRoute:
    """One way through kvpager, over all prompts; what `PeerRoute` is for transformers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.logits = Comparison()
        self.kv = Comparison()
        self.first_forks: list[int | None] = []
        self._generated: list[Any] = []
        self._again: list[Any] = []

    def add(self, expected: Text, actual: Text) -> None:
        self.logits += compare_bits(actual.logits, expected.logits, "logits")
        pairs = enumerate(zip(expected.tokens, actual.tokens, strict=True))
        self.first_forks.append(next((i for i, (a, b) in pairs if a != b), None))
        self._generated.append(expected.logprobs)
        self._again.append(actual.logprobs)

    def add_kv(self, expected: Session, actual: Session) -> None:
        tokens = expected.committed
        if actual.committed != tokens:
            raise harness.MissingNumberError(
                f"{self.name}: one side holds K/V of {actual.committed} tokens, the other {tokens}"
            )
        for layer in range(expected.core.facts.layout.layers):
            theirs = expected.sequence.read_kv(layer, 0, tokens)
            for a, b in zip(actual.sequence.read_kv(layer, 0, tokens), theirs):
                self.kv += compare_bits(a, b, f"K/V of layer {layer}")

    @property
    def agreement(self) -> Agreement:
        return Agreement.between(np.concatenate(self._generated), np.concatenate(self._again))


@dataclass(frozen=True)
class Text:
    """Tokens [n], logits [n, vocab] they were chosen from, and their log-probabilities [n]."""

    tokens: list[int]
    logits: torch.Tensor
    logprobs: np.ndarray[Any, np.dtype[np.float32]]


def decoded(session: Session, sampling: Sampling, new_tokens: int) -> Text:
    """Text that a session generates."""
    tokens, logits, logprobs = [], [], []
    for token in session.generate(
        new_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed,
        eos=None,
        logprobs=True,
        stream="tokens",
    ):
        tokens.append(token.id)
        logits.append(session.logits)
        logprobs.append(token.logprob)
    return Text(tokens, torch.stack(logits), np.array(logprobs, dtype=np.float32))


def scored(engine: Engine, prompt: Any, text: Text, sampling: Sampling) -> tuple[Text, Session]:
    """What a prefill of prompt and text says of each of its tokens, and the prefilled session."""
    ids = np.concatenate([prompt, np.array(text.tokens, dtype=np.int32)])
    score = engine.score(ids)
    session = engine.session()
    session.prefill(ids[:-1])
    logits = []
    with session.fork() as reader:
        for position in range(len(ids) - 1, len(prompt) - 1, -1):
            reader.trim(position)
            logits.append(reader.logits)  # by a row that reads what the prefill wrote
    logits.reverse()
    chosen = [sampling.choose(row, len(prompt) + i) for i, row in enumerate(logits)]
    return Text(chosen, torch.stack(logits), score.logprobs[len(prompt) - 1 :]), session


def through_kvpager(
    model: Any, prompts: Sequence[Any], sampling: Sampling, new_tokens: int, rows: int | None
) -> tuple[OurRoute, OurRoute]:
    """Both ways, cold prefills and decoding in one engine, what they are compared with in others.

    The engines have different salts, and so share no chunk.
    """
    reuse, decode = OurRoute(REUSE), OurRoute(DECODE)
    config = PagerConfig(pool_tokens=POOL_TOKENS, host_bytes=0, rows=rows)
    with (
        Engine(model, config) as engine,
        Engine(model, config, salt="reusing") as reusing,
        Engine(model, config, salt="scoring") as scoring,
    ):
        for number, prompt in enumerate(prompts):
            with engine.session() as cold, reusing.session() as warm:
                cold.prefill(prompt)
                text = decoded(cold, sampling, new_tokens)
                warm.prefill(prompt[: prefix_tokens(len(prompt), number)])
                warm.prefill(prompt)
                reuse.add(text, decoded(warm, sampling, new_tokens))
                reuse.add_kv(cold, warm)
                again, prefilled = scored(scoring, prompt, text, sampling)
                with prefilled:
                    decode.add(text, again)
                    decode.add_kv(cold, prefilled)
    return reuse, decode


def measure_text(asked: Asked, subject: str, text: str, model: Any) -> None:
    o, report = asked.options, asked.report()
    prompts = make_prompts(subject, model, o.prompts)
    sampling = TEXTS[text]
    peer = compare_with_transformers(model, prompts, new_tokens=o.new_tokens, sampling=sampling)
    ours = through_kvpager(model, prompts, sampling, o.new_tokens, o.rows)
    for theirs in peer:
        add_row(report, subject, text, "transformers", theirs)
    for mine in ours:
        add_row(report, subject, text, "kvpager", mine)


def add_row(report: Report, subject: str, text: str, by: str, route: PeerRoute | OurRoute) -> None:
    logits = route.comparison if isinstance(route, PeerRoute) else route.logits
    kv = None if isinstance(route, PeerRoute) else route.kv
    forks = [fork for fork in route.first_forks if fork is not None]
    agreement = route.agreement
    if not logits.elements or (kv is not None and not kv.elements):
        raise harness.MissingNumberError(f"{subject}, {by}, {route.name}: nothing was compared")
    report.add(
        subject=subject,
        text=text,
        way=route.name,
        by=by,
        prompts=len(route.first_forks),
        forks=len(forks),
        first_fork=statistics.median(forks) if forks else NOT_APPLICABLE,
        logits_compared=logits.elements,
        differing_logits=logits.differing_elements,
        differing_share=100 * logits.differing_elements / logits.elements,
        differing_bits=logits.differing_bits,
        kv_bits_compared=NOT_APPLICABLE if kv is None else kv.bits,
        differing_kv_bits=NOT_APPLICABLE if kv is None else kv.differing_bits,
        logprobs_compared=agreement.tokens,
        differing_logprobs=agreement.differing,
        max_abs_delta_logprob=agreement.max_abs_delta,
        approx_kl=agreement.approx_kl,
        clip_fraction=agreement.clip_fraction,
    )


def judge(report: Report) -> None:
    ours = [row for row in report.rows if row["by"] == "kvpager"]
    theirs = [row for row in report.rows if row["by"] != "kvpager"]

    def total(rows: list[dict[str, Any]], *names: str) -> float:
        return sum(report.number(row, name) for row in rows for name in names)

    wrong = total(ours, "differing_bits", "differing_kv_bits", "differing_logprobs", "forks")
    compared = total(ours, "kv_bits_compared")
    report.judge(
        "kvpager: not one bit of logits, K/V or log-probabilities differs, and no text forks",
        wrong == 0,
        f"{total(ours, 'logits_compared'):,.0f} logits, {compared:,.0f} bits of K/V, "
        f"{total(ours, 'logprobs_compared'):,.0f} log-probabilities compared",
    )
    report.judge(
        "there is something to promise: transformers' logits differ, in every subject",
        all(
            total([row for row in theirs if row["subject"] == subject], "differing_logits") > 0
            for subject in dict.fromkeys(row["subject"] for row in theirs)
        ),
        f"{total(theirs, 'differing_logits'):,.0f} of {total(theirs, 'logits_compared'):,.0f} "
        f"logits differ, {total(theirs, 'forks'):.0f} of {total(theirs, 'prompts'):.0f} texts fork",
    )


def measure(asked: Asked) -> None:
    for subject in asked.options.subjects:
        model = subjects.load_model(subject)
        for text in asked.options.texts:
            measure_text(asked, subject, text, model)
    judge(asked.report())


STUDY = Study(
    measure,
    (
        Table(
            "exactness",
            "What exactness is worth: reuse and decode against one prefill of the same tokens",
            COLUMNS,
        ),
    ),
    (
        Option(
            "subjects",
            ["untied-bf16", "untied-fp32", "shipped-bf16", "shipped-fp32"],
            quick=["shipped-bf16"],
        ),
        Option("texts", list(TEXTS), quick=["greedy"], among=TEXTS),
        Option("prompts", 30, quick=4),
        Option("new-tokens", 40, quick=8),
        Option("rows", None, help="M of kvpager; by default what it chooses", kind=int),
    ),
    {"transformers_attention": "sdpa"},
)

if __name__ == "__main__":
    STUDY.main()
