"""The question `exact_cost` in few lines."""

from __future__ import annotations

from kvpager_bench.report import Report


def exact_cost_table(report: Report) -> str:
    """Markdown: decode and prefill time as multiples of transformers', by subject, mode and M."""
    lines = []
    for subject in dict.fromkeys(str(row["subject"]) for row in report.rows):
        mine = [row for row in report.rows if row["subject"] == subject]
        counts = list(dict.fromkeys(int(report.number(row, "rows")) for row in mine))
        lines += [
            "",
            f"| {subject}: decode / prefill time, as multiples of transformers' | "
            + " | ".join(f"M = {count}" for count in counts)
            + " |",
            "|---" * (len(counts) + 1) + "|",
        ]
        for mode in dict.fromkeys(str(row["mode"]) for row in mine):
            cells = {
                int(
                    report.number(row, "rows")
                ): f"{report.number(row, 'decode_over_transformers'):.2f}"
                f" / {report.number(row, 'prefill_over_transformers'):.2f}"
                for row in mine
                if row["mode"] == mode
            }
            lines.append(f"| {mode} | " + " | ".join(cells.get(c, "-") for c in counts) + " |")
    return "\n".join(lines[1:])
