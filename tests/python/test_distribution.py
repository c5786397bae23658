"""What a wheel and an sdist hold and say: the package, what builds it, the model it ships."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

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


def test_the_model_of_a_wheel_is_the_trained_one_rounded_to_bfloat16(tmp_path):
    import torch
    from safetensors.torch import load_file

    from kvpager.needles import shipped_model_path

    shipped = load_file(shipped_model_path() / "model.safetensors")
    trained = load_file(shipped_model_path("tiny-retriever") / "model.safetensors")
    assert shipped.keys() == trained.keys()
    for key, weight in trained.items():
        assert shipped[key].dtype == torch.bfloat16
        assert torch.equal(shipped[key], weight.to(torch.bfloat16))
    # What CMake installs into the package.
    rules = (ROOT / "csrc" / "bindings" / "CMakeLists.txt").read_text(encoding="utf-8")
    assert shipped_model_path().name in re.findall(r"foreach\(model (.*)\)", rules)[0].split()


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
