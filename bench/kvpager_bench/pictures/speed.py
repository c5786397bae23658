"""Pictures of time: a turn's cost, decoding, many sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvpager_bench.peers.recipes import PEERS
from kvpager_bench.report import Cell, Report, significant, tokens_name

Rows = Sequence[Mapping[str, Cell]]
# Of a line: its label, the report's column, and how many of the column's units a plotted one has.
Line = tuple[str, str, float]

TURN_LINES: tuple[Line, ...] = (
    ("kvpager, restored", "first_token_ms", 1e3),
    ("llama.cpp, prefill", "llama_cold_s", 1.0),
    ("transformers, prefill", "transformers_cold_s", 1.0),
    ("kvpager, prefill", "cold_s", 1.0),
    ("transformers, safetensors", "safetensors_ms", 1e3),
    ("llama.cpp, state restored", "llama_ms", 1e3),
)
DECODE_LINES: tuple[Line, ...] = (
    ("kvpager, 4K tokens selected", "tokens_per_s", 1.0),
    ("transformers, full attention", "transformers_tokens_per_s", 1.0),
    ("llama.cpp, full attention", "llama_tokens_per_s", 1.0),
    ("kvpager, full attention", "dense_tokens_per_s", 1.0),
)
PACKING_LINES: tuple[Line, ...] = (
    ("kvpager, together", "tokens_per_s", 1.0),
    ("transformers, padded batch", "transformers_batch_tokens_per_s", 1.0),
    ("kvpager, one by one", "one_by_one_tokens_per_s", 1.0),
)
# Of a pager and a store without a model, which would add the same to a turn at each context.
LONG_LINES: tuple[Line, ...] = (
    ("first forward after a restore", "first_ms", 1.0),
    ("save of 64 new tokens", "save_ms", 1.0),
    ("a row that selects 4K tokens", "decode_ms", 1.0),
    ("search of a saved prefix", "find_ms", 1.0),
    ("restore", "restore_ms", 1.0),
    ("64 tokens appended", "append_ms", 1.0),
    ("fork", "fork_ms", 1.0),
)
REWARD_LINES: tuple[Line, ...] = (
    ("kvpager as trainer", "kvpager", 1.0),
    ("transformers as trainer", "transformers", 1.0),
)
MIXED = "mixed"


def seconds(value: float) -> str:
    """31 ms, 7.5 s."""
    return f"{significant(value * 1e3, 2)} ms" if value < 1 else f"{significant(value, 2)} s"


def turn_rows(report: Report) -> Rows:
    """Of the shape with the most contexts, with the file read from disk where that was measured."""
    dropped = [row for row in report.rows if row.get("file") == "dropped"] or report.rows
    shapes: dict[Cell, list[Mapping[str, Cell]]] = {}
    for row in dropped:
        shapes.setdefault(row["shape"], []).append(row)
    chosen = max(shapes.values(), key=lambda rows: len({row["context"] for row in rows}))
    return sorted(chosen, key=lambda row: report.number(row, "context"))


def turn_title(report: Report) -> str:
    last = turn_rows(report)[-1]
    warm, cold = (report.number(last, name) for name in ("first_token_ms", "transformers_cold_s"))
    tokens = tokens_name(int(report.number(last, "context")))
    return (
        f"A saved conversation of {tokens} tokens goes on after {seconds(warm / 1e3)},\n"
        f"restored from disk; to prefill it again takes transformers {seconds(cold)}"
    )


def draw_turn(report: Report) -> Any:
    label = "time to the first token [s]"
    return _by_context(report, turn_title(report), turn_rows(report), label, TURN_LINES, seconds)


def long_title(report: Report) -> str:
    first, last = report.rows[0], report.rows[-1]
    least, most = (tokens_name(int(report.number(row, "context"))) for row in (first, last))
    near, far = (
        [seconds(report.number(row, name) / 1e3) for name in ("first_ms", "save_ms")]
        for row in (first, last)
    )
    return (
        f"Behind {most} tokens the first forward after a restore takes {far[0]},\n"
        f"a save of 64 new tokens {far[1]}; behind {least} {near[0]} and {near[1]}"
    )


def draw_long(report: Report) -> Any:
    label = "time [ms]"
    title, rows = long_title(report), report.rows
    return _by_context(report, title, rows, label, LONG_LINES, lambda v: seconds(v / 1e3))


def _by_context(
    report: Report, title: str, rows: Rows, label: str, lines: Sequence[Line], spelled: Any
) -> Any:
    from kvpager_bench.pictures.canvas import against_context, blank

    figure, axis = blank(title)
    against_context(axis, sorted({report.number(row, "context") for row in rows}), label)
    _lines(axis, report, rows, lines, "context", spelled)
    return figure


def decode_rows(report: Report) -> Rows:
    """Of the last shape, the one that is most like a model in use."""
    shape = report.rows[-1]["shape"]
    rows = [row for row in report.rows if row["shape"] == shape]
    return sorted(rows, key=lambda row: report.number(row, "context"))


def decode_title(report: Report) -> str:
    last = decode_rows(report)[-1]
    ours, full, theirs = (
        significant(report.number(last, name), 2)
        for name in ("tokens_per_s", "dense_tokens_per_s", "transformers_tokens_per_s")
    )
    return (
        f"At {tokens_name(int(report.number(last, 'context')))} tokens of context kvpager decodes "
        f"{ours} tokens/s with 4K selected,\n{full} with full attention; transformers {theirs}"
    )


def draw_decode(report: Report) -> Any:
    label = "decode speed [tokens/s], one session"
    title, rows = decode_title(report), decode_rows(report)
    return _by_context(report, title, rows, label, DECODE_LINES, lambda v: significant(v, 2))


def packing_rows(report: Report) -> Rows:
    """Of prompts of mixed lengths."""
    rows = [row for row in report.rows if row["prompts"] == MIXED] or report.rows
    return sorted(rows, key=lambda row: report.number(row, "sessions"))


def rewards_title(report: Report) -> str:
    last = report.rows[-1]
    ours, theirs = (f"{report.number(last, name):.2f}" for name in ("kvpager", "transformers"))
    return (
        f"After {report.number(last, 'step'):g} steps of GRPO the mean reward is {ours} with the "
        f"rollout's bits,\n{theirs} with transformers' forward as trainer"
    )


def draw_rewards(report: Report) -> Any:
    from kvpager_bench.pictures.canvas import blank

    figure, axis = blank(rewards_title(report))
    axis.set_xlabel("step")
    axis.set_ylabel("mean reward")
    axis.grid(alpha=0.25)
    _lines(axis, report, report.rows, REWARD_LINES, "step", lambda value: f"{value:.2f}")
    return figure


def packing_title(report: Report) -> str:
    last = packing_rows(report)[-1]
    together, alone = (
        report.number(last, name) for name in ("tokens_per_s", "one_by_one_tokens_per_s")
    )
    return (
        f"{report.number(last, 'sessions'):g} sessions together make {together:.0f} tokens/s,\n"
        f"{significant(together / alone, 2)} times what they make one by one"
    )


def draw_packing(report: Report) -> Any:
    from kvpager_bench.pictures.canvas import blank

    figure, axis = blank(packing_title(report))
    rows = packing_rows(report)
    counts = [report.number(row, "sessions") for row in rows]
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [f"{count:g}" for count in counts])
    axis.minorticks_off()
    most = max(report.number(row, column) for row in rows for _, column, _ in PACKING_LINES)
    axis.set_ylim(0, 1.1 * most)
    axis.set_xlabel("sessions")
    axis.set_ylabel("generated tokens/s, all sessions")
    axis.grid(alpha=0.25)
    _lines(axis, report, rows, PACKING_LINES, "sessions", lambda value: f"{value:.0f}")
    return figure


def _lines(
    axis: Any, report: Report, rows: Rows, lines: Sequence[Line], x: str, spelled: Any
) -> None:
    """The columns that the report has, the first one bold; each with its label and last value."""
    from kvpager_bench.pictures.canvas import OTHERS, OURS, label_ends

    ends = []
    others = iter(OTHERS)
    for label, column, per_unit in lines:
        first = column == lines[0][1]
        colour = OURS if first else next(others)
        points = [
            (report.number(row, x), report.number(row, column) / per_unit)
            for row in rows
            if isinstance(row.get(column), (int, float))
        ]
        if not points:
            continue
        shown = label.replace("transformers", f"transformers {report.environment['transformers']}")
        shown = shown.replace("llama.cpp", PEERS["llama"].title)
        axis.plot(
            *zip(*points),
            marker="o",
            color=colour,
            linewidth=3 if first else 1.6,
            linestyle="-" if first or "kvpager" not in label else "--",
            zorder=3 if first else 2,
        )
        ends.append((f"{shown}: {spelled(points[-1][1])}", *points[-1], colour))
    label_ends(axis, ends)


MODEL_NAMES = {"bf16": "bfloat16", "fp32": "float32"}
READING = "reading the weights"


def model_rates(report: Report, dtype: str) -> dict[str, float]:
    """Tokens per second by who decodes, of one dtype, and by reading the weights."""
    of_dtype = [each for each in report.comparisons if each.figure == f"decode, {dtype}"]
    rates = {each.peer.replace(", ", ",\n"): each.theirs for each in of_dtype}
    return {**rates, "kvpager": of_dtype[0].ours}


def model_title(report: Report) -> str:
    ours = "bf16", "engine, kvpager's products"
    row = next(row for row in report.rows if (row["dtype"], row["subject"]) == ours)
    times = significant(report.number(row, "over_transformers"), 2)
    share = significant(report.number(row, "of_reading"), 2)
    return (
        f"One exact session decodes {times} times as fast as transformers in bfloat16,\n"
        f"at {share} of what reading the weights once would allow"
    )


def draw_model(report: Report) -> Any:
    from kvpager_bench.pictures import canvas

    dtypes = [dtype for dtype in MODEL_NAMES if any(row["dtype"] == dtype for row in report.rows)]
    figure, axes = canvas.blank(model_title(report), panels=len(dtypes))
    for axis, dtype in zip([axes] if len(dtypes) == 1 else axes, dtypes):
        rates = model_rates(report, dtype)
        limit = rates.pop(READING)
        names = sorted(rates, key=lambda name: rates[name])
        colours = [canvas.OURS if name == "kvpager" else canvas.OTHERS[3] for name in names]
        bars = axis.barh(names, [rates[name] for name in names], color=colours)
        axis.bar_label(bars, fmt="%.3g", padding=-27, color="white", fontsize=9)
        axis.axvline(limit, color=canvas.OTHERS[0], linestyle="--")
        axis.set_xlim(0, 1.45 * max(limit, *rates.values()))
        axis.annotate(
            "the weights\nread once",
            (limit, -0.3),
            xytext=(5, 0),
            textcoords="offset points",
            color=canvas.OTHERS[0],
            fontsize=9.5,
        )
        axis.set_title(MODEL_NAMES[dtype], loc="left", fontsize=10)
        axis.set_xlabel("tokens per second")
    return figure
