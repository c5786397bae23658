"""PagerConfig on the command line and in the environment, from its own definition."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Container, Mapping
from types import MappingProxyType
from typing import Any

from kvpager._support.option_table import Option
from kvpager.cli.failure import UsageError
from kvpager.cli.option_flags import add_options, destination, flag_of, found, given, refusals
from kvpager.cli.parser import option
from kvpager.config import SELECTIONS, PagerConfig, Selection, TopK, Window

# Of commands that run a user's model.
DEFAULTS: Mapping[str, object] = MappingProxyType({"pool_tokens": 2048, "chunks": 32})
ALIASES: Mapping[str, str] = MappingProxyType({"pool_tokens": "--pool", "host_bytes": "--host"})


def add_pager_options(
    parser: argparse.ArgumentParser,
    defaults: Mapping[str, object] = DEFAULTS,
    aliases: Mapping[str, str] = ALIASES,
) -> None:
    """Adds every option of PagerConfig and of its selections.

    Args:
        parser: to add to.
        defaults: of this command, by name; they go before PagerConfig's own.
        aliases: a further flag by name.
    """
    about = "An environment variable in [brackets] is read where an option is not given."
    group = parser.add_argument_group("pager options", about)
    about = (
        "what a row attends to: everything, the best-scoring chunks, or a recent window (default "
        f"{defaults.get('selection', 'dense')}; topk where --chunks is given) [KVPAGER_SELECTION]"
    )
    dest = destination("selection")
    option(group, "--selection", about, dest=dest, choices=tuple(SELECTIONS))
    about = "--selection dense"
    option(group, "--dense", about, dest=dest, action="store_const", const="dense")
    add_options(group, _options(), defaults, aliases)
    parser.set_defaults(pager_defaults=dict(defaults))


def pager_option_names() -> list[str]:
    """Of every option, as a file of settings may have them."""
    return ["selection", *(one.name for one in _options())]


def pager_config(args: argparse.Namespace, *, auto_pool: bool = True) -> PagerConfig:
    """The configuration of a command line: its options, else the environment, else defaults.

    auto_pool: whether the command can leave the pool to the engine it makes.

    Raises:
        UsageError: a value that PagerConfig refuses, or a pool that the command cannot use.
    """
    chosen = given(args, _options())
    values: dict[str, Any] = {**args.pager_defaults, **chosen}
    kind, source = found(args, "selection")
    kind = kind or ("topk" if "chunks" in chosen else values.get("selection", "dense"))
    if kind not in SELECTIONS:
        raise UsageError(f"{source} is {kind!r}; expected {', '.join(SELECTIONS)}")
    own = {field.name: field for field in dataclasses.fields(SELECTIONS[kind])}
    pager = {field.name for field in dataclasses.fields(PagerConfig)} - {"selection", *own}
    for name in chosen:
        if name not in own and name not in pager:
            raise UsageError(f"{flag_of(name)} has no meaning with --selection {kind}")
    for name, field in own.items():
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise UsageError(f"--selection {kind} is given; expected {flag_of(name)} with it")
    with refusals(args):
        selection: Selection = SELECTIONS[kind](**_only(values, own))
        config = PagerConfig(**_only(values, pager), selection=selection)
        config.resolve_rows("cuda" if config.device.startswith("cuda") else "cpu")
    if config.pool_is_auto and not auto_pool:
        raise UsageError(
            f'{flag_of("pool_tokens")} is "auto"; expected a number of tokens: this command '
            "compares engines, and says what pool they had"
        )
    return config


def _only(values: Mapping[str, Any], names: Container[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}


def _options() -> list[Option]:
    """Every option but `selection`, which is a choice of three; one entry per name."""
    by_name: dict[str, Option] = {}
    for one in (*PagerConfig.options(), *TopK.options(), *Window.options()):
        by_name.setdefault(one.name, one)
    del by_name["selection"]
    return list(by_name.values())
