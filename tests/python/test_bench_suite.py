"""The runner of questions, with questions that answer, fail, hang and are interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import kvpager_bench
from kvpager_bench import questions
from kvpager_bench import suite as suites
from kvpager_bench.places import CHECKOUT, RESULTS_DIR, module_environment
from kvpager_bench.question import QUESTIONS, REPORTS, SETTLED, SUITE_MINUTES, Question, suite
from kvpager_bench.report import load_report

FAKES = {
    "answers": """
        report = make_report("answers" + suffix)
        report.compare("speed", ours=1.0, theirs=2.0, peer="a peer", unit="GB/s", aim=1.0)
        report.compare("size", ours=1.0, theirs=2.0, peer="a peer", unit="GB", aim=None)
        report.judge("it is quick", False, "it is not")
        report.skip("another peer", "not installed")
        report.print()
        report.write()
        print("threads", arguments.threads, "more", more)
    """,
    "fails": """
        print("about to fail")
        sys.exit("the disk is full")
    """,
    "crashes": """
        os.kill(os.getpid(), signal.SIGSEGV)
    """,
    "says_nothing": "",
    "damaged": """
        (results_dir() / f"damaged{suffix}.json").write_text("{")
    """,
    "hangs": """
        worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (results_dir() / "pids").write_text(f"{os.getpid()} {worker.pid}")
        print("hanging", flush=True)
        try:
            time.sleep(600)
        finally:
            (results_dir() / "cleaned").write_text("yes")
    """,
}
HEAD = """
import argparse, os, signal, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from bench_reports import make_report
from kvpager_bench.places import RESULTS_VARIABLE, results_dir

parser = argparse.ArgumentParser()
parser.add_argument("--results", type=Path)
parser.add_argument("--threads", type=int)
parser.add_argument("--quick", action="store_true")
arguments, more = parser.parse_known_args()
os.environ[RESULTS_VARIABLE] = str(arguments.results)
suffix = "-quick" if arguments.quick else ""
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
# The runner itself in a process of its own, as the command runs it.
RUNNER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_bench_suite import Quiet, plan_of
from kvpager_bench import suite
summary = suite.ask_all(plan_of(Path({folder!r}), *{names!r}), Quiet())
print([o.question.name for o in summary.outcomes], summary.interrupted)
"""


class Quiet:
    def begins(self, number, question):
        pass

    def goes_on(self, question, seconds, said):
        pass

    def ends(self, outcome):
        pass


class Noting(Quiet):
    def __init__(self):
        self.told = []

    def begins(self, number, question):
        self.told.append((number, question.name))

    def goes_on(self, question, seconds, said):
        self.told.append(said)

    def ends(self, outcome):
        self.told.append(outcome.failure)


def plan_of(folder, *names, **options):
    asked = tuple(Question(name, "?", 1, reports=(name,)) for name in names)
    return suites.Plan(asked, folder / "results", package="fake_questions", **options)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Holds a package of fake questions that processes started from here find."""
    package = tmp_path / "fake_questions"
    package.mkdir()
    (package / "__init__.py").write_text("")
    head = HEAD.replace("{tests!r}", repr(str(Path(__file__).parent)))
    for name, body in FAKES.items():
        (package / f"{name}.py").write_text(head + textwrap.dedent(body))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "results").mkdir()
    return tmp_path


def ask(folder, *names, **options):
    return suites.ask_all(plan_of(folder, *names, **options), Quiet())


def gone(pid, seconds=10.0):
    """Whether a process ends within that time; a zombie of another parent counts as ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_a_question_that_fails_does_not_keep_the_others_out(folder):
    summary = ask(folder, "fails", "crashes", "answers", "says_nothing", "damaged", "absent")
    failures = {o.question.name: o.failure for o in summary.outcomes}
    assert failures["answers"] == ""
    assert failures["fails"] == "exit code 1: the disk is full"
    assert failures["crashes"].startswith("signal SIGSEGV")
    assert failures["says_nothing"] == "it wrote no report"
    assert "damaged.json" in failures["damaged"]
    assert "absent" in failures["absent"]
    assert [o.question.name for o in summary.failed] == [n for n in failures if n != "answers"]
    assert [report.name for report in summary.reports] == ["answers"]


def test_an_older_report_is_not_taken_for_the_answer_and_what_is_printed_is_kept(folder):
    ask(folder, "answers")
    (folder / "fake_questions" / "answers.py").write_text("print('nothing today')")
    (outcome,) = ask(folder, "answers").outcomes
    assert outcome.failure == "it wrote no report"
    assert outcome.log == folder / "results" / "logs" / "answers.log"
    assert outcome.log.read_text() == "nothing today\n"
    assert load_report(folder / "results" / "answers.json").name == "answers"


def test_size_threads_and_further_options_reach_the_question(folder):
    (outcome,) = ask(folder, "answers", size=suites.QUICK, threads=3, extra=("--x", "5")).outcomes
    assert outcome.failure == ""
    assert outcome.log.name == "answers-quick.log"
    assert outcome.log.read_text().endswith("threads 3 more ['--x', '5']\n")
    assert [p.name for p in (folder / "results").glob("*.json")] == ["answers-quick.json"]


def test_a_question_that_hangs_is_ended_with_its_workers_and_the_next_is_asked(folder, monkeypatch):
    monkeypatch.setattr(suites, "_LEAST_LIMIT_S", 2.0)
    monkeypatch.setattr(suites, "_LIMIT", 0)
    watcher = Noting()
    summary = suites.ask_all(plan_of(folder, "hangs", "answers"), watcher)
    assert [bool(o.failure) for o in summary.outcomes] == [True, False]
    assert summary.outcomes[0].failure.startswith("it hung")
    assert all(gone(pid) for pid in (folder / "results" / "pids").read_text().split())
    assert (folder / "results" / "cleaned").exists()
    assert "hanging" in watcher.told
    assert watcher.told[0] == (0, "hangs")
    assert watcher.told[-1] == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_question_with_its_workers_and_keeps_what_is_finished(folder, number):
    source = RUNNER.format(
        tests=str(Path(__file__).parent), folder=str(folder), names=["answers", "hangs", "fails"]
    )
    restore = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    restore += "signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(SystemExit(143)))\n"
    process = subprocess.Popen(
        [sys.executable, "-c", restore + source],
        stdout=subprocess.PIPE,
        text=True,
        env=module_environment(),
    )
    pids = folder / "results" / "pids"
    try:
        deadline = time.monotonic() + 60
        while not pids.exists() or len(pids.read_text().split()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert all(gone(pid) for pid in pids.read_text().split())
    assert load_report(folder / "results" / "answers.json").rows
    assert not (folder / "results" / "logs" / "fails.log").exists()
    if number == signal.SIGINT:
        assert out == "['answers'] True\n"


def test_a_summary_says_what_fell_short_and_who_was_left_out(folder):
    summary = ask(folder, "answers", "fails")
    assert summary.short() == ["speed: 0.5x a peer, 1x aimed at", "it is quick: it is not"]
    told = json.loads(json.dumps(summary.to_json()))
    assert [(c["report"], c["figure"], c["holds"]) for c in told["comparisons"]] == [
        ("answers", "speed", False),
        ("answers", "size", True),
    ]
    assert told["skipped"] == [{"peer": "another peer", "reason": "not installed"}]
    assert [q["failure"] for q in told["questions"]] == [None, "exit code 1: the disk is full"]


class TestRegistry:
    def test_every_question_is_registered_and_every_registered_one_is_there(self):
        files = {p.stem for p in Path(questions.__file__).parent.glob("*.py")} - {"__init__"}
        assert files == set(QUESTIONS)

    @pytest.mark.parametrize("question", QUESTIONS.values(), ids=lambda q: q.name)
    def test_a_question_has_a_budget_and_one_line(self, question):
        assert 0 < question.minutes < 60
        assert "\n" not in question.asks

    def test_the_suite_fits_its_minutes(self):
        assert sum(q.minutes for q in suite()) < SUITE_MINUTES
        assert {q.name for q in suite()} >= {"attention", "decode", "warm", "quality"}

    def test_no_two_questions_write_the_same_report(self):
        assert len(set(REPORTS)) == len(REPORTS)

    def test_what_is_settled_is_relied_on_where_the_registry_says(self):
        for name, where in SETTLED.items():
            page = CHECKOUT / where if where == "README.md" else CHECKOUT / "docs" / where
            pages = [page] if page.is_file() else list(page.parent.glob(f"{page.name}-*.md"))
            assert pages, where
            assert (RESULTS_DIR / f"{name}.json").is_file()

    def test_the_guide_lists_every_question_with_its_minutes(self):
        text = (Path(kvpager_bench.__file__).parents[1] / "README.md").read_text(encoding="utf-8")
        for question in QUESTIONS.values():
            (line,) = (row for row in text.splitlines() if row.startswith(f"| `{question.name}`"))
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert cells[1] == question.asks
            assert cells[2] == f"{question.minutes:g}" + (", suite" if question.in_suite else "")


def test_listing_planning_and_running_need_no_torch():
    code = (
        "import sys\nfrom kvpager.cli import main\n"
        "assert main(['bench', '--list']) == 0\n"
        "import kvpager_bench.suite\nassert 'torch' not in sys.modules, 'torch'"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "attention" in done.stdout
