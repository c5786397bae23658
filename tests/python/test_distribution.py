"""What a wheel and an sdist hold: the package, what builds it, the models it ships."""

from __future__ import annotations

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


def test_an_sdist_has_what_builds_the_package_and_nothing_else(tmp_path):
    name = backend.build_sdist(str(tmp_path))
    with tarfile.open(tmp_path / name) as sdist:
        files = {PurePosixPath(*PurePosixPath(file).parts[1:]) for file in sdist.getnames()}
    assert {file.parts[0] for file in files} == {
        "CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "csrc", "models", "pyproject.toml",
        "python", "tests",
    }  # fmt: skip
    assert {file.parts[1] for file in files if file.parts[0] == "models"} == {
        "tiny-retriever",
        "tiny-two-hop",
    }
    assert {file.parts[1] for file in files if file.parts[0] == "tests"} == {"cpp", "shim"}
    assert {PurePosixPath("python", file) for file in package_files()} <= files
