"""scripts/gpu.py without a GPU: no step is good that was stopped, failed or tested nothing."""

from __future__ import annotations

import _thread
import fnmatch
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
import gpu as script
from gpu_steps import judge, steps
from gpu_steps.part import Part, StepFailedError, run
from gpu_steps.place import PLUGIN, Place, PlaceError
from gpu_steps.record import carry_out
from gpu_steps.steps import FIRST_CASE, HOST_TESTS, KERNEL_TESTS, SANITIZED, STEPS, Step

from kvpager.pager.device import missing
from kvpager_bench.gpu.__main__ import SECTIONS
from kvpager_bench.gpu.gates import GATES

ROOT = Path(__file__).resolve().parents[2]
KERNEL_FILES = ROOT / "tests" / "cpp" / "cuda"


@pytest.fixture
def place(tmp_path):
    """Of a rehearsal, where nothing was built."""
    out = tmp_path / "out"
    out.mkdir()
    return Place(out, rehearse=True, build=tmp_path / "build")


def parts_of(name, place):
    (step,) = [step for step in STEPS if step.name == name]
    return list(step.parts(place))


def cases_of(path):
    text = path.read_text(encoding="utf-8")
    literals = re.findall(r'TEST_CASE\(\s*((?:"[^"]*"\s*)+)', text)
    return ["".join(re.findall(r'"([^"]*)"', literal)) for literal in literals]


class TestJudges:
    @pytest.mark.parametrize(
        ("judged", "good", "bad"),
        [
            (judge.command, [""], []),
            (judge.told, ["", "all is there"], []),
            (
                judge.pytest,
                ["3 passed, 1 skipped in 0.1s", "===== 12 passed in 3.2s ====="],
                ["2 skipped in 0.1s", "no tests ran in 0.01s", "0 passed"],
            ),
            (
                judge.doctest,
                ["[doctest] test cases:  3 |  3 passed | 0 failed"],
                ["[doctest] test cases:  0 |  0 passed | 0 failed", ""],
            ),
            (
                judge.sanitizer,
                [
                    "[doctest] test cases:  3 |  3 passed\n===== ERROR SUMMARY: 0 errors",
                    "[doctest] test cases: 12 | 12 passed\n"
                    "===== RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
                ],
                [
                    "[doctest] test cases:  0 |  0 passed\n===== ERROR SUMMARY: 0 errors",
                    "[doctest] test cases:  3 |  3 passed\n===== ERROR SUMMARY: 2 errors",
                    "[doctest] test cases:  3 |  3 passed\n"
                    "===== RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)",
                    "[doctest] test cases:  3 |  3 passed",
                    "===== ERROR SUMMARY: 0 errors",
                ],
            ),
            (judge.measurement, ["", "holds: a: 1", "FAILS: a: 1"], []),
        ],
    )
    def test_output_is_judged(self, judged, good, bad):
        for output in good:
            assert judged(0, output).wrong == "", output
            assert judged(1, output).wrong != "", output
        for output in bad:
            assert judged(0, output).wrong != "", output

    def test_the_cases_that_failed_are_named_and_no_others(self):
        line = "=" * 79
        output = (
            f"{line}\nx.cc:1:\nTEST CASE:  rows are right\n\n0.1 s: rows are right\n"
            f"{line}\nx.cc:9:\nTEST CASE:  sums are right\n\nx.cc:10: ERROR: CHECK( 1 == 2 )\n"
            f"{line}\nx.cc:9:\nTEST CASE:  sums are right\n\nx.cc:12: ERROR: CHECK( 1 == 3 )\n"
            f"{line}\nx.cc:20:\nTEST CASE:  crashes\n\nx.cc:20: FATAL ERROR: test case CRASHED\n"
            f"{line}\n[doctest] test cases: 3 | 1 passed | 2 failed\n"
        )
        assert judge.failing_cases(output) == ["sums are right", "crashes"]
        assert judge.doctest(1, output).wrong == 'exit status 1: "sums are right"; "crashes"'
        assert judge.last_case(output) == "crashes"

    @pytest.mark.parametrize(
        ("line", "summary"),
        [
            ("    at {}+0x70 in attend.cu:32", "ERROR SUMMARY: 1 error"),
            (
                "Error: Race reported between Write access at {}+0x1e0 and Read access",
                "RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)",
            ),
        ],
    )
    def test_the_kernel_a_sanitizer_complains_of_is_named(self, line, summary):
        kernel = "void kvpager::gpu::<unnamed>::merge_states<(int)64>(AttendParams)"
        output = f"========= Two threads\n========= {line.format(kernel)}\n========= {summary}\n"
        assert judge.sanitizer(99, output).wrong == f"not clean: {kernel}"

    def test_a_wrong_result_is_named_before_a_section_that_stopped(self):
        output = "WRONG: attention kernel: off by 3\nsection attention stopped: WrongResultError\n"
        assert judge.measurement(1, output).wrong == "attention kernel: off by 3"
        for said in ("section decode stopped: full", "cannot measure: no driver"):
            assert judge.measurement(1, f"== decode\n{said}\n9 s\n").wrong == said


class TestParts:
    def test_a_part_that_takes_too_long_is_stopped_with_what_it_started(self, tmp_path):
        alive = tmp_path / "alive"
        command = ["sh", "-c", f"(sleep 2; touch {alive}) & wait"]
        outcome = run(Part("slow", command, 9), 0.3, tmp_path / "log")
        assert "stopped after" in outcome.wrong
        assert outcome.seconds < 2
        time.sleep(2.2)
        assert not alive.exists()

    def test_a_part_that_is_stopped_may_write_what_it_has(self, tmp_path):
        written = tmp_path / "written"
        command = ["bash", "-c", f"trap 'touch {written}; exit 1' INT; sleep 5 & wait"]
        outcome = run(Part("slow", command, 9), 0.5, tmp_path / "log")
        assert "stopped after" in outcome.wrong
        assert written.exists()

    def test_a_tool_that_is_not_there_is_named(self, tmp_path):
        outcome = run(Part("memcheck", ["no-such-tool", "--tool"], 9), 9, tmp_path / "log")
        assert outcome.wrong == "no-such-tool: No such file or directory"

    def test_the_case_before_a_part_that_hangs_is_named(self, tmp_path):
        command = ["sh", "-c", "echo 'TEST CASE:  the last that ended'; sleep 9"]
        outcome = run(Part("slow", command, 9), 0.3, tmp_path / "log")
        assert outcome.wrong.endswith('after "the last that ended"')

    def test_the_log_has_every_parts_output_and_a_judge_its_own(self, tmp_path):
        def judged(status, output):
            return judge.Judgement("" if output == "two\n" else repr(output), "said")

        run(Part("one", ["echo", "one"], 9), 9, tmp_path / "log")
        outcome = run(Part("two", ["echo", "two"], 9, judged), 9, tmp_path / "log")
        assert (outcome.wrong, outcome.said) == ("", "said")
        assert "one\n" in (tmp_path / "log").read_text(encoding="utf-8")


class TestRecords:
    def report(self, place, name="step"):
        return json.loads((place.out / f"{name}.json").read_text(encoding="utf-8"))

    def step(self, *parts, limit=60.0):
        return Step("step", "does", lambda _: iter(parts), limit)

    def test_a_step_leaves_one_json_and_one_log(self, place):
        measured = place.measured
        command = ["sh", "-c", f"echo '{{\"a\": 1}}' > {measured}"]
        carry_out(self.step(Part("measure", command, 9, measured=measured)), place)
        assert {path.name for path in place.out.iterdir()} == {"step.json", "step.log"}
        data = self.report(place)
        assert (data["ok"], data["stopped"], data["rehearsal"]) == (True, "", True)
        assert data["measured"] == {"measure": {"a": 1}}

    def test_a_step_ends_at_the_first_part_that_fails_and_names_it(self, place, tmp_path):
        late = tmp_path / "late"
        step = self.step(
            Part("good", ["true"], 9),
            Part("attention on tensor cores", ["false"], 9),
            Part("late", ["touch", str(late)], 9),
        )
        with pytest.raises(StepFailedError, match="step: attention on tensor cores: exit status 1"):
            carry_out(step, place)
        data = self.report(place)
        assert data["ok"] is False
        assert data["stopped"].startswith("step: attention on tensor cores")
        assert [bool(part["wrong"]) for part in data["parts"]] == [False, True]
        assert not late.exists()

    def test_what_was_written_in_part_is_kept_as_it_is(self, place):
        command = ["sh", "-c", f"printf '{{' > {place.measured}; exit 3"]
        with pytest.raises(StepFailedError):
            carry_out(self.step(Part("measure", command, 9, measured=place.measured)), place)
        assert self.report(place)["measured"] == {"measure": "{"}

    def test_what_an_earlier_part_measured_is_not_taken_for_a_later_ones(self, place):
        command = ["sh", "-c", f"echo '{{}}' > {place.measured}"]
        first = Part("first", command, 9, measured=place.measured)
        carry_out(self.step(first, Part("second", ["true"], 9, measured=place.measured)), place)
        assert self.report(place)["measured"] == {"first": {}}

    def test_an_interrupt_leaves_what_was_measured_so_far(self, place):
        command = ["sh", "-c", f"echo '{{\"rows\": 2}}' > {place.measured}; sleep 20"]

        def interrupt():
            while not place.measured.exists() or not place.measured.read_text(encoding="utf-8"):
                time.sleep(0.01)
            _thread.interrupt_main()

        threading.Thread(target=interrupt, daemon=True).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            carry_out(self.step(Part("measure", command, 30, measured=place.measured)), place)
        assert time.monotonic() - start < 10
        data = self.report(place)
        assert (data["ok"], data["stopped"]) == (False, "interrupted")
        assert data["measured"] == {"measure": {"rows": 2}}

    def test_a_part_has_no_more_time_than_its_step_has_left(self, tmp_path):
        out = tmp_path / "out"
        out.mkdir()
        place = Place(out, build=tmp_path)  # of a GPU: a rehearsal is patient
        step = self.step(Part("slow", ["sleep", "9"], 9), Part("late", ["true"], 9), limit=0.4)
        with pytest.raises(StepFailedError, match="stopped after 0 s"):
            carry_out(step, place)
        late = self.step(Part("late", ["true"], 9), limit=0.0)
        with pytest.raises(StepFailedError, match="no time was left of 0 s"):
            carry_out(late, place)


class TestSteps:
    @pytest.fixture
    def on_gpu(self, tmp_path, monkeypatch):
        monkeypatch.setattr(steps, "architecture", lambda: "90-real")
        return Place(tmp_path, build=tmp_path)

    def test_every_limit_is_within_eight_minutes_and_every_name_there_once(self, on_gpu):
        for step in STEPS:
            if step.name == "build":
                continue  # its parts copy files
            parts = list(step.parts(on_gpu))
            assert step.limit <= 480
            assert all(0 < part.limit <= step.limit for part in parts)
            assert len({part.name for part in parts}) == len(parts)

    def test_the_first_kernel_test_is_that_a_weight_of_zero_adds_nothing(self, on_gpu):
        facts, first, *_ = parts_of("kernels", on_gpu)
        assert facts.name == "facts"
        assert f"--test-case={FIRST_CASE}" in first.command
        assert fnmatch.filter(cases_of(KERNEL_FILES / "attend_tensor_test.cc"), FIRST_CASE)

    def test_every_file_of_kernel_tests_is_run_but_for_those_of_the_shim(self):
        files = {path.name.removesuffix("_test.cc") for path in KERNEL_FILES.glob("*_test.cc")}
        assert files == {test.file for test in KERNEL_TESTS} | set(HOST_TESTS)

    @pytest.mark.parametrize("test", SANITIZED, ids=lambda test: test.file)
    def test_every_pattern_of_a_sanitized_case_is_that_of_a_case(self, test):
        cases = cases_of(KERNEL_FILES / f"{test.file}_test.cc")
        for pattern in test.cases.split(","):
            assert fnmatch.filter(cases, pattern), pattern

    def test_what_runs_under_a_sanitizer_does_not_fork_and_honours_small_sizes(self, on_gpu):
        parts = parts_of("sanitizers", on_gpu)
        for part in parts:
            assert part.command[0] == "compute-sanitizer"
            assert "--report-api-errors no" in " ".join(part.command)
            assert part.environment["KVPAGER_TEST_SMALL"] == "1"
            assert part.environment["PATH"].endswith(":/usr/local/cuda/bin")
            (pattern,) = [word for word in part.command if word.startswith("--source-file=")]
            room, name = pattern.removeprefix("--source-file=*/").split("/")
            text = (ROOT / "tests" / "cpp" / room / name).read_text(encoding="utf-8")
            assert not re.search(r"\bfork\(\)|died\.h", text), name
        tools = {part.name.split(":")[0] for part in parts}
        assert tools == {"memcheck", "racecheck", "synccheck"}

    def test_every_section_that_is_measured_has_a_step_and_judges_are_for_measurements(
        self, on_gpu
    ):
        measured = []
        for name in ("kernels", "operations", "decode", "profiles", "verify"):
            for part in parts_of(name, on_gpu):
                if "kvpager_bench.gpu" in part.command:
                    measured += [word for word in part.command if word in SECTIONS]
        assert sorted([*measured, "ceilings"]) == sorted(SECTIONS)

    def test_the_plug_in_is_compiled_once_for_the_gpu_at_hand_and_not_where_it_is_there(
        self, on_gpu, tmp_path
    ):
        def configured(place):
            part = next(part for part in steps.build(place) if part.name == "configure")
            return " ".join(part.command)

        def compiled(place):
            return [part.command for part in steps.build(place) if part.name == "compile"]

        assert "-DKVPAGER_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90-real" in configured(on_gpu)
        (command,) = compiled(on_gpu)
        assert command.count("kvpager_cuda") == 1
        (tmp_path / "carried").mkdir()
        (tmp_path / "carried" / PLUGIN).write_text("carried", encoding="utf-8")
        prebuilt = Place(tmp_path, prebuilt=tmp_path / "carried", build=tmp_path)
        assert "-DKVPAGER_CUDA=OFF" in configured(prebuilt)
        assert "kvpager_cuda" not in compiled(prebuilt)[0]
        assert (prebuilt.site / "kvpager" / PLUGIN).read_text(encoding="utf-8") == "carried"
        # C++ tests and the package have the same one.
        path = prebuilt.environment()["KVPAGER_DEVICE_PATH"]
        assert path.split(":")[0] == str(prebuilt.site / "kvpager")

    def test_python_tests_are_those_with_a_mark_for_a_gpu(self):
        names = {path.name for path in steps.device_tests()}
        assert {"test_device_cuda.py", "test_device_pager.py", "test_non_finite.py"} <= names
        assert "test_plan.py" not in names


class TestCommand:
    def test_the_list_has_every_step_its_limit_and_what_it_leaves(self, capsys, tmp_path):
        assert script.main(["--list", "--out", str(tmp_path)]) == 0
        printed = capsys.readouterr().out
        for step in STEPS:
            assert re.search(
                rf"^{step.name} +at most 480 s +{re.escape(step.does)}$", printed, re.M
            )
        assert str(tmp_path) in printed
        assert list(tmp_path.iterdir()) == []

    def test_an_unknown_step_is_refused_with_those_there_are(self, capsys):
        with pytest.raises(SystemExit):
            script.parse(["kernel"])
        assert "STEP kernel: expected some of build, kernels," in capsys.readouterr().err

    def test_a_machine_without_a_gpu_is_told_how_to_rehearse(self, monkeypatch, tmp_path):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(PlaceError, match="--rehearse"):
            Place(tmp_path).check("build")

    def test_a_folder_without_a_plug_in_is_refused_by_name(self, tmp_path):
        place = Place(tmp_path, rehearse=True, prebuilt=tmp_path, build=tmp_path)
        with pytest.raises(PlaceError, match=f"--prebuilt {tmp_path}: expected .*{PLUGIN}"):
            place.check("build")
        (tmp_path / PLUGIN).touch()
        place.check("build")

    def test_what_needs_a_build_says_so(self, place):
        with pytest.raises(PlaceError, match=r"kernels: nothing is built in .*run the step build"):
            place.check("kernels")
        place.check("operations")  # of a rehearsal: with the package that is installed

    def test_docs_say_what_is_predicted_and_every_step_in_its_order(self):
        text = (ROOT / "docs" / "cuda.md").read_text(encoding="utf-8")
        for gate in GATES:
            low, high = gate.predicted or (None, None)
            predicted = "" if low is None else f"{low:g}" if low == high else f"{low:g} to {high:g}"
            wanted = "" if gate.wanted is None else f"{gate.wanted[0]} {gate.wanted[1]:g}"
            row = f"| `{gate.section}` | {gate.claim} | {gate.unit} | {predicted} | {wanted} |"
            assert row in text, row
        places = [text.index(f"| `{step.name}` | {step.does}") for step in STEPS]
        assert places == sorted(places)


def test_without_the_python_of_a_release_its_tests_say_what_is_missing(tmp_path):
    done = subprocess.run(
        [ROOT / "scripts" / "pytest_releases.sh", "3.12", "2.11.0", "5.17"],
        env={**os.environ, "HOME": str(tmp_path), "PYTHON_FOR_RELEASES": "no-such-python"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "there is no Python 3.12, looked for no-such-python" in done.stderr


def test_a_rehearsal_runs_a_step_from_end_to_end(tmp_path):
    name = "profiles"
    if why_not := missing("shim"):
        assert "shim" not in os.environ.get("KVPAGER_TEST_DEVICES", ""), why_not
        pytest.skip(f"shim: {why_not}")
    place = Place(tmp_path / "out", rehearse=True, build=tmp_path / "build")
    assert script.run([step for step in STEPS if step.name == name], place) == 0
    assert {path.name for path in place.out.iterdir()} == {f"{name}.json", f"{name}.log"}
    data = json.loads((place.out / f"{name}.json").read_text(encoding="utf-8"))
    assert data["ok"]
    assert data["measured"][name]["sections"][name]["rows"]
    assert [gate["section"] for gate in data["measured"][name]["gates"]] == [name] * 3
