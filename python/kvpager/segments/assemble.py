"""Puts a session together from cached segments and new ids."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np

from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.scheduling.prefill import prefill_all
from kvpager._runtime.text.assembly import Assembly
from kvpager._runtime.text.transcript import Transcript
from kvpager._support.arguments import listed
from kvpager._support.tokens import TokenIds, TokenIdsLike
from kvpager.errors import InvalidArgumentError, InvariantError
from kvpager.progress import Progress, reporting
from kvpager.segments.pieces import Piece, lay_out, question_of
from kvpager.segments.policies import DEFAULT_REPAIR, Mask, RepairPolicy, check_policy
from kvpager.segments.probes import StitchedText
from kvpager.segments.segment import Segment
from kvpager.segments.shelf import Segments, as_segment_ids, require_segments
from kvpager.segments.stitching import Report, Stitcher

Part: TypeAlias = TokenIdsLike | Segment | str


def assemble(
    segments: Segments, parts: Iterable[Part], repair: RepairPolicy | None, progress: Progress
) -> Transcript:
    """See `Engine.assemble`."""
    core = segments.core
    start = time.perf_counter()
    policy = DEFAULT_REPAIR if repair is None else repair
    check_policy(policy)
    core.check_open()
    given = listed(parts, "parts", f"a list of parts, such as [{parts!r}]")
    pieces = lay_out(_part(segments, number, part) for number, part in enumerate(given))
    if not pieces:
        raise InvalidArgumentError("parts hold no tokens; expected at least one")
    if any(piece.segment is not None for piece in pieces):
        require_segments(core)
    text = np.concatenate([piece.tokens for piece in pieces])
    core.positions.check(len(text), "parts")
    transcript = core.transcript()
    try:
        with reporting(progress, "assemble", len(text)) as report:
            work = _Assembling(core, transcript, pieces, text, policy, report)
            transcript.assembly = work.run(start)
    except BaseException:
        transcript.close()
        raise
    return transcript


class _Assembling:
    """One assembly: the exact prefix, the policy's choice, the moved K/V, the question."""

    def __init__(
        self,
        core: EngineCore,
        transcript: Transcript,
        pieces: list[Piece],
        text: TokenIds,
        policy: RepairPolicy,
        report: Report,
    ) -> None:
        self._core = core
        self._transcript = transcript
        self._pieces = pieces
        self._text = text
        self._policy = policy
        self._report = report
        self._question = question_of(pieces)
        self._moved = np.zeros(len(text), dtype=np.bool_)
        for piece in pieces:
            self._moved[piece.start : piece.stop] = piece.moved
        self._stitcher = Stitcher(core, pieces, text)

    def run(self, start: float) -> Assembly:
        """Fills the transcript. start: when the call began, of `time.perf_counter`."""
        transcript, text = self._transcript, self._text
        with transcript.reserve(len(text)):  # raises before anything is computed
            return self._run(start)

    def _run(self, start: float) -> Assembly:
        transcript, text = self._transcript, self._text
        self._compute_prefix()
        chosen, probe_rows, probe_forwards = self._choose()
        live = chosen | ~self._moved
        given = np.flatnonzero(self._moved & ~chosen)
        exact = int(given[0]) if given.size else len(text)
        # Rows computed right after an exact prefix are exact too.
        self._prefill(exact)
        shared = exact - transcript.tokens_computed
        if exact < self._question:
            with transcript.reserve(len(text)):  # prefill may have replaced the sequence
                self._stitcher.extend(
                    transcript.sequence, self._question, live, report=self._report
                )
        self._prefill(len(text))
        report = Assembly(
            tokens=len(text),
            exact=exact,
            moved=len(given),
            recomputed=int((chosen & self._moved)[exact:].sum()),
            fresh=int((~self._moved)[exact:].sum()),
            shared=shared,
            rows=transcript.tokens_computed + self._stitcher.rows,
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
        """Fills the exact pieces, with shared chunks, a segment's K/V or a prefill."""
        first = self._pieces[0]
        if first.segment is not None:
            sequence, stop = self._transcript.sequence, first.stop
            if self._core.shares_chunks:
                sequence.adopt_prefix(self._text[:stop])
            sequence.reserve(len(self._text))
            nothing = np.zeros(len(self._text), dtype=np.bool_)
            self._stitcher.extend(sequence, stop, nothing, provenance="exact", report=self._report)
        self._prefill(max((piece.stop for piece in self._pieces if piece.exact), default=0))

    def _choose(self) -> tuple[Mask, float, int]:
        """The moved tokens to compute again, and the rows and forwards that the choice needed."""
        if not self._moved.any():
            return self._moved, 0.0, 0
        view = StitchedText(
            self._core,
            self._pieces,
            self._text,
            prefix=self._transcript.sequence,
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
        """Prefills the text up to `stop`, unless its K/V are there already."""
        if self._transcript.committed < stop:
            prefill_all(self._core, [(self._transcript, self._text[:stop])], None)
            self._report(stop)


def _part(segments: Segments, number: int, part: object) -> Segment | TokenIds:
    """Checks a part."""
    if isinstance(part, str):
        part = segments[part]
    if isinstance(part, Segment):
        part.check_open(segments.core)
        return part
    return as_segment_ids(segments.core, part, f"parts[{number}]")
