"""TRL's GRPO, whose rollouts and training are one function: its first ratio is exactly 1.

    pip install 'kvpager[trl]'

    from kvpager.connectors.trl import GRPOTrainer

    GRPOTrainer(model, reward, args=GRPOConfig(...), train_dataset=prompts).train()

Completions come from `Engine.run`, and every log-probability that TRL computes from
`Engine.logprobs`: those of the policy with gradients, those of an older policy or of a reference
model without. All are at the trainer's temperature. Everything else is TRL's. A model with other
adapters of PEFT's, or with none for a reference, is another model here: it has an engine, and so a
pool, of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import trl
from torch import Tensor

from kvpager.engine import Engine
from kvpager.errors import InvalidArgumentError

# How layers of PEFT's compute: whether without adapters, and with which.
Adapters: TypeAlias = frozenset[tuple[bool, tuple[str, ...]]]

_SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty")


class GRPOTrainer(trl.GRPOTrainer):  # type: ignore[misc]  # of an extra, without types
    """`trl.GRPOTrainer` on one device, for text.

    Args:
        *args: as TRL takes them, and so are keywords.
        engine_options: of the engines, as `kvpager.Engine` takes them.

    Raises:
        InvalidArgumentError: an argument that another way of generating needs.
    """

    def __init__(
        self, *args: Any, engine_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        for name in ("rollout_func", "tools", "environment_factory"):
            if kwargs.get(name) is not None:
                raise InvalidArgumentError(f"{name} is given; rollouts are kvpager's here")
        super().__init__(*args, rollout_func=_rollout, **kwargs)
        if self.use_vllm:
            raise InvalidArgumentError("use_vllm is True; rollouts are kvpager's here")
        self._engine_options = dict(engine_options or {})
        self._engines: dict[tuple[int, Adapters], tuple[Engine, int]] = {}
        self._rollouts = 0

    @contextmanager
    def engine_of(self, model: Any, *, recorded: bool = False) -> Iterator[Engine]:
        """The engine of a model as it is now, which is in eval mode meanwhile.

        recorded: the model keeps its mode, in which gradient checkpoints are made.
        """
        model = self.accelerator.unwrap_model(model)
        training = model.training
        model.eval()
        try:
            step = self.state.global_step
            key = id(model), _adapters(model)
            engine, before = self._engines.get(key, (None, step))
            if engine is None:
                engine = Engine(model, **self._engine_options)
            elif before != step:
                engine.weights_changed()
            self._engines[key] = engine, step
            if recorded:
                model.train(training)
            yield engine
        finally:
            model.train(training)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,  # as TRL has it
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        given = [name for name, value in images.items() if value is not None]
        if given or compute_aux_loss:
            raise InvalidArgumentError(
                f"{(given or ['router_aux_loss_coef'])[0]} is set; texts alone are trained here"
            )
        rows = attention_mask.bool().cpu()
        counts = rows[:, -logits_to_keep:].sum(1).tolist()
        texts = [ids[row].numpy() for ids, row in zip(input_ids.cpu(), rows)]
        masks = [torch.arange(len(ids)) >= len(ids) - n for ids, n in zip(texts, counts)]
        recorded = torch.is_grad_enabled()
        with self.engine_of(model, recorded=recorded) as engine:
            found = engine.logprobs(
                texts,
                masks,
                temperature=self.temperature,
                entropy=compute_entropy,
                grad=recorded,
            )
        logprobs = _padded([text.logprobs for text in found], logits_to_keep).to(input_ids.device)
        if not compute_entropy:
            return logprobs, None, None
        entropies = [text.entropy for text in found if text.entropy is not None]
        return logprobs, _padded(entropies, logits_to_keep).to(input_ids.device), None


def _adapters(model: torch.nn.Module) -> Adapters:
    layers: list[Any] = [each for each in model.modules() if hasattr(each, "disable_adapters")]
    return frozenset(
        (layer.disable_adapters, tuple(layer.active_adapters))
        for layer in layers
        if isinstance(layer.disable_adapters, bool)  # not a model's method of this name
    )


def _padded(rows: list[Tensor], width: int) -> Tensor:
    return torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])


def _rollout(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
    """A completion of each prompt, as TRL's `rollout_func` returns them."""
    ids = trainer._tokenize_prompts(prompts)[0]  # noqa: SLF001  # TRL's own way to its prompts
    first = trainer.args.seed + trainer._rollouts  # noqa: SLF001
    trainer._rollouts += len(ids)  # noqa: SLF001
    args = trainer.args
    options = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}
    with trainer.engine_of(trainer.model) as engine:
        completions = engine.run(
            ids,
            trainer.max_completion_length,
            temperature=trainer.temperature,
            seed=range(first, first + len(ids)),
            eos=trainer.eos_token_ids,
            logprobs=True,
            logprob_temperature=trainer.temperature,
            **options,
        )
    return {
        "prompt_ids": ids,
        "completion_ids": [completion.tokens.tolist() for completion in completions],
        "logprobs": [completion.logprobs.tolist() for completion in completions],  # type: ignore[union-attr]
    }
