"""Open WebUI's requests, as its backend sends them: models, a chat, a prompt for a title."""

from __future__ import annotations

import json
import urllib.request

from trials import MODEL, main, post

USER = [{"role": "user", "content": [{"type": "text", "text": "Write a class."}]}]


def try_models(url):
    request = urllib.request.Request(f"{url}/v1/models", headers={"authorization": "Bearer none"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert MODEL in [model["id"] for model in json.load(answer)["data"]]


def try_a_chat_with_its_fields(url):
    body = {
        "model": MODEL,
        "messages": [{"role": "system", "content": "Be brief."}, *USER],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.8,
        "top_p": 0.9,
        "max_tokens": 12,
        "frequency_penalty": 0,
        "stop": ["###"],
        "reasoning_effort": "medium",
    }
    events = [
        line.removeprefix("data: ")
        for line in post(f"{url}/v1/chat/completions", body).splitlines()
        if line.startswith("data: ")
    ]
    assert events[-1] == "[DONE]"
    assert 1 <= json.loads(events[-2])["usage"]["completion_tokens"] <= 12  # by chance


def try_a_task_for_a_title(url):
    history = [*USER, {"role": "assistant", "content": "class Names: pass"}]
    body = {
        "model": MODEL,
        "messages": [*history, {"role": "user", "content": "A title for this chat, as JSON."}],
        "stream": False,
        "max_completion_tokens": 16,
    }
    answer = json.loads(post(f"{url}/v1/chat/completions", body))
    assert answer["choices"][0]["message"]["content"]


if __name__ == "__main__":
    main(globals())
