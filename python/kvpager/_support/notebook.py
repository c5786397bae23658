"""What objects show of themselves in a notebook: HTML without scripts, and whose kernel runs."""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable, Sequence

_CELL = "text-align:left;vertical-align:top;white-space:pre-wrap;padding:1px 12px 1px 0"


def card(title: str, facts: Iterable[tuple[str, object]], *parts: str) -> str:
    """A title above a table of names and values, and parts that are HTML already below it."""
    rows = "".join(
        f'<tr><th style="{_CELL};font-weight:normal;opacity:.65">{html.escape(name)}</th>'
        f'<td style="{_CELL}">{html.escape(str(value))}</td></tr>'
        for name, value in facts
    )
    table = f"<table>{rows}</table>" if rows else ""
    return f"<div><strong>{html.escape(title)}</strong>{table}{''.join(parts)}</div>"


def strip(cells: Sequence[tuple[str, str]], colours: dict[str, str], *, most: int) -> str:
    """Coloured cells in rows, and a legend with the number of each kind.

    Args:
        cells: (kind, what the cell says under the mouse) of each.
        colours: of the kinds, which the legend has in this order.
        most: cells that are drawn; the legend counts all.
    """
    drawn = "".join(
        f'<span title="{html.escape(told, quote=True)}" style="display:inline-block;width:9px;'
        f'height:14px;margin:0 1px 1px 0;background:{colours[kind]}"></span>'
        for kind, told in cells[:most]
    )
    counts = {kind: sum(kind == one for one, _ in cells) for kind in colours}
    legend = " &nbsp; ".join(
        f'<span style="color:{colours[kind]}">&#9632;</span> {html.escape(kind)}: {count:,}'
        for kind, count in counts.items()
        if count
    )
    more = f" &nbsp; (the first {most:,} are drawn)" if len(cells) > most else ""
    return f'<div style="line-height:15px">{drawn}</div><small>{legend}{more}</small>'


def in_notebook() -> bool:
    """Whether a notebook's kernel runs this code, rather than a program or a terminal."""
    shell = sys.modules.get("IPython")
    running = shell and shell.get_ipython()
    return running is not None and hasattr(running, "kernel")
