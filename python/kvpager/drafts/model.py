"""A draft model and its pager's options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpager._model.facts.checked_model import configuration
from kvpager._model.facts.opening import open_core
from kvpager._model.seam.recurrent import is_recurrent
from kvpager._runtime.execution.core import EngineCore
from kvpager._support.arguments import is_finite, refusal
from kvpager.config import PagerOptions, known_options
from kvpager.drafts.drafting import Drafting
from kvpager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Options that a draft inherits from its engine unless they are given.
_INHERITED = ("pool_tokens", "chunk_tokens", "rows", "selection", "host_bytes", "rewind_tokens")


class DraftModel:
    """A small model that guesses the next tokens of texts, and its pager's options.

    Example:
        >>> draft = DraftModel(small_model, pool_tokens=4096, host_bytes="2GiB")
        >>> engine = Engine(model, pool_tokens=4096, draft=draft)
        >>> session = engine.session()
        >>> session.prefill(ids)
        >>> answer = session.generate(256, speculate="draft").text
    """

    def __init__(
        self, model: Any, *, guess_cost: float | None = None, **options: Unpack[PagerOptions]
    ) -> None:
        """Checks the options; the engine that takes the draft checks the model.

        Args:
            model: a transformers causal LM with the target's vocabulary, in eval mode.
            guess_cost: time of one of its forwards relative to one of the target's, 0 or more;
                decides how many tokens are guessed. None: the ratio of their parameters.
            **options: of PagerConfig, for the draft's own pager. Defaults of pool_tokens,
                chunk_tokens, rows, selection, host_bytes and rewind_tokens are the target's;
                `exact` is False, because guesses need no equal bits.

        Raises:
            InvalidArgumentError: an option is unknown, or guess_cost out of range.
        """
        if guess_cost is not None and not (is_finite(guess_cost) and guess_cost >= 0):
            raise refusal("DraftModel.guess_cost", guess_cost, "a number, 0 or more, or None")
        self.model = model
        self.guess_cost = guess_cost
        self.options = known_options(options)


def open_draft(draft: DraftModel | Any, target: EngineCore) -> Drafting:
    """Opens an engine core for a draft: a `DraftModel`, or a bare model with default options.

    Raises:
        InvalidArgumentError: another vocabulary than the target's, an option out of range, or a
            target whose rows depend on the other rows of a forward, which excludes speculation.
        UnsupportedModelError, CapacityError, DeviceError: as for any engine.
    """
    if not isinstance(draft, DraftModel):
        draft = DraftModel(draft)
    if target.config.exact != "all":
        raise InvalidArgumentError(
            f"draft is given, but PagerConfig.exact is {target.config.exact!r}, under which a "
            'token\'s bits depend on how many rows its forward has; use exact="all", or draft=None'
        )
    inherited = {name: getattr(target.config, name) for name in _INHERITED}
    inherited["rows"] = None if is_recurrent(draft.model) else target.rows
    options = {"exact": False, **inherited, **draft.options}
    core = open_core(draft.model, configuration(None, options), salt=target.tenant.salt)
    if core.facts.vocab_size != target.facts.vocab_size:
        found = core.facts.vocab_size
        core.close()
        raise InvalidArgumentError(
            f"draft: its vocabulary has {found} token ids, and the model's has "
            f"{target.facts.vocab_size}; expected a draft of the same tokenizer and embedding size"
        )
    cost = draft.guess_cost
    if cost is None:
        cost = _weights(draft.model) / max(1, _weights(target.model))
    return Drafting(core, target.transcripts.trims, float(cost))


def _weights(model: Any) -> int:
    """Number of parameters a forward reads: all but an input embedding not tied to the head."""
    total = sum(parameter.numel() for parameter in model.parameters())
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    return int(total if tied else total - embedding.numel())
