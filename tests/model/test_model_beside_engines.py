"""While engines are open, and after they are lost, a model is still its owner's."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from bits import assert_same_bits, assert_same_session
from reference_models import COMMON, build, make_engine, prompt

sys.path.append(str(Path(__file__).parents[1] / "python"))
import kvpager
from interrupts import Interrupter, count_instants
from kvpager import InvalidArgumentError, UnsupportedModelError
from kvpager._model.seam import attention as seam
from kvpager._model.seam.attach import attach
from kvpager._model.seam.causal_lm import cache_argument
from kvpager._model.seam.observe import observe
from kvpager._model.watch.looks import only_looks

WAYS = [
    ("llama", "sdpa"),
    ("mistral", "eager"),
    *(
        pytest.param(architecture, implementation, marks=pytest.mark.deep)
        for architecture, implementation in [
            ("llama", "eager"),
            ("mistral", "sdpa"),
            ("gemma2", "eager"),
            ("qwen3_moe", "sdpa"),
            ("gpt_oss", "eager"),
        ]
    ),
]


@pytest.fixture(autouse=True)
def _quiet():
    """transformers warns of generation flags that no test here is about."""
    transformers.logging.set_verbosity_error()


def padded_batch():
    """Two prompts of 20 and 9 tokens, padded on the left; ids and mask [2, 20]."""
    ids = torch.from_numpy(prompt(40, seed=3)).reshape(2, 20)
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    ids[1, :11] = 0
    return ids, mask


def everything(model):
    """What its owner may ask of a model: batches, padding, caches, windows crossed, attentions."""
    ids, mask = padded_batch()
    with torch.no_grad():
        batch = model(ids, attention_mask=mask).logits
        cache_name = cache_argument(model)
        long = model(torch.from_numpy(prompt(70))[None], use_cache=True)
        more = model(ids[:1, :3], use_cache=True, **{cache_name: long[cache_name]}).logits
        text = model.generate(
            ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0
        )
    return [batch, long.logits, more, text]


def assert_equal(actual, expected, what):
    assert len(actual) == len(expected)
    for i, (ours, theirs) in enumerate(zip(actual, expected)):
        assert_same_bits(ours, theirs, f"{what}, result {i}")


@pytest.mark.parametrize(("architecture", "implementation"), WAYS)
def test_a_model_answers_with_the_same_bits_while_engines_are_open(architecture, implementation):
    model = build(architecture)
    model.set_attn_implementation(implementation)
    before = everything(model)
    with make_engine(model, exact=False) as first, make_engine(model, exact=False):
        with first.session() as session:
            session.prefill(prompt(40))
            assert_equal(everything(model), before, "beside two engines")
            session.generate(3).tokens.tolist()
        found = []
        thread = threading.Thread(target=lambda: found.extend(everything(model)))
        thread.start()
        thread.join()
        assert_equal(found, before, "in another thread")
        assert model.config._attn_implementation == implementation
    assert_equal(everything(model), before, "afterwards")


def test_attention_weights_can_be_asked_for_while_an_engine_is_open():
    model = build("llama")
    model.set_attn_implementation("eager")
    ids = torch.from_numpy(prompt(12))[None]
    with torch.no_grad():
        before = model(ids, output_attentions=True).attentions
        with make_engine(model):
            assert_equal(model(ids, output_attentions=True).attentions, before, "attentions")


def test_the_implementation_can_be_changed_while_an_engine_is_open():
    model = build("llama")
    ids = prompt(40)
    with make_engine(model) as engine, engine.session() as session:
        session.prefill(ids[:30])
        model.set_attn_implementation("eager")
        session.prefill(ids)
        with engine.session() as other:
            other.prefill(ids)
            assert_same_bits(session.logits, other.logits, "logits")
    assert model.config._attn_implementation == "eager"


def test_a_model_that_is_run_inside_a_forward_has_its_own_attention():
    """Such as a hook that asks another model."""
    model, other = build("llama"), build("qwen3")
    ids = torch.from_numpy(prompt(10))[None]
    with torch.no_grad():
        expected = other(ids).logits
    seen = []

    def ask(module, arguments):
        with torch.no_grad():
            seen.append(other(ids).logits)

    model.model.layers[1].register_forward_pre_hook(ask)
    with make_engine(model) as engine, engine.session() as session:
        seen.clear()  # the start tries operations on numbers of its own
        session.prefill(prompt(20))
        session.generate(2).tokens.tolist()
    assert seen
    for logits in seen:
        assert_same_bits(logits, expected, "logits of the other model")


def test_a_compiled_copy_of_the_model_works_beside_an_engine():
    model = build("llama")
    ids = torch.from_numpy(prompt(20))[None]
    with torch.no_grad(), make_engine(model):
        expected = model(ids, use_cache=False).logits
        compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
        assert_same_bits(compiled(ids, use_cache=False).logits, expected, "compiled")
    torch.compiler.reset()


def test_models_that_share_a_configuration_do_not_meet():
    model = build("llama")
    twin = transformers.LlamaForCausalLM(model.config).eval()
    assert twin.config is model.config
    before = everything(twin)
    with make_engine(model):
        assert_equal(everything(twin), before, "the other model")


def test_an_engine_that_nobody_closed_is_collected_and_harms_nobody():
    model = build("llama")
    before = everything(model)
    engine = make_engine(model)
    session = engine.session()
    session.prefill(prompt(40))
    gone = [weakref.ref(engine), weakref.ref(engine.pager)]
    del engine, session
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert_equal(everything(model), before, "afterwards")
    with make_engine(model) as again, again.session() as session:
        session.prefill(prompt(40))


def test_a_cell_that_is_run_twice_leaves_the_model_usable():
    model = build("llama")
    before = everything(model)
    engine = make_engine(model)
    engine.session().prefill(prompt(20))
    engine = make_engine(model)  # the first one has no name any more
    engine.session().prefill(prompt(20))
    assert_equal(everything(model), before, "beside the second")
    engine.close()
    assert_equal(everything(model), before, "afterwards")


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save_pretrained"])
def test_a_copy_of_an_open_model_is_a_plain_model(way, tmp_path):
    model = build("llama")
    before = everything(model)
    with make_engine(model) as engine:
        if way == "deepcopy":
            twin = copy.deepcopy(model)
        elif way == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        else:
            model.save_pretrained(tmp_path)
            twin = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert "kvpager" not in str(vars(twin.config))
        assert_equal(everything(twin), before, "the copy, beside the engine")
    assert_equal(everything(twin), before, "the copy")
    with make_engine(twin) as other, other.session() as session:
        session.prefill(prompt(20))
        assert other.fingerprint == engine.fingerprint


def test_a_configuration_that_names_kvpager_says_how_to_get_out():
    """As an older release left it in a model that was copied while an engine was open."""
    model = build("llama")
    before = everything(model)
    model.config._attn_implementation_internal = "kvpager"
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(InvalidArgumentError, match=r'set_attn_implementation\("sdpa"\)'):
        model(ids)
    with make_engine(model) as engine, engine.session() as session:
        session.prefill(prompt(20))
        with pytest.raises(InvalidArgumentError, match=r'set_attn_implementation\("sdpa"\)'):
            model(ids)
        model.set_attn_implementation("sdpa")
        assert_equal(everything(model), before, "set back")
        session.prefill(prompt(30))
    assert_equal(everything(model), before, "afterwards")


def hooks_of(model):
    return [
        (name, hook)
        for module in model.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
        for hook in getattr(module, name)
    ]


def small():
    """One layer, so that starting an engine takes little."""
    config = transformers.LlamaConfig(
        **{**COMMON, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
        | {"num_attention_heads": 2, "num_key_value_heads": 1}
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def observed(model):
    """All that a start sees of a model, in one thread: bits, by name."""
    seen = observe(model, 16)
    found = {
        f"{name} of layer {i}": x for i, qkv in seen.layers.items() for name, x in zip("qkv", qkv)
    }
    return found | {"hidden": seen.hidden}, sorted(
        name for call in seen.calls for name in call.names
    )


def test_engines_are_made_beside_threads_that_run_the_model():
    """Forwards of another engine, and the owner's own calls, while starts watch its modules."""
    model = small()
    attach(model)
    ids = prompt(40)
    row = torch.from_numpy(ids)[None]
    with torch.no_grad():
        plain = model(row).logits
    expected, names = observed(model)
    stop, wrong = threading.Event(), []

    def until_stopped(work):
        while not stop.is_set() and not wrong:
            try:
                work()
            except BaseException as error:  # noqa: PERF203  # of a thread
                wrong.append(error)

    def own_call():
        with torch.no_grad():
            assert_same_bits(model(row).logits, plain, "the owner's call")

    with make_engine(model, rows=8) as engine:
        with engine.session() as first:
            first.prefill(ids)
            logits = first.logits

        def other_engine():
            with engine.session() as session:
                session.prefill(ids)
                assert_same_bits(session.logits, logits, "the other engine")
            engine.pager.reset()

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        threads = [
            threading.Thread(target=until_stopped, args=(work,))
            for work in (own_call, other_engine)
        ]
        try:
            for thread in threads:
                thread.start()
            for _ in range(60):
                found, found_names = observed(model)
                assert found_names == names
                for name, bits in expected.items():
                    assert_same_bits(found[name], bits, name)
            for _ in range(3):
                with make_engine(model, rows=8) as other:
                    assert other.fingerprint == engine.fingerprint
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            sys.setswitchinterval(interval)
    assert wrong == []
    assert hooks_of(model) == []


def assert_interrupted_starts_leave_no_trace(moments, **options):
    model, draft = small(), small()
    if options.pop("draft", False):
        options["draft"] = draft
    ids = torch.from_numpy(prompt(20))[None]
    with torch.no_grad():
        before = model(ids).logits
    make_engine(model, **options).close()

    def start():
        make_engine(model, **options).close()

    total = count_instants(start)
    threads = torch.get_num_threads()
    for moment in moments(total):
        Interrupter(moment).run(start)
        for one in (model, draft):
            assert one.config._attn_implementation == "sdpa", moment
            assert hooks_of(one) == [], moment
        assert torch.get_num_threads() == threads, moment
        with torch.no_grad():
            assert_same_bits(model(ids).logits, before, f"after an interrupt at {moment}")
    with make_engine(model, **options) as engine, engine.session() as session:
        session.prefill(prompt(20))


# An interruption that strikes in a collector's callback is reported there, and not raised.
ignore_collectors = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@ignore_collectors
@pytest.mark.parametrize("draft", [False, True])
def test_an_interrupted_constructor_leaves_the_model_as_it_was(draft):
    rng = np.random.default_rng(1)
    assert_interrupted_starts_leave_no_trace(
        lambda total: sorted(rng.integers(0, total, 8).tolist()), draft=draft, rows=8
    )


@ignore_collectors
@pytest.mark.deep
@pytest.mark.parametrize("draft", [False, True])
def test_a_constructor_that_is_interrupted_anywhere_leaves_the_model_as_it_was(draft):
    assert_interrupted_starts_leave_no_trace(
        lambda total: range(0, total, max(1, total // 300)), draft=draft, rows=8
    )


def test_a_refused_start_leaves_torchs_threads_alone():
    model = build("llama")
    threads = torch.get_num_threads()
    with pytest.raises(UnsupportedModelError):
        make_engine(model.train(), threads=threads + 1)
    with pytest.raises(kvpager.PagerError):
        make_engine(model.eval(), threads=threads + 1, pool_tokens=16)
    assert torch.get_num_threads() == threads


def test_attention_outside_every_forward_belongs_to_nobody():
    module = torch.nn.Module()
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(InvalidArgumentError, match="inside an engine's forward alone"):
        seam.attention(module, q, q, q, None)


@pytest.mark.parametrize("known", [False, True], ids=["unknown", "of an engine that was closed"])
def test_another_model_that_a_hook_runs_within_a_forward_attends_as_it_does(closing, known):
    model, other = build("llama"), build("llama", "float32", num_hidden_layers=2)
    if known:
        make_engine(other).close()
    ids = torch.from_numpy(prompt(9))[None]
    with torch.no_grad():
        expected = other(ids).logits
    alone = closing(closing(make_engine(model)).session())
    alone.prefill(prompt(30))
    found = []

    def look(module, given, output):
        with torch.no_grad():
            found.append(other(ids).logits)

    engine = closing(make_engine(model))
    model.model.layers[1].register_forward_hook(only_looks(look))
    session = closing(engine.session())
    session.prefill(prompt(30))
    assert found
    for logits in found:
        assert_same_bits(logits, expected, "of the other model")
    assert_same_session(session, alone, "beside another model")


def test_a_model_with_the_configuration_of_an_engines_is_refused_within_its_forward(closing):
    model = build("llama")
    other = type(model)(model.config).eval()
    errors = []

    def look(module, given, output):
        with torch.no_grad():
            try:
                other(torch.ones(1, 1, dtype=torch.int64))
            except InvalidArgumentError as error:
                errors.append(str(error))

    engine = closing(make_engine(model, graphs=False))
    model.model.layers[1].register_forward_hook(only_looks(look))
    closing(engine.session()).prefill(prompt(30))
    assert errors
    assert "shares the configuration" in errors[0]


def test_a_model_that_is_called_within_its_own_forward_is_an_error_and_no_other_bits(closing):
    model = build("llama")
    engine = closing(make_engine(model, graphs=False))
    session = closing(engine.session())
    session.prefill(prompt(30))
    said = []

    def look(module, given, output):
        with torch.no_grad():
            try:
                model(torch.ones(1, len(output[0]), dtype=torch.int64))
            except InvalidArgumentError as error:
                said.append(str(error))

    handle = model.model.layers[1].register_forward_hook(only_looks(look))
    alone = closing(closing(make_engine(build("llama"), graphs=False)).session())
    alone.prefill(prompt(30))
    session.append([5])
    handle.remove()
    alone.append([5])
    assert any("attends twice" in text for text in said)
    assert_same_session(session, alone, "after a call within its forward")


def test_memory_of_weights_can_be_resized_after_an_engine():
    model = build("llama")
    before = [parameter.untyped_storage().resizable() for parameter in model.parameters()]
    make_engine(model).close()
    assert [parameter.untyped_storage().resizable() for parameter in model.parameters()] == before


def alone_of(model):
    """What a copy of a model computes, which no engine knows."""
    other = copy.deepcopy(model)

    def logits(tokens):
        with torch.no_grad():
            return other(tokens).logits[0, -1]

    return logits


def test_a_processor_of_logits_that_calls_the_model_has_its_bits_in_every_mode(closing):
    model = build("llama", "bfloat16")
    alone, texts = alone_of(model), []
    for options in ({}, {"speculate": "prompt-lookup"}):
        different = []

        def guide(ids, scores):
            tokens = torch.as_tensor(np.asarray(ids)).long().reshape(1, -1)[:, -24:]
            with torch.no_grad():
                said = model(tokens).logits[0, -1]
            if len(different) < 40:  # noqa: B023  # called before the loop goes on
                different.append(not torch.equal(said, alone(tokens)))  # noqa: B023
            return scores + 1.5 * said.float().reshape(scores.shape)

        session = closing(closing(make_engine(model, linear="kvpager")).session())
        session.prefill(np.tile(prompt(10, 5), 5))
        session.generate(60, eos=None, logits_processor=[guide], **options)
        texts.append(session.tokens.tolist())
        assert not any(different)
    assert texts[0] == texts[1]
