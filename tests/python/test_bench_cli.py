"""`kvpager bench`: what it refuses, lists and exits with."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from bench_reports import decode_report, make_report
from cli_snapshots import refused, told_json

from kvpager.cli import main
from kvpager_bench import suite
from kvpager_bench.peers import environments
from kvpager_bench.question import QUESTIONS


@pytest.fixture
def asked(monkeypatch):
    """The plans that were carried out; what comes of each question is given."""

    class Asked:
        def __init__(self):
            self.plans, self.failures, self.interrupted = [], {}, False
            self.report = decode_report()

        def ask_all(self, plan, watcher):
            self.plans.append(plan)
            summary = suite.Summary(plan, seconds=75.0, interrupted=self.interrupted)
            for number, question in enumerate(plan.questions):
                watcher.begins(number, question)
                watcher.goes_on(question, 1.0, "[red]a line[/]")
                failure = self.failures.get(question.name, "")
                reports = () if failure else (self.report,)
                outcome = suite.Outcome(question, 2.0, plan.log(question), reports, failure)
                summary.outcomes.append(outcome)
                watcher.ends(outcome)
            return summary

    asked = Asked()
    monkeypatch.setattr(suite, "ask_all", asked.ask_all)
    return asked


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["decod"], "did you mean decode?"),
        (["decode", "tabels"], "did you mean tables?"),
        (["--quik"], "did you mean --quick?"),
        (["decode", "--threads", "two"], "--threads"),
        (["decode", "--threads", "0"], "at least 1"),
        (["--quick", "--full"], "not allowed with"),
        (["--all", "decode"], "--all"),
        (["decode", "warm", "--", "--runs", "3"], "one QUESTION, got 2"),
        (["decode", "--", "--results", "here"], "--results is after --"),
        (["tables", "decode"], "takes nothing after it"),
        (["--list", "decode"], "takes nothing after it"),
        (["peers", "instal"], "did you mean install?"),
        (["peers", "install", "lama"], "did you mean llama?"),
    ],
)
def test_a_wrong_command_line_is_one_line_that_says_what_is_right(capsys, asked, arguments, words):
    assert words in refused(capsys, "bench", *arguments, code=2)
    assert asked.plans == []


def test_outside_a_checkout_it_says_how_to_get_one(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("kvpager.cli.bench.bench_folder", lambda: tmp_path / "lib" / "bench")
    err = refused(capsys, "bench", "--list")
    assert f"installed in {tmp_path / 'lib'}" in err
    assert "clone the repository, run `make build`" in err


def test_a_checkout_is_found_beside_the_package_from_any_folder(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "kvpager.cli", "bench", "decode", "--", "--help"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "--contexts" in done.stdout


def test_the_list_names_every_question(capsys):
    told = told_json(capsys, "bench", "--list")
    assert [question["name"] for question in told["questions"]] == list(QUESTIONS)
    assert main(["bench", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in QUESTIONS)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], [q.name for q in QUESTIONS.values() if q.in_suite]),
        (["--all"], list(QUESTIONS)),
        (["warm", "decode", "warm"], ["warm", "decode"]),
    ],
)
def test_the_suite_is_asked_unless_questions_are_named(capsys, asked, tmp_path, arguments, names):
    assert main(["bench", *arguments, "--results", str(tmp_path)]) == 0
    (plan,) = asked.plans
    assert [question.name for question in plan.questions] == names
    assert (plan.size, plan.threads, plan.extra) == (suite.STANDARD, None, ())
    assert plan.results == tmp_path


def test_what_follows_two_dashes_goes_to_the_one_question(asked, tmp_path):
    arguments = ["decode", "--quick", "--threads", "3", "--results", str(tmp_path)]
    assert main(["bench", *arguments, "--", "--contexts", "8192", "--", "--quik"]) == 0
    (plan,) = asked.plans
    command = plan.command(plan.questions[0])
    assert command[1:] == [
        *["-u", "-m", "kvpager_bench.questions.decode", "--results", str(tmp_path)],
        *["--quick", "--threads", "3", "--contexts", "8192", "--", "--quik"],
    ]


def test_a_missed_aim_is_said_and_no_failure(capsys, asked):
    asked.report.compare("scan", ours=1.0, theirs=2.0, peer="torch", unit="s", aim=0.75)
    assert main(["bench", "decode"]) == 0
    out = capsys.readouterr().out
    assert "Fell short\n  scan: 0.5x torch, 0.75x aimed at\n" in out
    assert "Peers left out\n  llama.cpp 0.3.36: not installed\n" in out
    assert "1 of 1 question in 1:15" in out
    assert main(["bench", "decode", "--quick"]) == 0
    assert "Fell short (--quick has sizes too small to tell)\n" in capsys.readouterr().out


def test_a_question_that_failed_gives_exit_code_1_and_the_table_of_the_others(capsys, asked):
    asked.failures["decode"] = "exit code 1: no memory"
    assert main(["bench", "decode", "warm"]) == 1
    out, err = capsys.readouterr()
    assert "decode at 128K" in out
    assert "Failed\n  decode: exit code 1: no memory; see " in out
    assert "[1/2] decode: FAILED after 0:02: exit code 1: no memory" in err
    assert "[2/2] warm: done in 0:02, 6 rows" in err


def test_an_interrupted_run_tells_what_is_finished_and_exits_with_130(capsys, asked):
    asked.interrupted = True
    assert main(["bench", "decode"]) == 130
    out, err = capsys.readouterr()
    assert "then interrupted" in out
    assert "decode at 128K" in out
    assert err.endswith("kvpager: interrupted\n")


def test_json_is_one_object_and_quiet_says_nothing_else(capsys, asked):
    asked.failures["warm"] = "it hung"
    told = told_json(capsys, "bench", "decode", "warm", "-q", code=1)
    assert [q["failure"] for q in told["questions"]] == [None, "it hung"]
    assert told["comparisons"][0]["ratio"] == 10.0


def test_tables_are_written_beside_results_of_another_folder(capsys, tmp_path):
    make_report("speculation").write(tmp_path)
    told = told_json(capsys, "bench", "tables", "--results", tmp_path)
    assert str(tmp_path / "tables" / "benchmarks.md") in told["files"]
    assert "decode" in told["missing"]
    err = refused(capsys, "bench", "tables", "--results", tmp_path / "nothing")
    assert "no results" in err


def test_peers_that_are_not_there_are_listed_with_how_to_install_them(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("KVPAGER_BENCH_PEERS", str(tmp_path))
    told = told_json(capsys, "bench", "peers")["peers"]
    assert list(told) == list(environments.PEERS)
    assert not any(peer["installed"] for peer in told.values())
    assert "kvpager bench peers install llama" in told["llama"]["reason"]


def test_a_peer_that_cannot_be_installed_does_not_keep_the_others_out(capsys, monkeypatch):
    tried = []

    def install(name, report):
        tried.append(name)
        if name == "llama":
            raise environments.PeerError("no compiler")

    monkeypatch.setattr(environments, "install", install)
    assert main(["bench", "peers", "install"]) == 1
    assert tried == list(environments.PEERS)
    assert "llama: no compiler" in capsys.readouterr().err
