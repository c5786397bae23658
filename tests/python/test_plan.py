"""Planning on paper: shapes read from configurations, budgets kept, refusals that say how much."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plan_shapes import LLAMA_8B, QWEN3_MOE_30B, write_config
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from kvpager import Dense, Engine, Layout, Pager, PagerConfig, TopK
from kvpager.errors import CapacityError, InvalidArgumentError, UnsupportedModelError
from kvpager.plan import (
    DEVICES,
    Budget,
    KvShape,
    ModelShape,
    Products,
    Run,
    Workload,
    costs,
    device_named,
    pager_memory,
    read_shape,
    recommend,
)
from kvpager.plan.memory import (
    gathered_bytes,
    staging_bytes,
    summary_slots,
    working_bytes,
)
from kvpager.plan.result import to_json
from kvpager.words import byte_size

GIB = 1 << 30
EIGHT_B = ModelShape(
    name="LlamaForCausalLM",
    dtype="bfloat16",
    layers=32,
    hidden=4096,
    intermediate=14336,
    q_heads=32,
    kv_heads=8,
    k_dim=128,
    v_dim=128,
    vocab=128256,
    max_positions=131072,
    layer_parameters=6_979_588_096,
    embedding_parameters=525_336_576,
    head_parameters=525_336_576,
    tied=False,
)
MIXTURE = dataclasses.replace(
    EIGHT_B,
    name="Qwen3MoeForCausalLM",
    layers=48,
    hidden=2048,
    intermediate=6144,
    kv_heads=4,
    layer_parameters=918_763_520,
    experts=128,
    experts_per_token=8,
    expert_layers=48,
    expert_parameters=4_718_592,
)
SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}

contexts = st.integers(0, 17).map(lambda n: 1 << n) | st.integers(1, 131072)
session_counts = st.integers(1, 16)
shapes = st.sampled_from([EIGHT_B, MIXTURE, EIGHT_B.replace_dtype("float32")])
devices = st.sampled_from(["rtx4090", "h100"])
long_contexts = st.integers(8192, 131072)  # whose K/V outweigh everything that is fixed
shares = st.floats(0, 1.1)  # of what all K/V would take
host_shares = st.floats(0.7, 2)


def memory_for(shape, work, share):
    """Device memory with room for the weights and a share of all K/V, summaries and all."""
    kv = KvShape.of(shape, 64, "auto", "bits2")
    chunks = work.sessions * kv.chunks(work.context) + 6
    needed = shape.weight_bytes + working_bytes(shape, 256) + chunks * kv.summary_bytes
    return int((needed + share * chunks * kv.chunk_bytes) * 16 / 15) + (420 << 20)


def host_for(shape, work, share):
    kv = KvShape.of(shape, 64, "auto", "bits2")
    return int(share * work.sessions * kv.chunks(work.context) * kv.chunk_bytes) + (300 << 20)


def plan_or_none(*arguments, **options):
    try:
        return recommend(*arguments, **options)
    except CapacityError:
        return None


class TestShape:
    @pytest.mark.parametrize(
        "config",
        [
            LlamaConfig(**SMALL),
            LlamaConfig(**SMALL, tie_word_embeddings=True, attention_bias=True),
            Qwen2Config(**SMALL),
            Qwen3Config(**SMALL, tie_word_embeddings=True),
            MistralConfig(**SMALL, sliding_window=32),
            SmolLM3Config(**SMALL, pad_token_id=0),
            Qwen3MoeConfig(**SMALL, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2),
        ],
        ids=lambda config: config.model_type,
    )
    def test_what_is_counted_is_what_transformers_loads(self, config, tmp_path):
        config.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        shape = read_shape(tmp_path)
        assert shape.parameters == model.num_parameters()
        assert shape.weight_bytes == sum(p.numel() * 4 for p in model.parameters())
        assert (shape.layers, shape.kv_heads, shape.k_dim) == (2, 2, 16)

    def test_experts_are_counted_apart(self, tmp_path):
        shape = read_shape(write_config(tmp_path, QWEN3_MOE_30B))
        assert (shape.experts, shape.experts_per_token, shape.expert_layers) == (128, 8, 48)
        assert shape.expert_parameters == 3 * 2048 * 768
        assert 30.4e9 < shape.parameters < 30.6e9

    def test_sliding_windows_are_known_by_layer(self, tmp_path):
        values = {**LLAMA_8B, "model_type": "mistral", "num_hidden_layers": 2}
        shape = read_shape(write_config(tmp_path, values, sliding_window=512))
        assert shape.windows == (512, 512)
        near, far = (costs.attended_tokens(run_of(shape), at, 0) for at in (4096, 65536))
        assert near == far < 600

    def test_no_weights_are_made(self, tmp_path):
        before = torch.get_default_device()
        shape = read_shape(write_config(tmp_path, LLAMA_8B))  # 15 GiB, if they were
        assert shape.weight_bytes > 14 * GIB
        assert torch.get_default_device() == before

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (None, "no such file or folder"),
            ("{", "cannot be read as JSON"),
            ("[]", "has no model_type"),
            ('{"hidden_size": 8}', "has no model_type"),
            ('{"model_type": "nonesuch"}', "transformers cannot make a causal LM of it"),
            ('{"model_type": "t5"}', "transformers cannot make a causal LM of it"),
        ],
    )
    def test_what_is_no_configuration_of_a_causal_lm_is_refused(self, tmp_path, content, said):
        path = tmp_path / "config.json"
        if content is not None:
            path.write_text(content, encoding="utf-8")
        with pytest.raises(InvalidArgumentError, match=said):
            read_shape(path)

    def test_a_folder_without_a_configuration_is_named(self, tmp_path):
        with pytest.raises(InvalidArgumentError, match=r"no config\.json in it"):
            read_shape(tmp_path)

    def test_what_an_engine_would_refuse_is_refused_with_its_words(self, tmp_path):
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        path = write_config(tmp_path, LLAMA_8B, num_hidden_layers=1, rope_parameters=rope)
        with pytest.raises(UnsupportedModelError) as planned:
            read_shape(path)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL)).eval()
        model.config.rope_parameters = rope
        with pytest.raises(UnsupportedModelError) as made:
            Engine(model, pool_tokens=1024)
        assert str(planned.value) == str(made.value)


def run_of(shape, *, selection=None, pool=10_000, host=0, device="rtx4090", rows=64):
    kv = KvShape.of(shape, 64, "auto", "bits2")
    return Run(shape, kv, DEVICES[device], rows, selection or Dense(), pool, host)


class TestMemory:
    @pytest.mark.parametrize("host_chunks", [0, 40])
    def test_the_formula_is_what_a_pager_maps(self, host_chunks):
        layout = Layout(layers=3, kv_heads=2, k_dim=32, v_dim=32, k_dtype="bfloat16")
        kv = KvShape.of_layout(layout.native(), "bits2")
        config = PagerConfig(pool_tokens=2048, host_bytes=host_chunks * kv.chunk_bytes)
        memory = pager_memory(
            EIGHT_B,
            kv,
            rows=64,
            pool_chunks=32,
            host_chunks=host_chunks,
            disk_chunks=0,
            summary_chunks=summary_slots(32, host_chunks, 0),
            seen_chunks=32,
            on_gpu=False,
        )
        stats = Pager(layout, config, rows=64).stats()
        assert memory.pool == stats["pool_bytes"]
        assert memory.host == stats["host_bytes"]
        assert memory.summaries == stats["summary_bytes"]
        assert memory.staging == stats["staging_bytes"]

    def test_a_recommended_engine_stays_within_its_budget(self, model_dir):
        shape = read_shape(model_dir)
        budget = Budget(device=512 << 20)
        plan = recommend(shape, DEVICES["laptop"], budget, Workload(8192))
        model = AutoModelForCausalLM.from_pretrained(model_dir)
        with Engine(model, plan.config) as engine:
            stats = engine.stats()
            session = engine.session()
            session.prefill([3 + i % 50 for i in range(8100)])
            assert session.length == 8100
        taken = sum(stats[name] for name in ("pool_bytes", "summary_bytes", "staging_bytes"))
        assert taken == plan.memory.device
        assert stats["host_bytes"] == plan.memory.host == 0
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        assert weights == shape.weight_bytes
        assert weights + taken + plan.working + plan.margin <= budget.device

    def test_device_memory_is_predicted_within_a_few_percent(self):
        pytest.importorskip("kvpager")
        from kvpager import _core

        if _core.probe_device("shim")["why_not"]:
            pytest.skip("the shim is not built")
        layout = Layout(
            layers=4, kv_heads=4, k_dim=64, v_dim=64, k_dtype="bfloat16", v_dtype="bfloat16"
        )
        kv = KvShape.of_layout(layout.native(), "bits2")
        shape = dataclasses.replace(EIGHT_B, q_heads=8, kv_heads=4, k_dim=64, v_dim=64, layers=4)
        config = PagerConfig(
            pool_tokens=64 * 512,
            host_bytes=512 * kv.chunk_bytes,
            summary_bytes=1024 * kv.summary_bytes,
            device="shim",
        )
        memory = pager_memory(
            shape,
            kv,
            rows=16,
            pool_chunks=512,
            host_chunks=512,
            disk_chunks=0,
            summary_chunks=1024,
            seen_chunks=512,
            on_gpu=True,
        )
        stats = Pager(layout, config, rows=16, q_heads=8).stats()
        assert stats["device_bytes"] == pytest.approx(memory.device, rel=0.03)
        assert stats["pinned_bytes"] == pytest.approx(memory.host + memory.pinned, rel=0.03)
        assert staging_bytes(kv, 512, on_gpu=True) == stats["staging_bytes"]


class TestRecommendation:
    @given(shapes, devices, shares, shares, host_shares, long_contexts, session_counts)
    def test_more_memory_never_gives_a_smaller_pool(
        self, shape, device, first, second, host, context, sessions
    ):
        machine, work = DEVICES[device], Workload(context, sessions)
        budgets = [
            Budget(memory_for(shape, work, share), host_for(shape, work, host))
            for share in sorted((first, second))
        ]
        small, large = (plan_or_none(shape, machine, budget, work) for budget in budgets)
        if small is not None:
            assert large is not None
            assert large.config.pool_size >= small.config.pool_size

    @given(shapes, devices, st.integers(8 * GIB, 96 * GIB), st.integers(8 * GIB, 96 * GIB))
    def test_more_memory_never_gives_a_smaller_pool_at_any_scale(
        self, shape, device, first, second
    ):
        less, more = sorted((first, second))
        work = Workload(131072, 2)
        small = plan_or_none(shape, DEVICES[device], Budget(less, 256 * GIB), work)
        large = plan_or_none(shape, DEVICES[device], Budget(more, 256 * GIB), work)
        if small is not None:
            assert large is not None
            assert large.config.pool_size >= small.config.pool_size

    @given(shapes, devices, shares, contexts, long_contexts, session_counts)
    def test_a_longer_context_never_takes_less_memory(
        self, shape, device, share, first, second, sessions
    ):
        near, far = (Workload(context, sessions) for context in sorted((first, second)))
        budget = Budget(memory_for(shape, far, share), host_for(shape, far, 1.2))
        machine = DEVICES[device]
        short = plan_or_none(shape, machine, budget, near)
        long = plan_or_none(shape, machine, budget, far)
        if long is not None:
            assert short is not None
            assert long.memory.total >= short.memory.total

    @given(shapes, devices, shares, host_shares, long_contexts, session_counts)
    def test_budgets_are_kept(self, shape, device, share, host_share, context, sessions):
        work = Workload(context, sessions)
        memory, host = memory_for(shape, work, share), host_for(shape, work, host_share)
        plan = plan_or_none(shape, DEVICES[device], Budget(memory, host), work)
        if plan is None:
            return
        taken = shape.weight_bytes + plan.memory.device + plan.working + plan.margin
        assert taken + plan.spare == memory
        assert plan.spare >= 0
        assert plan.memory.host <= host
        chunks = sessions * plan.kv.chunks(context)
        homes = (plan.memory.host + plan.memory.disk) // plan.kv.chunk_bytes
        assert plan.redundant or homes >= chunks
        assert plan.config.pool_size >= plan.config.least_pool(plan.rows)
        assert plan.config.resolve_rows("cuda") == plan.rows

    @given(devices, contexts, contexts)
    def test_a_longer_context_is_never_faster(self, device, first, second):
        run = run_of(EIGHT_B, device=device, pool=600)
        near, far = sorted((first, second))
        for cost in (costs.decode, costs.save, costs.restore):
            assert cost(run, near).seconds <= cost(run, far).seconds * (1 + 1e-12)
        assert costs.prefill(run, 0, near).seconds <= costs.prefill(run, 0, far).seconds * 1.0001

    @given(devices, contexts, st.integers(10, 4000), st.integers(10, 4000))
    def test_a_larger_pool_is_never_slower(self, device, context, first, second):
        less, more = sorted((first, second))
        for selection in (Dense(), TopK(chunks=32)):
            slow, fast = (
                costs.decode(run_of(EIGHT_B, selection=selection, pool=n, device=device), context)
                for n in (less, more)
            )
            assert fast.seconds <= slow.seconds * (1 + 1e-12)

    def test_where_everything_fits_paging_is_redundant_and_attention_dense(self):
        plan = recommend(EIGHT_B, DEVICES["h100"], Budget(80 * GIB), Workload(32768))
        assert plan.redundant
        assert plan.config.selection == Dense()
        assert plan.config.host_bytes == 0
        assert any("paging is redundant" in line for line in plan.why)
        assert costs.missed_tokens(plan.run(), 32768) == 0

    def test_room_for_copies_of_weights_is_named_where_they_can_be_had(self):
        def told(shape, device, memory):
            plan = recommend(shape, DEVICES[device], Budget(memory * GIB), Workload(4096))
            return [line for line in plan.why if "compress_weights" in line]

        (line,) = told(EIGHT_B, "laptop", 64)
        linear = EIGHT_B.parameters - EIGHT_B.embedding_parameters
        assert byte_size(int(1.5 * linear)) in line
        assert told(EIGHT_B, "laptop", 20) == []  # what the weights leave is less
        assert told(dataclasses.replace(EIGHT_B, dtype="float16"), "laptop", 64) == []
        assert told(EIGHT_B, "h100", 80) == []

    def test_where_it_does_not_a_step_reads_a_part_and_every_chunk_has_a_home(self):
        plan = recommend(EIGHT_B, DEVICES["rtx4090"], Budget(24 * GIB, 64 * GIB), Workload(131072))
        assert not plan.redundant
        assert plan.config.selection == TopK(chunks=64)
        assert plan.config.host_bytes == 2048 * plan.kv.chunk_bytes
        speeds = plan.speeds()
        assert [speed.context for speed in speeds] == [1024, 4096, 16384, 65536, 131072]
        assert speeds[-1].dense.bound == "link"
        assert speeds[-1].chosen.seconds < speeds[-1].dense.seconds / 5

    def test_a_pool_frees_room_for_experts(self):
        plan = recommend(MIXTURE, DEVICES["h100"], Budget(80 * GIB, 128 * GIB), Workload(40960, 8))
        freed = plan.freed()
        assert freed.hot_experts_full < freed.hot_experts_pool == 128
        assert freed.bytes == freed.full_bytes - freed.pool_bytes > 20 * GIB
        assert freed.layers == pytest.approx(freed.bytes / MIXTURE.layer_bytes)

    def test_a_first_forward_of_more_rows_reads_more_chunks_and_never_more_than_there_are(self):
        run = run_of(EIGHT_B, selection=TopK(chunks=8), device="laptop")
        needed = [costs.chunks_needed(run, 1 << 20, rows) for rows in (1, 2, 16, 64, 1000)]
        assert needed == sorted(needed)
        assert needed[0] < needed[1] < needed[2] <= (1 << 20) / 64
        assert needed[3] == needed[4]  # no forward has more rows
        dense = run_of(EIGHT_B, device="laptop")
        assert {costs.chunks_needed(dense, 6400, rows) for rows in (1, 4)} == {100}

    def test_rows_that_gather_experts_are_few_whatever_the_memory(self):
        rows = {
            recommend(MIXTURE, DEVICES["h200"], Budget(memory * GIB), Workload(1024)).rows
            for memory in (70, 100, 141)
        }
        assert rows == {128}
        assert gathered_bytes(MIXTURE, 256) > MIXTURE.weight_bytes // 8

    def test_terms_add_up_and_the_largest_is_named(self):
        cost = costs.decode(run_of(EIGHT_B), 4096)
        assert cost.seconds == pytest.approx(sum(term.seconds for term in cost.terms))
        assert cost.bound == "weights"
        assert all(term.seconds >= 0 for term in cost.terms)
        assert cost.of("weights") == pytest.approx(
            (EIGHT_B.layer_parameters + EIGHT_B.head_parameters) * 2 / DEVICES["rtx4090"].bandwidth
        )

    def test_a_plan_as_json_has_every_term(self):
        plan = recommend(EIGHT_B, DEVICES["h100"], Budget(80 * GIB), Workload(8192, 2))
        values = to_json(plan)
        for row in values["decode"]:
            assert row["seconds"] == pytest.approx(sum(row["terms"].values()))
        assert values["memory"]["pool"] == plan.memory.pool


class TestRefusals:
    def test_weights_that_do_not_fit_say_by_how_much(self):
        with pytest.raises(CapacityError, match="weights alone do not fit") as error:
            recommend(EIGHT_B, DEVICES["rtx4090"], Budget(12 * GIB, 64 * GIB), Workload(4096))
        short = float(re.search(r"short of ([0-9.]+) GiB", str(error.value))[1])
        enough = Budget(int((12 + short + 0.1) * GIB * 16 / 15) + 3 * GIB, 64 * GIB)
        assert recommend(EIGHT_B, DEVICES["rtx4090"], enough, Workload(4096))

    def test_a_mixture_that_does_not_fit_says_how_many_experts_could_be_kept(self):
        with pytest.raises(CapacityError) as error:
            recommend(MIXTURE, DEVICES["rtx4090"], Budget(24 * GIB, 128 * GIB), Workload(40960))
        kept = [int(n) for n in re.findall(r"(?:room for|and for) (\d+)", str(error.value))]
        assert len(kept) == 2
        assert 0 < kept[1] < kept[0] < 128

    def test_the_least_pool_that_does_not_fit_says_how_much_is_missing(self):
        with pytest.raises(CapacityError, match="the least pool of 1,024 tokens"):
            recommend(EIGHT_B, DEVICES["rtx4090"], Budget(int(16.2 * GIB), 64 * GIB), Workload(99))

    def test_too_little_host_memory_is_said(self):
        with pytest.raises(CapacityError, match="host memory is short of"):
            recommend(EIGHT_B, DEVICES["rtx4090"], Budget(20 * GIB, 4 * GIB), Workload(131072))

    def test_a_context_beyond_the_models_is_refused(self):
        with pytest.raises(InvalidArgumentError, match="made for up to 131,072"):
            recommend(EIGHT_B, DEVICES["h100"], Budget(80 * GIB), Workload(131073))

    def test_without_a_disk_a_cpu_says_what_to_give(self, tmp_path):
        laptop, work = DEVICES["laptop"], Workload(131072)
        with pytest.raises(CapacityError, match="--disk-bytes") as error:
            recommend(EIGHT_B, laptop, Budget(30 * GIB), work)
        given = int(re.search(r"--disk-bytes (\d+)MiB", str(error.value))[1]) << 20
        plan = recommend(
            EIGHT_B, laptop, Budget(30 * GIB, disk=given), work, disk_path=str(tmp_path)
        )
        assert plan.config.disk_path == str(tmp_path)

    def test_unknown_names_and_sizes_are_refused(self):
        with pytest.raises(InvalidArgumentError, match=r"expected .*rtx4090"):
            device_named("rtx4900")
        with pytest.raises(InvalidArgumentError, match="context is 0"):
            Workload(0)


class TestProducts:
    def test_a_roofline_is_the_slower_of_reading_and_arithmetic(self):
        products = Products.roofline("bfloat16", bandwidth=1e12, flops=1e14)
        assert products.seconds(1e9, 1) == pytest.approx(2e-3)
        assert products.seconds(1e9, 4096) == pytest.approx(2 * 1e9 * 4096 / 1e14)

    def test_between_points_it_is_monotonic_and_beyond_them_proportional(self):
        products = Products(((1, 1e-12), (8, 2e-12), (64, 9e-12)))
        seconds = [products.seconds(1.0, rows) for rows in range(1, 200)]
        assert seconds == sorted(seconds)
        assert products.seconds(1.0, 128) == pytest.approx(18e-12)

    def test_rates_given_by_hand_replace_those_of_the_device(self):
        machine = DEVICES["rtx4090"].with_rates(flops=1e14, bandwidth=5e11, link=1e10, disk=1e9)
        assert (machine.bandwidth, machine.link, machine.disk_read) == (5e11, 1e10, 1e9)
        assert machine.products["bfloat16"].seconds(1e9, 1) == pytest.approx(2e9 / 5e11)
        assert DEVICES["rtx4090"].with_rates() is DEVICES["rtx4090"]
