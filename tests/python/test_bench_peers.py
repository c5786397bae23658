"""Peers in environments of their own: a tiny one stands in for them, made of a wheel, offline."""

from __future__ import annotations

import os
import sys
import zipfile
from dataclasses import replace

import pytest

from kvpager_bench.peers import environments
from kvpager_bench.peers.environments import Missing, Peer, PeerError
from kvpager_bench.peers.recipes import PEERS, Recipe, Step


def wheel(folder, version="1.0"):
    """A package `tinypeer` as pip installs it."""
    path = folder / f"tinypeer-{version}-py3-none-any.whl"
    info = f"tinypeer-{version}.dist-info"
    files = {
        "tinypeer.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: tinypeer\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in [*files.items(), (f"{info}/RECORD", record)]:
            archive.writestr(name, text)
    return path


def tiny_recipe(package, **changes):
    values = {
        "name": "tiny",
        "version": "1.0",
        "title": "Tiny 1.0",
        "gives": "nothing",
        "cost": "seconds",
        "steps": (
            Step(
                ("--no-index", "a-package-that-is-not-there"),
                fallback=("--no-index", str(package)),
            ),
        ),
        "modules": ("tinypeer",),
        "variables": {"TINY_PEER": "told"},
    }
    return Recipe(**{**values, **changes})


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder of peers with the tiny one in it, its recipe, and what was said meanwhile."""
    folder = tmp_path_factory.mktemp("peers")
    recipe = tiny_recipe(wheel(tmp_path_factory.mktemp("wheels")))
    said = []
    # A module of that name where one stands must not be taken for the peer's.
    (elsewhere := tmp_path_factory.mktemp("elsewhere")).joinpath("tinypeer.py").write_text("1 / 0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPAGER_BENCH_PEERS", str(folder))
        patch.setattr(environments, "PEERS", {"tiny": recipe})
        patch.chdir(elsewhere)
        environments.install("tiny", said.append)
    return folder, recipe, said


@pytest.fixture
def peers(installed, monkeypatch):
    """Where the tiny peer is installed; its recipe."""
    folder, recipe, _ = installed
    monkeypatch.setenv("KVPAGER_BENCH_PEERS", str(folder))
    monkeypatch.setattr(environments, "PEERS", {"tiny": recipe})
    return recipe


@pytest.fixture
def no_peers(tmp_path, monkeypatch):
    """A folder of peers without any; the tiny one's recipe."""
    recipe = tiny_recipe(wheel(tmp_path))
    monkeypatch.setenv("KVPAGER_BENCH_PEERS", str(tmp_path / "peers"))
    monkeypatch.setattr(environments, "PEERS", {"tiny": recipe})
    return recipe


def script(tmp_path, text):
    path = tmp_path / "tiny_script.py"
    path.write_text(text, encoding="utf-8")
    return path


def run(tmp_path, text, task=None, timeout=60.0):
    peer = environments.find("tiny")
    assert isinstance(peer, Peer)
    return environments.run(peer, script(tmp_path, text), task or {}, timeout)


class TestInstalling:
    def test_a_peer_is_found_with_its_versions_in_an_environment_of_its_own(self, peers):
        peer = environments.find("tiny")
        assert isinstance(peer, Peer)
        assert (peer.title, peer.packages["tinypeer"]) == ("Tiny 1.0", "1.0")
        assert peer.python.is_relative_to(environments.root())
        assert "torch" not in peer.packages

    def test_the_fallback_is_installed_where_the_first_choice_is_not_to_be_had(self, installed):
        said = "\n".join(installed[2])
        assert "a-package-that-is-not-there" in said
        assert "instead" in said

    def test_installing_again_changes_nothing(self, peers):
        stamp = environments.find("tiny").folder / "installed.json"
        before = stamp.stat().st_mtime_ns
        said = []
        environments.install("tiny", said.append)
        assert stamp.stat().st_mtime_ns == before
        assert "is installed" in said[0]

    def test_a_peer_nobody_installed_is_missing_with_the_command_that_installs_it(self, no_peers):
        found = environments.find("tiny")
        assert isinstance(found, Missing)
        assert "not installed" in found.reason
        assert "kvpager bench peers install tiny" in found.reason
        with pytest.raises(PeerError, match="not installed"):
            environments.call("tiny", "anything", {})
        with pytest.raises(ValueError, match="tiny"):
            environments.find("huge")

    def test_an_interrupted_installation_is_begun_again(self, no_peers, monkeypatch):
        folder = environments.root() / no_peers.folder
        left = folder / "lib" / "left"

        def interrupted(*_):
            left.parent.mkdir(parents=True)
            left.touch()
            raise KeyboardInterrupt

        monkeypatch.setattr(environments, "_make", interrupted)
        with pytest.raises(KeyboardInterrupt):
            environments.install("tiny", list)
        assert "not finished" in environments.find("tiny").reason

        def whole(recipe, folder, *_):
            assert not left.exists()
            (folder / "bin").mkdir(parents=True)
            (folder / "bin" / "python").symlink_to(sys.executable)

        monkeypatch.setattr(environments, "_make", whole)
        monkeypatch.setattr(environments, "_packages", lambda _: {"tinypeer": "1.0"})
        assert isinstance(environments.install("tiny", list), Peer)

    def test_a_failed_installation_leaves_its_last_lines_and_no_folder(
        self, no_peers, tmp_path, monkeypatch
    ):
        broken = tmp_path / "python"
        broken.write_text("#!/bin/sh\necho no room left >&2\nexit 3\n", encoding="utf-8")
        broken.chmod(0o755)
        monkeypatch.setattr(environments.sys, "executable", str(broken))
        with pytest.raises(PeerError, match="no room left"):
            environments.install("tiny", list)
        assert not (environments.root() / no_peers.folder).exists()
        found = environments.find("tiny")
        assert isinstance(found, Missing)
        assert "its installation failed" in found.reason
        assert "no room left" in found.reason

    def test_a_peer_made_in_another_way_is_not_taken(self, peers, monkeypatch):
        other = replace(peers, steps=(Step(("another",)),))
        monkeypatch.setattr(environments, "PEERS", {"tiny": other})
        found = environments.find("tiny")
        assert isinstance(found, Missing)
        assert "in another way" in found.reason

    def test_a_removed_peer_is_missing_with_all_that_lay_beside_it(self, no_peers):
        folder = environments.root() / no_peers.folder
        folder.mkdir(parents=True)
        folder.with_name(f"{folder.name}.log").write_text("said")
        environments.remove("tiny")
        environments.remove("tiny")
        assert list(environments.root().iterdir()) == []


class TestCalling:
    def test_a_task_goes_in_and_the_last_line_comes_out(self, peers, tmp_path):
        text = (
            "import json, sys, tinypeer\n"
            "task = json.load(sys.stdin)\n"
            "print('for people')\n"
            "print(json.dumps({'sum': sum(task['terms']), 'version': tinypeer.VERSION}))\n"
        )
        assert run(tmp_path, text, {"terms": [1, 2]}) == {"sum": 3, "version": "1.0"}

    def test_nothing_of_ours_is_in_its_way(self, peers, tmp_path, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", str(environments.SCRIPTS.parents[2]))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        text = (
            "import importlib.util, json, os\n"
            "found = [name for name in ('kvpager', 'kvpager_bench', 'torch')\n"
            "         if importlib.util.find_spec(name)]\n"
            "print(json.dumps({'found': found, 'told': os.environ['TINY_PEER'],\n"
            "                  'threads': os.environ.get('OMP_NUM_THREADS')}))\n"
        )
        assert run(tmp_path, text) == {"found": [], "told": "told", "threads": None}

    def test_a_script_that_fails_is_quoted(self, peers, tmp_path):
        with pytest.raises(PeerError, match=r"Tiny 1.0, tiny_script: exit code 1(.|\n)*no such x"):
            run(
                tmp_path, "raise SystemExit(print('no such x', file=__import__('sys').stderr) or 1)"
            )

    @pytest.mark.parametrize("answer", ["", "print('done')", "print('[1]')"])
    def test_an_answer_that_is_no_object_is_refused(self, peers, tmp_path, answer):
        with pytest.raises(PeerError, match="expected a JSON object"):
            run(tmp_path, answer)

    def test_a_script_that_does_not_answer_is_stopped(self, peers, tmp_path):
        mark = tmp_path / "pid"
        text = (
            "import os, pathlib, sys, time\n"
            f"pathlib.Path({str(mark)!r}).write_text(str(os.getpid()))\n"
            "print('still here', file=sys.stderr)\n"
            "time.sleep(600)\n"
        )
        with pytest.raises(PeerError, match=r"no answer within 5 s(.|\n)*still here"):
            run(tmp_path, text, timeout=5)
        with pytest.raises(ProcessLookupError):
            os.kill(int(mark.read_text()), 0)


class TestRecipes:
    def test_every_peer_is_pinned_and_says_what_it_costs(self):
        for name, recipe in PEERS.items():
            assert recipe.name == name
            packages = [package for step in recipe.steps for package in step.packages]
            assert any(package.endswith(f"=={recipe.version}") for package in packages)
            assert recipe.version in recipe.title
            assert recipe.cost

    def test_scripts_import_nothing_of_ours(self):
        scripts = sorted(environments.SCRIPTS.glob("*.py"))
        assert scripts
        for path in scripts:
            text = path.read_text(encoding="utf-8")
            assert "import kvpager" not in text
            assert "from kvpager" not in text
