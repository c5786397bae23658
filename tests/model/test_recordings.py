"""Forwards of few rows on a CPU are replayed from recordings, with the bits of the model itself."""

from __future__ import annotations

import logging
from collections import OrderedDict
from itertools import count

import pytest
import torch
from adapters import with_adapters
from apart import apart
from bits import assert_same_bits, assert_same_session
from damage import damage_chunk
from reference_models import ARCHITECTURES, CHUNK, build, make_engine, prompt

from kvpager import Cache, CorruptSnapshotError, ModelChangedError, TopK
from kvpager._model.seam.observe import Recorder
from kvpager._model.watch.looks import only_looks
from kvpager._runtime.execution import recordings
from kvpager._runtime.execution.recordings import (
    MOST_ROWS,
    NotRecordableError,
    Recording,
    Recordings,
    recorded,
)

WORTH = 6  # in these tests
NEW = WORTH + 12
TOPK = TopK(chunks=2, sinks=16, recent=32)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(recordings, "WORTH", WORTH)


@pytest.fixture(scope="module")
def model():
    return build("llama", "bfloat16")


def open_engine(closing, model, **options):
    return closing(make_engine(model, pool_tokens=1024, **options))


def generated(engine, closing, length=40, new=NEW, seed=0):
    session = closing(apart(engine))
    session.prefill(prompt(length, seed))
    session.generate(new, eos=None)
    return session


def replays(engine):
    return engine.stats()["graph_replays"]


def assert_replays_change_nothing(closing, model, **options):
    """One session, then several at once, with recordings and without."""
    engines = [open_engine(closing, model, graphs=graphs, **options) for graphs in (False, True)]
    sessions = [generated(engine, closing) for engine in engines]
    assert_same_session(*sessions, "one session")
    prompts = [prompt(length, seed=length) for length in (9, 20, 33)]
    together = [engine.run(prompts, NEW, eos=None) for engine in engines]
    for without, with_recordings in zip(*together):
        assert with_recordings.tokens.tolist() == without.tokens.tolist()
    assert replays(engines[0]) == 0
    return replays(engines[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_replayed_forwards_have_the_bits_of_the_model(closing, architecture, dtype):
    assert assert_replays_change_nothing(closing, build(architecture, dtype)) > NEW - WORTH


@pytest.mark.parametrize(
    "options",
    [
        {"linear": "torch"},
        {"linear": "kvpager"},
        {"selection": TOPK},
        {"kv_dtype": "q8"},
        {"exact": "reuse"},
        {"exact": False},
    ],
    ids=str,
)
def test_options_of_an_engine_change_nothing_about_it(closing, model, options):
    assert assert_replays_change_nothing(closing, model, **options) > 0


def test_models_with_adapters_are_replayed(closing):
    assert assert_replays_change_nothing(closing, with_adapters("a")) > 0


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "smollm3", "gemma2"])
def test_all_layers_of_a_decoder_are_one_call_of_the_core(closing, architecture):
    calls = []
    for layers in (2, 3):
        model = build(architecture, "bfloat16", num_hidden_layers=layers)
        runner = open_engine(closing, model, linear="kvpager").core.runner
        tokens = torch.tensor([3, 4])
        with torch.inference_mode():
            replay = recorded(runner._decoded, runner._linear, tokens, torch.arange(2))
        graph = replay.graph
        calls.append([node.target for node in graph.nodes if node.op.startswith("call_")])
    assert calls[0] == calls[1]


def test_a_number_of_rows_is_recorded_once_it_was_run_a_few_times(closing, model):
    engine = open_engine(closing, model)
    session = closing(engine.session())
    session.prefill(prompt(40))
    session.generate(WORTH, eos=None)
    assert replays(engine) == 0
    session.generate(5, eos=None)
    assert 4 <= replays(engine) <= 5
    assert max(engine.core.runner.graphs._made) <= MOST_ROWS


def test_time_in_attention_is_counted_in_replays_too(closing, model):
    engine = open_engine(closing, model)
    session = generated(engine, closing)
    before, attended = replays(engine), engine.stats()["seconds_attention"]
    session.generate(3, eos=None)
    assert replays(engine) == before + 3
    assert engine.stats()["seconds_attention"] > attended


def test_hooks_that_look_see_every_forward(closing, model):
    engine, seen = open_engine(closing, model), []
    session = generated(engine, closing)
    before = replays(engine)
    hook = only_looks(lambda *_: seen.append(1))
    handle = model.model.layers[1].register_forward_hook(hook)
    session.generate(3, eos=None)
    handle.remove()
    assert len(seen) == 3
    assert replays(engine) == before
    session.generate(3, eos=None)
    assert replays(engine) == before + 3


@pytest.mark.parametrize(
    "register",
    [
        torch.nn.modules.module.register_module_forward_hook,
        torch.nn.modules.module.register_module_forward_pre_hook,
    ],
    ids=["after", "before"],
)
def test_hooks_of_all_modules_that_look_see_every_forward(closing, model, register):
    engine, seen = open_engine(closing, model), []
    session = generated(engine, closing)
    before = replays(engine)
    watched = model.model.layers[1].mlp
    handle = register(only_looks(lambda module, *_: seen.append(1) if module is watched else None))
    try:
        session.generate(3, eos=None)
    finally:
        handle.remove()
    assert len(seen) == 3
    assert replays(engine) == before


def test_a_dictionary_of_hooks_in_the_place_of_a_modules_own_is_a_change(closing, model):
    engine = open_engine(closing, model)
    session = generated(engine, closing)
    watched, length = model.model.layers[1].mlp, len(session.tokens)
    own = watched._forward_hooks
    watched._forward_hooks = OrderedDict({0: only_looks(lambda *_: None)})
    try:
        with pytest.raises(ModelChangedError, match=r"layers\.1\.mlp"):
            session.generate(3, eos=None)
    finally:
        watched._forward_hooks = own
    assert len(session.tokens) == length


def test_functions_of_others_that_modules_hold_are_called_in_every_forward(closing):
    model, calls = build("llama", "bfloat16"), []

    def activation(x):
        calls.append(1)
        return torch.nn.functional.silu(x)

    mlp = model.model.layers[0].mlp
    del mlp.act_fn
    mlp.act_fn = activation
    engine = open_engine(closing, model)
    session = generated(engine, closing)
    del calls[:]
    session.generate(3, eos=None)
    assert len(calls) == 3
    assert replays(engine) == 0


def test_a_cache_of_the_model_stops_no_replay(closing, model):
    engine = open_engine(closing, model)
    session = generated(engine, closing)
    before = replays(engine)
    with Cache(model, pool_tokens=256):
        session.generate(3, eos=None)
    assert replays(engine) == before + 3


def test_weights_that_were_moved_are_not_read_where_they_were(closing, monkeypatch):
    """Of which torch frees the memory under the tensors that have it."""
    model, calls = build("llama", "bfloat16"), []
    engine = open_engine(closing, model)
    session = generated(engine, closing)
    model.share_memory()
    monkeypatch.setattr(Recording, "__call__", lambda *_: calls.append(1))
    with pytest.raises(ModelChangedError, match="lies elsewhere in memory"):
        session.generate(3, eos=None)
    assert calls == []
    monkeypatch.undo()
    engine.weights_changed()
    session.generate(3, eos=None)


def test_recordings_leave_no_source_behind(closing, model):
    kept = torch.fx.graph_module._loader.eval_cache
    before = len(kept)
    assert replays(open_engine(closing, model)) == 0
    engine = open_engine(closing, model)
    generated(engine, closing)
    assert replays(engine) > 0
    assert len(kept) == before


@pytest.mark.parametrize("follows", [True, False])
def test_changed_weights_are_read_by_what_was_recorded_or_it_is_recorded_again(closing, follows):
    model = build("llama", "bfloat16")
    engine = open_engine(closing, model)
    generated(engine, closing)
    before = engine.core.runner.graphs.all()
    for recording in before.values() if not follows else ():
        own = recording._forward
        recording._forward = lambda *given, own=own: own(*given) * 1.5
    for _ in range(2):
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
        engine.weights_changed()
    assert replays(engine) == 0
    session, other = (
        closing(apart(one)) for one in (engine, open_engine(closing, model, graphs=False))
    )
    for each in (session, other):
        each.prefill(prompt(40))
        each.generate(3, eos=None)
    assert replays(engine) == 2  # the first token is the prompt's
    assert_same_session(session, other, "changed")
    assert (engine.core.runner.graphs.all()[1] is before[1]) == follows


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_while_recording_loses_nothing(closing, model, monkeypatch, error):
    engine = open_engine(closing, model)
    expected = generated(open_engine(closing, model, graphs=False), closing)
    session = closing(apart(engine))
    session.prefill(prompt(40))
    attend, calls = Recorder.attend, []

    def failing(self, layer, *args, **call):
        calls.append(layer)
        if len(calls) == 2:
            raise error
        return attend(self, layer, *args, **call)

    monkeypatch.setattr(Recorder, "attend", failing)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            session.generate(NEW, eos=None)
        left = expected.length - session.length
        session.generate(left, eos=None)
    else:
        session.generate(NEW, eos=None)
        assert replays(engine) == 0  # and goes on without
    assert len(calls) >= 2
    assert session.tokens.tolist()[: expected.length] == expected.tokens.tolist()


def test_an_error_in_a_replay_names_its_place_and_leaves_the_session_as_it_was(
    closing, model, tmp_path
):
    path = tmp_path / "session.kvsnap"
    saved = closing(open_engine(closing, model).session())
    saved.prefill(prompt(40))
    saved.save(path)
    engine = open_engine(closing, model)
    other = generated(engine, closing, seed=1)
    session = closing(engine.restore(path))
    damage_chunk(path, engine, 1, layer=2)
    before = replays(engine)
    with pytest.raises(CorruptSnapshotError) as found:
        session.generate(3, eos=None)
    error = found.value
    assert (error.chunk, error.layer, error.start, error.stop) == (1, 2, CHUNK, 2 * CHUNK)
    assert session.tokens.tolist() == saved.tokens.tolist()
    assert replays(engine) == before
    other.generate(3, eos=None)
    assert replays(engine) > before
    without = open_engine(closing, model, graphs=False)
    whole = generated(without, closing, new=other.length - 40, seed=1)
    assert_same_session(other, whole, "after an error")


class Own(torch.nn.Module):
    """A module of a user, whose Python may do more than compute."""

    def forward(self, x):
        return torch.nn.functional.silu(x)


def test_models_with_modules_or_methods_of_others_run_as_they_are(closing, monkeypatch):
    own = build("llama")
    own.model.layers[0].mlp.act_fn = Own()
    patched = build("llama")
    forward = patched.model.layers[0].mlp.forward
    patched.model.layers[0].mlp.forward = lambda x: forward(x)
    exchanged = build("qwen3")
    kind = type(exchanged.model.layers[0].mlp)
    method = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: method(self, x))
    for model in (own, patched, exchanged):
        engine = open_engine(closing, model)
        assert engine.core.runner.graphs is None
        generated(engine, closing)
    assert open_engine(closing, build("llama"), graphs=False).core.runner.graphs is None


# What a recording does again, and what it refuses.

TABLE = torch.arange(64.0).reshape(16, 4)
IDS, PLACES = torch.tensor([3, 1, 2]), torch.tensor([0, 1, 2])
OTHERS = torch.tensor([5, 5, 0]), torch.tensor([9, 4, 7])


def looked_up(tokens):
    return torch.nn.functional.embedding(tokens, TABLE)


def written(tokens, positions):
    x = looked_up(tokens).clone()
    x[1, 2:] = positions[0]
    x.add_(1).mul_(positions[:, None])
    x.view(-1)[3:5] = 7
    return x


FIT = {
    "views": lambda t, p: (looked_up(t).T @ looked_up(p)).mT.reshape(2, 8)[..., None, 1:7:2],
    "parts": lambda t, p: torch.cat(
        [*looked_up(t).chunk(2, -1), *looked_up(p).split([1, 3], 1)], 1
    ),
    "most": lambda t, p: looked_up(t).max(-1, keepdim=True).values + looked_up(p).sort(0)[1],
    "indices": lambda t, p: TABLE[t] + TABLE.index_select(0, p),
    "made": lambda t, p: torch.arange(3, device=t.device) * t + torch.zeros_like(p) + torch.ones(3),
    "reflected": lambda t, p: 1 - looked_up(t) / (2.0 + looked_up(p)) ** 2,
    "einsum": lambda t, p: torch.einsum("ij,kj->ik", looked_up(t), looked_up(p)),
    "masks": lambda t, p: torch.where(t[:, None] > p, looked_up(t)[:, :3], -torch.inf),
    "one by one": lambda t, p: sum(row for row in looked_up(t)),
    "overloads": lambda t, p: torch.ops.aten.add.Tensor(t, p),
    "written": written,
    "out": lambda t, p: torch.mul(t, p, out=torch.empty(3, dtype=torch.int64)),
    "given": lambda t, p: t,
}


@pytest.mark.parametrize("name", FIT)
def test_a_recording_computes_the_same_of_other_numbers(name):
    def decode(attention, tokens, positions):
        return FIT[name](tokens, positions)

    with torch.inference_mode():
        replay = recorded(decode, None, IDS, PLACES)
        for tokens, positions in (OTHERS, (IDS, PLACES), OTHERS):
            assert_same_bits(replay(None, tokens, positions), decode(None, tokens, positions), name)


UNFIT = {
    "item": (lambda t, p: t * p[0].item(), "reads a number"),
    "bool": (lambda t, p: t if t[0] > 3 else p, "reads a number"),
    "int": (lambda t, p: looked_up(t)[:, : int(p[1])], "reads a number"),
    "equal": (lambda t, p: t * torch.equal(t, p), "reads a number"),
    "tolist": (lambda t, p: t * p.tolist()[0], "reads the numbers"),
    "numpy": (lambda t, p: t * int(p.numpy()[0]), "reads the numbers"),
    "from numpy": (lambda t, p: torch.from_numpy(p.numpy()), "reads the numbers"),
    "address": (lambda t, p: t * p.data_ptr(), "reads the numbers"),
    "nonzero": (lambda t, p: t[t.nonzero()[:, 0]], "depends on numbers"),
    "by truth": (lambda t, p: t[t > 1], "depends on numbers"),
    "unique": (lambda t, p: torch.unique(t), "depends on numbers"),
    "random": (lambda t, p: t + torch.rand(3), "random"),
    "dropout": (lambda t, p: torch.nn.functional.dropout(t.float(), 0.5), "random"),
    "lasting": (lambda t, p: TABLE[:1].mul_(1) + t[:, None], "writes to a tensor that lasts"),
    "its input": (lambda t, p: t.add_(0), "writes to a tensor that lasts"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_may_be_otherwise_next_time_is_refused(name):
    does, why = UNFIT[name]
    with torch.inference_mode(), pytest.raises(NotRecordableError, match=why):
        recorded(lambda _, t, p: does(t, p), None, IDS.clone(), PLACES.clone())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_operations_that_no_function_of_torch_calls_are_refused():
    def plus_one(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    script = torch.jit.script(plus_one)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="following operation failed"):
        recorded(lambda _, t, p: script(t) * p, None, IDS, PLACES)


class Counting:
    """Decodes by a number that Python counts."""

    def __init__(self, model):
        self.decode = make_engine(model).core.runner._decoded
        self.calls = count()

    def __call__(self, attention, tokens, positions):
        return self.decode(attention, tokens, positions) + next(self.calls)


def test_a_recording_with_other_bits_is_never_replayed(model, caplog):
    kept = Recordings(model, Counting(model), None)
    with torch.inference_mode(), caplog.at_level(logging.WARNING, logger=recordings.__name__):
        for _ in range(WORTH + 3):
            kept.prepare(1, lambda: None)
        assert kept.run(Recorder(), IDS[:1], PLACES[:1]) is None
    assert caplog.text.count("has other bits") == 1
    assert kept.replays == 0


def test_a_recording_whose_attention_gets_other_bits_is_never_replayed(closing, model, caplog):
    decode, calls = open_engine(closing, model).core.runner._decoded, count()

    class Elsewhere:
        def __init__(self, attention):
            self.attention = attention

        def attend(self, layer, q, k, v, **call):
            return self.attention.attend(layer, q, k + next(calls) % 7, v, **call)

    def nudged(attention, tokens, positions):
        return decode(Elsewhere(attention), tokens, positions)

    kept = Recordings(model, nudged, None)
    with torch.inference_mode(), caplog.at_level(logging.WARNING, logger=recordings.__name__):
        for _ in range(WORTH + 1):
            kept.prepare(1, lambda: None)
    assert "has other bits" in caplog.text


def test_why_a_model_is_not_recorded_is_logged(closing, model, caplog):
    decode = open_engine(closing, model).core.runner._decoded

    def reading(attention, tokens, positions):
        return decode(attention, tokens, positions) * float(tokens[0] * 0 + 1)

    kept = Recordings(model, reading, None)
    with torch.inference_mode(), caplog.at_level(logging.INFO, logger=recordings.__name__):
        for _ in range(WORTH + 3):
            kept.prepare(1, lambda: None)
    assert caplog.text.count("run module by module") == 1
    assert "reads a number of a tensor" in caplog.text


def test_nothing_is_kept_of_a_model_that_was_another_while_it_was_recorded(closing):
    expected = generated(open_engine(closing, build("llama")), closing, 40)
    model = build("llama")
    engine = open_engine(closing, model)
    session = closing(engine.session())
    session.prefill(prompt(40))
    session.generate(WORTH + 1, eos=None)  # the next one is recorded
    norm = model.model.layers[1].input_layernorm
    before, norm.variance_epsilon = norm.variance_epsilon, 0.5
    with pytest.raises(ModelChangedError, match="variance_epsilon"):
        session.generate(1, eos=None)
    norm.variance_epsilon = before
    session.generate(len(expected.tokens) - session.length, eos=None)
    assert replays(engine) > 0
    assert_same_session(session, expected, "after it was put back")
