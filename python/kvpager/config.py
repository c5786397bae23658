"""The user's options: how much stays resident, what attention selects, where the rest may live.

Every object is immutable and valid from the moment it exists; each refusal names the field, its
value and what was expected.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypedDict

from kvpager._support.arguments import check_names, is_one_of, listed, refusal
from kvpager._support.option_table import (
    AUTO,
    Validated,
    choice,
    explain,
    flag,
    folder,
    integer,
    number,
    option,
    size,
)
from kvpager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Default M: the first of these that the configuration allows. On the CPU, prefill is about as fast
# as possible with 256 if smaller forwards may have fewer rows; if not, 64 rows cost little more
# than one. On a GPU the weights are read once for all rows: 256 rows cost little more than one, and
# 128 are a whole tile.
DEFAULT_ROWS = {"cpu": (256, 64, 32, 16), "cuda": (256, 128, 64, 32, 16)}
CHUNK_TOKENS = (16, 32, 64, 128, 256)
KV_DTYPES = ("auto", "float32", "float16", "bfloat16", "q8", "k8v4", "q4")
POLICIES = ("qk", "lru")
ATTENTIONS = ("auto", "reference")
LINEARS = ("auto", "kvpager", "torch")
MISSED_CHUNKS = ("auto", "direct", "staged")
CHECKPOINT_POLICIES = ("smallest-gap", "lru")
AUTO_BYTES = -1  # of a budget: as much as the other budgets can ever need

_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?|shim|meta")


def frontier_blocks(chunk_tokens: int, rows: int) -> int:
    """Most unsealed chunks of a sequence during a forward of `rows` rows."""
    return -(-(chunk_tokens - 1 + rows) // chunk_tokens)


def _exact(field: str, value: Any) -> Any:
    if value is False or is_one_of(value, ("all", "reuse")):
        return value
    raise refusal(field, value, '"all", "reuse" or False')


def _row_counts(field: str, value: Any) -> Any:
    """A word for row counts, or the counts themselves, ascending."""
    expected = '"proven", "fixed" or ascending row counts from 1 to 4096, such as (4, 16)'
    if is_one_of(value, ("proven", "fixed")):
        return value
    counts = listed(value, field, expected)
    sound = all(type(count) is int and 1 <= count <= 4096 for count in counts)
    if not sound or counts != sorted(set(counts)):
        raise refusal(field, value, expected)
    return tuple(counts)


def _switch(field: str, value: Any) -> Any:
    if isinstance(value, bool) or is_one_of(value, (AUTO,)):
        return value
    raise refusal(field, value, '"auto", True or False')


def _layers(field: str, value: Any) -> Any:
    if is_one_of(value, (AUTO,)):
        return AUTO
    known = isinstance(value, (tuple, list, range)) and all(
        isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0 for layer in value
    )
    if not known:
        raise refusal(field, value, '"auto", or layers as integers from 0, such as (0, 1)')
    return tuple(sorted(set(value)))


def _device(field: str, value: Any) -> str:
    text = str(value)  # a torch.device says what it is
    if isinstance(value, (bool, int)) or not _DEVICE.fullmatch(text):
        raise refusal(field, value, '"auto", "cpu", "cuda", "cuda:N" or "shim"')
    return text


def _ranges(field: str, value: Any) -> tuple[tuple[int, int], ...]:
    expected = "half-open token ranges (start, stop) with 0 <= start < stop"
    try:
        ranges = tuple((start.__index__(), stop.__index__()) for start, stop in value)
    except (TypeError, ValueError, AttributeError) as error:
        raise refusal(field, value, expected) from error
    if any(not 0 <= start < stop for start, stop in ranges):
        raise refusal(field, value, expected)
    return tuple(sorted(ranges))


_PINNED_BYTES = 8 << 30  # default; pinning takes time, and takes the memory from other processes
_POOL_PER_ROW = 4  # tokens of pool per row of a forward, where many rows are the default
_MANY = 2**40  # more tokens than any context; keeps sums far from 64-bit limits
_TOKENS = integer(0, _MANY)


@dataclass(frozen=True)
class Dense(Validated):
    """Every row attends to everything before it: exact full attention, whatever the pool's size."""

    kind: ClassVar[Literal["dense"]] = "dense"


@dataclass(frozen=True)
class TopK(Validated):
    """Every row attends to the sinks, its recent window, `always`, and the best-scoring chunks."""

    kind: ClassVar[Literal["topk"]] = "topk"

    chunks: int = option(integer(1, 2**20), "chunks chosen by score, per layer and kv head")
    sinks: int = option(_TOKENS, "tokens at the start that every row sees", 64)
    recent: int = option(
        integer(1, _MANY), "tokens before a row that it always sees; at least `rows`", 256
    )
    always: tuple[tuple[int, int], ...] = option(
        ("token ranges (start, stop)", _ranges), "half-open token ranges that every row sees", ()
    )


@dataclass(frozen=True)
class Window(Validated):
    """Every row attends to the sinks and its recent window alone: a baseline, which forgets."""

    kind: ClassVar[Literal["window"]] = "window"

    recent: int = option(
        integer(1, _MANY), "tokens before a row that it always sees; at least `rows`"
    )
    sinks: int = option(_TOKENS, "tokens at the start that every row sees", 64)


Selection: TypeAlias = Dense | TopK | Window


def _selection(field: str, value: Any) -> Any:
    if not isinstance(value, (Dense, TopK, Window)):
        hint = "Dense(), TopK(chunks=...) or Window(recent=...)"
        raise refusal(field, value, f"{hint}, an instance and not the class")
    return value


_DENSE = Dense()


@dataclass(frozen=True)
class PagerConfig(Validated):
    """All options of a pager.

    `selection`, `rows`, `exact`, `chunk_tokens`, `kv_dtype`, `device`, `attention` and
    `linear` change results. All others affect only placement and speed, never a bit.
    """

    pool_tokens: int | Literal["auto"] = option(
        integer(1, _MANY, auto="what an Engine's model needs, as far as free memory goes"),
        "tokens the resident pool holds, its hard bound; a multiple of chunk_tokens",
        "auto",
    )
    chunk_tokens: int = option(choice(CHUNK_TOKENS), "tokens per chunk", 64)
    rows: int | None = option(
        integer(
            1,
            4096,
            none="256, less where the model gathers experts' weights; 64 or what fits if no small "
            "count gives the same bits",
        ),
        "most rows of a forward of the model",
        None,
    )
    small_rows: Literal["proven", "fixed"] | tuple[int, ...] = option(
        ('"proven", "fixed" or row counts', _row_counts),
        "smaller row counts for forwards with little to do: those proven at start to give the bits "
        "of `rows`; none (`fixed`); or these, each proven or refused",
        "proven",
    )
    exact: Literal["all", "reuse", False] = option(
        ('"all", "reuse" or False', _exact),
        "what has one set of bits: everything; prompts and generated text once reused; nothing",
        "all",
    )
    selection: Selection = option(  # noqa: RUF009  # a field, like the others
        ("Dense(), TopK(...) or Window(...)", _selection), "what a row attends to", _DENSE
    )
    host_bytes: int | str = option(
        size(auto="a quarter of the machine's memory, for a GPU at most 8 GiB: it is pinned"),
        "host memory for paged-out chunks",
        "auto",
    )
    disk_path: str | None = option(
        ("the path of an existing folder, or None", folder), "where chunks may spill to", None
    )
    disk_bytes: int = option(
        size(), "disk space for spilled chunks, reserved when the pager is made", 0
    )
    summary_bytes: int | str = option(
        size(auto="enough for every chunk that fits"), "memory for key summaries", "auto"
    )
    policy: Literal["qk", "lru"] = option(choice(POLICIES), "which chunks stay resident", "qk")
    recall_chunks: int = option(
        integer(0, 4096), "most chunks brought back ahead of need after a forward", 4
    )
    hysteresis: float = option(
        number(0.0, 10.0), "by what fraction a recalled chunk must beat its victim", 0.1
    )
    rewind_tokens: int = option(
        integer(0, _MANY),
        "where all layers are windowed: tokens kept beyond the window, by which a text can be cut "
        "without computing it anew",
        1024,
    )
    checkpoint_chunks: int = option(
        integer(1, 1 << 20), "recurrent layers: chunks from one checkpoint of state to the next", 4
    )
    checkpoint_bytes: int = option(
        size(), "recurrent layers: memory for checkpoints, of all texts", 1 << 30
    )
    checkpoint_policy: Literal["smallest-gap", "lru"] = option(
        choice(CHECKPOINT_POLICIES),
        "which checkpoint goes when memory is full: the one whose loss leaves the smallest gap, or "
        "the one that nobody used for longest",
        "smallest-gap",
    )
    beyond_max_positions: bool = option(
        flag(),
        "texts longer than the model's max_position_embeddings; never with learned positions",
        False,
    )
    kv_dtype: Literal["auto", "float32", "float16", "bfloat16", "q8", "k8v4", "q4"] = option(
        choice(KV_DTYPES),
        "what K/V are kept in; auto: the model's dtype; q8: 8 bits and a scale for each token and "
        "head; q4: 4 bits and a scale for 32 numbers; k8v4: keys in q8, values in q4",
        "auto",
    )
    kv_rotation: Literal["auto", True, False] = option(
        ('"auto", True or False', _switch),
        "whether K/V of q8 and q4 are rotated, so that their largest numbers cost the others no "
        "bits; auto: they are",
        "auto",
    )
    float_layers: Literal["auto"] | tuple[int, ...] = option(
        ('layers of the model as integers, or "auto"', _layers),
        "layers that are kept in the model's dtype where K/V are q8 or q4; auto: layer 0 where "
        "something has 4 bits, else none",
        "auto",
    )
    device: str = option(
        ('"auto", "cpu", "cuda", "cuda:N" or "shim"', _device),
        "where the pool is and attention runs; auto: where the model is, or the CPU without one; "
        "shim: the GPU's code on the processor (tests)",
        "auto",
    )
    attention: Literal["auto", "reference"] = option(
        choice(ATTENTIONS),
        "on a GPU: tensor cores where the shape has a kernel (`auto`), or always the CPU's order "
        "of operations, which is slower",
        "auto",
    )
    linear: Literal["auto", "kvpager", "torch"] = option(
        choice(LINEARS),
        "whose products linear layers are: kvpager's, whose rows have the same bits "
        "among any number of rows, or torch's; auto: on the CPU kvpager's for "
        "the dtypes in which they are fast on this kind of processor (none without AVX2, where "
        "kvpager's are refused), on a GPU torch's",
        "auto",
    )
    compress_weights: bool = option(
        flag(),
        "on the CPU, decode steps of few rows read lossless copies of the weights of linear layers "
        "that are kvpager's products: 12 bits for the 16 or 32 of a weight, kept beside it; "
        "faster, and no bit of a result changes",
        False,
    )
    missed_chunks: Literal["auto", "direct", "staged"] = option(
        choice(MISSED_CHUNKS),
        "on a GPU: how a chunk outside the pool is read: in place from pinned memory, page by page "
        "(`direct`), or copied ahead, layer by layer (`staged`)",
        "auto",
    )
    graphs: bool = option(
        flag(),
        "forwards of few rows, such as decode steps, are replayed where that gives the same bits: "
        "on a GPU as CUDA graphs (at most 64 rows), on the CPU from a recording of the model's "
        "operations (at most 16)",
        True,
    )
    debug_shuffle_seed: int | None = option(
        integer(1, 2**64 - 1, none="off"), "hands blocks out in a random order (tests)", None
    )
    debug_poison: bool = option(flag(), "fills free blocks with NaN (tests)", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.pool_is_auto and self.pool_size % self.chunk_tokens:
            raise refusal(
                "PagerConfig.pool_tokens",
                self.pool_tokens,
                f"a multiple of chunk_tokens ({self.chunk_tokens}), such as "
                f"{-(-self.pool_size // self.chunk_tokens) * self.chunk_tokens}",
            )
        if self.disk_bytes and self.disk_path is None:
            raise refusal(
                "PagerConfig.disk_path", None, f"a folder, because disk_bytes is {self.disk_bytes}"
            )
        if self.disk_path is not None and not self.disk_bytes:
            raise refusal(
                "PagerConfig.disk_bytes", 0, f"a budget, because disk_path is {self.disk_path!r}"
            )
        if self.rows is not None:
            self.row_choices()

    def row_choices(
        self, device: str = "cpu", suits: Callable[[int], bool] | None = None
    ) -> tuple[int, ...]:
        """Candidates for M, the most rows of a forward, on `device`; best first.

        One value if `rows` is given. Otherwise the best default that this configuration allows,
        followed by those to use if small row counts cannot be proven to give the bits of that many.

        Args:
            device: "cpu" or "cuda".
            suits: whether the model may have a default; the smallest one is always allowed.

        Raises:
            InvalidArgumentError: the pool cannot hold one sequence's frontier, the recent window is
                shorter than a forward (a chunk would be chosen from before it is sealed), or a
                count of `small_rows` is not below M.
        """
        if self.rows is not None:
            self._check_rows(self.rows, "rows")
            self._check_small_rows(self.rows, "rows")
            return (self.rows,)
        defaults = DEFAULT_ROWS[device]
        said = f"rows (by default, on {device})"
        allowed = [rows for rows in defaults if self._allows_by_default(rows)]
        if not allowed:
            self._check_rows(defaults[-1], said)
        if suits is not None:
            allowed = [rows for rows in allowed if suits(rows)] or allowed[-1:]
        self._check_small_rows(allowed[0], said)
        choices = [rows for rows in allowed if not self._too_many_small_rows(rows)]
        last = next((i for i, rows in enumerate(choices) if rows <= 64), len(choices) - 1)
        return tuple(choices[: last + 1])

    def resolve_rows(self, device: str = "cpu") -> int:
        """The most rows of a forward on `device`, before anything about the model is known.

        Raises:
            InvalidArgumentError: as `row_choices`.
        """
        return self.row_choices(device)[0]

    def _allows_by_default(self, rows: int) -> bool:
        """Whether M may be `rows`; a large M must leave the pool room for other sequences.

        The pool's size does not matter if it is automatic: M changes bits, so it must not depend on
        how much memory is free. The pool is then made large enough for M, or refused.
        """
        try:
            self._check_rows(rows, "rows")
        except InvalidArgumentError:
            return False
        return rows <= 64 or self.pool_is_auto or self.pool_size >= _POOL_PER_ROW * rows

    def least_pool(self, rows: int) -> int:
        """The smallest pool, in tokens, with which M may be `rows`, by default or as given."""
        forward = (frontier_blocks(self.chunk_tokens, rows) + 1) * self.chunk_tokens
        if self.rows is not None or rows <= 64:
            return forward
        by_default = -(-_POOL_PER_ROW * rows // self.chunk_tokens) * self.chunk_tokens
        return max(forward, by_default)

    def _check_rows(self, rows: int, said: str) -> None:
        least = (frontier_blocks(self.chunk_tokens, rows) + 1) * self.chunk_tokens
        if not self.pool_is_auto and self.pool_size < least:
            raise refusal(
                "PagerConfig.pool_tokens",
                self.pool_tokens,
                f"at least {least}: the unsealed chunks of one sequence during a forward, and "
                f"one more ({said} {rows}, chunk_tokens {self.chunk_tokens})",
            )
        if isinstance(self.selection, (TopK, Window)) and self.selection.recent < rows:
            raise refusal(
                f"{type(self.selection).__name__}.recent",
                self.selection.recent,
                f"at least {said} ({rows}); raise recent or lower rows",
            )

    def _check_small_rows(self, rows: int, said: str) -> None:
        if self._too_many_small_rows(rows):
            raise refusal(
                "PagerConfig.small_rows", self.small_rows, f"row counts below {said} ({rows})"
            )

    def _too_many_small_rows(self, rows: int) -> bool:
        return not isinstance(self.small_rows, str) and any(n >= rows for n in self.small_rows)

    @property
    def pool_is_auto(self) -> bool:
        """Whether an engine decides how large the pool is."""
        return self.pool_tokens == AUTO

    @property
    def pool_size(self) -> int:
        """`pool_tokens` as a number.

        Raises:
            InvalidArgumentError: it is "auto", which only an engine can resolve.
        """
        if isinstance(self.pool_tokens, str):
            raise refusal(
                "PagerConfig.pool_tokens",
                self.pool_tokens,
                "a number of tokens here: only an Engine has the model that decides. Use "
                'Engine(model, pool_tokens="auto"), or the number that `kvpager plan MODEL` tells',
            )
        return self.pool_tokens

    @property
    def pool_blocks(self) -> int:
        """Chunks the resident pool holds. Raises InvalidArgumentError as `pool_size`."""
        return self.pool_size // self.chunk_tokens

    def host_budget_on(self, device: str) -> int:
        """`host_bytes` in bytes, for a kind of device: "cpu", "cuda" or "shim"."""
        if self.host_bytes != "auto":
            return int(self.host_bytes)
        quarter = physical_memory() // 4
        return quarter if device == "cpu" else min(quarter, _PINNED_BYTES)

    @property
    def summary_budget(self) -> int:
        """`summary_bytes` in bytes; AUTO_BYTES for "auto"."""
        return AUTO_BYTES if self.summary_bytes == "auto" else int(self.summary_bytes)

    def replace(self, **changes: Unpack[PagerOptions]) -> PagerConfig:
        """A copy with some options changed; the error for an unknown name suggests a known one."""
        return dataclasses.replace(self, **known_options(changes))


class PagerOptions(TypedDict, total=False):
    """The options of `PagerConfig` as keyword arguments; `help(PagerConfig)` explains each."""

    pool_tokens: int | Literal["auto"]
    chunk_tokens: int
    rows: int | None
    small_rows: Literal["proven", "fixed"] | tuple[int, ...]
    exact: Literal["all", "reuse", False]
    selection: Selection
    host_bytes: int | str
    disk_path: str | os.PathLike[str] | None
    disk_bytes: int | str
    summary_bytes: int | str
    policy: Literal["qk", "lru"]
    recall_chunks: int
    hysteresis: float
    rewind_tokens: int
    checkpoint_chunks: int
    checkpoint_bytes: int | str
    checkpoint_policy: Literal["smallest-gap", "lru"]
    beyond_max_positions: bool
    kv_dtype: Literal["auto", "float32", "float16", "bfloat16", "q8", "k8v4", "q4"]
    kv_rotation: Literal["auto", True, False]
    float_layers: Literal["auto"] | tuple[int, ...]
    device: str
    attention: Literal["auto", "reference"]
    linear: Literal["auto", "kvpager", "torch"]
    compress_weights: bool
    missed_chunks: Literal["auto", "direct", "staged"]
    graphs: bool
    debug_shuffle_seed: int | None
    debug_poison: bool


for _options in (Dense, TopK, Window, PagerConfig):
    explain(_options)


def known_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `options` if every name is an option of PagerConfig.

    Raises:
        InvalidArgumentError: names the unknown option and the closest known one.
    """
    names = [field.name for field in dataclasses.fields(PagerConfig)]
    check_names("PagerConfig", options, names)
    return dict(options)


def describe_selection(selection: Selection) -> str:
    """One canonical line with all parameters of a selection."""
    values = [
        f"{field.name}={getattr(selection, field.name)}"
        for field in sorted(dataclasses.fields(selection), key=lambda field: field.name)
    ]
    return f"{selection.kind}({', '.join(values)})"


def physical_memory() -> int:
    """Bytes of memory this process may use: the machine's, or its control group's if less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _control_group("memory.max")
    return total if limit is None else min(total, limit)


def free_memory() -> int:
    """Bytes of memory this process may still take without making the system swap."""
    free = physical_memory()
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            free = min(free, int(line.split()[1]) << 10)
    limit, used = _control_group("memory.max"), _control_group("memory.current")
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def _control_group(name: str) -> int | None:
    try:
        text = Path("/sys/fs/cgroup", name).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


SELECTIONS: Mapping[str, type[Dense] | type[TopK] | type[Window]] = {
    kind.kind: kind for kind in (Dense, TopK, Window)
}


def config_to_json(config: PagerConfig) -> dict[str, Any]:
    """Every option by name; `config_from_json` is the inverse."""
    values = dataclasses.asdict(config)
    values["selection"]["kind"] = config.selection.kind
    return values


def config_from_json(values: Mapping[str, Any]) -> PagerConfig:
    """The configuration that `config_to_json` described."""
    fields = dict(values["selection"])
    selection = SELECTIONS[fields.pop("kind")](**fields)
    return PagerConfig(**{**values, "selection": selection})
