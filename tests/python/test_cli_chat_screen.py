"""How answers appear: Markdown that grows block by block on a terminal, else plain text."""

from __future__ import annotations

import io

import pytest
from pseudo_terminal import plain
from rich.console import Console

from kvpager.cli.chat.screen import blocks, printable, showing, showing_markdown

ANSWER = """\
Three fruits:

- **apple**
- pear

| name | colour |
|------|--------|
| fig  | violet |

```python
for fruit in fruits:
    print(fruit)  # *not* emphasis
```

See [a page](https://example.org) <think>about it</think>.
"""


def written(pieces, *, height=24):
    """What a terminal of 60 columns gets for the pieces of an answer."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=60, height=height, highlight=False)
    with showing_markdown(console) as show:
        for piece in pieces:
            show(piece)
    return file.getvalue()


def screen(text):
    """The lines of a terminal after `text`: what a redrawing has erased is gone."""
    lines, at = [""], 0
    for part in text.replace("\x1b[1A", "\0UP\0").replace("\x1b[2K", "\0CLEAR\0").split("\0"):
        if part == "UP":
            at -= 1
        elif part == "CLEAR":
            lines[at] = ""
        else:
            for number, line in enumerate(plain(part).split("\n")):
                if number:
                    at += 1
                    lines.extend([""] * (at + 1 - len(lines)))
                lines[at] = line.rpartition("\r")[2] if "\r" in line else lines[at] + line
    return [line.rstrip() for line in lines]


def test_an_answer_that_came_in_pieces_looks_like_one_that_came_whole():
    whole = screen(written([ANSWER]))
    assert screen(written(ANSWER)) == whole
    assert screen(written(ANSWER, height=4)) == whole  # too few lines for a block
    shown = "\n".join(whole)
    assert "• apple" in " ".join(shown.split())
    assert "**" not in shown
    assert "print(fruit)  # *not* emphasis" in shown
    assert "a page (https://example.org) <think>about it</think>." in shown


def test_a_block_that_is_complete_is_not_drawn_again():
    paragraphs = "\n\n".join(f"Paragraph {number}." for number in range(30))
    text = plain(written([*paragraphs[:-1]]))
    assert text.count("Paragraph 1.") <= 3


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("One paragraph\nof two lines", ["One paragraph\nof two lines"]),
        ("One.\n\nTwo", ["One.\n\nTwo"]),  # not yet a line
        ("One.\n\nTwo\n", ["One.\n\n", "Two\n"]),
        ("- a\n- b\n\n- c\n", ["- a\n- b\n\n- c\n"]),  # one list
        ("Text\n#", ["Text\n#"]),  # perhaps no heading
        ("```\na\n\nb\n", ["```\na\n\nb\n"]),  # code that goes on
        ("```\na\n```\nText\n", ["```\na\n```\n", "Text\n"]),
    ],
)
def test_the_last_block_is_the_one_that_may_change(text, parts):
    assert blocks(text) == parts


def test_an_answer_cannot_move_the_cursor():
    assert printable("a\x1b[2Jb\x07\tc\n\x9b1A") == "a\ufffd[2Jb\ufffd\tc\n\ufffd1A"
    assert "\x1b[2J" not in written(["before \x1b[2J after"])


def test_where_stdout_is_no_terminal_an_answer_is_what_the_model_said(capsys):
    with showing() as show:
        for piece in ("**bold**", " \x1b[1m", "\nend"):
            show(piece)
    assert capsys.readouterr().out == "**bold** \x1b[1m\nend\n"
