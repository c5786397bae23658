"""A server that runs in a thread of the tests, or in a process that can be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import openai
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvpager import Engine
from kvpager.cli.needles import shipped_model_path
from kvpager.server.run import Server
from kvpager.server.service import Service
from kvpager.server.settings import ServerSettings

CODER = "tiny-coder"
GREEDY = {"temperature": 0.0}
_LONGEST = 120.0


def coder():
    """The shipped language model and its tokenizer."""
    folder = shipped_model_path(CODER)
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def coder_engine(model, tokenizer, **options):
    """An engine of it, quick to start."""
    return Engine(
        model, tokenizer=tokenizer, pool_tokens=2048, rows=16, small_rows="fixed", **options
    )


class Running:
    """A server's address and clients, and for one in this process what is behind it."""

    def __init__(self, url, service=None, server=None):
        self.url = url
        self.service = service
        self.server = server
        self.http = httpx.Client(base_url=url, timeout=_LONGEST, headers={"x-kvpager": "1"})
        self.openai = openai.OpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=_LONGEST
        )

    def chat(self, *contents, **options):
        """A greedy chat completion of messages of a user and of an assistant in turn."""
        return self.openai.chat.completions.create(
            model=CODER, messages=said(*contents), **{**GREEDY, "max_tokens": 8, **options}
        )

    def post(self, path, **body):
        return self.http.post(path, json=body)

    def close(self):
        self.http.close()
        self.openai.close()


def said(*contents):
    """Messages of a user and of an assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


@contextlib.contextmanager
def running(engine, store, **settings):
    """A server of an engine, in a thread."""
    store = "off" if store is None else str(store)
    values = {"port": 0, "drain_seconds": 5.0, "log_level": "error", **settings}
    service = Service(engine, ServerSettings(store=store, **values), names=(CODER,), root=CODER)
    ready = threading.Event()
    server = Server(service, lambda url: ready.set())
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    client = Running(server.url, service, server)
    try:
        assert ready.wait(30)
        yield client
    finally:
        client.close()
        server.stop()
        thread.join(60)
        assert not thread.is_alive()


@contextlib.contextmanager
def started(coder, store, **settings):
    """A server of an engine that has seen nothing."""
    with coder_engine(*coder) as engine, running(engine, store, **settings) as client:
        yield client


class ServerProcess:
    """`kvpager serve` in a process of its own."""

    def __init__(self, store: Path, *arguments: str):
        command = [
            sys.executable,
            "-m",
            "kvpager",
            "serve",
            "--model",
            str(shipped_model_path(CODER)),
        ]
        command += ["--port", "0", "--store", str(store)]
        fast = ["--threads", "1", "--pool-tokens", "2048", "--rows", "16", "--small-rows", "fixed"]
        self.process = subprocess.Popen(
            [*command, *fast, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.said: list[str] = []
        self.client = Running(self._url())
        self._drain = threading.Thread(target=self._read, daemon=True)
        self._drain.start()

    def kill(self):
        """SIGKILL: nothing is tidied up."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)
        self.client.close()

    def terminate(self):
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self.client.close()
        return code

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.kill()
        self.process.stderr.close()

    def _url(self):
        deadline = time.monotonic() + _LONGEST
        while time.monotonic() < deadline:
            line = self.process.stderr.readline()
            self.said.append(line)
            if line.strip().startswith("API"):
                return line.split()[1].removesuffix("/v1")
            if not line and self.process.poll() is not None:
                break
        raise AssertionError("the server did not start: " + "".join(self.said))

    def _read(self):
        with contextlib.suppress(ValueError):
            for line in self.process.stderr:
                self.said.append(line)
