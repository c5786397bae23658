"""A model that is changed under an open engine is noticed before anything is kept for it."""

from __future__ import annotations

import threading
import types

import peft
import pytest
import torch
from adapters import add, layers_of, merge, with_adapters
from bits import assert_same_session
from reference_models import COMMON, build, make_engine, prompt, set_checkpoints

import kvpager
from kvpager import DirectoryStore, ModelChangedError
from kvpager._model.watch.contents import ROUND, Contents


def adapted():
    return with_adapters("a", "b")


def plain():
    return build("llama")


class OwnNorm(torch.nn.Module):
    """Code of no library, that reads in any mode what libraries read in training mode alone."""

    gradient_checkpointing = False

    def forward(self, x):
        return x * 2 if self.gradient_checkpointing else x


def with_own_norm():
    model = build("llama")
    model.model.layers[1].input_layernorm = OwnNorm()
    return model


def change_scaling(model):
    layers_of(model)[3].scaling["a"] *= 0.5


def hook(module, arguments, output):
    return output * 1.01


def replace_head(model):
    model.lm_head = torch.nn.Linear(COMMON["hidden_size"], COMMON["vocab_size"], bias=False)


def replace_parameter(model):
    up = model.model.layers[1].mlp.up_proj
    up.weight = torch.nn.Parameter(up.weight.detach() * 1.5)


def replace_data(model):
    model.model.layers[0].self_attn.k_proj.weight.data = torch.randn(128, 256)


def patch_method(model):
    norm = model.model.norm
    norm.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 1.01, norm)


def replace_module(model):
    old = model.model.layers[2].mlp.act_fn
    model.model.layers[2].mlp.act_fn = torch.nn.GELU()
    return old


def synchronise(model):
    """As a step of reinforcement learning leaves bfloat16: one element of a hundred is another."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        chosen = torch.rand(parameter.shape, generator=generator) < 0.01
        parameter.data[chosen] *= 1.01


def transpose(model):
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.t()


CHANGES = {
    "another active adapter": (adapted, lambda m: m.set_adapter("b"), "active_adapter"),
    "adapters disabled": (adapted, lambda m: m.disable_adapters(), "disable_adapters"),
    "adapters merged": (adapted, merge, "merged_adapters|values|in place|lies elsewhere"),
    "another scaling": (adapted, change_scaling, r"scaling\['a'\] is 1.0, and was 2.0"),
    "another adapter added": (
        adapted,
        lambda m: add(m, "c", r=2),
        "was added|active_adapter|missing",
    ),
    "adapter deleted": (adapted, lambda m: m.delete_adapter("b"), "was removed|missing"),
    "hook added": (
        plain,
        lambda m: m.model.layers[1].register_forward_hook(hook),
        r"hook .*hook of model\.layers\.1 was added",
    ),
    "pre-hook added": (
        plain,
        lambda m: m.lm_head.register_forward_pre_hook(lambda module, given: (given[0] * 2,)),
        "of lm_head was added",
    ),
    "head replaced": (plain, replace_head, "module lm_head was replaced"),
    "embeddings resized": (
        plain,
        lambda m: m.resize_token_embeddings(310, mean_resizing=False),
        "vocab_size|embed_tokens|lm_head",
    ),
    "embeddings shrunk": (
        plain,
        lambda m: m.resize_token_embeddings(20, mean_resizing=False),
        "vocab_size|embed_tokens|lm_head",
    ),
    "module replaced": (plain, replace_module, "mlp.act_fn was replaced"),
    "parameter replaced": (plain, replace_parameter, "up_proj.weight was replaced"),
    "method patched": (plain, patch_method, "norm.forward is .*was missing"),
    "data written": (
        plain,
        lambda m: [p.data.mul_(1.01) for p in m.parameters()],
        "values of .* were changed",
    ),
    "data of one tensor written": (
        plain,
        lambda m: m.model.layers[2].mlp.down_proj.weight.data.mul_(1.01),
        "values of model.layers.2.mlp.down_proj.weight were changed",
    ),
    "data of one norm written": (
        plain,
        lambda m: m.model.norm.weight.data.add_(0.01),
        "values of model.norm.weight were changed",
    ),
    "data replaced": (plain, replace_data, "k_proj.weight lies elsewhere"),
    "data transposed": (plain, transpose, "q_proj.weight (has strides|lies elsewhere)"),
    "buffer written": (
        plain,
        lambda m: m.model.rotary_emb.inv_freq.data.mul_(1.5),
        "inv_freq",
    ),
    "weights synchronised": (plain, synchronise, "values of .* were changed"),
    "weights halved": (
        plain,
        lambda m: m.half(),
        r"dtype is torch\.float16, but was torch\.float32",
    ),
    "weights loaded": (
        plain,
        lambda m: m.load_state_dict(build("llama", hidden_act="gelu").state_dict()),
        "changed in place",
    ),
    "configuration changed": (
        plain,
        lambda m: setattr(m.config, "rms_norm_eps", 0.1),
        "rms_norm_eps is 0.1",
    ),
    "epsilon changed": (
        plain,
        lambda m: setattr(m.model.norm, "variance_epsilon", 0.1),
        "norm.variance_epsilon is 0.1",
    ),
    "checkpoints of a module of no library": (
        with_own_norm,
        set_checkpoints,
        "input_layernorm._?gradient_checkpointing",
    ),
    "a layer put into training mode": (
        plain,
        lambda m: m.model.layers[1].train(),
        "layers.1.*training is True",
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_changed_model_is_noticed_before_anything_is_adopted_saved_or_committed(
    kind, tmp_path, closing
):
    make, change, words = CHANGES[kind]
    model = make()
    engine = closing(make_engine(model))
    session = engine.session()
    session.prefill(prompt(40))
    session.save(tmp_path / "before.kvsnap")
    empty = engine.session()
    before = engine.stats()
    change(model)
    for attempt in (
        lambda: empty.prefill(prompt(40)),  # which the pager has
        lambda: engine.restore(tmp_path / "before.kvsnap"),
        lambda: session.save(tmp_path / "after.kvsnap"),
        lambda: session.append([5]),
        lambda: session.generate(2).tokens.tolist(),
        lambda: engine.score([1, 2, 3]),
        lambda: engine.run([prompt(40)], 2),
    ):
        with pytest.raises(ModelChangedError, match=words) as refused:
            attempt()
        assert "engine.weights_changed()" in str(refused.value)
        assert refused.value.what in str(refused.value)
    after = engine.stats()
    for counter in ("prefix_tokens_reused", "rows_committed"):
        assert after.get(counter) == before.get(counter)
    assert session.committed == 40
    assert empty.committed == 0
    assert not (tmp_path / "after.kvsnap").exists()


def checked(watch, times):
    for _ in range(times):
        watch.check_model()


def test_one_element_is_seen_within_a_round_of_forwards(closing):
    model = plain()
    engine = closing(make_engine(model))
    watch = engine.core.runner.unchanged
    watch.check_model()
    model.model.layers[1].mlp.gate_proj.weight.data[77, 5] += 1
    with pytest.raises(ModelChangedError, match=r"layers\.1\.mlp\.gate_proj"):
        checked(watch, ROUND + 1)


@pytest.mark.parametrize("place", [0, 1_234_567, -1])
def test_one_element_among_millions_is_seen_within_a_round_by_reading_in_turns(place):
    weight = torch.zeros(4096, 1024)  # so large that looks at random places miss it
    contents = Contents(None, [("norm", torch.zeros(64)), ("weight", weight)])
    weight.view(-1)[place] += 1
    found = (contents.changed() for _ in range(ROUND + 1))
    assert next(filter(None, found), None) == "weight"


def test_what_is_put_back_is_no_change(closing):
    model = plain()
    engine = closing(make_engine(model))
    session = engine.session()
    session.prefill(prompt(20))
    weight = model.lm_head.weight.data
    kept = weight.clone()
    weight.mul_(2)
    with pytest.raises(ModelChangedError):
        session.append([5])
    weight.copy_(kept)
    handle = model.model.layers[0].register_forward_hook(hook)
    with pytest.raises(ModelChangedError):
        session.append([5])
    handle.remove()
    session.append([5])
    fresh = closing(make_engine(model)).session()
    fresh.prefill([*prompt(20), 5])
    assert_same_session(session, fresh, "put back")


def test_checkpoints_for_gradients_are_no_change_and_make_no_other_model(closing):
    model = adapted()
    engine = closing(make_engine(model))
    session = engine.session()
    session.prefill(prompt(20))
    for enabled in (True, False, True):
        set_checkpoints(model, enabled)  # with a hook that asks for gradients of the embeddings
        session.append([5])
    model.enable_input_require_grads()
    session.append([5])
    other = closing(make_engine(model))
    assert other.core.facts.fingerprint == engine.core.facts.fingerprint


@pytest.mark.parametrize("name", ["__call__", "forward", "_call_impl"])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_method_that_a_class_is_given_is_a_change(name, graphs, closing, monkeypatch):
    model = plain()
    session = closing(closing(make_engine(model, graphs=graphs)).session())
    session.prefill(prompt(20))
    kind = type(model.model.layers[0].mlp)
    monkeypatch.setattr(kind, name, lambda self, *given: given[0], raising=False)
    with pytest.raises(ModelChangedError, match=rf"MLP\.{name} was replaced by"):
        session.append([5])
    monkeypatch.undo()
    session.append([5])


@pytest.mark.parametrize("change", ["data written", "hook added", "head replaced"])
def test_a_change_by_another_thread_while_a_forward_runs_is_not_committed(change, closing):
    model = plain()
    inside, changed = threading.Event(), threading.Event()
    waiting = []

    @kvpager.only_looks
    def wait(module, arguments):
        if waiting:
            inside.set()
            assert changed.wait(60)

    model.model.layers[1].register_forward_pre_hook(wait)
    engine = closing(make_engine(model))
    session = engine.session()
    session.prefill(prompt(20))

    def other():
        assert inside.wait(60)
        CHANGES[change][1](model)
        changed.set()

    thread = threading.Thread(target=other)
    thread.start()
    waiting.append(True)
    with pytest.raises(ModelChangedError):
        session.append([5])
    thread.join()
    assert session.committed == 20


def test_a_changed_model_ends_no_request_of_a_scheduler(closing):
    model = plain()
    engine = closing(make_engine(model))
    with engine.scheduler() as scheduler:
        request = scheduler.submit(prompt(40), 4)
        scheduler.step()
        kept = model.lm_head.weight.data.clone()
        model.lm_head.weight.data.mul_(2)
        with pytest.raises(ModelChangedError):
            scheduler.step()
        assert request.completion is None
        model.lm_head.weight.data.copy_(kept)
        while not scheduler.idle:
            scheduler.step()
    assert len(request.completion.tokens) == 4


def test_what_changes_nothing_is_let_pass(closing):
    model = plain()
    engine = closing(make_engine(model))
    session = engine.session()
    seen = []
    model.model.layers[0].register_forward_hook(
        kvpager.only_looks(lambda module, given, output: seen.append(1))
    )
    model.config.use_cache = False
    model.generation_config.max_new_tokens = 7
    model.some_note = "mine"
    model.model.norm.variance_epsilon = float(str(model.model.norm.variance_epsilon))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.grad = torch.zeros_like(parameter)
    second = closing(make_engine(model))
    session.prefill(prompt(20))
    assert seen
    other = second.session()
    other.prefill(prompt(20))
    assert_same_session(session, other, "two engines")


def test_adapters_have_fingerprints_of_their_own_that_every_process_gives(closing):
    model = adapted()
    found = {}
    for state in ("a", "b", "none", "scaled", "hooked"):
        model.enable_adapters() if state != "none" else model.disable_adapters()
        model.set_adapter("b" if state == "b" else "a")
        if state == "none":
            model.disable_adapters()
        scaling = layers_of(model)[0].scaling
        scaling["a"] = 3.0 if state == "scaled" else 2.0
        handle = model.model.norm.register_forward_hook(hook) if state == "hooked" else None
        found[state] = make_and_close(model)
        if handle is not None:
            handle.remove()
    names = list(found)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            for field in ("additions", "behaviour"):
                assert found[one][field] != found[other][field], (one, other, field)
        again = {**found[one]}
        assert again["weights"] == found["a"]["weights"]
    same = adapted()
    assert make_and_close(same) == found["a"]


def make_and_close(model, **options):
    with make_engine(model, **options) as engine:
        return dict(engine.fingerprint)


def test_a_plain_model_has_no_additions_and_one_behaviour_whatever_the_pool_and_m(closing):
    model = plain()
    one = make_and_close(model)
    assert one["additions"] == ""
    assert make_and_close(model, rows=64, pool_tokens=512)["behaviour"] == one["behaviour"]
    assert make_and_close(plain())["behaviour"] == one["behaviour"]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
def test_a_model_that_peft_has_wrapped_is_the_model_inside(closing):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    wrapped = peft.get_peft_model(build("llama"), config).eval()
    ids = prompt(40)
    texts = []
    for model in (wrapped, wrapped.get_base_model()):
        session = closing(make_engine(model)).session()
        session.prefill(ids)
        texts.append(session.generate(8, logprobs=True))
    assert texts[0].tokens.tolist() == texts[1].tokens.tolist()
    assert texts[0].logprobs.tobytes() == texts[1].logprobs.tobytes()
    engine = closing(make_engine(wrapped))
    with wrapped.disable_adapter(), pytest.raises(ModelChangedError):
        engine.score(ids)


def test_a_session_of_one_adapter_is_refused_under_another(tmp_path, closing):
    model = adapted()
    store = DirectoryStore(tmp_path)
    with make_engine(model) as engine, engine.session() as session:
        session.prefill(prompt(40))
        session.save("a", store=store)
    model.set_adapter("b")
    engine = closing(make_engine(model, store=store))
    for on_mismatch in ("refuse", "approximate"):
        with pytest.raises(kvpager.FingerprintMismatchError) as refused:
            engine.restore("a", store=store, on_mismatch=on_mismatch)
        assert refused.value.field in ("additions", "behaviour")
    session = engine.session()
    session.prefill(prompt(40))
    assert session.restored_tokens == 0
    model.set_adapter("a")
    engine.close()
    assert closing(make_engine(model)).restore("a", store=store).length == 40


def test_a_hook_with_the_same_name_and_another_effect_is_seen_by_what_it_does(closing):
    found = []
    for factor in (1.01, 1.02):
        model = plain()

        def scale(module, arguments, output, factor=factor):
            return output * factor

        model.model.norm.register_forward_hook(scale)
        found.append(make_and_close(model))
    assert found[0]["additions"] != found[1]["additions"]
    assert found[0]["behaviour"] != found[1]["behaviour"]
