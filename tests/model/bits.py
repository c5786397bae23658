"""Comparisons of raw bits, which report the first element that differs."""

from __future__ import annotations

from kvpager.verify.bits import compare_bits


def assert_same_bits(actual, expected, what):
    """Fails with the first differing index, both values and their distance."""
    result = compare_bits(actual, expected, what)
    assert result.same, (
        f"{result.differing_elements} of {result.elements} elements differ, the first: "
        f"{result.first}"
    )


def assert_same_session(actual, expected, what):
    """Tokens, K/V of every layer and the logits after the last token."""
    assert actual.tokens.tolist() == expected.tokens.tolist(), f"{what}: other tokens"
    for layer in range(actual.core.facts.layout.layers):
        ours = actual.sequence.read_kv(layer, 0, actual.committed)
        theirs = expected.sequence.read_kv(layer, 0, expected.committed)
        for name, a, b in zip(("keys", "values"), ours, theirs):
            assert_same_bits(a, b, f"{what}: {name} of layer {layer}")
    assert_same_bits(actual.logits, expected.logits, f"{what}: logits")
