"""A draft model, and what it holds of one session's text."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpager import fingerprint as fingerprints
from kvpager.config import known_options
from kvpager.errors import InvalidArgumentError, PagerError
from kvpager.hf.recurrent import is_recurrent
from kvpager.runtime.drafting import Drafting
from kvpager.runtime.group import Cache, NeedsCheckpoint, Ok, Refused, TrimAnswer
from kvpager.runtime.older import in_todays_terms, salt_of
from kvpager.runtime.primary import PrimaryCache
from kvpager.runtime.repair import RECOMPUTE, Repairs
from kvpager.runtime.tokens import TokenIds
from kvpager.stores import SnapshotStore
from kvpager.stores.companions import DRAFT, CompanionSnapshot

if TYPE_CHECKING:
    from kvpager.pager import SnapshotInfo
    from kvpager.runtime.engine import Engine

_log = logging.getLogger(__name__)

# What a draft takes over from the engine it guesses for, unless it is told otherwise.
_INHERITED = ("pool_tokens", "chunk_tokens", "rows", "selection", "host_bytes", "rewind_tokens")

_VERSION = 1  # of what a snapshot keeps of it beside the K/V


class DraftModel:
    """A small model that guesses how texts go on, and how it is paged.

    Example:
        >>> draft = DraftModel(small_model, pool_tokens=4096, host_bytes="2GiB")
        >>> engine = Engine(model, pool_tokens=4096, draft=draft)
        >>> session.generate(256, speculate="draft")
    """

    def __init__(self, model: Any, *, guess_cost: float | None = None, **options: Any) -> None:
        """Checks the options; the model when an engine takes it.

        Args:
            model: a transformers causal LM with the target's vocabulary, in eval mode.
            guess_cost: time of one of its forwards beside one of the target's, 0 or more; decides
                how much is guessed. None: as its parameters are to the target's.
            **options: of PagerConfig, for a pager of its own. What is not given of pool_tokens,
                chunk_tokens, rows, selection, host_bytes and rewind_tokens is the target's; `exact`
                is False, because guesses need no bits.

        Raises:
            InvalidArgumentError: an option is unknown, or guess_cost out of range.
        """
        if guess_cost is not None:
            number = isinstance(guess_cost, (int, float)) and not isinstance(guess_cost, bool)
            if not number or not 0 <= guess_cost < math.inf:
                raise InvalidArgumentError(
                    f"DraftModel.guess_cost is {guess_cost!r}; expected a number, 0 or more, or "
                    "None"
                )
        self.model = model
        self.guess_cost = guess_cost
        self.options = known_options(options)


def open_draft(draft: DraftModel | Any, target: Engine) -> Drafting:
    """An engine for a draft model, or for a bare model as one.

    Raises:
        InvalidArgumentError: another vocabulary than the target's, an option out of range, or a
            target whose rows depend on their company, which nothing can speculate for.
        UnsupportedModelError, CapacityError, DeviceError: as for any engine.
    """
    from kvpager.runtime.engine import Engine  # which imports this module

    if not isinstance(draft, DraftModel):
        draft = DraftModel(draft)
    if target.config.exact != "all":
        raise InvalidArgumentError(
            f"draft is given, but PagerConfig.exact is {target.config.exact!r}, under which a "
            'token\'s bits depend on how many rows its forward has; use exact="all", or draft=None'
        )
    inherited = {name: getattr(target.config, name) for name in _INHERITED}
    inherited["rows"] = None if is_recurrent(draft.model) else target.rows
    options = {"exact": False, **inherited, **draft.options}
    engine = Engine(draft.model, salt=target.salt, **options)
    if engine.vocab_size != target.vocab_size:
        found = engine.vocab_size
        engine.close()
        raise InvalidArgumentError(
            f"draft: its vocabulary has {found} token ids, and the model's has "
            f"{target.vocab_size}; expected a draft of the same tokenizer and embedding size"
        )
    cost = draft.guess_cost
    if cost is None:
        cost = _weights(draft.model) / max(1, _weights(target.model))
    return Drafting(engine, target.trims, float(cost))


def _weights(model: Any) -> int:
    """Parameters that a forward reads: all but an input embedding that is no output head too."""
    total = sum(parameter.numel() for parameter in model.parameters())
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    return int(total if tied else total - embedding.numel())


class DraftCompanion:
    """The draft model's cache of one session's text: a companion of the session's own.

    It may end before the text does or hold guesses beyond it. Whatever happened to the text
    meanwhile, `follow` finds out by comparing tokens, so that nobody has to tell it. Nothing it
    does or loses changes a token: it decides how many guesses are right.
    """

    kind = DRAFT

    def __init__(self, drafting: Drafting) -> None:
        """Empty."""
        self._drafting = drafting
        self.session = drafting.engine.session()
        self.used = 0  # when it last guessed, on its drafting's clock
        self._refused: tuple[int, int] | None = None  # (length of a text, room given up by then)
        self._sound = 0  # of its tokens, how many are known to be the text's
        drafting.register(self)

    @property
    def length(self) -> int:
        """How far into the text it is, guesses left out."""
        return min(self._sound, self.session.committed)

    @property
    def empty(self) -> bool:
        """Whether it has no room that others could use."""
        return self.session.closed or not self.session.committed

    def trim(self, position: int) -> TrimAnswer:
        """See `Cache.trim`."""
        with self._drafting.lock:
            if position >= self.length:
                return Ok()
            answer = self._cache.trim(position)
            if isinstance(answer, Ok):
                self._cut(position)
            return answer

    def rewind(self, position: int) -> None:
        """See `Cache.rewind`."""
        with self._drafting.lock:
            self._cache.rewind(position)
            self._cut(position)

    def reset(self) -> None:
        """See `Cache.reset`."""
        with self._drafting.lock:
            self._cache.reset()
            self._cut(0)

    def follow(self, text: TokenIds) -> None:
        """Keeps what it holds of the beginning of `text` [n] int32, and nothing else."""
        with self._drafting.lock:
            held = self.session.tokens
            common = min(len(held), len(text))
            different = np.flatnonzero(held[:common] != text[:common])
            common = int(different[0]) if different.size else common
            self._sound = min(common, self.session.committed)
            if common < self.session.committed:
                self._keep(common)
            self._cut(common)
            self.session.settle()

    def _keep(self, position: int) -> None:
        """Cuts what it holds beyond the text, guesses mostly; where it cannot, it begins anew."""
        answer = self._cache.trim(position)
        if isinstance(answer, NeedsCheckpoint):
            self._cache.rewind(answer.position)
        elif isinstance(answer, Refused):
            self._drafting.note_refusal(position)
            self._cache.reset()

    def _cut(self, position: int) -> None:
        """Forgets tokens from `position` on that have no K/V, and what may be owed of them."""
        self.session.cursor.cut(position)
        self._sound = min(self._sound, self.session.committed)

    def give_up(self, text: TokenIds) -> None:
        """No text as long as this one is followed, until others have given room up."""
        self.reset()
        self._refused = (len(text), self._drafting.closed)

    def refuses(self, text: TokenIds) -> bool:
        """Whether a text as long as this one was given up, and would be again."""
        return self._refused is not None and (
            len(text) >= self._refused[0] and self._refused[1] == self._drafting.closed
        )

    def note_text(self, length: int) -> None:
        """So many of its first tokens are the text's."""
        self._sound = length

    def fork(self) -> DraftCompanion:
        """The same for a session with the same text; empty where there is no room for it."""
        twin = DraftCompanion(self._drafting)
        with self._drafting.lock:
            try:
                session = self.session.fork()
            except PagerError as error:
                _log.warning("the draft model's cache was not forked: %s", error)
            else:
                twin.session.close()
                twin.session = session
                twin._sound = self._sound
        return twin

    def close(self) -> None:
        """Gives its chunks up. Twice is harmless."""
        with self._drafting.lock:
            if not self.session.closed:
                self.session.close()
                self._drafting.closed += 1

    def freeze(self, upto: int) -> CompanionSnapshot | None:
        """What it holds of the first `upto` tokens, for a save; None if that is nothing.

        Of a recurrent draft nothing is saved: its K/V alone are of no use.
        """
        if self.session.states is not None:
            return None
        with self._drafting.lock:
            length = min(upto, self.length)
            if length < max(1, self.session.sequence.earliest_trim):
                return None
            content = self.session.sequence.freeze(length)
            return CompanionSnapshot(
                kind=self.kind,
                content=content,
                fingerprint=self._drafting.engine.pager.fingerprint_json,
                session=self.session.sequence.session_text({"version": _VERSION}, content),
            )

    def restore(self, snapshot: SnapshotInfo, source: SnapshotStore) -> None:
        """Goes on with what `freeze` kept, in the place of what it has.

        Another release or processor is fine: guesses need no bits. `source`, which it is in, is
        told of damage that is found later.

        Raises:
            PagerError: it cannot be used; nothing was changed.
        """
        engine = self._drafting.engine
        snapshot = in_todays_terms(engine, snapshot)
        provenance = fingerprints.compare(
            engine.fingerprint,
            snapshot.fingerprint,
            on_mismatch="approximate",
            source=snapshot.path,
        )
        with self._drafting.lock:
            salt = salt_of(engine, snapshot)
            sequence = engine.pager.restore(snapshot, salt=salt, provenance=provenance)
            self.session.close()
            first = len(snapshot.released_tokens) // engine.layout.chunk_tokens
            repairs = Repairs(RECOMPUTE, source, snapshot.reader, first)
            self.session = engine.adopt(sequence, repairs=repairs)
            self._sound, self._refused = sequence.length, None

    @property
    def _cache(self) -> Cache:
        return PrimaryCache(self.session)
