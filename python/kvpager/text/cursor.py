"""Where one conversation stands over its sequence: committed, uncomputed, pending, accepted."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from kvpager.pager import Sequence
from kvpager.sampling import Sampling
from kvpager.tokens import TokenIds

_NONE = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class Accepted:
    """Guesses that a forward has confirmed and nobody was given yet: rows of the sequence.

    start: position of the first. logits: [len(tokens), vocab], after each of them. sampling: what
    chose them.
    """

    start: int
    tokens: tuple[int, ...]
    logits: torch.Tensor
    sampling: Sampling

    @property
    def end(self) -> int:
        """Where the sequence ends while it holds them."""
        return self.start + len(self.tokens)

    def rest(self) -> Accepted:
        """All but the first."""
        return replace(self, start=self.start + 1, tokens=self.tokens[1:], logits=self.logits[1:])


class Cursor:
    """A position in a text, over a sequence that holds K/V of most of it.

        0            committed                    next_position
        | K/V are there | uncomputed ............ | pending |
        | K/V are there | accepted: K/V are there, no part of the text yet |

    *Uncomputed* tokens belong to the text, but their K/V have to be computed (again). The *pending*
    one was sampled last; its K/V come with the next forward. *Accepted* guesses were committed by
    the forward that verified them, and are no part of the text until each is sampled and becomes
    pending in its turn; every other step drops them.

    Each value holds for one position only and is void at any other, so that a commit or a trim of
    the sequence, at whatever moment an exception strikes, leaves nothing that is wrong.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self._provisional: int | None = None  # see `provisional`; the first of such rows
        self._pending: tuple[int, int] | None = None  # (position, token)
        self._logits: tuple[int, torch.Tensor] | None = None  # (position of what they predict, ...)
        self._uncomputed: tuple[int, TokenIds] | None = None  # (position of the first, tokens)
        self._accepted: Accepted | None = None

    def copy_to(self, twin: Cursor) -> None:
        """Brings another one, over a fork of the sequence, to the same place."""
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
    def uncomputed(self) -> TokenIds:
        """Tokens of the text after the committed ones, whose K/V have to be computed."""
        if self._uncomputed is None:
            return _NONE
        start, tokens = self._uncomputed
        done = self.committed - start
        return tokens[done:] if done >= 0 else _NONE

    @property
    def next_position(self) -> int:
        """Where the next sampled token goes."""
        if self._uncomputed is None:
            return self.committed
        return self.committed + len(self.uncomputed)

    @property
    def pending(self) -> int | None:
        """The sampled token that no forward has taken yet."""
        if self._pending is not None and self._pending[0] == self.next_position:
            return self._pending[1]
        return None

    @property
    def length(self) -> int:
        """Tokens of the text, the pending one included."""
        return self.next_position + (self.pending is not None)

    @property
    def tokens(self) -> TokenIds:
        """All of the text, [length] int32, the pending token included; a copy."""
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
        """Whether the next token can be chosen without a forward."""
        position = self.next_position
        pending = self._pending is not None and self._pending[0] == position
        return not pending and self._logits is not None and self._logits[0] == position

    def set_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Remembers, in a copy, the logits after the last committed token."""
        kept = logits.clone()
        self._logits = (self.next_position, kept)
        return kept

    def set_pending(self, token: int | None) -> None:
        """Makes a token the pending one, wherever it was sampled; or none."""
        self._pending = None if token is None else (self.next_position, token)

    def sample(self, sampling: Sampling) -> int:
        """Chooses the next token and makes it the pending one. REQUIRES: ready."""
        position, accepted = self.next_position, self._accepted
        if accepted is not None and position == accepted.start and sampling == accepted.sampling:
            token = accepted.tokens[0]
        else:
            assert self._logits is not None
            assert self._logits[0] == position
            token = sampling.choose(self._logits[1], position)
        self._pending = (position, token)
        return token

    def accept(self, accepted: Accepted) -> None:
        """What a forward is about to commit beyond the pending token; void until it has."""
        self._accepted = accepted

    def advance(self) -> bool:
        """Commits the pending token without a forward, where it is the first accepted one."""
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
        """Trims accepted guesses away. They fill no chunk, so that this takes no room."""
        if self._accepted is not None:
            self.sequence.trim(self.committed)
            self._accepted = None

    def set_text(self, tokens: TokenIds) -> None:
        """Makes `tokens` the text; what the sequence has no K/V of is uncomputed."""
        self._uncomputed = (0, tokens)

    def forget_from(self, position: int) -> None:
        """Gives up the K/V from `position` on; their tokens are uncomputed from now on."""
        if position >= self.committed:
            return
        tokens = np.concatenate([self.sequence.tokens[position : self.committed], self.uncomputed])
        # Before the trim this is what was uncomputed; after it, the tokens trimmed as well.
        self._uncomputed = (position, tokens)
        self.sequence.trim(position)

    def forget_provisional(self, chunk_tokens: int) -> None:
        """Gives up the K/V of rows that must not be sealed; their tokens are uncomputed then.

        All of their chunk, where that can be: after a cut a window may have let go of what the
        chunk's first rows need. Those before the first provisional one are exact.
        """
        if self._provisional is None:
            return
        boundary = self.committed // chunk_tokens * chunk_tokens
        within_reach = boundary == 0 or boundary >= self.sequence.earliest_trim
        self.forget_from(boundary if within_reach else self._provisional)
        self._provisional = None

    def cut(self, position: int) -> None:
        """Keeps the tokens [0, position) of the text; the pending one goes, unless it is one."""
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
