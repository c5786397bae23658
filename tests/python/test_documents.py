"""What a machine can check of the documents: examples run, numbers and names exist."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from doctest import DocTestParser
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpager
from kvpager import DirectoryStore, Engine
from kvpager.drafts import DraftModel
from kvpager.hf import only_looks
from kvpager.requests import AsyncScheduler, Scheduler
from kvpager.speculation import PromptLookup, Proposer
from kvpager_bench.report import Comparison, comparison_cells

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "model"))
import text_models  # noqa: E402

README = (ROOT / "README.md").read_text(encoding="utf-8")
# Pages whose examples run as one program each, with a small model in the place of theirs.
# Those of docs/segments.md, companions.md and exactness.md have tests of their own.
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
        )
    ),
)


def examples(page: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    return "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))


@pytest.mark.parametrize("page", RUNS)
def test_the_examples_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = examples(page)
    assert code
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.AutoModelForCausalLM", Shipped(text_models.model))
    monkeypatch.setattr("transformers.AutoTokenizer", Shipped(text_models.byte_level))
    names = {
        "model": copy.deepcopy(text_models.model()),  # one page changes its weights
        "tokenizer": text_models.byte_level(),
        "prompt": "A cache keeps",
        "longer": "A cache keeps keys and values",
        "kvpager": kvpager,
        "torch": torch,
    }
    for _ in range(2):  # again, with what the first run has saved
        exec(compile(code, page, "exec"), dict(names))


# Docstrings whose examples run, each with a session of its own.
SAYS = (
    Engine,
    Engine.assemble,
    Engine.serve,
    Scheduler,
    AsyncScheduler,
    DirectoryStore,
    DraftModel,
    Proposer,
    PromptLookup,
    only_looks,
    kvpager.Cache,
)


@pytest.mark.parametrize("documented", SAYS, ids=lambda one: one.__qualname__)
def test_the_example_of_a_docstring_runs(
    documented: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [each.source for each in DocTestParser().get_examples(documented.__doc__)]
    assert lines
    monkeypatch.chdir(tmp_path)
    model, ids = text_models.model(), list(range(3, 40))
    with Engine(model, tokenizer=text_models.byte_level(), pool_tokens=2048) as engine:
        session = engine.session()
        session.prefill(ids)
        names = {
            "engine": engine,
            "model": model,
            "small_model": model,
            "module": model.model,
            "session": session,
            "ids": torch.tensor([ids]),
            "prompts": [ids, ids[:9]],
            "ids_a": ids[:8],
            "ids_b": ids[8:],
            "system": ids[:5],
            "question": ids[-5:],
            "Engine": Engine,
            "DirectoryStore": DirectoryStore,
            "DraftModel": DraftModel,
            "PagerConfig": kvpager.PagerConfig,
            "TopK": kvpager.TopK,
            "kvpager": kvpager,
            "PromptLookup": PromptLookup,
            "collect": lambda *_: None,
        }
        code = textwrap.indent("".join(lines), "    ")
        exec(f"async def example():\n{code}", names)
        asyncio.run(names["example"]())  # type: ignore[operator]


class Shipped:
    """Loads a model of the tests, whatever is asked for."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def from_pretrained(self, name: str, **options: Any) -> Any:
        assert name == "Qwen/Qwen3-0.6B"
        return self._make()


def test_the_readme_is_one_screen_with_limitations() -> None:
    assert len(README.encode()) <= 8192
    assert "## Limitations" in README
    assert "make demo" in README[:2000]
    assert "make test" in README[:2000]


def test_the_figures_of_the_readme_are_those_that_were_measured() -> None:
    table = README.split("## Results")[1].split("\n\n")[2]
    rows = [[cell.strip() for cell in row.split("|")[2:5]] for row in table.splitlines()[2:]]
    measured = {
        tuple(comparison_cells(comparison)[place] for place in (1, 3, 4))
        for path in (ROOT / "bench" / "results").glob("*.json")
        for comparison in json.loads(path.read_text(encoding="utf-8")).get("comparisons", [])
        for comparison in [Comparison(**comparison)]
    }
    assert len(rows) == 5
    for row in rows:
        cells = tuple(cell.partition(":")[0].replace(",", "") for cell in row)
        assert cells in measured


def test_check_invariants_cites_only_numbers_that_design_defines() -> None:
    design = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
    section = design.split("## Invariants")[1].split("\n## ")[0]
    defined = {int(n) for n in re.findall(r"^(\d+)\. ", section, flags=re.MULTILINE)}
    sources = [
        (ROOT / "csrc/pager" / name).read_text() for name in ("check.cc", "device_backend.cc")
    ]
    check = re.compile(r"require\(.*?,\s*(\d+),\s", flags=re.DOTALL)
    cited = {int(n) for source in sources for n in check.findall(source)}
    assert defined == set(range(1, 20))
    assert cited
    assert cited <= defined


def test_every_file_the_documents_link_to_exists() -> None:
    for document in [ROOT / "README.md", ROOT / "DESIGN.md", *ROOT.glob("docs/**/*.md")]:
        text = document.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
            if not re.match(r"[a-z]+:", target):
                assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_configuration_reference_is_current() -> None:
    script = ROOT / "scripts" / "generate_reference.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
