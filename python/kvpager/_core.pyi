"""
kvpager's native core. Use the kvpager package; this module is its private half.
"""

from __future__ import annotations
import collections.abc
import numpy
import numpy.typing
import typing
import typing_extensions

__all__: list[str] = [
    "ByteWatch",
    "CHECKS_INVARIANTS",
    "CHUNKS_PER_SPLIT",
    "CapacityError",
    "ChunkInfo",
    "Claim",
    "CompressedWeights",
    "ContextValue",
    "CorruptSnapshotError",
    "Device",
    "DeviceError",
    "ExclusiveLock",
    "FingerprintMismatchError",
    "InvalidArgumentError",
    "InvariantError",
    "KERNEL_VERSION",
    "LINEAR_VERSION",
    "Layout",
    "NonFiniteError",
    "ObjectTable",
    "OwnedFile",
    "OwnedForward",
    "OwnedPin",
    "OwnedSequence",
    "Pager",
    "PagerError",
    "PagerOptions",
    "Place",
    "Program",
    "ReadGate",
    "SNAPSHOT_VERSION",
    "Selection",
    "SnapshotContent",
    "SnapshotImage",
    "SnapshotReader",
    "SnapshotWriter",
    "StorageError",
    "TENSOR_LINEAR_VERSION",
    "Turns",
    "UnsupportedVersionError",
    "Workers",
    "arm_fault",
    "attention_of",
    "block_check",
    "converted_content",
    "disarm_faults",
    "isa_name",
    "linear",
    "linear_of_experts",
    "loose_content",
    "probe_device",
    "processor",
    "read_blocks",
    "released_text",
    "snapshot_file_bytes",
    "total_device_bytes",
    "total_mapped_bytes",
    "total_pinned_bytes",
]

class PagerError(Exception):
    pass

class CapacityError(PagerError):
    pass

class InvalidArgumentError(PagerError, ValueError):
    pass

class NonFiniteError(PagerError):
    pass

class StorageError(PagerError, OSError):
    pass

class DeviceError(PagerError):
    pass

class CorruptSnapshotError(PagerError):
    chunk: int | None
    layer: int | None
    start: int | None
    stop: int | None

class UnsupportedVersionError(PagerError):
    pass

class FingerprintMismatchError(PagerError):
    pass

class InvariantError(PagerError):
    pass

class Workers:
    """
    Threads that a pager and products of matrices share.
    """
    def __init__(
        self, threads: typing.SupportsInt | typing.SupportsIndex, openmp: str = ""
    ) -> None:
        """
        openmp: path of an OpenMP runtime that is loaded, whose threads are used; empty: of their own.
        """
    @property
    def threads(self) -> int:
        """
        With the caller's own.
        """

class CompressedWeights:
    """
    Lossless copies of weights in 12 bits each, which products of few rows read in their place.
    """
    def __init__(self) -> None: ...
    def add(self, workers: Workers, weight: typing.Any) -> bool:
        """
        Copies a tensor [..., n, k], which has to stay where and as it is; is not held.

        False, and nothing is copied: it is no float32 or bfloat16 tensor on the CPU, its rows
        are not apart (as those of an expanded one), or more than one in eight groups of 64
        numbers has some that 12 bits cannot hold.
        """
    def clear(self) -> None:
        """
        Frees all copies; not while they are read.
        """
    @property
    def bytes(self) -> int:
        """
        Of all copies.
        """
    @property
    def weight_bytes(self) -> int:
        """
        Of the weights that they are of.
        """

class Device:
    """
    A device that is open for products of matrices.
    """
    def __init__(self, name: str) -> None:
        """
        name: "cuda", "cuda:1" or "shim".
        """
    def linear(
        self,
        x: typing.Any,
        weight: typing.Any,
        bias: typing.Any,
        out: typing.Any,
        stream: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> bool:
        """
        As the function `linear`, of tensors on this device: launched on a stream, and not waited for.
        """
    @property
    def name(self) -> str:
        """
        With its number.
        """

class Program:
    """
    Small operations on tensors of the CPU, one after the other in one call.
    """
    def __init__(
        self,
        workers: Workers,
        steps: collections.abc.Sequence[
            tuple[
                str,
                typing.Annotated[
                    collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
                    "FixedSize(4)",
                ],
                typing.SupportsInt | typing.SupportsIndex,
                collections.abc.Sequence[typing.Any],
                bool,
                tuple[typing.SupportsInt | typing.SupportsIndex, dict[str, typing.Any]] | None,
            ]
        ],
        fixed: collections.abc.Sequence[typing.Any],
        given: collections.abc.Sequence[
            typing.SupportsInt
            | typing.SupportsIndex
            | tuple[str, collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]]
        ],
        compressed: CompressedWeights | None = None,
    ) -> None:
        """
        steps: (operation, shape, depth, (out, a, b, c, d), beside, call); an operand is
        (base, offset in bytes, dtype, strides), a float or None. beside: a product that is
        computed at the same time as the one before it. call: of an attention, its layer and
        keyword arguments; else None. fixed: tensors, the first bases. given: of each that
        run() gets, which follow, its dtype and shape, or its bytes. compressed: copies of
        weights that products read.

        Raises:
            InvalidArgumentError: an operand outside of its memory, or of another kind than
                its operation's.
        """
    def run(self, attention: typing.Any, given: collections.abc.Sequence[typing.Any]) -> None:
        """
        Computes all of it.

        attention: the running forward of a pager on the CPU, whose attention is computed
        without Python; or an object with the same `attend`, or None where nothing attends.

        Raises:
            InvalidArgumentError: another number of tensors is given, or one is not contiguous,
                or of another size, dtype or shape than expected. Nothing is computed then.
            Whatever attention, or a signal's handler, raises; the rest is not computed then.
        """

class Layout:
    """
    Shape of a chunk's bytes.
    """
    def __init__(
        self,
        *,
        layers: typing.SupportsInt | typing.SupportsIndex,
        kv_heads: typing.SupportsInt | typing.SupportsIndex,
        chunk_tokens: typing.SupportsInt | typing.SupportsIndex,
        k_dim: typing.SupportsInt | typing.SupportsIndex,
        v_dim: typing.SupportsInt | typing.SupportsIndex,
        k_dtype: str,
        v_dtype: str,
        k_rotated: bool = False,
        v_rotated: bool = False,
        float_layers: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = [],
        float_dtype: str = "float32",
    ) -> None: ...
    def slice_bytes(self, layer: typing.SupportsInt | typing.SupportsIndex) -> int: ...
    @property
    def chunk_bytes(self) -> int: ...
    @property
    def chunk_tokens(self) -> int: ...
    @property
    def float_dtype(self) -> str: ...
    @property
    def float_layers(self) -> list[int]: ...
    @property
    def k_dim(self) -> int: ...
    @property
    def k_dtype(self) -> str: ...
    @property
    def k_rotated(self) -> bool: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def largest_slice_bytes(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def token_bytes(self) -> int: ...
    @property
    def v_dim(self) -> int: ...
    @property
    def v_dtype(self) -> str: ...
    @property
    def v_rotated(self) -> bool: ...

class Selection:
    """
    Which chunks a row attends to.
    """
    def __init__(
        self,
        kind: str,
        *,
        chunks: typing.SupportsInt | typing.SupportsIndex = 0,
        sinks: typing.SupportsInt | typing.SupportsIndex = 64,
        recent: typing.SupportsInt | typing.SupportsIndex = 256,
        always: collections.abc.Sequence[
            tuple[
                typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex
            ]
        ] = [],
    ) -> None: ...

class PagerOptions:
    """
    Everything a pager is made from; plain fields.
    """

    attention: str
    device: str
    disk_path: str
    exact: bool
    layout: Layout
    missed_chunks: str
    namespace_key: str
    poison: bool
    policy: str
    selection: Selection
    workers: Workers
    def __init__(self) -> None: ...
    @property
    def disk_bytes(self) -> int: ...
    @disk_bytes.setter
    def disk_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def host_bytes(self) -> int: ...
    @host_bytes.setter
    def host_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def hysteresis(self) -> float: ...
    @hysteresis.setter
    def hysteresis(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None: ...
    @property
    def pool_blocks(self) -> int: ...
    @pool_blocks.setter
    def pool_blocks(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def q_heads(self) -> int: ...
    @q_heads.setter
    def q_heads(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def recall_chunks(self) -> int: ...
    @recall_chunks.setter
    def recall_chunks(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def rewind(self) -> int: ...
    @rewind.setter
    def rewind(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def rows(self) -> int: ...
    @rows.setter
    def rows(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def shuffle_seed(self) -> int: ...
    @shuffle_seed.setter
    def shuffle_seed(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def smaller_rows(self) -> list[int]: ...
    @smaller_rows.setter
    def smaller_rows(
        self, arg0: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]
    ) -> None: ...
    @property
    def summary_bytes(self) -> int: ...
    @summary_bytes.setter
    def summary_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def threads(self) -> int: ...
    @threads.setter
    def threads(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def window(self) -> int: ...
    @window.setter
    def window(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None: ...

class SnapshotContent:
    """
    Something whose chunks can be written to a snapshot: a frozen sequence or an opened file.
    """
    @property
    def chain_hashes(self) -> list[bytes]:
        """
        Names of the sealed chunks, 32 bytes each.
        """
    @property
    def chunks(self) -> int: ...
    @property
    def hashes(self) -> bytes:
        """
        Of the sealed chunks, one behind the other: the name, 32 bytes, and the content id, 16, which is equal for equal payload, name and provenance.
        """
    @property
    def last_use(self) -> numpy.typing.NDArray[numpy.uint64]:
        """
        [chunks], or empty
        """
    @property
    def layout(self) -> Layout: ...
    @property
    def provenance(self) -> list[str]: ...
    @property
    def qk_score(self) -> numpy.typing.NDArray[numpy.float64]:
        """
        [chunks], or empty
        """
    @property
    def scorer(self) -> str: ...
    @property
    def sealed_chunks(self) -> int: ...
    @property
    def slice_checksums(self) -> numpy.typing.NDArray[numpy.uint64]:
        """
        [chunks, layers]
        """
    @property
    def summary_page_bytes(self) -> int: ...
    @property
    def tail_tokens(self) -> int: ...
    @property
    def tokens(self) -> numpy.typing.NDArray[numpy.int32]:
        """
        Read-only, not copied.
        """

class SnapshotReader(SnapshotContent):
    """
    An opened snapshot: metadata verified, payload read on demand.
    """
    @staticmethod
    def gather(
        chunks: collections.abc.Sequence[
            tuple[SnapshotReader, typing.SupportsInt | typing.SupportsIndex]
        ],
        name: str,
    ) -> SnapshotReader:
        """
        A snapshot put together from sealed chunks of opened ones: (reader, chunk).
        """
    @staticmethod
    def open(
        path: str,
        packs_folder: str = "",
        opener: collections.abc.Callable[[str], typing.Any] | None = None,
    ) -> SnapshotReader:
        """
        opener: called with the path of the snapshot and of each pack; returns their bytes, as kvpager.stores.ByteRanges does.
        """
    def read_chunk(
        self, chunk: typing.SupportsInt | typing.SupportsIndex
    ) -> numpy.typing.NDArray[numpy.uint8]: ...
    def read_rows(
        self,
        chunk: typing.SupportsInt | typing.SupportsIndex,
        layer: typing.SupportsInt | typing.SupportsIndex,
    ) -> tuple[numpy.ndarray, numpy.ndarray]:
        """
        k [chunk_tokens, kv_heads, k_dim] and v of a slice, verified, as words of their size; of codes the numbers that they stand for.
        """
    def read_slice(
        self,
        chunk: typing.SupportsInt | typing.SupportsIndex,
        layer: typing.SupportsInt | typing.SupportsIndex,
    ) -> numpy.typing.NDArray[numpy.uint8]: ...
    def verify(
        self,
        threads: typing.SupportsInt | typing.SupportsIndex,
        progress: collections.abc.Callable[[int, int], None] | None = None,
    ) -> list[tuple[int, int, str]]:
        """
        Reads everything; (chunk, layer, message) of all damage. Layer -1: the summary.
        """
    @property
    def file_bytes(self) -> int:
        """
        Of the file itself, without packs; 0 of a gathered snapshot.
        """
    @property
    def fingerprint(self) -> str: ...
    @property
    def logical_digest(self) -> str: ...
    @property
    def packs(self) -> list[tuple[str, int]]: ...
    @property
    def path(self) -> str: ...
    @property
    def payload_bytes_read(self) -> int: ...
    @property
    def places(self) -> numpy.typing.NDArray[numpy.uint32]:
        """
        [sealed chunks, 2]: pack, chunk; empty without packs
        """
    @property
    def session(self) -> str: ...
    @property
    def summary_checksums(self) -> numpy.typing.NDArray[numpy.uint64]: ...

class SnapshotWriter:
    """
    Writes a snapshot under a temporary name; publish gives it its own.
    """
    def __init__(
        self,
        path: str,
        layout: Layout,
        reserve_bytes: typing.SupportsInt | typing.SupportsIndex = 0,
        mode: typing.SupportsInt | typing.SupportsIndex = 384,
        cipher: typing.Any = None,
    ) -> None:
        """
        mode: permissions; a file that has the name keeps those that it lacks. cipher: encrypts all that is written, as kvpager.stores.encryption does.
        """
    def discard(self) -> None:
        """
        Lets go of the file and its lock; removes it unless it was published. Like every call, InvalidArgumentError while another one runs.
        """
    def publish(self) -> None: ...
    def write_content(
        self,
        content: SnapshotContent,
        which: typing.Annotated[numpy.typing.ArrayLike, numpy.int64],
        fingerprint: str,
        session: str,
        progress: collections.abc.Callable[[int, int], None] | None = None,
    ) -> int: ...
    def write_manifest(
        self,
        content: SnapshotContent,
        packs: collections.abc.Sequence[tuple[str, typing.SupportsInt | typing.SupportsIndex]],
        places: typing.Annotated[numpy.typing.ArrayLike, numpy.uint32],
        summary_checksums: typing.Annotated[numpy.typing.ArrayLike, numpy.uint64],
        fingerprint: str,
        session: str,
    ) -> int: ...
    @property
    def logical_digest(self) -> str:
        """
        Of what was written, as the reader of the file will say.
        """
    @property
    def summary_checksums(self) -> numpy.typing.NDArray[numpy.uint64]: ...
    @property
    def temporary(self) -> str:
        """
        Name of the temporary file, in the folder of the path; empty once there is none.
        """

class SnapshotImage:
    """
    The file that a content would be, in pieces made when they are read.
    """
    def __init__(self, content: SnapshotContent, fingerprint: str, session: str) -> None: ...
    def read_piece(self, piece: typing.SupportsInt | typing.SupportsIndex) -> bytes:
        """
        One behind the other, the pieces are the file. None is larger than a chunk, a summary, the front or the metadata.
        """
    @property
    def file_bytes(self) -> int: ...
    @property
    def logical_digest(self) -> str:
        """
        As the reader of the file will say.
        """
    @property
    def pieces(self) -> int: ...

class ChunkInfo:
    """
    What the ledger says of one chunk of one sequence; a copy.
    """
    def __repr__(self) -> str: ...
    @property
    def block(self) -> int | None:
        """
        Its block of the pool; None while it is not resident.
        """
    @property
    def chain_hash(self) -> str:
        """
        Its name in hex, by which stores find it; zeros while it is unsealed.
        """
    @property
    def checkpoint(self) -> bool:
        """
        Whether recurrent states are kept for its end.
        """
    @checkpoint.setter
    def checkpoint(self, arg0: bool) -> None: ...
    @property
    def chunk(self) -> int:
        """
        Logical index, from 0; its positions are [start, stop).
        """
    @property
    def damaged(self) -> bool:
        """
        Whether its bytes on disk, or in the snapshot, are not those that were put there.
        """
    @property
    def in_snapshot(self) -> bool:
        """
        Whether an open snapshot has it.
        """
    @property
    def k_dtype(self) -> str:
        """
        Dtype of its keys.
        """
    @property
    def last_use(self) -> int:
        """
        Number of the last forward that read it.
        """
    @property
    def on_disk(self) -> bool:
        """
        Whether the disk tier has it.
        """
    @property
    def on_host(self) -> bool:
        """
        Whether host memory has it.
        """
    @property
    def pins(self) -> int:
        """
        Pins of this sequence that hold it.
        """
    @property
    def provenance(self) -> str:
        """
        "exact", "decode" or "approximate".
        """
    @property
    def qk_score(self) -> float:
        """
        Moving average of its share of attention mass, 0 to 1; with dense attention that of one layer.
        """
    @property
    def recalled(self) -> int:
        """
        Times it was loaded back into the pool.
        """
    @property
    def references(self) -> int:
        """
        Sequences that use this record.
        """
    @property
    def released(self) -> bool:
        """
        Whether it is behind a window, and has no bytes any more.
        """
    @property
    def resident(self) -> bool:
        """
        Whether it is in the pool.
        """
    @property
    def sealed(self) -> bool:
        """
        Whether all its positions are written, so that it never changes again.
        """
    @property
    def selected(self) -> int:
        """
        Forwards of this sequence that read it.
        """
    @property
    def start(self) -> int:
        """
        Its first position.
        """
    @property
    def stop(self) -> int:
        """
        The position after its last one.
        """
    @property
    def v_dtype(self) -> str:
        """
        Dtype of its values.
        """

class Pager:
    """
    The native pager; kvpager.Pager wraps it.
    """
    def __init__(self, options: PagerOptions) -> None: ...
    def adopt_prefix(
        self,
        sequence: typing.SupportsInt | typing.SupportsIndex,
        tokens: typing.Annotated[numpy.typing.ArrayLike, numpy.int32],
    ) -> int: ...
    def attention(self, q_dtype: str) -> tuple[str, int]:
        """
        What attend runs for queries of a dtype, "reference" or "tensor", and its version.
        """
    def chain_hashes(
        self, tokens: typing.Annotated[numpy.typing.ArrayLike, numpy.int32], salt: str
    ) -> list[bytes]:
        """
        Names of the full chunks, 32 bytes each.
        """
    def check_invariants(self) -> None: ...
    def earliest_trim(self, sequence: typing.SupportsInt | typing.SupportsIndex) -> int: ...
    def evict_all(self) -> int: ...
    def forward_running(self) -> bool: ...
    def freeze(
        self,
        sequence: typing.SupportsInt | typing.SupportsIndex,
        upto: typing.SupportsInt | typing.SupportsIndex = -1,
    ) -> SnapshotContent: ...
    def generation(self) -> int: ...
    def give(
        self,
        k: list[typing.Any],
        v: list[typing.Any],
        stream: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> None:
        """
        OwnedForward.give_rows of whichever forward runs; likewise `write` and `mark_replayed`.
        """
    def ledger(self, sequence: typing.SupportsInt | typing.SupportsIndex) -> list[ChunkInfo]: ...
    def mark_replayed(
        self,
        generation: typing.SupportsInt | typing.SupportsIndex,
        stream: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> None: ...
    def read_kv(
        self,
        sequence: typing.SupportsInt | typing.SupportsIndex,
        layer: typing.SupportsInt | typing.SupportsIndex,
        start: typing.SupportsInt | typing.SupportsIndex,
        stop: typing.SupportsInt | typing.SupportsIndex,
    ) -> tuple[numpy.ndarray, numpy.ndarray]: ...
    def released(self, sequence: typing.SupportsInt | typing.SupportsIndex) -> int: ...
    def reserve(
        self,
        sequence: typing.SupportsInt | typing.SupportsIndex,
        total_tokens: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def residency(
        self, sequence: typing.SupportsInt | typing.SupportsIndex
    ) -> dict[str, numpy.ndarray]: ...
    def select(
        self,
        sequence: typing.SupportsInt | typing.SupportsIndex,
        layer: typing.SupportsInt | typing.SupportsIndex,
        q: typing.Any,
        position: typing.SupportsInt | typing.SupportsIndex,
        window: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> list[list[int]]: ...
    def stats(self) -> dict[str, typing.Any]: ...
    def tokens(
        self, sequence: typing.SupportsInt | typing.SupportsIndex
    ) -> numpy.typing.NDArray[numpy.int32]: ...
    def trim(
        self,
        sequence: typing.SupportsInt | typing.SupportsIndex,
        position: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def write(
        self,
        layer: typing.SupportsInt | typing.SupportsIndex,
        k: typing.Any,
        v: typing.Any,
        stream: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> None: ...
    @property
    def device(self) -> str:
        """
        "cpu", or the opened device with its number, such as "cuda:0".
        """

class OwnedSequence:
    """
    Owns a sequence of a pager; kvpager.Sequence adds what it can do.
    """
    @typing.overload
    def __init__(self, core: Pager, owner: typing.Any, salt: str) -> None: ...
    @typing.overload
    def __init__(self, core: Pager, owner: typing.Any, fork_of: OwnedSequence) -> None: ...
    @typing.overload
    def __init__(
        self,
        core: Pager,
        owner: typing.Any,
        reader: SnapshotReader,
        salt: str,
        provenance: str,
        file_namespace: str,
        upto: typing.SupportsInt | typing.SupportsIndex = -1,
        before: tuple[
            typing.Annotated[numpy.typing.ArrayLike, numpy.int32],
            typing.Annotated[
                collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], "FixedSize(3)"
            ],
            typing.SupportsInt | typing.SupportsIndex,
        ]
        | None = None,
    ) -> None:
        """
        before: released_text() of what was saved.
        """
    def close(self, forget: bool = False) -> None:
        """
        Ends the sequence. Its exact chunks stay cached for prefix reuse while there is room.

        forget: they do not, nor do those that were computed after them, unless another
        sequence uses them; their memory below the pool goes back to the system.
        """
    @property
    def closed(self) -> bool: ...
    @property
    def core(self) -> Pager:
        """
        InvalidArgumentError once closed.
        """
    @property
    def length(self) -> int:
        """
        Committed positions.
        """
    @property
    def pager(self) -> typing.Any: ...
    @property
    def salt(self) -> str: ...
    @property
    def uid(self) -> int:
        """
        Of no other sequence of the process.
        """

class OwnedPin:
    """
    Keeps a range of positions resident until released; changes no result. A context manager.
    """
    def __enter__(self) -> typing.Any: ...
    def __exit__(self, arg0: typing.Any, arg1: typing.Any, arg2: typing.Any) -> None: ...
    def __init__(
        self,
        sequence: OwnedSequence,
        start: typing.SupportsInt | typing.SupportsIndex,
        stop: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def release(self) -> None:
        """
        Lets the chunks go again. Releasing twice is allowed.
        """

class OwnedForward:
    """
    Owns the running forward of a pager; kvpager.Forward adds what it can do.
    """
    def __enter__(self) -> typing.Any: ...
    def __exit__(self, arg0: typing.Any, arg1: typing.Any, arg2: typing.Any) -> None: ...
    @typing.overload
    def __init__(
        self,
        core: Pager,
        owner: typing.Any,
        *,
        sequences: typing.Any,
        positions: typing.Annotated[numpy.typing.ArrayLike, numpy.int64],
        tokens: typing.Annotated[numpy.typing.ArrayLike, numpy.int32],
        kinds: typing.Annotated[numpy.typing.ArrayLike, numpy.uint8],
        stream: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> None:
        """
        sequences: of each row, or None; or an array of their uids and -1.
        """
    @typing.overload
    def __init__(
        self,
        core: Pager,
        owner: typing.Any,
        spans: list[tuple[typing.Any, int, int, int]],
        tokens: typing.Annotated[numpy.typing.ArrayLike, numpy.int32],
        stream: typing.SupportsInt | typing.SupportsIndex = 0,
        given: typing.Annotated[numpy.typing.ArrayLike, numpy.int32] = ...,
        dense: bool = False,
    ) -> None:
        """
        A span is (sequence, position, count, kind); given: ids of the positions of kind 3.
        """
    def abort(self) -> None:
        """
        Ends the forward as if it had not begun.
        """
    def attend_rows(
        self,
        layer: typing.SupportsInt | typing.SupportsIndex,
        q: typing.Any,
        k: typing.Any,
        v: typing.Any,
        out: typing.Any,
        scaling: typing.SupportsFloat | typing.SupportsIndex,
        softcap: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        window: typing.SupportsInt | typing.SupportsIndex = 0,
        sinks: typing.Any = None,
        stream: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> None:
        """
        Tensors of the pager's device; sinks: float32 [1, q_heads, 1].
        """
    def commit_rows(
        self,
        sequences: typing.Any,
        accepted: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        provenance: str,
    ) -> None: ...
    def give_rows(
        self,
        k: list[typing.Any],
        v: list[typing.Any],
        stream: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> None:
        """
        Of each layer: [given, kv_heads, head_dim] of the pager's device.
        """
    def mark_replayed(
        self,
        generation: typing.SupportsInt | typing.SupportsIndex,
        stream: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> None: ...
    def selected(self) -> tuple[numpy.ndarray, numpy.ndarray] | None:
        """
        The chunks that each (row, kv head) attended to in the last attend, ascending: offsets
        int64 [rows * kv_heads + 1] into chunks int32. None: each attends to all of them.

        Raises InvalidArgumentError on a device.
        """
    def write_rows(
        self,
        layer: typing.SupportsInt | typing.SupportsIndex,
        k: typing.Any,
        v: typing.Any,
        stream: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> None: ...
    @property
    def attend_seconds(self) -> float:
        """
        In attention so far.
        """
    @property
    def core(self) -> Pager:
        """
        InvalidArgumentError once it ended.
        """
    @property
    def pager(self) -> typing.Any: ...

class ObjectTable:
    """
    Dictionaries and lists as they were. Whoever makes one keeps them, and all that was in them, alive.
    """
    def __init__(self) -> None: ...
    def add(self, container: typing.Any) -> None:
        """
        Remembers what is in it now.
        """
    def add_type(self, object: typing.Any) -> None:
        """
        Remembers its type.
        """
    def changed(self) -> list[int]:
        """
        Numbers of the containers whose keys or values are other objects, or in another order.
        """
    def changed_types(self) -> list[int]:
        """
        Numbers of the objects that have another type.
        """
    def refresh(self, index: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        Remembers it anew.
        """

class ByteWatch:
    """
    Whether memory still holds what it held: ranges of (address, bytes) that whoever makes one keeps readable.
    """

    block_bytes: typing.ClassVar[int] = 1024
    def __init__(
        self,
        ranges: collections.abc.Sequence[
            tuple[
                typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex
            ]
        ],
        threads: typing.SupportsInt | typing.SupportsIndex,
        seed: typing.SupportsInt | typing.SupportsIndex,
    ) -> None: ...
    def digests(self, range: typing.SupportsInt | typing.SupportsIndex) -> bytes:
        """
        Of a range as it was when this was made: a digest of 16 bytes for each MiB, by the seed.
        """
    def sample(self, blocks: typing.SupportsInt | typing.SupportsIndex) -> int:
        """
        Reads so many blocks of each range again, at random places; returns the number of a range that was found changed, or -1.
        """
    def sweep(self, bytes: typing.SupportsInt | typing.SupportsIndex) -> int:
        """
        Reads about so many bytes again from where the last call ended; returns likewise.
        """
    @property
    def total_bytes(self) -> int:
        """
        Of all ranges.
        """

class OwnedFile:
    """
    An open file; closed when it is dropped, and on exec.
    """
    def __enter__(self) -> typing.Any: ...
    def __exit__(self, arg0: typing.Any, arg1: typing.Any, arg2: typing.Any) -> None: ...
    def __init__(
        self,
        path: str,
        flags: typing.SupportsInt | typing.SupportsIndex,
        mode: typing.SupportsInt | typing.SupportsIndex = 384,
    ) -> None:
        """
        As os.open. Raises OSError.
        """
    def close(self) -> None:
        """
        Closing twice is allowed.
        """
    def fileno(self) -> int:
        """
        The descriptor, which stays this object's.
        """
    def lock(self, operation: typing.SupportsInt | typing.SupportsIndex) -> bool:
        """
        flock(); False if somebody else has it and LOCK_NB is given.
        """
    def unlock(self) -> None:
        """
        Takes the lock back; in a forked child nothing.
        """

class ExclusiveLock:
    """
    Holds a file's flock() for as long as the block runs. The file is made where it is missing.
    """
    def __enter__(self) -> typing.Any:
        """
        Raises StorageError.
        """
    def __exit__(self, arg0: typing.Any, arg1: typing.Any, arg2: typing.Any) -> None: ...
    def __init__(
        self, path: str, timeout_seconds: typing.SupportsFloat | typing.SupportsIndex
    ) -> None: ...
    def entered(self) -> None:
        """
        What the block gets; called with the lock held.
        """
    def leaving(self, error: typing.Any) -> None:
        """
        Called with the lock held, and with what the block raised or None.
        """
    def undone(self) -> None:
        """
        Called with the lock held if one of these raised; again if it raises itself.
        """

class ContextValue:
    """
    Sets a context variable for as long as the block runs.
    """
    def __enter__(self) -> None: ...
    def __exit__(self, arg0: typing.Any, arg1: typing.Any, arg2: typing.Any) -> None: ...
    def __init__(self, variable: typing.Any, value: typing.Any) -> None: ...

class Place:
    """
    What one at a time may have, and nobody waits for.
    """
    def __init__(self) -> None: ...

class Claim:
    """
    Tries to have a place for as long as the block runs.
    """
    def __enter__(self) -> bool:
        """
        Whether it is had.
        """
    def __exit__(self, arg0: typing.Any, arg1: typing.Any, arg2: typing.Any) -> None: ...
    def __init__(self, place: Place) -> None: ...

class Turns:
    """
    A lock of forwards that knows who holds it, and that nobody gets any more once it was ended.
    """
    def __enter__(self) -> None: ...
    def __exit__(self, arg0: typing.Any, arg1: typing.Any, arg2: typing.Any) -> None: ...
    def __init__(self) -> None: ...
    def end(self) -> None:
        """
        Waits for the forward that runs; later ones are refused. Twice is harmless.
        """
    @property
    def ended(self) -> bool:
        """
        Whether `end` was called.
        """
    @property
    def held_here(self) -> bool:
        """
        Whether this thread is in a forward.
        """

class ReadGate:
    """
    Whether reads may still write to their destinations. Once closed it stays closed.
    """
    def __init__(self, seconds: typing.SupportsFloat | typing.SupportsIndex | None = None) -> None:
        """
        Closes by itself after `seconds`; None: never.
        """
    def close(self) -> None:
        """
        Closes the gate; returns when no copy is running.
        """
    def copy(self, into: typing_extensions.Buffer, data: typing_extensions.Buffer) -> bool:
        """
        Copies a block; False, and nothing is written, if the gate is closed.
        """
    def is_open(self) -> bool: ...
    @property
    def state(self) -> str:
        """
        What `is_open` and copies found last: "open", "abandoned" or "late".
        """

def arm_fault(
    point: str,
    after: typing.SupportsInt | typing.SupportsIndex,
    error_number: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Makes the `after`-th next visit of a named fault point fail once with this errno. Only in builds for tests, as is disarm_faults.
    """

def attention_of(options: PagerOptions, q_dtype: str) -> tuple[str, int]:
    """
    What a pager of these options runs for queries of a dtype, "reference" or "tensor", and its version.
    """

def block_check(binding: bytes, data: typing_extensions.Buffer) -> bytes:
    """
    The check of a block: 16 bytes.
    """

def converted_content(
    source: SnapshotContent,
    layout: Layout,
    namespace_key: str,
    salt: str,
    before: tuple[
        typing.Annotated[numpy.typing.ArrayLike, numpy.int32],
        typing.Annotated[
            collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], "FixedSize(3)"
        ],
        typing.SupportsInt | typing.SupportsIndex,
    ]
    | None = None,
) -> SnapshotContent:
    """
    A content with its K/V in the dtypes of `layout`, to be written to a self-contained file; all chunks are approximate. namespace_key: the fingerprint that is saved with it. before: released_text() of what was saved.
    """

def disarm_faults() -> None:
    """
    Takes back every armed fault.
    """

def isa_name() -> str:
    """
    Instruction-set tier in use: 'base', 'v3' or 'v4'.
    """

def linear(
    workers: Workers,
    x: typing.Any,
    weight: typing.Any,
    bias: typing.Any,
    out: typing.Any,
    compressed: CompressedWeights | None = None,
) -> bool:
    """
    Writes x [..., k] times weight [n, k] transposed, plus bias [n] or None, to out [..., n].

    compressed: copies of weights, perhaps of these; they change no bit.

    False, and nothing is written: a tensor is not on the CPU, dtypes differ or are none of
    float32, float16 and bfloat16, shapes do not fit, rows are not equally far apart, or out
    has elements in common, with itself or with another tensor.
    """

def linear_of_experts(
    workers: Workers,
    x: typing.Any,
    weight: typing.Any,
    bias: typing.Any,
    chosen: typing.Any,
    out: typing.Any,
    compressed: CompressedWeights | None = None,
) -> bool:
    """
    Writes x [M, k] times weight [experts, n, k] transposed, plus bias [experts, n] or None,
    to out [M * c, n]: row i of the result is row i // c of x times the matrix number
    chosen[i], int64 [M * c] of any shape. compressed: as for `linear`.

    False, and nothing is written: as for `linear`. InvalidArgumentError if there is no such
    matrix.
    """

def loose_content(
    layout: Layout,
    tokens: typing.Annotated[numpy.typing.ArrayLike, numpy.int32],
    chain_hashes: collections.abc.Sequence[bytes],
    exact: collections.abc.Sequence[bool],
    payload: collections.abc.Sequence[typing.Annotated[numpy.typing.ArrayLike, numpy.uint8]],
) -> SnapshotContent:
    """
    Sealed chunks to be written, from arrays [chunk_bytes] that must not change: 32 bytes of hash and chunk_tokens ids each. exact: of provenance exact, or approximate.
    """

def probe_device(kind: str) -> dict[str, typing.Any]:
    """
    What was found of "cuda" or "shim": kind, plugin (a path), why_not, devices.
    """

def processor() -> dict[str, int]:
    """
    What this processor can run, whatever KVPAGER_ISA says: its level of x86-64 (1, 3 or 4), and
    whether it has dot products of bytes and of bfloat16, and AMX tiles of bfloat16.
    """

def read_blocks(
    gate: ReadGate,
    blocks: collections.abc.Sequence[
        tuple[
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            bytes,
            bytes,
            typing_extensions.Buffer,
        ]
    ],
) -> list[str]:
    """
    Reads blocks one after the other and copies those whose check is right.

    Args:
        blocks: file, start, binding, check and destination of each; the files stay open meanwhile.

    Returns:
        For each "hit", "miss" (the gate was closed), "damaged" or "unreadable".
    """

def released_text(
    content: SnapshotContent,
) -> (
    tuple[numpy.typing.NDArray[numpy.int32], typing.Annotated[list[int], "FixedSize(3)"], int]
    | None
):
    """
    Of a frozen sequence, what came before its first chunk: token ids, chunks by provenance (exact, decode, approximate), window; or None.
    """

def snapshot_file_bytes(
    content: SnapshotContent,
    sealed: typing.SupportsInt | typing.SupportsIndex,
    tail: bool,
    fingerprint: str,
    session: str,
    packs: typing.SupportsInt | typing.SupportsIndex,
) -> int:
    """
    No file of so many chunks, or manifest with so many packs, is larger.
    """

def total_device_bytes() -> int:
    """
    Bytes of device memory this process holds, counted where they are allocated.
    """

def total_mapped_bytes() -> int:
    """
    Bytes of all live slabs of this process, counted where they are mapped.
    """

def total_pinned_bytes() -> int:
    """
    The same of pinned host memory.
    """

CHECKS_INVARIANTS: bool = False
CHUNKS_PER_SPLIT: int = 8
KERNEL_VERSION: int = 1
LINEAR_VERSION: int = 1
SNAPSHOT_VERSION: tuple[int, int] = (1, 0)
TENSOR_LINEAR_VERSION: int = 1
__version__: str = "0.1.0"
