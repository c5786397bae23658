"""`kvpager plan`: what a model will take and how fast it will be, before it is loaded."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from kvpager.cli.failure import UsageError
from kvpager.cli.models import found
from kvpager.cli.options import DTYPES, positive
from kvpager.cli.output import emit_result, note
from kvpager.cli.parser import Parser, suggestion
from kvpager.cli.terminal import Look, look
from kvpager.config import CHUNK_TOKENS, KV_DTYPES, PagerConfig, TopK, free_memory
from kvpager.errors import InvalidArgumentError
from kvpager.option_table import parse_bytes
from kvpager.words import byte_size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvpager.plan import Cost, Machine, Plan

_MEASURE = "measure"
_COUNT = re.compile(r"([1-9][0-9]*)([KM]?)")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}
_DEFAULT_CONTEXT = 131_072  # or what the model was made for, if that is less


def add(commands: Any, common: Parser) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "plan",
        parents=[common],
        help="what pool, rows and host memory to give a model, and the speeds to expect",
        description="Recommends a configuration for a model on a device, from the model's "
        "config.json alone: no weights are read, nothing is downloaded. Says whether paging is "
        "needed at all, what a bounded pool leaves for weights, and how long prefill, decoding, "
        "saving and restoring should take, with the term that bounds each.",
        epilog="docs/scaling.md has the formulas. Exit codes: 0; 1 where the model cannot run so "
        "(it says what is missing); 2 wrong command line.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder of a model, its config.json, or the name of a model in the cache of the "
        "Hugging Face hub, such as Qwen/Qwen3-0.6B, of which config.json is enough",
    )
    work = parser.add_argument_group("what is to run")
    work.add_argument(
        "--context",
        type=tokens,
        metavar="TOKENS",
        help="of a session, answer included; 128K is 131072 (default: the model's longest, at most "
        "128K)",
    )
    work.add_argument(
        "--sessions", type=positive, default=1, metavar="N", help="running at once (default: 1)"
    )
    work.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="of the weights (default: the file's)"
    )
    work.add_argument(
        "--kv-dtype", choices=KV_DTYPES, default="auto", help="of K/V (default: the weights')"
    )
    work.add_argument(
        "--chunk-tokens",
        type=int,
        choices=CHUNK_TOKENS,
        default=64,
        help="tokens per chunk (default: 64)",
    )
    place = parser.add_argument_group("where")
    place.add_argument(
        "--device",
        default=_MEASURE,
        metavar="NAME",
        help='"measure" this machine\'s processor (default, takes seconds), "cuda" to measure its '
        "GPU, or a name with known figures: " + ", ".join(_device_names()),
    )
    place.add_argument(
        "--device-memory",
        metavar="SIZE",
        help="memory for weights and pool (default: the named device's, or what is free here)",
    )
    place.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="with a GPU: host memory that may be pinned (default: half of this machine's)",
    )
    place.add_argument("--disk-path", metavar="DIR", help="where chunks may spill to")
    place.add_argument("--disk-bytes", default="0", metavar="SIZE", help="how much, at most")
    rates = parser.add_argument_group("rates", "Instead of those of --device.")
    rates.add_argument("--compute", type=rate, metavar="TFLOPS", help="of matrix products")
    rates.add_argument("--bandwidth", type=rate, metavar="GB/S", help="of the device's memory")
    rates.add_argument("--link", type=rate, metavar="GB/S", help="from host memory to the device")
    rates.add_argument("--disk", type=rate, metavar="GB/S", help="of the disk, both ways")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from kvpager.plan import Workload, read_shape, recommend
    from kvpager.plan.result import to_json

    _check_device(args.device)
    sizes = {name: _bytes(args, name) for name in ("device_memory", "host_memory", "disk_bytes")}
    shape = read_shape(found(args.model, option="MODEL", file="config.json"), args.dtype)
    context = args.context or min(shape.max_positions or _DEFAULT_CONTEXT, _DEFAULT_CONTEXT)
    machine = _machine(args, shape.dtype)
    try:
        plan = recommend(
            shape,
            machine,
            _budget(machine, sizes),
            Workload(context, args.sessions),
            chunk_tokens=args.chunk_tokens,
            kv_dtype=args.kv_dtype,
            disk_path=args.disk_path,
        )
    except InvalidArgumentError as error:
        raise UsageError(str(error)) from error
    emit_result(args, {"command": "plan"} | to_json(plan), lambda: describe(plan, look(args)))
    return 0


def tokens(text: str) -> int:
    """A number of tokens such as 4096 or 128K, for argparse."""
    match = _COUNT.fullmatch(text)
    if not match:
        raise argparse.ArgumentTypeError(
            f'{text!r} is no number of tokens; expected one such as 4096 or "128K"'
        )
    return int(match[1]) * _UNITS[match[2]]


def rate(text: str) -> float:
    """A positive number, for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def describe(plan: Plan, shown: Look) -> str:
    """The plan for people."""
    shape, memory = plan.shape, plan.memory
    lines = [
        shown.field("model", _model_line(plan), wide=9),
        shown.field("machine", f"{plan.machine.name} ({plan.machine.source})", wide=9),
        shown.field(
            "workload",
            f"{plan.workload.sessions} x {plan.workload.context:,} tokens: "
            f"{byte_size(plan.workload.sessions * plan.workload.context * plan.kv.token_bytes)} of "
            f"K/V, {byte_size(plan.kv.token_bytes)} per token",
            wide=9,
        ),
        "",
        *(shown.field("-" if i else "why", line, wide=9) for i, line in enumerate(plan.why)),
        "",
        shown.field("to type", config_text(plan.config), wide=9),
        "",
    ]
    budget = shown.table("memory")
    budget.add_column("what")
    budget.add_column("bytes", justify="right")
    budget.add_column("where")
    here = "device" if plan.machine.on_gpu else "memory"
    rows = [
        ("weights", shape.weight_bytes, here),
        ("pool", memory.pool, here),
        ("key summaries", memory.summaries, here),
        ("staging and tables", memory.staging + memory.tables, here),
        ("a forward's own", plan.working, here),
        ("margin", plan.margin, here),
        ("left", plan.spare, here),
        ("host arena", memory.host, "pinned host memory"),
        ("transfer buffers", memory.pinned, "pinned host memory"),
        ("spill file", memory.disk, "disk"),
    ]
    for what, count, where in rows:
        if count:
            budget.add_row(what, byte_size(count), where)
    text = shown.render(*_paragraph(lines), budget, _times(plan, shown), _decode(plan, shown))
    return text + "\n".join(_freed_lines(plan, shown)) + "\n"


def config_text(config: PagerConfig) -> str:
    """A PagerConfig as it is typed, defaults left out; bytes as bytes."""
    said = [f"pool_tokens={config.pool_tokens}"]
    defaults = PagerConfig(pool_tokens="auto")
    for name in ("chunk_tokens", "rows", "selection", "host_bytes"):
        value = getattr(config, name)
        if value == getattr(defaults, name):
            continue
        if isinstance(value, TopK):
            value = f"TopK(chunks={value.chunks})"
        said.append(f"{name}={value}")
    if config.disk_bytes:
        said += [f"disk_path={config.disk_path!r}", f"disk_bytes={config.disk_bytes}"]
    said.append(f"summary_bytes={config.summary_bytes}")
    if config.kv_dtype != "auto":
        said.append(f'kv_dtype="{config.kv_dtype}"')
    return f"PagerConfig({', '.join(said)})"


def _paragraph(lines: list[str]) -> list[RenderableType]:
    from rich.text import Text

    return [Text(line) for line in lines]


def _model_line(plan: Plan) -> str:
    shape = plan.shape
    experts = (
        f", {shape.experts} experts per layer of which a token takes {shape.experts_per_token}"
        if shape.experts
        else ""
    )
    return (
        f"{shape.name}, {_billions(shape.parameters)} parameters in {shape.dtype} "
        f"({byte_size(shape.weight_bytes)}), {shape.layers} layers, {shape.kv_heads} kv heads of "
        f"{shape.k_dim}{experts}"
    )


def _billions(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def _times(plan: Plan, shown: Look) -> RenderableType:
    table = shown.table("expected, one session")
    table.add_column("what")
    table.add_column("time", justify="right")
    table.add_column("bound by")
    for what, cost in (
        ("first token, cold", plan.cold),
        ("first token, restored, file in the page cache", plan.warm(cached=True)),
        ("first token, restored, from disk", plan.warm(cached=False)),
        ("saving", plan.save),
        ("opening the snapshot", plan.restore),
    ):
        table.add_row(what, seconds_text(cost.seconds), _bound(cost))
    return table


def _decode(plan: Plan, shown: Look) -> RenderableType:
    sessions = plan.workload.sessions
    table = shown.table(
        "expected, decoding" + (f", {sessions} sessions together" if sessions > 1 else "")
    )
    for heading in ("context", "tokens/s", "bound by", "dense, tokens/s", "bound by", "full K/V"):
        table.add_column(heading, justify="left" if heading == "bound by" else "right")
    for speed in plan.speeds():
        table.add_row(
            f"{speed.context:,}",
            _per_second(sessions, speed.chosen),
            _bound(speed.chosen),
            _per_second(sessions, speed.dense),
            _bound(speed.dense),
            byte_size(speed.full_bytes),
        )
    return table


def _freed_lines(plan: Plan, shown: Look) -> list[str]:
    freed = plan.freed()
    if freed.bytes <= 0:
        return ["A full cache of this workload is no larger than a bounded pool."]
    where = "device memory" if plan.machine.on_gpu else "memory"
    text = (
        f"a pool of {freed.pool_tokens:,} tokens (top-k) takes {byte_size(freed.pool_bytes)} with "
        f"its summaries where a full cache takes {byte_size(freed.full_bytes)}: "
        f"{byte_size(freed.bytes)} of {where} for {freed.layers:.1f} more layers of such weights"
    )
    if plan.shape.experts:
        text += (
            f"; {freed.hot_experts_pool} instead of {freed.hot_experts_full} of "
            f"{plan.shape.experts} experts per layer fit beside it"
        )
    return [shown.field("freed", text, wide=9)]


def seconds_text(seconds: float) -> str:
    """0.8 ms, 41 ms, 7.6 s, 3.5 min: two digits, as a model on paper has."""
    for scale, unit in ((60, "min"), (1, "s"), (1e-3, "ms")):
        if seconds >= 2 * scale or unit == "ms":
            value = seconds / scale
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
    raise AssertionError


def _per_second(sessions: int, cost: Cost) -> str:
    value = sessions / cost.seconds
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _bound(cost: Cost) -> str:
    largest = max(cost.terms, key=lambda term: term.seconds)
    return f"{largest.name} {largest.seconds / cost.seconds:.0%}"


def _device_names() -> list[str]:
    from kvpager.plan.machine import DEVICES

    return list(DEVICES)


def _check_device(name: str) -> None:
    known = [_MEASURE, "cuda", *_device_names()]
    if name not in known:
        raise UsageError(f"--device is {name!r}{suggestion(name, known)}")


def _bytes(args: argparse.Namespace, name: str) -> int | None:
    value = getattr(args, name)
    if value is None:
        return None
    try:
        return parse_bytes("--" + name.replace("_", "-"), value)
    except InvalidArgumentError as error:
        raise UsageError(str(error)) from error


def _machine(args: argparse.Namespace, dtype: str) -> Machine:
    from kvpager.plan.machine import device_named

    if args.device in (_MEASURE, "cuda"):
        from kvpager.pager.device import require
        from kvpager.plan.measure import measure

        if args.device == "cuda":
            require("cuda")
        note(args, "measuring this machine ...")
        dtypes = tuple(dict.fromkeys(("float32", "bfloat16" if dtype == "float16" else dtype)))
        machine = measure(dtypes, args.disk_path, device="cuda" if args.device == "cuda" else "cpu")
    else:
        machine = device_named(args.device)
    return machine.with_rates(
        flops=args.compute and args.compute * 1e12,
        bandwidth=args.bandwidth and args.bandwidth * 1e9,
        link=args.link and args.link * 1e9,
        disk=args.disk and args.disk * 1e9,
    )


def _budget(machine: Machine, sizes: dict[str, int | None]) -> Any:
    from kvpager.config import physical_memory
    from kvpager.plan import Budget

    device = sizes["device_memory"]
    if device is None:
        device = machine.device_memory or free_memory()
    host = sizes["host_memory"]
    if host is None:
        host = physical_memory() // 2 if machine.on_gpu else 0
    return Budget(device=device, host=host, disk=sizes["disk_bytes"] or 0)
