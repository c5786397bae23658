"""Seconds of prefill, decode, save and restore, as sums of terms that say what each is for.

    decode   = weights + arithmetic + experts + elements + attention + scan + link + framework
               + pager
    prefill  = the same over ceil(tokens / M) forwards, + seal
    save     = sync + disk
    restore  = metadata; the first token after it: + read + summaries + memory + a prefill

docs/scaling.md has each with its symbols and where its constants come from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvpager.config import Dense, Selection, TopK, Window, frontier_blocks
from kvpager.plan.machine import Machine
from kvpager.plan.shape import KvShape, ModelShape

# Of this library, on any machine; docs/scaling.md says how they were found.
CALL_SECONDS = 6e-5  # an attention call of one layer, beside its bytes
STEP_SECONDS = 3e-4  # begin, commit, sampling, scheduling of a forward
OPEN_SECONDS = 3e-4  # of a snapshot: header, fingerprint, tail
OPEN_CHUNK_SECONDS = 1.5e-7  # per chunk: its record, checksums, token ids
FIRST_USE = 3  # times what a forward's framework and bookkeeping take, when nothing is in a cache
SEAL_COPIES = 3  # times a sealed chunk's bytes pass through memory: copy, checksums, summary
GATHERED = 3  # times an expert's weights pass through memory when they are gathered per row
REUSE = 0.6  # of what a row selects, chosen by the step before it too (published for text)


@dataclass(frozen=True)
class Term:
    """One part of a cost: what takes the time, and what it moves."""

    name: str
    seconds: float
    bytes: float = 0.0


@dataclass(frozen=True)
class Cost:
    """A sum of terms."""

    terms: tuple[Term, ...]

    @property
    def seconds(self) -> float:
        """All terms together."""
        return sum(term.seconds for term in self.terms)

    @property
    def bound(self) -> str:
        """The term that takes most."""
        return max(self.terms, key=lambda term: term.seconds).name

    def of(self, name: str) -> float:
        """Seconds of one term; 0 where there is none."""
        return sum(term.seconds for term in self.terms if term.name == name)

    def plus(self, other: Cost) -> Cost:
        """Both after one another."""
        names = dict.fromkeys(term.name for term in (*self.terms, *other.terms))
        everything = (*self.terms, *other.terms)
        return Cost(
            tuple(
                Term(
                    name,
                    sum(term.seconds for term in everything if term.name == name),
                    sum(term.bytes for term in everything if term.name == name),
                )
                for name in names
            )
        )


@dataclass(frozen=True)
class Run:
    """What is run, and with how much memory.

    Attributes:
        shape, kv: the model, and its K/V in chunks.
        machine: where.
        rows: M.
        selection: what a row attends to.
        pool_chunks: blocks of the pool.
        host_chunks: chunks that host memory keeps, beside the pool or of it.
    """

    shape: ModelShape
    kv: KvShape
    machine: Machine
    rows: int
    selection: Selection
    pool_chunks: int
    host_chunks: int

    def frontier(self) -> int:
        """Blocks that a running sequence's unsealed chunks take."""
        return frontier_blocks(self.kv.chunk_tokens, self.rows)


def attended_tokens(run: Run, context: float, layer: int = -1) -> float:
    """Tokens that a row at position `context` attends to at a layer (-1: one without a window)."""
    selection, chunk = run.selection, run.kv.chunk_tokens
    seen = context
    if isinstance(selection, TopK):
        always = sum(stop - start for start, stop in selection.always)
        recent = selection.recent + chunk / 2  # it begins at a chunk's boundary
        seen = min(context, selection.chunks * chunk + selection.sinks + recent + always)
    elif isinstance(selection, Window):
        seen = min(context, selection.sinks + selection.recent + chunk / 2)
    window = run.shape.window_of(layer) if layer >= 0 else 0
    return min(seen, window + chunk / 2) if window else seen


def decode(run: Run, context: int, sessions: int = 1) -> Cost:
    """One step, in which each of so many sessions at `context` tokens gets a token."""
    rows = run.machine.rows_to_decode(run.shape.dtype, sessions)
    attention, moved = _attention_of_few(run, context, sessions)
    terms = [
        *_model_terms(run, rows, head_rows=rows),
        Term("attention", attention, moved),
        _scan(run, context, sessions, sessions),
        *_paging(run, context, sessions),
    ]
    return Cost(tuple(_with_overheads(run, terms, forwards=1)))


def prefill(run: Run, start: int, stop: int) -> Cost:
    """Tokens [start, stop) of one session, M at a time."""
    tokens = stop - start
    if tokens <= 0:
        return Cost((Term("pager", 0.0),))
    forwards = -(-tokens // run.rows)
    rows = min(run.rows, _ladder_rows(run, tokens))
    middle = (start + stop) / 2
    per_forward = _model_terms(run, rows, head_rows=1)
    flops = moved = 0.0
    for layer in range(run.shape.layers):
        seen = attended_tokens(run, middle, layer)
        dims = run.shape.k_dim + run.shape.v_dim
        flops += 2.0 * tokens * run.shape.q_heads * dims * seen
        # Rows of a tile choose different chunks: between one row's and everybody's.
        union = min(middle, seen * 4) if isinstance(run.selection, TopK) else seen
        moved += forwards * union * run.kv.token_bytes / run.shape.layers
    rate = run.machine.bandwidth * run.machine.attention_share
    terms = [
        *(Term(term.name, term.seconds * forwards, term.bytes * forwards) for term in per_forward),
        Term("attention", max(flops / run.machine.attention_flops, moved / rate), moved),
        _scan(run, int(middle), tokens, forwards),
        *(
            Term(term.name, term.seconds * forwards, term.bytes * forwards)
            for term in _paging(run, int(middle), 1)
        ),
        Term(
            "seal",
            SEAL_COPIES * tokens * run.kv.token_bytes / run.machine.copy,
            SEAL_COPIES * tokens * run.kv.token_bytes,
        ),
    ]
    return Cost(tuple(_with_overheads(run, terms, forwards=forwards)))


def save(run: Run, tokens: int, *, known_tokens: int = 0) -> Cost:
    """A lasting snapshot; of a store that has the first `known_tokens`, what is new to it."""
    written = snapshot_bytes(run.kv, tokens) - snapshot_bytes(run.kv, known_tokens)
    machine = run.machine
    out = written / machine.link if machine.on_gpu and not run.host_chunks else 0.0
    return Cost(
        (
            Term("sync", 2 * machine.sync_seconds),
            Term("disk", written / min(machine.disk_write, machine.copy), written),
            Term("link", out, written if out else 0.0),
        )
    )


def snapshot_bytes(kv: KvShape, tokens: int) -> float:
    """Of a file that holds everything: K/V, summaries, token ids, checksums."""
    chunks = tokens / kv.chunk_tokens
    checksums = 8 * kv.layers
    return chunks * (kv.chunk_bytes + kv.summary_bytes + checksums + 4 * kv.chunk_tokens + 64)


def restore(run: Run, tokens: int) -> Cost:
    """Opening a snapshot: token ids, checksums and records, no K/V."""
    chunks = run.kv.chunks(tokens)
    return Cost((Term("metadata", OPEN_SECONDS + chunks * OPEN_CHUNK_SECONDS),))


def chunks_needed(run: Run, tokens: int, rows: int = 1) -> float:
    """Chunks whose bytes a forward after a restore reads: what any row, layer and head selects."""
    chunks = tokens / run.kv.chunk_tokens
    if run.machine.on_gpu or isinstance(run.selection, Dense):
        return chunks  # on a GPU all must be in memory before a row chooses
    beside = attended_tokens(run, tokens) / run.kv.chunk_tokens
    if not isinstance(run.selection, TopK):
        return min(chunks, beside)
    # A row chooses much of what the row before it has chosen.
    choices = 1 + (1 - REUSE) * (min(rows, run.rows) - 1)
    selectors = run.shape.layers * run.shape.kv_heads * choices
    chosen = run.selection.chunks
    # Selectors that choose independently: the share of chunks that none of them takes.
    untouched = math.pow(1 - min(1.0, chosen / max(chunks, 1.0)), selectors)
    return min(chunks, beside - chosen + chunks * (1 - untouched))


def first_token(run: Run, tokens: int, new_tokens: int, *, cached: bool) -> Cost:
    """After a restart: restore, read what is needed, compute the new tokens of a prompt.

    cached: the file is in the page cache.
    """
    machine, kv = run.machine, run.kv
    needed = chunks_needed(run, tokens, new_tokens) * kv.chunk_bytes
    summaries = kv.chunks(tokens) * kv.summary_bytes
    rate = machine.cached_read if cached else machine.disk_read
    reading = Cost(
        (
            Term("read", needed / rate, needed),
            Term("summaries", summaries / rate, summaries),
            Term("memory", (needed + summaries) / machine.fresh, needed + summaries),
            Term("link", needed / machine.link if machine.on_gpu else 0.0, needed),
        )
    )
    computing = prefill(run, tokens, tokens + new_tokens)
    fixed = computing.of("framework") + computing.of("pager")
    first = Cost((Term("first use", (FIRST_USE - 1) * fixed),))
    return restore(run, tokens).plus(reading).plus(computing).plus(first)


def _ladder_rows(run: Run, tokens: int) -> int:
    """Rows of the forward that computes so many tokens: a power of two that holds them."""
    least = run.machine.rows_to_decode(run.shape.dtype, 1)
    return max(least, 1 << math.ceil(math.log2(tokens)))


def _model_terms(run: Run, rows: int, *, head_rows: int) -> list[Term]:
    """The model's products: reading weights as for one row, and what more rows cost beyond it."""
    shape = run.shape
    products = run.machine.products[shape.dtype]
    elements = shape.layer_parameters
    read = products.seconds(elements, 1) + products.seconds(shape.head_parameters, 1)
    whole = products.seconds(elements, rows) + products.seconds(shape.head_parameters, head_rows)
    terms = [
        Term(
            "weights",
            min(read, whole),
            (elements + shape.head_parameters) * shape.dtype_bytes,
        ),
        Term("arithmetic", max(0.0, whole - read)),
    ]
    # Norms, rotary embedding and activation, in norms.
    per_row = 2.5 * shape.hidden + 1.7 * (shape.q_heads + shape.kv_heads) * shape.k_dim
    per_row += 0.4 * shape.intermediate
    norms = rows * shape.layers * per_row
    terms.append(Term("elements", norms * run.machine.element_seconds))
    if shape.experts and not shape.gathers_experts:
        chosen = rows * shape.experts_per_token
        read = min(shape.experts, chosen)
        elements = read * shape.expert_layers * shape.expert_parameters
        terms.append(
            Term(
                "experts",
                products.seconds(elements, -(-chosen // read)),
                elements * shape.dtype_bytes,
            )
        )
    elif shape.experts:
        gathered = (
            rows * shape.experts_per_token * shape.expert_layers * shape.expert_parameters
        ) * (shape.dtype_bytes * GATHERED)
        terms.append(Term("experts", gathered / run.machine.bandwidth, gathered))
    return terms


def _attention_of_few(run: Run, context: int, sessions: int) -> tuple[float, float]:
    """Seconds and bytes of one row per session: reading K/V bounds it."""
    per_layer = run.kv.token_bytes / run.shape.layers
    moved = sessions * sum(
        attended_tokens(run, context, layer) * per_layer for layer in range(run.shape.layers)
    )
    return moved / (run.machine.bandwidth * run.machine.attention_share), moved


def _scan(run: Run, context: int, rows: int, scored: int) -> Term:
    """Summaries that selection scores for every row, and dense attention for one row each forward.

    scored: rows that the ledger wants scores of, one per sequence and forward.
    """
    if isinstance(run.selection, Window):
        return Term("scan", 0.0)
    tokens = float(context)
    if isinstance(run.selection, TopK):
        tokens = max(0.0, tokens - run.selection.recent - run.selection.sinks)
    else:
        rows = scored
    once = tokens / run.kv.chunk_tokens * run.kv.summary_bytes
    if run.machine.scan_ops is None:
        return Term("scan", rows * once / run.machine.scan, rows * once)
    shape = run.shape
    operations = 2.0 * rows * tokens * shape.layers * shape.q_heads * shape.k_dim
    read = scored * once
    return Term("scan", max(read / run.machine.scan, operations / run.machine.scan_ops), read)


def missed_tokens(run: Run, context: float, sessions: int = 1) -> float:
    """Tokens whose K/V a step reads outside the pool, per selector: the mean over sessions."""
    chunks = context / run.kv.chunk_tokens
    room = max(0.0, (run.pool_chunks - run.frontier()) / sessions)
    outside = max(0.0, chunks - room) / max(chunks, 1.0)
    if isinstance(run.selection, Dense):
        return outside * context
    if not isinstance(run.selection, TopK):
        return 0.0
    chosen = min(chunks, run.selection.chunks) * run.kv.chunk_tokens
    return outside * (1 - REUSE) * chosen


def _paging(run: Run, context: int, sessions: int) -> list[Term]:
    """Missed chunks: over the link from host memory, from disk what is not there either."""
    missed = missed_tokens(run, context, sessions) * sessions * run.kv.token_bytes
    if not missed:
        return []
    chunks = sessions * context / run.kv.chunk_tokens
    in_memory = run.host_chunks + (0 if run.machine.on_gpu else run.pool_chunks)
    from_disk = max(0.0, 1 - in_memory / max(chunks, 1.0)) if not run.machine.on_gpu else 0.0
    terms = []
    if run.machine.on_gpu:
        terms.append(Term("link", missed / run.machine.link, missed))
    if from_disk:
        # Residency moves whole chunks, of all layers and heads.
        whole = min(
            missed * (1 if isinstance(run.selection, Dense) else run.shape.layers),
            from_disk * chunks * run.kv.chunk_bytes,
        )
        terms.append(Term("disk", whole / run.machine.disk_read, whole))
    return terms


def _with_overheads(run: Run, terms: list[Term], forwards: int) -> list[Term]:
    machine, layers = run.machine, run.shape.layers
    launches = forwards * (machine.forward_seconds + layers * machine.layer_seconds)
    ours = forwards * (STEP_SECONDS + layers * CALL_SECONDS)
    if machine.on_gpu:  # the host launches while the device computes
        busy = sum(term.seconds for term in terms)
        launches = max(0.0, launches - busy)
    return [*terms, Term("framework", launches), Term("pager", ours)]
