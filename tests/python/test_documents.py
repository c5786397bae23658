"""What a machine can check of the documents: examples run, numbers and names exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_every_python_example_of_the_readme_runs(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLES[number], f"README example {number}", "exec"), {})


def test_the_readme_has_both_examples() -> None:
    assert len(EXAMPLES) == 2


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
