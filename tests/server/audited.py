"""A small OpenAI-compatible server whose cache can be made wrong on purpose.

Its model's state after a token is a digest of the state before it and of the token, and the
likelihood of the next token follows from the state. What a cache keeps of a text are its states, so
a wrong state acts like wrong keys and values: on everything after it, and on nothing before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BLOCK = 16  # tokens, the unit of the cache
_CHOICES = 8  # tokens that may follow
_WORDS = [f" w{i}" for i in range(512)]


@dataclass
class Behaviour:
    """What the server knows and does wrong.

    Attributes:
        salts: whether `cache_salt` separates caches; None: the field is a 400.
        cache_prompt: whether `cache_prompt: false` is known.
        reports: whether cached tokens are reported.
        ids: whether token ids are returned; otherwise the field is a 400.
        logprobs: whether there are log-probabilities.
        chat_style: whether these have the form of chats, as llama.cpp's do.
        caches: whether anything is reused.
        capacity: tokens that are kept.
        noise: in nats, of logits: another one for each way in which a text is computed; decides
            near ties.
        restored: of the states that are reused, what they become: of the state and the number
            of restarts.
        answered: of an answer whose prompt was reused, what is sent instead: of the server, the
            body and the answer.
        weights: the model's, by the number of restarts.
        forgets: whether a restart empties the cache.
        seconds: that an answer takes at least.
        silent: whether answers are empty.
    """

    salts: bool | None = True
    cache_prompt: bool = False
    reports: bool = True
    ids: bool = True
    logprobs: bool = True
    chat_style: bool = False
    caches: bool = True
    capacity: int = 1 << 20
    noise: float = 0.0
    restored: object = None
    answered: object = None
    weights: object = None
    forgets: bool = False
    seconds: float = 0.0
    silent: bool = False


def digest(*parts) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


@dataclass
class Generated:
    """An answer. tops: (token, log-probability) pairs of each position, the likeliest first."""

    prompt: list[str]
    cached: int
    tokens: list[str] = field(default_factory=list)
    tops: list[list[tuple[str, float]]] = field(default_factory=list)


class StandIn:
    """The server. `asked` has the bodies of all completions, `paths` all paths."""

    def __init__(self, behaviour: Behaviour):
        self.behaviour = behaviour
        self.asked: list[dict] = []
        self.paths: list[str] = []
        self.restarts = 0
        self.busy = self.busiest = 0
        self.vocabulary = {word: i for i, word in enumerate(_WORDS)}
        self.kept: dict[tuple, int] = {}  # (salt, tokens) of whole blocks -> state
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.paths.append(self.path)
                found = self.path == "/v1/models"
                self.reply(200 if found else 404, {"data": [{"id": "stand-in"}]} if found else {})

            def do_POST(self):
                outer.paths.append(self.path)
                body = json.loads(self.rfile.read(int(self.headers["content-length"])) or "{}")
                if self.path == "/restart":
                    outer.restarts += 1
                    if outer.behaviour.forgets:
                        outer.kept.clear()
                    self.reply(200, {})
                    return
                problem = outer.problem(body)
                if problem:
                    self.reply(400, {"error": {"message": problem}})
                    return
                with outer.lock:
                    outer.busy += 1
                    outer.busiest = max(outer.busiest, outer.busy)
                time.sleep(outer.behaviour.seconds)
                try:
                    answer = outer.complete(body)
                finally:
                    with outer.lock:
                        outer.busy -= 1
                if isinstance(answer, int):
                    self.reply(answer, {"error": {"message": "Out of range float values"}})
                elif body.get("stream"):
                    self.stream(answer)
                else:
                    self.reply(200, answer)

            def reply(self, status, value):
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def stream(self, answer):
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                for event in outer.events(answer):
                    self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.write(b"data: [DONE]\n\n")

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def problem(self, body) -> str:
        """Why a body is refused; empty if it is not."""
        known = {
            "cache_salt": self.behaviour.salts is not None,
            "return_token_ids": self.behaviour.ids,
            "return_tokens_as_token_ids": False,
            "cache_prompt": self.behaviour.cache_prompt,
        }
        refused = [name for name in body if not known.get(name, True)]
        salt = body.get("cache_salt", "")
        if self.behaviour.salts and not isinstance(salt, str):
            refused.append("cache_salt")
        return f"unknown field {refused[0]}" if refused else ""

    def complete(self, body):
        self.asked.append(body)
        made = self.generate(self.tokens_of(body["prompt"]), body)
        if made.cached and self.behaviour.answered is not None:
            made = self.behaviour.answered(self, body, made)
            if isinstance(made, int):
                return made
        return self.written(body, made)

    def tokens_of(self, prompt) -> list[str]:
        """Of a text, or of token ids."""
        if isinstance(prompt, str):
            return re.findall(r"\s*\S+", prompt)
        tokens = list(self.vocabulary)
        return [tokens[i] for i in prompt]

    def generate(self, prompt, body, *, cold=False) -> Generated:
        how = self.behaviour
        salt = body.get("cache_salt") if how.salts else None
        uses = how.caches and not cold and body.get("cache_prompt", True)
        weights = 0 if how.weights is None else how.weights(self.restarts)
        state, cached = digest(weights), 0
        with self.lock:
            for end in range(BLOCK, len(prompt), BLOCK) if uses else ():
                found = self.kept.pop((salt, *prompt[:end]), None)
                if found is None:
                    break
                self.kept[(salt, *prompt[:end])] = found
                state, cached = found, end
        if cached and how.restored is not None:
            state = how.restored(state, self.restarts)
        way = (cached, len(prompt), self.busy > 1)
        made = Generated(prompt, cached)
        text = list(prompt)
        wanted = 0 if how.silent else body["max_tokens"]
        for place in range(cached, len(prompt) + wanted):
            if place >= len(prompt):
                made.tops.append(self.likelihoods(state, way))
                made.tokens.append(made.tops[-1][0][0])
                text.append(made.tokens[-1])
            state = digest(weights, state, text[place])
            if (place + 1) % BLOCK == 0 and how.caches and not cold:
                with self.lock:
                    self.kept[(salt, *text[: place + 1])] = state
                    while len(self.kept) * BLOCK > how.capacity:
                        del self.kept[next(iter(self.kept))]
        return made

    def likelihoods(self, state, way) -> list[tuple[str, float]]:
        """The next tokens, the likeliest first. One time in six the first two are a near tie."""
        words = [_WORDS[digest(state, i, "word") % 64 * 8 + i] for i in range(_CHOICES)]
        logits = [digest(state, i, "logit") % 4096 / 1024 for i in range(_CHOICES)]
        if digest(state, "tie") % 6 == 0:
            first, second = sorted(range(_CHOICES), key=lambda i: -logits[i])[:2]
            logits[second] = logits[first] - 1e-4
        errors = [digest(state, i, way) % 2001 / 1000 - 1 for i in range(_CHOICES)]
        logits = [x + self.behaviour.noise * error for x, error in zip(logits, errors)]
        total = math.log(sum(map(math.exp, logits)))
        pairs = [(word, logit - total) for word, logit in zip(words, logits)]
        return sorted(pairs, key=lambda pair: -pair[1])

    def written(self, body, made):
        choice = {"index": 0, "text": "".join(made.tokens), "finish_reason": "length"}
        if "logprobs" in body and self.behaviour.logprobs:
            tops = [pairs[: body["logprobs"]] for pairs in made.tops]
            firsts = [pairs[0][1] for pairs in made.tops]
            if self.behaviour.chat_style:
                choice["logprobs"] = {
                    "content": [
                        {
                            "token": token,
                            "logprob": first,
                            "top_logprobs": [{"token": t, "logprob": p} for t, p in pairs],
                        }
                        for token, first, pairs in zip(made.tokens, firsts, tops)
                    ]
                }
            else:
                choice["logprobs"] = {
                    "tokens": made.tokens,
                    "token_logprobs": firsts,
                    "top_logprobs": [dict(pairs) for pairs in tops],
                }
        if body.get("return_token_ids"):
            choice["token_ids"] = [self.id_of(token) for token in made.tokens]
            choice["prompt_token_ids"] = [self.id_of(token) for token in made.prompt]
        usage = {"prompt_tokens": len(made.prompt), "completion_tokens": len(made.tokens)}
        usage["prompt_tokens_details"] = (
            {"cached_tokens": made.cached} if self.behaviour.reports else None
        )
        return {"model": "stand-in", "choices": [choice], "usage": usage}

    def events(self, answer):
        """The answer in two pieces, and its usage."""
        choice = answer["choices"][0]
        half = len(choice["text"]) // 2
        lists = choice.get("logprobs") or {}
        for first in (True, False):
            part = slice(None, 1) if first else slice(1, None)
            piece = {"index": 0, "text": choice["text"][:half] if first else choice["text"][half:]}
            if lists:
                piece["logprobs"] = {name: values[part] for name, values in lists.items()}
            if "token_ids" in choice:
                piece["token_ids"] = choice["token_ids"][part]
                piece["prompt_token_ids"] = choice["prompt_token_ids"] if first else None
            yield {"choices": [piece]}
        yield {"choices": [], "usage": answer["usage"]}

    def id_of(self, token) -> int:
        with self.lock:
            return self.vocabulary.setdefault(token, len(self.vocabulary))


@contextlib.contextmanager
def standing_in(**behaviour):
    """A stand-in that answers, in a thread."""
    server = StandIn(Behaviour(**behaviour))
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        thread.join(10)
        server.http.server_close()
