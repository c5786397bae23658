"""`kvpager generate` with a schema or a pattern."""

from __future__ import annotations

import json

import pytest

from kvpager.cli import main
from kvpager.needles import shipped_model_path


def generate(capsys, *arguments):
    model = ["--model", str(shipped_model_path("tiny-coder")), "--threads", "1", "--rows", "16"]
    code = main(["generate", *model, "--small-rows", "fixed", "-q", "--prompt", "x =", *arguments])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_text_is_json_of_the_schema_in_a_file(capsys, tmp_path):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps({"enum": ["left", "right"]}))
    code, out, _ = generate(capsys, "--json-schema", str(path), "--format", "json")
    assert code == 0
    assert json.loads(json.loads(out)["text"]) in ("left", "right")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--regex", "("], "--regex:"),
        (["--json-schema", "missing.json"], "--json-schema missing.json: No such file"),
        (["--json-schema", "a", "--regex", "b"], "not allowed with"),
    ],
)
def test_what_cannot_be_is_refused_by_option(capsys, arguments, says):
    code, _, err = generate(capsys, *arguments)
    assert code in (1, 2)
    assert says in err
