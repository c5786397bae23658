"""What users import: how many names, and that they are found, typed, explained and pickled."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import subprocess
import sys
import typing
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import kvpager
import kvpager.errors
from kvpager._runtime.scheduling.options import DEFAULTS, GenerationOptions
from kvpager.config import PagerConfig, PagerOptions


def test_about_thirty_names_are_enough() -> None:
    names = [name for name in kvpager.__all__ if not name.startswith("_")]
    assert len(names) <= 34
    assert all(inspect.getdoc(getattr(kvpager, name)) for name in names)


@pytest.mark.parametrize("name", sorted(kvpager._SUBMODULES))
def test_every_public_submodule_says_what_it_is(name: str) -> None:
    module = getattr(kvpager, name)
    assert module is importlib.import_module(f"kvpager.{name}")
    assert module.__doc__
    assert f"`kvpager.{name}`" in (kvpager.__doc__ or "") or name in ("config", "sampling")


def functions_of(module: ModuleType) -> dict[str, FunctionType]:
    """Public functions, and methods of public classes, by name."""
    found: dict[str, FunctionType] = {}
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        members = vars(value) if inspect.isclass(value) else {"": value}
        for member, own in members.items():
            function = getattr(own, "__func__", own)
            if isinstance(function, FunctionType) and not member.startswith("_"):
                found[f"{name}.{member}"] = function
    return found


@pytest.mark.parametrize("name", ["", *sorted(kvpager._SUBMODULES)])
def test_a_function_with_several_arguments_explains_each(name: str) -> None:
    """Or says where they are explained."""
    module = getattr(kvpager, name) if name else kvpager
    for where, function in functions_of(module).items():
        arguments = inspect.signature(function).parameters.keys() - {"self", "cls"}
        told = inspect.getdoc(function) or ""
        missing = [each for each in arguments if each not in told]
        if len(arguments) > 1 and "See `" not in told:
            assert not missing, f"{module.__name__}.{where}"


def test_a_name_that_does_not_exist_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Enigne'"):
        kvpager.Enigne  # noqa: B018


def test_importing_kvpager_imports_neither_torch_nor_numpy() -> None:
    code = "import kvpager, sys; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", kvpager.errors.__all__)
def test_an_error_survives_another_process(name: str) -> None:
    kind = getattr(kvpager.errors, name)
    needed = {
        "ContextLengthError": {"prompt_tokens": 5, "limit": 4},
        "PrefixMismatchError": {"position": 3},
        "RestoreNotConsumedError": {"position": 3},
    }
    error = kind("a message", **needed.get(name, {"report": 5} if "Verification" in name else {}))
    error.add_to_it = [1, 2]
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert str(again) == "a message"
        assert vars(again) == vars(error)
    assert kind.__module__ == "kvpager.errors"


def test_the_typed_options_are_those_of_the_configuration() -> None:
    typed = typing.get_type_hints(PagerOptions)
    assert list(typed) == [option.name for option in PagerConfig.options()]
    own = typing.get_type_hints(PagerConfig)
    for name, kind in typed.items():
        wider = set(typing.get_args(kind)) or {kind}
        assert (set(typing.get_args(own[name])) or {own[name]}) <= wider, name


def test_the_typed_options_of_a_generation_have_defaults() -> None:
    assert set(GenerationOptions.__annotations__) == set(DEFAULTS)


def test_help_explains_every_option() -> None:
    shown = inspect.getdoc(PagerConfig) or ""
    assert all(f"    {option.name}: " in shown for option in PagerConfig.options())
    assert max(map(len, shown.splitlines())) <= 100


MISTAKES = {
    "kvpager.Enigne": "attr-defined",
    "kvpager.Engine(model, pool_token=512)": "call-arg",
    'kvpager.PagerConfig(policy="qq")': "arg-type",
    'kvpager.PagerConfig(exact="some")': "arg-type",
    "kvpager.Engine(model).session().generate(3, temprature=1.0)": "call-overload",
    'kvpager.Engine(model).session().generate(3, stream="text")': "call-overload",
    'kvpager.Engine(model).session().generate(3, stream="tokens").text': "attr-defined",
    "kvpager.Engine(model).session().generate(3).finish": "attr-defined",
}


def test_type_checkers_find_misspelt_names_and_options(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    lines = [*MISTAKES, 'kvpager.Engine(model, pool_tokens="auto").session().chat("x").text']
    program.write_text(
        "import kvpager\nimport torch\n\nmodel = torch.nn.Module()\n\n" + "\n".join(lines) + "\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "mypy", "--config-file=", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    found = {
        int(line.split(":")[1]): line.rpartition("[")[2].rstrip("]")
        for line in done.stdout.splitlines()
        if ": error:" in line
    }
    assert found == {i + 6: code for i, code in enumerate(MISTAKES.values())}, done.stdout


PACKAGE = Path(kvpager.__file__).parent
PRIVATE = {"_model", "_runtime", "_support"}


def test_the_top_of_the_package_is_what_users_import_and_three_private_packages() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "."], cwd=PACKAGE, capture_output=True, text=True, check=False
    ).stdout.split()
    if not tracked:
        pytest.skip("not in a git checkout")
    entries = {Path(file).parts[0] for file in tracked}
    assert len(entries) <= 30
    assert {name for name in entries if name.startswith("_") and not name.startswith("__")} == (
        PRIVATE | {"_core.pyi"}
    )


def test_every_module_has_its_layer() -> None:
    settings = Path(__file__).parents[2] / "pyproject.toml"
    tomllib = pytest.importorskip("tomllib")
    contracts = tomllib.loads(settings.read_text())["tool"]["importlinter"]["contracts"]
    layers = [name.strip() for line in contracts[0]["layers"] for name in line.split("|")]
    assert len(set(layers)) == len(layers)
    for file in PACKAGE.rglob("*.py"):
        module = ".".join(("kvpager", *file.relative_to(PACKAGE).with_suffix("").parts))
        if file.name not in ("__init__.py", "__main__.py"):
            assert any(f"{module}.".startswith(f"{layer}.") for layer in layers), module
