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

from kvpager import Engine, Layout, Pager, PagerConfig
from kvpager.errors import CapacityError, InvalidArgumentError, UnsupportedModelError
from kvpager.plan import (
    Budget,
    KvShape,
    ModelShape,
    Workload,
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
shapes = st.sampled_from([EIGHT_B, MIXTURE, dataclasses.replace(EIGHT_B, dtype="float32")])
long_contexts = st.integers(8192, 131072)  # whose K/V outweigh everything that is fixed
shares = st.floats(0, 1.1)  # of what all K/V would take
host_shares = st.floats(0.7, 2)


def memory_for(shape, work, share):
    """Device memory with room for the weights and a share of all K/V, summaries and all."""
    kv = KvShape.of(shape, 64, "auto")
    chunks = work.sessions * kv.chunks(work.context) + 6
    needed = shape.weight_bytes + working_bytes(shape, 256) + chunks * kv.summary_bytes
    return int((needed + share * chunks * kv.chunk_bytes) * 16 / 15) + (420 << 20)


def host_for(shape, work, share):
    kv = KvShape.of(shape, 64, "auto")
    return int(share * work.sessions * kv.chunks(work.context) * kv.chunk_bytes) + (300 << 20)


def on_gpu(device, host=0):
    return Budget(device, host, on_gpu=True)


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


class TestMemory:
    @pytest.mark.parametrize("host_chunks", [0, 40])
    def test_the_formula_is_what_a_pager_maps(self, host_chunks):
        layout = Layout(layers=3, kv_heads=2, k_dim=32, v_dim=32, k_dtype="bfloat16")
        kv = KvShape.of_layout(layout.native())
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
        plan = recommend(shape, budget, Workload(8192))
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
        kv = KvShape.of_layout(layout.native())
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
    @given(shapes, shares, shares, host_shares, long_contexts, session_counts)
    def test_more_memory_never_gives_a_smaller_pool(
        self, shape, first, second, host, context, sessions
    ):
        work = Workload(context, sessions)
        small, large = (
            plan_or_none(
                shape, on_gpu(memory_for(shape, work, share), host_for(shape, work, host)), work
            )
            for share in sorted((first, second))
        )
        if small is not None:
            assert large is not None
            assert large.config.pool_size >= small.config.pool_size

    @given(shapes, shares, contexts, long_contexts, session_counts)
    def test_a_longer_context_never_takes_less_memory(self, shape, share, first, second, sessions):
        near, far = (Workload(context, sessions) for context in sorted((first, second)))
        budget = on_gpu(memory_for(shape, far, share), host_for(shape, far, 1.2))
        short, long = (plan_or_none(shape, budget, work) for work in (near, far))
        if long is not None:
            assert short is not None
            assert long.memory.total >= short.memory.total

    @given(shapes, shares, host_shares, long_contexts, session_counts)
    def test_budgets_are_kept(self, shape, share, host_share, context, sessions):
        work = Workload(context, sessions)
        memory, host = memory_for(shape, work, share), host_for(shape, work, host_share)
        plan = plan_or_none(shape, on_gpu(memory, host), work)
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

    def test_where_everything_fits_paging_is_redundant(self):
        plan = recommend(EIGHT_B, on_gpu(80 * GIB), Workload(32768))
        assert plan.redundant
        assert plan.config.host_bytes == 0

    def test_where_it_does_not_every_chunk_has_a_home(self):
        plan = recommend(EIGHT_B, on_gpu(24 * GIB, 64 * GIB), Workload(131072))
        assert not plan.redundant
        assert plan.config.host_bytes == 2048 * plan.kv.chunk_bytes

    def test_rows_that_gather_experts_are_few_whatever_the_memory(self):
        rows = {
            recommend(MIXTURE, on_gpu(memory * GIB), Workload(1024)).rows
            for memory in (70, 100, 141)
        }
        assert rows == {128}
        assert gathered_bytes(MIXTURE, 256) > MIXTURE.weight_bytes // 8


class TestRefusals:
    def test_weights_that_do_not_fit_say_by_how_much(self):
        with pytest.raises(CapacityError, match="weights alone do not fit") as error:
            recommend(EIGHT_B, on_gpu(12 * GIB, 64 * GIB), Workload(4096))
        short = float(re.search(r"short of ([0-9.]+) GiB", str(error.value))[1])
        enough = on_gpu(int((12 + short + 0.1) * GIB * 16 / 15) + 3 * GIB, 64 * GIB)
        assert recommend(EIGHT_B, enough, Workload(4096))

    @pytest.mark.parametrize(
        ("budget", "work", "kind", "said"),
        [
            ((int(16.2 * GIB), 64 * GIB), (99,), CapacityError, "the least pool of 1,024 tokens"),
            ((20 * GIB, 4 * GIB), (131072,), CapacityError, "host memory is short of"),
            ((80 * GIB,), (131073,), InvalidArgumentError, "made for up to 131,072"),
            ((80 * GIB,), (0,), InvalidArgumentError, "context is 0"),
            ((80 * GIB,), (1, 0), InvalidArgumentError, "sessions is 0"),
        ],
    )
    def test_what_does_not_fit_is_named(self, budget, work, kind, said):
        with pytest.raises(kind, match=said):
            recommend(EIGHT_B, on_gpu(*budget), Workload(*work))

    def test_without_a_disk_a_cpu_says_what_to_give(self, tmp_path):
        work = Workload(131072)
        with pytest.raises(CapacityError, match="--disk-bytes") as error:
            recommend(EIGHT_B, Budget(30 * GIB), work)
        given = int(re.search(r"--disk-bytes (\d+)MiB", str(error.value))[1]) << 20
        plan = recommend(EIGHT_B, Budget(30 * GIB, disk=given), work, disk_path=str(tmp_path))
        assert plan.config.disk_path == str(tmp_path)
