"""kvpager as a user has it: a wheel in an environment of its own, with no checkout beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "model"))
import text_models

from documents import MODEL
from kvpager._model.seam.causal_lm import cache_argument


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and with the packages that this interpreter has.

    Attributes:
        python: its interpreter.
        environment: of its processes: no network, and a cache of models with MODEL in it.
        cache_argument: the name by which its transformers takes a cache.
    """

    python: Path
    environment: Mapping[str, str]
    cache_argument: str

    def run(self, *command: str, cwd: Path) -> str:
        """What a command prints; fails with all that it said where its exit code is not 0."""
        done = subprocess.run(
            command, cwd=cwd, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Installed:
    wheel = os.environ.get("KVPAGER_WHEEL")
    if wheel is None:
        pytest.fail("KVPAGER_WHEEL is not set; `make pytest-installed` builds a wheel and sets it")
    home = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*pip, "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    own = next(home.glob("lib/python*/site-packages"))
    others = [path for path in sys.path if path.endswith("-packages")]
    (own / "others.pth").write_text("\n".join(others) + "\n", encoding="utf-8")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    hub = tmp_path_factory.mktemp("hub")
    keep(hub, MODEL)
    environment |= {
        "PATH": f"{python.parent}:{environment['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "2",  # of which a page has outputs
        "HF_HUB_CACHE": str(hub),
        "XDG_DATA_HOME": str(tmp_path_factory.mktemp("data")),
        "KVPAGER_CACHE": str(tmp_path_factory.mktemp("cache")),
    }
    found = Installed(python, environment, str(cache_argument(text_models.model())))
    where = found.run(str(python), "-c", "import kvpager; print(kvpager.__file__)", cwd=hub)
    assert where.startswith(str(home))
    return found


def keep(hub: Path, name: str) -> None:
    """Puts a small model with random weights into a cache of the hub, under a name."""
    kept = hub / f"models--{name.replace('/', '--')}"
    folder = kept / "snapshots" / ("a" * 40)
    text_models.model().save_pretrained(folder)
    text_models.byte_level().save_pretrained(folder)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("a" * 40, encoding="ascii")
