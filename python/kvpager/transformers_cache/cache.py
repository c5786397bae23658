"""The cache that users hand to transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
import transformers

from kvpager._model.seam.causal_lm import cache_argument, decoder_of, vocab_size
from kvpager._support.arguments import as_integer, integer_of, refusal
from kvpager._support.tokens import TokenIds, TokenIdsLike, as_token_ids
from kvpager.config import PagerConfig, PagerOptions
from kvpager.errors import InvalidArgumentError
from kvpager.pager import Ledger, Pager, Sequence
from kvpager.progress import Progress
from kvpager.stores import SaveReport, SnapshotStore
from kvpager.transformers_cache.host import Host
from kvpager.transformers_cache.layers import PagedLayer
from kvpager.transformers_cache.opening import configuration, open_host, restored_batch, save_text
from kvpager.transformers_cache.rows import TextBatch, Texts

if TYPE_CHECKING:
    from typing_extensions import Unpack


_MOST_REPEATS = 1 << 16


class Cache(transformers.Cache):
    """A transformers cache whose keys and values live in a pager.

    Hand it to `model.generate(ids, cache=cache)` or `model(ids, cache=cache)`; before transformers
    5.24 that argument is `past_key_values`, for which 5.24 gives a FutureWarning.
    In those calls, and in no others, the model's attention is computed over a pool of `pool_tokens`
    tokens, with the rest in host memory or on disk: exact full attention with `Dense()`, or the
    best chunks with `TopK(...)`. A prompt may be many times larger than the pool; it is run in
    parts of at most `rows` tokens.

    Results are those of a stock cache up to rounding. Their bits are not promised, because forwards
    of transformers have row counts of their own: the ledger says `decode` of all chunks. For bits
    that never change use `kvpager.Engine`.

    A call is a transaction: after an exception or an interrupt the cache is as it was before it.

    Example:
        >>> cache = kvpager.Cache(model, pool_tokens=8192)
        >>> out = model.generate(ids, cache=cache, max_new_tokens=100)
        >>> cache.save("chat.kv")
        >>> cache = kvpager.Cache.restore(model, "chat.kv", pool_tokens=8192)
    """

    _of_kvpager = True

    def __init__(
        self,
        model: torch.nn.Module,
        config: PagerConfig | None = None,
        *,
        progress: Progress = None,
        **options: Unpack[PagerOptions],
    ) -> None:
        """Runs a few made-up tokens and hashes the weights.

        Args:
            model: a transformers causal LM in eval mode, on the CPU or on one GPU. It is not
                changed, except for hooks that let other calls pass; they go with its last cache.
            config: the pager's options; options given by name override it. The pool is "auto"
                by default: what the model needs, as far as free memory goes.
            progress: of hashing the weights: True for a bar on stderr, or a callable (bytes done,
                bytes in all).
            **options: of PagerConfig, without `exact`.

        Raises:
            UnsupportedModelError: its attention cannot be computed here, or it has recurrent
                layers; says why and what to do.
            InvalidArgumentError: an option is unknown or out of range.
            CapacityError, DeviceError: not enough memory, or no such device.
        """
        self._open(open_host(model, configuration(config, options), progress), TextBatch())

    def _open(self, host: Host, batch: TextBatch) -> None:
        texts = Texts(batch)
        layers: list[Any] = [
            PagedLayer(host, texts, is_sliding=window is not None) for window in host.known.windows
        ]
        super().__init__(layers=layers)
        self.host = host  # the hooks work on it
        self.texts = texts
        self._closed = False
        host.caches += 1

    @classmethod
    def restore(
        cls,
        model: torch.nn.Module,
        name_or_path: str | os.PathLike[str],
        *,
        store: SnapshotStore | None = None,
        on_mismatch: str = "refuse",
        config: PagerConfig | None = None,
        progress: Progress = None,
        **options: Unpack[PagerOptions],
    ) -> Cache:
        """The cache that `save` wrote. Reads metadata only; chunks follow when needed, verified.

        Hand it the whole prompt next: `generate` computes what follows the restored tokens.
        transformers does not look whether the prompt begins with them; `keep_prefix` does.

        Args:
            model: with the weights that it was saved with.
            name_or_path: the snapshot's name in `store`; without one, the path of a file.
            store: the store it was saved to.
            on_mismatch: "refuse"; "approximate" to accept other releases, processors, threads and
                so on, also a snapshot that a `Session` saved; or "convert" to accept K/V of another
                dtype too. See `Engine.restore`.
            config: the pager's options, as for a new cache.
            progress: as for a new cache.
            **options: of PagerConfig, as for a new cache.

        Raises:
            FingerprintMismatchError: written by another model or with other options; `.field` says
                which.
            CorruptSnapshotError, UnsupportedVersionError, StorageError: the file cannot be used.
            CapacityError: the summaries do not fit.
        """
        cache = cls(model, config, progress=progress, **options)
        try:
            cache.texts.batch = restored_batch(cache.host, name_or_path, store, on_mismatch)
        except BaseException:
            cache.close()
            raise
        return cache

    def save(
        self,
        name_or_path: str | os.PathLike[str],
        *,
        store: SnapshotStore | None = None,
        progress: Progress = None,
    ) -> SaveReport:
        """Writes the text and its K/V to a file, or to a store.

        A store writes the chunks that it has not got yet.

        Args:
            name_or_path: of the snapshot in the store, or without one the path of a new file.
            store: None: a file.
            progress: True for a bar on stderr, or a callable (bytes written, bytes in all).

        Raises:
            InvalidArgumentError: the cache is empty, holds several texts, or one that begins with
                padding.
            ModelChangedError: the weights changed since the cache was made.
            StorageError: no new file is left, an older one is untouched.
        """
        self._require_idle("save")
        return save_text(self.host, self.texts.batch, name_or_path, store, progress)

    @property
    def tokens(self) -> TokenIds:
        """A copy of the text, int32 [n]. Raises InvalidArgumentError for a batch of several."""
        self._require_idle("tokens")
        sequences = self.texts.batch.sequences
        if len(sequences) > 1:
            raise InvalidArgumentError(
                f"tokens: the cache holds {len(sequences)} texts; ask cache.sequences for each"
            )
        return sequences[0].tokens if sequences else np.zeros(0, dtype=np.int32)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The pager's sequence of each entry of the batch; read them, but do not change them."""
        self._require_idle("sequences")
        return self.texts.batch.sequences

    @property
    def pager(self) -> Pager:
        """The lower level, which holds the chunks."""
        return self.host.pager

    @property
    def config(self) -> PagerConfig:
        """The pager's options; `pool_tokens` is a number even if "auto" was given."""
        return self.host.known.config

    @property
    def fingerprint(self) -> Mapping[str, Any]:
        """The fingerprint that its snapshots are restored under (docs/exactness.md)."""
        return self.host.known.fingerprint

    def keep_prefix(self, ids: TokenIdsLike) -> int:
        """Crops the cache to what its text and `ids` have in common; returns how many tokens.

        Call it before `generate` where a prompt may not continue the cached text, as after a chat
        template that writes earlier turns anew.

        Raises:
            InvalidArgumentError: no token ids, several texts or padding; or chunks behind all
                layers' windows, which the cut needs, were released.
        """
        self._require_idle("keep_prefix")
        batch = self.texts.batch
        wanted = as_token_ids(ids, vocab_size(self.host.known.model))
        if len(batch.sequences) > 1 or any(batch.pads):
            raise InvalidArgumentError(
                f"keep_prefix: the cache holds {len(batch.sequences)} texts, or padding; expected "
                "one text"
            )
        held = self.tokens
        most = min(len(held), len(wanted))
        differing = np.flatnonzero(held[:most] != wanted[:most])
        common = int(differing[0]) if differing.size else most
        self.crop(common - len(held))
        return common

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` columns; a number of 0 or less, as transformers'.

        Raises:
            InvalidArgumentError: a positive number; or chunks that the cut needs were released
                behind all layers' windows (`rewind_tokens`).
        """
        self._require_idle("crop")
        batch = self.texts.batch
        remove = integer_of(tokens_to_remove)
        if remove is None or remove > 0:
            raise refusal("tokens_to_remove", tokens_to_remove, "0 or less: crop(-n) removes n")
        columns = max(0, batch.columns + remove)
        if columns == batch.columns:
            return
        cuts = [max(0, columns - pads) for pads in batch.pads]
        if len(cuts) == 1:
            batch.sequences[0].trim(cuts[0])
            self.texts.batch = batch.first(columns)
            return
        forks: list[Sequence] = []
        for sequence, cut in zip(batch.sequences, cuts):
            forks.append(sequence.fork())
            if cut < sequence.length:
                forks[-1].trim(cut)
        self.texts.batch = batch.first(columns, tuple(forks))
        batch.close()

    def reset(self) -> None:
        """Drops all texts."""
        self._require_idle("reset")
        batch, self.texts.batch = self.texts.batch, TextBatch()
        batch.close()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes entry i what entry `beam_idx[i]` was; chunks are shared, tails copied."""
        self._gather("reorder_cache", "beam_idx", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each entry `repeats` times; chunks are shared, tails copied."""
        each = as_integer(repeats, "repeats", 1, _MOST_REPEATS)
        entries = np.arange(len(self.texts.batch.sequences)).repeat(each)
        self._gather("batch_repeat_interleave", "repeats", entries)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps these entries of the batch, in this order.

        Args:
            indices: [n] int64; one may be named several times.
        """
        self._gather("batch_select_indices", "indices", indices)

    def _gather(self, what: str, name: str, indices: Any) -> None:
        self._require_idle(what)
        batch = self.texts.batch
        chosen = _entries(indices, name, len(batch.sequences))
        if not batch.sequences:
            return
        taken: set[int] = set()
        sequences = []
        for index in chosen:
            own = batch.sequences[index]
            sequences.append(own.fork() if index in taken else own)
            taken.add(index)
        self.texts.batch = batch.of(tuple(sequences), chosen)
        for index, sequence in enumerate(batch.sequences):
            if index not in taken:
                sequence.close()

    def fork(self) -> Cache:
        """A cache with the same texts in the same pool; each goes on alone.

        Chunks are shared, unsealed tails are copied. `copy.deepcopy` does the same.
        """
        self._require_idle("fork")
        batch = self.texts.batch
        sequences = tuple(sequence.fork() for sequence in batch.sequences)
        twin = type(self).__new__(type(self))
        twin._open(  # noqa: SLF001  # a cache like this one
            self.host, batch.of(sequences, tuple(range(len(sequences))))
        )
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        return self.fork()

    def __copy__(self) -> NoReturn:
        raise InvalidArgumentError(
            "a kvpager cache has no shallow copy, which would share its texts; call cache.fork()"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise InvalidArgumentError(
            "a kvpager cache cannot be pickled, because its K/V are in a pool of this process; "
            "call cache.save(path), and Cache.restore(model, path) in the other one"
        )

    def stats(self) -> dict[str, int | float]:
        """Counters, budgets and times of the pager, which forks share."""
        self._require_open()
        return self.host.pager.stats()

    def ledger(self, entry: int = 0) -> Ledger:
        """The ledger's records of an entry's chunks, in logical order; none for an empty cache."""
        sequences = self.sequences
        if not sequences:
            return Ledger()
        at = as_integer(entry, "entry", 0, len(sequences) - 1, what="the texts of the cache")
        return sequences[at].ledger()

    def require_model(self, module: torch.nn.Module) -> None:
        """Raises InvalidArgumentError for modules of another model, and if the cache is closed."""
        self._require_open()
        model = self.host.known.model
        if module is not model and module is not decoder_of(model):
            raise InvalidArgumentError(
                f"{cache_argument(model)} is a kvpager cache of another {type(model).__name__}; "
                "make one for this model: kvpager.Cache(model)"
            )

    def _require_open(self) -> None:
        if self._closed:
            raise InvalidArgumentError("the cache is closed; make a new kvpager.Cache(model)")

    def _require_idle(self, what: str) -> None:
        self._require_open()
        self.host.require_idle(self.texts, what)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Drops its texts; with the last of its forks the pool is freed. May be called twice."""
        if self._closed:
            return
        self.host.require_idle(self.texts, "close")
        if self.host.caches == 1:
            self.host.close()
        else:
            self.texts.batch.close()
        self._closed = True
        self.texts.batch = TextBatch()
        self.host.caches -= 1

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed:
            return f"{type(self).__name__}(closed)"
        batch = self.texts.batch
        return (
            f"{type(self).__name__}(texts={len(batch.sequences)}, columns={batch.columns}, "
            f"pool_tokens={self.config.pool_tokens})"
        )


def _entries(indices: Any, name: str, count: int) -> tuple[int, ...]:
    """Numbers of a batch's entries, of a tensor, an array or a list; bools say which.

    Raises InvalidArgumentError: none, or one that is not 0 .. count - 1; of an empty batch any are
    taken, as transformers does.
    """
    expected = f"numbers of the batch's entries, 0 to {count - 1}, or one bool for each"
    try:
        given = torch.as_tensor(indices, device="cpu").tolist()
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # torch raises any
        raise refusal(name, indices, expected) from error
    if not isinstance(given, list):
        raise refusal(name, indices, expected)
    if given and all(isinstance(one, bool) for one in given):
        if count and len(given) != count:
            raise refusal(name, indices, expected)
        given = [at for at, chosen in enumerate(given) if chosen]
    if count and not (given and all(type(one) is int and 0 <= one < count for one in given)):
        raise refusal(name, indices, expected)
    return tuple(given)
