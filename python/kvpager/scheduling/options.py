"""The options of a generation, defined once for every function that takes them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal, TypeAlias, TypedDict

from kvpager.errors import InvalidArgumentError
from kvpager.speculation.speculation import Speculate
from kvpager.tokens import Integer, TokenIdsLike

MODEL_EOS: Final = "model"

EndTokens: TypeAlias = Integer | Iterable[Integer] | Literal["model"] | None
Stops: TypeAlias = str | Iterable[str | TokenIdsLike]


class GenerationOptions(TypedDict, total=False):
    """Options of `Session.generate`, `Engine.generate_many`, `Engine.run` and `Scheduler.submit`.

    Attributes:
        temperature: 0, the default, for greedy decoding.
        top_k: choose among this many most likely tokens; 0, the default, for all.
        top_p: choose among the most likely tokens that together reach this probability; by default
            1, all.
        eos: token ids that end generation once produced; by default the model's; None for none.
        stop: what ends generation once this call has produced it: a string, or a list of strings
            and of sequences of token ids. Strings need the engine's tokenizer. The tokens are part
            of the session; `Completion.text` and streamed text end before the string.
        speculate: "draft" (the engine's draft model), "prompt-lookup", or a callable that returns a
            fresh `kvpager.speculation.Proposer`. Guesses are verified in the same forwards. Tokens,
            the session's state after each of them and every bit stay the same; only the time
            changes. `Session.speculation` reports the gain. Needs `exact="all"`.
    """

    temperature: float
    top_k: int
    top_p: float
    eos: EndTokens
    stop: Stops
    speculate: Speculate


DEFAULTS: GenerationOptions = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "eos": MODEL_EOS,
    "stop": (),
    "speculate": None,
}


def repeatable(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, to be read twice: what can be iterated over once is a list."""
    read = dict(options)
    stop = read.get("stop", ())
    if not isinstance(stop, str) and isinstance(stop, Iterable):
        read["stop"] = [list(part) if isinstance(part, Iterator) else part for part in stop]
    if isinstance(read.get("eos"), Iterator):
        read["eos"] = list(read["eos"])
    return read


def with_defaults(options: Mapping[str, Any], *beside: str) -> GenerationOptions:
    """Fills in defaults for the options not given. `beside`: further names the function takes.

    Raises InvalidArgumentError for an unknown option.
    """
    unknown = sorted(options.keys() - DEFAULTS.keys())
    if unknown:
        known = [*DEFAULTS, *beside]
        close = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
        raise InvalidArgumentError(f"generate has no option {unknown[0]!r}; {hint}")
    chosen: Any = DEFAULTS | dict(options)
    return chosen  # type: ignore[no-any-return]
