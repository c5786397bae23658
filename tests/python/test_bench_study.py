"""A question from its declaration to a table: options, tables, workers, files, errors."""

from __future__ import annotations

import importlib
import json
import sys

import pytest
import torch

from kvpager_bench import harness, tables
from kvpager_bench.harness import Column, MissingNumberError
from kvpager_bench.question import PACKAGE, QUESTIONS
from kvpager_bench.report import load_report
from kvpager_bench.study import Asked, Option, Study, Table


def measure(asked: Asked) -> None:
    """Times nothing; what it was asked for is in its rows."""
    for context in asked.options.contexts:
        asked.report().add(context=context, ms=asked.options.factor * context)
        asked.report().compare(f"at {context}", 2.0, 4.0, "a peer", "ms", 1.5, lower_is_better=True)
    if asked.options.also == "more":
        asked.report("more").add(what=asked.work("say", word="hello")["said"])


STUDY = Study(
    measure,
    (
        Table("sample", "A sample at {factor}", (Column("context", "tokens"), Column("ms", "ms"))),
        Table("more", "More of it", (Column("what", text=True),)),
    ),
    (
        Option("contexts", [8, 16], quick=[4], full=[8, 16, 32], help="tokens"),
        Option("factor", 0.5),
        Option("also", "none", among=("none", "more")),
        Option("kinds", ["a", "b"], among=("a", "b")),
    ),
    {"chunk_tokens": 64},
    {"say": lambda task: {"said": task["word"]}},
)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """The folder of results; workers run in this process."""
    monkeypatch.setenv("KVPAGER_BENCH_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("KVPAGER_BENCH_PEERS", str(tmp_path / "no-peers"))
    return tmp_path / "results"


def ask(study, monkeypatch, *words):
    monkeypatch.setattr(harness, "run_worker", lambda _, task: study.workers[task["what"]](task))
    return study.ask(["--threads", str(torch.get_num_threads()), *words])


@pytest.mark.parametrize(
    ("words", "contexts", "name"),
    [
        ([], [8, 16], "sample"),
        (["--quick"], [4], "sample-quick"),
        (["--full"], [8, 16, 32], "sample-full"),
        (["--quick", "--contexts", "2, 3"], [2, 3], "sample-quick"),
    ],
)
def test_an_option_has_a_value_by_size_unless_it_is_given(
    results, monkeypatch, words, contexts, name
):
    asked = ask(STUDY, monkeypatch, *words)
    report = load_report(results / f"{name}.json")
    assert [row["context"] for row in report.rows] == contexts
    assert report.question == "A sample at 0.5"
    assert report.settings == {
        "contexts": contexts, "factor": 0.5, "also": "none", "kinds": ["a", "b"],
        "chunk_tokens": 64,
    }  # fmt: skip
    assert [c.ratio for c in report.comparisons] == [2.0] * len(contexts)
    assert list(asked.reports) == ["sample"]
    assert [path.name for path in results.iterdir()] == [f"{name}.json"]


def test_rows_are_told_as_they_come_and_a_worker_answers(results, monkeypatch, capsys):
    ask(STUDY, monkeypatch, "--also", "more")
    out = capsys.readouterr().out
    assert out.startswith("sample: context 8, ms 4.00\nsample: context 16, ms 8.00\nmore: what")
    assert load_report(results / "more.json").rows == [{"what": "hello"}]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--contexts", "many"], "--contexts"),
        (["--kinds", "a,c"], "'c' is unknown; expected some of a, b"),
        (["--also", "all"], "'all' is unknown; expected some of none, more"),
        (["--factor", "x"], "--factor"),
        (["--quick", "--full"], "not allowed with"),
    ],
)
def test_an_option_that_is_none_is_refused_by_name(results, monkeypatch, capsys, words, said):
    with pytest.raises(SystemExit):
        ask(STUDY, monkeypatch, *words)
    assert said in capsys.readouterr().err
    assert not results.exists()


def test_a_question_that_measures_nothing_is_an_error(results, monkeypatch):
    with pytest.raises(MissingNumberError, match="nothing was measured"):
        ask(STUDY, monkeypatch, "--contexts", "")


def test_a_worker_reads_its_task_and_prints_json(monkeypatch, capsys):
    task = {"what": "say", "word": "hello", "threads": torch.get_num_threads()}
    monkeypatch.setattr(sys, "argv", ["question", "--worker", json.dumps(task)])
    STUDY.main()
    assert json.loads(capsys.readouterr().out) == {"said": "hello"}
    assert STUDY.module == __name__


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=lambda question: question.name)
def test_every_question_has_the_reports_that_it_is_registered_with(question):
    module = importlib.import_module(f"{PACKAGE}.{question.name}")
    assert tuple(table.name for table in module.STUDY.tables) == question.reports
    assert f"kvpager bench {question.name}" in module.__doc__
    assert module.STUDY.module == f"{PACKAGE}.{question.name}"


# Questions that take seconds at their smallest, with options that make them so.
SMALLEST = {
    "decode": "--shapes shipped --contexts 1024 --steps 2",
    "exactness": "--rows 32 --prompts 2",
    "formats": "--formats native,q8 --lengths 512 --scored 64 --percents 100",
    "packing": "--kinds mixed --sessions 1,2",
    "profile": "--context 256 --runs 1 --steps 2",
    "quality": "--context 1024 --percents 50",
    "segments": "--lengths 1024 --runs 1",
    "snapshot": "--layouts shipped --contexts 1024,4096 --runs 1",
    "speculation": "--cases questions --contexts 512",
}


@pytest.fixture(scope="module")
def smallest(tmp_path_factory):
    """The reports of a question at its smallest, each asked once; and their folder."""
    folder = tmp_path_factory.mktemp("results")
    told = {}

    def run(name):
        study = importlib.import_module(f"{PACKAGE}.{name}").STUDY
        if name not in told:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("KVPAGER_BENCH_RESULTS", str(folder))
                patch.setenv("KVPAGER_BENCH_PEERS", str(folder / "no-peers"))
                ask(study, patch, "--quick", *SMALLEST[name].split())
            paths = {table.name: folder / f"{table.name}-quick.json" for table in study.tables}
            told[name] = {table: load_report(path) for table, path in paths.items()}
        return told[name]

    run.folder = folder
    return run


@pytest.mark.parametrize("name", SMALLEST)
def test_a_question_at_its_smallest_goes_from_its_declaration_to_a_table(name, smallest):
    reports = smallest(name)
    assert all(report.rows for report in reports.values())
    written = tables.write_all(smallest.folder, "-quick")
    assert {f"{report}-quick.csv" for report in reports} < {path.name for path in written.files}


def test_a_profile_has_all_of_a_forward_in_one_of_its_parts(smallest):
    report = smallest("profile")["profile"]
    parts = [column.name for column in report.columns if column.unit == "%"]
    for row in report.rows:
        assert sum(row[part] for part in parts) == pytest.approx(100)
        assert row["matmuls"] > 0 < row["attention"]


def test_questions_that_compare_bits_find_none_that_differ(smallest):
    exactness = smallest("exactness")["exactness"]
    assert exactness.verdicts[0].holds
    assert all(row["kv_bits_compared"] > 1e6 for row in exactness.rows[2:])
    for row in smallest("packing")["packing"].rows:
        assert row["differing_bits"] == 0 < row["bits_compared"]
    for row in smallest("speculation")["speculation"].rows:
        assert row["differing_bits"] == 0 < row["bits_compared"]


def test_a_restore_reads_less_than_it_may(smallest):
    reads = smallest("snapshot")["snapshot_read"]
    assert next(v for v in reads.verdicts if "read no more" in v.claim).holds
    for row in reads.rows:
        assert 0 < row["restore_reads_mib"] < row["first_forward_reads_mib"] <= row["bound_mib"]
