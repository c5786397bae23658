"""`kvpager verify`: whether this model, on this machine, keeps the promise of one set of bits."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpager.cli.failure import DIFFERENT, IMPOSSIBLE, ImpossibleError, or_impossible
from kvpager.cli.models import given_model, load_model, load_tokenizer
from kvpager.cli.options import (
    add_model_options,
    add_prompt_options,
    natural,
    prompt_ids,
    read_prompt,
)
from kvpager.cli.output import emit_result, note
from kvpager.cli.pager_options import add_pager_options, pager_config
from kvpager.cli.parser import Commands, option
from kvpager.cli.terminal import bar, shows_progress

if TYPE_CHECKING:
    from kvpager.config import PagerConfig
    from kvpager.verify.report import Report
    from kvpager.verify.run import OnRelation
    from kvpager.verify.subject import Subject


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add(
        "verify",
        run,
        "compare every way to the same tokens, bit by bit, on this model and machine",
        "Runs a model in every way that is promised to give the same bits (reused, decoded, "
        "packed, speculated, forked, trimmed, paged, restored and re-scored in fresh processes) "
        "and compares K/V, logits and log-probabilities bit by bit with a cold run. About a minute "
        "for a small model.",
        epilog="Exit codes: 0 every bit is the same, 1 some differ, 2 wrong command line, 3 it "
        "could not be told (no such model, a model that is refused, a relation that could not be "
        "run).",
    )
    add_model_options(parser, default="the shipped retrieval model")
    group = parser.add_argument_group("verification")
    option(group, "--experts NAME", "experts implementation, such as batched_mm")
    option(group, "--full", "every length and number of sessions; takes long")
    option(group, "--seed N", "of made-up prompts", type=natural, default=0)
    add_prompt_options(parser, "One of these, in the place of made-up tokens.")
    add_pager_options(parser, {"pool_tokens": 2048, "host_bytes": "1GiB"})
    parser.show_first(
        *("--json", "--quiet", "--model", "--dtype", "--threads", "--full", "--experts"),
        *("--ids", "--pool-tokens", "--chunks", "--kv-dtype"),
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from kvpager.verify.table import parts

    config = pager_config(args, auto_pool=False)
    if config.exact is False:
        args.parser.error("--exact false promises nothing, so there is nothing to verify")
    prompt = read_prompt(args)
    with or_impossible():
        path = given_model(args)
        model = _load(args, path, config.device)
        tokenizer = load_tokenizer(path) if isinstance(prompt, str) else None
        ids = prompt_ids(args, prompt, tokenizer)
        report = _verify(args, config, model, path, [] if ids is None else [ids])
    values = {"command": "verify", "model": str(path), **report.to_json()}
    emit_result(args, values, lambda shown: shown.render(*parts(report, shown.table)))
    return 0 if report.kept else DIFFERENT if report.broken else IMPOSSIBLE


def _load(args: argparse.Namespace, path: Path, device: str) -> Any:
    """The model as it is to be run."""
    import torch

    model = load_model(path, args.dtype, device)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if args.experts is not None:
        try:
            model.set_experts_implementation(args.experts)
        except (ValueError, AttributeError, KeyError) as error:
            raise ImpossibleError(f"--experts {args.experts}: {error}") from error
    return model


def _verify(
    args: argparse.Namespace, config: PagerConfig, model: Any, path: Path, prompts: list[list[int]]
) -> Report:
    from kvpager.errors import UnsupportedModelError
    from kvpager.verify.advice import advice_for, advice_on_refusal
    from kvpager.verify.report import Report
    from kvpager.verify.run import verify_selections
    from kvpager.verify.subject import Subject

    try:
        subject = Subject(
            model,
            config,
            folder=path,
            prompts=prompts,
            effort="full" if args.full else "short",
            seed=args.seed,
        )
    except UnsupportedModelError as error:
        return Report(
            about={"architecture": type(model).__name__, "exact": config.exact},
            refusal=str(error),
            advice=advice_on_refusal(model, str(error)),
        )
    with subject:
        with _progress(args) as on_relation:
            report = verify_selections(subject, on_relation=on_relation)
        note(args, "each shape of layer")
        report.shapes = _shapes(subject)
        report.advice = advice_for(report, subject.engine())
    return report


def _shapes(subject: Subject) -> list[Any]:
    import torch

    from kvpager._model.proof.shapes import probe_shapes

    others = sorted({1, 2, os.cpu_count() or 1} - {torch.get_num_threads()})
    if subject.model.device.type != "cpu":
        others = []  # the host's threads compute nothing
    return list(probe_shapes(subject.model, subject.engine().rows, thread_counts=others))


@contextmanager
def _progress(args: argparse.Namespace) -> Iterator[OnRelation]:
    """A bar where stderr is a terminal, otherwise a line for each relation."""
    if not shows_progress(args):
        yield lambda name, selection, done, total: note(args, f"{selection}: {name}")
        return
    from rich.progress import MofNCompleteColumn, TimeElapsedColumn

    with bar("verify", MofNCompleteColumn(), TimeElapsedColumn()) as update:
        yield lambda name, selection, done, total: update(
            description=f"{selection.partition('(')[0]}: {name}", completed=done, total=total
        )
