"""Comparisons of raw bits, which report the first element that differs."""

from __future__ import annotations

import torch

INTEGERS = {2: torch.int16, 4: torch.int32}


def assert_same_bits(actual, expected, what):
    """Fails with the first differing index and both values."""
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, not {expected.dtype}"
    integers = INTEGERS[actual.element_size()]
    different = (
        actual.contiguous().view(integers) != expected.contiguous().view(integers)
    ).nonzero()
    if len(different):
        at = tuple(different[0].tolist())
        raise AssertionError(
            f"{what}: {len(different)} of {actual.numel()} elements differ, the first at {at}: "
            f"{actual[at].item()!r}, not {expected[at].item()!r}"
        )


def assert_same_session(actual, expected, what):
    """Tokens, K/V of every layer and the logits after the last token."""
    assert actual.tokens.tolist() == expected.tokens.tolist(), f"{what}: other tokens"
    for layer in range(actual.engine.layout.layers):
        ours = actual.sequence.read_kv(layer, 0, actual.committed)
        theirs = expected.sequence.read_kv(layer, 0, expected.committed)
        for name, a, b in zip(("keys", "values"), ours, theirs):
            assert_same_bits(a, b, f"{what}: {name} of layer {layer}")
    assert_same_bits(actual.logits, expected.logits, f"{what}: logits")
