"""The forward that gradients flow through, against cold runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvpager.verify.check import Check, DoesNotApplyError

if TYPE_CHECKING:
    from kvpager.verify.subject import Subject


def trained(subject: Subject, check: Check) -> None:
    """Texts with a common beginning and others, scored together with autograd recorded."""
    engine = subject.engine()
    if engine.core.facts.recurrence is not None:
        raise DoesNotApplyError("gradients are not recorded of recurrent layers")
    parameters = [each for each in subject.model.parameters() if each.requires_grad]
    if not parameters:
        raise DoesNotApplyError("no parameter of the model requires a gradient")
    if subject.device != "cpu" and subject.config.selection.kind != "dense":
        raise DoesNotApplyError("gradients through a selection are computed on a CPU alone")
    chunk = subject.sweep.chunk
    prompt = subject.prompt[: 2 * chunk + 5]
    pairs = [
        (prompt, subject.ids(chunk - 1, seed=800)),
        (prompt, subject.ids(5, seed=801)),
        (subject.ids(3, seed=802), subject.ids(chunk + 7, seed=803)),
    ]
    before = engine.stats()["model_forwards"]
    results = engine.logprobs(pairs)
    forwards = engine.stats()["model_forwards"] - before
    for i, ((beginning, completion), found) in enumerate(zip(pairs, results)):
        check.case(f"text {i} of {len(beginning) + len(completion)} tokens")
        cold = subject.cold(np.concatenate([beginning, completion])).logprobs()
        check.bits(found.logprobs.detach().numpy(), cold[-len(completion) :], "log-probabilities")
    rows = len(prompt) + sum(len(text) for _, text in pairs) + 3 - len(pairs)
    most = -(-rows // engine.rows) + 1  # completions begin after the piece that ends their prompt
    check.require(
        forwards <= most,
        f"{rows} tokens took {forwards} forwards, expected at most {most}: a prompt that texts "
        "share is computed once",
    )
    loss = torch.cat([found.logprobs for found in results]).sum()
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    finite = [bool(torch.isfinite(each).all()) for each in gradients if each is not None]
    check.require(
        bool(finite) and all(finite),
        "the backward pass gave no finite gradients",
    )
    subject.forget()
