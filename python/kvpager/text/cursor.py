"""The position of one conversation: committed, uncomputed, pending and accepted tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from kvpager.logits.processors import Processors
from kvpager.pager import Sequence
from kvpager.sampling import Sampling, choose_after
from kvpager.tokens import TokenIds

_NONE = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class Accepted:
    """Guesses that a forward confirmed and that no caller has received yet.

    The sequence holds their K/V. start: position of the first. logits: [len(tokens), vocab], after
    each of them. sampling, processors: the options that chose them.
    """

    start: int
    tokens: tuple[int, ...]
    logits: torch.Tensor
    sampling: Sampling
    processors: Processors | None = None

    @property
    def end(self) -> int:
        """The position after the last of them."""
        return self.start + len(self.tokens)

    def rest(self) -> Accepted:
        """All but the first."""
        return replace(self, start=self.start + 1, tokens=self.tokens[1:], logits=self.logits[1:])


class Cursor:
    """A position in a text, over a sequence that holds K/V of most of it.

        0            committed                    next_position
        | K/V are there | uncomputed ............ | pending |
        | K/V are there | accepted: K/V are there, not yet part of the text |

    *Uncomputed* tokens belong to the text, but their K/V have to be computed (again). The *pending*
    token was sampled last; the next forward computes its K/V. *Accepted* guesses were committed by
    the forward that verified them. Each becomes part of the text when it is sampled and becomes the
    pending token; every other step drops them.

    Each value is stored with the position it is valid for and is ignored at any other position. So
    an exception between a commit or trim of the sequence and the update here leaves no wrong value.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self._provisional: int | None = None  # position of the first provisional row
        self._pending: tuple[int, int] | None = None  # (position, token)
        self._logits: tuple[int, torch.Tensor] | None = None  # (position of what they predict, ...)
        self._uncomputed: tuple[int, TokenIds] | None = None  # (position of the first, tokens)
        self._accepted: Accepted | None = None

    def copy_to(self, twin: Cursor) -> None:
        """Copies the state to `twin`, a cursor over a fork of the sequence."""
        assert self._accepted is None
        twin._provisional = self._provisional
        twin._pending, twin._logits = self._pending, self._logits
        twin._uncomputed = self._uncomputed

    @property
    def committed(self) -> int:
        """Tokens of the text whose K/V the sequence holds."""
        length = self.sequence.length
        accepted = self._accepted
        return length if accepted is None or length != accepted.end else accepted.start

    @property
    def provisional(self) -> bool:
        """Whether a forward with an unproven row count may have written rows of the open chunk.

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
    def uncomputed(self) -> TokenIds:
        """Tokens of the text after the committed ones, whose K/V have to be computed."""
        if self._uncomputed is None:
            return _NONE
        start, tokens = self._uncomputed
        done = self.committed - start
        return tokens[done:] if done >= 0 else _NONE

    @property
    def next_position(self) -> int:
        """The position of the next sampled token."""
        if self._uncomputed is None:
            return self.committed
        return self.committed + len(self.uncomputed)

    @property
    def pending(self) -> int | None:
        """The token sampled last, if no forward has computed its K/V yet."""
        if self._pending is not None and self._pending[0] == self.next_position:
            return self._pending[1]
        return None

    @property
    def length(self) -> int:
        """Number of tokens of the text, the pending one included."""
        return self.next_position + (self.pending is not None)

    @property
    def tokens(self) -> TokenIds:
        """A copy of the text, [length] int32, the pending token included."""
        held = self.sequence.tokens[: self.committed]
        uncomputed, pending = self.uncomputed, self.pending
        if not uncomputed.size and pending is None:
            return held
        last = _NONE if pending is None else np.array([pending], dtype=np.int32)
        return np.concatenate([held, uncomputed, last])

    @property
    def known_logits(self) -> torch.Tensor | None:
        """Logits for the position after the text without its pending token, if known."""
        if self._logits is not None and self._logits[0] == self.next_position:
            return self._logits[1]
        return None

    @property
    def ready(self) -> bool:
        """Whether the next token can be sampled without a forward."""
        position = self.next_position
        pending = self._pending is not None and self._pending[0] == position
        return not pending and self._logits is not None and self._logits[0] == position

    def set_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Copies and keeps the logits after the last committed token."""
        kept = logits.clone()
        self._logits = (self.next_position, kept)
        return kept

    def set_pending(self, token: int | None) -> None:
        """Makes `token` the pending one; None: no token is pending."""
        self._pending = None if token is None else (self.next_position, token)

    def sample(self, sampling: Sampling, processors: Processors | None = None) -> int:
        """Samples the next token and makes it the pending one. REQUIRES: ready."""
        position, accepted = self.next_position, self._accepted
        if (
            accepted is not None
            and position == accepted.start
            and sampling == accepted.sampling
            and processors is accepted.processors
        ):
            token = accepted.tokens[0]
        else:
            assert self._logits is not None
            assert self._logits[0] == position
            logits = self._logits[1]
            if sampling.reads_tokens or processors is not None:
                token = choose_after(self.tokens, logits, sampling, processors)
            else:
                token = sampling.choose(logits, position)
        self._pending = (position, token)
        return token

    def accept(self, accepted: Accepted) -> None:
        """Keeps the guesses that a forward is about to commit; ignored until it has."""
        self._accepted = accepted

    def advance(self) -> bool:
        """Commits the pending token without a forward if it is the first accepted one."""
        accepted = self._accepted
        if (
            accepted is None
            or self.pending != accepted.tokens[0]
            or self.committed != accepted.start
        ):
            return False
        self._logits = (accepted.start + 1, accepted.logits[0])
        self._accepted = accepted.rest() if len(accepted.tokens) > 1 else None
        return True

    def drop_accepted(self) -> None:
        """Trims accepted guesses away. They never fill a chunk, so this needs no free block."""
        if self._accepted is not None:
            self.sequence.trim(self.committed)
            self._accepted = None

    def set_text(self, tokens: TokenIds) -> None:
        """Makes `tokens` the text; tokens without K/V in the sequence are uncomputed."""
        self._uncomputed = (0, tokens)

    def forget_from(self, position: int) -> None:
        """Drops the K/V from `position` on; their tokens become uncomputed."""
        if position >= self.committed:
            return
        tokens = np.concatenate([self.sequence.tokens[position : self.committed], self.uncomputed])
        # Before the trim these are the tokens uncomputed so far; after it, the trimmed ones too.
        self._uncomputed = (position, tokens)
        self.sequence.trim(position)

    def forget_provisional(self, chunk_tokens: int) -> None:
        """Drops the K/V of rows that must not be sealed; their tokens become uncomputed.

        Drops their whole chunk where possible. After a cut, the chunks that the first rows need may
        be released (behind a window); then only rows from the first provisional one on are dropped.
        """
        if self._provisional is None:
            return
        boundary = self.committed // chunk_tokens * chunk_tokens
        within_reach = boundary == 0 or boundary >= self.sequence.earliest_trim
        self.forget_from(boundary if within_reach else self._provisional)
        self._provisional = None

    def cut(self, position: int) -> None:
        """Keeps the tokens [0, position) of the text, the pending one only if it is among them."""
        if position > self.next_position:
            return
        committed = self.committed
        if position < committed:
            self.sequence.trim(position)
            self._uncomputed = None
            if self._provisional is not None and position <= self._provisional:
                self._provisional = None
        elif position < self.next_position:
            self._uncomputed = (committed, self.uncomputed[: position - committed])
        self._pending = None
        if self._logits is not None and self._logits[0] > position:
            self._logits = None
