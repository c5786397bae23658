"""Opens an engine: checks its model, finds out the model's facts, and makes the pager."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from kvpager._model.facts.checked_model import CheckedModel, check_model
from kvpager._model.facts.compression import compress_weights
from kvpager._model.facts.proven_before import ProvenBefore
from kvpager._model.facts.row_counts import find_row_counts
from kvpager._model.identity import fingerprint as fingerprints
from kvpager._model.identity.description import additions_of
from kvpager._model.identity.settled import require_known_reading, settle_weights, settled_behaviour
from kvpager._model.model_facts import Findings, ModelFacts
from kvpager._model.seam.attach import attach
from kvpager._model.seam.linear import computing
from kvpager._model.seam.rows import RowCounts
from kvpager._model.watch.model_watch import ModelWatch
from kvpager._model.weights.digests import known_weights_digest, weights_digest
from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.execution.workers import new_workers
from kvpager._runtime.text.tokenizer import Tokenizer
from kvpager._support.arguments import Integer, as_integer
from kvpager._support.salts import StretchedSalt
from kvpager.config import PagerConfig
from kvpager.errors import InvalidArgumentError
from kvpager.pager.pager import MOST_THREADS
from kvpager.progress import Progress, reporting_bytes
from kvpager.stores import SnapshotStore


def open_core(
    model: Any,
    config: PagerConfig,
    *,
    salt: str = "",
    store: SnapshotStore | None = None,
    threads: Integer | None = None,
    tokenizer: Tokenizer | None = None,
    progress: Progress = None,
) -> EngineCore:
    """Opens an engine's core: a model with a pager and a runner.

    Arguments and errors are those of `kvpager.Engine`.
    """
    tenant = StretchedSalt.of(salt)
    before = torch.get_num_threads()
    wanted = before if threads is None else as_integer(threads, "threads", 1, MOST_THREADS)
    checked = check_model(model, config, new_workers(wanted))
    try:
        if threads is not None:
            torch.set_num_threads(wanted)
        facts = prove(checked, progress)
        return EngineCore(
            checked.model,
            facts,
            checked.place,
            checked.workers,
            tenant=tenant,
            store=store,
            tokenizer=tokenizer,
        )
    except BaseException:
        if threads is not None:
            torch.set_num_threads(before)
        raise


def prove(
    checked: CheckedModel, progress: Progress, *, known: Findings | None = None
) -> ModelFacts:
    """Finds a model's row counts, layout and fingerprint. Runs the model.

    Args:
        checked: the model.
        progress: as in `kvpager.Engine`.
        known: findings of the same model with other values of its weights. A model with recurrent
            layers is proven again nevertheless.

    Raises:
        UnsupportedModelError: the model cannot keep the promise; says why and what to do.
        InvalidArgumentError, CapacityError: as `kvpager.Engine`.
    """
    attach(checked.model)
    with computing(checked.linear):
        return _prove(checked, progress, known)


def _prove(checked: CheckedModel, progress: Progress, known: Findings | None) -> ModelFacts:
    model = checked.model
    settle_weights(model)
    watch = ModelWatch(model)
    require_known_reading(model, watch)
    if checked.config.compress_weights:
        compress_weights(model, checked.linear, checked.workers, progress)
    with reporting_bytes(progress, "hash weights") as report:
        # Weights that were exchanged under an engine are rarely met again.
        digest = known_weights_digest if known is None else weights_digest
        if known is None and not watch.reach.foreign:
            weights = known_weights_digest(model, report, watch.digests)
        else:  # code of no library has been run by now, and may have written into its tensors
            weights = digest(model, report)
    if known is not None and known.recurrence is None:
        found = dataclasses.replace(known, behaviour="")
    else:
        before = ProvenBefore(checked, weights, additions_of(model))
        taken = before.take()
        found = before.remember(find_row_counts(checked, watch)) if taken is None else taken
        if taken is None:
            weights = digest(model)  # a model may change itself in its first forwards
    linear = "" if checked.linear is None else checked.linear.version
    fingerprint = fingerprint_of(model, watch, found, found.row_counts, weights, linear=linear)
    findings = {each.name: getattr(found, each.name) for each in dataclasses.fields(Findings)}
    return ModelFacts(
        **findings,
        vocab_size=checked.vocab_size,
        linear=checked.linear,
        fingerprint=fingerprint,
        watch=watch,
    )


def fingerprint_of(
    model: Any,
    watch: ModelWatch,
    found: Findings,
    counts: RowCounts,
    weights: str,
    *,
    linear: str = "",
) -> dict[str, Any]:
    """The fingerprint of a model that has settled, with these row counts; see `describe`.

    Raises UnsupportedModelError as `settled_behaviour`, and ModelChangedError.
    """
    recurrence = found.recurrence
    behaviour = settled_behaviour(model, watch, counts, recurrence, found=found.behaviour)
    fingerprint = fingerprints.describe(
        model,
        found.config,
        found.layout,
        weights=weights,
        additions=additions_of(model).digest,
        row_counts=counts,
        kernel_version=found.kernel_version,
        linear=linear,
        aligned=recurrence is not None,
        behaviour=behaviour,
    )
    watch.check(thorough=True)
    return fingerprint


def prove_again(core: EngineCore, progress: Progress) -> ModelFacts:
    """The facts of an engine's model as it is now; the engine keeps those it has.

    Raises:
        UnsupportedModelError: the changed model cannot keep the promise.
        InvalidArgumentError: its vocabulary differs from the draft's, or lacks a session's token.
    """
    facts = core.facts
    checked = check_model(core.model, facts.config, core.workers, core.place)
    _check_draft(core, checked.vocab_size)
    _check_texts(core, checked.vocab_size)
    return prove(checked, progress, known=facts if facts.watch.same_places() else None)


def _check_draft(core: EngineCore, vocab_size: int) -> None:
    draft = None if core.drafter is None else core.drafter.core.facts
    if draft is not None and draft.vocab_size != vocab_size:
        raise InvalidArgumentError(
            f"weights_changed: the model has {vocab_size} token ids now, and its draft "
            f"{draft.vocab_size}; open an engine with a draft of the same vocabulary"
        )


def _check_texts(core: EngineCore, vocab_size: int) -> None:
    for transcript in core.transcripts:
        largest = 0 if transcript.closed else int(max(transcript.tokens, default=0))
        if largest >= vocab_size:
            raise InvalidArgumentError(
                f"weights_changed: the model has {vocab_size} token ids now, and an open "
                f"session has a token {largest}; close or trim that session first"
            )
