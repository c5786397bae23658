"""A session from cached segments and new ids."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvpager.errors import InvalidArgumentError, InvariantError
from kvpager.runtime.progress import Progress, reporting
from kvpager.runtime.segments.pieces import Piece, lay_out, question_of
from kvpager.runtime.segments.policies import DEFAULT_REPAIR, Mask, RepairPolicy, check_policy
from kvpager.runtime.segments.probes import StitchedText
from kvpager.runtime.segments.report import Assembly
from kvpager.runtime.segments.segment import Segment
from kvpager.runtime.segments.shelf import as_segment_ids, require_segments
from kvpager.runtime.segments.stitching import Report, Stitcher
from kvpager.runtime.tokens import TokenIds, TokenIdsLike

if TYPE_CHECKING:
    from kvpager.runtime.engine import Engine
    from kvpager.runtime.session import Session

Part: TypeAlias = TokenIdsLike | Segment | str


def assemble(
    engine: Engine, parts: Iterable[Part], repair: RepairPolicy | None, progress: Progress
) -> Session:
    """See `Engine.assemble`."""
    start = time.perf_counter()
    policy = DEFAULT_REPAIR if repair is None else repair
    check_policy(policy)
    engine.check_open()
    if isinstance(parts, (str, bytes)):
        raise InvalidArgumentError(
            f"parts is {parts!r}; expected a list of parts, such as [{parts!r}]"
        )
    pieces = lay_out(_part(engine, number, part) for number, part in enumerate(parts))
    if not pieces:
        raise InvalidArgumentError("parts hold no tokens; expected at least one")
    if any(piece.segment is not None for piece in pieces):
        require_segments(engine)
    text = np.concatenate([piece.tokens for piece in pieces])
    engine.positions.check(len(text), "parts")
    session = engine.session()
    try:
        with reporting(progress, "assemble", len(text)) as report:
            work = _Assembling(engine, session, pieces, text, policy, report)
            session.assembly = work.run(start)
    except BaseException:
        session.close()
        raise
    return session


class _Assembling:
    """One assembly: the exact beginning, the policy's choice, what it leaves, the question."""

    def __init__(
        self,
        engine: Engine,
        session: Session,
        pieces: list[Piece],
        text: TokenIds,
        policy: RepairPolicy,
        report: Report,
    ) -> None:
        self._engine = engine
        self._session = session
        self._pieces = pieces
        self._text = text
        self._policy = policy
        self._report = report
        self._question = question_of(pieces)
        self._moved = np.zeros(len(text), dtype=np.bool_)
        for piece in pieces:
            self._moved[piece.start : piece.stop] = piece.moved
        self._stitcher = Stitcher(engine, pieces, text)

    def run(self, start: float) -> Assembly:
        """Fills the session. start: when the call began, of `time.perf_counter`."""
        session, text = self._session, self._text
        with session.reserve(len(text)):  # refused before anything is computed
            return self._run(start)

    def _run(self, start: float) -> Assembly:
        session, text = self._session, self._text
        self._compute_prefix()
        chosen, probe_rows, probe_forwards = self._choose()
        live = chosen | ~self._moved
        given = np.flatnonzero(self._moved & ~chosen)
        exact = int(given[0]) if given.size else len(text)
        # What is computed right after an exact beginning is as exact as that.
        self._prefill(exact)
        shared = exact - session.tokens_computed
        if exact < self._question:
            with session.reserve(len(text)):  # prefill may have taken another sequence
                self._stitcher.extend(session.sequence, self._question, live, report=self._report)
        self._prefill(len(text))
        report = Assembly(
            tokens=len(text),
            exact=exact,
            moved=len(given),
            recomputed=int((chosen & self._moved)[exact:].sum()),
            fresh=int((~self._moved)[exact:].sum()),
            shared=shared,
            rows=session.tokens_computed + self._stitcher.rows,
            probe_rows=probe_rows,
            forwards=self._stitcher.forwards + probe_forwards,
            policy=repr(self._policy),
            seconds=time.perf_counter() - start,
        )
        wanted = exact - shared + report.recomputed + report.fresh
        if report.rows != wanted or report.tokens != exact + report.moved + wanted - (
            exact - shared
        ):
            raise InvariantError(f"assemble: {report}; expected {wanted} rows")
        return report

    def _compute_prefix(self) -> None:
        """The pieces before which nothing is approximate: found, given, or computed."""
        first = self._pieces[0]
        if first.segment is not None:
            sequence, stop = self._session.sequence, first.stop
            if self._engine.shares_chunks:
                sequence.adopt_prefix(self._text[:stop])
            sequence.reserve(len(self._text))
            nothing = np.zeros(len(self._text), dtype=np.bool_)
            self._stitcher.extend(sequence, stop, nothing, provenance="exact", report=self._report)
        self._prefill(max((piece.stop for piece in self._pieces if piece.exact), default=0))

    def _choose(self) -> tuple[Mask, float, int]:
        """The moved tokens to compute again; and the rows and forwards it took to choose."""
        if not self._moved.any():
            return self._moved, 0.0, 0
        view = StitchedText(
            self._engine,
            self._pieces,
            self._text,
            prefix=self._session.sequence,
            question=self._question,
        )
        try:
            chosen = np.asarray(self._policy.choose(view))
        finally:
            view.close()
        if chosen.dtype != np.bool_ or chosen.shape != self._moved.shape:
            raise InvalidArgumentError(
                f"repair: {self._policy!r} chose {chosen.dtype} of shape {list(chosen.shape)}; "
                f"expected bool of shape [{len(self._text)}]"
            )
        return chosen & self._moved, view.rows, view.forwards

    def _prefill(self, stop: int) -> None:
        """Computes the text up to there as any prompt, if that is not there yet."""
        if self._session.committed < stop:
            self._session.prefill(self._text[:stop])
            self._report(stop)


def _part(engine: Engine, number: int, part: object) -> Segment | TokenIds:
    """A part, checked."""
    if isinstance(part, str):
        part = engine.segments[part]
    if isinstance(part, Segment):
        part.check_open(engine)
        return part
    return as_segment_ids(part, engine.vocab_size, f"parts[{number}]")
