"""A checked request: what is to be answered, how, and what is kept of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvpager.server.breakpoints import Marks
from kvpager.server.conversations import Conversations
from kvpager.text.tokenizer import Rendering
from kvpager.tokens import TokenIds


@dataclass(frozen=True)
class Prompt:
    """What is to be answered; token ids, or messages.

    Attributes:
        ids: the whole text.
        messages: the whole conversation as the client knows it; or, after `continues` of a
            `Plan`, with `appended`, what comes after it.
        appended: whether `messages` come after those of the conversation that goes on.
        instructions: with `appended`, the system's message of this turn; that of earlier turns
            does not hold any more, as in OpenAI's Responses.
        rendering: how the chat template is asked; its tools are there.
        marks: places in `messages` up to which the prompt is to be saved.
    """

    ids: TokenIds | None = None
    messages: tuple[dict[str, Any], ...] = ()
    appended: bool = False
    instructions: str | None = None
    rendering: Rendering = field(default_factory=Rendering)
    marks: Marks = field(default_factory=Marks)


@dataclass(frozen=True)
class Plan:
    """A checked request.

    Attributes:
        conversations: of the tenant.
        salt: of its chunks; None: the engine's.
        prompt: what is to be answered.
        choices: how many answers.
        max_new_tokens: of each; None: the server's.
        options: of the generation, as `Scheduler.submit` takes them.
        seed: of the first choice; None: a fresh one.
        logprobs: whether they are wanted.
        priority: of admission.
        continues: name of the conversation that goes on; None: whichever fits.
        must_exist: whether an unknown one is an error.
        hint: name of a saved conversation that may have a beginning in common.
        keep_as: name that the conversation has afterwards; None: a name of the server's own.
        save: whether it is saved before the request ends.
        save_ttl: how long that lives after its last use; None: as the store says.
        share: whether later requests without a name may go on from it.
        on_corrupt: see `Engine.restore`.
    """

    conversations: Conversations
    salt: str | None
    prompt: Prompt
    choices: int
    max_new_tokens: int | None
    options: dict[str, Any]
    seed: int | None
    logprobs: bool
    priority: int
    continues: str | None = None
    must_exist: bool = False
    hint: str | None = None
    keep_as: str | None = None
    save: bool = False
    save_ttl: str | None = None
    share: bool = True
    on_corrupt: str = "fail"
