"""Speculation: tokens that a cheap method proposes and a forward of the model verifies.

Proposed tokens are further rows of a forward that runs anyway. They do not change the logits of any
other row, so a row is kept exactly if sampling gives its token: the result is the same text with
the same bits as decoding token by token, in fewer forwards.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Protocol, TypeAlias, runtime_checkable

from kvpager._support.arguments import is_finite, takes
from kvpager._support.tokens import TokenIds
from kvpager.errors import InvalidArgumentError
from kvpager.speculation.prompt_lookup import PromptLookup
from kvpager.speculation.proposal_length import ProposalLength


@runtime_checkable
class Proposer(Protocol):
    """Guesses the next tokens of a text. One per session; it never changes the text.

    It may have an attribute `guess_cost`: the time of one guess relative to a forward of the model,
    0 or more; 0 if missing. The cost decides how many tokens are requested.

    Example:
        >>> class Counting:
        ...     def propose(self, tokens, count):
        ...         return range(tokens[-1] + 1, tokens[-1] + 1 + count)
        >>> session.generate(64, speculate=Counting)
    """

    def propose(self, tokens: TokenIds, count: int) -> Sequence[int]:
        """Returns at most `count` token ids that may follow `tokens`; may return none.

        Between calls the text may grow by any number of tokens, or be cut and changed.

        Args:
            tokens: the whole text so far, [n] int32, read-only.
            count: most ids to return, at least 1.
        """
        ...


# What `speculate=` takes: DRAFT, a name of PROPOSERS, a callable that returns a fresh Proposer for
# each session, or None.
Speculate: TypeAlias = str | Callable[[], Proposer] | None

PROPOSERS: Mapping[str, Callable[[], Proposer]] = MappingProxyType({"prompt-lookup": PromptLookup})
DRAFT = "draft"  # the engine's draft model, which guesses for all sessions of a forward together


@dataclass(frozen=True)
class SpeculationStats:
    """Counters of speculation; two of them add up with +.

    Attributes:
        forwards: forwards that continued the text.
        proposed: rows that speculation added to them.
        accepted: proposed rows whose token became the text's.
        tokens: tokens the text grew by: one per forward, and the accepted ones.
    """

    forwards: int = 0
    proposed: int = 0
    accepted: int = 0
    tokens: int = 0

    @property
    def acceptance(self) -> float:
        """The share accepted / proposed; 0 if none was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def tokens_per_forward(self) -> float:
        """1 without speculation; 0 if no forward ran."""
        return self.tokens / self.forwards if self.forwards else 0.0

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        return SpeculationStats(
            self.forwards + other.forwards,
            self.proposed + other.proposed,
            self.accepted + other.accepted,
            self.tokens + other.tokens,
        )


class Speculation:
    """One session's counters and its choice of proposal lengths; subclasses make the guesses.

    Attributes:
        stats: counters so far.
    """

    def __init__(self, guess_cost: float = 0.0) -> None:
        """`guess_cost`: cost of one guess relative to a forward of the model."""
        self.stats = SpeculationStats()
        self._length = ProposalLength(guess_cost)

    def choose(self, *, room: int, used: int, fit: Callable[[int], int], paid: int = 0) -> int:
        """How many tokens to guess now; often none. See `ProposalLength.choose`."""
        return self._length.choose(room=room, used=used, fit=fit, paid=paid)

    def observe(self, proposed: int, accepted: int) -> None:
        """Counts a forward that continued the text; `accepted` of its `proposed` rows were kept."""
        assert 0 <= accepted <= proposed
        self.stats += SpeculationStats(1, proposed, accepted, 1 + accepted)
        self._length.observe(proposed, accepted)


class Drafted(Speculation):
    """Guesses by the engine's draft model; `Packing` asks it for many sessions at once."""


class Proposed(Speculation):
    """Guesses by the session's own proposer."""

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        self._proposer = proposer
        self._name = type(proposer).__name__
        self._vocab_size = vocab_size
        super().__init__(self._guess_cost())

    def _guess_cost(self) -> float:
        cost = getattr(self._proposer, "guess_cost", 0.0)
        if not is_finite(cost) or cost < 0:
            raise InvalidArgumentError(
                f"speculate: {self._name}.guess_cost is {cost!r}; expected a number, 0 or more"
            )
        return float(cost)

    def propose(
        self, tokens: TokenIds, *, room: int, used: int, fit: Callable[[int], int]
    ) -> list[int]:
        """Token ids that may follow `tokens`; often none.

        Args:
            tokens: the text, [n] int32, its pending token included.
            room: most ids to return; none if it is not positive.
            used: rows the forward has so far, this session's included.
            fit: maps used rows to the rows that the forward runs with.

        Raises:
            InvalidArgumentError: the proposer raised (its error is the cause), or did not return at
                most `room` ids of the vocabulary.
        """
        count = self.choose(room=room, used=used, fit=fit)
        if not count:
            return []
        text = tokens.view()
        text.flags.writeable = False
        try:
            proposed: Iterable[int] = self._proposer.propose(text, count)
        except Exception as error:
            raise InvalidArgumentError(
                f"speculate: {self._name}.propose raised {type(error).__name__}: {error}; "
                "generate without it, or mend it"
            ) from error
        return self._checked(proposed, count)

    def _checked(self, proposed: Iterable[int], count: int) -> list[int]:
        failed = f"speculate: {self._name}.propose returned"
        try:
            values = list(islice(proposed, count + 1))  # the iterable may be endless
        except TypeError as error:
            raise InvalidArgumentError(
                f"{failed} {proposed!r}; expected a sequence of token ids"
            ) from error
        if len(values) > count:
            raise InvalidArgumentError(f"{failed} more than {count} ids; expected at most those")
        ids = []
        for place, value in enumerate(values):
            try:
                token = operator.index(value)
            except TypeError as error:
                raise InvalidArgumentError(
                    f"{failed} {value!r} at [{place}]; expected integers"
                ) from error
            if isinstance(value, bool) or not 0 <= token < self._vocab_size:
                raise InvalidArgumentError(
                    f"{failed} {value!r} at [{place}]; "
                    f"expected a token id from 0 to {self._vocab_size - 1}"
                )
            ids.append(token)
        return ids


def resolve_speculation(
    speculate: Speculate,
    *,
    vocab_size: int,
    exact: str | bool,
    draft_cost: float | None = None,
) -> Callable[[], Speculation] | None:
    """Returns a function that makes one Speculation per session; None for None.

    Args:
        speculate: see `Speculate`.
        vocab_size: a proposer may only return ids below it.
        exact: the engine's.
        draft_cost: cost of a guess of the engine's draft model, relative to a forward; None
            without a draft.

    Raises:
        InvalidArgumentError: `speculate` is invalid, or the engine's rows depend on other rows of a
            forward (`exact` is not "all"). The function raises it if a callable returns no
            Proposer.
    """
    if speculate is None:
        return None
    drafts = isinstance(speculate, str) and speculate == DRAFT
    make = None if drafts else _maker(speculate)
    if exact != "all":
        raise InvalidArgumentError(
            f"speculate is given, but PagerConfig.exact is {exact!r}, under which a token's bits "
            'depend on how many rows its forward has; use exact="all", or speculate=None'
        )
    if make is None:
        if draft_cost is None:
            raise InvalidArgumentError(
                f'speculate is "{DRAFT}", but the engine has no draft model; make it with '
                "Engine(model, ..., draft=small_model), or use another proposer"
            )
        return partial(Drafted, draft_cost)

    def fresh() -> Speculation:
        proposer = make()
        if not isinstance(proposer, Proposer) or isinstance(proposer, type):
            raise InvalidArgumentError(
                f"speculate returned {proposer!r}; expected an object with "
                "propose(tokens, count), a kvpager.speculation.Proposer"
            )
        return Proposed(proposer, vocab_size)

    return fresh


def _maker(speculate: object) -> Callable[[], object]:
    if isinstance(speculate, str) and speculate in PROPOSERS:
        return PROPOSERS[speculate]
    if callable(speculate) and takes(speculate, 0):
        return speculate
    names = ", ".join(f'"{name}"' for name in (*PROPOSERS, DRAFT))
    expected = f"expected {names}, a callable that returns a fresh Proposer, or None"
    if isinstance(speculate, Proposer):
        name = type(speculate).__name__
        raise InvalidArgumentError(
            f"speculate is an instance of {name}, which sessions would share; {expected}, such as "
            f"lambda: {name}(...)"
        )
    raise InvalidArgumentError(f"speculate is {speculate!r}; {expected}")
