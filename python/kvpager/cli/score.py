"""`kvpager score`: log-probabilities of given tokens; those of a generation, computed again."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpager._support.words import duration
from kvpager.cli.failure import DIFFERENT, CliError, UsageError
from kvpager.cli.models import load_model, load_tokenizer
from kvpager.cli.option_flags import with_flags
from kvpager.cli.options import (
    add_model_options,
    add_prompt_options,
    prompt_ids,
    read_json,
    read_prompt,
)
from kvpager.cli.output import emit_result, note
from kvpager.cli.pager_options import add_pager_options, pager_config
from kvpager.cli.parser import Commands, option
from kvpager.cli.terminal import shows_progress

if TYPE_CHECKING:
    from kvpager import Engine, Score

Fields = Mapping[str, Any]

_NAME = 20  # columns
_SHOWN = 60  # characters of a wrong value
_GENERATION = "`kvpager generate --format json --logprobs`"


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add(
        "score",
        run,
        "log-probabilities of given tokens, or of a generation once more",
        "Teacher-forced log-probabilities, in this process and from token ids alone. With "
        "--against, the tokens that `generate` produced are scored again and compared with the "
        "log-probabilities it told, bit for bit; give the same model and pager options.",
        epilog="Exit codes: 0; 1 a failure, or with --against any bit that differs; 2 wrong "
        "command line.",
    )
    add_model_options(parser)
    tokens = add_prompt_options(parser, "One of these.")
    option(tokens, "--against FILE", f"what {_GENERATION} wrote")
    about = (
        "where --against was generated under other numerics or another model: refuse (default), or "
        "compare nevertheless and say what differs"
    )
    option(parser, "--on-mismatch", about, choices=("refuse", "compare"), default="refuse")
    add_pager_options(parser)
    parser.needs = {"--on-mismatch": ["--against"]}
    parser.show_first(
        *("--json", "--model", "--threads", "--prompt", "--prompt-file", "--ids", "--against"),
        *("--on-mismatch", "--pool-tokens", "--chunks", "--kv-dtype"),
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    prompt = read_prompt(args)
    if prompt is None and args.against is None:
        raise UsageError("tokens are missing; give --prompt, --prompt-file, --ids or --against")
    config = pager_config(args)
    recorded = None if args.against is None else read_generation(args.against)
    model = load_model(args.model, args.dtype, config.device)
    if recorded is not None:
        ids = recorded["prompt_ids"] + recorded["ids"]
    else:
        ids = prompt_ids(args, prompt, load_tokenizer(args.model)) or []

    from kvpager import Engine

    with Engine(model, config, threads=args.threads, progress=shows_progress(args)) as engine:
        different = {} if recorded is None else _mismatches(args, engine, recorded["fingerprint"])
        start = time.perf_counter()
        score = engine.score(ids, progress=shows_progress(args))
        seconds = time.perf_counter() - start
    note(args, f"{len(ids):,} tokens in {duration(seconds)}")
    if recorded is None:
        values, facts = _scored(ids, score)
    else:
        values, facts = _compared(args.against, recorded, score, different)
    values = {"command": "score", **values, "seconds": seconds}
    emit_result(args, values, lambda shown: shown.fields(facts.items(), _NAME))
    return 0 if recorded is None or values["bits"]["first"] is None else DIFFERENT


def _mismatches(args: argparse.Namespace, engine: Engine, there: Fields) -> dict[str, Fields]:
    """Fields of the fingerprint that differ. Raises CliError, unless they are to be accepted."""
    here = engine.fingerprint
    different: dict[str, Fields] = {
        name: {"generated": there.get(name), "here": here.get(name)}
        for name in {**here, **there}
        if here.get(name) != there.get(name)
    }
    if not different or args.on_mismatch == "compare":
        return different
    from kvpager._model.fingerprint_rules import RULES

    name, values = next(iter(different.items()))
    remedy = RULES[name].remedy if name in RULES else "use the release it was generated with"
    raise CliError(
        f"--against {args.against} was generated with {name} {values['generated']!r}, and here it "
        f"is {values['here']!r}; {with_flags(remedy.replace('saved', 'generated'))}, or pass "
        "--on-mismatch compare to compare nevertheless"
    )


def _scored(ids: list[int], score: Score) -> tuple[dict[str, Any], dict[str, str]]:
    """The result, and what a person reads."""
    values = {
        "ids": ids,
        "logprobs": score.logprobs.tolist(),  # float32 values, and so the same bits
        "sum": score.sum,
        "mean": score.mean,
        "perplexity": score.perplexity,
    }
    facts = {
        "tokens": f"{len(score.logprobs):,} (all but the first)",
        "log-probability": f"{score.sum:.6f}",
        "mean": f"{score.mean:.6f}",
        "perplexity": f"{score.perplexity:.6g}",
    }
    return values, facts


def _compared(
    path: str, recorded: Fields, score: Score, different: Mapping[str, Fields]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The result, and what a person reads."""
    from kvpager.verify.bits import compare_bits

    expected = np.array(recorded["logprobs"], np.float32)
    here = score.logprobs[-len(expected) :]
    agreement = score.against(expected)
    bits = compare_bits(here, expected, "log-probability of a generated token")
    values = {
        "against": path,
        "prompt_tokens": len(recorded["prompt_ids"]),
        "tokens": agreement.tokens,
        "max_abs_delta": agreement.max_abs_delta,
        "approx_kl": agreement.approx_kl,
        "clip_fraction": agreement.clip_fraction,
        "differing_tokens": agreement.differing,
        "bits": bits.to_json(),
        "fingerprint_differs": different,
        "logprobs": here.tolist(),
    }
    facts = {
        "tokens": f"{agreement.tokens:,}, after a prompt of {values['prompt_tokens']:,}",
        "max |delta logp|": f"{agreement.max_abs_delta:.6g}",
        "approximate KL": f"{agreement.approx_kl:.6g}",
        "clip fraction": f"{agreement.clip_fraction:.6g}",
        "differing tokens": f"{agreement.differing:,}",
        "differing bits": f"{bits.differing_bits:,} of {bits.bits:,}",
    }
    if bits.first is not None:
        facts["first difference"] = str(bits.first)
    for name, both in different.items():
        facts[f"other {name}"] = f"generated {both['generated']!r}, here {both['here']!r}"
    return values, facts


def read_generation(path: str) -> dict[str, Any]:
    """Reads what `kvpager generate --format json --logprobs` wrote.

    Returns:
        Its object: prompt_ids and ids are token ids, of at least one token each, logprobs float32
        numbers, one for each of ids, and fingerprint an object.

    Raises:
        CliError: it cannot be read or is something else; names the field.
    """
    values = read_json("--against", path)
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise CliError(f"--against {path}: a JSON {kind}; expected what {_GENERATION} writes")
    for name, value, expected in _faults(values):
        shown = repr(value)
        shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
        raise CliError(f"--against {path}: {name} is {shown}; expected {expected}")
    return values


def _faults(values: Fields) -> Iterator[tuple[str, Any, str]]:
    """Fields that no generation has, each with its value and what was expected."""
    if values.get("command") != "generate":
        yield "command", values.get("command"), '"generate"'
    for name, what, is_sound in (
        ("prompt_ids", "token id", _is_token_id),
        ("ids", "token id", _is_token_id),
        ("logprobs", "float32 number", _is_float32),
    ):
        given = values.get(name)
        if not isinstance(given, list) or not given:
            hint = ", which generate --logprobs writes" if name == "logprobs" else ""
            yield name, given, f"a list of {what}s{hint}"
            return
        for place, value in enumerate(given):
            if not is_sound(value):
                yield f"{name}[{place}]", value, f"a {what}"
    if len(values["logprobs"]) != len(values["ids"]):
        yield "logprobs", values["logprobs"], f"{len(values['ids'])} numbers, one for each of ids"
    if not isinstance(values.get("fingerprint"), dict):
        yield "fingerprint", values.get("fingerprint"), "an object"


def _is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_float32(value: Any) -> bool:
    with np.errstate(over="ignore"):
        return type(value) is float and float(np.float32(value)) == value
