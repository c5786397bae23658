"""Forwards that are replayed as CUDA graphs, without a GPU: a replay runs its operations again.

That a graph is what was captured, and legal to capture, is for a GPU to say: `test_device_cuda.py`.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from devices import require
from reference_models import CHUNK, build, make_engine, prompt

from kvpager import TopK
from kvpager._runtime.execution.graphs import Graphs
from kvpager.errors import InvalidArgumentError

TOPK = TopK(chunks=2, sinks=16, recent=32)
NEW = 12


class Again(Graphs):
    """Graphs whose replay runs the captured step for the forward at hand."""

    def __init__(self, runner, wrong=0.0, error=None):
        super().__init__(runner._pager, self._decode_now, torch.device("cpu"), self._note)
        self._now = runner._decoded
        self._forward = None
        self.wrong, self.error = wrong, error
        self.captures = 0

    def _decode_now(self, forward, tokens, positions):
        return self._now(self._forward or forward, tokens, positions)

    def _note(self, step):
        self.captures += 1
        if self.error is not None:
            raise self.error
        made = torch.empty(0, dtype=torch.bfloat16)

        def again():
            found = step() + self.wrong
            made.resize_(found.shape).copy_(found)

        return made, again

    def run(self, forward, tokens, positions):
        self._forward = forward
        try:
            return super().run(forward, tokens, positions)
        finally:
            self._forward = None


@pytest.fixture(scope="module")
def model():
    return build("llama", "bfloat16")


@pytest.fixture
def engine(model, closing):
    def made(**options):
        return closing(make_engine(model, device=require("shim"), host_bytes="16MiB", **options))

    return made


def with_graphs(engine, **options):
    graphs = engine.core.runner.graphs = Again(engine.core.runner, **options)
    return graphs


def texts(engine):
    """What three sessions say, alone and together, and the last logits of each."""
    said, logits = [], []
    for length in (20, 3 * CHUNK + 5):
        with engine.session() as session:
            session.prefill(prompt(length))
            said.append(session.generate(NEW, eos=None).tokens.tolist())
            session.prefill(session.tokens)
            logits.append(session.logits.clone())
    together = engine.run([prompt(30), prompt(9)], NEW, eos=None)
    said += [one.tokens.tolist() for one in together]
    return said, torch.stack(logits)


@pytest.mark.parametrize("options", [{}, {"selection": TOPK}], ids=["dense", "topk"])
def test_replayed_forwards_have_the_bits_of_launched_ones(engine, options):
    expected, logits = texts(engine(**options))
    replaying = engine(**options)
    graphs = with_graphs(replaying)
    said, again = texts(replaying)
    assert said == expected
    assert torch.equal(again, logits)
    counts = replaying.core.facts.row_counts.ladder
    assert 1 <= graphs.captures <= len(counts)
    assert replaying.stats()["graph_replays"] == graphs.replays > NEW


def test_a_graph_with_other_bits_is_never_replayed(engine, caplog):
    expected, logits = texts(engine())
    other = engine()
    graphs = with_graphs(other, wrong=0.5)
    with caplog.at_level(logging.WARNING):
        said, again = texts(other)
    assert (said, graphs.replays) == (expected, 0)
    assert torch.equal(again, logits)
    assert caplog.text.count("has other bits") == graphs.captures


def test_a_model_that_cannot_be_captured_runs_operation_by_operation(engine, caplog):
    expected, _ = texts(engine())
    other = engine()
    graphs = with_graphs(other, error=RuntimeError("operation not permitted"))
    with caplog.at_level(logging.WARNING):
        assert texts(other)[0] == expected
    assert graphs.replays == 0
    assert caplog.text.count("operation not permitted") == graphs.captures
    assert graphs.captures <= len(other.core.facts.row_counts.ladder)  # tried once each


def test_an_interrupt_while_capturing_leaves_the_pager_as_it_was(engine):
    one = engine()
    with one.session() as session:
        session.prefill(prompt(20))
        before = {name: one.stats()[name] for name in ("sequences", "free_blocks", "records")}
        graphs = with_graphs(one, error=KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            session.generate(2, eos=None)
        graphs.error = None
        assert {name: one.stats()[name] for name in before} == before
        assert len(session.generate(2, eos=None).tokens) == 2
    one.core.pager.check_invariants()


def test_what_was_captured_before_memory_moved_is_captured_again(engine):
    one = engine()
    graphs = with_graphs(one)
    with one.session() as session:
        session.prefill(prompt(20))
        session.generate(3, eos=None)
        captures = graphs.captures
        for rows, graph in graphs._graphs.items():
            graphs._graphs[rows] = replace(graph, generation=graph.generation - 1)
        session.generate(3, eos=None)
        assert graphs.captures > captures


def test_changed_weights_end_what_was_captured(closing):
    own = build("llama", "bfloat16")  # its weights change
    one = closing(make_engine(own, device=require("shim"), host_bytes="16MiB"))
    before = with_graphs(one)
    with one.session() as session:
        session.prefill(prompt(20))
        with torch.no_grad():
            next(own.parameters()).mul_(1.5)
        one.weights_changed()
        assert one.core.runner.graphs is not before


def test_the_shim_goes_without_graphs(engine):
    assert engine().core.runner.graphs is None
    assert engine().stats()["graph_replays"] == 0
    with pytest.raises(
        InvalidArgumentError, match=r"PagerConfig\.graphs is 1; expected True or False"
    ):
        engine(graphs=1)
