"""The same prompts through transformers alone, to show what the promise prevents.

Two ways to the same tokens, as everybody uses them: a kept prefix with a suffix of whatever length
comes, and one-token decode; each against one prefill of all the tokens. Plain transformers, its own
attention (sdpa) and cache; nothing of kvpager takes part but the comparison and the choice of
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvpager._model.seam.causal_lm import handed
from kvpager._runtime.scheduling.agreement import Agreement
from kvpager._support.tokens import TokenIds
from kvpager.sampling import Sampling, log_probability
from kvpager.verify.bits import Comparison, compare_bits
from kvpager.verify.relations.stock import plain_attention

ATTENTION = "sdpa"
LEAST_TOKENS = 8  # of a prompt, so that it has a beginning to keep and a suffix


def prefix_tokens(prompt_tokens: int, number: int) -> int:
    """How much of prompt number `number` is its kept beginning.

    Suffixes have lengths of their own, as the next message of a conversation has.
    """
    return prompt_tokens - (3 + 7 * number) % (prompt_tokens - 4) - 1


def compare_with_transformers(
    model: Any,
    prompts: Sequence[TokenIds],
    *,
    new_tokens: int = 40,
    sampling: Sampling | None = None,
) -> tuple[PeerRoute, PeerRoute]:
    """Prefix reuse and one-token decode, by every prompt through transformers.

    Args:
        model: a transformers causal LM; its attention is sdpa meanwhile, then what it was.
        prompts: token ids [n] each, n >= 8.
        new_tokens: of the text that is looked at for forks, at least 2.
        sampling: how tokens are chosen, by the same seed on every way; None: greedily.

    Raises:
        ValueError: no prompts, one that is too short, or too few new tokens.
    """
    if not prompts or any(len(ids) < LEAST_TOKENS for ids in prompts):
        raise ValueError(f"prompts is empty or has one of fewer than {LEAST_TOKENS} tokens")
    if new_tokens < 2:
        raise ValueError(f"new_tokens is {new_tokens}; the first comes from a prefill: give 2")
    sampling = sampling or Sampling()
    reuse, decode = PeerRoute("prefix reuse"), PeerRoute("one-token decode")
    with plain_attention(model, ATTENTION), torch.inference_mode():
        for number, prompt in enumerate(prompts):
            ids = torch.from_numpy(np.asarray(prompt, dtype=np.int64)).to(model.device)[None]
            once = _prefilled(model, ids)
            cold = _continued(model, once, sampling, new_tokens)
            kept = prefix_tokens(len(prompt), number)
            warm = _continued(model, _reused(model, ids, kept), sampling, new_tokens)
            place = f"prompt {number}: logits of the last token after {kept} reused"
            # The logits after the prompt; further ones come from one-token decode on both sides.
            reuse.add(cold, warm, compare_bits(warm.logits[0], cold.logits[0], place))
            # Every position the text was decoded at, against one prefill of prompt and text.
            text = torch.tensor([cold.tokens[:-1]], device=model.device)
            whole = torch.cat([ids, text], dim=1)
            together = _prefilled(model, whole).logits[ids.shape[1] - 1 :]
            again = _chosen(together, sampling, ids.shape[1])
            place = f"prompt {number}: logits of decoded tokens"
            comparison = compare_bits(cold.logits[1:], together[1:], place)
            decode.add(cold, again, comparison, forced=True)
    return reuse, decode


@dataclass
class PeerRoute:
    """One way through transformers over all prompts, against one prefill of the same tokens.

    comparison: of logits. first_forks: per prompt, the number of the first generated token that
    differs, or None. agreement: of the chosen tokens' log-probabilities, as far as both ways were
    given the same tokens before: all decoded tokens, or those up to a fork after reuse.
    """

    name: str
    comparison: Comparison = field(default_factory=Comparison)
    first_forks: list[int | None] = field(default_factory=list)
    _expected: list[float] = field(default_factory=list)
    _actual: list[float] = field(default_factory=list)

    def add(
        self, expected: _Text, actual: _Text, comparison: Comparison, *, forced: bool = False
    ) -> None:
        """Both ways of one prompt.

        forced: each logit of `actual` was computed after the tokens of `expected`, so that those
        after a fork compare too; and the first token comes from the same logits, so that it tells
        nothing.
        """
        first = int(forced)
        pairs = zip(expected.tokens[first:], actual.tokens[first:])
        fork = next((i for i, (a, b) in enumerate(pairs, start=first) if a != b), None)
        stop = len(expected.tokens) if forced or fork is None else fork + 1
        chosen = expected.tokens[first:stop]
        self._expected += _logprobs(expected.logits[first:stop], chosen)
        self._actual += _logprobs(actual.logits[first:stop], chosen)
        self.first_forks.append(fork)
        self.comparison += comparison

    @property
    def forks(self) -> int:
        """Prompts whose text differs from what one prefill would have chosen."""
        return sum(fork is not None for fork in self.first_forks)

    @property
    def agreement(self) -> Agreement:
        return Agreement.between(
            np.array(self._expected, dtype=np.float32), np.array(self._actual, dtype=np.float32)
        )


@dataclass
class _State:
    """Logits [n, vocab] of the last forward, and the cache it left."""

    logits: torch.Tensor
    cache: DynamicCache


@dataclass
class _Text:
    """Tokens, and the logits [len(tokens), vocab] each was chosen from."""

    tokens: list[int]
    logits: torch.Tensor


def _prefilled(model: Any, ids: torch.Tensor) -> _State:
    cache = DynamicCache(config=model.config)
    return _State(_logits(model(ids, use_cache=True, **handed(model, cache))), cache)


def _reused(model: Any, ids: torch.Tensor, kept: int) -> _State:
    """The last of the prompt's tokens through a cache that holds its first `kept`."""
    state = _prefilled(model, ids[:, :kept])
    output = model(ids[:, kept:], use_cache=True, **handed(model, state.cache))
    return _State(_logits(output), state.cache)


def _continued(model: Any, state: _State, sampling: Sampling, new_tokens: int) -> _Text:
    """Text decoded one token at a time; uses the cache up."""
    steps, tokens = [state.logits[-1]], list[int]()
    while True:
        tokens.append(sampling.choose(steps[-1], int(state.cache.get_seq_length())))
        if len(tokens) == new_tokens:
            return _Text(tokens, torch.stack(steps))
        last = torch.tensor([tokens[-1:]], device=model.device)
        output = model(last, use_cache=True, **handed(model, state.cache))
        steps.append(_logits(output)[-1])


def _chosen(logits: torch.Tensor, sampling: Sampling, start: int) -> _Text:
    """What the logits of consecutive positions would have chosen, the first for `start`."""
    return _Text([sampling.choose(row, start + i) for i, row in enumerate(logits)], logits)


def _logprobs(logits: torch.Tensor, tokens: list[int]) -> list[float]:
    return [log_probability(row, token) for row, token in zip(logits, tokens)]


def _logits(output: Any) -> torch.Tensor:
    logits: torch.Tensor = output.logits[0].cpu()  # where tokens are chosen
    return logits
