"""Requests of one kind to one server: greedy completions, with all that it says about them."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from kvpager.audit.answers import Answer, read_answer
from kvpager.audit.client import HttpError, Server
from kvpager.audit.prompts import make_prompt
from kvpager.errors import PagerError

Prompt: TypeAlias = str | Sequence[int]
Cold: TypeAlias = Literal["cache_salt", "cache_prompt", "new text"]

_TOPS = (5, 1, None)  # most likely tokens to ask for; 5 is the most that OpenAI's API allows
_PROBE_RECORDS = 8
_CHARACTERS = 4  # of a token, where the server does not count tokens
_BUSY = (408, 429, 502, 503, 504)  # statuses that say nothing of a request's fields
_LOST = 3  # requests in a row without a response


class AuditError(PagerError):
    """The server could not be audited."""


class Asker:
    """Sends prompts to one model of a server, with the optional fields that the server takes.

    Attributes:
        model: its name.
        cold: how a text is computed without what the server keeps of it: with a fresh
            `cache_salt`, with `cache_prompt: false`, or not at all once it was sent ("new text").
        assumed: whether `cold` follows from a refused value alone, as cached tokens are not
            reported.
        record_tokens: tokens of one line of a prompt.
        reports: whether cached tokens are reported.
    """

    def __init__(
        self, server: Server, model: str | None, max_tokens: int, prompt_tokens: int
    ) -> None:
        """Tries out what the server takes, with about ten requests.

        Raises:
            AuditError: it lists no models, or answers no completion.
        """
        self._server = server
        self._run = secrets.token_hex(8)
        self._chance = random.Random(self._run)
        self._salts = 0
        self._lost = 0
        self.cold: Cold = "new text"
        self.assumed = False
        try:
            names = [model] if model else server.models()
            if not names:
                raise AuditError(f"{server.url} lists no models; give one with --model")
            self.model = names[0]
            self._fields: dict[str, Any] = {
                "model": self.model,
                "temperature": 0,
                "max_tokens": max_tokens,
            }
            self._ask_for_logprobs()
            if self._taken(ignore_eos=True):
                self._fields["ignore_eos"] = True
            self._ask_for_ids()
            self._find_cold(self.prompt(prompt_tokens))
        except HttpError as error:
            raise AuditError(str(error)) from error

    def prompt(self, tokens: int) -> str:
        """A new text of about so many tokens."""
        return make_prompt(self._chance, max(1, round(tokens / self.record_tokens)))

    def ask(
        self, prompt: Prompt, salt: str | None = None, *, stream: bool = False, **fields: Any
    ) -> Answer:
        """The answer to a prompt.

        Args:
            prompt: text or token ids.
            salt: names what may be reused: what was computed for an equal salt. None: nothing, as
                far as `cold` allows.
            stream: whether it is sent in pieces.
            fields: further ones of the request, or other values.

        Raises:
            HttpError: the request failed.
            AuditError: nor did the ones before it get a response.
        """
        body = {**self._fields, "prompt": prompt, **fields}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if salt is None:
            self._salts += 1
        if self.cold == "cache_salt":
            body["cache_salt"] = f"{self._run}-{self._salts if salt is None else salt}"
        elif self.cold == "cache_prompt" and salt is None:
            body["cache_prompt"] = False
        try:
            answer = self._send(body)
        except HttpError as error:
            self._lost = 0 if error.status else self._lost + 1
            if self._lost >= _LOST:
                raise AuditError(f"the server answers no more: {error}") from error
            raise
        self._lost = 0
        return answer

    def _send(self, body: dict[str, Any]) -> Answer:
        try:
            return read_answer(self._server.complete(body))
        except HttpError as error:
            asked = "logprobs" in body and "logprobs" in self._fields
            if not error.status or error.status in _BUSY or not asked:
                raise
        # JSON has no NaN: vLLM answers 400. Whether the text is right can still be seen.
        body = {name: value for name, value in body.items() if name != "logprobs"}
        return read_answer(self._server.complete(body))

    def _ask_for_logprobs(self) -> None:
        text = make_prompt(self._chance, _PROBE_RECORDS)
        for top in _TOPS:
            fields = {} if top is None else {"logprobs": top}
            try:
                answer = self._send({**self._fields, **fields, "prompt": text})
            except HttpError as error:
                if top is None or error.status not in range(400, 500):
                    raise
                continue
            if answer.scored:
                self._fields |= fields
                break
        counted = answer.prompt_tokens or len(text) / _CHARACTERS
        self.record_tokens = counted / _PROBE_RECORDS
        self.reports = answer.cached_tokens is not None

    def _ask_for_ids(self) -> None:
        """Token ids, and these as the names of tokens, which are unambiguous, unlike texts."""
        if (answer := self._taken(return_token_ids=True)) and answer.ids and answer.prompt_ids:
            self._fields["return_token_ids"] = True
            if self._taken(return_tokens_as_token_ids=True):
                self._fields["return_tokens_as_token_ids"] = True

    def _find_cold(self, text: str) -> None:
        if not self._taken(cache_salt=self._run):
            salted = False
        elif not self.reports:
            # A server that does not know the field does not look at its value.
            salted = self.assumed = not self._taken(cache_salt=[])
        else:
            for salt in ("a", "a", "b"):
                answer = self._send(
                    {**self._fields, "prompt": text, "cache_salt": self._run + salt}
                )
                if salt == "a":
                    warm = answer.cached_tokens
            salted = bool(warm) and not answer.cached_tokens
        if salted:
            self.cold = "cache_salt"
        elif self.reports and self._taken(cache_prompt=False):
            answers = [self._send({**self._fields, "prompt": text}) for _ in range(2)]
            answers.append(self._send({**self._fields, "prompt": text, "cache_prompt": False}))
            if answers[1].cached_tokens and not answers[2].cached_tokens:
                self.cold = "cache_prompt"

    def _taken(self, **fields: Any) -> Answer | None:
        """The answer to a short request with these fields; None if they are refused."""
        body = {**self._fields, "prompt": make_prompt(self._chance, 1), **fields, "max_tokens": 1}
        body.pop("logprobs", None)
        try:
            return self._send(body)
        except HttpError as error:
            if error.status not in range(400, 500):
                raise
            return None
