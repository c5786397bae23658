"""Documents that refer to one another: questions that no document answers alone.

A definition `<K> a1 a2 <S> v <E>` gives an alias its value. A reference `<K> k1 k2 <R> a1 a2 <E>`,
in a later document, says which alias a key stands for. A question `<Q> k1 k2 <S>` asks for `v <E>`:
two hops, the first of which has to be taken while the reference is read. A document that was
encoded alone has read its references without their definitions, so its K/V lack the value, and
how much of the text must be computed again to bring it back can be measured.

A local reference has its definition in its own document and survives being encoded alone: it tells
what is lost with the other documents from what is lost by moving.

Filler, values and names (keys and aliases) are those of `cli.needles`: all share their tokens,
and many a name is another one but for one token. Everything is a function of the seed and the
order of calls, and needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvpager.cli import needles
from kvpager.cli.needles import BOS, END, KEY, KEY_TOKENS, QUESTION, SEPARATOR, Ids, NeedleTask

REFERENCE = 6
DEFINITION_TOKENS = KEY_TOKENS + 4  # <K> a1 a2 <S> v <E>
REFERENCE_TOKENS = 2 * KEY_TOKENS + 3  # <K> k1 k2 <R> a1 a2 <E>
SLOT_TOKENS = 2 * REFERENCE_TOKENS  # a document's room for one definition or reference


@dataclass(frozen=True)
class Fact:
    """A key, the alias it refers to and the alias's value.

    key, alias: [2] int64. value: token id. definition, reference: (document, index in it) of the
    first token of either; the definition's document comes first, or is the same and it stands
    before the reference.
    """

    key: Ids
    alias: Ids
    value: int
    definition: tuple[int, int]
    reference: tuple[int, int]

    @property
    def is_local(self) -> bool:
        """Whether one document holds both the definition and the reference."""
        return self.definition[0] == self.reference[0]

    @property
    def query(self) -> Ids:
        """`<Q> key <S>`: [4] int64."""
        return query(self.key)

    @property
    def answer(self) -> Ids:
        """`value <E>`, what a model must generate after the question: [2] int64."""
        return answer(self.value)

    @property
    def resolving(self) -> tuple[int, int]:
        """(document, index in it) of the reference's last alias token.

        The first token that, with all before it, says what the key stands for.
        """
        document, start = self.reference
        return document, start + REFERENCE_TOKENS - 2


@dataclass(frozen=True)
class TwoHopText:
    """A system prompt and documents, in the order in which they make one text.

    system: [S] int64, begins with `<bos>`. documents: [T_d] int64 each, without `<bos>`.
    facts: in random order.
    """

    system: Ids
    documents: tuple[Ids, ...]
    facts: tuple[Fact, ...]

    @property
    def ids(self) -> Ids:
        """The text as one prompt."""
        return np.concatenate([self.system, *self.documents])

    @property
    def starts(self) -> tuple[int, ...]:
        """The position in the text at which each document starts."""
        ends = np.cumsum([len(self.system), *map(len, self.documents)])
        return tuple(int(end) for end in ends[:-1])

    def position(self, place: tuple[int, int]) -> int:
        """The position in the text of index `place[1]` of document `place[0]`."""
        return self.starts[place[0]] + place[1]


class TwoHopTask:
    """Draws texts of documents that refer to one another.

    Not thread-safe: every draw advances the generator of `needles`.
    """

    def __init__(self, vocab: int = 1024, seed: int = 0) -> None:
        """vocab: number of token ids, at least 64. Raises ValueError if smaller."""
        self.needles = NeedleTask(vocab, seed)

    def text(
        self,
        documents: Sequence[int],
        facts: int,
        *,
        local: int = 0,
        system: int = 32,
    ) -> TwoHopText:
        """A text with documents of the given token counts and `facts` facts across them.

        documents: tokens of each document; the first half (rounded up) hold the definitions of
        facts across documents, the others their references, so that either half may be reordered.
        local: further facts, whose definition and reference share a document.
        system: tokens of the system prompt, which is filler.
        Raises ValueError if there are fewer than two documents, one is empty, or the facts do
        not fit.
        """
        if len(documents) < 2:
            raise ValueError(f"need at least 2 documents, got {len(documents)}")
        if min(documents) < 1:
            raise ValueError(f"need documents of at least 1 token, got one of {min(documents)}")
        if system < 1 or facts < 0 or local < 0:
            raise ValueError(
                f"need system >= 1, facts >= 0 and local >= 0, got {system}, {facts} and {local}"
            )
        task, rng = self.needles, self.needles.rng
        names = rng.permutation(task.keys(2 * (facts + local)))
        keys, aliases = names[: facts + local], names[facts + local :]
        values = [int(value[0]) for value in task.values([1] * (facts + local))]
        prompt = np.concatenate([[BOS], task.filler(system - 1)])
        texts = tuple(task.filler(tokens) for tokens in documents)

        half = (len(documents) + 1) // 2
        free = [list(rng.permutation(tokens // SLOT_TOKENS)) for tokens in documents]
        told = [self._take(free, range(half)) for _ in range(facts)]
        referred = [self._take(free, range(half, len(documents))) for _ in range(facts)]
        for _ in range(local):
            first = self._take(free, range(len(documents)), at_least=2)
            second = self._take(free, [first[0]])
            told.append(min(first, second))
            referred.append(max(first, second))
        drawn = [Fact(*fact) for fact in zip(keys, aliases, values, told, referred, strict=True)]
        for fact in drawn:
            document, start = fact.definition
            texts[document][start : start + DEFINITION_TOKENS] = definition(fact.alias, fact.value)
            document, start = fact.reference
            texts[document][start : start + REFERENCE_TOKENS] = reference(fact.key, fact.alias)
        order = rng.permutation(len(drawn))
        return TwoHopText(prompt, texts, tuple(drawn[i] for i in order))

    def _take(
        self, free: list[list[int]], among: Iterable[int], at_least: int = 1
    ) -> tuple[int, int]:
        """A place in a random document of `among`, likelier the more free slots it has."""
        rng = self.needles.rng
        room = {document: len(free[document]) for document in among}
        room = {document: slots for document, slots in room.items() if slots >= at_least}
        if not room:
            raise ValueError(
                f"the facts do not fit: every definition and every reference takes {SLOT_TOKENS} "
                "tokens of a document; ask for fewer facts or longer documents"
            )
        share = np.array(list(room.values())) / sum(room.values())
        document = int(rng.choice(list(room), p=share))
        # Jittered inside its slot: no overlap, no regular grid.
        jitter = int(rng.integers(0, SLOT_TOKENS - REFERENCE_TOKENS + 1))
        return document, int(free[document].pop()) * SLOT_TOKENS + jitter


def definition(alias: Ids, value: int) -> Ids:
    """`<K> alias <S> value <E>`: [DEFINITION_TOKENS] int64."""
    return np.array([KEY, *alias, SEPARATOR, value, END], np.int64)


def reference(key: Ids, alias: Ids) -> Ids:
    """`<K> key <R> alias <E>`: [REFERENCE_TOKENS] int64."""
    return np.array([KEY, *key, REFERENCE, *alias, END], np.int64)


def query(key: Ids) -> Ids:
    """`<Q> key <S>`, the question whose continuation is the answer: [4] int64."""
    return np.array([QUESTION, *key, SEPARATOR], np.int64)


def answer(value: int) -> Ids:
    """`value <E>`, what a model must generate after the question: [2] int64."""
    return np.array([value, END], np.int64)


def shipped_model_path() -> Path:
    """The directory of the tiny model that was trained on this task and comes with kvpager.

    Raises FileNotFoundError, naming the places looked at, if it is in none of them.
    """
    return needles.shipped_model_path("tiny-two-hop")
