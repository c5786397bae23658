"""What `Engine.logprobs` is given, checked, and what it returns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpager._runtime.execution.core import EngineCore
from kvpager._runtime.gradients.branches import Branch, Text, trees
from kvpager._runtime.gradients.scored import Options, ScoredTexts, checkpoints
from kvpager._runtime.scheduling.options import MOST_ALTERNATIVES, as_temperature
from kvpager._support.arguments import as_flag, as_integer, listed, refusal
from kvpager.errors import InvalidArgumentError, UnsupportedModelError
from kvpager.progress import Progress, reporting

_PAIRS = "pairs (prompt, completion), or texts"


class TextLogprobs(NamedTuple):
    """Log-probabilities (natural) of the tokens of one text that count, in their order.

    All are float32, on the CPU, and attached to autograd if gradients are recorded.

    Attributes:
        logprobs: [n].
        entropy: [n], of the distribution of each token; None unless requested.
        top_logprobs: [n, k], of the most likely tokens of each, descending; None unless requested.
        top_ids: [n, k] int64, these tokens.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    top_logprobs: Tensor | None = None
    top_ids: Tensor | None = None


def logprobs_of(
    core: EngineCore,
    texts: Iterable[Any],
    masks: Iterable[Any] | None,
    *,
    temperature: float,
    entropy: bool,
    top_logprobs: Any,
    grad: bool,
    progress: Progress,
) -> list[TextLogprobs]:
    """See `Engine.logprobs`."""
    top = min(as_integer(top_logprobs, "top_logprobs", 0, MOST_ALTERNATIVES), core.facts.vocab_size)
    options = Options(
        as_temperature(temperature, "temperature"),
        as_flag(entropy, "entropy"),
        top,
        as_flag(grad, "grad"),
    )
    _require_exact(core)
    if options.grad:
        _require_gradients(core)
    given = _checked_texts(core, texts, masks)
    if not given:
        return []
    roots, counts = trees(given), [int(text.counted.sum()) for text in given]
    with reporting(progress, "logprobs", _rows_of(roots)) as report:
        values = ScoredTexts(core, options).score(roots, sum(counts), report)
    each = [torch.split(one, counts) if len(one) else [None] * len(counts) for one in values]
    return [TextLogprobs(*of_text) for of_text in zip(*each)]


def _rows_of(roots: list[Branch]) -> int:
    """Counts the rows of all branches."""
    waiting, rows = [*roots], 0
    while waiting:
        branch = waiting.pop()
        rows += len(branch.tokens)
        waiting += branch.children
    return rows


def _require_exact(core: EngineCore) -> None:
    if core.config.exact != "all":
        raise InvalidArgumentError(
            f"exact is {core.config.exact!r}, where decoding has other bits than a prefill; make "
            'an engine with exact="all"'
        )
    if core.facts.recurrence is not None:
        raise UnsupportedModelError(
            f"{type(core.model).__name__} has recurrent layers, of which gradients are not "
            "recorded here; use engine.score, and your trainer's own forward"
        )


def _require_gradients(core: EngineCore) -> None:
    model = core.model
    if not torch.is_grad_enabled():
        raise InvalidArgumentError(
            "logprobs: gradients are off here (torch.no_grad or torch.inference_mode); call it "
            "outside, or with grad=False"
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise InvalidArgumentError(
            "logprobs: no parameter of the model requires a gradient; call "
            "model.requires_grad_(True), or logprobs with grad=False"
        )
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise InvalidArgumentError(
            "logprobs: the model's parameters were made under torch.inference_mode, so that "
            "autograd takes none of them; load the model outside of it"
        )
    if not model.training:
        return
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0:  # noqa: SLF001  # the base class of all
            raise UnsupportedModelError(
                f"{name} has a dropout of {module.p} in training mode, which is random; set its p "
                "to 0, or call model.eval()"
            )
    again = checkpoints(model)
    if again and model.device.type != "cpu":
        raise UnsupportedModelError(
            "gradient checkpointing is on, which works here on a CPU alone; call "
            "model.activation_checkpointing_disable()"
        )
    if any(dict(each.keywords).get("use_reentrant", True) for each in again):
        raise UnsupportedModelError(
            "gradient checkpointing is on with use_reentrant=True, which records no graph; call "
            'model.activation_checkpointing_enable({"use_reentrant": False})'
        )


def _checked_texts(
    core: EngineCore, texts: Iterable[Any], masks: Iterable[Any] | None
) -> list[Text]:
    if isinstance(texts, torch.Tensor) and texts.ndim == 1:
        raise InvalidArgumentError(f"texts has the ids of one text; expected {_PAIRS}")
    each = listed(texts, "texts", _PAIRS)
    if masks is None:
        return [_checked_text(core, text, None, f"texts[{i}]") for i, text in enumerate(each)]
    of_each = listed(masks, "masks", "a mask of each text")
    if len(of_each) != len(each):
        raise InvalidArgumentError(f"masks has {len(of_each)} entries; expected {len(each)}")
    return [
        _checked_text(core, text, mask, f"texts[{i}]", f"masks[{i}]")
        for i, (text, mask) in enumerate(zip(each, of_each))
    ]


def _checked_text(core: EngineCore, given: Any, mask: Any, name: str, mask_name: str = "") -> Text:
    if isinstance(given, tuple) and len(given) == 2:
        prompt = core.read_ids(given[0], f"the prompt of {name}")
        if not isinstance(given[1], str) and not len(given[1]):
            raise InvalidArgumentError(f"the completion of {name} is empty; expected a token")
        completion = core.read_ids(given[1], f"the completion of {name}", special_tokens=False)
        ids = np.concatenate([prompt, completion])
        counted = np.arange(len(ids)) >= len(prompt)
        if mask is not None:
            raise InvalidArgumentError(
                f"{mask_name} is of a pair, whose completion counts; expected None, or a whole text"
            )
    else:
        ids = core.read_ids(given, name)
        counted = (
            np.arange(len(ids)) > 0 if mask is None else _checked_mask(mask, len(ids), mask_name)
        )
        if not counted.any():
            what = f"{name} has 1 token" if mask is None else f"{mask_name} counts no token"
            raise InvalidArgumentError(f"{what}; expected a token after the first one")
    core.positions.check(len(ids) - 1, name)
    return Text(ids, counted)


def _checked_mask(mask: Any, count: int, name: str) -> Any:
    found = np.asarray(mask.cpu() if isinstance(mask, torch.Tensor) else mask)
    if found.shape != (count,):
        raise InvalidArgumentError(
            f"{name} has shape {list(found.shape)}; expected [{count}], an entry for each token"
        )
    counted = found.astype(bool)
    if (counted != found).any():
        raise refusal(name, found.tolist(), "True or False for each token")
    if counted[0]:
        raise InvalidArgumentError(
            f"{name} counts the first token, which has no log-probability; set it to False"
        )
    return counted
