"""`kvpager chat`: a conversation in a terminal, which the next start goes on with."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from kvpager._model.fingerprint_rules import ON_MISMATCH
from kvpager._support.option_table import parse_bytes
from kvpager._support.remembered import data_folder
from kvpager.cli.failure import CliError, UsageError
from kvpager.cli.models import DEFAULT_MODEL, chosen_model, load_model, load_tokenizer
from kvpager.cli.option_flags import flag_of
from kvpager.cli.options import add_model_options, as_unicode, natural, positive
from kvpager.cli.output import note
from kvpager.cli.pager_options import ALIASES, add_pager_options, pager_config
from kvpager.cli.parser import Commands, option
from kvpager.errors import FingerprintMismatchError, InvalidArgumentError
from kvpager.stores.names import SETTINGS_FILE, check_name
from kvpager.stores.settings import UNLIMITED

if TYPE_CHECKING:
    from kvpager.cli.chat.loop import Loop
    from kvpager.stores.opening import NamedStore

_BUDGET = "10GiB"  # of a store that the user did not name


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add(
        "chat",
        run,
        "talk to a model; the next start goes on with the conversation",
        "A conversation in the terminal. It is saved after each turn, and the next start with the "
        "same model goes on with it: its K/V are read from disk instead of being computed again, "
        "to the same bits. Ctrl-C stops an answer and keeps what was said of it; Ctrl-D leaves. "
        "/help lists the commands. Where stdin is no terminal, each of its lines is a message.",
    )
    add_model_options(parser, default=DEFAULT_MODEL)
    group = parser.add_argument_group("conversation")
    option(group, "--system TEXT", "system prompt of a new conversation")
    about = "the conversation to go on with, or to begin (default: the last one)"
    option(group, "--name NAME", about)
    option(group, "--new", "begin another conversation")
    about = (
        "where conversations are kept: a folder, or a bucket such as s3://BUCKET/PREFIX (default: "
        "kvpager/chat/MODEL in the user's data folder)"
    )
    option(group, "--store STORE", about)
    about = (
        'most bytes the store may take, such as "50GiB", or "unlimited" (default: what it was set '
        f"to before; {_BUDGET} for a new one in the user's data folder); the least recently used "
        "conversations go first; of a bucket, most bytes of its cache"
    )
    option(group, "--store-budget BYTES", about)
    about = (
        "where a conversation was saved under another release, processor or number of threads: "
        "refuse (default), or approximate: go on with results that may differ in their last bits; "
        "convert: also where its K/V have another dtype"
    )
    option(group, "--on-mismatch", about, choices=ON_MISMATCH, default="refuse")
    group = parser.add_argument_group("answers")
    option(group, "--max-new-tokens N", "of an answer, at most", type=positive, default=1024)
    option(
        group,
        "--temperature T",
        "0 is greedy (default: the model's own, where it samples)",
        type=float,
    )
    option(group, "--top-p P", "1 is off (default: likewise)", type=float)
    option(group, "--seed N", "of the first answer's draws (default: a fresh one)", type=natural)
    add_pager_options(parser, {}, ALIASES)
    parser.show_first(
        *("--quiet", "--model", "--system", "--name", "--new", "--store", "--store-budget"),
        *("--max-new-tokens", "--temperature", "--pool-tokens", "--kv-dtype"),
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if args.format == "json" or args.output is not None:
        what = "--output" if args.output is not None else "--format json"
        raise UsageError(f"{what} has no meaning for chat; `kvpager generate --message` has it")
    system, options = as_unicode("--system", args.system), _options(args)
    try:
        if args.store_budget not in (None, UNLIMITED):
            parse_bytes("store-budget", args.store_budget)
        if args.name is not None:
            check_name(args.name)
    except InvalidArgumentError as error:
        raise UsageError(f"--{error}") from error
    config = pager_config(args)
    chosen = chosen_model(args)
    if chosen.sentence:
        note(args, f"talks to {chosen.sentence}")
    model = load_model(chosen.path, args.dtype, config.device)
    tokenizer = load_tokenizer(chosen.path)
    if not getattr(tokenizer, "chat_template", None):
        raise CliError(f"--model {chosen.path} has no chat template, which a conversation needs")
    store = _store(args, chosen.name)

    from kvpager import Engine
    from kvpager.cli.chat.lines import editing
    from kvpager.cli.chat.loop import COMMANDS, Loop
    from kvpager.cli.chat.signals import Signals
    from kvpager.cli.chat.talk import Talk

    with (
        Engine(model, config, tokenizer=tokenizer, threads=args.threads) as engine,
        editing(data_folder() / "chat-history", COMMANDS),
        Signals() as signals,
    ):
        talk = Talk(engine, store, options, system=system, on_mismatch=args.on_mismatch)
        loop = Loop(args, talk, signals)
        is_known = args.name is not None and store.entry(args.name) is not None
        if args.new and is_known:
            raise CliError(f"--new --name {args.name}: there is a conversation of this name")
        if is_known or (args.name is None and not args.new):
            _resume(args, loop)
        talk.name = talk.name or args.name
        loop.run()
        if talk.session.length:
            note(args, f"saved as {talk.name}; the next start goes on with it")
    return 0


def _resume(args: argparse.Namespace, loop: Loop) -> None:
    """Goes on with the conversation of --name, or the last one of this model if there is one."""
    try:
        loop.load(args.name)
    except FingerprintMismatchError as error:
        if args.name is not None:
            raise
        note(args, f"begins a new conversation, as the last one was of another model: {error}")


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Those of `Session.chat` that were given. Raises UsageError: one is out of range."""
    from kvpager.sampling import Sampling  # loads torch

    sampling = {"temperature": args.temperature, "top_p": args.top_p}
    given = {name: value for name, value in sampling.items() if value is not None}
    try:
        Sampling(**given, seed=args.seed or 0)
    except InvalidArgumentError as error:
        name, _, rest = str(error).partition(" ")
        raise UsageError(f"{flag_of(name)} {rest}") from error
    given |= {} if args.seed is None else {"seed": args.seed}
    return {"max_new_tokens": args.max_new_tokens, **given}


def _store(args: argparse.Namespace, model: str) -> NamedStore:
    """The store of --store, or of a model's name; made if there is none."""
    from kvpager.stores.opening import open_store

    address, budget = args.store, args.store_budget
    if address is None:
        folder = data_folder() / "chat" / re.sub(r"[^\w.-]", "-", model)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (folder / SETTINGS_FILE).exists():
            budget = budget or _BUDGET
        address = str(folder)
    return open_store(address, byte_budget=budget)
