"""What many passes over one long prefix cost while a draft model guesses, and after its resets.

    kvpager bench companions
    kvpager bench companions -- --full
    kvpager bench companions -- --contexts 16384 --passes 12 --drafts windowed

A pass brings another text into the session: the same prefix, in which every second pass changes a
token near the end, and a suffix of its own. Then the session goes on, with speculation. So every
pass cuts the text further back than a windowed draft model remembers: its trim is refused.

    kept     only the companion is emptied: the target computes what has changed
    wiped    the behaviour this is put beside: where either trim fails both caches are dropped, so
             that the whole prompt is computed again. The session is replaced by one whose salt is
             new, which finds nothing of its own by hash

Both ways make every trim in the same way and count the same refusals; with a dense draft none is
refused, and they are the same. The shipped model's drafts are itself, rounded to bfloat16 (dense)
or with a window in every layer (windowed); a larger model with random weights has its own first
layers, whose guesses are worth little, but it shows what a wipe costs where a forward is dear.

"companions_reset" looks at acceptance around one reset, over the same text before it and after it:
in the first chunk of tokens, in which the draft is fed the text again, and in those that follow.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM

from kvpager import Engine, PagerConfig, Session
from kvpager.drafts import DraftModel
from kvpager.needles import NeedleTask
from kvpager.speculation import SpeculationStats
from kvpager_bench import harness, subjects
from kvpager_bench.harness import NOT_APPLICABLE, Cell, Column, Report

NONE, DENSE, WINDOWED = "none", "dense", "windowed"
DRAFTS = (NONE, DENSE, WINDOWED)
KEPT, WIPED = "kept", "wiped"
CHUNK_TOKENS = 64
REWIND = CHUNK_TOKENS  # of a windowed draft: less than a pass cuts away
LEAST_REUSE = 92.0  # percent of the prompts' tokens
FEWER = 10.0  # times as many tokens that a wipe computes at CONTEXT
CONTEXT = 8192
RECOVERED = 0.8  # of the acceptance before a reset that is back one chunk after it
EDIT_BEFORE_END = 96  # tokens before the prefix's end where every second pass changes one
DRAFT_LAYERS = 2
WARM_TOKENS = 2 * CHUNK_TOKENS  # generated while the draft is fed the prompt
AFTER_TOKENS = 3 * CHUNK_TOKENS
FEW_TOKENS = 32
WHEN = ("before, first chunk", "before, then", "right after", "one chunk after")
TEMPERATURE = 0.6  # at 1 the shipped model's text can hardly be guessed, at 0 it is a short period
SEED = 11

PASS_COLUMNS = (
    Column("shape", text=True),
    Column("draft", text=True),
    Column("way", text=True),
    Column("prefix", "tokens"),
    Column("passes"),
    Column("prompt_tokens"),
    Column("computed", "tokens"),
    Column("reuse", "%", digits=4),
    Column("companion_refused"),
    Column("prompt_s", "s"),
    Column("generate_s", "s"),
    Column("forwards"),
    Column("tokens_per_forward"),
    Column("acceptance", "%", optional=True),
    Column("differing_tokens"),
)
RESET_COLUMNS = (
    Column("draft", text=True),
    Column("prefix", "tokens"),
    Column("when", text=True),
    Column("refused"),
    Column("tokens"),
    Column("forwards"),
    Column("proposed"),
    Column("accepted"),
    Column("acceptance", "%", optional=True),
    Column("tokens_per_forward"),
    Column("draft_lags", "tokens"),
)


@dataclass(frozen=True)
class Size:
    """How much is asked: tokens of the prefix, of each pass's suffix and of its continuation."""

    prefix: int
    passes: int
    suffix: int
    new_tokens: int
    window: int


@dataclass
class Outcome:
    """The results of one way's passes, without the first, cold prompt."""

    tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    computed: int = 0
    refused: int = 0
    prompt_s: float = 0.0
    generate_s: float = 0.0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def reuse(self) -> float:
        """Percent of the prompts' tokens."""
        return 100 * (1 - self.computed / self.prompt_tokens)


class Way:
    """One session over the passes, in one of the two ways."""

    def __init__(self, engine: Engine, name: str, speculate: str | None) -> None:
        self.engine = engine
        self.name = name
        self.outcome = Outcome()
        self._speculate = speculate
        self._sessions = 0
        self.session = self._fresh()

    def _fresh(self) -> Session:
        """A session that finds nothing of another's by hash."""
        self._sessions += 1
        salt = f"{self.name} {self._sessions}"
        return self.engine.adopt(self.engine.pager.sequence(salt=salt))

    def one(self, ids: np.ndarray[Any, Any], new_tokens: int, *, counts: bool) -> None:
        """One pass: its text, and what follows it."""
        out, trims = self.outcome, self.engine.core.transcripts.trims
        refused = trims.trim_companion_refused
        start = time.perf_counter()
        self.session.trim(common_prefix(self.session.tokens, ids))
        refused = trims.trim_companion_refused - refused
        if refused and self.name == WIPED:
            out.speculation += self.session.speculation
            self.session.close()
            self.session = self._fresh()
        reuse = self.session.update(ids)
        middle = time.perf_counter()
        out.tokens += self.session.generate(
            new_tokens,
            temperature=TEMPERATURE,
            seed=SEED,
            eos=None,
            speculate=self._speculate,
            stream="tokens",
        )
        end = time.perf_counter()
        out.refused += refused
        if counts:
            out.prompt_tokens += reuse.total
            out.computed += reuse.computed
            out.prompt_s += middle - start
            out.generate_s += end - middle

    def close(self) -> Outcome:
        self.outcome.speculation += self.session.speculation
        self.session.close()
        return self.outcome


def common_prefix(held: np.ndarray[Any, Any], ids: np.ndarray[Any, Any]) -> int:
    count = min(len(held), len(ids))
    different = np.flatnonzero(held[:count] != ids[:count])
    return int(different[0]) if different.size else count


def texts(model: Any, size: Size) -> list[np.ndarray[Any, Any]]:
    """What each pass is about."""
    prefix = message(model, size.prefix, seed=7)
    vocab = int(model.get_input_embeddings().weight.shape[0])
    passes = []
    for number in range(size.passes):
        if number % 2:
            place = size.prefix - EDIT_BEFORE_END
            prefix = prefix.copy()
            prefix[place] = 8 + (prefix[place] - 7) % (vocab - 8)
        passes.append(np.concatenate([prefix, message(model, size.suffix, seed=100 + number)]))
    return passes


def message(model: Any, tokens: int, seed: int) -> np.ndarray[Any, Any]:
    """Text that the shipped model was trained on; random token ids for another vocabulary."""
    task = NeedleTask(seed=seed)
    if model.config.vocab_size != task.vocab:
        return subjects.random_ids(model, tokens, seed=seed)
    return task.filler(tokens).astype(np.int32)


def windowed(model: Any, window: int, layers: int | None = None) -> Any:
    """A model's first layers, or all, with a window in every one of them; weights are shared."""
    config = copy.deepcopy(model.config)
    layers = layers or config.num_hidden_layers
    config.update(
        {
            "num_hidden_layers": layers,
            "use_sliding_window": True,
            "sliding_window": window,
            "layer_types": ["sliding_attention"] * layers,
        }
    )
    fresh: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    mine = fresh.state_dict()
    weights = {name: value for name, value in model.state_dict().items() if name in mine}
    fresh.load_state_dict(weights, assign=True)
    fresh.tie_weights()
    return fresh.to(next(model.parameters()).dtype).eval()


def draft_of(shape: str, model: Any, name: str, size: Size) -> DraftModel | None:
    """The draft of that name, with room for all of two texts."""
    if name == NONE:
        return None
    if name == DENSE:
        return DraftModel(subjects.load_model("shipped-bf16"), pool_tokens=pool_tokens(size))
    layers = None if shape == subjects.SHIPPED else DRAFT_LAYERS
    draft = windowed(model, size.window, layers)
    return DraftModel(draft, pool_tokens=pool_tokens(size), rewind_tokens=REWIND)


def pool_tokens(size: Size) -> int:
    """Two texts, with what is unsealed."""
    tokens = 2 * (size.prefix + size.suffix + size.new_tokens) + 1024
    return -(-tokens // CHUNK_TOKENS) * CHUNK_TOKENS


def open_engine(shape: str, model: Any, name: str, size: Size) -> Engine:
    config = PagerConfig(pool_tokens=pool_tokens(size), chunk_tokens=CHUNK_TOKENS)
    return Engine(model, config, draft=draft_of(shape, model, name, size))


def measure_passes(
    shape: str, model: Any, name: str, size: Size, plain: list[int], report: Report
) -> list[int]:
    """Rows of one draft. plain: what the passes generate without one; empty for these themselves.

    Returns what was generated. The ways take turns, pass by pass.
    """
    asked = texts(model, size)
    names = (KEPT,) if name == NONE else (KEPT, WIPED)
    with open_engine(shape, model, name, size) as engine:
        ways = [Way(engine, way, None if name == NONE else "draft") for way in names]
        for number, ids in enumerate(asked):
            for way in ways if number % 2 else reversed(ways):
                way.one(ids, size.new_tokens, counts=number > 0)
        for way in ways:
            out = way.close()
            generated = len(out.tokens)
            report.add(
                shape=shape,
                draft=name,
                way=way.name,
                prefix=size.prefix,
                passes=size.passes,
                prompt_tokens=out.prompt_tokens,
                computed=out.computed,
                reuse=out.reuse,
                companion_refused=out.refused,
                prompt_s=out.prompt_s,
                generate_s=out.generate_s,
                forwards=out.speculation.forwards or generated,
                tokens_per_forward=out.speculation.tokens_per_forward or 1.0,
                acceptance=_percent(out.speculation),
                differing_tokens=differing(out.tokens, plain or out.tokens),
            )
            print(
                f"{shape}, {name}, {way.name}: {out.reuse:.1f}% reused, {out.refused} trims "
                f"refused, {out.prompt_s:.2f} s for prompts",
                flush=True,
            )
    return ways[0].outcome.tokens


def differing(tokens: list[int], expected: list[int]) -> int:
    """Tokens that are not the expected ones; those that are missing are among them."""
    pairs = sum(one != other for one, other in zip(tokens, expected))
    return pairs + abs(len(tokens) - len(expected))


def measure_reset(model: Any, name: str, size: Size, report: Report) -> None:
    """Acceptance around one cut that a windowed draft refuses; a dense one is there to compare.

    The text after the cut equals the one before it, so guesses should be accepted as often.
    """
    ids = texts(model, size)[0]
    spans = (CHUNK_TOKENS, AFTER_TOKENS)
    with open_engine(subjects.SHIPPED, model, name, size) as engine, engine.session() as session:
        session.prefill(ids)
        speak(session, [WARM_TOKENS])
        start, trims = session.length, engine.core.transcripts.trims
        before = speak(session, spans)
        refused = trims.trim_companion_refused
        session.trim(start)
        refused = trims.trim_companion_refused - refused
        after = speak(session, spans)
    for when, counts, told in zip(WHEN, (0, 0, refused, refused), (*before, *after)):
        stats = told.stats
        report.add(
            draft=name,
            prefix=size.prefix,
            when=when,
            refused=counts,
            tokens=told.tokens,
            forwards=stats.forwards,
            proposed=stats.proposed,
            accepted=stats.accepted,
            acceptance=_percent(stats),
            tokens_per_forward=stats.tokens_per_forward,
            draft_lags=told.lags,
        )
        print(f"{name}, {when}: {stats.accepted} of {stats.proposed} accepted", flush=True)


@dataclass(frozen=True)
class Span:
    """A stretch of generated text, and how far the draft was behind the target at its end."""

    tokens: int
    stats: SpeculationStats
    lags: int


def speak(session: Session, spans: Sequence[int]) -> list[Span]:
    """Generates once, and tells each of the stretches apart."""
    stream = session.generate(
        sum(spans), temperature=TEMPERATURE, seed=SEED, eos=None, speculate="draft", stream="tokens"
    )
    told = []
    for count in spans:
        before = session.speculation
        for _ in islice(stream, count):
            pass
        now = session.speculation
        stats = SpeculationStats(
            now.forwards - before.forwards,
            now.proposed - before.proposed,
            now.accepted - before.accepted,
            now.tokens - before.tokens,
        )
        (held,) = session.transcript.companions
        told.append(Span(count, stats, max(0, session.committed - held.length)))
    return told


def _percent(stats: SpeculationStats) -> Cell:
    return 100 * stats.acceptance if stats.proposed else NOT_APPLICABLE


def judge_passes(report: Report) -> None:
    rows = {(row["shape"], row["draft"], row["prefix"], row["way"]): row for row in report.rows}
    for (shape, draft, prefix, way), kept in rows.items():
        if draft != WINDOWED or way != KEPT:
            continue
        wiped = rows[shape, draft, prefix, WIPED]
        at = f"{harness.tokens_name(int(report.number(kept, 'prefix')))}, {shape}"
        aims = report.number(kept, "prefix") >= CONTEXT
        for figure, column, unit, aim in (
            ("tokens computed", "computed", "tokens", FEWER),
            ("seconds for prompts", "prompt_s", "s", None),
        ):
            report.compare(
                f"{figure} over {kept['passes']} passes whose draft refuses, {at}",
                ours=report.number(kept, column),
                theirs=report.number(wiped, column),
                peer="wiping both caches",
                unit=unit,
                aim=aim if aims else None,
                lower_is_better=True,
            )
    for prefix in dict.fromkeys(row["prefix"] for row in report.rows):
        mine = [row for row in report.rows if row["prefix"] == prefix and row["way"] == KEPT]
        least = min(report.number(row, "reuse") for row in mine)
        if int(prefix) >= CONTEXT:
            report.judge(
                f"at {harness.tokens_name(int(prefix))}, {LEAST_REUSE:g}% of the prompts' tokens "
                "are reused whatever the draft model refuses",
                least >= LEAST_REUSE,
                f"at least {least:.1f}%",
            )
    windows = [row for row in report.rows if row["draft"] == WINDOWED]
    if windows:
        report.judge(
            "a windowed draft refuses the trim of every pass but the first",
            all(row["companion_refused"] == int(row["passes"]) - 1 for row in windows),
            ", ".join(f"{row['companion_refused']} of {int(row['passes']) - 1}" for row in windows),
        )
    different = sum(int(row["differing_tokens"]) for row in report.rows)
    report.judge(
        "all generate the tokens of plain decode", different == 0, f"{different} tokens differ"
    )


def judge_reset(report: Report) -> None:
    for draft in dict.fromkeys(str(row["draft"]) for row in report.rows):
        mine = {row["when"]: row for row in report.rows if row["draft"] == draft}
        before, after = (
            report.number(mine[when], "accepted") / report.number(mine[when], "forwards")
            for when in (WHEN[1], WHEN[3])
        )
        report.judge(
            f"{draft} draft: one chunk after the cut, a forward accepts at least "
            f"{RECOVERED:.0%} of what it accepted before",
            after >= RECOVERED * before,
            f"{after:.2f} and {before:.2f} tokens per forward",
        )


def sizes(arguments: argparse.Namespace) -> list[Size]:
    quick, full = arguments.quick, arguments.full
    contexts = arguments.contexts or (
        [1024] if quick else [CONTEXT, 4 * CONTEXT] if full else [CONTEXT]
    )
    passes = arguments.passes or (3 if quick else 12 if full else 8)
    suffix, new_tokens, window = (64, 160, 128) if quick else (256, 128, 512)
    return [Size(context, passes, suffix, new_tokens, window) for context in contexts]


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument("--contexts", type=harness.parse_ints, help="tokens of the prefix")
    parser.add_argument("--passes", type=int, help="2 or more")
    parser.add_argument("--drafts", type=harness.parse_list, default=list(DRAFTS))
    parser.add_argument("--shapes", type=harness.parse_list, help="of the target model")
    arguments = parser.parse_args()
    if arguments.passes is not None and arguments.passes < 2:
        parser.error(f"--passes is {arguments.passes}; expected 2 or more: the first is cold")
    if unknown := [name for name in arguments.drafts if name not in DRAFTS]:
        parser.error(f"--drafts has {unknown[0]!r}; expected some of {', '.join(DRAFTS)}")
    shapes = arguments.shapes or (
        [subjects.SHIPPED] if arguments.quick else [subjects.SHIPPED, "gqa8-bf16"]
    )
    record = harness.start(arguments)
    chosen = sizes(arguments)
    settings = {
        "chunk_tokens": CHUNK_TOKENS,
        "rewind_tokens": REWIND,
        "temperature": TEMPERATURE,
        "suffix": chosen[0].suffix,
        "new_tokens": chosen[0].new_tokens,
        "window": chosen[0].window,
    }
    passes = Report(
        harness.report_name("companions", arguments),
        "Passes over a long prefix with a draft model whose trims are refused",
        PASS_COLUMNS,
        settings,
        record,
    )
    reset = Report(
        harness.report_name("companions_reset", arguments),
        "Acceptance before and after a draft model's cache begins anew",
        RESET_COLUMNS,
        settings,
        record,
    )
    drafts = [name for name in DRAFTS if name in (NONE, *arguments.drafts)]
    for shape in shapes:
        model = subjects.load_model(shape)
        for wanted in chosen:
            size = wanted
            if shape != subjects.SHIPPED:  # random weights: guesses are hardly ever right
                size = replace(wanted, new_tokens=min(wanted.new_tokens, FEW_TOKENS))
            plain: list[int] = []
            for name in drafts:
                if name == DENSE and shape != subjects.SHIPPED:
                    continue
                generated = measure_passes(shape, model, name, size, plain, passes)
                plain = plain or generated
            for name in drafts:
                if name != NONE and shape == subjects.SHIPPED:
                    measure_reset(model, name, size, reset)
    judge_passes(passes)
    passes.finish()
    if reset.rows:
        judge_reset(reset)
        reset.finish()


if __name__ == "__main__":
    main()
