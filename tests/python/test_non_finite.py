"""A number that is not finite never becomes a finite output: it is refused, and told where."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import non_finite
import pytest
from test_isa_tiers import TIERS, environment, machines_tier

sys.path.append(str(Path(__file__).parents[1] / "model"))
from devices import DEVICES, require

deep = pytest.mark.deep


@pytest.mark.parametrize("combinations", ["two", pytest.param("all", marks=deep)])
def test_no_tier_takes_a_number_that_is_not_finite_at_any_offset(tmp_path, combinations):
    tiers = TIERS[: TIERS.index(machines_tier()) + 1]
    subprocess.run(
        [sys.executable, non_finite.__file__, str(tmp_path), combinations, *tiers],
        env=environment(),
        check=True,
        timeout=600,
    )
    for tier in tiers:
        answer = json.loads((tmp_path / f"{tier}.json").read_text())
        assert "error" not in answer, f"{tier}: {answer['error']}"
        assert answer["isa"] == tier
        each = 3 * 3 * 16 + 3 * 16 + 3
        assert answer["tried"] == len(non_finite.COMBINATIONS[combinations]) * each


@pytest.mark.parametrize(("dtype", "selection"), non_finite.TWO)
@pytest.mark.parametrize("device", DEVICES)
def test_no_device_takes_a_number_that_is_not_finite(device, dtype, selection):
    where = require(device)
    assert non_finite.check(where, dtype, non_finite.SELECTIONS[selection], every=11) > 20


@deep
@pytest.mark.parametrize(("dtype", "selection"), non_finite.COMBINATIONS["all"])
@pytest.mark.parametrize("device", DEVICES)
def test_no_device_takes_one_at_any_offset(device, dtype, selection):
    assert non_finite.check(require(device), dtype, non_finite.SELECTIONS[selection]) == 195
