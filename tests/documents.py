"""What the documents show: pages whose examples run, their Python and their commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
# Pages whose examples run as one program each, with a small model in the place of theirs.
# Those of docs/segments.md and companions.md have tests of their own.
RUNS = (
    "README.md",
    "docs/kv_formats.md",
    "docs/pager.md",
    "docs/transformers_cache.md",
    *(f"docs/tutorials/{name}.md" for name in ("first_conversation", "agent_loop", "documents")),
    *(
        f"docs/how_to/{name}.md"
        for name in (
            "changing_weights",
            "damaged_snapshot",
            "pool_and_selection",
            "serving",
            "speed_on_a_cpu",
            "train",
        )
    ),
)
MODEL = "Qwen/Qwen3-0.6B"  # the model that examples name
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SHELLS = ("", "bash", "sh", "console")


def python_of(page: str, cache_argument: str) -> str:
    """The Python of a page as one program.

    cache_argument: the name by which the installed transformers takes a cache.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    code = "\n".join(block for language, block in _BLOCK.findall(text) if language == "python")
    return for_release(code, cache_argument)


def for_release(code: str, cache_argument: str) -> str:
    """An example with the argument by which the installed transformers takes a cache."""
    return re.sub(r"\bcache=(?=cache\b|kvpager)", f"{cache_argument}=", code)


def commands_of(page: Path | str) -> list[list[str]]:
    """The lines of a page's shell blocks that are a command, block by block, in full."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for language, block in _BLOCK.findall(text):
        if language in _SHELLS:
            lines = block.replace("\\\n", " ").splitlines()
            lines = [re.sub(r"\s+#\s.*", "", line).strip() for line in lines]
            lines = [line.removeprefix("$ ") for line in lines]
            commands = [line for line in lines if re.match(r"kvpager [a-z]|curl |pip ", line)]
            found += [commands] if commands else []
    return found


def pages_with_commands() -> list[object]:
    """Each page that shows a command, for `parametrize`."""
    return [
        pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if commands_of(page)
    ]
