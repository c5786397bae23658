"""What is found out about a model before it gets a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpager import fingerprint as fingerprints
from kvpager.config import PagerConfig, known_options
from kvpager.errors import InvalidArgumentError, UnsupportedModelError
from kvpager.hf import RowCounts, attach, check_supported, layout_of
from kvpager.hf.attach import configurations
from kvpager.hf.behaviour import TOKENS, behave
from kvpager.hf.own_attention import require_own_attention
from kvpager.hf.recurrent import is_recurrent
from kvpager.hf.settled import require_known_reading, settled_behaviour
from kvpager.hf.watch import ModelWatch
from kvpager.opening.choices import attention, common_window, row_choices, sized
from kvpager.pager import Pager
from kvpager.pager.device import resolve
from kvpager.progress import Progress, reporting_bytes
from kvpager.transformers_cache.hooks import Hooks
from kvpager.transformers_cache.host import Host, Known
from kvpager.weights import known_weights_digest


def configuration(config: PagerConfig | None, options: Mapping[str, Any]) -> PagerConfig:
    """The pager's options; forwards have as many rows as they have, so nothing is exact."""
    options = known_options(options)
    if options.get("exact", False) is not False:
        raise InvalidArgumentError(
            f"exact is {options['exact']!r}; forwards of transformers have row counts of their "
            "own, so a Cache promises no bits: leave it out, or use kvpager.Engine"
        )
    if config is None:
        config = PagerConfig(**{"pool_tokens": "auto", **options, "exact": False})
    elif not isinstance(config, PagerConfig):
        raise InvalidArgumentError(f"config is {config!r}; expected a PagerConfig")
    config = config.replace(**{**options, "exact": False})
    if config.compress_weights:
        raise InvalidArgumentError(
            "compress_weights is True; forwards of a Cache are transformers' own and read no "
            "copies: leave it out, or use kvpager.Engine"
        )
    return config


def open_host(model: Any, config: PagerConfig, progress: Progress) -> Host:
    """Checks a model, hashes its weights and makes its pager.

    Raises UnsupportedModelError, InvalidArgumentError, CapacityError, DeviceError.
    """
    model = check_supported(model, one_at_a_time=True)
    if is_recurrent(model):
        raise UnsupportedModelError(
            f"{type(model).__name__}: some of its layers keep a state beside K/V, which a pager "
            'has no place for; use kvpager.Engine(model, exact="reuse")'
        )
    place = resolve(config.device, model.device)
    rows = row_choices(config, model, gathers_experts=False)[0]
    watch = ModelWatch(model)
    attach(model)
    require_known_reading(model, watch)
    require_own_attention(model, config.chunk_tokens, packed=False)
    behaviour = behave(model, RowCounts(TOKENS))
    seen = behaviour.seen
    layout = layout_of(model, seen, config)
    config, _ = sized(config, model, layout, rows, place)
    q_heads, kernel_version = attention(seen, layout, config, place)
    with reporting_bytes(progress, "hash weights") as report:
        weights = known_weights_digest(model, report)
    fingerprint = fingerprints.describe(
        model,
        config,
        layout,
        weights=weights,
        row_counts=RowCounts(TOKENS),
        kernel_version=kernel_version,
        behaviour=settled_behaviour(model, watch, RowCounts(TOKENS), found=behaviour.digest),
    )
    watch.check(thorough=True)
    pager = Pager(
        layout,
        config,
        rows=rows,
        fingerprint=fingerprint,
        window=common_window(seen),
        device=place.name,
        q_heads=q_heads,
    )
    windows = tuple(seen.windows[layer] for layer in range(layout.layers))
    configs = frozenset(map(id, configurations(model)))
    known = Known(model, config, windows, configs, fingerprint, watch)
    return Host(known, pager, Hooks.of(model))
