"""Sources of engines, which are read and not imported, since they need a GPU's packages.

Those of the environment, and those in the folders that KVPAGER_VLLM_SOURCES and its like name.
"""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path

import pytest


def found(package: str) -> list[Path]:
    """Folders of a package."""
    spec = importlib.util.find_spec(package)
    here = [] if spec is None or spec.origin is None else [Path(spec.origin).parent]
    variable = os.environ.get(f"KVPAGER_{package.upper()}_SOURCES", "")
    return [*here, *(Path(folder) / package for folder in variable.split(os.pathsep) if folder)]


def given(request: pytest.FixtureRequest, package: str, target: str) -> Path:
    """The folder that a fixture's parameter is; skips where there is none."""
    if request.param is None:
        variable = f"KVPAGER_{package.upper()}_SOURCES"
        pytest.skip(f"{package} is not installed, and {variable} names no sources; make {target}")
    folder: Path = request.param
    return folder


def module(package: Path, name: str) -> Path:
    """The file of a module, such as `vllm.v1.kv_offload.base`."""
    place = package.parent.joinpath(*name.split("."))
    if place.is_dir():
        return place / "__init__.py"
    return next(path for end in (".py", ".pyi") if (path := place.with_suffix(end)).exists())


def parsed(path: Path) -> dict[str, ast.stmt]:
    """What a module defines or imports, by name."""
    there: dict[str, ast.stmt] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            there[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            there |= {alias.asname or alias.name: node for alias in node.names}
    return there


def methods(path: Path, name: str) -> dict[str, ast.FunctionDef]:
    """Methods of a class."""
    node = parsed(path)[name]
    assert isinstance(node, ast.ClassDef)
    return {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}


def fields(path: Path, name: str) -> set[str]:
    """Names of a class's annotated fields."""
    node = parsed(path)[name]
    assert isinstance(node, ast.ClassDef)
    return {one.target.id for one in node.body if isinstance(one, ast.AnnAssign)}  # type: ignore[union-attr]


def names(function: ast.FunctionDef) -> list[str]:
    """Names of a function's arguments."""
    return [argument.arg for argument in function.args.args]


def is_abstract(function: ast.FunctionDef) -> bool:
    """Whether a method is decorated as abstract."""
    return any(ast.unparse(one) == "abstractmethod" for one in function.decorator_list)
