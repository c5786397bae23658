"""Whatever is done to a text, in whatever order, it has the tokens and bits of a cold run."""

from __future__ import annotations

import numpy as np
import pytest
from bits import assert_same_bits
from companion_models import CHUNK, member
from reference_models import VOCAB, make_engine

from kvpager.drafts import DraftModel
from kvpager.stores import DirectoryStore

STEPS, MANY_STEPS = 20, 60
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(1, 25))]
LONGEST = 330

# Kind of the target, its options, kind of its draft. "In a store": prompts begin with what it has.
CASES = {
    "dense": ("dense", {}, None),
    "dense with a windowed draft": ("dense", {}, "windowed"),
    "dense with a recurrent draft": ("dense", {}, "recurrent"),
    "dense, reuse": ("dense", {"exact": "reuse"}, None),
    "windowed": ("windowed", {}, None),
    "windowed with a dense draft": ("windowed", {}, "dense"),
    "windowed with a windowed draft": ("windowed", {}, "windowed"),
    "windowed, reuse": ("windowed", {"exact": "reuse"}, None),
    "recurrent": ("recurrent", {"exact": "reuse", "rows": None, "checkpoint_chunks": 2}, None),
    "dense with a draft, in a store": ("dense", {}, "dense"),
    "windowed, in a store": ("windowed", {}, None),
    "recurrent, in a store": ("recurrent", {"exact": "reuse", "rows": None}, None),
    "recurrent, no checkpoints": (
        "recurrent",
        {"exact": "reuse", "rows": None, "checkpoint_bytes": 0},
        None,
    ),
}
REACH = {"rewind_tokens": 2 * CHUNK}


def make(case, folder):
    kind, options, draft = CASES[case]
    settings = {"pool_tokens": 128, **REACH, **options}
    if case.endswith("in a store"):
        settings["store"] = DirectoryStore(folder)
    if draft is not None:
        settings["draft"] = DraftModel(member(draft, layers=2), guess_cost=0.0, **REACH)
    return make_engine(member(kind), **settings)


class Author:
    """Does things to one session, and to a list of tokens what they mean."""

    def __init__(self, engine, folder, seed):
        self.engine, self.folder = engine, folder
        self.seed = seed
        self.random = np.random.default_rng(seed)
        self.session = engine.session()
        self.text: list[int] = []
        self.history: list[str] = []
        self.append()

    def number(self, low, high):
        return int(self.random.integers(low, high))

    def new(self, most):
        return self.random.integers(3, VOCAB, self.number(1, most)).tolist()

    def step(self):
        doing = [self.append, self.generate, self.trim, self.trim_a_little, self.update]
        doing += [self.regenerate, self.fork, self.save, self.logits, self.suspended, self.run]
        doing += [self.together]
        if len(self.text) > LONGEST:
            doing = [self.trim]
        doing[self.number(0, len(doing))]()
        assert self.session.tokens.tolist() == self.text, self.history

    def note(self, *what):
        self.history.append(" ".join(map(str, what)))

    def options(self):
        speculate = None
        if self.engine.config.exact == "all":
            ways = [None, "prompt-lookup"] + ["draft"] * 2 * (self.engine.core.drafter is not None)
            speculate = ways[self.number(0, len(ways))]
        sampled = {"temperature": 0.9, "top_k": 20, "seed": self.number(0, 5)}
        return {"eos": None, "speculate": speculate, **(sampled if self.number(0, 2) else {})}

    def append(self):
        new = self.new(90)
        self.note("append", len(new))
        self.session.append(new)
        self.text += new

    def generate(self):
        count, options = self.number(1, 30), self.options()
        self.note("generate", count, options)
        self.text += self.session.generate(count, **options, stream="tokens")

    def trim(self):
        self.cut(self.number(1, len(self.text) + 1))

    def trim_a_little(self):
        self.cut(max(1, len(self.text) - self.number(0, 20)))

    def cut(self, position):
        self.note("trim", position, "of", len(self.text))
        self.session.trim(position)
        del self.text[position:]

    def update(self):
        start = self.number(0, len(self.text))
        stop = min(len(self.text), start + self.number(0, 30))
        self.text = [*self.text[:start], *self.new(20), *self.text[stop:]]
        self.note("update", start, stop, len(self.text))
        self.session.update(self.text)

    def regenerate(self):
        position, options = self.number(1, len(self.text) + 1), self.options()
        self.note("regenerate", position, options)
        produced = self.session.regenerate(8, from_position=position, **options, stream="tokens")
        self.text = [*self.text[:position], *produced]

    def suspended(self):
        self.note("trim while suspended")
        stream = self.session.generate(20, **self.options(), stream="tokens")
        self.text += [next(stream) for _ in range(3)]
        self.cut(max(1, len(self.text) - self.number(0, 40)))
        self.text += [next(stream) for _ in range(4)]
        stream.close()

    def fork(self):
        self.note("fork")
        twin = self.session.fork()
        if self.number(0, 2):
            twin, self.session = self.session, twin
        twin.trim(self.number(0, len(self.text)))
        twin.append(self.new(20))
        twin.close()

    def run(self):
        self.note("run")
        completions = self.engine.run([self.session, self.new(40)], 6, eos=None)
        assert [completion.error for completion in completions] == [None, None], self.history
        self.text += completions[0].tokens.tolist()

    def together(self):
        self.note("together")
        back = self.number(1, 30)
        with self.session.fork() as twin:
            stream = self.engine.generate_many([self.session, twin], 9, **self.options())
            for session, token in stream:
                if session is self.session:
                    self.text.append(token)
                elif self.number(0, 4) == 0:
                    twin.trim(max(1, twin.length - back))

    def save(self):
        self.note("save")
        name = f"{self.seed}-{len(self.history)}"
        if self.engine.store is None:
            name = self.folder / name
        self.session.save(name, store=self.engine.store)
        if self.number(0, 2):
            self.session.close()
            self.session = self.engine.restore(name, store=self.engine.store)

    def logits(self):
        self.note("logits")
        _ = self.session.logits


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    opened = {}

    def of(case):
        if case not in opened:
            kind = CASES[case][0]
            exact = "reuse" if kind == "recurrent" else "all"
            rows = {"rows": None} if kind == "recurrent" else {}
            opened[case] = (
                make(case, tmp_path_factory.mktemp("store")),
                make_engine(member(kind), pool_tokens=2048, exact=exact, salt="cold", **rows),
            )
        return opened[case]

    yield of
    for pair in opened.values():
        for engine in pair:
            engine.close()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES)
def test_whatever_is_done_to_a_text_it_has_the_bits_of_a_cold_run(engines, tmp_path, case, seed):
    engine, cold = engines(case)
    author = Author(engine, tmp_path, seed)
    for _ in range(MANY_STEPS if seed else STEPS):
        author.step()
        assert engine.core.transcripts.trims.tokens_reprefilled >= 0
    session = author.session
    session.prefill(author.text)
    with cold.session() as whole:
        whole.prefill(author.text)
        assert_same_bits(session.logits, whole.logits, f"logits after {author.history}")
        start = max(session.sequence.released, whole.sequence.released)
        sealed = len(author.text) // CHUNK * CHUNK
        for layer in range(engine.layout.layers):
            for ours, theirs in zip(
                session.sequence.read_kv(layer, start, sealed),
                whole.sequence.read_kv(layer, start, sealed),
            ):
                assert_same_bits(ours, theirs, f"K/V of layer {layer} after {author.history}")
    session.close()
    engine.pager.check_invariants()
