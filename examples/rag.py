"""Answers from retrieved documents: each computed once, put together anew for every question.

    python examples/rag.py
    python examples/rag.py --questions 20 --repair head:16 --plot rag.png

A corpus of documents that refer to one another (bench's two_hop.py) is read once: every document
is computed alone and kept in a store as a segment. Then questions come. Each one retrieves another
choice of documents in another order, and no document alone has the answer. It is answered three
ways, one after the other:

- cold: nothing is cached and the whole text is prefilled;
- prefix: an engine that keeps what it has computed finds the beginning that a text shares with
  earlier ones, which here is the system prompt;
- stitched: `Engine.assemble` moves the documents' K/V to where they stand now and repairs them.

The table says whether the answer was right, how many tokens went through the model, and the time
from the look-up to the first token. Cold and prefix are exact and must say the same.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

# Before torch loads its OpenMP runtime, whose threads otherwise spin between operations.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import numpy.typing as npt

import kvpager
from kvpager.needles import END, KEY, KEY_TOKENS
from kvpager.runtime.segments.policy_text import parse_policy
from kvpager_bench.two_hop import REFERENCE, Fact, TwoHopTask, shipped_model_path

Ids = npt.NDArray[np.int64]

ANSWER_TOKENS = 2
LEAST_DOCUMENT_TOKENS = 128
WAYS = ("cold", "prefix", "stitched")
COLOURS = ("#9a9a9a", "#2f6fb0", "#c8553d")


class Corpus:
    """Documents, and an index of the names they use."""

    def __init__(self, documents: Sequence[Ids]) -> None:
        self.documents = list(documents)
        self.names = [f"document-{number:02}" for number in range(len(documents))]
        # Of each document, where it says which name: the tokens after a marker.
        self._index = [_names_in(document) for document in documents]

    def retrieve(self, name: Ids, count: int, rng: np.random.Generator) -> list[int]:
        """Numbers of `count` documents: those that say a name, what these refer to, and others.

        What a document refers to is ranked by how near to the name it is said there. The others are
        random, as hits that do not help are. Documents that refer to others come after those that
        do not; apart from that the order is random.
        """
        asked = tuple(int(token) for token in name)
        hits = [d for d, index in enumerate(self._index) if asked in index]
        distances: dict[int, int] = {}
        for hit in hits:
            for said, place in self._index[hit].items():
                away = abs(place - self._index[hit][asked])
                for other, index in enumerate(self._index):
                    if said in index and other != hit:
                        distances[other] = min(away, distances.get(other, away))
        linked = sorted(distances, key=distances.__getitem__)
        rest = rng.permutation(len(self.documents)).tolist()
        chosen = list(dict.fromkeys([*hits, *linked, *rest]))[:count]
        shuffled: list[int] = rng.permutation(chosen).tolist()
        return sorted(shuffled, key=self._refers)

    def _refers(self, number: int) -> bool:
        return REFERENCE in self.documents[number]


def _names_in(document: Ids) -> dict[tuple[int, ...], int]:
    return {
        tuple(int(token) for token in document[at + 1 : at + 1 + KEY_TOKENS]): int(at)
        for at in np.flatnonzero((document == KEY) | (document == REFERENCE))
    }


@dataclass(frozen=True)
class Text:
    """What is to be read: the system prompt, documents of the corpus by number, the question."""

    system: Ids
    numbers: list[int]
    question: Ids


@dataclass(frozen=True)
class Answer:
    """What one way said to one question, and what that took.

    computed: tokens that went through the model before the first new one. seconds: from the look-up
    to the first token.
    """

    said: list[int]
    right: bool
    computed: int
    seconds: float
    assembly: kvpager.Assembly | None


class Reader:
    """An engine that answers questions in one way."""

    def __init__(self, engine: kvpager.Engine, corpus: Corpus, repair: Any) -> None:
        self.engine = engine
        self.corpus = corpus
        self.repair = repair

    def cold(self, text: Text) -> kvpager.Session:
        self.engine.pager.reset()  # or the documents read before would be found
        return self.prefix(text)

    def prefix(self, text: Text) -> kvpager.Session:
        session = self.engine.session()
        documents = [self.corpus.documents[number] for number in text.numbers]
        session.prefill(np.concatenate([text.system, *documents, text.question]))
        return session

    def stitched(self, text: Text) -> kvpager.Session:
        segments = [self.corpus.names[number] for number in text.numbers]
        return self.engine.assemble([text.system, *segments, text.question], repair=self.repair)


def answer(
    read: Callable[[Text], kvpager.Session], look_up: Callable[[], Text], expected: Ids
) -> Answer:
    """Looks up, reads and answers."""
    start = time.perf_counter()
    session = read(look_up())
    stream = session.generate(ANSWER_TOKENS, eos=END)
    said = [next(stream)]
    seconds = time.perf_counter() - start
    said += stream
    made = session.assembly
    computed = session.tokens_computed if made is None else made.rows + round(made.probe_rows)
    session.close()
    return Answer(said, said == expected.tolist(), computed, seconds, made)


@dataclass(frozen=True)
class Run:
    """Every question's answers, by way.

    texts: what was read for each. cached: tokens of the corpus. cached_seconds: what caching it has
    taken, once.
    """

    texts: list[Text]
    answers: dict[str, list[Answer]]
    tokens: list[int]
    cached: int
    cached_seconds: float


def run(arguments: argparse.Namespace, model: Any, folder: Path) -> Run:
    """Caches the corpus in a store, then asks."""
    task = TwoHopTask(model.config.vocab_size, seed=arguments.seed)
    lengths = [arguments.document_tokens] * arguments.documents
    drawn = task.text(lengths, facts=arguments.questions, system=arguments.system_tokens)
    corpus = Corpus(drawn.documents)
    longest = arguments.system_tokens + (arguments.retrieved + 1) * arguments.document_tokens

    def open_engine(**options: Any) -> kvpager.Engine:
        return kvpager.Engine(
            model,
            pool_tokens=2 * longest,
            chunk_tokens=arguments.chunk_tokens,
            threads=arguments.threads,
            **options,
        )

    store = kvpager.DirectoryStore(folder)
    with open_engine(store=store) as engine:
        start = time.perf_counter()
        for name, document in zip(corpus.names, corpus.documents):
            engine.cache_segment(document, name=name)
            engine.segments.save(name)
        seconds = time.perf_counter() - start

    texts: list[Text] = []
    answers: dict[str, list[Answer]] = {way: [] for way in WAYS}
    with open_engine() as cold, open_engine() as prefix, open_engine(store=store) as stitched:
        engines = dict(zip(WAYS, (cold, prefix, stitched)))
        readers = {way: Reader(engine, corpus, arguments.repair) for way, engine in engines.items()}
        for way, reader in readers.items():
            _warm_up(reader, way, task, arguments)
        for number, fact in enumerate(drawn.facts):
            look_up = _look_up(corpus, drawn.system, fact, number, arguments)
            texts.append(look_up())
            for way in (*WAYS[number % 3 :], *WAYS[: number % 3]):
                read = getattr(readers[way], way)
                answers[way].append(answer(read, look_up, fact.answer))
    tokens = [
        len(text.system) + len(text.numbers) * arguments.document_tokens + len(text.question)
        for text in texts
    ]
    return Run(texts, answers, tokens, sum(lengths), seconds)


def _look_up(
    corpus: Corpus, system: Ids, fact: Fact, number: int, arguments: argparse.Namespace
) -> Callable[[], Text]:
    """Finds the documents for a question; the same ones each time it is called."""

    def look_up() -> Text:
        rng = np.random.default_rng([arguments.seed, number])
        return Text(system, corpus.retrieve(fact.key, arguments.retrieved, rng), fact.query)

    return look_up


def _warm_up(reader: Reader, way: str, task: TwoHopTask, arguments: argparse.Namespace) -> None:
    """Reads something else, of the same length: what an engine does only once is done then."""
    lengths = [arguments.document_tokens] * max(2, arguments.retrieved)
    drawn = task.text(lengths, facts=1, system=arguments.system_tokens)
    corpus = Corpus(drawn.documents)
    corpus.names = [f"warm-up-{number}" for number in range(len(lengths))]
    if way == "stitched":
        for name, document in zip(corpus.names, corpus.documents):
            reader.engine.cache_segment(document, name=name)
    text = Text(drawn.system, list(range(len(lengths))), drawn.facts[0].query)
    warm = Reader(reader.engine, corpus, reader.repair)
    answer(getattr(warm, way), lambda: text, drawn.facts[0].answer)
    for name in list(reader.engine.segments):
        reader.engine.segments.remove(name)


def table(done: Run) -> str:
    """A line per question: what was read, and of each way the answer, tokens computed and time."""
    each = f"{'right':>8}{'computed':>10}{'ms':>7}"
    lines = [
        f"{'':47}" + "".join(f"{way:>25}" for way in WAYS),
        f"{'question':<10}{'documents':<30}{'tokens':>7}" + each * len(WAYS),
    ]
    for number, text in enumerate(done.texts):
        documents = " ".join(map(str, text.numbers))
        documents = documents if len(documents) <= 29 else documents[:26] + "..."
        line = f"{number + 1:<10}{documents:<30}{done.tokens[number]:>7,}"
        for way in WAYS:
            one = done.answers[way][number]
            line += f"{'yes' if one.right else 'no':>8}{one.computed:>10,}{1e3 * one.seconds:>7.0f}"
        lines.append(line)
    return "\n".join(lines)


def summary(done: Run) -> str:
    """What the table comes to."""
    lines = [f"the corpus was read once: {done.cached:,} tokens in {done.cached_seconds:.1f} s"]
    times = {way: median(one.seconds for one in done.answers[way]) for way in WAYS}
    for way in WAYS:
        given = done.answers[way]
        faster = f", {times['cold'] / times[way]:.1f} times as fast" if way != "cold" else ""
        lines.append(
            f"{way + ':':<10}{sum(one.right for one in given):>3} of {len(given)} right, "
            f"{sum(one.computed for one in given):>7,} of {sum(done.tokens):,} tokens computed, "
            f"first token after {1e3 * times[way]:.0f} ms (median){faster}"
        )
    made = [one.assembly for one in done.answers["stitched"] if one.assembly is not None]
    moved = sum(one.moved + one.recomputed for one in made)
    recomputed = sum(one.recomputed for one in made)
    lines.append(f"repair: {recomputed:,} of {moved:,} moved tokens, by {made[0].policy}")
    lines.append(
        "cold and prefix said the same"
        if same(done)
        else "cold and prefix said DIFFERENT things, and both are exact"
    )
    return "\n".join(lines)


def same(done: Run) -> bool:
    """Whether both exact ways have said the same tokens."""
    said = [[one.said for one in done.answers[way]] for way in WAYS[:2]]
    return said[0] == said[1]


def plot(done: Run, path: Path) -> None:
    """Time to the first token of each question, a bar for each way."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    places = np.arange(len(done.texts))
    figure, axis = plt.subplots(figsize=(2.5 + 0.5 * len(places), 4.2))
    for way, colour, shift in zip(WAYS, COLOURS, (-0.27, 0.0, 0.27)):
        times = [1e3 * one.seconds for one in done.answers[way]]
        bars = axis.bar(places + shift, times, 0.27, color=colour)
        for bar, one in zip(bars, done.answers[way]):
            if not one.right:
                bar.set_hatch("///")
    axis.set_xticks(places, [str(number + 1) for number in places])
    axis.set_xlabel("question (hatched: the answer was wrong)")
    axis.set_ylabel("ms from look-up to first token")
    axis.legend(handles=[Patch(color=c, label=way) for way, c in zip(WAYS, COLOURS)])
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
        "--documents", type=int, default=24, metavar="N", help="of the corpus (default: 24)"
    )
    parser.add_argument(
        "--document-tokens", type=int, default=512, metavar="N", help="of each (default: 512)"
    )
    parser.add_argument(
        "--retrieved", type=int, default=8, metavar="N", help="per question (default: 8)"
    )
    parser.add_argument(
        "--questions", type=int, default=12, metavar="N", help="to be asked (default: 12)"
    )
    parser.add_argument(
        "--system-tokens", type=int, default=128, metavar="N", help="before them (default: 128)"
    )
    parser.add_argument(
        "--repair",
        metavar="POLICY",
        help="such as none, full, head:16, query:0.1, or several with + between them (default: "
        "kvpager's)",
    )
    parser.add_argument(
        "--chunk-tokens", type=int, default=64, metavar="N", help="per chunk (default: 64)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the corpus")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch (default: its choice)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the times, as a PNG")
    arguments = parser.parse_args(argv)
    for name, least in (
        ("documents", 2),
        ("document_tokens", LEAST_DOCUMENT_TOKENS),
        ("retrieved", 2),
        ("questions", 1),
        ("system_tokens", 1),
        ("seed", 0),
    ):
        if getattr(arguments, name) < least:
            option = name.replace("_", "-")
            parser.error(f"--{option} is {getattr(arguments, name)}; expected {least} or more")
    if arguments.retrieved > arguments.documents:
        parser.error(
            f"--retrieved is {arguments.retrieved}; expected at most the {arguments.documents} "
            "that there are"
        )
    if arguments.repair is not None:
        try:
            arguments.repair = parse_policy(arguments.repair)
        except kvpager.InvalidArgumentError as error:
            parser.error(f"--{error}")
    if arguments.plot is not None and not arguments.plot.absolute().parent.is_dir():
        parser.error(f"--plot {arguments.plot}: its folder does not exist")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Asks all questions; the exit code is 1 for a failure or where the exact ways differ."""
    arguments = parse(argv)
    try:
        model = load(arguments.model or shipped_model_path())
        with tempfile.TemporaryDirectory(prefix="rag-") as folder:
            done = run(arguments, model, Path(folder))
        print(table(done), end="\n\n")
        print(summary(done))
        if arguments.plot is not None:
            plot(done, arguments.plot)
            print(f"wrote {arguments.plot}")
    except KeyboardInterrupt:
        print("rag: interrupted", file=sys.stderr)
        return 130
    except (kvpager.PagerError, OSError, ValueError) as error:
        print("rag: " + " ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0 if same(done) else 1


if __name__ == "__main__":
    sys.exit(main())
