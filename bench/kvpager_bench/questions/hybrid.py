"""What recurrent layers cost a conversation that changes: tokens computed again, bytes, and bits.

    kvpager bench hybrid
    kvpager bench hybrid -- --full
    kvpager bench hybrid -- --every 1,4 --contexts 8192

A model of Qwen3-Next's kind with random weights: three layers with a recurrent state to one of
attention. A state cannot be cut like K/V, so it is kept every k chunks, and a cut goes back to the
one before it: what lies between is computed again. Three turns: a prompt and an answer; the answer
is dropped and another message takes its place; a token inside the prompt is changed.

Every turn is compared with a cold run: prompt-end logits, sealed K/V and what is generated, as raw
bits. "hybrid_budget" has memory for a few states only: how far back the nearest one is, over all
positions that a text could be cut at, after a prompt and after some edits, by who has to go.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from kvpager import Engine, PagerConfig, Session
from kvpager.config import CHECKPOINT_POLICIES
from kvpager.recurrent.checkpoints import Checkpoints
from kvpager.recurrent.cursor import StateCursor
from kvpager.verify.bits import Comparison, compare_bits
from kvpager_bench import harness, subjects
from kvpager_bench.harness import Column, Report

CHUNK_TOKENS = 64
MESSAGE_TOKENS = 100
ANSWER_TOKENS = 48
UNALIGNED = 27  # by so much a prompt does not fill its last chunk
EDITS = 3  # before the gaps are looked at again
CONTEXT = 4096
TIMED = 32  # states put and asked for
DEFAULT_POLICY = CHECKPOINT_POLICIES[0]

TURN_COLUMNS = (
    Column("every", "chunks"),
    Column("turn"),
    Column("tokens"),
    Column("changed_at"),
    Column("computed", "tokens"),
    Column("recomputed", "tokens"),
    Column("at_most", "tokens"),
    Column("bits_compared"),
    Column("differing_bits"),
)
COST_COLUMNS = (
    Column("every", "chunks"),
    Column("context", "tokens"),
    Column("layers"),
    Column("recurrent_layers"),
    Column("states"),
    Column("state_kib", "KiB"),
    Column("mean_back", "tokens"),
    Column("worst_back", "tokens"),
    Column("kib_per_token", "KiB"),
    Column("kv_kib_per_token", "KiB"),
    Column("forward_ms", "ms"),
    Column("copy_us", "us"),
    Column("put_us", "us"),
    Column("get_us", "us"),
    Column("share_of_forward", "%"),
)
BUDGET_COLUMNS = (
    Column("policy", text=True),
    Column("room", "states"),
    Column("context", "tokens"),
    Column("after", text=True),
    Column("held"),
    Column("evicted"),
    Column("mean_back", "tokens"),
    Column("worst_back", "tokens"),
)


@dataclass(frozen=True)
class Turn:
    """A turn's text and what came of it.

    outcome: prompt-end logits, K/V of the sealed chunks and the generated tokens.
    """

    ids: np.ndarray[Any, Any]
    changed: int
    computed: int
    outcome: list[Any]


def load_model(layers: int) -> Any:
    """Random weights, and text that does not fall into repeating itself."""
    config = Qwen3NextConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        mlp_only_layers=list(range(layers)),  # no experts
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        initializer_range=0.05,
    )
    torch.manual_seed(0)
    model: Any = Qwen3NextForCausalLM(config)
    return model.eval()


def open_engine(model: Any, **options: Any) -> Engine:
    """With room for a few texts of this size."""
    config = PagerConfig(
        pool_tokens=256 * CHUNK_TOKENS, chunk_tokens=CHUNK_TOKENS, exact="reuse", **options
    )
    return Engine(model, config)


def turn(session: Session, ids: np.ndarray[Any, Any]) -> Turn:
    """Brings a text into a session, reads what is exact of it, and has it continued."""
    reuse = session.update(ids)
    outcome: list[Any] = [session.logits]
    sealed = session.committed // CHUNK_TOKENS * CHUNK_TOKENS
    for layer in range(session.core.layout.layers):
        outcome.extend(session.sequence.read_kv(layer, 0, sealed))
    tokens = session.generate(ANSWER_TOKENS, temperature=1.0, seed=5, eos=None).tokens.tolist()
    outcome.append(np.array(tokens, np.int32))
    return Turn(ids, reuse.changed, reuse.computed, outcome)


def conversation(session: Session, prompt: np.ndarray[Any, Any]) -> list[Turn]:
    """Three turns."""
    model = session.core.model
    first = turn(session, prompt)
    instead = np.concatenate(
        [prompt, subjects.random_ids(model, MESSAGE_TOKENS, seed=21)], dtype=np.int32
    )
    second = turn(session, instead)
    more = subjects.random_ids(model, MESSAGE_TOKENS, seed=22)
    edited = change(np.concatenate([session.tokens, more]), 3 * len(prompt) // 7)
    return [first, second, turn(session, edited)]


def change(ids: np.ndarray[Any, Any], position: int) -> np.ndarray[Any, Any]:
    """The same text with another token at a position."""
    changed = ids.astype(np.int32)
    changed[position] = 8 + (changed[position] - 7) % 1016
    return changed


class ColdRuns:
    """The same texts in sessions that find nothing of another's; each text once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._outcomes: dict[bytes, list[Any]] = {}

    def of(self, ids: np.ndarray[Any, Any]) -> list[Any]:
        text = ids.astype(np.int32).tobytes()
        if text not in self._outcomes:
            salt = f"cold {len(self._outcomes)}"
            with self._engine.adopt(self._engine.pager.sequence(salt=salt)) as session:
                cold = turn(session, ids)
            if cold.computed != len(ids):
                raise RuntimeError(f"a cold run computed {cold.computed} of {len(ids)} tokens")
            self._outcomes[text] = cold.outcome
        return self._outcomes[text]


def compare(mine: Sequence[Any], theirs: Sequence[Any]) -> Comparison:
    """Two outcomes of one text."""
    total = compare_bits(mine[0], theirs[0], "logit")
    for one, other in zip(mine[1:-1], theirs[1:-1]):
        total += compare_bits(one, other, "K/V")
    return total + compare_bits(mine[-1], theirs[-1], "token")


def measure(model: Any, context: int, every: Sequence[int], turns: Report, costs: Report) -> None:
    """A conversation for each k, what a state costs there, then the cold runs."""
    prompt = subjects.random_ids(model, context - UNALIGNED, seed=20)
    talks: dict[int, list[Turn]] = {}
    for k in every:
        with open_engine(model, checkpoint_chunks=k) as engine, engine.session() as session:
            talks[k] = conversation(session, prompt)
            add_costs(k, context, engine, session, costs)
        print(f"a state every {k} chunks: three turns are done", flush=True)
    with open_engine(model, checkpoint_chunks=max(every)) as engine:
        cold = ColdRuns(engine)
        for k, talk in talks.items():
            for number, one in enumerate(talk):
                bits = compare(one.outcome, cold.of(one.ids))
                turns.add(
                    every=k,
                    turn=number + 1,
                    tokens=len(one.ids),
                    changed_at=one.changed,
                    computed=one.computed,
                    recomputed=one.computed - (len(one.ids) - one.changed),
                    at_most=k * CHUNK_TOKENS,
                    bits_compared=bits.bits,
                    differing_bits=bits.differing_bits,
                )
            print(f"a state every {k} chunks: compared with cold runs", flush=True)


def add_costs(k: int, context: int, engine: Engine, session: Session, report: Report) -> None:
    """What a state weighs, and what keeping one takes beside a forward of one chunk."""
    stats = engine.stats()
    states = stats["checkpoint_states"]
    bytes_each = stats["checkpoint_bytes"] / states
    back = steps_back(session)
    cursor = states_of(session)
    state = cursor.at(cursor.nearest(context))
    assert state is not None
    forward_s = chunk_seconds(engine)
    hashes = [number.to_bytes(16, "little") for number in range(TIMED)]
    store = Checkpoints(
        budget_bytes=TIMED * state.nbytes, every=1, chunk_tokens=CHUNK_TOKENS, policy=DEFAULT_POLICY
    )

    def put_all() -> None:
        for number in range(TIMED):
            store.put(cursor, hashes[: number + 1], state)

    put = harness.measure(put_all, runs=5)
    get = harness.measure(lambda: [store.get(cursor, key) for key in hashes], runs=5)
    copy = harness.measure(lambda: [tensor.clone() for tensor in state.tensors], runs=20)
    put_s, get_s = put.median / TIMED, get.median / TIMED
    layout = engine.layout
    kv = 2 * layout.layers * layout.kv_heads * layout.k_dim * 4
    kinds = list(engine.model.config.layer_types)
    report.add(
        every=k,
        context=context,
        layers=len(kinds),
        recurrent_layers=kinds.count("linear_attention"),
        states=states,
        state_kib=bytes_each / 1024,
        mean_back=statistics.fmean(back),
        worst_back=max(back),
        kib_per_token=bytes_each / 1024 / (k * CHUNK_TOKENS),
        kv_kib_per_token=kv / 1024,
        forward_ms=1e3 * forward_s,
        copy_us=1e6 * copy.median,
        put_us=1e6 * put_s,
        get_us=1e6 * get_s,
        share_of_forward=100 * (copy.median + put_s / k) / forward_s,
    )


def steps_back(session: Session) -> list[int]:
    """For each position that a text could be cut at, how many tokens before it a state is held."""
    cursor = states_of(session)
    return [cut - cursor.nearest(cut) for cut in range(1, session.committed)]


def states_of(session: Session) -> StateCursor:
    """What recurrent layers know of a session's text."""
    assert session.transcript.states is not None
    return session.transcript.states


def chunk_seconds(engine: Engine) -> float:
    """Of a forward of one chunk, which goes on from a state."""
    ids = subjects.random_ids(engine.model, 8 * CHUNK_TOKENS, seed=30)
    with engine.adopt(engine.pager.sequence(salt="timed")) as other:
        other.prefill(ids[:CHUNK_TOKENS])
        forwards, start = engine.core.runner.forwards, time.perf_counter()
        other.prefill(ids)
        return (time.perf_counter() - start) / (engine.core.runner.forwards - forwards)


def measure_budget(model: Any, context: int, room: int, report: Report) -> None:
    """How far back the nearest state is, where there is memory for `room` of them alone."""
    ids = subjects.random_ids(model, context, seed=20)
    with open_engine(model) as engine, engine.session() as session:
        session.prefill(ids[: 4 * CHUNK_TOKENS])
        state_bytes = engine.stats()["checkpoint_bytes"] // engine.stats()["checkpoint_states"]
    for policy in CHECKPOINT_POLICIES:
        options = {
            "checkpoint_chunks": 1,
            "checkpoint_bytes": room * state_bytes,
            "checkpoint_policy": policy,
        }
        with open_engine(model, **options) as engine, engine.session() as session:
            session.prefill(ids)
            add_gaps(session, policy, room, context, "a prompt", report)
            for number in range(EDITS):
                place = (7 - 2 * number) * context // 8 + 11
                session.update(change(session.tokens, place))
            add_gaps(session, policy, room, context, f"{EDITS} edits", report)
        print(f"{policy}: room for {room} states", flush=True)


def add_gaps(
    session: Session, policy: str, room: int, context: int, after: str, report: Report
) -> None:
    stats = session.core.checkpoints.stats()
    back = steps_back(session)
    report.add(
        policy=policy,
        room=room,
        context=context,
        after=after,
        held=stats["checkpoint_states"],
        evicted=stats["checkpoints_evicted"],
        mean_back=statistics.fmean(back),
        worst_back=max(back),
    )


def judge_turns(report: Report) -> None:
    differing = sum(report.number(row, "differing_bits") for row in report.rows)
    compared = sum(report.number(row, "bits_compared") for row in report.rows)
    report.judge(
        "logits, sealed K/V and tokens of every turn are those of a cold run, to the bit",
        differing == 0,
        f"{differing:,.0f} of {compared:,.0f} bits differ",
    )
    over = [row for row in report.rows if int(row["recomputed"]) > int(row["at_most"])]
    worst = max(
        report.number(row, "recomputed") / report.number(row, "every") / CHUNK_TOKENS
        for row in report.rows
    )
    report.judge(
        "a cut computes at most k chunks again",
        not over,
        f"at most {worst:.2f} of k chunks",
    )


def judge_costs(report: Report) -> None:
    shares = [
        report.number(row, "worst_back") / (report.number(row, "every") * CHUNK_TOKENS)
        for row in report.rows
    ]
    report.judge(
        "with room for all of them, a state is held less than k chunks before every position",
        max(shares) < 1,
        f"at most {max(shares):.3f} of k chunks",
    )
    for row in report.rows:
        if row["every"] == 1:
            report.compare(
                "one checkpoint per chunk and the copy that a forward works on, "
                f"{row['layers']} layers",
                ours=1e-3 * (report.number(row, "copy_us") + report.number(row, "put_us")),
                theirs=report.number(row, "forward_ms"),
                peer="a forward of one chunk",
                unit="ms",
                aim=20.0,
                lower_is_better=True,
            )


def judge_budget(report: Report) -> None:
    rows = {(row["policy"], row["room"], row["after"]): row for row in report.rows}
    for (policy, room, after), mine in rows.items():
        if policy != DEFAULT_POLICY:
            continue
        tokens = harness.tokens_name(int(report.number(mine, "context")))
        report.compare(
            f"tokens to the nearest of {room} states, mean, {tokens}, after {after}",
            ours=report.number(mine, "mean_back"),
            theirs=report.number(rows["lru", room, after], "mean_back"),
            peer="least recently used",
            unit="tokens",
            aim=1.0,
            lower_is_better=True,
        )


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument("--contexts", type=harness.parse_ints, help="tokens of the prompt")
    parser.add_argument("--every", type=harness.parse_ints, help="chunks from state to state")
    parser.add_argument("--room", type=harness.parse_ints, help="states, where memory is short")
    parser.add_argument("--layers", type=int, help="of the model: a multiple of 4")
    arguments = parser.parse_args()
    quick, full = arguments.quick, arguments.full
    contexts = arguments.contexts or ([512] if quick else [CONTEXT, 16384] if full else [CONTEXT])
    every = arguments.every or ([1, 2] if quick else [1, 2, 4, 8])
    room = arguments.room or ([3] if quick else [4, 8, 16])
    layers = arguments.layers or (8 if full else 4)
    record = harness.start(arguments)
    settings = {
        "chunk_tokens": CHUNK_TOKENS,
        "layers": layers,
        "message_tokens": MESSAGE_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "edits": EDITS,
    }
    turns, costs, budget = (
        Report(harness.report_name(name, arguments), question, columns, settings, record)
        for name, question, columns in (
            ("hybrid", "Turns of a model with recurrent layers, beside cold runs", TURN_COLUMNS),
            ("hybrid_cost", "What a kept state weighs, and what keeping it takes", COST_COLUMNS),
            ("hybrid_budget", "How far back the nearest of a few states is", BUDGET_COLUMNS),
        )
    )
    model = load_model(layers)
    for context in contexts:
        measure(model, context, every, turns, costs)
    for states in room:
        measure_budget(model, contexts[0], states, budget)
    judge_turns(turns)
    judge_costs(costs)
    judge_budget(budget)
    turns.finish()
    costs.finish()
    budget.finish()


if __name__ == "__main__":
    main()
