"""`kvpager snapshot inspect`: what a snapshot's verified metadata say."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpager import _core
from kvpager._support.words import byte_size, counted
from kvpager.cli.options import SNAPSHOT, require_extra
from kvpager.cli.output import emit_result, write_file
from kvpager.cli.parser import Commands, option
from kvpager.cli.snapshot.address import PACKS, find_snapshot
from kvpager.cli.snapshot.opened import (
    MANIFEST,
    SOUND,
    WAIVABLE,
    Opened,
    companions_of,
    fingerprint_rules,
)
from kvpager.cli.snapshot.words import session_facts
from kvpager.cli.terminal import Look

if TYPE_CHECKING:
    from kvpager.cli.pictures import ChunkTable

_FIELD = 22  # columns of an indented name


def add(verbs: Commands) -> None:
    """Adds the verb."""
    parser = verbs.add(
        "inspect",
        run,
        "kind, sizes, layout, fingerprint, ledger and a picture of the chunks",
        "Tells what a snapshot's metadata say. They are verified; K/V are not read, so that it "
        "costs the same for any size (`verify` reads everything).",
    )
    option(parser, "snapshot SNAPSHOT", SNAPSHOT)
    about = "draw scores and last uses as a PNG too (takes the extra kvpager[plots])"
    option(parser, "--plot FILE", about)


def run(args: argparse.Namespace) -> int:
    """Runs the verb."""
    from kvpager.cli.pictures import chunk_table, draw_strip_png

    if args.plot is not None:
        require_extra(f"--plot {args.plot}", "plots", ("matplotlib",))
    opened = Opened.at(find_snapshot(args.snapshot))
    table = chunk_table(opened.reader)
    values = describe(opened, table) | {"plot": args.plot}
    if args.plot is not None:
        title = f"{args.snapshot}: {values['tokens']:,} tokens"
        write_file(Path(args.plot), draw_strip_png(table, title))
    emit_result(args, values, lambda shown: _lines(shown, values, table))
    return 0


def describe(opened: Opened, table: ChunkTable) -> dict[str, Any]:
    """All of it, JSON-able."""
    reader, layout = opened.reader, opened.reader.layout
    sealed = reader.sealed_chunks
    packs = _packs(opened)
    per_chunk = layout.chunk_bytes + opened.summary_bytes
    return {
        "command": "snapshot inspect",
        "path": reader.path,
        "store": None if opened.address.store is None else str(opened.address.store),
        "name": opened.address.name,
        "kind": opened.kind,
        "format": ".".join(map(str, _core.SNAPSHOT_VERSION)),
        "file_bytes": reader.file_bytes,
        "shared_bytes": sealed * per_chunk if packs else 0,
        "tokens": len(reader.tokens),
        "chunks": reader.chunks,
        "sealed_chunks": sealed,
        "tail_tokens": reader.tail_tokens,
        "layout": {
            **opened.layout.to_json(),
            "chunk_bytes": layout.chunk_bytes,
            "slice_bytes": layout.largest_slice_bytes,
        },
        "scorer": reader.scorer,
        "summary_bytes": sealed * opened.summary_bytes,
        "logical_digest": reader.logical_digest,
        "companions": [
            {
                "kind": companion.kind,
                "path": str(companion.address.path),
                "state": companion.state,
                "sound": companion.state == SOUND,
                "tokens": None if found is None else len(found.reader.tokens),
                "file_bytes": None if found is None else found.reader.file_bytes,
            }
            for companion in companions_of(opened)
            for found in [companion.opened]
        ],
        "session": dict(opened.session),
        "fingerprint": dict(opened.fingerprint),
        "fingerprint_rules": fingerprint_rules(opened.fingerprint),
        "ledger": _ledger(reader.provenance, table),
        "packs": packs,
    }


def _packs(opened: Opened) -> list[dict[str, Any]]:
    """Of a manifest: its packs, with what it uses of each."""
    reader = opened.reader
    folder = opened.address.path.parent.parent / PACKS
    used = Counter(np.asarray(reader.places)[:, 0].tolist()) if reader.packs else Counter()
    result = []
    for number, (name, chunks) in enumerate(reader.packs):
        path = folder / f"{name}.kvsnap"
        size = path.stat().st_size if path.exists() else None
        result.append({"id": name, "chunks": chunks, "used": used[number], "file_bytes": size})
    return result


def _ledger(provenance: list[str], table: ChunkTable) -> dict[str, Any]:
    """Provenance counts, and how scores and ages are spread; None where none were saved."""
    scores, ages = table.scores, table.ages
    score = age = None
    if len(scores):
        score = {
            "least": float(scores.min()),
            "median": float(np.median(scores)),
            "p90": float(np.quantile(scores, 0.9)),
            "most": float(scores.max()),
            "most_at_chunk": int(scores.argmax()),
        }
    if len(ages):
        age = {"least": int(ages.min()), "median": float(np.median(ages)), "most": int(ages.max())}
    return {"provenance": dict(Counter(provenance)), "score": score, "forwards_since_use": age}


def _lines(shown: Look, values: dict[str, Any], table: ChunkTable) -> Iterator[str]:
    from kvpager.cli.pictures import draw_strip

    yield from shown.fields(_facts(values), 12)
    if values["packs"]:
        yield "packs"
    for pack in values["packs"]:
        size = "missing" if pack["file_bytes"] is None else byte_size(pack["file_bytes"])
        yield f"  {pack['id']}  {pack['used']:,} of {counted(pack['chunks'], 'chunk')}, {size}"
    yield "session"
    yield from shown.fields(session_facts(values["session"]), _FIELD, "  ")
    yield "fingerprint (where another value is refused; * where that may be waived)"
    for name, value in sorted(values["fingerprint"].items()):
        mark = " *" if values["fingerprint_rules"][name] == WAIVABLE else "  "
        yield from shown.fields([(name, value)], _FIELD, mark)
    yield "ledger"
    yield from shown.fields(_ledger_facts(**values["ledger"]), _FIELD, "  ")
    yield ""
    yield draw_strip(table, shown.width, colour=shown.colour, unicode=shown.unicode)


def _facts(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    layout = values["layout"]
    yield "file", f"{values['path']} ({values['file_bytes']:,} bytes)"
    yield "kind", f"{values['kind']}, format {values['format']}"
    if values["kind"] == MANIFEST:
        packs = counted(len(values["packs"]), "pack")
        yield "shared", f"{byte_size(values['shared_bytes'])} of sealed chunks, in {packs}"
    yield "tokens", f"{values['tokens']:,}"
    tail = f", and a tail of {values['tail_tokens']}" if values["tail_tokens"] else ""
    size = f"{layout['chunk_tokens']} tokens and {layout['chunk_bytes']:,} bytes"
    yield "chunks", f"{values['sealed_chunks']:,} sealed of {size}{tail}"
    yield (
        "layout",
        f"{layout['layers']} layers x {layout['kv_heads']} kv heads, head_dim {layout['k_dim']} "
        f"({layout['k_dtype']}) and {layout['v_dim']} ({layout['v_dtype']})",
    )
    rotated = [name for name in ("keys", "values") if layout.get(f"{name[0]}_rotated")]
    if rotated:
        yield "rotated", " and ".join(rotated)
    if layout.get("float_layers"):
        layers = ", ".join(map(str, layout["float_layers"]))
        yield "float layers", f"{layers} ({layout['float_dtype']})"
    yield "scorer", f"{values['scorer']} ({byte_size(values['summary_bytes'])} of summaries)"
    yield "digest", values["logical_digest"]
    for companion in values["companions"]:
        told = companion["state"]
        if companion["tokens"] is not None:
            told = f"{companion['tokens']:,} tokens, {byte_size(companion['file_bytes'])}, {told}"
        yield companion["kind"], f"{companion['path']}: {told}"
    if values["plot"]:
        yield "picture", values["plot"]


def _ledger_facts(
    provenance: dict[str, int],
    score: dict[str, Any] | None,
    forwards_since_use: dict[str, Any] | None,
) -> Iterator[tuple[str, str]]:
    counts = [f"{count:,} {name}" for name, count in provenance.items()]
    yield "provenance", ", ".join(counts) or "none"
    if score is not None:
        yield (
            "score",
            f"least {score['least']:.2g}, median {score['median']:.2g}, 90% below "
            f"{score['p90']:.2g}, most {score['most']:.2g} (chunk {score['most_at_chunk']:,})",
        )
    if forwards_since_use is not None:
        least, median, most = forwards_since_use.values()
        told = f"least {least:,}, median {median:,.0f}, most {most:,} forwards before the save"
        yield "last use", told
