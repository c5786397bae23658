"""Row counts below M are used only where they are proven, part by part, to give the bits of M."""

from __future__ import annotations

import functools
import logging
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import transformers
from bits import assert_same_bits
from reference_models import DTYPES, build, make_engine, prompt

from kvpager import Engine, InvalidArgumentError, UnsupportedModelError
from kvpager._model.proof.cancelling import cancelling_product, like
from kvpager._model.proof.rowwise import RowwiseProbe, Sample
from kvpager._model.proof.shapes import probe_shapes
from kvpager._model.seam.causal_lm import Head
from kvpager._model.seam.rows import RowCounts, counts_below, same_bits, spread
from kvpager._model.watch.looks import only_looks
from kvpager.plan import memory, shape_of
from kvpager.plan.memory import gathered_bytes
from kvpager.plan.recommendation import rows_for

COUNTS = (1, 2, 4, 8, 16, 32)


class Backwards(torch.nn.Linear):
    """Adds products up in the opposite order where a test says so: the same to fifteen digits."""

    def elsewhere(self, rows):
        raise NotImplementedError

    def forward(self, x):
        if self.elsewhere(x.shape[-2]):
            return torch.nn.functional.linear(x.flip(-1), self.weight.flip(1), self.bias)
        return super().forward(x)


def backwards(elsewhere):
    """A Linear that adds up backwards in forwards whose row count `elsewhere` accepts."""
    return type("BackwardsLinear", (Backwards,), {"elsewhere": lambda self, rows: elsewhere(rows)})


def put(model, name, kind):
    """Makes the module `name` of a model one of class `kind`, with the weights it has."""
    model.get_submodule(name).__class__ = kind
    return model


def started(model, **options):
    """The row counts an engine starts with, and what it dropped on the way."""
    with make_engine(model, **{"linear": "torch", **options}) as engine:
        return engine.row_counts, {(drop.rows, drop.where) for drop in engine.row_proof.dropped}


@functools.cache
def provable(architecture="llama", dtype="bfloat16", candidates=(1, 2, 4, 8, 16)):
    """Of some counts below 32 those that this processor gives the bits of 32 rows with."""

    def alone(count):
        try:
            return bool(started(build(architecture, dtype), small_rows=(count,)))
        except UnsupportedModelError:
            return False

    return tuple(count for count in candidates if alone(count))


@contextmanager
def counted(model):
    """The row counts of all forwards of a model's decoder."""
    seen = set()

    def note(module, args, kwargs):
        seen.add(kwargs["input_ids"].shape[1])

    handle = model.get_decoder().register_forward_pre_hook(only_looks(note), with_kwargs=True)
    yield seen
    handle.remove()


def test_the_smallest_count_that_holds_the_rows_is_taken():
    counts = RowCounts(64, (4, 16), (4, 16, 64))
    assert counts.ladder == (4, 16, 64)
    assert [counts.fit(used) for used in (0, 1, 4, 5, 16, 17, 64)] == [4, 4, 4, 16, 16, 64, 64]
    with pytest.raises(ValueError, match="65 rows"):
        counts.fit(65)
    assert counts.describe() == "4+16+64; head 4+16+64"
    assert RowCounts(48).describe() == "48; head 16"


@pytest.mark.parametrize(
    ("proven", "rows", "expected"),
    [
        ((1, 2, 4, 8, 16, 32, 64, 128), 256, (1, 4, 16, 64, 128)),
        ((4, 8, 16, 32, 64, 128), 256, (4, 16, 64, 128)),
        ((2, 4, 8, 16, 32), 64, (2, 8, 32)),
        ((1, 2), 4, (1, 2)),
        ((), 64, ()),
    ],
)
def test_a_few_counts_of_those_proven_are_used(proven, rows, expected):
    assert set(proven) <= set(counts_below(rows))
    assert spread(proven, rows) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 128), (96, 40), (512, 256), (2048, 64)])
def test_the_classes_of_a_product_are_those_that_trying_everything_finds(inputs, outputs, dtype):
    """Every block of every count against every other, on numbers made in another way."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(outputs, inputs, generator=generator).to(DTYPES[dtype])
    # The last product all but undoes the others, and what it leaves is mostly rounding.
    rows = torch.randn(32, inputs, generator=generator).to(DTYPES[dtype])
    weight[:, -1] = -(weight[:, :-1].double() @ rows[0, :-1].double()).to(weight.dtype)
    rows = rows[:1].expand(32, -1).clone()
    rows[:, -1] = 1
    with torch.inference_mode():
        tables = {
            count: torch.cat(
                [
                    torch.nn.functional.linear(rows[at : at + count].clone()[None], weight)[0]
                    for at in range(0, 32, count)
                ]
            )
            for count in COUNTS
        }
        made, given = cancelling_product(weight, 32, generator)
        sample = Sample(lambda x: [torch.nn.functional.linear(x[0][None], made)[0]], [given])
        classes = RowwiseProbe([sample], 32).classes(COUNTS)
    expected = []
    for count, table in tables.items():
        for group in expected:
            if same_bits(tables[group[0]], table):
                group.append(count)
                break
        else:
            expected.append([count])
    assert classes == tuple(map(tuple, expected))


def of_products_of(weight, rows):
    """Classes of counts of a plain product, as this processor groups them."""
    sample = Sample(lambda x: [torch.nn.functional.linear(x[0], weight)], [rows])
    return RowwiseProbe([sample], 16).classes((2, 4, 8, 16))


def apart(count, classes):
    """These classes with one count in a class of its own."""
    others = [tuple(c for c in members if c != count) for members in classes]
    return tuple(sorted([*filter(None, others), (count,)]))


def test_another_order_that_a_random_bfloat16_probe_misses_is_found_where_sums_cancel():
    generator = torch.Generator().manual_seed(1)
    layer = backwards(lambda rows: rows == 4)(256, 32, bias=False, dtype=torch.bfloat16)
    random = torch.randn(32, 256, generator=generator).bfloat16()
    with torch.inference_mode():
        layer.weight.copy_(torch.randn(32, 256, generator=generator))
        plain = RowwiseProbe([Sample(lambda x: [layer(x[0])], [random])], 16)
        assert not plain.differs(4)  # by luck: nothing is different after the last rounding
        made, given = cancelling_product(layer.weight, 32, generator)
        layer.weight.copy_(made)
        cancelling = RowwiseProbe([Sample(lambda x: [layer(x[0])], [given])], 16)
        assert cancelling.differs(4)
        assert cancelling.classes((2, 4, 8, 16)) == apart(4, of_products_of(made, given))
        other = layer(given[:4])
        share = (other != layer(given[:8])[:4]).float().mean()
    # Torch's plain loops, without a library's kernels for bfloat16, have another order: 0.16.
    in_library = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert share > (0.8 if in_library else 0.1)


@pytest.mark.parametrize("where", [0, 15, 31])
def test_other_bits_that_show_in_one_block_only_are_found(where):
    def evaluate(rows):
        changed = len(rows[0]) == 4 and bool((rows[0] == where).any())
        return [rows[0] + changed]

    probe = RowwiseProbe([Sample(evaluate, [torch.arange(32.0)])], 32)
    assert probe.independent()
    assert probe.differs(4)
    assert not probe.differs(8)
    assert probe.classes((4, 8, 16)) == ((4,), (8, 16))


def test_sums_that_cancel_are_zero_but_for_rounding_and_keep_the_place_of_the_weight():
    generator = torch.Generator().manual_seed(1)
    buffer = torch.empty(40 * 300 + 8)
    for weight, summed in (
        (torch.empty(128, 256), 1),
        (torch.empty(256, 128), 0),
        (torch.empty(33, 47), 1),  # of an odd sum one term is left out
        (torch.empty(256, 128).t(), 1),
        (buffer[3 : 3 + 40 * 300].view(40, 300), 1),
    ):
        made, given = cancelling_product(weight, 8, generator, summed=summed)
        exact = given.double() @ (made.double().t() if summed == 1 else made.double())
        products = (
            given.double().abs() @ (made.double().t() if summed == 1 else made.double()).abs()
        )
        assert exact.abs().max() < 1e-12 * products.max()
        assert (made.shape, made.stride()) == (weight.shape, weight.stride())
        assert (made.data_ptr() - weight.data_ptr()) % 64 == 0
        assert like(weight).data_ptr() != weight.data_ptr()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_count_an_engine_may_use_gives_the_bits_of_m(dtype):
    """Rows of the whole model in each proven count, after the engine chose it."""
    model = build("qwen3", dtype)
    with make_engine(model, rows=64, pool_tokens=128) as engine:
        counts = engine.row_counts
        ids = prompt(64)
        sessions = {}
        for count in counts.ladder:
            session = engine.adopt(engine.pager.sequence(salt=f"{count} rows"))
            for start in range(0, 64, count):
                session.append(ids[start : start + count])
            sessions[count] = session
        whole = sessions[64]
        assert len(counts.ladder) > 2 or dtype == "bfloat16"  # torch may have no other there
        for count, session in sessions.items():
            for layer in range(engine.layout.layers):
                ours, theirs = (s.sequence.read_kv(layer, 0, 64) for s in (session, whole))
                for name, a, b in zip(("keys", "values"), ours, theirs):
                    assert_same_bits(a, b, f"{count} rows: {name} of layer {layer}")
            assert_same_bits(session.logits, whole.logits, f"{count} rows: logits")


def test_only_counts_of_the_ladder_are_run():
    model = put(
        build("llama", "bfloat16"), "model.layers.1.mlp.up_proj", backwards({4, 1}.__contains__)
    )
    ladder = (*spread([count for count in provable() if count not in (1, 4)], 32), 32)
    with make_engine(model) as engine, counted(model) as seen:
        assert engine.row_counts.ladder == ladder
        assert len(ladder) > 2
        first, second = engine.session(), engine.session()
        engine.prefill_many([(first, prompt(45)), (second, prompt(3, seed=1))])
        first.generate(3, eos=None).tokens.tolist()
        list(engine.generate_many([first, second], 3, eos=None))
        engine.score(prompt(40))
    assert seen <= {*ladder}
    assert {ladder[0], 32} <= seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("count", [1, 4, 16])
def test_one_product_with_other_bits_at_one_count_drops_this_count_and_is_named(count, dtype):
    name = "model.layers.1.self_attn.o_proj"
    model = put(build("llama", dtype), name, backwards(lambda rows: rows == count))
    counts, dropped = started(model)
    assert count not in counts.smaller
    whole, _ = started(build("llama", dtype))
    assert counts.smaller or set(whole.smaller) <= {count}
    if count in whole.smaller:  # others are not in M's class on this processor to begin with
        assert any(rows == count and name in where for rows, where in dropped)


def test_what_takes_a_dropped_counts_place_is_tried_on_the_parts_before():
    """k_proj is tried before down_proj; the second count is asked for when the first is out."""
    first, second, *others = provable()
    assert spread([first, second], 32) == (first,)
    model = build("llama", "bfloat16")
    put(model, "model.layers.1.self_attn.k_proj", backwards(lambda rows: rows == second))
    put(model, "model.layers.1.mlp.down_proj", backwards(lambda rows: rows == first))
    counts, dropped = started(model)
    assert counts.smaller == spread(others, 32)
    assert {(rows, where.split()[0].split(".")[-1]) for rows, where in dropped} >= {
        (first, "down_proj"),
        (second, "k_proj"),
    }


def test_a_product_with_other_bits_at_every_smaller_count_leaves_m_alone():
    model = put(build("llama"), "model.layers.0.mlp.gate_proj", backwards(lambda rows: rows < 32))
    counts, dropped = started(model)
    assert counts.ladder == (32,)
    assert {rows for rows, _ in dropped} >= {1, 2, 4, 8, 16}


def test_an_activation_whose_bits_follow_the_row_index_at_one_count_drops_it():
    count = provable()[0]
    model = build("llama", "bfloat16")

    class Uneven(torch.nn.Module):
        def forward(self, x):
            y = torch.nn.functional.silu(x)
            if x.shape[1] == count:
                y[:, -1, -1] = torch.nextafter(y[:, -1, -1], torch.tensor(torch.inf).bfloat16())
            return y

    for layer in model.model.layers:
        layer.mlp.act_fn = Uneven()
    counts, dropped = started(model)
    assert count not in counts.smaller
    assert any(rows == count and "Uneven" in where for rows, where in dropped)


def test_a_step_between_modules_with_other_bits_at_one_count_drops_it():
    count = provable()[0]
    model = build("llama", "bfloat16")
    layer = model.model.layers[1]
    original = layer.forward

    def forward(hidden, *args, **kwargs):
        out = original(hidden, *args, **kwargs)
        return out * torch.full((), 1 + 2**-7 if hidden.shape[1] == count else 1.0)

    layer.forward = forward
    counts, dropped = started(model)
    assert count not in counts.smaller
    assert (count, "the queries of layer 2 of LlamaForCausalLM") in dropped


def test_a_count_that_the_model_does_not_run_with_is_dropped():
    model = build("llama", "bfloat16")

    class Narrow(torch.nn.Module):
        def forward(self, x):
            pairs = 2 if x.shape[1] == 1 else 1  # one row makes no pair
            return torch.nn.functional.silu(x.reshape(1, -1, pairs, x.shape[-1])).reshape(x.shape)

    for layer in model.model.layers:
        layer.mlp.act_fn = Narrow()
    counts, dropped = started(model)
    assert 1 not in counts.smaller
    if 1 in provable():  # else another part has dropped it before
        assert any(rows == 1 and "fails with it" in where for rows, where in dropped)


def moe(dtype="float32"):
    model = build("qwen3_moe", dtype)
    model.set_experts_implementation("batched_mm")
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_that_depend_on_neighbours_are_refused_whatever_they_call_themselves(dtype):
    model = moe(dtype)
    for layer in model.model.layers:
        experts = layer.mlp.experts
        eager = type(experts).forward.__wrapped__
        experts.__class__ = type("Experts", (type(experts),), {"forward": eager})
    with pytest.raises(UnsupportedModelError, match=r"mlp\.experts \(Experts 256 -> 256, \w+\)"):
        make_engine(model)


@pytest.mark.parametrize("inputs", [256, 128], ids=["up", "down"])
def test_experts_one_of_whose_products_depends_on_the_count_lose_the_count(inputs, monkeypatch):
    from transformers.integrations import moe as library

    original = library._batched_linear

    def linear(x, weight, bias=None, is_transposed=False):
        if x.dtype == torch.bfloat16 and x.shape == (2 * 16, inputs):  # 16 rows, two experts each
            x, weight = x.flip(1), weight.flip(2)
        return original(x, weight, bias, is_transposed)

    monkeypatch.setattr(library, "_batched_linear", linear)
    counts, dropped = started(moe("bfloat16"))
    assert 16 not in counts.smaller
    assert any(rows == 16 and "Experts" in where for rows, where in dropped)


def test_experts_that_are_called_in_an_unknown_way_are_refused():
    model = moe()
    kind = type(model.model.layers[0].mlp.experts)

    class Unlike(kind):
        def forward(self, states, index, share):
            return kind.forward(self, states, index.long(), share)

    def convert(module, args):
        states, index, share = args
        return states, index.float(), share

    for layer in model.model.layers:
        layer.mlp.experts.__class__ = Unlike
        layer.mlp.experts.register_forward_pre_hook(convert)
    with pytest.raises(UnsupportedModelError, match="not called with hidden states"):
        make_engine(model)


def test_experts_that_are_not_matrices_of_one_module_are_refused():
    model = build("llama")
    model.config.num_experts = 4
    model.model.layers[0].mlp.experts = torch.nn.ModuleList([torch.nn.Linear(256, 256)])
    model.config._experts_implementation_internal = "batched_mm"
    with pytest.raises(UnsupportedModelError, match="not held together"):
        make_engine(model)


def test_without_exactness_nothing_is_proven_and_experts_may_run_as_they_like():
    model = build("qwen3_moe")
    model.set_experts_implementation("eager")
    with make_engine(model, exact=False) as engine:
        assert engine.row_counts == RowCounts(32)
        assert engine.row_proof is None
        engine.session().prefill(prompt(40))
    with pytest.raises(UnsupportedModelError, match="batched_mm"):
        make_engine(model, linear="torch")


@pytest.mark.parametrize("count", [4, 64])
def test_a_head_has_row_counts_of_its_own(count):
    sound, dropped_of_sound = started(build("llama", "bfloat16"))
    model = put(build("llama", "bfloat16"), "lm_head", backwards(lambda rows: rows == count))
    counts, dropped = started(model)
    assert count in sound.head
    assert counts.head == tuple(other for other in sound.head if other != count)
    assert counts.smaller == sound.smaller
    added = {(rows, where.split()[0]) for rows, where in dropped - dropped_of_sound}
    assert (count, "lm_head") in added
    assert {where for _, where in added} == {"lm_head"}


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "cohere"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_have_the_same_bits_however_many_are_wanted(architecture, dtype):
    model = build(architecture, dtype)
    with make_engine(model, linear="torch") as engine:
        head = Head(model, engine.row_counts.head)
    assert len(engine.row_counts.head) > 1
    hidden = torch.randn(96, 256, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    with torch.inference_mode():
        base = Head(model)(hidden, range(96))
        for wanted in (1, 3, 4, 5, 16, 17, 40, 64, 96):
            rows = torch.randperm(96, generator=torch.Generator().manual_seed(wanted))[:wanted]
            assert_same_bits(head(hidden, rows.tolist()), base[rows], f"{wanted} rows")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_the_first_rows_are_those_of_rows_that_were_gathered(dtype):
    model = build("llama", dtype)
    with make_engine(model) as engine:
        head = Head(model, engine.row_counts.head)
    hidden = torch.randn(96, 256, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    crooked = torch.empty(96 * 256 + 1, dtype=hidden.dtype)[1:].view(96, 256).copy_(hidden)
    with torch.inference_mode():
        for wanted in (1, 3, 4, 16, 17, 40, 64, 96):
            gathered = head(hidden, range(wanted - 1, -1, -1)).flip(0)
            assert_same_bits(head(hidden, range(wanted)), gathered, f"{wanted} rows")
            assert_same_bits(head(crooked, range(wanted)), gathered, f"{wanted} crooked rows")
            few = hidden[:wanted]
            assert_same_bits(head(few, range(wanted)), gathered, f"all of {wanted} rows")


def test_a_head_whose_rows_depend_on_their_index_is_refused():
    model = build("llama")

    class Tilted(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return torch.cat([y[:, :-1], torch.nextafter(y[:, -1:], y[:, -1:] + 1)], dim=1)

    with pytest.raises(UnsupportedModelError, match=r"index in the forward in lm_head \(Tilted"):
        make_engine(put(model, "lm_head", Tilted))


def test_counts_given_by_name_are_used_if_they_are_proven():
    some = provable(candidates=(3, 5, 8, 12, 24))
    assert len(some) > 1
    counts, _ = started(build("llama", "bfloat16"), small_rows=some)
    assert counts.ladder == (*some, 32)


def test_counts_given_by_name_are_refused_with_what_has_other_bits():
    one, other, *_ = provable()
    wrong = backwards(lambda rows: rows == one)
    model = put(build("llama", "bfloat16"), "model.layers.2.mlp.down_proj", wrong)
    with pytest.raises(UnsupportedModelError) as refused:
        make_engine(model, small_rows=(one, other))
    for word in (
        f"small_rows is ({one}, {other})",
        f"{one} rows",
        "layers.2.mlp.down_proj",
        "512 -> 256",
        f"leave {one}",
    ):
        assert word in str(refused.value)
    assert model.config._attn_implementation == "sdpa"
    assert started(model, small_rows=(other,))[0].smaller == (other,)


def test_fixed_rows_are_m_and_sixteen_for_the_head():
    counts, dropped = started(build("llama", "bfloat16"), small_rows="fixed")
    assert counts == RowCounts(32, (), (16,))
    assert not dropped


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_by_default_m_is_256_where_a_small_count_is_of_its_class(dtype):
    model = build("llama", dtype)
    with Engine(model, pool_tokens=2048, host_bytes=0) as engine:
        assert engine.rows == 256
        assert engine.row_counts.ladder[0] <= 16
    with Engine(model, pool_tokens=2048, host_bytes=0, small_rows="fixed") as engine:
        assert engine.row_counts.ladder == (64,)
    with Engine(model, pool_tokens=512, host_bytes=0) as engine:
        assert engine.rows == 64  # 256 rows would take most of such a pool


def test_by_default_m_is_64_where_no_small_count_is_of_the_class_of_256(caplog):
    model = put(build("llama"), "model.layers.0.mlp.up_proj", backwards(lambda rows: rows > 100))
    with caplog.at_level(logging.INFO, "kvpager"), Engine(model, pool_tokens=2048) as engine:
        assert engine.rows == 64
        assert engine.row_counts.ladder[0] < 64
    assert "not 256 rows per forward" in caplog.text
    assert f"forwards of {engine.row_counts.describe()} rows" in caplog.text


def test_by_default_a_model_that_256_rows_are_too_many_for_has_64():
    model = build("llama")

    class Uneven(torch.nn.Module):
        def forward(self, x):
            y = torch.nn.functional.silu(x)
            if x.shape[1] == 256:
                y[:, -1] *= 2
            return y

    model.model.layers[0].mlp.act_fn = Uneven()
    with Engine(model, pool_tokens=2048) as engine:
        assert engine.rows == 64
    with pytest.raises(UnsupportedModelError, match=r"act_fn \(Uneven.*256 rows"):
        make_engine(model, rows=256, pool_tokens=2048)


@pytest.mark.parametrize("pool", [2048, 4096, "auto"])
def test_by_default_models_with_experts_have_the_rows_that_a_plan_gives_them(pool, monkeypatch):
    model = moe()
    shape = replace(shape_of(model), gathers_experts=True)
    for room, rows in ((gathered_bytes(shape, 255), 64), (gathered_bytes(shape, 256), 256)):
        monkeypatch.setattr(memory, "_GATHERED_ANYWAY", room)
        assert rows_for(shape, on_gpu=False) == rows
        with Engine(model, pool_tokens=pool, linear="torch") as engine:
            assert engine.rows == rows
    asked = {"pool_tokens": pool, "rows": 32, "linear": "torch"}  # and not lowered
    with Engine(model, **asked) as engine:
        assert engine.rows == 32


def test_the_same_model_has_the_same_row_counts_every_time():
    model = build("qwen3")
    fingerprints = []
    for _ in range(2):
        with make_engine(model) as engine:
            fingerprints.append(dict(engine.fingerprint))
            assert engine.fingerprint["rows"] == engine.row_counts.ladder[0]
            assert engine.fingerprint["head_rows"] == engine.row_counts.head[0]
    assert fingerprints[0] == fingerprints[1]


def test_a_start_leaves_weights_and_random_numbers_alone():
    """Another engine of the same model may be running meanwhile."""
    model = moe()
    before = {name: (p, p.data_ptr(), p._version) for name, p in model.named_parameters()}
    random = torch.get_rng_state()
    seen = []
    weight = model.model.layers[0].self_attn.q_proj.weight

    def look(module, args, kwargs):
        seen.append(model.model.layers[0].self_attn.q_proj.weight is weight)

    handles = [
        module.register_forward_pre_hook(look, with_kwargs=True) for module in model.modules()
    ]
    make_engine(model).close()
    for handle in handles:
        handle.remove()
    assert seen
    assert all(seen)
    assert torch.equal(torch.get_rng_state(), random)
    assert before == {name: (p, p.data_ptr(), p._version) for name, p in model.named_parameters()}


@contextmanager
def strides_given():
    """Strides of what modules without children are given, by their class and its shape."""
    seen = {}

    def note(module, args, output):
        if not any(module.children()) and args:
            seen.setdefault((type(module), args[0].shape), set()).add(args[0].stride())

    handle = torch.nn.modules.module.register_module_forward_hook(only_looks(note))
    yield seen
    handle.remove()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_are_tried_on_rows_that_lie_in_memory_as_those_of_a_forward_do(dtype):
    """Even the stride of a dimension of one element decides which kernel a library takes."""
    model = build("qwen3", dtype)
    with strides_given() as at_start:
        engine = make_engine(model)
    with engine, strides_given() as in_forwards:
        for count in engine.row_counts.ladder:
            engine.session().append(prompt(count, seed=count))
    common = at_start.keys() & in_forwards.keys()
    assert (torch.nn.Linear, (1, engine.row_counts.ladder[0], 256)) in common
    assert {kind.__name__ for kind, _ in common} >= {"Linear", "Qwen3RMSNorm", "SiLUActivation"}
    assert {key: at_start[key] for key in common} == {key: in_forwards[key] for key in common}


def report(reports, name):
    return next(report for report in reports if name in report.modules)


def test_a_report_tells_of_every_part_what_its_bits_depend_on():
    model = build("llama")
    put(model, "model.layers.1.mlp.up_proj", backwards(lambda rows: rows == 8))

    class Mixing(torch.nn.Module):
        def forward(self, x):
            return x - x.mean(dim=1, keepdim=True)

    class Tilted(torch.nn.Module):
        def forward(self, x):
            return x * torch.arange(1, x.shape[1] + 1)[:, None]

    model.model.layers[0].post_attention_layernorm = Mixing()
    model.model.layers[1].mlp.act_fn = Tilted()
    reports = probe_shapes(model, 32)
    assert model.config._attn_implementation == "sdpa"
    product = report(reports, "model.layers.1.mlp.up_proj")
    assert (product.kind, product.modules) == ("BackwardsLinear", ("model.layers.1.mlp.up_proj",))
    assert (product.in_features, product.out_features, product.dtype) == (256, 512, "float32")
    assert (8,) in product.classes
    assert not product.row_dependent
    assert not product.neighbour_dependent
    plain = report(reports, "model.layers.0.mlp.up_proj")
    assert "model.layers.2.mlp.gate_proj" in plain.modules
    assert any({16, 32, 256} <= set(group) for group in plain.classes)
    assert plain.thread_dependent is None
    assert plain.to_json()["classes"] == plain.classes
    assert report(reports, "model.layers.0.post_attention_layernorm").neighbour_dependent
    tilted = report(reports, "model.layers.1.mlp.act_fn")
    assert tilted.row_dependent
    assert not tilted.neighbour_dependent
    assert reports[-1].modules == ("lm_head",)
    assert sum(reports[-1].classes, ()) == (1, 4, 16, 64)


def test_a_report_tells_whether_threads_matter_and_sets_their_number_back():
    model = build("llama")
    number = torch.get_num_threads()

    class Threaded(torch.nn.Linear):
        def forward(self, x):
            if torch.get_num_threads() == 3:
                return torch.nn.functional.linear(x.flip(-1), self.weight.flip(1))
            return super().forward(x)

    put(model, "model.layers.1.mlp.up_proj", Threaded)
    reports = probe_shapes(model, 32, thread_counts=(number, 3))
    assert torch.get_num_threads() == number
    assert report(reports, "model.layers.1.mlp.up_proj").thread_dependent is True
    assert report(reports, "model.layers.1.input_layernorm").thread_dependent is False


def test_experts_are_reported_in_their_dtype_and_in_float32():
    reports = [r for r in probe_shapes(moe("bfloat16"), 16) if "Experts" in r.kind]
    assert [r.dtype for r in reports] == ["bfloat16", "float32"]
    for found in reports:
        assert len(found.modules) == 3
        assert not found.neighbour_dependent
        assert sum(found.classes, ()) == (1, 2, 4, 8, 16)


def test_row_counts_given_by_name_must_be_below_m():
    with pytest.raises(InvalidArgumentError, match=r"small_rows is \(4, 32\).*below rows \(32\)"):
        make_engine(build("llama"), small_rows=(4, 32))


def test_a_conv1d_is_a_product_like_any_other():
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=2, n_positions=512, vocab_size=300, n_inner=96
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    reports = {r.kind: r for r in probe_shapes(model, 16) if r.kind == "Conv1D"}
    assert reports["Conv1D"].classes[-1][-1] == 256
