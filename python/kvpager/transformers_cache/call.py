"""One call of a model with a cache, as a transaction."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import torch

from kvpager._model.seam.attention import current, replace
from kvpager.pager import Forward, Pager
from kvpager.transformers_cache.layers import CacheAttention
from kvpager.transformers_cache.rows import Rows, TextBatch, Texts


class CacheCall:
    """The work of one call of the model so far, and how to undo it.

    A long prompt is run in several forwards of the decoder, each committed when it ends. Until the
    call ends, `undo` brings the texts back to what they were.

    Attributes:
        texts: of the cache that was given.
        before: those texts before the call.
        keep: how many columns' hidden states, from the last, are wanted; None: all.
        owner: the module whose call ends the transaction.
        configs: of the model.
        forward: the pager's, while the decoder runs.
        expected: whether the next call of the decoder is of one part of a longer prompt.
        nested: whether it is such a call that runs.
        outputs: of the decoder, for the parts before the last.
        ran: whether a forward was committed.
    """

    def __init__(
        self,
        pager: Pager,
        texts: Texts,
        *,
        configs: frozenset[int],
        owner: Any,
        keep: int | None,
        frame: FrameType,
    ) -> None:
        """`frame`: that runs the owner; it is on its thread's stack while that does."""
        self._pager = pager
        self.texts = texts
        self.before = texts.batch
        self._lengths = texts.batch.lengths
        self._kept: TextBatch | None = None
        self._after: TextBatch | None = None
        self._frame = frame
        self._owners = (frame, frame.f_back)
        self._decoders: tuple[FrameType | None, ...] = ()
        self.thread = threading.get_ident()
        self.configs = configs
        self.owner = owner
        self.keep = keep
        self.forward: Forward | None = None
        self._attention: CacheAttention | None = None
        self.expected = False
        self.nested = False
        self.outputs: list[Any] = []
        self.ran = False
        self._undone = False

    def runs(self) -> bool:
        """Whether the call goes on. An interrupt ends it without telling anybody here."""
        frame: FrameType | None
        if self.thread == threading.get_ident():
            frame = sys._getframe()  # noqa: SLF001  # the stack of this thread
        else:
            frame = sys._current_frames().get(self.thread)  # noqa: SLF001  # of another one
        while frame is not None:
            if frame is self._frame:
                return True
            frame = frame.f_back
        return False

    def answers(self) -> bool:
        """Whether attention calls of this thread are answered by its forward."""
        return self.forward is not None and current() is self._attention

    def is_owners(self, frame: FrameType) -> bool:
        """Whether a hook after a call was called from here for the owner's call."""
        return frame in self._owners

    def is_decoders(self, frame: FrameType) -> bool:
        """Whether it was for the call of the decoder whose forward runs."""
        return self.forward is not None and frame in self._decoders

    def enter(self, frame: FrameType) -> None:
        """Notes which frame runs the decoder: torch's, from which it calls hooks.

        It calls the hooks after a failed call from the frame outside of that one.
        """
        self._decoders = (frame, frame.f_back)

    def make_room(self, rows: Rows) -> None:
        """Reserves room for a prompt of several parts, so that it is refused before any work.

        Raises CapacityError.
        """
        added = rows.added
        window = self._pager.window
        rewind = max(self._pager.config.rewind_tokens, self._pager.layout.chunk_tokens)
        if window and added > rewind and self.before.sequences:
            # Chunks behind the window will be released, so that no cut leads back.
            sequences = tuple(sequence.fork() for sequence in self.before.sequences)
            self._kept = self.before.of(sequences, tuple(range(len(sequences))))
        for entry in rows.entries:
            entry.sequence.reserve(max(entry.length, entry.start + rows.columns - entry.padding))

    def begin(self, rows: Rows, start: int, stop: int) -> None:
        """Begins the pager's forward for some columns; attention calls then belong to it."""
        spans, tokens = rows.spans(start, stop)
        self._after = rows.after(stop)
        self.forward = self._pager.begin_spans(spans, tokens)
        self._attention = CacheAttention(self, current())
        replace(self._attention)

    def commit(self) -> None:
        """Ends the forward; its rows are part of the texts."""
        assert self.forward is not None
        assert self._after is not None
        self._leave()
        self.forward.commit(provenance="decode")
        self.forward = None
        self._decoders = ()
        self.texts.batch = self._after
        self.ran = True

    def end(self) -> None:
        """Gives back what was kept for `undo`."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()

    def undo(self) -> None:
        """Makes everything as it was before the call. May be called again."""
        self._leave()
        if self.forward is not None:
            self.forward.abort()
            self.forward = None
        if self._undone:
            return
        if self._kept is not None:
            grown, self.texts.batch = self.texts.batch, self._kept
            self._kept, self._undone = None, True
            grown.close()
            return
        for sequence, length in zip(self.before.sequences, self._lengths):
            if sequence.length > length:
                sequence.trim(length)
            sequence.reserve(length)
        self.texts.batch, self._undone = self.before, True

    def _leave(self) -> None:
        if self._attention is not None and current() is self._attention:
            replace(self._attention.outer)
        self._attention = None


def joined(outputs: list[Any], last: Any, keep: int | None) -> Any:
    """The decoder's output for all parts of a prompt; hidden states at least of `keep` columns.

    Changes `last` in place where it is transformers' ModelOutput.
    """
    if not outputs:
        return last
    if isinstance(last, tuple):
        hidden = _wanted([*(output[0] for output in outputs), last[0]], keep)
        return (hidden, *last[1:])
    parts = [*outputs, last]
    last["last_hidden_state"] = _wanted([part["last_hidden_state"] for part in parts], keep)
    if last.get("hidden_states") is not None:
        each = zip(*(part["hidden_states"] for part in parts))
        last["hidden_states"] = tuple(torch.cat(layer, dim=1) for layer in each)
    if last.get("router_logits") is not None:
        each = zip(*(part["router_logits"] for part in parts))
        last["router_logits"] = tuple(torch.cat(layer, dim=0) for layer in each)
    return last


def _wanted(parts: list[torch.Tensor], keep: int | None) -> torch.Tensor:
    """[batch, columns, hidden]: the last parts that have `keep` columns; all of them if None."""
    if keep is None:
        return torch.cat(parts, dim=1)
    chosen: list[torch.Tensor] = []
    for part in reversed(parts):
        if sum(one.shape[1] for one in chosen) >= keep:
            break
        chosen.insert(0, part)
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen, dim=1)
