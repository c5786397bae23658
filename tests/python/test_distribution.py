"""What a wheel and an sdist hold and say: the package, what builds it, the model it ships."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from kvpager.cli.needles import shipped_model_path

backend = pytest.importorskip("scikit_build_core.build")
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(not (ROOT / "pyproject.toml").is_file(), reason="no checkout"),
    pytest.mark.filterwarnings("ignore"),
]


def package_files() -> set[PurePosixPath]:
    return {
        PurePosixPath(path.relative_to(ROOT / "python"))
        for path in (ROOT / "python" / "kvpager").rglob("*")
        if path.suffix in (".py", ".pyi", ".typed")
    }


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_a_wheel_has_the_package_and_no_benchmark(tmp_path):
    name = backend.build_wheel(str(tmp_path), {"wheel.cmake": "false"})  # Python files alone
    with zipfile.ZipFile(tmp_path / name) as wheel:
        files = {PurePosixPath(file) for file in wheel.namelist()}
    assert {file.parts[0] for file in files if ".dist-info" not in file.parts[0]} == {"kvpager"}
    assert package_files() <= files


def test_the_readme_of_a_package_index_points_at_nothing_beside_it(tmp_path):
    name = backend.prepare_metadata_for_build_wheel(str(tmp_path))
    text = (tmp_path / name / "METADATA").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 10
    assert [link for link in links if not link.startswith("https://")] == []
    blob = "https://github.com/kvpager/kvpager/blob/main/"
    raw = "https://raw.githubusercontent.com/kvpager/kvpager/main/"
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert pictures
    assert all(picture.startswith(raw) for picture in pictures)
    ours = [link.removeprefix(blob).removeprefix(raw) for link in links if "kvpager/main" in link]
    ours += [link.removeprefix(blob) for link in links if link.startswith(blob)]
    assert [file for file in ours if not (ROOT / file.partition("#")[0]).exists()] == []


def test_the_project_names_where_its_source_documents_and_issues_are(tmp_path):
    name = backend.prepare_metadata_for_build_wheel(str(tmp_path))
    text = (tmp_path / name / "METADATA").read_text(encoding="utf-8")
    found = dict(re.findall(r"^Project-URL: (\w+), (https://\S+)$", text, re.MULTILINE))
    assert set(found) == {"Documentation", "Source", "Issues", "Changelog"}


def test_the_weights_of_every_tiny_model_have_two_bytes():
    import torch
    from safetensors.torch import load_file

    files = sorted((ROOT / "models").glob("*/model.safetensors"))
    assert len(files) == 4
    for file in files:
        assert {weight.dtype for weight in load_file(file).values()} == {torch.bfloat16}, file


def test_a_wheel_has_this_model_and_no_other():
    rules = (ROOT / "csrc" / "bindings" / "CMakeLists.txt").read_text(encoding="utf-8")
    assert re.findall(r"set\(shipped (.*)\)", rules) == [shipped_model_path().name]
    assert rules.count("DIRECTORY") == 1
    for file in shipped_model_path().iterdir():
        assert f'PATTERN "*{file.suffix}"' in rules, file.name


def test_python_m_kvpager_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "kvpager", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("kvpager ")


def test_an_sdist_has_what_builds_the_package_and_nothing_else(tmp_path):
    name = backend.build_sdist(str(tmp_path))
    with tarfile.open(tmp_path / name) as sdist:
        files = {PurePosixPath(*PurePosixPath(file).parts[1:]) for file in sdist.getnames()}
    assert {file.parts[0] for file in files} == {
        "CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "csrc", "pyproject.toml", "python",
        "tests",
    }  # fmt: skip
    assert {file.parts[1] for file in files if file.parts[0] == "tests"} == {"cpp", "shim"}
    assert {PurePosixPath("python", file) for file in package_files()} <= files


class TestCudaIsBuiltOnRequestAlone:
    @pytest.fixture
    def configured(self, tmp_path, monkeypatch):
        """Configures a build where an nvcc is found, which notes that it ran; what cmake says."""
        nvcc = tmp_path / "bin" / "nvcc"
        nvcc.parent.mkdir()
        nvcc.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n")
        nvcc.chmod(0o755)
        monkeypatch.setenv("PATH", f"{nvcc.parent}:{os.environ['PATH']}")
        monkeypatch.delenv("CUDACXX", raising=False)

        def run(*options):
            parts = [f"-DKVPAGER_{part}=OFF" for part in ("PYTHON", "TESTS", "INSTALL")]
            command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path / "build"), *parts, *options]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            said = " ".join((done.stdout + done.stderr).split())
            return done.returncode, said, (tmp_path / "ran").exists()

        return run

    def test_a_compiler_that_is_there_is_left_alone_and_the_build_says_how_to_ask(self, configured):
        code, said, ran = configured()
        assert (code, ran) == (0, False)
        assert "without its CUDA plug-in, which -DKVPAGER_CUDA=ON builds" in said

    def test_asked_for_it_is_built_or_the_build_fails(self, configured):
        code, said, ran = configured("-DKVPAGER_CUDA=ON")
        assert (code, ran) == (1, True)
        assert "KVPAGER_CUDA=ON: no CUDA compiler that works" in said

    @pytest.mark.parametrize(("given", "passed"), [(None, None), ("ON", "ON"), ("OFF", None)])
    def test_pip_passes_the_variable_on(self, monkeypatch, given, passed):
        monkeypatch.delenv("KVPAGER_CUDA", raising=False)
        if given is not None:
            monkeypatch.setenv("KVPAGER_CUDA", given)
        from scikit_build_core.settings.skbuild_read_settings import SettingsReader

        settings = SettingsReader.from_file(ROOT / "pyproject.toml", {}).settings
        assert settings.cmake.define.get("KVPAGER_CUDA") == passed
