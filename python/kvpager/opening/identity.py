"""Identifies an engine's model: finds out its properties and computes its fingerprint."""

from __future__ import annotations

import torch

from kvpager import fingerprint as fingerprints
from kvpager.arguments import Integer, as_integer
from kvpager.config import PagerConfig
from kvpager.execution.core import EngineCore
from kvpager.hf import attach, check_supported
from kvpager.hf.first_forward import settle_weights
from kvpager.hf.linear import computing
from kvpager.hf.modes import refuse_modes
from kvpager.hf.recurrent import is_recurrent
from kvpager.hf.settled import require_known_reading, settled_behaviour
from kvpager.hf.support import require_exact_experts
from kvpager.hf.watch import ModelWatch
from kvpager.opening.choices import row_choices, vocab_size
from kvpager.opening.compression import check_compression, compress_weights
from kvpager.opening.linear import linear_layers, multiplies_experts, whose_products
from kvpager.opening.row_counts import settle_row_counts
from kvpager.pager.device import resolve
from kvpager.pager.pager import MOST_THREADS
from kvpager.progress import Progress, reporting_bytes
from kvpager.salts import checked_salt, stretched
from kvpager.stores import SnapshotStore
from kvpager.weights import known_weights_digest, weights_digest


def open_core(
    model: object,
    config: PagerConfig,
    *,
    salt: str = "",
    store: SnapshotStore | None = None,
    threads: Integer | None = None,
    progress: Progress = None,
) -> EngineCore:
    """Opens an engine's core: a model with a pager and a runner.

    Arguments and errors are those of `kvpager.Engine`.
    """
    exact = config.exact is not False
    refuse_modes()
    model = check_supported(model, one_at_a_time=config.exact != "all")
    place = resolve(config.device, model.device)
    products = whose_products(config.linear, place, model.dtype)
    check_compression(config, products, place)
    own_experts = multiplies_experts(products, model)
    if exact and not own_experts:
        require_exact_experts(model)
    choices = row_choices(config, model, gathers_experts=exact and not own_experts)
    threads = None if threads is None else as_integer(threads, "threads", 1, MOST_THREADS)
    core = EngineCore(
        model,
        config,
        place,
        salt=salt,
        namespace=stretched(checked_salt(salt)),
        store=store,
        threads=threads,
        vocab_size=vocab_size(model),
        row_choices=choices,
    )
    core.products = products
    attach(model)
    threads_before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        identify(core, progress)
        core.open_pager()
    except BaseException:
        if threads is not None:
            torch.set_num_threads(threads_before)
        raise
    return core


def identify(core: EngineCore, progress: Progress, *, proven: bool = False) -> None:
    """Finds out the model's row counts, layout and fingerprint.

    proven: keep the row counts and the layout found before.
    """
    core.linear = linear_layers(core)
    with computing(core.linear):
        _identify(core, progress, proven=proven)


def _identify(core: EngineCore, progress: Progress, *, proven: bool) -> None:
    settle_weights(core.model)
    watch = ModelWatch(core.model)
    require_known_reading(core.model, watch)
    if core.config.compress_weights:
        compress_weights(core, progress)
    recurrent = is_recurrent(core.model)
    with reporting_bytes(progress, "hash weights") as report:
        # Weights that were exchanged under an engine are rarely met again.
        digest = weights_digest if proven else known_weights_digest
        weights = digest(core.model, report)
    behaviour = ""
    if recurrent or not proven:
        if not settle_row_counts(core, watch, weights):
            weights = digest(core.model)  # a model may change itself in its first forwards
        behaviour = core.numerics.behaviour
    core.fingerprint = fingerprints.describe(
        core.model,
        core.config,
        core.layout,
        weights=weights,
        row_counts=core.row_counts,
        kernel_version=core.numerics.kernel_version,
        linear="" if core.linear is None else core.linear.version,
        aligned=recurrent,
        behaviour=settled_behaviour(
            core.model, watch, core.row_counts, core.recurrence, found=behaviour
        ),
    )
    watch.check(thorough=True)
    core.watch = watch
