"""The shipped model at a long context, as a subject of verification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpager import Dense, PagerConfig, TopK
from kvpager.cli.needles import NeedleTask, shipped_model_path
from kvpager.config import Selection
from kvpager.verify import Subject, relation
from kvpager.verify.sweep import Sweep
from kvpager_bench import subjects

NAME = "shipped"
LENGTH = 32768
POOL_TOKENS = 2048
SELECTIONS: Mapping[str, Selection] = {"dense": Dense(), "topk": TopK(chunks=32)}
# Those whose situations can all lie at the end of a long text.
RELATIONS = [
    relation(name)
    for name in ("self-consistent", "warm", "decoded", "trimmed", "restored", "re-scored")
]


@dataclass(frozen=True)
class LongSweep(Sweep):
    """Few situations, at the end, where everything before has been paged out many times."""

    @property
    def prefixes(self) -> list[int]:
        return [self.length - self.chunk - 7]

    @property
    def windows(self) -> list[tuple[int, int]]:
        return [(self.length - self.chunk - 3, self.length)]

    @property
    def cuts(self) -> list[int]:
        return [self.length - 3 * self.chunk + 5]


class LongSubject(Subject):
    """A subject whose long prompt is really long."""

    def _prepare(self) -> None:
        super()._prepare()
        sweep = self.sweep
        length = len(self._given_prompts[0])
        self.sweep = LongSweep(sweep.rows, sweep.chunk, sweep.ladder, length, sweep.effort)
        self.prompt = self._long_prompt(self.engine().vocab_size)


def subject(selection: str, length: int) -> Subject:
    """The shipped model over a document of `length` tokens, through a pool of POOL_TOKENS."""
    model: Any = subjects.load_model(subjects.SHIPPED)
    document = NeedleTask(seed=1).document(length, 16)
    config = PagerConfig(pool_tokens=POOL_TOKENS, selection=SELECTIONS[selection])
    return LongSubject(
        model,
        config,
        folder=shipped_model_path("tiny-retriever"),
        prompts=[document.ids],
        effort="start",
    )
