"""Options of a table (_support/option_table.py) as flags, environment variables and YAML keys.

An option is taken from the command line, else from the environment, else from a file of settings
where the command reads one, else it has the command's default.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvpager._support.option_table import Option
from kvpager.cli.failure import CliError, UsageError
from kvpager.cli.options import read_text
from kvpager.cli.parser import option, suggestion
from kvpager.errors import InvalidArgumentError

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_ONE_OF = "one of "  # of an option that is one of some words
_DEST = "option_"  # keeps these apart from a command's own arguments
_OPTION = re.compile(r"\b(?:PagerConfig|TopK|Window|ServerSettings)\.(\w+)")


def flag_of(name: str) -> str:
    """`--pool-tokens` of `pool_tokens`."""
    return "--" + name.replace("_", "-")


def destination(name: str) -> str:
    """The name of an option's value among the parsed arguments."""
    return _DEST + name


def add_options(
    group: argparse._ActionsContainer,
    options: Iterable[Option],
    defaults: Mapping[str, object],
    aliases: Mapping[str, str],
) -> None:
    """Adds a flag for each option; its value is None where it is not given.

    Args:
        group: to add to.
        options: of a table.
        defaults: of the command, by name; they go before the table's own in help texts.
        aliases: a further flag by name.
    """
    for one in options:
        default = defaults.get(one.name, one.default)
        accepts = one.accepts
        if "tuple[" in one.type and "int" in one.type:
            accepts += f", such as {'0:500,900:1000' if 'tuple[tuple' in one.type else '4,16'}"
        if default is not dataclasses.MISSING:
            accepts += f"; default {'none' if default in (None, ()) else default}"
        about = f"{one.help} ({accepts}) [{_variable_of(one.name)}]".replace("%", "%%")
        words = f"{flag_of(one.name)} {aliases.get(one.name, '')}"
        more: dict[str, Any] = {"dest": destination(one.name)}
        if one.type == "bool":
            more["action"] = argparse.BooleanOptionalAction
        else:
            words += f" {_metavar(one)}"
        option(group, words, about, **more)


def _metavar(one: Option) -> str:
    """What stands for the value: its words, a file, a folder, or the last part of its name."""
    if one.accepts.startswith(_ONE_OF):
        return "{" + one.accepts.removeprefix(_ONE_OF).replace("'", "").replace(" ", "") + "}"
    for kind, word in (("folder", "DIR"), ("file", "FILE")):
        if kind in one.accepts or one.help.startswith(kind):
            return word
    return one.name.rsplit("_", 1)[-1].upper()


def _variable_of(name: str) -> str:
    """`KVPAGER_POOL_TOKENS` of `pool_tokens`."""
    return "KVPAGER_" + name.upper()


def found(args: argparse.Namespace, name: str) -> tuple[Any, str]:
    """What was given for an option and where, in words; (None, its flag) if nothing was."""
    flag, variable = flag_of(name), _variable_of(name)
    settings: Mapping[str, Any] = getattr(args, "settings_file", {})
    if (value := getattr(args, destination(name), None)) is not None:
        return value, flag
    if (value := os.environ.get(variable)) is not None:
        return value, variable
    if name in settings:
        return settings[name], f"{name} in --config {args.config}"
    return None, flag


def given(args: argparse.Namespace, options: Iterable[Option]) -> dict[str, Any]:
    """The values of those options that were given, by name; text is parsed."""
    return {
        one.name: _parsed(one, value)
        for one in options
        if (value := found(args, one.name)[0]) is not None
    }


def _parsed(one: Option, value: Any) -> Any:
    """Text to the option's type; what does not parse is left for the table to refuse by name."""
    if not isinstance(value, str):
        return value
    text, kind = value, one.type
    if text.lower() == "none" and "None" in kind:
        return None
    if ("bool" in kind or "False" in kind) and text.lower() in (*_TRUE, *_FALSE):
        return text.lower() in _TRUE
    if "tuple[int" in kind and re.fullmatch(r"\d+(,\d+)*", text):
        return tuple(map(int, text.split(",")))
    if kind.startswith("tuple[str"):
        return tuple(part for part in text.split(",") if part)
    if kind.startswith("tuple"):  # ranges such as 0:64,128:256
        pairs = [tuple(part.split(":")) for part in text.split(",")]
        whole = re.fullmatch(r"\d+:\d+(,\d+:\d+)*", text)
        return tuple(tuple(map(int, pair)) for pair in pairs) if whole else pairs
    try:
        return {"int": int, "float": float}[kind.split()[0]](text)
    except (KeyError, ValueError):
        return text


@contextmanager
def refusals(args: argparse.Namespace) -> Iterator[None]:
    """Turns a table's refusal into a UsageError that names where the option was given."""
    try:
        yield
    except InvalidArgumentError as error:
        text = _OPTION.sub(lambda match: found(args, match[1])[1], str(error))
        raise UsageError(text) from error


def with_flags(message: str) -> str:
    """A message that names options of a table, naming those of the command line."""
    return _OPTION.sub(lambda match: flag_of(match[1]), message)


def read_settings(path: str, known: Sequence[str]) -> dict[str, Any]:
    """The settings of a YAML file: a mapping from names of options to values.

    Raises:
        CliError: it cannot be read, or is no such mapping.
        UsageError: it names an unknown option.
    """
    import yaml

    text = read_text("--config", path)
    try:
        values = yaml.load(text, _loader())
    except (RecursionError, yaml.YAMLError) as error:
        raise CliError(f"--config {path}: no YAML ({error})") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise CliError(f"--config {path}: expected a mapping such as `port: 8000`")
    settings = {str(name).replace("-", "_"): value for name, value in values.items()}
    for name in settings:
        if name not in known:
            raise UsageError(f"--config {path}: unknown {name!r}{suggestion(name, known)}")
    return {name: value for name, value in settings.items() if value is not None}


def _loader() -> Any:
    """YAML's safe loader, without its bools: options say for themselves what on and off are."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:bool"]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    return Loader
