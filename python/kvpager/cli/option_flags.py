"""Options of a table (`kvpager.option_table`) as flags, environment variables and YAML keys.

An option is taken from the command line, else from the environment, else from a file of settings
where the command reads one, else it has the command's default.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpager.cli.failure import CliError, UsageError
from kvpager.cli.parser import suggestion
from kvpager.option_table import Option

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_ONE_OF = "one of "  # of an option that is one of some words
_DEST = "option_"  # keeps these apart from a command's own arguments


def flag_of(name: str) -> str:
    """`--pool-tokens` of `pool_tokens`."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """`KVPAGER_POOL_TOKENS` of `pool_tokens`."""
    return "KVPAGER_" + name.upper()


def destination(name: str) -> str:
    """The name of an option's value among the parsed arguments."""
    return _DEST + name


def add_options(
    group: argparse._ActionsContainer,
    options: Iterable[Option],
    defaults: Mapping[str, object],
    aliases: Mapping[str, Sequence[str]],
) -> None:
    """Adds a flag for each option; its value is None where it is not given.

    Args:
        group: to add to.
        options: of a table.
        defaults: of the command, by name; they go before the table's own in help texts.
        aliases: further flags by name.
    """
    for option in options:
        default = defaults.get(option.name, option.default)
        shown = "" if default is dataclasses.MISSING else f"; default {_shown(default)}"
        text = f"{option.help} ({_accepts(option)}{shown}) [{variable_of(option.name)}]"
        kind: dict[str, Any] = {"metavar": _metavar(option)}
        if option.type == "bool":
            kind = {"action": argparse.BooleanOptionalAction}
        group.add_argument(
            flag_of(option.name),
            *aliases.get(option.name, ()),
            dest=destination(option.name),
            default=None,
            help=text.replace("%", "%%"),
            **kind,
        )


def _metavar(option: Option) -> str:
    """What stands for the value: its words, a file, a folder, or the last part of its name."""
    if option.accepts.startswith(_ONE_OF):
        return "{" + option.accepts.removeprefix(_ONE_OF).replace("'", "").replace(" ", "") + "}"
    for kind, said in (("folder", "DIR"), ("file", "FILE")):
        if kind in option.accepts or option.help.startswith(kind):
            return said
    return option.name.rsplit("_", 1)[-1].upper()


def _accepts(option: Option) -> str:
    """What it accepts, as a command line spells it."""
    if option.type.startswith("tuple[tuple"):
        return f"{option.accepts}, such as 0:500,900:1000"
    if "tuple[int" in option.type:
        return f"{option.accepts}, such as 4,16"
    return option.accepts


def _shown(default: object) -> object:
    return "none" if default in (None, ()) else default


def given(args: argparse.Namespace, name: str) -> Any:
    """What was given for an option, text or a value of YAML; None if nothing was."""
    value = getattr(args, destination(name))
    if value is None:
        value = os.environ.get(variable_of(name))
    return getattr(args, "settings_file", {}).get(name) if value is None else value


def source_of(args: argparse.Namespace, name: str) -> str:
    """Where an option's value comes from, as messages name it: its flag, if none was given."""
    if getattr(args, destination(name), None) is None:
        if variable_of(name) in os.environ:
            return variable_of(name)
        if name in getattr(args, "settings_file", {}):
            return f"{name} in --config {args.config}"
    return flag_of(name)


def parsed(option: Option, value: Any) -> Any:
    """Text to the option's type; what does not parse is left for the table to refuse by name."""
    if not isinstance(value, str):
        return value
    text = value
    if text.lower() == "none" and "None" in option.type:
        return None
    if ("bool" in option.type or "False" in option.type) and text.lower() in (*_TRUE, *_FALSE):
        return text.lower() in _TRUE
    if "tuple[int" in option.type and re.fullmatch(r"\d+(,\d+)*", text):
        return tuple(map(int, text.split(",")))
    if option.type.startswith("tuple[str"):
        return tuple(part for part in text.split(",") if part)
    if option.type.startswith("tuple"):
        return [part.split(":") for part in text.split(",")] if not _ranges(text) else _ranges(text)
    for kind in (int, float):
        if option.type.startswith(kind.__name__):
            try:
                return kind(text)
            except ValueError:
                return text
    return text


def read_settings(path: str, known: Iterable[str]) -> dict[str, Any]:
    """The settings of a YAML file: a mapping from names of options to values.

    Raises:
        CliError: it cannot be read, or is no such mapping.
        UsageError: it names an unknown option.
    """
    import yaml

    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8-sig"), _loader())
    except OSError as error:
        raise CliError(f"--config {path}: {error.strerror}") from error
    except (UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise CliError(f"--config {path}: no YAML ({error})") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise CliError(f"--config {path}: expected a mapping such as `port: 8000`")
    names = list(known)
    settings = {str(name).replace("-", "_"): value for name, value in values.items()}
    for name in settings:
        if name not in names:
            raise UsageError(f"--config {path}: unknown {name!r}{suggestion(name, names)}")
    return {name: value for name, value in settings.items() if value is not None}


def _loader() -> Any:
    """YAML's safe loader, for which "off" is a word, as an option may say it."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:bool"]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    words = re.compile("true|True|TRUE|false|False|FALSE")
    Loader.add_implicit_resolver("tag:yaml.org,2002:bool", words, list("tTfF"))
    return Loader


def _ranges(text: str) -> tuple[tuple[int, int], ...]:
    """Of text such as 0:64,128:256; empty where it is none."""
    if not re.fullmatch(r"\d+:\d+(,\d+:\d+)*", text):
        return ()
    pairs = (part.split(":") for part in text.split(","))
    return tuple((int(start), int(stop)) for start, stop in pairs)
