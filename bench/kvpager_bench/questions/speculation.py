"""The gain of speculation, and a check that it changes no token, log-probability or K/V.

    kvpager bench speculation
    kvpager bench speculation -- --full
    kvpager bench speculation -- --cases questions,sampled

"questions" is the shipped model's own task: a document, and every key of it asked for in turn; the
answers are copied from the document. "loop" is its greedy text without a question, which falls into
a period. Neither "sampled" text, at temperature 1, nor that of a model with random weights repeats
itself, and there speculation can only cost: by looking for what is not there (prompt lookup), or by
proposing what is always wrong. A proposer that knows the text shows what the best one would reach.

A draft model needs a target that is dearer than itself: "shipped-deep" is the shipped model with
further layers that add nothing, which says the same and takes longer, and its draft is the shipped
model, rounded to bfloat16.

Each run is compared with plain decode by every bit of its tokens, log-probabilities and K/V.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from kvpager import Dense, Engine, PagerConfig, Session, TopK
from kvpager.cli.needles import END
from kvpager.drafts import DraftModel
from kvpager.speculation import PromptLookup, SpeculationStats
from kvpager.speculation.speculation import Speculate
from kvpager.verify.bits import Comparison, compare_bits
from kvpager_bench import harness, subjects
from kvpager_bench.harness import NOT_APPLICABLE, Column, Report, Subject
from kvpager_bench.study import Asked, Option, Study, Table

CHUNKS = 32
POOL_TOKENS = 4096
DEEP = "shipped-deep"
DEEP_LAYERS = 16
DRAFT = "draft"
SPEEDUP = 1.5  # of plain decode, that copy-heavy text has to reach
COPY_HEAVY = 1.5  # accepted tokens per forward that copy-heavy text has to reach
COPYING = ("questions", "loop")
COMPARED = {  # proposers as figures name them, and what stands beside them
    "prompt-lookup": ("prompt lookup", "plain decode"),
    DRAFT: ("draft model", "the same without a draft"),
}
SPOKEN_BEFORE = 8  # tokens, so that a draft model has come to the end of the context
RUNS = {subjects.SHIPPED: 5, DEEP: 2}  # times as many where a step takes milliseconds
LEAST_SPEED = 0.9  # of plain decode's, where speculation can only cost

COLUMNS = (
    Column("text", text=True),
    Column("shape", text=True),
    Column("proposer", text=True),
    Column("context", "tokens"),
    Column("tokens"),
    Column("forwards"),
    Column("accepted_per_forward"),
    Column("tokens_per_forward"),
    Column("acceptance", "%", optional=True),
    Column("plain", "tokens/s"),
    Column("speculated", "tokens/s"),
    Column("speedup", "x"),
    Column("bits_compared"),
    Column("differing_bits"),
)


@dataclass(frozen=True)
class Case:
    """A text to be generated: from a session that holds `context`, each prompt is appended and
    continued by at most `new_tokens`."""

    name: str
    shape: str
    context: np.ndarray[Any, Any]
    prompts: list[list[int]]
    new_tokens: int
    eos: int | None = None
    temperature: float = 0.0


@dataclass
class Outcome:
    """What a run left behind."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kv: list[Any] = field(default_factory=list)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)


class KnownText:
    """Proposes the text itself, or what is always wrong."""

    def __init__(self, text: Sequence[int], *, right: bool) -> None:
        self._text = np.asarray(text)
        self._right = right

    def propose(self, tokens: np.ndarray[Any, Any], count: int) -> list[int]:
        known: list[int] = self._text[len(tokens) : len(tokens) + count].tolist()
        return known if self._right else [token ^ 1 for token in known]


def questions(tokens: int, shape: str) -> Case:
    asked = subjects.questions(tokens, min(24, tokens // 128), seed=7, quiet=128)
    longest = max(len(answer) for answer in asked.answers)
    return Case("questions", shape, asked.document.ids, asked.prompts, longest, eos=END)


def continued(
    name: str, shape: str, model: Any, context: int, new_tokens: int, temperature: float
) -> Case:
    ids = subjects.random_ids(model, context, seed=3)
    return Case(name, shape, ids[:-1], [ids[-1:].tolist()], new_tokens, temperature=temperature)


def deepened(model: Any, layers: int) -> Any:
    """The same function by more layers: those that are added give back what they are given."""
    config = copy.deepcopy(model.config)
    more = layers - config.num_hidden_layers
    config.update(
        {
            "num_hidden_layers": layers,
            "layer_types": [*config.layer_types, *["full_attention"] * more],
            "no_rope_layers": [*config.no_rope_layers, *[1] * more],
        }
    )
    deep: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    deep.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for layer in deep.model.layers[model.config.num_hidden_layers :]:
            for out in (layer.self_attn.o_proj, layer.mlp.down_proj):
                for parameter in out.parameters():
                    parameter.zero_()
    return deep.eval()


def generate(base: Session, case: Case, speculate: Speculate) -> Outcome:
    """Everything the case asks for, in a fork of a session that holds its context."""
    outcome = Outcome()
    with base.fork() as session:
        for prompt in case.prompts:
            session.append(prompt)
            for token in session.generate(
                case.new_tokens,
                eos=case.eos,
                temperature=case.temperature,
                seed=11,
                speculate=speculate,
                logprobs=True,
                stream="tokens",
            ):
                outcome.tokens.append(token.id)
                outcome.logprobs.append(token.logprob)
        outcome.speculation = session.speculation
        for layer in range(session.core.facts.layout.layers):
            outcome.kv.extend(session.sequence.read_kv(layer, 0, session.committed))
    return outcome


def compare(outcome: Outcome, plain: Outcome) -> Comparison:
    result = compare_bits(np.array(outcome.tokens), np.array(plain.tokens), "token")
    result += compare_bits(
        np.array(outcome.logprobs, np.float32),
        np.array(plain.logprobs, np.float32),
        "log-probability",
    )
    for ours, theirs in zip(outcome.kv, plain.kv):
        result += compare_bits(ours, theirs, "K/V")
    return result


def measure_case(
    case: Case, model: Any, runs: int, proposers: Sequence[str], report: Report
) -> None:
    config = PagerConfig(pool_tokens=POOL_TOKENS, selection=TopK(chunks=CHUNKS))
    draft = None
    if DRAFT in proposers:
        draft = DraftModel(subjects.load_model("shipped-bf16"), selection=Dense())
    with Engine(model, config, draft=draft) as engine, engine.session() as base:
        base.prefill(case.context)
        if draft is not None:  # what it holds of the context was there before the question
            base.generate(SPOKEN_BEFORE, eos=None, speculate=DRAFT).tokens.tolist()
            base.trim(len(case.context))
        plain = generate(base, case, None)
        for proposer in proposers:
            text = [*case.context, *case.prompts[0], *plain.tokens]
            speculate: dict[str, Speculate] = {
                DRAFT: DRAFT,
                "prompt-lookup": PromptLookup,
                "all right": partial(KnownText, text, right=True),
                "all wrong": partial(KnownText, text, right=False),
            }
            make = speculate[proposer]
            outcome = generate(base, case, make)
            comparison = compare(outcome, plain)
            timing = harness.interleave(
                {
                    "plain": Subject(partial(generate, base, case, None)),
                    "speculated": Subject(partial(generate, base, case, make)),
                },
                runs=runs,
            )
            stats, count = outcome.speculation, len(plain.tokens)
            report.add(
                text=case.name,
                shape=case.shape,
                proposer=proposer,
                context=len(case.context),
                tokens=count,
                forwards=stats.forwards,
                accepted_per_forward=stats.accepted / stats.forwards,
                tokens_per_forward=stats.tokens_per_forward,
                acceptance=100 * stats.acceptance if stats.proposed else NOT_APPLICABLE,
                plain=count / timing["plain"].median,
                speculated=count / timing["speculated"].median,
                speedup=timing["plain"].median / timing["speculated"].median,
                bits_compared=comparison.bits,
                differing_bits=comparison.differing_bits,
            )
            if proposer in COMPARED:
                called, peer = COMPARED[proposer]
                tokens = harness.tokens_name(len(case.context))
                figure = f"speculation ({called}), {case.name} at {tokens}, {case.shape}"
                rates = count / timing["speculated"].median, count / timing["plain"].median
                aim = SPEEDUP if case.name in COPYING else None
                report.compare(figure, *rates, peer, "tokens/s", aim)


def judge(report: Report) -> None:
    copying = [
        row for row in report.rows if row["text"] in COPYING and row["proposer"] == "prompt-lookup"
    ]
    if copying:
        report.judge(
            f"prompt lookup has more than {COPY_HEAVY} accepted tokens per forward where the model "
            "copies",
            all(report.number(row, "accepted_per_forward") > COPY_HEAVY for row in copying),
            ", ".join(
                f"{row['text']} {report.number(row, 'accepted_per_forward'):.2f}" for row in copying
            ),
        )
    differing = sum(report.number(row, "differing_bits") for row in report.rows)
    compared = sum(report.number(row, "bits_compared") for row in report.rows)
    report.judge(
        "tokens, log-probabilities and K/V are those of plain decode, to the bit",
        differing == 0,
        f"{differing:,.0f} of {compared:,.0f} bits differ",
    )
    wasted = [row for row in report.rows if row["text"] not in COPYING]
    costs = [row for row in wasted if row["proposer"] != "all right"]
    if costs:
        report.judge(
            f"where nothing repeats, or all is wrong, decode keeps {LEAST_SPEED:.0%} of its speed",
            all(report.number(row, "speedup") >= LEAST_SPEED for row in costs),
            ", ".join(
                f"{row['shape']} {row['proposer']} {report.number(row, 'speedup'):.2f}x"
                for row in costs
            ),
        )


def cases(o: Any) -> Iterator[tuple[Case, Any, tuple[str, ...]]]:
    """The texts to generate, each with its model and the proposers to compare."""
    shipped = subjects.load_model(subjects.SHIPPED)
    every, pair = ("prompt-lookup", "all wrong", "all right"), ("prompt-lookup", DRAFT)

    def text(name: str, shape: str, model: Any, temperature: float) -> Case:
        return continued(name, shape, model, 1024, o.new_tokens, temperature)

    if "questions" in o.cases:
        for tokens in o.contexts:
            yield questions(tokens, subjects.SHIPPED), shipped, pair[:1]
    if "loop" in o.cases:
        yield text("loop", subjects.SHIPPED, shipped, 0.0), shipped, pair[:1]
    if DEEP in o.cases:
        deep = deepened(shipped, DEEP_LAYERS)
        yield questions(o.contexts[0], DEEP), deep, pair
        yield text("loop", DEEP, deep, 0.0), deep, pair
        yield text("lightly sampled", DEEP, deep, 0.6), deep, pair
    if "sampled" in o.cases:
        yield text("sampled", subjects.SHIPPED, shipped, 1.0), shipped, every
    if "random" in o.cases:
        for shape in o.shapes:
            model = subjects.load_model(shape, layers=o.layers)
            yield text("random", shape, model, 1.0), model, every


def measure(asked: Asked) -> None:
    for case, model, proposers in cases(asked.options):
        runs = asked.options.runs * RUNS.get(case.shape, 1)
        measure_case(case, model, runs, proposers, asked.report())
    judge(asked.report())


CASES = ("questions", "loop", DEEP, "sampled", "random")
STUDY = Study(
    measure,
    (
        Table(
            "speculation",
            "Speculation: tokens per forward, tokens per second, and bits that differ",
            COLUMNS,
        ),
    ),
    (
        Option("cases", CASES, among=CASES),
        Option("shapes", ["gqa8-bf16"], [], ["gqa8-fp32", "gqa8-bf16"], "with random weights"),
        Option("layers", 2, full=8, help="of them"),
        Option("contexts", [4096], [1024], [4096, 32768], "tokens, of questions"),
        Option("new-tokens", 128, quick=32),
        Option("runs", 1, full=3),
    ),
    {"chunks": CHUNKS, "pool_tokens": POOL_TOKENS},
)

if __name__ == "__main__":
    STUDY.main()
