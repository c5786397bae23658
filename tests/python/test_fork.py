"""A forked child has no use of its parent's pager, and does it no harm."""

from __future__ import annotations

import subprocess
import sys

import fork_children
import pytest
from test_isa_tiers import environment


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forks")
    subprocess.run(
        [sys.executable, fork_children.__file__, str(folder)],
        check=True,
        timeout=300,
        env=environment() | {"OMP_NUM_THREADS": "2"},
    )
    return {path.name: path.read_text() for path in (folder / "results").iterdir()}


@pytest.mark.parametrize("program", fork_children.PROGRAMS)
def test_a_forked_child_is_refused_ends_and_changes_nothing(program, results):
    assert results[program] == "sound"
