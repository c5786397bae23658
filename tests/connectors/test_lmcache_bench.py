"""`lmcache bench l2` with kvpager's adapter, alone and inside LMCache's fault-injecting one."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("lmcache") is None:
    pytest.skip("LMCache is not installed; make test-lmcache-sglang", allow_module_level=True)

BENCH = "import sys; from lmcache.cli.main import main; sys.exit(main())"
KEYS, ROUNDS = 8, 2


def adapter(folder: Path) -> dict[str, Any]:
    return {
        "type": "plugin",
        "module_path": "kvpager.connectors.lmcache",
        "class_name": "KvpagerL2Adapter",
        "adapter_params": {
            "path": str(folder),
            "byte_budget": "1GiB",
            "models": {"bench-model": {"weights": "none"}},
        },
    }


def bench(adapter: dict[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
    command = ["bench", "l2", "--l2-adapter", json.dumps(adapter), "--num-keys", str(KEYS)]
    command += ["--in-flight", "2", "--rounds", str(ROUNDS), "--data-size-kb", "64"]
    return subprocess.run(
        [sys.executable, "-c", BENCH, *command, "--lookup-max-hit-rate", "0.5", *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def counts(text: str, what: str) -> list[int]:
    return [int(number) for number in re.findall(rf"{what}=(\d+)/{2 * KEYS}", text)]


def test_all_is_stored_found_and_loaded_with_verified_contents(tmp_path):
    done = bench(adapter(tmp_path), "--no-skip-verify")
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(counts(done.stdout, "found")) == {KEYS}
    assert set(counts(done.stdout, "loaded")) == {2 * KEYS}


def test_inside_the_fault_injecting_adapter_only_what_it_drops_is_not_loaded(tmp_path):
    faulty = {"type": "fault_inject", "gap_indices": [3], "inner": adapter(tmp_path)}
    done = bench(faulty)
    assert set(counts(done.stdout, "loaded")) == {2 * (KEYS - 1)}, done.stdout + done.stderr
