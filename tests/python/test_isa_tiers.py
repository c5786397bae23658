"""The instruction-set tier changes no bit of K/V, logits, summaries, selections and snapshots.

Each tier runs in processes of its own, forced by KVPAGER_ISA, as a user would force it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from isa_children import SUBJECTS

from kvpager import _core

TIERS = ["base", "v3", "v4"]
UNKNOWN = ["avx2", "V4", " v3", "4"]
Answer: TypeAlias = dict[str, Any]
Stage: TypeAlias = dict[Any, tuple[str, str, dict[str, str]]]  # tier, job, its arguments


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "KVPAGER_ISA"}
    return {**kept, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}


def machines_tier() -> str:
    if "KVPAGER_ISA" not in os.environ:
        return _core.isa_name()
    code = "from kvpager import _core; print(_core.isa_name())"
    command = [sys.executable, "-c", code]
    return subprocess.check_output(command, env=environment(), text=True, timeout=300).strip()


class Run:
    """What children of every tier answered, by what they were asked."""

    def __init__(self, folder: Path) -> None:
        self.highest = machines_tier()
        self.tiers = TIERS[: TIERS.index(self.highest) + 1]
        # Who goes on with whose snapshot: each with the next one's and with its own.
        self.turns = [(a, b) for a, b in zip(self.tiers, self.tiers[1:] + self.tiers[:1])]
        self.turns += [(tier, tier) for tier in self.tiers if (tier, tier) not in self.turns]
        paths = {
            (tier, subject): str(folder / f"{tier}-{number}.kvsnap")
            for tier in self.tiers
            for number, subject in enumerate(SUBJECTS)
        }
        first: Stage = {}
        second: Stage = {}
        for value in [*UNKNOWN, *TIERS, ""]:
            first["refuse", value] = (value, "refuse", {})
        for (tier, subject), path in paths.items():
            first["make", tier, subject] = (tier, "make", {"subject": subject, "path": path})
            path = paths[self.tiers[0], subject]
            second["score", tier, subject] = (tier, "score", {"subject": subject, "path": path})
        for subject in SUBJECTS:
            for wrote, reads in self.turns:
                path = paths[wrote, subject]
                arguments = {"subject": subject, "path": path, "save": f"{path}-{reads}"}
                second["go_on", wrote, reads, subject] = (reads, "go_on", arguments)
        self.answers = self._ask(folder, [first, second])

    def _ask(self, folder: Path, stages: list[Stage]) -> dict[Any, Answer]:
        asked = [
            [{"tier": tier, "job": job, "arguments": a} for tier, job, a in stage.values()]
            for stage in stages
        ]
        result = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("isa_children.py")), str(folder)],
            input=json.dumps(asked),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert result.returncode == 0, result.stderr
        answers = {}
        for stage, jobs in enumerate(stages):
            for number, key in enumerate(jobs):
                answers[key] = json.loads((folder / f"{stage}-{number}.json").read_text())
        return answers

    def answer(self, *key: str) -> Answer:
        """What one child computed; an exception in it fails the test with its words."""
        answer = self.answers[key]
        assert "error" not in answer, f"{key}: {answer['error']}"
        return answer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("tiers"))


def assert_equal_but_tier(found: Answer, expected: Answer, what: str) -> None:
    assert found.keys() == expected.keys()
    names = [name for name in expected if name != "isa" and found[name] != expected[name]]
    assert not names, f"{what}: {', '.join(names)} differ"


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_tier_computes_selects_and_saves_the_same_bits(run: Run, subject: str) -> None:
    expected = run.answer("make", run.tiers[0], subject)
    assert len(expected["generated"]) == 20
    assert len(set(expected["generated"])) > 3
    assert len(expected["summaries"]) > 10
    for tier in run.tiers:
        found = run.answer("make", tier, subject)
        assert found["isa"] == tier
        assert_equal_but_tier(found, expected, f"{tier} beside {run.tiers[0]}")
    if subject.startswith("top-k"):
        lists = expected["selected 0"] + expected["selected 1"]
        assert any(chosen != lists[0] for chosen in lists), "every head selects alike: no test"


@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_snapshot_of_one_tier_goes_on_under_any_other_with_the_same_bits(
    run: Run, subject: str
) -> None:
    before = run.answer("make", run.tiers[0], subject)
    expected = run.answer("go_on", run.tiers[0], run.tiers[0], subject)
    for name in ("tokens", "logits", "keys 1", "values 1", "selected 1"):
        assert expected[f"restored {name}"] == before[name], name
    for wrote, reads in run.turns:
        found = run.answer("go_on", wrote, reads, subject)
        assert found["isa"] == reads
        assert_equal_but_tier(found, expected, f"saved under {wrote}, restored under {reads}")


@pytest.mark.parametrize("subject", SUBJECTS)
def test_every_tier_scores_a_generated_text_alike(run: Run, subject: str) -> None:
    expected = run.answer("score", run.tiers[0], subject)
    for tier in run.tiers:
        assert_equal_but_tier(run.answer("score", tier, subject), expected, tier)


@pytest.mark.parametrize("value", UNKNOWN)
def test_a_tier_nobody_knows_is_refused_by_name_before_a_pager_is_made(
    run: Run, value: str
) -> None:
    expected = f'KVPAGER_ISA is "{value}"; expected base, v3 or v4'
    assert run.answer("refuse", value)["message"] == expected


def test_tiers_up_to_the_machines_own_are_taken_and_those_beyond_refused_by_name(run: Run) -> None:
    for tier in TIERS:
        answer = run.answer("refuse", tier)
        if tier in run.tiers:
            assert answer == {"message": "", "isa": tier}
        else:
            assert f"KVPAGER_ISA is {tier}, which this machine cannot run" in answer["message"]
            assert f"highest tier is {run.highest}" in answer["message"]
    assert run.answer("refuse", "") == {"message": "", "isa": run.highest}
