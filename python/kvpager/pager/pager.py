"""The pager, and the sequences over it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvpager import _core
from kvpager.errors import (
    CorruptSnapshotError,
    FingerprintMismatchError,
    InvalidArgumentError,
    locate_damage,
)
from kvpager.pager.device import Place, resolve
from kvpager.pager.forward import ROW_GIVEN, Forward, Span, Tensor
from kvpager.pager.layout import TORCH_DTYPES, Layout
from kvpager.pager.snapshot import SALT_FIELD, SnapshotInfo, open_snapshot
from kvpager.released import ReleasedText
from kvpager.salts import is_of, salt_digest
from kvpager.stores import FileStore, SaveReport

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as SequenceOf

    from kvpager.config import PagerConfig

ChunkInfo = _core.ChunkInfo

_NO_TOKENS = np.zeros(0, dtype=np.int32)

TIER_RESIDENT, TIER_HOST, TIER_DISK, TIER_SNAPSHOT = 1, 2, 4, 8


class Pin(_core.OwnedPin):
    """Keeps a range of positions resident until released; changes no result. A context manager.

    Made by `Sequence.pin`; one that nobody holds any more is released.
    """

    if TYPE_CHECKING:

        def __enter__(self) -> Pin: ...


class Sequence(_core.OwnedSequence):
    """An ordered list of chunks and a tail; made by a `Pager`. Closing it lets its chunks go.

    One that nobody holds any more is closed. Only the pager that made it takes it: another one, or
    this one once it was closed or reset, raises InvalidArgumentError.

    Attributes:
        pager: the `Pager` that made it.
        uid: its number, which no other sequence of the process has.
        salt: of its chunks.
        length: committed positions.
        closed: whether it was closed, or its pager closed or reset.
    """

    @property
    def tokens(self) -> np.ndarray[Any, Any]:
        """A copy of the token ids of all committed positions, int32 [length]."""
        return self.core.tokens(self.uid)

    @property
    def released(self) -> int:
        """The first positions, whose chunks were let go behind the pager's window."""
        return self.core.released(self.uid)

    @property
    def earliest_trim(self) -> int:
        """The first position, 0 apart, that `trim` can go back to: 0 while nothing was let go."""
        return self.core.earliest_trim(self.uid)

    def reserve(self, total_tokens: int) -> None:
        """Admission: holds lower-tier room to grow to `total_tokens` positions.

        A later call replaces what an earlier one held. With a window that is room for what the
        sequence holds at a time. Of what it lets go, chunks that others go on using are replaced
        while there is room for others; later a forward's `begin` asks for them.

        Raises:
            CapacityError: with the bytes needed; nothing is held.
        """
        self.core.reserve(self.uid, total_tokens)

    def adopt_prefix(self, tokens: Iterable[int] | Tensor) -> int:
        """Shares the longest run of sealed, exact chunks the pager has for these tokens.

        Only an empty sequence can. Returns the positions now held, a multiple of chunk_tokens. With
        a window the chunks before it need not be there any more.
        """
        return self.core.adopt_prefix(self.uid, _token_ids(tokens))

    def append(
        self, tokens: Iterable[int] | Tensor, k: Tensor, v: Tensor, *, provenance: str = "decode"
    ) -> None:
        """Adds positions whose K/V were computed elsewhere.

        Args:
            tokens: [n] ids.
            k: [layers, n, kv_heads, k_dim].
            v: [layers, n, kv_heads, v_dim].
            provenance: what they are worth: "exact" only if they carry the bits an M-row forward
                of these tokens gives; it makes the chunks shareable.

        Raises:
            InvalidArgumentError: a tensor of another shape, dtype or device than expected.
            NonFiniteError: a key or value is not finite.
            CapacityError: no room for the chunks.

        After an error the sequence is as it was; but one that has let go of what that would take
        keeps the positions that were added by then.
        """
        ids = _token_ids(tokens)
        layout = self.pager.layout
        for name, tensor, dim in (("k", k, layout.k_dim), ("v", v, layout.v_dim)):
            expected = (layout.layers, len(ids), layout.kv_heads, dim)
            if tuple(tensor.shape) != expected:
                raise InvalidArgumentError(
                    f"{name}: shape {tuple(tensor.shape)}, expected {expected} "
                    "(layers, tokens, kv_heads, head_dim)"
                )
        rows = self.pager.rows  # at a time: what every pool has open blocks for
        start = self.length
        self.reserve(start + len(ids))
        try:
            for first in range(0, len(ids), rows):
                part = slice(first, min(first + rows, len(ids)))
                spans: list[Span] = [(self, start + first, part.stop - first, ROW_GIVEN)]
                with self.pager.begin_spans(spans, (), given=ids[part], dense=True) as forward:
                    forward.give(k[:, part], v[:, part])
                    forward.commit(provenance=provenance)
        except BaseException:
            if start == 0 or start >= self.earliest_trim:
                self.trim(start)
            self.reserve(self.length)
            raise

    def select(
        self, layer: int, q: Tensor, *, position: int | None = None, window: int | None = None
    ) -> list[list[int]]:
        """The chunks a row with queries q [q_heads, k_dim] would attend to, per kv head, ascending.

        `position` is the row's own; by default the next one. q may be on the CPU, or where the
        pager is. Raises NonFiniteError if it is not finite.
        """
        at = self.length if position is None else position
        if isinstance(q, torch.Tensor):
            q = q.detach().cpu()
        with _locating(self.pager.layout):
            return self.core.select(self.uid, layer, q[None], at, int(window or 0))

    def read_kv(self, layer: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Raw keys and values of positions [start, stop) at one layer, in the layout's dtypes.

        Returns:
            k [n, kv_heads, k_dim] and v [n, kv_heads, v_dim], copies on the CPU, bit for bit.
        """
        layout = self.pager.layout
        with _locating(layout):
            k, v = self.core.read_kv(self.uid, layer, start, stop)
        return (
            torch.from_numpy(k).view(TORCH_DTYPES[layout.k_dtype]),
            torch.from_numpy(v).view(TORCH_DTYPES[layout.v_dtype]),
        )

    def pin(self, start: int, stop: int) -> Pin:
        """Keeps positions [start, stop) resident; residency only, no result changes.

        Raises:
            CapacityError: too many pins; says how many chunks are free to pin.
        """
        try:
            return Pin(self, start, stop)
        except CorruptSnapshotError as error:
            locate_damage(error, self.pager.layout.chunk_tokens)
            raise

    def trim(self, position: int) -> None:
        """Forgets everything from `position` on.

        Raises:
            InvalidArgumentError: not 0 .. length, or behind what a window has let go: between 0 and
                `earliest_trim`. Nothing was changed.
        """
        with _locating(self.pager.layout):
            self.core.trim(self.uid, position)

    def fork(self) -> Sequence:
        """A sequence with the same positions; sealed chunks are shared, the tail is copied."""
        return Sequence(self.core, self.pager, self)

    def ledger(self) -> list[ChunkInfo]:
        """What the ledger says of each chunk, in logical order; `released` ones were let go."""
        return self.core.ledger(self.uid)

    def residency(self) -> dict[str, np.ndarray[Any, Any]]:
        """The ledger as arrays [chunks]: tiers (TIER_* bits), selected, recalled, qk_score."""
        return self.core.residency(self.uid)

    def freeze(self, upto: int | None = None) -> _core.SnapshotContent:
        """The first `upto` positions (None: all) as they are now, to be saved by any thread.

        Sealed chunks are shared, only an unsealed tail is copied; the sequence goes on meanwhile.
        What was let go is not in it: `session_text` tells of those tokens.

        Raises:
            InvalidArgumentError: `upto` is not 1 .. length, or before `earliest_trim`.
            CorruptSnapshotError: what has to be copied now is damaged in the snapshot it is in.
        """
        if upto is not None and not 1 <= upto <= self.length:
            raise InvalidArgumentError(
                f"upto is {upto}; expected 1 to {self.length}, the positions the sequence holds"
            )
        with _locating(self.pager.layout):
            return self.core.freeze(self.uid, -1 if upto is None else upto)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        upto: int | None = None,
        session: Mapping[str, object] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> SaveReport:
        """Writes the first `upto` positions (None: all) to one file, atomically.

        Args:
            path: of the file; an older one is replaced.
            upto: how much of the sequence, 1 .. length.
            session: JSON-able, kept beside the K/V; see `SnapshotInfo.session`.
            progress: called with (bytes done, bytes in all); what it raises stops and undoes.

        Raises:
            InvalidArgumentError: the sequence is empty, or `upto` is out of range.
            StorageError: the system refused; no file is left and an older one is untouched.
            CorruptSnapshotError: a chunk to be copied is damaged in the snapshot it is in.
        """
        content = self.freeze(upto)
        return FileStore().save(
            os.fspath(path),
            content,
            fingerprint=self.pager.fingerprint_json,
            session=self.session_text(session, content),
            progress=progress,
        )

    def session_text(
        self,
        values: Mapping[str, object] | None = None,
        content: _core.SnapshotContent | None = None,
    ) -> str:
        """JSON text of a snapshot's session section: `values`, and what a restore needs.

        Args:
            values: JSON-able, the caller's own.
            content: what is saved, from `freeze`. Only without a window it can be left out: the
                tokens that it has no chunks of are kept here.
        """
        before = None if content is None else ReleasedText.of_content(content)
        released = {} if before is None else before.session_values()
        return _canonical(
            "session", {**(values or {}), SALT_FIELD: salt_digest(self.salt), **released}
        )

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"length={self.length}"
        return f"Sequence(uid={self.uid}, {state})"


class Pager:
    """A hard-bounded resident pool of chunks, the tiers below it, and the sequences over them.

    Args:
        layout: shape of a chunk.
        config: budgets, selection and policies; `config.chunk_tokens` is the layout's.
        rows: M, the most rows a forward may have. Forwards of exactly M rows are "exact".
        smaller_rows: row counts below M, ascending, whose forwards are "exact" too, because they
            were proven to give the bits of M rows. With `config.exact` False no forward is exact.
        fingerprint: flat JSON-able mapping of all that the bits of K/V depend on.
            Chunks and snapshots are shared only under an equal one. On a GPU what
            `attention_version` says belongs to it.
        window: how far back any layer looks: no row sees keys at positions <= its own - window; 0:
            some layer sees all. Chunks behind it are let go, but for `config.rewind_tokens` (at
            least a chunk) by which a sequence can still be trimmed.
        threads: of our own kernels; torch's number by default. Never changes a bit.
        device: where the tensors are, in the place of `config.device`: "cuda:1", a torch.device ...
            "meta" keeps the books of chunks that have no bytes: a forward says
            `replayed(pager.generation)` in the place of `attend`. For measuring and simulating.
        q_heads: query heads of the model; needed on a GPU, and of no meaning on the CPU.

    Raises:
        InvalidArgumentError: naming the option, its value and what was expected.
        CapacityError: the system refuses the memory, or the device has too little.
        DeviceError: there is no such device; says what was found.
    """

    def __init__(
        self,
        layout: Layout,
        config: PagerConfig,
        *,
        rows: int,
        smaller_rows: SequenceOf[int] = (),
        fingerprint: Mapping[str, object] | None = None,
        window: int = 0,
        threads: int | None = None,
        device: str | torch.device | None = None,
        q_heads: int | None = None,
    ) -> None:
        if device is not None:
            config = config.replace(device=device)
        self.place = resolve(config.device, None)
        if self.place.kind not in ("cpu", "meta") and q_heads is None:
            raise InvalidArgumentError(
                f"q_heads is None; expected the model's query heads on {self.place.name}, a "
                f"multiple of kv_heads ({layout.kv_heads})"
            )
        if layout.chunk_tokens != config.chunk_tokens:
            raise InvalidArgumentError(
                f"chunk_tokens: {layout.chunk_tokens} in the layout, "
                f"{config.chunk_tokens} in the config"
            )
        self.layout = layout
        self.config = config
        self.rows = rows
        self.window = window
        self.smaller_rows = tuple(smaller_rows)
        self.fingerprint = dict(fingerprint or {})
        self.fingerprint_json = _canonical("fingerprint", self.fingerprint)
        options = _device_options(layout, config, self.place, q_heads)
        options.pool_blocks = config.pool_blocks
        options.rows = rows
        options.smaller_rows = list(smaller_rows)
        options.exact = config.exact is not False
        options.selection = _native_selection(config)
        options.scorer = config.scorer_name
        options.host_bytes = config.host_budget_on(self.place.kind)
        options.disk_bytes = config.disk_bytes
        options.disk_path = config.disk_path or ""
        options.summary_bytes = config.summary_budget
        options.policy = config.policy
        options.recall_chunks = config.recall_chunks
        options.hysteresis = config.hysteresis
        options.threads = threads if threads is not None else torch.get_num_threads()
        options.window = window
        # The rows since the last sealed chunk may be dropped at any time.
        options.rewind = max(config.rewind_tokens, layout.chunk_tokens)
        options.namespace_key = self.fingerprint_json
        options.shuffle_seed = config.debug_shuffle_seed or 0
        options.poison = config.debug_poison
        self._options = options
        self._core: _core.Pager | None = _core.Pager(options)

    @property
    def core(self) -> _core.Pager:
        """The native pager."""
        if self._core is None:
            raise InvalidArgumentError("this pager is closed")
        return self._core

    @property
    def device(self) -> torch.device:
        """Where the tensors of forwards are: the CPU, or a CUDA device."""
        return self.place.tensors

    @property
    def generation(self) -> int:
        """Changes when memory that a captured forward uses is made anew; see `Forward.replayed`."""
        return self.core.generation()

    def sequence(self, *, salt: str = "") -> Sequence:
        """An empty sequence. `salt` separates tenants: it enters every chunk's name.

        It should be hard to guess: names can be computed for guesses. `Engine` stretches its own.
        """
        return Sequence(self.core, self, salt)

    def begin(
        self,
        sequences: SequenceOf[Sequence | None] | np.ndarray[Any, Any],
        positions: SequenceOf[int] | np.ndarray[Any, Any],
        tokens: SequenceOf[int] | np.ndarray[Any, Any],
        kinds: SequenceOf[int] | np.ndarray[Any, Any],
    ) -> Forward:
        """Starts a forward; one entry per row in each argument.

        Args:
            sequences: whose row it is; None for padding. Or an int64 array of `Sequence.uid`, -1
                for padding.
            positions: the row's position. A sequence's ROW_COMMIT rows hold length, length + 1, ...
            tokens: the row's token id.
            kinds: ROW_COMMIT, ROW_READ or ROW_PADDING.

        Raises:
            InvalidArgumentError: another forward runs, a row does not continue its sequence, or a
                sequence is closed or another pager's; nothing was changed.
            CapacityError: no room for the rows' chunks; nothing was changed.
        """
        if isinstance(sequences, np.ndarray):
            sequences = sequences.astype(np.int64, casting="safe", copy=False)
        return Forward(  # nothing of Python is between the begin and its owner
            self.core,
            self,
            sequences=sequences,
            positions=np.asarray(positions, dtype=np.int64),
            tokens=_token_ids(tokens),
            kinds=np.asarray(kinds, dtype=np.uint8),
            stream=self.place.stream,
        )

    def begin_spans(
        self,
        spans: Iterable[Span],
        tokens: SequenceOf[int] | np.ndarray[Any, Any],
        *,
        given: SequenceOf[int] | np.ndarray[Any, Any] | None = None,
        dense: bool = False,
    ) -> Forward:
        """`begin` for rows of which many follow each other: what it costs is per span, not per row.

            pager.begin_spans([(a, a.length, 40, ROW_COMMIT), (None, 0, 24, ROW_PADDING)], tokens)

        Positions whose K/V exist somewhere take no row of the model. They are named in ROW_GIVEN
        spans, and what they hold is handed in with `Forward.give`:

            spans = [(a, 0, 500, ROW_GIVEN), (a, 500, 64, ROW_COMMIT), (a, 564, 100, ROW_GIVEN)]
            with pager.begin_spans(spans, tokens, given=ids, dense=True) as forward:
                forward.give(k, v)

        Args:
            spans: (sequence, position, count, kind), in the order of the rows; sequence None for
                padding. `count` rows at positions position, position + 1, ...
                ROW_GIVEN and ROW_COMMIT spans of a sequence continue it, in any order of kinds.
            tokens: [rows] ids, of all spans but the given ones together. Empty if there are no
                others: nothing attends then.
            given: [given] ids, of the ROW_GIVEN spans together.
            dense: rows of this forward attend to everything before them, whatever the
                configuration's selection. Needed for given spans, unless that is dense: a row
                cannot select among chunks that are not sealed yet.

        Raises:
            InvalidArgumentError: a span that does not continue its sequence, counts that do not
                add up, given spans without `dense`, or a sequence that is closed or another
                pager's; nothing was changed.
            CapacityError: no room for the chunks of rows and given positions, each of which is an
                open block of the pool; nothing was changed.
        """
        return Forward(
            self.core,
            self,
            list(spans),
            _token_ids(tokens),
            self.place.stream,
            _NO_TOKENS if given is None else _token_ids(given),
            dense,
        )

    def open_snapshot(self, path: str | os.PathLike[str]) -> SnapshotInfo:
        """Opens a snapshot: metadata only.

        Raises:
            StorageError: missing or unreadable.
            CorruptSnapshotError, UnsupportedVersionError: not a sound file of a known version.
        """
        return open_snapshot(path)

    def restore(
        self,
        snapshot: SnapshotInfo,
        *,
        salt: str = "",
        provenance: str = "exact",
        upto: int | None = None,
    ) -> Sequence:
        """A sequence that holds the snapshot's positions; chunks are read when first needed.

        Only an unsealed tail is read now. Each chunk is verified when it is read; one that is not
        what was saved raises CorruptSnapshotError there, and all others stay usable.

        Args:
            snapshot: from `open_snapshot`; the file stays open while its chunks are in use.
            salt: the one it was saved under.
            provenance: "approximate" accepts a file saved under another fingerprint, in a namespace
                of its own; "exact" does not.
            upto: the first positions alone, 0 .. what the snapshot holds; None: all.

        Raises:
            FingerprintMismatchError: naming the field; the pager is as it was. "window": this pager
                would look behind what the saver has kept.
            InvalidArgumentError: the file is a pack of a store, or `upto` is out of range, or
                before `earliest_trim` of what was saved.
            CorruptSnapshotError: the tail is damaged.
            CapacityError: the summaries do not fit.
        """
        snapshot.require_restorable()
        if upto is not None and not 0 <= upto <= len(snapshot.tokens):
            raise InvalidArgumentError(
                f"upto is {upto}; expected 0 to {len(snapshot.tokens)}, the positions "
                f"{snapshot.path} holds"
            )
        if provenance == "exact":
            _require_equal(self.fingerprint, snapshot.fingerprint, snapshot.path)
        if snapshot.layout != self.layout:
            raise FingerprintMismatchError(
                f"layout: {snapshot.path} holds {snapshot.layout}, this pager {self.layout}",
                field="layout",
                expected=self.layout,
                found=snapshot.layout,
            )
        # The chain hashes prove the salt, but a snapshot without a full chunk has none.
        if SALT_FIELD in snapshot.session and not is_of(salt, snapshot.session[SALT_FIELD]):
            raise FingerprintMismatchError(
                f"salt: {snapshot.path} was saved under another salt; pass that one",
                field="salt",
            )
        released = snapshot.released
        before = (
            None
            if released is None
            else (released.tokens, list(released.provenance), released.window)
        )
        try:
            with _locating(self.layout, len(snapshot.tokens)):
                return Sequence(
                    self.core,
                    self,
                    snapshot.reader,
                    salt,
                    provenance,
                    snapshot.reader.fingerprint,
                    -1 if upto is None else upto,
                    before,
                )
        except _core.FingerprintMismatchError as error:  # its message begins with the field
            field = str(error).partition(":")[0]
            raise FingerprintMismatchError(str(error), field=field) from error

    def chain_hashes(self, tokens: Iterable[int] | Tensor, salt: str = "") -> list[bytes]:
        """The name (32 bytes) of each full chunk of these tokens, by which a store finds it.

        Each covers all tokens before its chunk's end, the pager's fingerprint and the salt.
        """
        return self.core.chain_hashes(_token_ids(tokens), salt)

    def legacy_chain_hashes(self, tokens: Iterable[int] | Tensor, salt: str = "") -> list[bytes]:
        """What snapshots of format 1.0 and 1.1 call the same chunks (16 bytes each).

        Two texts can be made to have one of them, so whoever finds by them compares all token ids.
        """
        return self.core.legacy_chain_hashes(_token_ids(tokens), salt)

    def evict_all(self) -> int:
        """Moves every chunk that may leave out of the pool; returns how many. Changes no result."""
        return self.core.evict_all()

    def stats(self) -> dict[str, int | float]:
        """Counters, budgets and times (seconds_*) since the pager was made."""
        return self.core.stats()

    def check_invariants(self) -> None:
        """Restates the invariants of DESIGN.md; InvariantError names the one that does not hold."""
        self.core.check_invariants()

    def reset(self) -> None:
        """Forgets everything, as if just made. Sequences of before can no longer be used."""
        self._core = None  # first: two pools at a time may be too much
        self._core = _core.Pager(self._options)

    def close(self) -> None:
        """Frees everything. Sequences of this pager can no longer be used."""
        self._core = None


def attention_version(
    layout: Layout, config: PagerConfig, place: Place, q_heads: int, q_dtype: torch.dtype
) -> int | str:
    """What decides the bits of a pager's attention for queries of a dtype, before there is one.

    The number of our reference arithmetic, which is the same on every device; or a word with the
    number of another, such as "tensor 1".
    """
    options = _device_options(layout, config, place, q_heads)
    name, version = _core.attention_of(options, str(q_dtype).removeprefix("torch."))
    return version if name == "reference" else f"{name} {version}"


@contextmanager
def _locating(layout: Layout, length: int | None = None) -> Iterator[None]:
    """Damage found inside says which tokens it concerns; `length` ends the last chunk."""
    try:
        yield
    except CorruptSnapshotError as error:
        locate_damage(error, layout.chunk_tokens, length)
        raise


def _token_ids(tokens: Any) -> np.ndarray[Any, Any]:
    """`tokens` as int32 [n], once it is known that nothing is lost by it."""
    ids = np.asarray(tokens)
    if ids.dtype == np.int32 and ids.ndim == 1:
        return ids
    if ids.size == 0:
        return np.zeros(0, dtype=np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"tokens: {ids.dtype} of shape {ids.shape}, expected integers of shape (n,)"
        )
    if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise InvalidArgumentError(
            f"tokens: ids from {ids.min()} to {ids.max()}, expected 0 to {np.iinfo(np.int32).max}"
        )
    return ids.astype(np.int32)


def _canonical(name: str, values: Mapping[str, object]) -> str:
    try:
        return json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"{name} cannot be written as JSON ({error}); expected text, finite numbers, booleans, "
            "None, and lists and mappings of them"
        ) from error


def _require_equal(expected: Mapping[str, object], found: Mapping[str, object], path: str) -> None:
    for field in sorted({*expected, *found}):
        if expected.get(field) != found.get(field):
            raise FingerprintMismatchError(
                f"{field}: {path} was saved with {found.get(field)!r}, here it is "
                f"{expected.get(field)!r}",
                field=field,
                expected=expected.get(field),
                found=found.get(field),
            )


def _device_options(
    layout: Layout, config: PagerConfig, place: Place, q_heads: int | None
) -> _core.PagerOptions:
    """Options that say where a pager is, and what attends there."""
    options = _core.PagerOptions()
    options.layout = layout.native()
    options.device = place.name
    options.q_heads = q_heads or 0
    options.attention = config.attention
    options.missed_chunks = config.missed_chunks
    return options


def _native_selection(config: PagerConfig) -> _core.Selection:
    selection = config.selection
    if selection.kind == "dense":
        return _core.Selection("dense")
    return _core.Selection(
        selection.kind,
        chunks=getattr(selection, "chunks", 0),
        sinks=selection.sinks,
        recent=selection.recent,
        always=list(getattr(selection, "always", ())),
    )
