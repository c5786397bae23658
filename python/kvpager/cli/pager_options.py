"""PagerConfig on the command line and in the environment, from its own definition."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvpager import _core
from kvpager.cli.failure import UsageError
from kvpager.cli.option_flags import add_options, destination, flag_of, given, parsed, source_of
from kvpager.cli.parser import suggestion
from kvpager.config import PagerConfig, Selection, TopK, Window
from kvpager.config_json import SELECTIONS, config_from_json, config_to_json
from kvpager.errors import InvalidArgumentError
from kvpager.option_table import Option

__all__ = [
    "ALIASES",
    "DEFAULTS",
    "add_pager_options",
    "config_from_json",
    "config_to_json",
    "pager_config",
]

# Of commands that run a user's model.
DEFAULTS: Mapping[str, object] = MappingProxyType({"pool_tokens": 2048, "chunks": 32})
ALIASES: Mapping[str, Sequence[str]] = MappingProxyType(
    {"pool_tokens": ["--pool"], "host_bytes": ["--host"]}
)


def add_pager_options(
    parser: argparse.ArgumentParser,
    defaults: Mapping[str, object],
    aliases: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Adds every option of PagerConfig and of its selections.

    Args:
        parser: to add to.
        defaults: of this command, by name; they go before PagerConfig's own.
        aliases: further flags by name, such as {"pool_tokens": ["--pool"]}.
    """
    group = parser.add_argument_group(
        "pager options",
        "An environment variable in [brackets] is read where an option is not given.",
    )
    group.add_argument(
        "--selection",
        dest=destination("selection"),
        choices=tuple(SELECTIONS),
        help="what a row attends to: everything, the best-scoring chunks, or a recent window "
        f"(default {defaults.get('selection', 'dense')}; topk where --chunks is given) "
        "[KVPAGER_SELECTION]",
    )
    group.add_argument(
        "--dense",
        dest=destination("selection"),
        action="store_const",
        const="dense",
        help="--selection dense",
    )
    add_options(group, _options(), defaults, aliases or {})
    parser.set_defaults(pager_defaults=dict(defaults))


def pager_option_names() -> list[str]:
    """Of every option, as a file of settings may have them."""
    return ["selection", *(option.name for option in _options())]


def pager_config(args: argparse.Namespace, *, auto_pool: bool = True) -> PagerConfig:
    """The configuration of a command line: its options, else the environment, else defaults.

    auto_pool: whether the command can leave the pool to the engine it makes.

    Raises:
        UsageError: a value that PagerConfig refuses, or a pool that the command cannot use.
    """
    chosen = {
        name: value for name in pager_option_names() if (value := given(args, name)) is not None
    }
    if "selection" not in chosen and "chunks" in chosen:
        chosen["selection"] = "topk"
    values = {**args.pager_defaults, **chosen}
    kind = str(values.pop("selection", "dense"))
    if kind not in SELECTIONS:
        raise UsageError(f"KVPAGER_SELECTION is {kind!r}; expected {', '.join(SELECTIONS)}")
    try:
        options = {option.name: option for option in _options()}
        values = {name: parsed(options[name], value) for name, value in values.items()}
        own = {field.name for field in dataclasses.fields(SELECTIONS[kind])}
        _refuse_unused(kind, own, chosen)
        _refuse_missing(kind, values)
        selection: Selection = SELECTIONS[kind](**_only(values, own))
        mine = {field.name for field in dataclasses.fields(PagerConfig)} - own
        config = PagerConfig(**_only(values, mine), selection=selection)
        config.resolve_rows("cuda" if config.device.startswith("cuda") else "cpu")
        _check_scorer(config.scorer_name)
        if config.pool_is_auto and not auto_pool:
            raise UsageError(
                f'{flag_of("pool_tokens")} is "auto"; expected a number of tokens: this command '
                "compares engines, and says what pool they had"
            )
    except InvalidArgumentError as error:
        raise UsageError(with_flags(str(error), args)) from error
    return config


def _options() -> list[Option]:
    """Every option but `selection`, which is a choice of three; one entry per name."""
    by_name: dict[str, Option] = {}
    for option in (*PagerConfig.options(), *TopK.options(), *Window.options()):
        by_name.setdefault(option.name, option)
    del by_name["selection"]
    return list(by_name.values())


def _refuse_unused(kind: str, own: set[str], chosen: Mapping[str, object]) -> None:
    pager = {field.name for field in dataclasses.fields(PagerConfig)}
    for name in chosen:
        if name not in own and name not in pager:
            raise UsageError(f"{flag_of(name)} has no meaning with --selection {kind}")


def _refuse_missing(kind: str, values: Mapping[str, object]) -> None:
    for field in dataclasses.fields(SELECTIONS[kind]):
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            raise UsageError(f"--selection {kind} is given; expected {flag_of(field.name)} with it")


def _check_scorer(name: str) -> None:
    known = _core.scorer_names()
    if name not in known:
        raise UsageError(f"--scorer is {name!r}{suggestion(name, known)}")


def _only(values: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}


def with_flags(message: str, args: argparse.Namespace | None = None) -> str:
    """A message that names options of PagerConfig, naming those of the command line.

    args: where given, an option is named by where its value comes from.
    """

    def said(found: re.Match[str]) -> str:
        return flag_of(found[1]) if args is None else source_of(args, found[1])

    return re.sub(r"\b(?:PagerConfig|TopK|Window)\.(\w+)", said, message)
