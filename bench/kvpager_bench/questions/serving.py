"""What serving over HTTP costs, and how much one machine serves, beside other servers.

    kvpager bench serving
    kvpager bench serving -- --parts soak --soak-seconds 600

"throughput": the same prompts, from Python's library, as chat completions of 1 to 64 streams, each
of as many tokens. Every server has the same weights on the same processor, one after another.
"overhead": a decode step of as many answers by `Engine.run`, and by HTTP.
"soak": streams for minutes, with a pool that holds a quarter of them; some clients go away, some
requests are wrong. Nothing but what the client did wrong may fail, and memory must not grow.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from transformers import AutoTokenizer

from kvpager import Engine
from kvpager.needles import shipped_model_path
from kvpager_bench import harness, library_text, servers, subjects
from kvpager_bench.harness import Column, Report
from kvpager_bench.peers.environments import PeerError
from kvpager_bench.places import results_dir, scratch_folder

CODER = "tiny-coder"
PARTS = ("throughput", "overhead", "soak")
PROMPT_CHARACTERS = 1200
SERVERS = (servers.KVPAGER, servers.TRANSFORMERS, servers.VLLM)
GREEDY = {"temperature": 0}
HOST_BYTES = "768MiB"  # of the soak
AIM_OVERHEAD = 5.0  # percent of a decode step

THROUGHPUT = (
    Column("server", text=True),
    Column("streams"),
    Column("answers"),
    Column("tokens_per_s", "1/s"),
    Column("first_token_s", "s, median"),
    Column("first_token_p99_s", "s"),
    Column("between_ms", "ms, median"),
    Column("between_p99_ms", "ms"),
    Column("errors"),
)
OVERHEAD = (
    Column("streams"),
    Column("tokens"),
    Column("engine_step_ms", "ms"),
    Column("http_step_ms", "ms"),
    Column("http_cost", "% of a step"),
)
SOAK = (
    Column("seconds", "s"),
    Column("streams"),
    Column("answers"),
    Column("left", "by the client"),
    Column("refused", "as they were wrong"),
    Column("errors"),
    Column("tokens_per_s", "1/s"),
    Column("between_p99_ms", "ms"),
    Column("first_token_p99_s", "s"),
    Column("rss_first_mib", "MiB"),
    Column("rss_last_mib", "MiB"),
)


def prompts(count: int, seed: int) -> list[str]:
    """Pieces of modules that the model was not trained on."""
    text = "".join(source for _, source in library_text.held_out_texts())
    draw = random.Random(seed)
    places = [draw.randrange(len(text) - PROMPT_CHARACTERS) for _ in range(count)]
    return [text[at : at + PROMPT_CHARACTERS] for at in places]


@contextlib.contextmanager
def saved_model(shape: str) -> Any:
    """A folder with a model of `subjects` and a tokenizer of as many tokens."""
    if shape == CODER:
        yield shipped_model_path(CODER)
        return
    with scratch_folder() as folder:
        path = Path(folder) / shape
        model = subjects.load_model(shape)
        model.generation_config.eos_token_id = None  # every answer is as long as it may be
        model.save_pretrained(path)
        AutoTokenizer.from_pretrained(shipped_model_path(CODER)).save_pretrained(path)
        yield path


def measure_throughput(record: Any, arguments: Any) -> None:
    report = Report(
        harness.report_name("serving", arguments),
        "Tokens per second over HTTP, by server and streams",
        THROUGHPUT,
        {
            "model": arguments.subject,
            "prompt_characters": PROMPT_CHARACTERS,
            "max_tokens": arguments.tokens,
            "answers_per_stream": arguments.answers,
        },
        record,
    )
    with saved_model(arguments.subject) as model:
        for server in arguments.servers:
            _measure_or_skip(report, server, model, arguments)
    _judge_throughput(report)
    report.finish()


def _measure_or_skip(report: Report, server: str, model: Path, arguments: Any) -> None:
    try:
        _measure_server(report, server, model, arguments)
    except (PeerError, servers.ServerError) as error:
        if server == servers.KVPAGER:
            raise
        report.skip(server, str(error))


def _measure_server(report: Report, server: str, model: Path, arguments: Any) -> None:
    log = results_dir() / "logs" / f"serving-{server.split()[0]}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    body = {**GREEDY, "max_tokens": arguments.tokens}
    name = str(model) if server == servers.TRANSFORMERS else model.name
    with servers.running(server, model, arguments.threads, log) as url:
        servers.send(url, name, prompts(2, seed=99), 2, **body)
        for streams in arguments.streams:
            load = servers.send(
                url, name, prompts(streams * arguments.answers, seed=streams), streams, **body
            )
            if not load.tokens:
                raise servers.ServerError(f"no answers of {streams} streams: {load.errors}")
            report.add(
                server=server,
                streams=streams,
                answers=load.answers,
                tokens_per_s=load.tokens / load.seconds,
                first_token_s=statistics.median(load.first),
                first_token_p99_s=float(np.quantile(load.first, 0.99)),
                between_ms=1000 * statistics.median(load.between),
                between_p99_ms=1000 * float(np.quantile(load.between, 0.99)),
                errors=sum(load.errors.values()),
            )
            print(f"{server}, {streams}: {load.tokens / load.seconds:.1f} tokens/s", flush=True)


def _judge_throughput(report: Report) -> None:
    rates = {
        (row["server"], row["streams"]): report.number(row, "tokens_per_s") for row in report.rows
    }
    for (server, streams), rate in rates.items():
        ours = rates.get((servers.KVPAGER, streams))
        if server != servers.KVPAGER and ours is not None:
            report.compare(
                f"tokens per second of {streams} streams",
                ours=ours,
                theirs=rate,
                peer=str(server),
                unit="1/s",
                aim=1.0,
            )
    errors = sum(report.number(row, "errors") for row in report.rows if row["server"] == SERVERS[0])
    report.judge("kvpager answers every request", errors == 0, f"{errors:.0f} errors")


def measure_overhead(record: Any, arguments: Any) -> None:
    report = Report(
        harness.report_name("serving_overhead", arguments),
        "What HTTP costs beside a decode step",
        OVERHEAD,
        {"model": arguments.subject, "runs": arguments.runs},
        record,
    )
    streams, tokens = arguments.overhead_streams, arguments.tokens
    with saved_model(arguments.subject) as model:
        texts = prompts(streams, seed=1)
        alone = _engine_seconds(model, texts, tokens, arguments)
        log = results_dir() / "logs" / "serving-overhead.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        body = {**GREEDY, "max_tokens": tokens}
        with servers.running(servers.KVPAGER, model, arguments.threads, log) as url:
            taken = []
            for run in range(arguments.runs + 1):
                load = servers.send(url, model.name, texts, streams, seed=run, **body)
                if load.errors or load.answers != streams:
                    raise servers.ServerError(f"{load.answers} answers: {load.errors}")
                taken.append(statistics.median(load.between))
    http = min(taken[1:])
    cost = 100 * (http / alone - 1)
    report.add(
        streams=streams,
        tokens=tokens,
        engine_step_ms=1000 * alone,
        http_step_ms=1000 * http,
        http_cost=cost,
    )
    report.judge(
        f"HTTP costs less than {AIM_OVERHEAD:g}% of a decode step",
        cost < AIM_OVERHEAD,
        f"{cost:.1f}% at {streams} streams",
    )
    report.finish()


def _engine_seconds(model: Path, texts: list[str], tokens: int, arguments: Any) -> float:
    """Seconds between tokens by `Engine.run`, of the fastest run."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    medians = []
    with Engine(loaded.eval(), tokenizer=tokenizer, threads=arguments.threads) as engine:
        for _ in range(arguments.runs + 1):
            times: dict[int, list[float]] = {}

            def note(request: Any, token: Any, times: dict[int, list[float]] = times) -> None:
                times.setdefault(request.index, []).append(time.perf_counter())

            engine.run(texts, tokens, eos=None, on_token=note)
            medians.append(
                statistics.median(
                    later - sooner
                    for each in times.values()
                    for sooner, later in itertools.pairwise(each)
                )
            )
    return min(medians[1:])


def measure_soak(record: Any, arguments: Any) -> None:
    report = Report(
        harness.report_name("serving_soak", arguments),
        "Streams for minutes, with a pool that holds a quarter of them",
        SOAK,
        {
            "model": CODER,
            "max_tokens": arguments.tokens,
            "seconds": arguments.soak_seconds,
            "host_bytes": HOST_BYTES,
        },
        record,
    )
    from kvpager.server.settings import ServerSettings  # noqa: F401  # said early if it is missing

    streams = arguments.soak_streams
    log = results_dir() / "logs" / "serving-soak.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    model = shipped_model_path(CODER)
    # Each stream holds some 8 chunks of 64 tokens: a pool of 2 each. Host memory that the cache has
    # filled within the first fifth of the time, so that growth is nothing but a leak.
    pool = ["--pool-tokens", str(2 * 64 * streams), "--host-bytes", HOST_BYTES]
    with servers.running(servers.KVPAGER, model, arguments.threads, log, pool) as url:
        load, memory = asyncio.run(_soak(url, model.name, streams, arguments))
    first, last = statistics.median(memory[:5]), statistics.median(memory[-5:])
    report.add(
        seconds=load.seconds,
        streams=streams,
        answers=load.answers,
        left=load.left,
        refused=load.refused,
        errors=sum(load.errors.values()),
        tokens_per_s=load.tokens / load.seconds,
        between_p99_ms=1000 * float(np.quantile(load.between, 0.99)),
        first_token_p99_s=float(np.quantile(load.first, 0.99)),
        rss_first_mib=first,
        rss_last_mib=last,
    )
    report.judge("nothing fails but what the client did wrong", not load.errors, str(load.errors))
    report.judge(
        "memory does not grow",
        last < 1.05 * first + 16,
        f"{first:.0f} MiB after a fifth of the time, {last:.0f} MiB at the end",
    )
    report.finish()


async def _soak(
    url: str, model: str, streams: int, arguments: Any
) -> tuple[servers.Load, list[float]]:
    load, memory = servers.Load(), []
    texts, draw = prompts(256, seed=7), random.Random(7)
    begun = time.perf_counter()
    end = begun + arguments.soak_seconds
    async with httpx.AsyncClient(
        base_url=url, timeout=600, limits=httpx.Limits(max_connections=2 * streams)
    ) as client:

        async def work() -> None:
            while time.perf_counter() < end:
                kind = draw.random()
                if kind < 0.05:
                    answer = await client.post("/v1/chat/completions", json={"messages": []})
                    if answer.status_code == 400:
                        load.refused += 1
                    else:
                        load.error(f"a wrong request: {answer.status_code}")
                    continue
                await servers.ask(
                    client,
                    load,
                    model,
                    draw.choice(texts),
                    leave_after=draw.randint(1, 20) if kind < 0.25 else None,
                    max_tokens=arguments.tokens,
                    temperature=0.8,
                )

        async def watch() -> None:
            while time.perf_counter() < end:
                await asyncio.sleep(arguments.soak_seconds / 50)
                if time.perf_counter() - begun > arguments.soak_seconds / 5:
                    memory.append(servers.resident_mib(url))

        await asyncio.gather(watch(), *(work() for _ in range(streams)))
    load.seconds = time.perf_counter() - begun
    return load, memory


def main() -> None:
    parser = harness.cli(__doc__)
    parser.add_argument("--parts", type=harness.parse_list, default=list(PARTS[:2]))
    parser.add_argument("--subject", default="gqa8-bf16", help="a model of subjects.py")
    parser.add_argument("--servers", type=harness.parse_list, default=list(SERVERS))
    parser.add_argument("--streams", type=harness.parse_ints, default=[1, 16, 64])
    parser.add_argument("--answers", type=int, default=2, help="of each stream")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--overhead-streams", type=int, default=16)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--soak-seconds", type=float, default=600.0)
    parser.add_argument("--soak-streams", type=int, default=64)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.subject, arguments.servers = CODER, [servers.KVPAGER]
        arguments.streams, arguments.answers, arguments.tokens = [1, 4], 1, 8
        arguments.overhead_streams, arguments.runs = 4, 1
        arguments.soak_seconds, arguments.soak_streams = 10.0, 8
    record = harness.start(arguments)
    measures = dict(zip(PARTS, (measure_throughput, measure_overhead, measure_soak)))
    for part in arguments.parts:
        if part not in measures:
            parser.error(f"--parts has {part!r}; expected {', '.join(PARTS)}")
        measures[part](record, arguments)


if __name__ == "__main__":
    main()
