"""A caller's logits processors, as transformers has them, for one generation of one text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvpager._support.arguments import listed, refusal
from kvpager.errors import InvalidArgumentError

TokenIds: TypeAlias = npt.NDArray[np.int32]
Logits: TypeAlias = npt.NDArray[np.float64]
Process: TypeAlias = Callable[[TokenIds, Logits], Logits]

# Takes (input_ids [1, n] int64, scores [1, vocab] float32), on the CPU; returns scores.
LogitsProcessor: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def as_processors(given: Iterable[LogitsProcessor] | None) -> tuple[LogitsProcessor, ...]:
    """The processors of a list. Raises InvalidArgumentError unless it is one of callables."""
    if given is None:
        return ()
    expected = "a list of callables (input_ids, scores)"
    processors = listed(given, "logits_processor", expected)
    for place, one in enumerate(processors):
        if not callable(one) or isinstance(one, type):
            raise refusal(f"logits_processor[{place}]", one, "a callable (input_ids, scores)")
    return tuple(processors)


class Processors:
    """Calls each processor once per token of a text, in order.

    Speculation chooses a token before it is part of the text, and again when it is; a processor
    that follows the text, such as one of a grammar, must see each token once. So the choice after a
    text is kept, and given again after the same text. An error is raised again
    when the token is taken.
    """

    def __init__(
        self, processors: tuple[LogitsProcessor, ...], constrain: Process | None = None
    ) -> None:
        """constrain: changes what the processors return, in float64."""
        self._processors = processors
        self._constrain = constrain
        self._text: TokenIds = np.zeros(0, dtype=np.int32)  # of the last call
        self._chosen: dict[int, int | Exception] = {}  # by the length of the beginning of _text

    def choose(self, tokens: TokenIds, choose: Callable[[Process], int]) -> int:
        """The token after a text, as `choose` chooses it when it has the processors' work.

        Raises:
            InvalidArgumentError: a processor raised (its error is the cause), or returned no scores
                [1, vocab].
            PagerError: of `choose`.
        """
        known = self._recall(tokens)
        if known is None:
            try:
                known = choose(self._process)
            except Exception as error:
                self._chosen[len(tokens)] = error
                raise
            self._chosen[len(tokens)] = known
        elif isinstance(known, Exception):
            del self._chosen[len(tokens)]
            raise known
        return known

    def _recall(self, tokens: TokenIds) -> int | Exception | None:
        """The choice after this text, if there was one; forgets those after other texts."""
        common = min(len(tokens), len(self._text))
        if not np.array_equal(tokens[:common], self._text[:common]):
            different = int(np.flatnonzero(tokens[:common] != self._text[:common])[0])
            self._chosen = {n: chosen for n, chosen in self._chosen.items() if n <= different}
            self._text = tokens
        elif len(tokens) > len(self._text):
            self._text = tokens
        return self._chosen.get(len(tokens))

    def _process(self, tokens: TokenIds, values: Logits) -> Logits:
        if self._processors:
            values = self._call(tokens, values)
        return values if self._constrain is None else self._constrain(tokens, values)

    def _call(self, tokens: TokenIds, values: Logits) -> Logits:
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        with np.errstate(over="ignore"):  # beyond float32: infinity, which is refused
            scores = torch.from_numpy(values.astype(np.float32))[None]
        shape = scores.shape
        with torch.no_grad():
            for place, processor in enumerate(self._processors):
                name = f"logits_processor[{place}], {type(processor).__name__},"
                try:
                    scores = processor(ids, scores)
                except Exception as error:
                    raise InvalidArgumentError(
                        f"{name} raised {type(error).__name__}: {error}; generate without it, or "
                        "mend it"
                    ) from error
                if not isinstance(scores, torch.Tensor) or scores.shape != shape:
                    found = (
                        f"a tensor {list(scores.shape)}"
                        if isinstance(scores, torch.Tensor)
                        else repr(scores)
                    )
                    raise InvalidArgumentError(
                        f"{name} returned {found}; expected scores, a tensor {list(shape)}"
                    )
            result: Logits = scores[0].to("cpu", torch.float64).numpy()
        return result
