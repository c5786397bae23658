"""Log-probabilities attached to autograd: the rollout's bits, and gradients right to rounding."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch
import transformers
from adapters import with_adapters
from bits import assert_same_bits
from reference_models import (
    ARCHITECTURES,
    CHUNK,
    MORE_ARCHITECTURES,
    ROWS,
    build,
    make_engine,
    prompt,
    set_checkpoints,
)

from kvpager import CapacityError, InvalidArgumentError, TopK, UnsupportedModelError
from kvpager._runtime.execution.runner import Runner
from kvpager._runtime.gradients.attention import PieceAttention

GROUPS = ((0, 3), (50, 2), (97, 1))  # tokens of a prompt, and its completions
NEW = 21


def rollouts(engine, groups=GROUPS, new=NEW, **options):
    """Pairs of a prompt and a sampled completion, and their log-probabilities."""
    prompts = [
        prompt(30 + length, seed)
        for seed, (length, count) in enumerate(groups)
        for _ in range(count)
    ]
    settings = {"temperature": 1.0, "seed": range(len(prompts)), "eos": None, "logprobs": True}
    completions = engine.run(prompts, new, **{**settings, **options})
    pairs = [(ids, one.tokens) for ids, one in zip(prompts, completions)]
    return pairs, [one.logprobs for one in completions]


def loss_of(results):
    """A policy loss of some kind: each log-probability has another weight."""
    each = torch.cat([one.logprobs for one in results])
    return (each * weights(len(each))).sum()


def weights(count):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, generator=generator)


def gradients(model):
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def own_gradients(engine, pairs, **options):
    loss_of(engine.logprobs(pairs, **options)).backward()
    return gradients(engine.core.model)


def stock_gradients(model, pairs, attention="eager"):
    """Of transformers' own forward of each text alone, with its own attention."""
    model.set_attn_implementation(attention)
    experts = any("experts" in name for name, _ in model.named_parameters())
    if experts and model.dtype == torch.float64:
        model.set_experts_implementation("eager")  # no copy of an expert for each of its tokens
    found = []
    for ids, completion in pairs:
        text = torch.tensor(np.concatenate([ids, completion]))
        logits = model(text[None, :-1], use_cache=False).logits[0].float()
        each = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
        found.append(each[torch.arange(len(text) - 1), text[1:]][len(ids) - 1 :])
    each = torch.cat(found)
    (each * weights(len(each)).to(each.dtype)).sum().backward()
    return gradients(model)


def error(found, right):
    """Of a gradient, relative to the right one's norm."""
    return float((found.double() - right).norm() / right.norm().clamp(min=1e-30))


def assert_values(engine, pairs, expected):
    for one, logprobs in zip(engine.logprobs(pairs), expected):
        assert one.logprobs.dtype == torch.float32
        assert_same_bits(one.logprobs.detach(), torch.from_numpy(logprobs), "log-probabilities")


# The other architectures are in the long suite.
FIRST = ("llama", "gemma2", "gpt_oss")
MODELS = [
    pytest.param(name, marks=[] if name in FIRST else pytest.mark.long)
    for name in (*ARCHITECTURES, *MORE_ARCHITECTURES)
]
CHOOSES = TopK(chunks=2, sinks=16, recent=48)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("selection", [None, CHOOSES], ids=["dense", "topk"])
@pytest.mark.parametrize("architecture", MODELS)
def test_values_have_the_bits_of_the_rollout(architecture, dtype, selection):
    options = {} if selection is None else {"selection": selection}
    with make_engine(build(architecture, dtype), **options) as engine:
        pairs, logprobs = rollouts(engine)
        assert_values(engine, pairs, logprobs)


@pytest.mark.parametrize("architecture", MODELS)
def test_gradients_are_as_close_to_float64_as_the_stock_models(architecture):
    assert_as_close_as_stock(build(architecture), build(architecture, "float64"))


# All experts are chosen: with fewer, another rounding has another choice between near equals.
@pytest.mark.parametrize(
    ("architecture", "options"), [("llama", {}), ("gpt_oss", {"num_experts_per_tok": 4})]
)
def test_gradients_of_a_bfloat16_model_are_as_close_as_the_stock_models(architecture, options):
    model = build(architecture, "bfloat16", **options)
    right = build(architecture, "float64", **options)
    right.load_state_dict({name: one.double() for name, one in model.state_dict().items()})
    assert_as_close_as_stock(model, right)


def test_gradients_of_adapters_alone_are_as_close_as_the_stock_models():
    model, right = with_adapters("one"), with_adapters("one").double()
    for each in (model, right):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("lora_" in name)
    found = assert_as_close_as_stock(model, right)
    assert found
    assert all("lora_" in name for name in found)


def assert_as_close_as_stock(model, right_model):
    with make_engine(model) as engine:
        pairs, _ = rollouts(engine)
        own = own_gradients(engine, pairs)
    right = stock_gradients(right_model, pairs)
    stock = stock_gradients(model, pairs)
    assert own.keys() == stock.keys() == right.keys()
    for name, gradient in right.items():
        assert own[name].dtype == stock[name].dtype
        mine, theirs = error(own[name], gradient), error(stock[name], gradient)
        assert mine <= 1.5 * theirs + 1e-6, (name, mine, theirs)
    return own


def test_a_selection_that_takes_everything_has_the_gradients_of_dense_attention():
    model = build("llama")
    with make_engine(model) as dense, make_engine(model, selection=TopK(chunks=64)) as engine:
        pairs, _ = rollouts(dense)
        expected = own_gradients(dense, pairs)
        for name, gradient in own_gradients(engine, pairs).items():
            assert error(gradient, expected[name].double()) < 1e-6, name


def test_gradients_through_a_selection_are_those_of_attention_masked_by_it(monkeypatch):
    model, right = build("llama"), build("llama", "float64")
    pairs = [(prompt(150, 1), prompt(12, 2))]
    chosen = {}  # by layer, the chunks of each row and kv head
    own = PieceAttention.values

    def noting(self, call, *tensors):
        made = own(self, call, *tensors)
        (part,) = self.parts
        offsets, chunks = self._selected[call.layer]
        for entry in range(part.rows * 4):
            row, head = part.first + entry // 4, entry % 4
            chosen[call.layer, row, head] = chunks[offsets[entry] : offsets[entry + 1]]
        return made

    with monkeypatch.context() as patch, make_engine(model, selection=CHOOSES) as engine:
        patch.setattr(PieceAttention, "values", noting)
        found = own_gradients(engine, pairs)
    count = 161
    visible = torch.zeros(3, 4, count, count, dtype=torch.bool)
    for (layer, row, head), chunks in chosen.items():
        for chunk in chunks:
            visible[layer, head, row, CHUNK * chunk : min(CHUNK * (chunk + 1), row + 1)] = True
    assert visible.sum() < 0.9 * 3 * 4 * count * (count + 1) / 2

    def masked(module, q, k, v, mask, **options):
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        scores = q @ k.transpose(2, 3) * options["scaling"]
        hidden = ~visible[module.layer_idx].repeat_interleave(2, 0)
        p = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        return (p @ v).transpose(1, 2), None

    transformers.AttentionInterface.register("masked", masked)
    expected = stock_gradients(right, pairs, "masked")
    for name, gradient in expected.items():
        assert error(found[name], gradient) < 1e-5, name


@pytest.mark.parametrize("kv_dtype", ["q8", "float16"])
def test_keys_and_values_in_other_formats_keep_the_bits_and_pass_their_gradients_on(kv_dtype):
    model = build("llama")
    with make_engine(model) as exact, make_engine(model, kv_dtype=kv_dtype) as engine:
        pairs, logprobs = rollouts(engine)
        assert_values(engine, pairs, logprobs)
        expected = own_gradients(exact, pairs)
        for name, gradient in own_gradients(engine, pairs).items():
            assert error(gradient, expected[name].double()) < 0.05, name


def test_texts_longer_than_the_pool_have_the_bits_and_gradients_of_a_large_one():
    model = build("qwen3")
    pairs = [(prompt(700, 1), prompt(40, 2)), (prompt(300, 3), prompt(9, 4))]
    with make_engine(model, pool_tokens=4096) as large, make_engine(model) as small:
        expected, found = large.logprobs(pairs), small.logprobs(pairs)
        for one, other in zip(found, expected):
            assert_same_bits(one.logprobs.detach(), other.logprobs.detach(), "log-probabilities")
        loss_of(expected).backward()
        of_large = gradients(model)
        loss_of(found).backward()
        for name, gradient in gradients(model).items():
            assert_same_bits(gradient, of_large[name], name)
        assert small.stats()["chunks_evicted"] > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_in_training_mode_keep_the_bits_and_the_gradients(reentrant):
    model = build("llama")
    with make_engine(model) as engine:
        pairs, logprobs = rollouts(engine)
        expected = own_gradients(engine, pairs)
        set_checkpoints(model, use_reentrant=reentrant)
        model.train()
        if reentrant:
            with pytest.raises(UnsupportedModelError, match="use_reentrant"):
                engine.logprobs(pairs)
            return
        assert_values(engine, pairs, logprobs)
        for name, gradient in own_gradients(engine, pairs).items():
            assert error(gradient, expected[name].double()) < 1e-5, name
        assert model.training
        assert all(module.training for module in model.modules())


def test_a_shared_prompt_is_computed_once_and_gets_the_gradients_of_all_its_completions():
    model = build("llama")
    with make_engine(model, pool_tokens=320) as engine:
        pairs = [(prompt(10 * ROWS), prompt(5, seed)) for seed in range(1, 9)]
        before = engine.stats()["model_forwards"]
        results = engine.logprobs(pairs)
        assert engine.stats()["model_forwards"] - before == 10 + 1  # the last tokens are not fed
        loss_of(results).backward()
    own = gradients(model)
    for name, gradient in stock_gradients(build("llama", "float64"), pairs).items():
        assert error(own[name], gradient) < 1e-5, name


def test_order_company_and_threads_change_no_bit_of_a_value():
    with make_engine(build("qwen3")) as engine:
        pairs, logprobs = rollouts(engine)
        order = np.random.default_rng(1).permutation(len(pairs))
        assert_values(engine, [pairs[i] for i in order], [logprobs[i] for i in order])
        for pair, expected in zip(pairs, logprobs):
            assert_values(engine, [pair], [expected])
        found = []
        thread = threading.Thread(target=lambda: found.extend(engine.logprobs(pairs)))
        thread.start()
        thread.join()
        for one, expected in zip(found, logprobs):
            assert_same_bits(one.logprobs.detach(), torch.from_numpy(expected), "in a thread")
        thread = threading.Thread(target=lambda: loss_of(found).backward())
        thread.start()
        thread.join()
        in_thread = gradients(engine.core.model)
        for name, gradient in own_gradients(engine, pairs).items():
            assert_same_bits(gradient, in_thread[name], name)


def test_masks_choose_tokens_of_whole_texts():
    with make_engine(build("llama")) as engine:
        ids = prompt(70, 5)
        score = engine.score(ids).logprobs
        (whole,) = engine.logprobs([ids])
        assert_same_bits(whole.logprobs.detach(), torch.from_numpy(score), "a whole text")
        mask = np.arange(70) % 3 == 1
        (some,) = engine.logprobs([ids], [mask])
        assert_same_bits(some.logprobs.detach(), torch.from_numpy(score[mask[1:]]), "a mask")
        whole.logprobs[torch.from_numpy(mask[1:])].sum().backward()
        expected = gradients(engine.core.model)
        some.logprobs.sum().backward()
        for name, gradient in gradients(engine.core.model).items():
            assert error(gradient, expected[name].double()) < 1e-5, name


def test_log_probabilities_at_a_temperature_are_those_of_the_rollout_at_it():
    with make_engine(build("llama")) as engine:
        pairs, logprobs = rollouts(engine, temperature=0.7, logprob_temperature=0.7)
        for one, expected in zip(engine.logprobs(pairs, temperature=0.7), logprobs):
            assert_same_bits(one.logprobs.detach(), torch.from_numpy(expected), "at 0.7")
        text = np.concatenate(pairs[0])
        scored = engine.score(text, temperature=0.7).logprobs[-len(logprobs[0]) :]
        assert_same_bits(torch.from_numpy(scored), torch.from_numpy(logprobs[0]), "scored")
        plain = engine.score(text).logprobs[-len(logprobs[0]) :]
        assert (plain != scored).any()


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])  # a head that is plain, or capped
def test_entropies_and_top_log_probabilities_have_gradients(architecture):
    model, right = build(architecture), build(architecture, "float64")
    ids = prompt(40, 3)
    with make_engine(model) as engine:
        (found,) = engine.logprobs([ids], entropy=True, top_logprobs=3, temperature=1.5)
        assert [list(map(int, one)) for one in found.top_ids] == [
            [token for token, _ in top] for top in engine.score(ids, top_logprobs=3).top_logprobs
        ]
        (found.entropy.sum() + (found.top_logprobs * torch.tensor([1.0, 2, 3])).sum()).backward()
        own = gradients(model)
    logits = right(torch.tensor(ids)[None, :-1], use_cache=False).logits[0] / 1.5
    each = torch.log_softmax(logits, -1)
    entropy = -(each.exp() * each).sum(-1)
    assert torch.allclose(found.entropy.double(), entropy, atol=1e-5)
    top = each.gather(1, found.top_ids)
    assert torch.allclose(found.top_logprobs.double(), top, atol=1e-5)
    (entropy.sum() + (top * torch.tensor([1.0, 2, 3])).sum()).backward()
    for name, gradient in gradients(right).items():
        assert error(own[name], gradient) < 1e-5, name


def test_frozen_parameters_get_no_gradient():
    model = build("llama")
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    with make_engine(model) as engine:
        found = own_gradients(engine, rollouts(engine)[0])
    assert found.keys() == {n for n, p in model.named_parameters() if p.requires_grad}


def test_a_step_changes_the_policy_and_its_next_first_ratio_is_one_again():
    model = build("llama")
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    with make_engine(model) as engine:
        before = None
        for _ in range(3):
            pairs, logprobs = rollouts(engine)
            results = engine.logprobs(pairs)
            for one, expected in zip(results, logprobs):
                assert_same_bits(one.logprobs.detach(), torch.from_numpy(expected), "a step")
            assert before is None or (before != logprobs[0]).any()
            before = logprobs[0]
            loss_of(results).backward()
            optimiser.step()
            optimiser.zero_grad()
            engine.weights_changed()


def test_a_gradient_of_log_probabilities_is_computed_once_and_of_unchanged_weights():
    model = build("llama")
    with make_engine(model) as engine:
        pairs, _ = rollouts(engine)
        loss = loss_of(engine.logprobs(pairs))
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="differentiated already"):
            loss.backward()
        loss = loss_of(engine.logprobs(pairs))
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        with pytest.raises(RuntimeError, match="changed in place"):
            loss.backward()


def test_what_gradients_need_is_freed_with_them_or_with_what_nobody_differentiates():
    with make_engine(build("llama")) as engine:
        pairs, _ = rollouts(engine)
        results = engine.logprobs(pairs)
        assert kept_pieces() > 0
        del results
        assert kept_pieces() == 0
        results = engine.logprobs(pairs)
        loss_of(results).backward()
        assert kept_pieces() == 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Runner, "_require_equal", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.logprobs(pairs)
        assert kept_pieces() == 0
        assert not engine.pager.stats()["sequences"]


def kept_pieces():
    gc.collect()
    return sum(type(each) is PieceAttention for each in gc.get_objects())


def interrupt(*_):
    raise KeyboardInterrupt


def test_gradients_can_be_asked_for_without_writing_them_to_parameters():
    model = build("llama")
    with make_engine(model) as engine:
        pairs, _ = rollouts(engine)
        expected = own_gradients(engine, pairs)
        loss = loss_of(engine.logprobs(pairs))
    names = [name for name, _ in model.named_parameters()]
    for name, found in zip(names, torch.autograd.grad(loss, list(model.parameters()))):
        assert_same_bits(found, expected[name], name)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_values_alone_are_computed_under_no_grad():
    with make_engine(build("llama")) as engine, torch.no_grad():
        pairs, logprobs = rollouts(engine)
        for one, expected in zip(engine.logprobs(pairs, grad=False), logprobs):
            assert not one.logprobs.requires_grad
            assert_same_bits(one.logprobs, torch.from_numpy(expected), "values alone")


PAIR = (prompt(5), prompt(3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.logprobs([(prompt(5), [])]), "the completion of texts[0] is empty"),
        (lambda e: e.logprobs([PAIR, ([], prompt(3))]), "the prompt of texts[1]"),
        (lambda e: e.logprobs([(prompt(5), [9999])]), "the completion of texts[0]"),
        (lambda e: e.logprobs([prompt(1)]), "texts[0] has 1 token"),
        (lambda e: e.logprobs(torch.tensor(prompt(5))), "the ids of one text"),
        (lambda e: e.logprobs([prompt(5)], [[True] * 4]), "masks[0] has shape [4]; expected [5]"),
        (lambda e: e.logprobs([prompt(5)], [[True] * 5]), "masks[0] counts the first token"),
        (lambda e: e.logprobs([prompt(5)], [[False] * 5]), "masks[0] counts no token"),
        (lambda e: e.logprobs([prompt(2)], [[0, 2]]), "masks[0] is [0, 2]"),
        (lambda e: e.logprobs([prompt(5)], []), "masks has 0 entries; expected 1"),
        (lambda e: e.logprobs([PAIR], [[True] * 8]), "masks[0] is of a pair"),
        (lambda e: e.logprobs([prompt(5000)]), "the model has positions for 4096"),
        (lambda e: e.logprobs([PAIR], temperature=0), "temperature is 0"),
        (lambda e: e.logprobs([PAIR], top_logprobs=21), "top_logprobs is 21"),
        (lambda e: e.logprobs([PAIR], entropy=1), "entropy is 1"),
        (torch.no_grad()(lambda e: e.logprobs([PAIR])), "gradients are off here"),
        (torch.inference_mode()(lambda e: e.logprobs([PAIR])), "gradients are off here"),
    ],
)
def test_bad_input_is_refused_by_name_and_leaves_the_engine_as_it_was(call, message):
    with make_engine(build("llama")) as engine:
        before = engine.pager.stats()
        with pytest.raises(InvalidArgumentError) as raised:
            call(engine)
        assert message in str(raised.value)
        assert engine.pager.stats() == before
        assert engine.logprobs([]) == []


def test_engines_and_models_that_keep_no_promise_are_refused():
    model = build("llama")
    engine = make_engine(model, exact="reuse")
    with engine, pytest.raises(InvalidArgumentError, match="exact is 'reuse'"):
        engine.logprobs([PAIR])
    with pytest.raises(InvalidArgumentError, match="closed"):
        engine.logprobs([PAIR])
    engine = make_engine(model.requires_grad_(False))
    with engine, pytest.raises(InvalidArgumentError, match="no parameter of the model requires"):
        engine.logprobs([PAIR])


def test_dropout_in_training_mode_is_refused_by_name():
    model = build("llama")
    model.model.layers[1].mlp.register_module("extra", torch.nn.Dropout(0.1).eval())
    with make_engine(model) as engine:
        model.train()
        with pytest.raises(UnsupportedModelError, match=r"layers.1.mlp.extra has a dropout of 0.1"):
            engine.logprobs([PAIR])
        model.eval()
        engine.logprobs([PAIR])


def test_a_model_that_computes_otherwise_in_training_mode_is_refused():
    model = build("llama")
    norm = model.model.norm
    own = type(norm).forward

    def forward(self, x):
        return own(self, x * 1.25 if self.training and self is norm else x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(norm), "forward", forward)
        with make_engine(model) as engine:
            engine.logprobs([PAIR])
            model.train()
            with pytest.raises(UnsupportedModelError, match="other bits in training mode"):
                engine.logprobs([PAIR])
            assert all(module.training for module in model.modules())


def test_a_recorded_forward_is_compared_once_until_more_than_weights_change(monkeypatch):
    model = build("llama")
    compared = []
    own = Runner._untraced
    monkeypatch.setattr(Runner, "_untraced", lambda *given: compared.append(1) or own(*given))
    with make_engine(model) as engine:
        for _ in range(3):
            engine.logprobs([PAIR])
            with torch.no_grad():
                torch._foreach_mul_([*model.parameters()], 0.99)
            engine.weights_changed()
        assert len(compared) == 1
        model.model.norm.variance_epsilon *= 2
        engine.weights_changed()
        engine.logprobs([PAIR])
        assert len(compared) == 2


def test_a_call_without_room_closes_what_it_opened():
    with make_engine(build("llama"), host_bytes=0, pool_tokens=96) as engine:
        with pytest.raises(CapacityError):
            engine.logprobs([(prompt(900), prompt(20))])
        assert not engine.pager.stats()["sequences"]
