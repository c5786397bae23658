"""What docs/exactness.md shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvpager.fingerprint import RULES
from kvpager.verify import RELATIONS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "exactness.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize("number", range(2))
def test_its_examples_run(number, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLES[number], f"exactness example {number}", "exec"), {})
    assert capsys.readouterr().out
    assert len(EXAMPLES) == 2


def test_it_shows_and_explains_every_relation():
    shown, explained = PAGE.split("### How to read it")
    for relation in RELATIONS:
        assert f"\n {relation.name} " in shown, f"the table lacks {relation.name}"
        row = rf"^  \| [a-z, -]*\b{re.escape(relation.name)}\b"
        assert re.search(row, explained, flags=re.MULTILINE), f"nothing explains {relation.name}"


def test_what_it_calls_waivable_is():
    assert {"threads", "torch_version", "transformers_version", "processor"} <= {
        name for name, rule in RULES.items() if rule.waivable
    }
    for name in ("matmul_precision", "mkl_cbwr", "rows"):
        assert RULES[name].waivable
    for name in ("weights", "chunk_tokens", "selection", "salt", "rope", "model_dtype"):
        assert not RULES[name].waivable
