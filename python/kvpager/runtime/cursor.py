"""Where a session stands over its sequence: what is committed, owed, pending and ahead."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from kvpager.pager import Sequence
from kvpager.runtime.sampling import Sampling
from kvpager.runtime.tokens import TokenIds

_NONE = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class Lookahead:
    """Accepted speculation that nobody has been told yet: rows of the sequence from `start` on.

    logits: [len(tokens), vocab], after each of them. sampling: what chose them.
    """

    start: int
    tokens: tuple[int, ...]
    logits: torch.Tensor
    sampling: Sampling

    @property
    def end(self) -> int:
        """Where the sequence ends while it holds them."""
        return self.start + len(self.tokens)

    def rest(self) -> Lookahead:
        """All but the first."""
        return replace(self, start=self.start + 1, tokens=self.tokens[1:], logits=self.logits[1:])


class Cursor:
    """One session's position in its text, over a sequence that holds K/V of most of it.

        0            committed            told
        | K/V are there | owed ............ | pending |
        | K/V are there | ahead: K/V are there, tokens not told |

    *Owed* tokens belong to the text, but their K/V have to be computed (again). The *pending* one
    was sampled last; its K/V come with the next forward. What is *ahead* was committed by a forward
    that verified a guess, and is no part of the text until it is sampled and becomes pending in its
    turn; every other step drops it.

    Each value holds for one position only and is void at any other, so that a commit or a trim of
    the sequence, at whatever moment an exception strikes, leaves nothing that is wrong.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self._provisional: int | None = None  # see `provisional`; the first of such rows
        self._pending: tuple[int, int] | None = None  # (position, token)
        self._logits: tuple[int, torch.Tensor] | None = None  # (position of what they predict, ...)
        self._owed: tuple[int, TokenIds] | None = None  # (position of the first, tokens)
        self._ahead: Lookahead | None = None

    def over(self, sequence: Sequence) -> Cursor:
        """The same place over a copy of the sequence."""
        assert self._ahead is None
        twin = Cursor(sequence)
        twin._provisional = self._provisional
        twin._pending, twin._logits, twin._owed = self._pending, self._logits, self._owed
        return twin

    @property
    def committed(self) -> int:
        """Tokens of the text whose K/V the sequence holds."""
        length = self.sequence.length
        ahead = self._ahead
        return length if ahead is None or length != ahead.end else ahead.start

    @property
    def provisional(self) -> bool:
        """Whether rows after the last sealed chunk may have come from a forward of any row count.

        Set before such a row is committed.
        """
        return self._provisional is not None

    @provisional.setter
    def provisional(self, value: bool) -> None:
        if not value:
            self._provisional = None
        elif self._provisional is None or self._provisional > self.committed:
            self._provisional = self.committed

    @property
    def owed(self) -> TokenIds:
        """Tokens of the text after the committed ones, whose K/V have to be computed."""
        if self._owed is None:
            return _NONE
        start, tokens = self._owed
        done = self.committed - start
        return tokens[done:] if done >= 0 else _NONE

    @property
    def told(self) -> int:
        """Where the next sampled token goes."""
        if self._owed is None:
            return self.committed
        return self.committed + len(self.owed)

    @property
    def pending(self) -> int | None:
        """The sampled token that no forward has taken yet."""
        if self._pending is not None and self._pending[0] == self.told:
            return self._pending[1]
        return None

    @property
    def length(self) -> int:
        """Tokens of the text, the pending one included."""
        return self.told + (self.pending is not None)

    @property
    def tokens(self) -> TokenIds:
        """All of the text, [length] int32, the pending token included; a copy."""
        held = self.sequence.tokens[: self.committed]
        owed, pending = self.owed, self.pending
        if not owed.size and pending is None:
            return held
        last = _NONE if pending is None else np.array([pending], dtype=np.int32)
        return np.concatenate([held, owed, last])

    @property
    def known_logits(self) -> torch.Tensor | None:
        """Logits for the position after the text without its pending token, if known."""
        if self._logits is not None and self._logits[0] == self.told:
            return self._logits[1]
        return None

    @property
    def ready(self) -> bool:
        """Whether the next token can be chosen without a forward."""
        told = self.told
        pending = self._pending is not None and self._pending[0] == told
        return not pending and self._logits is not None and self._logits[0] == told

    def keep_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Remembers, in a copy, the logits after the last committed token."""
        kept = logits.clone()
        self._logits = (self.told, kept)
        return kept

    def keep_pending(self, token: int | None) -> None:
        """Makes a token the pending one, wherever it was sampled; or none."""
        self._pending = None if token is None else (self.told, token)

    def sample(self, sampling: Sampling) -> int:
        """Chooses the next token and makes it the pending one. REQUIRES: ready."""
        position, ahead = self.told, self._ahead
        if ahead is not None and position == ahead.start and sampling == ahead.sampling:
            token = ahead.tokens[0]
        else:
            assert self._logits is not None
            assert self._logits[0] == position
            token = sampling.choose(self._logits[1], position)
        self._pending = (position, token)
        return token

    def look_ahead(self, ahead: Lookahead) -> None:
        """What a forward is about to commit beyond the pending token; void until it has."""
        self._ahead = ahead

    def advance(self) -> bool:
        """Commits the pending token without a forward, where it is the first one ahead."""
        ahead = self._ahead
        if ahead is None or self.pending != ahead.tokens[0] or self.committed != ahead.start:
            return False
        self._logits = (ahead.start + 1, ahead.logits[0])
        self._ahead = ahead.rest() if len(ahead.tokens) > 1 else None
        return True

    def drop_ahead(self) -> None:
        """Trims what is ahead away. It fills no chunk, so that this takes no room."""
        if self._ahead is not None:
            self.sequence.trim(self.committed)
            self._ahead = None

    def owe(self, text: TokenIds) -> None:
        """What of a text follows the tokens held is owed."""
        self._owed = (0, text)

    def owe_from(self, position: int) -> None:
        """Gives up the K/V from `position` on; the tokens they were of are owed from now on."""
        if position >= self.committed:
            return
        told = np.concatenate([self.sequence.tokens[position : self.committed], self.owed])
        # Before the trim this is what was owed; after it, the tokens that were trimmed as well.
        self._owed = (position, told)
        self.sequence.trim(position)

    def owe_provisional(self, chunk_tokens: int) -> None:
        """Gives up the K/V of rows that must not be sealed; their tokens are owed from now on.

        All of their chunk, where that can be: after a cut a window may have let go of what the
        chunk's first rows need. Those before the first provisional one are exact.
        """
        if self._provisional is None:
            return
        boundary = self.committed // chunk_tokens * chunk_tokens
        within_reach = boundary == 0 or boundary >= self.sequence.earliest_trim
        self.owe_from(boundary if within_reach else self._provisional)
        self._provisional = None

    def cut(self, position: int) -> None:
        """Keeps the tokens [0, position) of the text; the pending one goes, unless it is one."""
        if position > self.told:
            return
        committed = self.committed
        if position < committed:
            self.sequence.trim(position)
            self._owed = None
            if self._provisional is not None and position <= self._provisional:
                self._provisional = None
        elif position < self.told:
            self._owed = (committed, self.owed[: position - committed])
        self._pending = None
        if self._logits is not None and self._logits[0] > position:
            self._logits = None
