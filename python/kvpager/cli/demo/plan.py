"""The conversation that a demo holds: a document, and the questions of every turn."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvpager.cli.failure import UsageError
from kvpager.needles import NeedleTask
from kvpager.stores.permissions import open_private

ANSWER_TOKENS = 4


@dataclass(frozen=True)
class Question:
    """Token ids to append, and what is known of the answer.

    answer: the right ids, and needle: the half-open range of positions that hold them; both None
    where the model was not trained to look anything up.
    """

    ids: list[int]
    answer: list[int] | None = None
    needle: tuple[int, int] | None = None


@dataclass(frozen=True)
class Plan:
    """A document and, per turn, its questions; every answer has ANSWER_TOKENS tokens."""

    document: list[int]
    turns: list[list[Question]]

    @property
    def tokens(self) -> int:
        """Tokens of the whole conversation, answers included."""
        asked = sum(len(question.ids) for turn in self.turns for question in turn)
        return len(self.document) + asked + ANSWER_TOKENS * sum(map(len, self.turns))

    def save(self, path: Path) -> None:
        """Writes it for other processes; `load` is the inverse."""
        with open_private(path) as file:
            file.write(json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, path: Path) -> Plan:
        """What `save` wrote."""
        values = json.loads(path.read_text(encoding="utf-8"))
        turns = [[Question(**question) for question in turn] for turn in values["turns"]]
        return cls(values["document"], turns)


def needle_plan(
    *, context: int, needles: int, turns: int, vocab: int, seed: int, avoid: list[tuple[int, int]]
) -> Plan:
    """A document of needles that the shipped model can find; each is asked for once.

    Raises:
        UsageError: the needles do not fit.
    """
    task = NeedleTask(vocab, seed)
    try:
        document = task.document(context, needles, avoid=avoid)
    except ValueError as error:
        raise UsageError(f"--context {context} with --needles {needles}: {error}") from error
    questions = [
        Question(
            ids=task.query(document.keys[needle]).tolist(),
            answer=task.answer(document.values[needle]).tolist(),
            needle=document.span(needle),
        )
        for needle in task.rng.permutation(needles)
    ]
    return Plan(document.ids.tolist(), _dealt(questions, turns))


def random_plan(*, context: int, questions: int, turns: int, vocab: int, seed: int) -> Plan:
    """Random ids for a model of which nothing is known: bits can be compared, needles cannot."""
    rng = np.random.default_rng(seed)
    document = rng.integers(0, vocab, context).tolist()
    asked = [Question(rng.integers(0, vocab, 4).tolist()) for _ in range(questions)]
    return Plan(document, _dealt(asked, turns))


def _dealt(questions: list[Question], turns: int) -> list[list[Question]]:
    """In order, as evenly as can be; earlier turns get what is over."""
    parts = np.array_split(np.arange(len(questions)), turns)
    return [[questions[i] for i in part] for part in parts]
