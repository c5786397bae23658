"""What the scripts of this folder share. It imports nothing that an environment may lack."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import socket
import subprocess
import sys
import time
import traceback
import urllib.error
import urllib.request

MODEL = "tiny-coder"
CITIES = ["Oslo", "Rome"]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
LONG = "def add(a, b): return a + b\n" * 4000  # more tokens than the model has positions


def main(module: dict) -> None:
    """Runs the functions `try_...` of a script with the server's URL, which its first argument is.

    Prints a line for each; exits with 1 where one of them failed.
    """
    url = sys.argv[1]
    failed = 0
    for name, function in list(module.items()):
        if not name.startswith("try_"):
            continue
        try:
            done = function(url)
            if inspect.isawaitable(done):
                asyncio.run(done)
            print(f"passed {name}")
        except BaseException:
            failed += 1
            print(f"FAILED {name}\n{traceback.format_exc()}")
    sys.exit(bool(failed))


def error_of(kind: type[BaseException], call, *arguments, **options):
    """The error of class `kind` that a call raises."""
    try:
        call(*arguments, **options)
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}")


def post(url: str, body: dict) -> str:
    """The text of an answer to a JSON body."""
    headers = {"content-type": "application/json", "authorization": "Bearer none"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from error


def use_every_api(url: str, model: str = MODEL) -> None:
    """One request to each API, as a stream too, by way of what lies between."""
    ask = {"model": model, "messages": [{"role": "user", "content": "Sort."}], "max_tokens": 8}
    text = {"model": model, "prompt": "import os", "max_tokens": 4}
    assert json.loads(post(f"{url}/v1/chat/completions", ask))["choices"][0]["message"]["content"]
    assert json.loads(post(f"{url}/v1/completions", text))["choices"][0]["text"]
    for path, body in (("chat/completions", ask), ("completions", text)):
        stream = post(f"{url}/v1/{path}", {**body, "stream": True})
        assert stream.rstrip().endswith("data: [DONE]")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def router(module: str, *arguments: str, path: str = "/health"):
    """A program between client and server, `python -m MODULE`, as its URL once `path` answers."""
    port = free_port()
    command = [sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(port), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            assert process.poll() is None, f"{module} ended with {process.returncode}"
            with contextlib.suppress(OSError):  # not there yet, or busy with its start
                urllib.request.urlopen(url + path, timeout=5).read()
                break
            time.sleep(0.2)
        else:
            raise AssertionError(f"{module} did not answer {path}")
        yield url
    finally:
        process.terminate()
        process.wait(30)
