"""An agent's loop over one session: tools, dropped reasoning, an edit, another answer, a restart.

    python examples/agent_loop.py
    python examples/agent_loop.py --turns 6 --plot loop.png

Every turn the client renders the whole conversation anew and hands it to `Session.update`, which
keeps what the session holds already. The text does not only grow: the reasoning of the turn before
is dropped, a user edits a message, the last answer is generated again, and half way the process
"restarts" from a snapshot. The same loop then runs where any such change, and the restart, wipes
the cache. Both must give the same tokens; the table says what each prompt has cost.

The model that comes with kvpager looks things up (see `kvpager.needles`), which is all that a tool
call needs: the system prompt holds records, the user asks for one, what the model finds there is
the argument of the call, the tool answers with another record, and the model reads that one out.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

# Before torch loads its OpenMP runtime, whose threads otherwise spin between operations.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np

import kvpager
from kvpager.needles import END, KEY_TOKENS, VALUE_TOKENS, NeedleTask, shipped_model_path

REASONING_TOKENS = 48
REASONING_TEMPERATURE = 0.4
TALK_TOKENS = 64  # of a user's message, and around what a tool answers
LEAST_SYSTEM_TOKENS = 512


@dataclass(frozen=True)
class Message:
    """A part of the conversation, as token ids."""

    turn: int
    kind: str  # system | user | reasoning | call | tool | answer
    ids: list[int]


def render(messages: Sequence[Message], turn: int) -> list[int]:
    """The whole text of a turn's prompt: what was thought in earlier ones is not in it."""
    return [
        token
        for message in messages
        if message.kind != "reasoning" or message.turn == turn
        for token in message.ids
    ]


@dataclass(frozen=True)
class Cost:
    """What bringing one prompt into the session took."""

    turn: int
    prompt: str
    tokens: int
    computed: int
    forwards: int
    seconds: float


class Holder(Protocol):
    """Whoever has the conversation's K/V."""

    engine: kvpager.Engine
    session: kvpager.Session

    def update(self, ids: list[int]) -> int:
        """Makes the session hold exactly `ids`; returns how many tokens had to be computed."""
        ...

    def again(self, text: list[int], count: int, **options: Any) -> tuple[int, Iterator[int]]:
        """The last answer, to `text`, anew; first how many tokens of that had to be computed."""
        ...

    def restart(self) -> None:
        """Goes on as a new process would."""
        ...

    def close(self) -> None:
        """Ends the engine."""
        ...


class Keeper:
    """Keeps what it can, and takes the rest from a snapshot after a restart."""

    def __init__(self, open_engine: Callable[[], kvpager.Engine], folder: Path) -> None:
        self._open = open_engine
        self._store = kvpager.DirectoryStore(folder)
        self.engine = open_engine()
        self.session = self.engine.session()

    def update(self, ids: list[int]) -> int:
        return self.session.update(ids).computed

    def again(self, text: list[int], count: int, **options: Any) -> tuple[int, Iterator[int]]:
        return 0, self.session.regenerate(count, **options)

    def restart(self) -> None:
        self.session.save("agent", store=self._store)
        self.engine.close()
        self.engine = self._open()
        self.session = self.engine.restore("agent", store=self._store)

    def close(self) -> None:
        self.engine.close()


class Wiper:
    """Loses everything with every change that is not at the end, and with a restart."""

    def __init__(self, open_engine: Callable[[], kvpager.Engine]) -> None:
        self._open = open_engine
        self.engine = open_engine()
        self.session = self.engine.session()

    def update(self, ids: list[int]) -> int:
        held = self.session.tokens
        if len(held) > len(ids) or not np.array_equal(held, ids[: len(held)]):
            self._wipe()
        return self.session.update(ids).computed

    def again(self, text: list[int], count: int, **options: Any) -> tuple[int, Iterator[int]]:
        return self.update(text), self.session.generate(count, **options)

    def _wipe(self) -> None:
        self.session.close()
        self.engine.pager.reset()  # or the new session would find the old one's chunks by hash
        self.session = self.engine.session()

    def restart(self) -> None:
        self.engine.close()
        self.engine = self._open()
        self.session = self.engine.session()

    def close(self) -> None:
        self.engine.close()


@dataclass
class Run:
    """What one pass through the conversation left behind."""

    costs: list[Cost] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # all that was generated
    answers: int = 0
    right: int = 0
    speculation: kvpager.SpeculationStats = field(default_factory=kvpager.SpeculationStats)

    @property
    def prompt_tokens(self) -> int:
        return sum(cost.tokens for cost in self.costs)

    @property
    def computed(self) -> int:
        return sum(cost.computed for cost in self.costs)

    @property
    def forwards(self) -> int:
        return sum(cost.forwards for cost in self.costs)

    @property
    def seconds(self) -> float:
        return sum(cost.seconds for cost in self.costs)


class Loop:
    """The conversation: a function of the seed and of what the model says."""

    def __init__(self, holder: Any, arguments: argparse.Namespace, vocab: int) -> None:
        self.holder: Holder = holder
        self.arguments = arguments
        self.task = NeedleTask(vocab, seed=arguments.seed)
        records = self.task.document(arguments.system_tokens, arguments.turns)
        self.keys, self.values = records.keys, records.values
        self.results = self.task.values([VALUE_TOKENS] * arguments.turns)
        self.messages = [Message(0, "system", records.ids.tolist())]
        self.speculate = "draft" if arguments.draft else None
        self.run = Run()

    def all(self) -> Run:
        """Every turn, and what happens between them."""
        turns = self.arguments.turns
        after_restart = ""
        for turn in range(1, turns + 1):
            self.turn(turn, self._talk(), "user" + after_restart)
            after_restart = ""
            if turn == turns // 2:
                self._note_speculation()
                self.holder.restart()
                after_restart = ", restarted"
            if turn == turns - 1:
                edited = max(1, turn - 1)
                self.messages = [m for m in self.messages if m.turn < edited]
                self.turn(edited, self._talk(), "edited message" + after_restart)
                after_restart = ""
        self._again(turns)
        self._note_speculation()
        return self.run

    def turn(self, turn: int, talk: list[int], prompt: str) -> None:
        """A user's message, thoughts, a tool call, its result and the answer."""
        self._say(turn, "user", talk)
        self._hold(turn, prompt)
        thoughts = self._generate(
            REASONING_TOKENS, eos=None, temperature=REASONING_TEMPERATURE, seed=turn
        )
        self._say(turn, "reasoning", thoughts)
        key, value = self.keys[turn - 1], self.values[turn - 1]
        found = self._ask(turn, "call", key, value)
        self._say(turn, "tool", self._tool(turn, found))
        self._ask(turn, "answer", value[:KEY_TOKENS], self.results[turn - 1])

    def _ask(self, turn: int, kind: str, key: Any, expected: Any) -> list[int]:
        """Has a record read out; what the model says joins the conversation."""
        prompt = {"call": "tool call", "answer": "tool result"}[kind]
        self._say(turn, kind, self.task.query(key).tolist())
        self._hold(turn, prompt)
        said = self._generate(VALUE_TOKENS + 1, eos=END)
        self._say(turn, kind, said)
        self.run.answers += 1
        self.run.right += said == self.task.answer(expected).tolist()
        return said

    def _again(self, turn: int) -> None:
        """The last answer once more, with another draw."""
        text = render(self.messages[:-1], turn)
        with self._costing(turn, "another answer", text) as cost:
            computed, stream = self.holder.again(
                text,
                VALUE_TOKENS + 1,
                eos=END,
                temperature=1.0,
                seed=turn,
                speculate=self.speculate,
            )
            cost(computed)
        self.run.tokens += list(stream)

    def _talk(self) -> list[int]:
        return [int(token) for token in self.task.filler(TALK_TOKENS)]

    def _tool(self, turn: int, argument: list[int]) -> list[int]:
        """What the tool answers: a record under the first tokens of what it was called with."""
        record = self.task.needle(
            np.asarray(argument[:KEY_TOKENS], np.int64), self.results[turn - 1]
        )
        return [*self._talk(), *record.tolist(), *self._talk()]

    def _say(self, turn: int, kind: str, ids: list[int]) -> None:
        self.messages.append(Message(turn, kind, ids))

    def _hold(self, turn: int, prompt: str) -> None:
        """Brings the rendered conversation into the session, and notes what that took."""
        text = render(self.messages, turn)
        with self._costing(turn, prompt, text) as cost:
            cost(self.holder.update(text))

    @contextmanager
    def _costing(self, turn: int, prompt: str, text: list[int]) -> Iterator[Callable[[int], None]]:
        """Times the block, which tells how many tokens it has computed."""
        told: list[int] = []
        forwards, start = self.holder.engine.runner.forwards, time.perf_counter()
        yield told.append
        seconds = time.perf_counter() - start
        forwards = self.holder.engine.runner.forwards - forwards
        self.run.costs.append(Cost(turn, prompt, len(text), told[0], forwards, seconds))

    def _generate(self, count: int, **options: Any) -> list[int]:
        said = list(self.holder.session.generate(count, speculate=self.speculate, **options))
        self.run.tokens += said
        return said

    def _note_speculation(self) -> None:
        self.run.speculation += self.holder.session.speculation


def table(kept: Run, wiped: Run) -> str:
    """A line per prompt: what it took, and what it would have taken."""
    lines = [
        f"{'':27}{'':>29}{'kept':>15}{'':6}{'wiped':>24}",
        f"{'turn':>4}  {'prompt':<27}{'tokens':>7}{'reused':>8}{'computed':>10}{'forwards':>9}"
        f"{'ms':>7}{'computed':>11}{'forwards':>9}{'ms':>7}",
    ]
    lines += [
        f"{one.turn:>4}  {one.prompt:<27}{one.tokens:>7,}{one.tokens - one.computed:>8,}"
        f"{one.computed:>10,}{one.forwards:>9}{1e3 * one.seconds:>7.1f}"
        f"{other.computed:>11,}{other.forwards:>9}{1e3 * other.seconds:>7.1f}"
        for one, other in zip(kept.costs, wiped.costs)
    ]
    lines.append(
        f"{'all':>4}  {'':<27}{kept.prompt_tokens:>7,}{kept.prompt_tokens - kept.computed:>8,}"
        f"{kept.computed:>10,}{kept.forwards:>9}{1e3 * kept.seconds:>7.1f}"
        f"{wiped.computed:>11,}{wiped.forwards:>9}{1e3 * wiped.seconds:>7.1f}"
    )
    return "\n".join(lines)


def summary(kept: Run, wiped: Run, arguments: argparse.Namespace) -> str:
    """What the table comes to."""
    reused = 100 * (1 - kept.computed / kept.prompt_tokens)
    lines = [
        f"{reused:.1f}% of {kept.prompt_tokens:,} prompt tokens reused; wiping computes "
        f"{wiped.computed / max(1, kept.computed):.1f} times as many"
    ]
    if arguments.draft:
        stats = kept.speculation
        lines.append(
            f"draft model: {stats.tokens_per_forward:.2f} tokens per forward, "
            f"{stats.acceptance:.0%} of {stats.proposed} guesses accepted"
        )
    lines.append(f"{kept.right} of {kept.answers} look-ups are right")
    same = kept.tokens == wiped.tokens
    lines.append(
        f"both runs generated the same {len(kept.tokens)} tokens"
        if same
        else "the runs generated DIFFERENT tokens"
    )
    return "\n".join(lines)


def plot(kept: Run, wiped: Run, path: Path) -> None:
    """Tokens computed per prompt, one bar each for the two runs."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    places = np.arange(len(kept.costs))
    figure, axis = plt.subplots(figsize=(1.5 + 0.5 * len(places), 4.2))
    axis.bar(places - 0.2, [c.computed for c in wiped.costs], 0.4, label="wiped", color="#c8553d")
    axis.bar(places + 0.2, [c.computed for c in kept.costs], 0.4, label="kept", color="#2f6fb0")
    names = [f"{cost.turn}: {cost.prompt}" for cost in kept.costs]
    axis.set_xticks(places, names, rotation=60, ha="right", fontsize=8)
    axis.set_ylabel("prompt tokens computed")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def load(path: Path) -> Any:
    """A causal LM from a folder, in eval mode. Raises OSError or ValueError."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} has no config.json; expected the folder of a causal LM")
    model: Any = AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    return model.eval()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a causal LM (default: the one that is shipped)"
    )
    parser.add_argument(
        "--draft",
        metavar="DIR",
        help="a model of the same vocabulary that guesses ahead; 'none' for none (default: the "
        "shipped model's sibling where it is there)",
    )
    parser.add_argument(
        "--chunk-tokens", type=int, default=64, metavar="N", help="per chunk (default: 64)"
    )
    parser.add_argument(
        "--turns", type=int, default=4, metavar="N", help="of the conversation, 2 or more (4)"
    )
    parser.add_argument(
        "--system-tokens",
        type=int,
        default=4096,
        metavar="N",
        help="length of the system prompt (default: 4096)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the conversation")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch (default: its choice)")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw what each prompt computed, as a PNG"
    )
    arguments = parser.parse_args(argv)
    if arguments.turns < 2:
        parser.error(f"--turns is {arguments.turns}; expected 2 or more: one before the restart")
    if arguments.system_tokens < max(LEAST_SYSTEM_TOKENS, 64 * arguments.turns):
        parser.error(
            f"--system-tokens is {arguments.system_tokens}; expected at least "
            f"{max(LEAST_SYSTEM_TOKENS, 64 * arguments.turns)}, room for a record per turn"
        )
    if arguments.seed < 0:
        parser.error(f"--seed is {arguments.seed}; expected 0 or more")
    if arguments.plot is not None and not arguments.plot.absolute().parent.is_dir():
        parser.error(f"--plot {arguments.plot}: its folder does not exist")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs both loops; returns the exit code: 1 for a failure or where tokens differ."""
    arguments = parse(argv)
    try:
        return compare(arguments)
    except KeyboardInterrupt:
        print("agent_loop: interrupted", file=sys.stderr)
        return 130
    except (kvpager.PagerError, OSError, ValueError) as error:
        print("agent_loop: " + " ".join(str(error).split()), file=sys.stderr)
        return 1


def compare(arguments: argparse.Namespace) -> int:
    """The loop with a cache that is kept, then with one that is wiped."""
    path = arguments.model or shipped_model_path()
    model = load(path)
    if arguments.draft is None and arguments.model is None:
        sibling = path.with_name("tiny-retriever-plain")
        arguments.draft = str(sibling) if sibling.is_dir() else None
    elif arguments.draft == "none":
        arguments.draft = None
    draft = load(Path(arguments.draft)) if arguments.draft else None

    def open_engine() -> kvpager.Engine:
        return kvpager.Engine(
            model,
            pool_tokens="auto",
            chunk_tokens=arguments.chunk_tokens,
            threads=arguments.threads,
            draft=draft,
        )

    def run(holder: Any) -> Run:
        try:
            return Loop(holder, arguments, model.config.vocab_size).all()
        finally:
            holder.close()

    with tempfile.TemporaryDirectory(prefix="agent-loop-") as folder:
        kept = run(Keeper(open_engine, Path(folder)))
    wiped = run(Wiper(open_engine))
    print(table(kept, wiped), end="\n\n")
    print(summary(kept, wiped, arguments))
    if arguments.plot is not None:
        plot(kept, wiped, arguments.plot)
        print(f"wrote {arguments.plot}")
    return 0 if kept.tokens == wiped.tokens else 1


if __name__ == "__main__":
    sys.exit(main())
