"""What `kvpager generate` tells of a generation, and `kvpager score --against` reads back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvpager.cli.failure import CliError

if TYPE_CHECKING:
    from kvpager import Assembly, SpeculationStats

COMMAND = "generate"


@dataclass(frozen=True)
class Answer:
    """What was generated, and what it cost.

    prompt_ids: all tokens before the generated ones. logprobs: one per generated token, each
    exactly a float32; None unless asked for, as speculation. seed: of the draws; None where the
    text is greedy. assembly: of a text with segments.
    """

    prompt_ids: list[int]
    ids: list[int]
    text: str | None
    logprobs: list[float] | None
    seed: int | None
    speculation: SpeculationStats | None
    reused_tokens: int
    prefilled_tokens: int
    assembly: Assembly | None
    time_to_first_token_s: float
    generate_s: float
    restored_tokens: int
    restored_tokens_consumed: int
    recomputed_tokens: int
    saved_to: str | None
    saved_bytes: int | None
    saved_shared_bytes: int | None
    fingerprint: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """One flat object, but for speculation, the assembly and the fingerprint."""
        values = {"command": COMMAND, **vars(self), "fingerprint": dict(self.fingerprint)}
        if self.assembly is not None:
            values["assembly"] = asdict(self.assembly)
        stats = self.speculation
        if stats is not None:
            values["speculation"] = asdict(stats) | {
                "acceptance": stats.acceptance,
                "tokens_per_forward": stats.tokens_per_forward,
            }
        return values

    def summary(self) -> str:
        """One line for a person."""
        return "; ".join(self._facts())

    def _facts(self) -> Iterator[str]:
        yield f"{self.reused_tokens:,} tokens reused, {self.prefilled_tokens:,} prefilled"
        if (made := self.assembly) is not None:
            yield (
                f"{made.exact:,} tokens exact, {made.moved:,} moved, {made.recomputed:,} "
                f"recomputed, {made.fresh:,} new"
            )
        if self.restored_tokens:
            consumed, restored = self.restored_tokens_consumed, self.restored_tokens
            yield f"{consumed:,} of {restored:,} restored tokens consumed"
        if self.recomputed_tokens:
            yield f"{self.recomputed_tokens:,} damaged ones computed again"
        yield f"first token after {1000 * self.time_to_first_token_s:.0f} ms"
        if len(self.ids) > 1:
            yield f"{(len(self.ids) - 1) / self.generate_s:.1f} tokens/s after it"
        if (stats := self.speculation) is not None:
            yield (
                f"{stats.tokens_per_forward:.2f} tokens per forward, {stats.accepted:,} of "
                f"{stats.proposed:,} proposed ones accepted"
            )
        if self.seed is not None:
            yield f"--seed {self.seed}"
        if self.logprobs:
            yield f"mean log-probability {sum(self.logprobs) / len(self.logprobs):.4f}"
        if self.saved_to:
            shared = f" ({self.saved_shared_bytes:,} shared)" if self.saved_shared_bytes else ""
            yield f"saved {self.saved_bytes:,} bytes{shared} to {self.saved_to}"


@dataclass(frozen=True)
class Recorded:
    """The part of an Answer that scoring it again needs.

    prompt_ids, ids: token ids, of at least one token each. logprobs: [len(ids)] float32.
    """

    path: str
    prompt_ids: list[int]
    ids: list[int]
    logprobs: npt.NDArray[np.float32]
    fingerprint: Mapping[str, Any]


def read_answer(path: str) -> Recorded:
    """Reads what `kvpager generate --format json --logprobs` wrote.

    Raises:
        CliError: it cannot be read or is something else; names the field.
    """
    values = _read_object(path)
    if values.get("command") != COMMAND:
        raise _refusal(path, "command", values.get("command"), f'"{COMMAND}"')
    prompt_ids = _token_ids(path, "prompt_ids", values.get("prompt_ids"))
    ids = _token_ids(path, "ids", values.get("ids"))
    fingerprint = values.get("fingerprint")
    if not isinstance(fingerprint, dict):
        raise _refusal(path, "fingerprint", fingerprint, "an object")
    return Recorded(path, prompt_ids, ids, _logprobs(path, values, len(ids)), fingerprint)


def _read_object(path: str) -> dict[str, Any]:
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise CliError(f"--against {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON
        raise CliError(f"--against {path}: not JSON ({error}); {_EXPECTED}") from error
    if not isinstance(values, dict):
        raise CliError(f"--against {path}: a JSON {type(values).__name__}; {_EXPECTED}")
    return values


def _token_ids(path: str, name: str, values: Any) -> list[int]:
    if not isinstance(values, list) or not values:
        raise _refusal(path, name, values, "a list of token ids")
    for place, value in enumerate(values):
        if type(value) is not int or not 0 <= value < 2**31:
            raise _refusal(path, f"{name}[{place}]", value, "a token id")
    return values


def _logprobs(path: str, values: Mapping[str, Any], count: int) -> npt.NDArray[np.float32]:
    given = values.get("logprobs")
    if given is None:
        raise CliError(f"--against {path}: no logprobs in it; generate with --logprobs")
    if not isinstance(given, list) or len(given) != count:
        shown = len(given) if isinstance(given, list) else given
        raise _refusal(path, "logprobs", shown, f"a list of {count}, one for each of ids")
    for place, value in enumerate(given):
        with np.errstate(over="ignore"):
            if type(value) is not float or float(np.float32(value)) != value:
                raise _refusal(path, f"logprobs[{place}]", value, "a float32 number")
    return np.array(given, dtype=np.float32)


_EXPECTED = "expected what `kvpager generate --format json --logprobs` writes"
_SHOWN = 60  # characters of a wrong value


def _refusal(path: str, name: str, value: Any, expected: str) -> CliError:
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
    return CliError(f"--against {path}: {name} is {shown}; expected {expected}")
