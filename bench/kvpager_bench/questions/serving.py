"""What serving over HTTP costs, and how much one machine serves, beside other servers.

    kvpager bench serving

"throughput": the same prompts, from Python's library, as chat completions of 1 to 64 streams, each
of as many tokens. Every server has the same weights on the same processor, one after another.
"overhead": a decode step of as many answers by `Engine.run`, and by HTTP.
"turns": the server's processor time for a turn of a chat in memory, whose client sends all of its
messages each time. What a thread of the server's spends on the model's forward grows with the text
before it, in any server; all else is compared.
"""

from __future__ import annotations

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
from kvpager.cli.needles import shipped_model_path
from kvpager_bench import library_text, servers, subjects
from kvpager_bench.harness import Column, Report
from kvpager_bench.peers.environments import PeerError
from kvpager_bench.places import results_dir, scratch_folder
from kvpager_bench.study import Asked, Option, Study, Table

CODER = "tiny-coder"
PARTS = ("throughput", "overhead", "turns")
PROMPT_CHARACTERS = 1200
SERVERS = (servers.KVPAGER, servers.TRANSFORMERS, servers.VLLM)
GREEDY = {"temperature": 0}
WITHIN = 0.5  # aim: beside the forward, a turn costs at most twice that of the shortest chat
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
TURNS = (
    Column("messages"),
    Column("prompt_tokens"),
    Column("turn_ms", "ms of processor"),
    Column("forward_ms", "ms of processor"),
    Column("beside_ms", "ms of processor"),
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


def log_of(name: str) -> Path:
    """The file of a server's output."""
    path = results_dir() / "logs" / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def measure_or_skip(asked: Asked, report: Report, server: str, model: Path) -> None:
    try:
        measure_server(asked, report, server, model)
    except (PeerError, servers.ServerError) as error:
        if server == servers.KVPAGER:
            raise
        report.skip(server, str(error))


def measure_server(asked: Asked, report: Report, server: str, model: Path) -> None:
    o = asked.options
    body = {**GREEDY, "max_tokens": o.tokens}
    name = str(model) if server == servers.TRANSFORMERS else model.name
    log = log_of(f"serving-{server.split()[0]}")
    with servers.running(server, model, asked.threads, log) as running:
        url = running.url
        servers.send(url, name, prompts(2, seed=99), 2, **body)
        for streams in o.streams:
            texts = prompts(streams * o.answers, seed=streams)
            load = servers.send(url, name, texts, streams, **body)
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


def judge_throughput(report: Report) -> None:
    rates = {
        (row["server"], row["streams"]): report.number(row, "tokens_per_s") for row in report.rows
    }
    for (server, streams), rate in rates.items():
        ours = rates.get((servers.KVPAGER, streams))
        if server != servers.KVPAGER and ours is not None:
            figure = f"tokens per second of {streams} streams"
            report.compare(figure, ours, rate, str(server), "1/s", 1.0)
    errors = sum(report.number(row, "errors") for row in report.rows if row["server"] == SERVERS[0])
    report.judge("kvpager answers every request", errors == 0, f"{errors:.0f} errors")


def measure_overhead(asked: Asked, report: Report, model: Path) -> None:
    o, streams = asked.options, asked.options.overhead_streams
    texts = prompts(streams, seed=1)
    alone = _engine_seconds(model, texts, o.tokens, asked)
    body = {**GREEDY, "max_tokens": o.tokens}
    log = log_of("serving-overhead")
    with servers.running(servers.KVPAGER, model, asked.threads, log) as running:
        url, taken = running.url, []
        for run in range(o.runs + 1):
            load = servers.send(url, model.name, texts, streams, seed=run, **body)
            if load.errors or load.answers != streams:
                raise servers.ServerError(f"{load.answers} answers: {load.errors}")
            taken.append(statistics.median(load.between))
    http = min(taken[1:])
    cost = 100 * (http / alone - 1)
    report.add(
        streams=streams,
        tokens=o.tokens,
        engine_step_ms=1000 * alone,
        http_step_ms=1000 * http,
        http_cost=cost,
    )
    report.judge(
        f"HTTP costs less than {AIM_OVERHEAD:g}% of a decode step",
        cost < AIM_OVERHEAD,
        f"{cost:.1f}% at {streams} streams",
    )


def _engine_seconds(model: Path, texts: list[str], tokens: int, asked: Asked) -> float:
    """Seconds between tokens by `Engine.run`, of the fastest run."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    medians = []
    with Engine(loaded.eval(), tokenizer=tokenizer, threads=asked.threads) as engine:
        for _ in range(asked.options.runs + 1):
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


def measure_turns(asked: Asked, report: Report) -> None:
    model = shipped_model_path(CODER)
    log = log_of("serving-turns")
    with (
        servers.running(servers.KVPAGER, model, asked.threads, log) as running,
        httpx.Client(base_url=running.url, timeout=600) as client,
    ):
        for count in sorted(asked.options.messages):
            _add_turns(asked, report, running, client, count)
    shortest = report.rows[0]
    for row in report.rows[1:]:
        report.compare(
            f"a turn of a chat of {row['messages']} messages, beside the forward",
            report.number(row, "beside_ms"),
            report.number(shortest, "beside_ms"),
            f"one of {shortest['messages']}",
            "ms",
            WITHIN,
            lower_is_better=True,
        )


def _add_turns(
    asked: Asked, report: Report, running: servers.Server, client: httpx.Client, count: int
) -> None:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": "a"} for at in range(count - 1)]
    turns: list[tuple[float, float]] = []
    tokens = 0
    for _ in range(asked.options.turns + 2):
        before = running.processor_seconds()
        body = {**GREEDY, "model": CODER, "messages": messages, "max_tokens": 1}
        answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
        time.sleep(0.05)  # what follows an answer
        after = running.processor_seconds()
        spent = sorted(one - before.get(thread, 0.0) for thread, one in after.items())
        turns.append((sum(spent), spent[-1]))  # the thread that steps spends most
        tokens = answer["usage"]["prompt_tokens"]
        text = answer["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "a"}]
    whole, forward = (statistics.median(one) for one in zip(*turns[2:], strict=True))
    report.add(
        messages=count,
        prompt_tokens=tokens,
        turn_ms=1000 * whole,
        forward_ms=1000 * forward,
        beside_ms=1000 * statistics.median(one - step for one, step in turns[2:]),
    )


def measure(asked: Asked) -> None:
    o = asked.options
    if "turns" in o.parts:
        measure_turns(asked, asked.report("serving_turns"))
    if not {"throughput", "overhead"} & set(o.parts):
        return
    with saved_model(o.subject) as model:
        if "throughput" in o.parts:
            report = asked.report("serving")
            for server in o.servers:
                measure_or_skip(asked, report, server, model)
            judge_throughput(report)
        if "overhead" in o.parts:
            measure_overhead(asked, asked.report("serving_overhead"), model)


STUDY = Study(
    measure,
    (
        Table("serving", "Tokens per second over HTTP, by server and streams", THROUGHPUT),
        Table("serving_overhead", "What HTTP costs beside a decode step", OVERHEAD),
        Table("serving_turns", "A turn in memory by messages of its chat", TURNS),
    ),
    (
        Option("parts", PARTS, among=PARTS),
        Option("subject", "gqa8-bf16", CODER, help="a model of subjects.py"),
        Option("servers", SERVERS, [servers.KVPAGER], among=SERVERS),
        Option("streams", [1, 16, 64], [1, 4]),
        Option("answers", 2, 1, help="of each stream"),
        Option("tokens", 48, 8, help="of an answer"),
        Option("overhead-streams", 16, 4),
        Option("messages", [200, 1500, 3900], [20, 40], help="of a chat, by part turns"),
        Option("turns", 20, 2, help="of each of these chats"),
        Option("runs", 3, 1),
    ),
    {"prompt_characters": PROMPT_CHARACTERS},
)

if __name__ == "__main__":
    STUDY.main()
