"""The pager, and the sequences over it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvpager import _core
from kvpager._model.layout import Layout
from kvpager._runtime.released import ReleasedText
from kvpager._support.arguments import as_flag, as_int64, as_integer, is_one_of, listed, refusal
from kvpager._support.salts import checked_salt, salt_digest
from kvpager.errors import FingerprintMismatchError, InvalidArgumentError
from kvpager.pager.device import READ_DTYPES, PoolDevice, resolve
from kvpager.pager.forward import ROW_GIVEN, Forward, Span, Tensor
from kvpager.pager.ledger import Ledger
from kvpager.pager.snapshot import SALT_FIELD, SnapshotInfo, open_snapshot
from kvpager.stores import FileStore, SaveReport

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as SequenceOf

    from kvpager.config import PagerConfig


_NO_TOKENS = np.zeros(0, dtype=np.int32)

MOST_THREADS = 4096
TIER_RESIDENT, TIER_HOST, TIER_DISK, TIER_SNAPSHOT = 1, 2, 4, 8


class Pin(_core.OwnedPin):
    """Keeps a range of positions resident until released; changes no result. A context manager.

    Made by `Sequence.pin`; a pin without references is released.
    """

    if TYPE_CHECKING:

        def __enter__(self) -> Pin: ...


class Sequence(_core.OwnedSequence):
    """An ordered list of chunks and a tail; made by a `Pager`. Closing it releases its chunks.

    A sequence without references is closed. Only the pager that made it accepts it; another one, or
    this one after a close or reset, raises InvalidArgumentError.

    Attributes:
        pager: the `Pager` that made it.
        uid: its number, unique in the process.
        salt: of its chunks.
        length: committed positions.
        closed: whether it was closed, or its pager closed or reset.
    """

    _admitted = 0  # positions that `reserve` was asked for

    @property
    def tokens(self) -> np.ndarray[Any, Any]:
        """A copy of the token ids of all committed positions, int32 [length]."""
        return self.core.tokens(self.uid)

    @property
    def released(self) -> int:
        """Number of first positions whose chunks were released behind the pager's window."""
        return self.core.released(self.uid)

    @property
    def earliest_trim(self) -> int:
        """The first position, beside 0, that `trim` can cut at; 0 while no chunk was released."""
        return self.core.earliest_trim(self.uid)

    def reserve(self, total_tokens: int) -> None:
        """Admission: reserves lower-tier room to grow to `total_tokens` positions.

        A later call replaces the earlier reservation. With a window, the room is for the chunks
        that the sequence holds at a time. If a released chunk stays because other sequences use it,
        its room is reserved again as long as there is some; later a forward's `begin` reserves it.

        Raises:
            CapacityError: names the bytes needed; nothing is reserved.
        """
        total = as_int64(total_tokens, "total_tokens")
        self.core.reserve(self.uid, total)
        self._admitted = total

    def adopt_prefix(self, tokens: Iterable[int] | Tensor) -> int:
        """Adopts the longest prefix of sealed, exact chunks that the pager has for these tokens.

        REQUIRES: the sequence is empty. Returns the positions now held, a multiple of chunk_tokens.
        With a window, chunks behind it may be missing.
        """
        return self.core.adopt_prefix(self.uid, _known_ids(tokens))

    def append(
        self, tokens: Iterable[int] | Tensor, k: Tensor, v: Tensor, *, provenance: str = "decode"
    ) -> None:
        """Adds positions whose K/V were computed elsewhere.

        Args:
            tokens: [n] ids.
            k: [layers, n, kv_heads, k_dim].
            v: [layers, n, kv_heads, v_dim].
            provenance: "exact" only if they have the bits of an M-row forward of these tokens; it
                makes the chunks shareable.

        Raises:
            InvalidArgumentError: a tensor of another shape, dtype or device than expected.
            NonFiniteError: a key or value is not finite.
            CapacityError: no room for the chunks.

        After an error the sequence is unchanged; but if chunks that a cut would need were released
        meanwhile, or it ends at a chunk's border and the pool has no block for the cut, it keeps
        the positions added so far.
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
        rows = self.pager.rows  # at a time; every pool has open blocks for that many
        start = self.length
        self.core.reserve(self.uid, max(self._admitted, start + len(ids)))
        try:
            for first in range(0, len(ids), rows):
                part = slice(first, min(first + rows, len(ids)))
                spans: list[Span] = [(self, start + first, part.stop - first, ROW_GIVEN)]
                with self.pager.begin_spans(spans, (), given=ids[part], dense=True) as forward:
                    forward.give(k[:, part], v[:, part])
                    forward.commit(provenance=provenance)
        except BaseException:
            if self.length > start and (start == 0 or start >= self.earliest_trim):
                self.trim(start)
            self.core.reserve(self.uid, max(self._admitted, self.length))
            raise

    def select(
        self, layer: int, q: Tensor, *, position: int | None = None, window: int | None = None
    ) -> list[list[int]]:
        """The chunks a row with queries q would attend to, per kv head, ascending.

        Args:
            layer: of the layout.
            q: [q_heads, k_dim], on the CPU or on the pager's device.
            position: the row's own; None: the next one.
            window: of tokens that the row sees, itself included; None: all.

        Raises:
            InvalidArgumentError: there is no such layer, or q has another shape or dtype.
            NonFiniteError: q is not finite.
        """
        at = self.length if position is None else as_int64(position, "position")
        behind = 0 if window is None else as_integer(window, "window", 0)
        if isinstance(q, torch.Tensor):
            q = q.detach().cpu()
        return self.core.select(self.uid, as_int64(layer, "layer"), q[None], at, behind)

    def read_kv(self, layer: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Raw keys and values of positions [start, stop) at one layer.

        Args:
            layer: of the layout.
            start: the first position.
            stop: behind the last one, at most the sequence's length.

        Returns:
            k [n, kv_heads, k_dim] and v [n, kv_heads, v_dim], copies on the CPU, bit for bit, in
            the layer's dtypes; of q8 and q4 the float32 numbers that the codes stand for.
        """
        k, v = self.core.read_kv(
            self.uid, as_int64(layer, "layer"), as_int64(start, "start"), as_int64(stop, "stop")
        )
        layout = self.pager.layout.of_layer(layer)
        return (
            torch.from_numpy(k).view(READ_DTYPES[layout.k_dtype]),
            torch.from_numpy(v).view(READ_DTYPES[layout.v_dtype]),
        )

    def pin(self, start: int, stop: int) -> Pin:
        """Keeps positions [start, stop) resident until the pin is released; changes no result.

        Whole chunks are kept: all that have one of the positions.

        Args:
            start: the first position.
            stop: behind the last one, at most the sequence's length.

        Raises:
            InvalidArgumentError: there are no such positions.
            CapacityError: too many pins; the message says how many chunks can still be pinned.
        """
        return Pin(self, as_int64(start, "start"), as_int64(stop, "stop"))

    def trim(self, position: int) -> None:
        """Drops everything from `position` on.

        Raises:
            InvalidArgumentError: not 0 .. length, or between 0 and `earliest_trim`, where a window
                has released chunks. Nothing was changed.
        """
        self.core.trim(self.uid, as_int64(position, "position"))

    def fork(self) -> Sequence:
        """A sequence with the same positions; sealed chunks are shared, the tail is copied."""
        return Sequence(self.core, self.pager, self)

    def ledger(self) -> Ledger:
        """The ledger's entry of each chunk, in logical order, `released` ones included."""
        return Ledger(self.core.ledger(self.uid))

    def residency(self) -> dict[str, np.ndarray[Any, Any]]:
        """The ledger as arrays [chunks]: tiers (TIER_* bits), selected, recalled, qk_score."""
        return self.core.residency(self.uid)

    def freeze(self, upto: int | None = None) -> _core.SnapshotContent:
        """Freezes the first `upto` positions (None: all), so that any thread can save them.

        It shares sealed chunks and copies an unsealed tail; the sequence can go on. It does not
        include released chunks; `session_text` adds their tokens.

        Raises:
            InvalidArgumentError: `upto` is not 1 .. length, or before `earliest_trim`.
            CorruptSnapshotError: the rows to copy are damaged in the snapshot they are from.
        """
        if upto is None:
            return self.core.freeze(self.uid, -1)
        positions = as_integer(upto, "upto", 1, self.length, what="the positions it holds")
        return self.core.freeze(self.uid, positions)

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
            session: JSON values to save beside the K/V; see `SnapshotInfo.session`.
            progress: called with (bytes done, bytes in all); if it raises, the save is undone.

        Raises:
            InvalidArgumentError: the sequence is empty, or `upto` is out of range.
            StorageError: a system call failed; no new file is left, an older one is untouched.
            CorruptSnapshotError: a chunk to copy is damaged in the snapshot it is from.
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
        """JSON text of a snapshot's session section: `values`, and entries that a restore needs.

        Args:
            values: the caller's own JSON values.
            content: from `freeze`. May be left out only without a window: the tokens of released
                chunks are saved here.
        """
        before = None if content is None else ReleasedText.of_content(content)
        released = {} if before is None else before.session_values()
        return _json_text(
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
        fingerprint: flat mapping of JSON values of everything the bits of K/V depend on. Chunks and
            snapshots are shared only if it is equal. On a GPU it must include `attention_version`.
        window: the largest window of any layer: no row attends to keys at positions <= its own -
            window; 0: some layer has no window. Chunks behind it are released, except for
            `config.rewind_tokens` (at least a chunk), by which a sequence can still be trimmed.
        threads: of our own kernels; torch's number by default. Never changes a bit.
        workers: those threads, shared with who computes beside it, in the place of `threads`.
        device: the tensors' device, instead of `config.device`: "cuda:1", a torch.device ...
            "meta" manages chunks without bytes: a forward calls `replayed(pager.generation)`
            instead of `attend`. For measuring and simulating.
        q_heads: query heads of the model; required on a GPU, ignored on the CPU.

    Raises:
        InvalidArgumentError: names the option, its value and what was expected.
        CapacityError: there is not enough memory on the host or the device.
        DeviceError: there is no such device; the message says what was found.
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
        workers: _core.Workers | None = None,
        device: str | torch.device | None = None,
        q_heads: int | None = None,
    ) -> None:
        if device is not None:
            config = config.replace(device=str(device))
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
        self.fingerprint_json = _json_text("fingerprint", self.fingerprint, sort_keys=True)
        options = _device_options(layout, config, self.place, q_heads)
        options.pool_blocks = config.pool_blocks
        options.rows = rows
        options.smaller_rows = list(smaller_rows)
        options.exact = config.exact is not False
        options.selection = _native_selection(config)
        options.host_bytes = config.host_budget_on(self.place.kind)
        options.disk_bytes = config.disk_bytes
        options.disk_path = config.disk_path or ""
        options.summary_bytes = config.summary_budget
        options.policy = config.policy
        options.recall_chunks = config.recall_chunks
        options.hysteresis = config.hysteresis
        options.threads = (
            torch.get_num_threads()
            if threads is None
            else as_integer(threads, "threads", 1, MOST_THREADS)
        )
        if workers is not None:
            options.workers = workers
        options.window = window
        # Provisional rows since the last sealed chunk may be dropped at any time.
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
        """The device of forwards' tensors: the CPU, or a CUDA device."""
        return self.place.tensors

    @property
    def generation(self) -> int:
        """Changes when a captured forward's memory is reallocated; see `Forward.replayed`."""
        return self.core.generation()

    def sequence(self, *, salt: str = "") -> Sequence:
        """An empty sequence. `salt` separates tenants: it enters every chunk's name.

        It should be hard to guess, because an attacker can compute names for guesses. `Engine`
        stretches its salt.
        """
        return Sequence(self.core, self, checked_salt(salt))

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
        return Forward(  # no Python code runs between the begin and taking ownership
            self.core,
            self,
            sequences=sequences,
            positions=_integers("positions", positions, np.int64),
            tokens=_token_ids(tokens),
            kinds=_integers("kinds", kinds, np.uint8),
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
        """`begin` for long runs of consecutive rows: its cost is per span, not per row.

            pager.begin_spans([(a, a.length, 40, ROW_COMMIT), (None, 0, 24, ROW_PADDING)], tokens)

        Positions whose K/V exist elsewhere need no row of the model. ROW_GIVEN spans name them, and
        `Forward.give` passes their K/V:

            spans = [(a, 0, 500, ROW_GIVEN), (a, 500, 64, ROW_COMMIT), (a, 564, 100, ROW_GIVEN)]
            with pager.begin_spans(spans, tokens, given=ids, dense=True) as forward:
                forward.give(k, v)

        Args:
            spans: (sequence, position, count, kind), in the order of the rows; sequence None for
                padding. `count` rows at positions position, position + 1, ...
                ROW_GIVEN and ROW_COMMIT spans of a sequence continue it, in any order of kinds.
            tokens: [rows] ids, of all spans except the given ones. Empty if there are no others:
                then no row attends.
            given: [given] ids, of all ROW_GIVEN spans.
            dense: rows of this forward attend to everything before them, instead of the
                configuration's selection. Required for given spans unless that is dense: a row
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
            listed(spans, "spans", "tuples (sequence, position, count, kind)"),
            _token_ids(tokens),
            self.place.stream,
            _NO_TOKENS if given is None else _token_ids(given),
            as_flag(dense, "dense"),
        )

    def open_snapshot(self, path: str | os.PathLike[str]) -> SnapshotInfo:
        """Opens a snapshot: reads only its metadata.

        Args:
            path: of a file, or of a manifest of a directory store.

        Raises:
            StorageError: the file is missing or unreadable.
            CorruptSnapshotError: it is damaged. UnsupportedVersionError: a newer release wrote it.
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
        """Makes a sequence with the snapshot's positions; chunks are read when first needed.

        Reads only an unsealed tail now. Each chunk is verified when it is read; a damaged one
        raises CorruptSnapshotError then, and all others stay usable.

        Args:
            snapshot: from `open_snapshot`; the file stays open while its chunks are in use.
            salt: the one it was saved under.
            provenance: "approximate" accepts a file saved under another fingerprint, in a namespace
                of its own; "exact" does not.
            upto: only the first positions, 0 .. what the snapshot holds; None: all.

        Raises:
            FingerprintMismatchError: names the field; the pager is unchanged. "window": this pager
                needs chunks that the saver had released.
            InvalidArgumentError: the file is a pack of a store, or `upto` is out of range, or
                before `earliest_trim` of what was saved.
            CorruptSnapshotError: the tail is damaged.
            CapacityError: the summaries do not fit.
        """
        snapshot.require_restorable()
        if upto is not None:
            what = f"the positions {snapshot.path} holds"
            upto = as_integer(upto, "upto", 0, len(snapshot.tokens), what=what)
        if not is_one_of(provenance, ("exact", "approximate")):
            raise refusal("provenance", provenance, '"exact" or "approximate"')
        if provenance == "exact":
            _require_equal(self.fingerprint, snapshot.fingerprint, snapshot.path)
        if snapshot.layout != self.layout:
            raise FingerprintMismatchError(
                f"layout: {snapshot.path} holds {snapshot.layout}, this pager {self.layout}",
                field="layout",
                expected=self.layout,
                found=snapshot.layout,
            )
        # The chain hashes verify the salt, but a snapshot without a full chunk has none.
        checked_salt(salt)
        own = salt_digest(salt)
        if snapshot.session.get(SALT_FIELD, own) != own:
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
        """The name (32 bytes) of each full chunk of these tokens, by which stores find it.

        A name covers all tokens before its chunk's end, the pager's fingerprint and the salt.
        """
        return self.core.chain_hashes(_known_ids(tokens), checked_salt(salt))

    def evict_all(self) -> int:
        """Evicts every chunk that may leave the pool; returns how many. Changes no result."""
        return self.core.evict_all()

    def stats(self) -> dict[str, int | float]:
        """Counters, budgets and times (seconds_*) since the pager was made."""
        return self.core.stats()

    def check_invariants(self) -> None:
        """Checks the invariants of DESIGN.md; raises InvariantError with the violated one."""
        self.core.check_invariants()

    def reset(self) -> None:
        """Drops everything, as if just made. Older sequences can no longer be used."""
        self._core = None  # first, because two pools may not fit into memory
        self._core = _core.Pager(self._options)

    def close(self) -> None:
        """Frees everything. Sequences of this pager can no longer be used."""
        self._core = None


def attention_version(
    layout: Layout, config: PagerConfig, place: PoolDevice, q_heads: int, q_dtype: torch.dtype
) -> int | str:
    """Identifies the arithmetic of a pager's attention; needs no pager.

    Args:
        layout: of the pager.
        config: likewise.
        place: likewise.
        q_heads: of a layer's queries.
        q_dtype: float32, float16 or bfloat16.

    Returns:
        The number of our reference arithmetic, which is the same on every device, or a word and
        number for another one, such as "tensor 1".
    """
    options = _device_options(layout, config, place, q_heads)
    name, version = _core.attention_of(options, str(q_dtype).removeprefix("torch."))
    return version if name == "reference" else f"{name} {version}"


def _integers(name: str, values: Any, dtype: type[np.integer[Any]]) -> np.ndarray[Any, Any]:
    """Integers [n] of a dtype. Raises InvalidArgumentError if one is none, or does not fit."""
    try:
        given = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidArgumentError(f"{name}: {error}; expected integers of shape (n,)") from error
    if given.dtype == dtype or given.size == 0:
        return given.astype(dtype, copy=False)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    if given.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"{name}: {given.dtype} of shape {given.shape}, expected integers of shape (n,), "
            f"{low} to {high}"
        )
    if given.min() < low or given.max() > high:
        raise InvalidArgumentError(
            f"{name}: {given.min()} to {given.max()}, expected {low} to {high}"
        )
    return given.astype(dtype)


def _token_ids(tokens: Any) -> np.ndarray[Any, Any]:
    """`tokens` as int32 [n]; raises if a value does not fit."""
    try:
        ids = np.asarray(tokens)
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(f"tokens: {error}; expected integers of shape (n,)") from error
    if ids.size == 0:
        return np.zeros(0, dtype=np.int32)
    if ids.dtype == np.int32 and ids.ndim == 1:  # a forward names the row of a negative one
        return ids
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidArgumentError(
            f"tokens: {ids.dtype} of shape {ids.shape}, expected integers of shape (n,)"
        )
    if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise InvalidArgumentError(
            f"tokens: ids from {ids.min()} to {ids.max()}, expected 0 to {np.iinfo(np.int32).max}"
        )
    return ids.astype(np.int32)


def _known_ids(tokens: Any) -> np.ndarray[Any, Any]:
    """`_token_ids`, none of them negative."""
    ids = _token_ids(tokens)
    if ids.size and ids.min() < 0:
        raise InvalidArgumentError(
            f"tokens: ids from {ids.min()} to {ids.max()}, expected 0 or more"
        )
    return ids


def _json_text(name: str, values: Mapping[str, object], *, sort_keys: bool = False) -> str:
    try:
        return json.dumps(values, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False)
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
    layout: Layout, config: PagerConfig, place: PoolDevice, q_heads: int | None
) -> _core.PagerOptions:
    """Core options for the pager's device and its attention."""
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
