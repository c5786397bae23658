"""What a machine can check of the documents: examples run, numbers and names exist."""

from __future__ import annotations

import argparse
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
from kvpager._model.identity.fingerprint import RULES
from kvpager._model.seam.causal_lm import cache_argument
from kvpager._model.watch.looks import only_looks
from kvpager.cli.commands import command_parser
from kvpager.drafts import DraftModel
from kvpager.requests import AsyncScheduler, Scheduler
from kvpager.speculation import PromptLookup, Proposer
from kvpager.verify import RELATIONS
from kvpager_bench.report import Comparison, comparison_cells

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "model"), str(ROOT / "scripts")]
import text_models  # noqa: E402
from quantisation_table.cases import CASES  # noqa: E402
from quantisation_table.page import DOCS, FILE, page  # noqa: E402

from documents import (  # noqa: E402
    MODEL,
    RUNS,
    commands_of,
    for_release,
    pages_with_commands,
    python_of,
)

README = (ROOT / "README.md").read_text(encoding="utf-8")


def for_this_release(code: str) -> str:
    return for_release(code, str(cache_argument(text_models.model())))


@pytest.mark.parametrize("page", RUNS)
def test_the_examples_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = python_of(page, str(cache_argument(text_models.model())))
    assert code
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.AutoModelForCausalLM", Shipped(text_models.model))
    monkeypatch.setattr("transformers.AutoTokenizer", Shipped(text_models.byte_level))
    for part, made in (("model", text_models.model), ("tokenizer", text_models.byte_level)):
        load = Shipped(made).from_pretrained
        monkeypatch.setattr(f"kvpager._model.pretrained.load_{part}", load)
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


def test_the_page_for_cpp_programs_shows_the_example_that_is_built() -> None:
    shown = re.findall(
        r"```cpp\n(.*?)```", (ROOT / "docs/cpp.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert shown == [(ROOT / "examples/cpp/embed.cc").read_text(encoding="utf-8")]


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
        if not any(".chat(" in line for line in lines):
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
        code = textwrap.indent(for_this_release("".join(lines)), "    ")
        exec(f"async def example():\n{code}", names)
        asyncio.run(names["example"]())  # type: ignore[operator]


@pytest.mark.parametrize("page", pages_with_commands())
def test_a_page_names_commands_and_options_that_exist(page: Path) -> None:
    for line in (line for block in commands_of(page) for line in block):
        _, *words = line.split()
        if not line.startswith("kvpager ") or words[0] == "bench":
            continue  # `kvpager bench` is in a checkout alone
        options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", line.partition(" -- ")[0]))
        assert options <= options_of(command_parser(), words, several=" | " in line), line


def options_of(parser: argparse.ArgumentParser, words: list[str], *, several: bool) -> set[str]:
    """The options of the command that `words` begin with; `several`: of its siblings, too."""
    commands = next((one.choices for one in parser._actions if isinstance(one.choices, dict)), None)
    if commands is None:
        return {text for action in parser._actions for text in action.option_strings}
    word, *rest = words
    assert word in commands, f"there is no command {word!r}"
    is_verb = not any(isinstance(one.choices, dict) for one in commands[word]._actions)
    chosen = (
        commands.values() if several and is_verb and parser.prog != "kvpager" else [commands[word]]
    )
    return set().union(*(options_of(one, rest, several=several) for one in chosen))


class Shipped:
    """Loads a model of the tests, whatever is asked for."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def from_pretrained(self, name: str, *_: Any, **options: Any) -> Any:
        assert name == MODEL
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


def test_every_source_file_that_design_and_walks_name_exists() -> None:
    sources = [*(ROOT / "python").rglob("*.py"), *(ROOT / "csrc").rglob("*.cc")]
    paths = [f"/{path.relative_to(ROOT)}" for path in sources]
    for document in (ROOT / "DESIGN.md", ROOT / "docs" / "walks.md"):
        named = re.findall(r"(?<![\w*/])[\w/]+\.(?:py|cc)\b", document.read_text(encoding="utf-8"))
        assert named
        for name in named:
            assert any(path.endswith(f"/{name}") for path in paths), f"{document.name}: {name}"


def test_the_configuration_reference_is_current() -> None:
    script = ROOT / "scripts" / "generate_reference.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


class TestExactness:
    """docs/exactness.md"""

    PAGE = (ROOT / "docs" / "exactness.md").read_text(encoding="utf-8")

    @pytest.mark.parametrize("number", range(2))
    def test_its_examples_run(self, number, tmp_path, monkeypatch, capsys):
        examples = re.findall(r"```python\n(.*?)```", self.PAGE, flags=re.DOTALL)
        monkeypatch.chdir(tmp_path)
        exec(compile(examples[number], f"exactness example {number}", "exec"), {})
        assert capsys.readouterr().out
        assert len(examples) == 2

    def test_it_shows_and_explains_every_relation(self):
        shown, explained = self.PAGE.split("### How to read it")
        for relation in RELATIONS:
            assert f"\n {relation.name} " in shown, f"the table lacks {relation.name}"
            row = rf"^  \| [a-z, -]*\b{re.escape(relation.name)}\b"
            assert re.search(row, explained, flags=re.MULTILINE), relation.name

    def test_what_it_calls_waivable_is(self):
        waivable = {name for name, rule in RULES.items() if rule.waivable}
        assert {"threads", "torch_version", "transformers_version", "processor"} <= waivable
        assert {"matmul_precision", "mkl_cbwr", "rows"} <= waivable
        bound = {"weights", "chunk_tokens", "selection", "salt", "rope", "model_dtype"}
        assert bound <= RULES.keys() - waivable


def test_the_table_of_quantised_weights_is_the_one_that_its_script_has_found():
    told = json.loads(FILE.read_text(encoding="utf-8"))
    text = (DOCS / "quantisation.md").read_text(encoding="utf-8")
    assert page(text, told) == text
    cases = told["cases"]
    assert set(cases) <= {case.name for case in CASES}
    verdicts = {found["verdict"] for found in cases.values()}
    assert "refused" in verdicts
    assert verdicts <= {"taken", "refused", "not loaded", "not installed"}
    assert all(found["reason"] for found in cases.values() if found["verdict"] == "refused")
