"""Teacher-forced log-probabilities of given tokens, from forwards like any other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpager._model.seam.state import EMPTY
from kvpager._runtime.execution.batch import Batch
from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.scheduling.agreement import Agreement
from kvpager._runtime.scheduling.chunks import next_chunk
from kvpager._runtime.scheduling.options import MOST_ALTERNATIVES, as_temperature
from kvpager._runtime.scheduling.recompute import run
from kvpager._support.arguments import Integer, as_integer
from kvpager._support.tokens import TokenIds
from kvpager.errors import InvalidArgumentError
from kvpager.progress import Progress, reporting
from kvpager.sampling import Alternatives, Distribution


@dataclass(frozen=True)
class Score:
    """Log-probability (natural) of every token but the first, given all tokens before it.

    tokens: [n] int32. logprobs: [n - 1] float32, logprobs[i] belongs to tokens[i + 1].
    top_logprobs: [n - 1], for each the most likely tokens there, as a `Completion` has them; None
    unless requested.
    """

    tokens: TokenIds
    logprobs: npt.NDArray[np.float32]
    top_logprobs: list[Alternatives] | None = None

    @property
    def sum(self) -> float:
        """Log-probability of the whole text after its first token."""
        return float(self.logprobs.sum(dtype=np.float64))

    @property
    def mean(self) -> float:
        """Mean log-probability per token."""
        return float(self.logprobs.mean(dtype=np.float64))

    @property
    def perplexity(self) -> float:
        """exp(-mean)."""
        return float(np.exp(-self.mean))

    def against(self, logprobs: npt.ArrayLike) -> Agreement:
        """Compares these with log-probabilities computed earlier, for example during generation.

        Args:
            logprobs: [k] float32, of the last k tokens, 1 <= k <= n - 1.

        Raises:
            InvalidArgumentError: wrong shape or dtype.
        """
        seen = np.asarray(logprobs)
        if seen.ndim != 1 or not 1 <= seen.size <= self.logprobs.size:
            raise InvalidArgumentError(
                f"logprobs has shape {list(seen.shape)}; expected [k] with k from 1 to "
                f"{self.logprobs.size}, the last k of the tokens that were scored"
            )
        exact = seen.astype(np.float32)
        if seen.dtype.kind != "f" or (exact.astype(seen.dtype) != seen)[~np.isnan(seen)].any():
            raise InvalidArgumentError(
                f"logprobs has dtype {seen.dtype} and values that are no float32; expected the "
                "numbers as they were given: rounding them would hide a difference"
            )
        return Agreement.between(exact, self.logprobs[-seen.size :])


def score_tokens(
    core: EngineCore,
    ids: TokenIds,
    progress: Progress,
    top_logprobs: Integer = 0,
    temperature: float = 1.0,
) -> Score:
    """See `Engine.score`."""
    temperature = as_temperature(temperature, "temperature")
    count = as_integer(top_logprobs, "top_logprobs", 0, MOST_ALTERNATIVES)
    if len(ids) < 2:
        raise InvalidArgumentError("ids has 1 token; expected at least 2: the first is not scored")
    logprobs = np.empty(len(ids) - 1, dtype=np.float32)
    top: list[Alternatives] = []
    core.positions.check(len(ids) - 1, "ids")
    fed = ids[:-1]  # the last token's own K/V are not needed to score it
    sequence = core.pager.sequence(salt=core.tenant.namespace)
    state = EMPTY
    try:
        sequence.reserve(len(fed))
        with reporting(progress, "score", len(fed)) as report:
            while (start := sequence.length) < len(fed):
                if core.facts.recurrence is not None:
                    batch = next_chunk(core, sequence, fed, start, state)
                else:
                    batch = Batch(core.rows, exact=core.config.exact is not False)
                    batch.commit(sequence, start, fed[start : start + core.rows])
                batch.wanted.extend(range(batch.used))
                for row, logits in enumerate(run(core, batch)):
                    distribution = Distribution(logits, temperature)
                    distribution.check(start + row + 1)
                    token = int(ids[start + row + 1])
                    logprobs[start + row] = distribution.log_probability(token)
                    if count:
                        top.append(distribution.top(count))
                state = batch.after or EMPTY
                report(start + batch.used)
    finally:
        sequence.close()
    return Score(tokens=ids, logprobs=logprobs, top_logprobs=top if count else None)
