"""`kvpager score`: log-probabilities of given tokens; those of a generation, computed again."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvpager.cli.failure import CliError, UsageError
from kvpager.cli.models import load_model, load_tokenizer
from kvpager.cli.options import (
    add_model_options,
    add_prompt_options,
    prompt_ids,
    read_prompt,
    require_model,
)
from kvpager.cli.output import emit_result, note, shows_progress
from kvpager.cli.pager_options import ALIASES, DEFAULTS, add_pager_options, pager_config, with_flags
from kvpager.cli.parser import Parser
from kvpager.cli.terminal import Look, look
from kvpager.words import duration

if TYPE_CHECKING:
    from kvpager import Agreement, Engine, Score
    from kvpager.verify.bits import Comparison


_NAME = 20
DIFFERENT = 1


def add(commands: Any, common: Parser) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "score",
        parents=[common],
        help="log-probabilities of given tokens, or of a generation once more",
        description="Teacher-forced log-probabilities, in this process and from token ids alone. "
        "With --against, the tokens that `generate` produced are scored again and compared with "
        "the log-probabilities it told, bit for bit; give the same model and pager options.",
        epilog="Exit codes: 0; 1 a failure, or with --against any bit that differs; 2 wrong "
        "command line.",
    )
    add_model_options(parser, default="none: it has to be given")
    tokens = add_prompt_options(parser, "One of these.")
    tokens.add_argument(
        "--against",
        metavar="FILE",
        help="what `kvpager generate --format json --logprobs` wrote",
    )
    parser.add_argument(
        "--on-mismatch",
        choices=("refuse", "compare"),
        default="refuse",
        help="where --against was generated under other numerics or another model: refuse "
        "(default), or compare nevertheless and say what differs",
    )
    add_pager_options(parser, DEFAULTS, ALIASES)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    require_model(args)
    if args.against is None and args.on_mismatch != "refuse":
        raise UsageError("--on-mismatch has no meaning without --against")
    prompt = read_prompt(args)
    if prompt is None and args.against is None:
        raise UsageError("tokens are missing; give --prompt, --prompt-file, --ids or --against")
    config = pager_config(args)
    recorded = None if args.against is None else read_answer(args.against)
    model = load_model(args.model, args.dtype, config.device)
    if recorded is not None:
        ids = recorded.prompt_ids + recorded.ids
    else:
        ids = prompt_ids(args, prompt, load_tokenizer(args.model)) or []

    from kvpager import Engine

    with Engine(model, config, threads=args.threads, progress=shows_progress(args)) as engine:
        different = {} if recorded is None else _mismatches(args, engine, recorded)
        start = time.perf_counter()
        score = engine.score(ids, progress=shows_progress(args))
        seconds = time.perf_counter() - start
    note(args, f"{len(ids):,} tokens in {duration(seconds)}")
    if recorded is None:
        return _print(args, ids, score, seconds)
    return _tell_agreement(args, recorded, score, different, seconds)


def _mismatches(
    args: argparse.Namespace, engine: Engine, recorded: Recorded
) -> dict[str, dict[str, Any]]:
    """Fields of the fingerprint that differ. Raises CliError, unless they are to be accepted."""
    here, there = engine.fingerprint, recorded.fingerprint
    different = {
        name: {"generated": there.get(name), "here": here.get(name)}
        for name in [*here, *(name for name in there if name not in here)]
        if here.get(name) != there.get(name)
    }
    if not different or args.on_mismatch == "compare":
        return different
    from kvpager.fingerprint import RULES

    name, values = next(iter(different.items()))
    remedy = RULES[name].remedy if name in RULES else "use the release it was generated with"
    raise CliError(
        f"--against {recorded.path} was generated with {name} {values['generated']!r}, and here "
        f"it is {values['here']!r}; {with_flags(remedy.replace('saved', 'generated'))}, or pass "
        "--on-mismatch compare to compare nevertheless"
    )


def _print(args: argparse.Namespace, ids: list[int], score: Score, seconds: float) -> int:
    values = {
        "command": "score",
        "ids": ids,
        "logprobs": score.logprobs.tolist(),  # float32 values, and so the same bits
        "sum": score.sum,
        "mean": score.mean,
        "perplexity": score.perplexity,
        "seconds": seconds,
    }
    facts = {
        "tokens": f"{len(score.logprobs):,} (all but the first)",
        "log-probability": f"{score.sum:.6f}",
        "mean": f"{score.mean:.6f}",
        "perplexity": f"{score.perplexity:.6g}",
    }
    emit_result(args, values, lambda: _lines(look(args), facts))
    return 0


def _tell_agreement(
    args: argparse.Namespace,
    recorded: Recorded,
    score: Score,
    different: Mapping[str, Mapping[str, Any]],
    seconds: float,
) -> int:
    from kvpager.verify.bits import compare_bits

    agreement = score.against(recorded.logprobs)
    bits = compare_bits(
        score.logprobs[-len(recorded.ids) :],
        recorded.logprobs,
        "log-probability of a generated token",
    )
    values = {
        "command": "score",
        "against": recorded.path,
        "prompt_tokens": len(recorded.prompt_ids),
        "tokens": agreement.tokens,
        "max_abs_delta": agreement.max_abs_delta,
        "approx_kl": agreement.approx_kl,
        "clip_fraction": agreement.clip_fraction,
        "differing_tokens": agreement.differing,
        "bits": bits.to_json(),
        "fingerprint_differs": different,
        "logprobs": score.logprobs[-len(recorded.ids) :].tolist(),
        "seconds": seconds,
    }
    facts = _facts(recorded, agreement, bits, different)
    emit_result(args, values, lambda: _lines(look(args), facts))
    return 0 if bits.same else DIFFERENT


def _facts(
    recorded: Recorded,
    agreement: Agreement,
    bits: Comparison,
    different: Mapping[str, Mapping[str, Any]],
) -> dict[str, str]:
    facts = {
        "tokens": f"{agreement.tokens:,}, after a prompt of {len(recorded.prompt_ids):,}",
        "max |delta logp|": f"{agreement.max_abs_delta:.6g}",
        "approximate KL": f"{agreement.approx_kl:.6g}",
        "clip fraction": f"{agreement.clip_fraction:.6g}",
        "differing tokens": f"{agreement.differing:,}",
        "differing bits": f"{bits.differing_bits:,} of {bits.bits:,}",
    }
    if bits.first is not None:
        facts["first difference"] = str(bits.first)
    for name, values in different.items():
        facts[f"other {name}"] = f"generated {values['generated']!r}, here {values['here']!r}"
    return facts


def _lines(shown: Look, facts: Mapping[str, str]) -> str:
    return "".join(shown.field(name, fact, wide=_NAME) + "\n" for name, fact in facts.items())


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
    if values.get("command") != "generate":
        raise _refusal(path, "command", values.get("command"), '"generate"')
    prompt_ids = _token_ids(path, "prompt_ids", values.get("prompt_ids"))
    ids = _token_ids(path, "ids", values.get("ids"))
    fingerprint = values.get("fingerprint")
    if not isinstance(fingerprint, dict):
        raise _refusal(path, "fingerprint", fingerprint, "an object")
    return Recorded(path, prompt_ids, ids, _logprobs(path, values, len(ids)), fingerprint)


def _read_object(path: str) -> dict[str, Any]:
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8-sig"))
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
