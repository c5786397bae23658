"""`kvpager serve`: an OpenAI-compatible server whose conversations survive."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpager.cli.failure import CliError, UsageError
from kvpager.cli.models import load_model, load_tokenizer
from kvpager.cli.option_flags import add_options, given, parsed, read_settings, source_of
from kvpager.cli.options import add_model_options
from kvpager.cli.output import note
from kvpager.cli.pager_options import add_pager_options, pager_config, pager_option_names
from kvpager.cli.parser import Parser
from kvpager.errors import InvalidArgumentError
from kvpager.server.settings import ServerSettings

if TYPE_CHECKING:
    from kvpager.server.service import Service

CODER = "tiny-coder"
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
Without --model the small language model that the project ships answers. It completes Python; it
knows nothing else.

  kvpager serve
  kvpager serve --model Qwen/Qwen3-0.6B --kv-dtype q8 --port 8080
  kvpager serve --config serve.yaml

  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Write a function that reverses a list."}]}'

SIGTERM and Ctrl-C stop it: running requests end first, and what is unfinished is saved. SIGHUP has
the file of --api-keys read again.
"""


def add(commands: Any, common: Parser) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "serve",
        parents=[common],
        help="an OpenAI-compatible server whose conversations survive restarts",
        description="Serves one model over HTTP: OpenAI's chat completions, completions and "
        "responses, Anthropic's messages, and sessions by name.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser, default="tiny-coder, a small model of Python that the project ships")
    group = parser.add_argument_group(
        "server options",
        "An environment variable in [brackets] is read where an option is not given, and then the "
        "file that --config names.",
    )
    group.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file of options of the server and the pager by name, such as `port: 8080`",
    )
    add_options(group, ServerSettings.options(), {}, {"served_model_name": ["--name"]})
    add_pager_options(parser, {})
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    _require_packages()
    settings, config = settings_of(args), pager_config(args)
    check_exposure(args, settings)
    known = settings.served_model_name or (_name_of(args.model),)
    check_places(settings, known[0])
    folder = _model_folder(args)
    model = load_model(folder, args.dtype, config.device)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise CliError(f"--model {folder} has no tokenizer, which a server needs")

    from kvpager import Engine
    from kvpager.server.run import logging_to_stderr, serve
    from kvpager.server.service import Service
    from kvpager.server.tracing import exported

    with (
        logging_to_stderr(settings.log_level),
        exported(settings.otlp_endpoint),
        Engine(model, config, tokenizer=tokenizer, threads=args.threads) as engine,
    ):
        service = Service(engine, settings, names=known, root=str(args.model or CODER))
        serve(service, lambda url: _tell(args, service, url))
    return 0


def settings_of(args: argparse.Namespace) -> ServerSettings:
    """The server's options; reads the file that --config names. Raises UsageError, CliError."""
    names = [option.name for option in ServerSettings.options()]
    args.settings_file = (
        {} if args.config is None else read_settings(args.config, [*names, *pager_option_names()])
    )
    values = {}
    for option in ServerSettings.options():
        value = given(args, option.name)
        if value is not None:
            values[option.name] = parsed(option, value)
    try:
        return ServerSettings(**values)
    except InvalidArgumentError as error:
        text = str(error)
        for field in dataclasses.fields(ServerSettings):
            text = text.replace(f"ServerSettings.{field.name} ", f"{source_of(args, field.name)} ")
        raise UsageError(text) from error


def check_exposure(args: argparse.Namespace, settings: ServerSettings) -> None:
    """Warns where other machines or sites can reach the server and nobody needs a key."""
    from kvpager.server.run import is_loopback

    if settings.api_keys is not None or settings.api_key is not None:
        return
    if settings.uds is None and not is_loopback(settings.host):
        note(
            args,
            f"kvpager: warning: --host {settings.host} can be reached from other machines, and "
            "nobody needs a key; give --api-keys FILE",
        )
    if settings.allow_origin:
        note(
            args,
            "kvpager: warning: pages of "
            f"{'any site' if '*' in settings.allow_origin else ', '.join(settings.allow_origin)} "
            "may read conversations, and nobody needs a key; give --api-keys FILE",
        )


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
    folder = settings.store_path(model)
    if folder is not None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise CliError(f"--store {folder}: {error.strerror}") from error


def _model_folder(args: argparse.Namespace) -> str | Path:
    if args.model is not None:
        return str(args.model)
    from kvpager.needles import shipped_model_path

    try:
        return shipped_model_path(CODER)
    except FileNotFoundError as error:
        raise CliError(f"{error}; give --model") from error


def _name_of(model: str | None) -> str:
    if model is None:
        return CODER
    return Path(model).resolve().name if Path(model).is_dir() else model


def _tell(args: argparse.Namespace, service: Service, url: str) -> None:
    what = service.model
    if args.model is None:
        what += ", a small model that completes Python and knows nothing else"
    note(args, f"kvpager serves {what}")
    note(args, f"  page   {url}/" if service.settings.page else f"  at     {url}/")
    note(args, f"  API    {url}/v1")
    folder = service.settings.store_path(service.model)
    note(args, f"  saves  {'nothing' if folder is None else folder}")


def _require_packages() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise CliError(
            f"`kvpager serve` needs {', '.join(missing)}; pip install '.[serve]' in a checkout"
        )
