"""`kvpager plan`: what a model, its K/V and a pager take, before they are loaded."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvpager._model.pretrained import DTYPES
from kvpager._support.option_table import parse_bytes
from kvpager._support.words import byte_size
from kvpager.cli.failure import UsageError
from kvpager.cli.models import found
from kvpager.cli.option_flags import flag_of
from kvpager.cli.options import positive
from kvpager.cli.output import emit_result
from kvpager.cli.parser import Commands, option
from kvpager.cli.terminal import Look
from kvpager.config import CHUNK_TOKENS, KV_DTYPES, PagerConfig, free_memory, physical_memory
from kvpager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvpager.plan import Budget, Plan

_COUNT = re.compile(r"([1-9][0-9]*)([KM]?)")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}
_DEFAULT_CONTEXT = 131_072  # or what the model was made for, if that is less


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add(
        "plan",
        run,
        "what memory a model and its K/V take, and what pool and host memory to give it",
        "Says from a model's config.json alone what its K/V take per token, what pool fits, where "
        "the other chunks go, and whether paging is needed at all. No weights are read, nothing is "
        "downloaded.",
        epilog="docs/scaling.md has the formulas. Exit codes: 0; 1 where the model cannot run so "
        "(it says what is missing); 2 wrong command line.",
    )
    about = (
        "folder of a model, its config.json, or the name of a model in the cache of the Hugging "
        "Face hub, such as Qwen/Qwen3-0.6B, of which config.json is enough"
    )
    option(parser, "model MODEL", about)
    work = parser.add_argument_group("what is to run")
    about = (
        "of a session, answer included; 128K is 131072 (default: the model's longest, at most 128K)"
    )
    option(work, "--context TOKENS", about, type=tokens)
    option(work, "--sessions N", "running at once", type=positive, default=1)
    about = "of the weights (default: the file's)"
    option(work, "--dtype", about, choices=DTYPES, default="auto")
    about = "of K/V (default: the weights')"
    option(work, "--kv-dtype", about, choices=KV_DTYPES, default="auto")
    about = "tokens per chunk"
    option(work, "--chunk-tokens", about, type=int, choices=CHUNK_TOKENS, default=64)
    place = parser.add_argument_group("where")
    option(place, "--device", "of weights and pool", choices=("cpu", "cuda"), default="cpu")
    about = "memory for weights and pool, such as 24GiB (default: what is free here)"
    option(place, "--device-memory SIZE", about)
    about = "with a GPU: host memory that may be pinned (default: half of this machine's)"
    option(place, "--host-memory SIZE", about)
    option(place, "--disk-path DIR", "where chunks may spill to")
    option(place, "--disk-bytes SIZE", "how much, at most", default="0")


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from kvpager.plan import Workload, read_shape, recommend

    budget = _budget(args)
    shape = read_shape(found(args.model, option="MODEL", file="config.json"), args.dtype)
    context = args.context or min(shape.max_positions or _DEFAULT_CONTEXT, _DEFAULT_CONTEXT)
    try:
        plan = recommend(
            shape,
            budget,
            Workload(context, args.sessions),
            chunk_tokens=args.chunk_tokens,
            kv_dtype=args.kv_dtype,
            disk_path=args.disk_path,
        )
    except InvalidArgumentError as error:
        raise UsageError(str(error)) from error
    emit_result(args, {"command": "plan", **plan.to_json()}, lambda shown: _lines(plan, shown))
    return 0


def tokens(text: str) -> int:
    """A number of tokens such as 4096 or 128K, for argparse."""
    match = _COUNT.fullmatch(text)
    if not match:
        raise argparse.ArgumentTypeError(
            f'{text!r} is no number of tokens; expected one such as 4096 or "128K"'
        )
    return int(match[1]) * _UNITS[match[2]]


def _lines(plan: Plan, shown: Look) -> Iterator[str]:
    yield from shown.fields(_facts(plan), 8)
    kv, memory = plan.kv, plan.memory
    here, pinned = plan.budget.device_name, "pinned host memory"
    table = shown.table("memory", "what", ">bytes", ">tokens", "where")
    for what, count, held, where in (
        ("weights", plan.shape.weight_bytes, 0, here),
        ("pool", memory.pool, plan.config.pool_size, here),
        ("key summaries", memory.summaries, 0, here),
        ("staging and tables", memory.staging + memory.tables, 0, here),
        ("a forward's own", plan.working, 0, here),
        ("margin", plan.margin, 0, here),
        ("left", plan.spare, 0, here),
        ("host arena", memory.host, memory.host // kv.chunk_bytes * kv.chunk_tokens, pinned),
        ("transfer buffers", memory.pinned, 0, pinned),
        ("spill file", memory.disk, memory.disk // kv.chunk_bytes * kv.chunk_tokens, "disk"),
    ):
        if count:
            table.add_row(what, byte_size(count), f"{held:,}" if held else "", where)
    yield from shown.render(table)


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    shape, kv, work = plan.shape, plan.kv, plan.workload
    count = shape.parameters
    parameters = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
    yield (
        "model",
        f"{shape.name}, {parameters} parameters in {shape.dtype}, {shape.layers} layers, "
        f"{shape.kv_heads} kv heads of {shape.k_dim}",
    )
    yield (
        "K/V",
        f"{byte_size(kv.token_bytes)} of K/V per token, {byte_size(kv.chunk_bytes)} per chunk of "
        f"{kv.chunk_tokens} tokens; {work.sessions} x {work.context:,} tokens take "
        f"{byte_size(work.tokens * kv.token_bytes)}",
    )
    held = f"the pool holds {plan.config.pool_size:,} of {work.tokens:,} tokens"
    yield (
        "verdict",
        "everything fits into the pool, paging is redundant"
        if plan.redundant
        else f"{held}; every other chunk has a home below it",
    )
    yield "to type", _config_text(plan.config)


def _config_text(config: PagerConfig) -> str:
    """A PagerConfig as it is typed, defaults left out; bytes as bytes."""
    defaults = PagerConfig(pool_tokens="auto")
    said = [f"{k}={v!r}" for k, v in vars(config).items() if v != getattr(defaults, k)]
    return f"PagerConfig({', '.join(said)})"


def _budget(args: argparse.Namespace) -> Budget:
    from kvpager.plan import Budget

    sizes = {}
    for name in ("device_memory", "host_memory", "disk_bytes"):
        value = getattr(args, name)
        try:
            sizes[name] = None if value is None else parse_bytes(flag_of(name), value)
        except InvalidArgumentError as error:
            raise UsageError(str(error)) from error
    on_gpu = args.device == "cuda"
    device, host = sizes["device_memory"], sizes["host_memory"]
    if device is None:
        device = _free_on_gpu() if on_gpu else free_memory()
    if host is None:
        host = physical_memory() // 2 if on_gpu else 0
    return Budget(device, host, sizes["disk_bytes"] or 0, on_gpu)


def _free_on_gpu() -> int:
    import torch

    from kvpager.pager.device import missing

    if why_not := missing("cuda"):
        raise UsageError(f"--device-memory is missing, and {why_not}; expected a size as 24GiB")
    return int(torch.cuda.mem_get_info()[0])
