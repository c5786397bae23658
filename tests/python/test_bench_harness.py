"""How it is measured: timings, turns, bits that are compared, and peers that move files."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvpager_bench import file_peers, harness, subjects
from kvpager_bench.harness import MissingNumberError, NondeterministicSubjectError
from kvpager_bench.questions import exactness as bench_exactness
from kvpager_bench.questions import packing as bench_packing


class TestMeasuring:
    def test_the_warm_up_is_not_among_the_runs(self):
        calls = itertools.count()
        timing = harness.measure(lambda: next(calls), runs=4, warm_up=2)
        assert next(calls) == 6
        assert len(timing.runs) == 4
        assert timing.fastest <= timing.median <= timing.slowest

    @pytest.mark.parametrize("runs", [(), (1.0, math.nan), (0.0,), (-1.0,)])
    def test_timings_that_are_none_are_refused(self, runs):
        with pytest.raises(MissingNumberError):
            harness.Timing(runs)

    def test_a_subject_that_changes_is_refused_and_one_that_does_not_passes(self):
        tensor = torch.arange(8.0)
        harness.require_deterministic(lambda: harness.digest(tensor), "constant", times=3)
        steps = itertools.count()
        with pytest.raises(NondeterministicSubjectError, match="drifting"):
            harness.require_deterministic(
                lambda: harness.digest(tensor + 1e-6 * next(steps)), "drifting"
            )

    def test_interleaved_subjects_take_turns_and_each_goes_first(self):
        order = []
        timings = harness.interleave(
            {
                name: harness.Subject(
                    lambda name=name: order.append(name),
                    lambda name=name: order.append(f"before {name}"),
                )
                for name in "abc"
            },
            runs=3,
            warm_up=0,
        )
        rounds = ["".join(order[i : i + 6]) for i in range(0, 18, 6)]
        assert rounds == [
            "before aabefore bbbefore cc",
            "before bbbefore ccbefore aa",
            "before ccbefore aabefore bb",
        ]
        assert [len(timing.runs) for timing in timings.values()] == [3, 3, 3]

    def test_bytes_read_are_those_of_read_calls_even_from_the_page_cache(self, tmp_path):
        path = tmp_path / "data"
        path.write_bytes(bytes(1 << 20))
        before = harness.bytes_read()
        file_peers.read_file(path)
        grown = harness.bytes_read() - before
        assert 1 << 20 <= grown <= (1 << 20) + 4096

    def test_the_peak_counts_memory_that_is_given_back_before_the_end(self):
        size = 64 << 20
        assert harness.peak_growth(lambda: torch.ones(size, dtype=torch.uint8).sum()) >= 0.9 * size
        assert harness.peak_growth(lambda: None) < 0.5 * size

    def test_the_digest_tells_zero_from_negative_zero(self):
        assert harness.digest(torch.tensor([0.0])) != harness.digest(torch.tensor([-0.0]))

    def test_a_worker_that_fails_gives_no_numbers(self, tmp_path, monkeypatch):
        (tmp_path / "failing_worker.py").write_text("raise SystemExit(3)", encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        with pytest.raises(MissingNumberError, match="exit 3"):
            harness.run_worker("failing_worker", {"what": "nothing"})

    def test_a_timing_is_shared_by_what_each_run_did_and_a_call_is_timed_with_its_result(self):
        assert harness.Timing((2.0, 4.0)).per(4) == harness.Timing((0.5, 1.0))
        seconds, result = harness.timed(lambda: "done")
        assert result == "done"
        assert seconds >= 0

    def test_the_environment_names_machine_versions_and_commit(self):
        record = harness.environment()
        assert record["torch"] == torch.__version__
        assert record["threads"] == torch.get_num_threads()
        assert record["isa"] in ("base", "v3", "v4")
        assert isinstance(record["dirty"], bool)
        assert all(value not in (None, "") for value in record.values())


class TestFilePeers:
    def test_peers_write_the_same_bytes(self, tmp_path):
        generator = torch.Generator().manual_seed(1)
        tensor = torch.randint(256, (3_000_001,), generator=generator, dtype=torch.uint8)
        data = tensor.numpy()
        plain, copied = tmp_path / "plain", tmp_path / "copied"
        file_peers.write_synced(plain, data)
        assert plain.read_bytes() == data.tobytes()
        file_peers.write_reserved(copied, data)
        assert copied.read_bytes() == data.tobytes()
        for how in file_peers.TENSOR_FILES:
            file_peers.save_tensors_synced({"k0": tensor}, tmp_path / how, how)
            assert torch.equal(file_peers.load_tensors(tmp_path / how, how)["k0"], tensor)

    def test_the_copy_reaches_every_byte_through_a_smaller_target(self, monkeypatch):
        monkeypatch.setattr(file_peers, "COPY_TARGET", 1000)
        copy = file_peers.Copy(np.arange(2500, dtype=np.uint8))
        copy()
        assert copy.target[:500].tolist() == copy.data[2000:].tolist()
        assert copy.target[500:].tolist() == copy.data[1500:2000].tolist()


class TestSubjects:
    def test_a_model_beside_another_shares_its_weights_and_not_its_attention(self):
        model = subjects.load_model(subjects.SHIPPED)
        other = subjects.beside(model)
        weights = dict(other.named_parameters())
        for name, weight in model.named_parameters():
            assert weights[name].data_ptr() == weight.data_ptr(), name
        before = other.config._attn_implementation
        model.set_attn_implementation("eager")
        assert other.config._attn_implementation == before
        ids = subjects.random_ids(model, 20)
        _, expected = subjects.stock_prefill(other, ids)
        assert torch.isfinite(expected).all()

    @pytest.mark.parametrize("name", ["gqa9-fp32", "gqa8", "shipped-fp64", ""])
    def test_a_subject_nobody_defined_is_refused(self, name):
        with pytest.raises(ValueError, match="expected one of"):
            subjects.load_model(name)


class TestExactness:
    def text(self, *tokens, logits=None):
        values = torch.zeros(len(tokens), 3) if logits is None else logits
        return bench_exactness.Text(list(tokens), values, np.full(len(tokens), -1.0, np.float32))

    def test_a_route_counts_forks_and_bits(self):
        route = bench_exactness.OurRoute("reuse")
        route.add(self.text(1, 2, 3), self.text(1, 2, 3))
        assert (route.first_forks, route.logits.differing_bits) == ([None], 0)
        changed = torch.zeros(3, 3)
        changed[1, 2] = -0.0
        route.add(self.text(1, 2, 3), self.text(1, 9, 3, logits=changed))
        assert route.first_forks == [None, 1]
        assert (route.logits.differing_elements, route.logits.differing_bits) == (1, 1)
        assert route.agreement.tokens == 6

    def test_texts_of_different_lengths_are_no_comparison(self):
        with pytest.raises(ValueError, match="zip"):
            bench_exactness.OurRoute("reuse").add(self.text(1, 2), self.text(1, 2, 3))


class TestPacking:
    def completion(self, logprob=-1.0, key=0.5):
        kv = torch.tensor([[0.25, key]])
        sequence = SimpleNamespace(read_kv=lambda layer, start, stop: (kv[start:stop], kv))
        layout = SimpleNamespace(layers=2)
        core = SimpleNamespace(facts=SimpleNamespace(layout=layout))
        return SimpleNamespace(
            index=0,
            tokens=np.array([5, 6], dtype=np.int32),
            logprobs=np.array([-0.5, logprob], dtype=np.float32),
            session=SimpleNamespace(core=core, committed=1, sequence=sequence),
        )

    def test_equal_completions_have_no_differing_bit(self):
        bits = bench_packing.compare([self.completion()] * 2, [self.completion()])
        assert bits.comparison.bits == 32 * (2 + 2 + 2 * 4)
        assert (bits.comparison.differing_bits, bits.texts_changed) == (0, 0)

    @pytest.mark.parametrize(
        ("change", "differing", "where"),
        [({"logprob": 1.0}, 1, "log-probabilities"), ({"key": -0.5}, 4, "K/V of layer 0")],
    )
    def test_one_bit_that_packing_changed_is_counted(self, change, differing, where):
        bits = bench_packing.compare([self.completion(**change)], [self.completion()])
        assert bits.comparison.differing_bits == differing
        assert where in bits.comparison.first.place

    def test_nothing_compared_is_no_result(self):
        with pytest.raises(MissingNumberError, match="nothing was compared"):
            bench_packing.compare([], [self.completion()])
