"""docs/quantisation.md: its table is made of docs/quantisation.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantisation_table.cases import CASES

DOCS = Path(__file__).parents[2] / "docs"
FILE = DOCS / "quantisation.json"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->"


def table(told: dict[str, Any]) -> str:
    """Its rows, in the order of the cases."""
    lines = [
        "| library | format | dtype | loaded with | verdict | the reason |",
        "|---|---|---|---|---|---|",
    ]
    for case in CASES:
        found = told["cases"].get(case.name)
        if found is None or found["verdict"] == "not installed":
            continue
        library = f"{case.library} {found['version']}".strip()
        dtype = str(case.dtype).removeprefix("torch.")
        why = found["reason"]
        cells = [library, case.format, dtype, f"`{case.loaded}`", found["verdict"], why]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def page(text: str, told: dict[str, Any]) -> str:
    """The page with its table made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(told)}\n{END}{after}"


def write_page(told: dict[str, Any]) -> None:
    """Makes the table of the page anew."""
    path = DOCS / "quantisation.md"
    path.write_text(page(path.read_text(encoding="utf-8"), told), encoding="utf-8")
