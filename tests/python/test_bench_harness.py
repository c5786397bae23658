from __future__ import annotations

import itertools
import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvpager_bench import file_peers, hard_keys, harness, subjects, tables
from kvpager_bench.exact_cost_table import exact_cost_table
from kvpager_bench.harness import Column, MissingNumberError, NondeterministicSubjectError, Report
from kvpager_bench.questions import exact_cost as bench_exact_cost
from kvpager_bench.questions import exactness as bench_exactness
from kvpager_bench.questions import experts as bench_experts
from kvpager_bench.questions import packing as bench_packing
from kvpager_bench.questions import residency_traffic
from kvpager_bench.questions import save_beside as bench_save_beside
from kvpager_bench.questions import snapshot as bench_snapshot
from kvpager_bench.questions import store as bench_store


def make_report(**changes):
    values = {
        "name": "sample",
        "question": "How long?",
        "columns": (
            Column("shape", text=True),
            Column("time_ms", "ms"),
            Column("scan_ms", "ms", optional=True),
        ),
        "settings": {"runs": 3},
        "environment": harness.environment(),
    }
    return Report(**{**values, **changes})


class TestReport:
    def test_a_row_that_lacks_a_column_is_refused(self):
        with pytest.raises(MissingNumberError, match="time_ms"):
            make_report().add(shape="a", scan_ms=1.0)

    def test_a_column_nobody_declared_is_refused(self):
        with pytest.raises(MissingNumberError, match="tme_ms"):
            make_report().add(shape="a", time_ms=1.0, scan_ms=1.0, tme_ms=1.0)

    @pytest.mark.parametrize("value", [math.nan, math.inf, None, "n/a", "", True])
    def test_what_is_no_finite_number_is_refused(self, value):
        report = make_report()
        with pytest.raises(MissingNumberError, match="time_ms"):
            report.add(shape="a", time_ms=value, scan_ms=1.0)
        assert report.rows == []

    def test_an_optional_column_takes_na_and_nothing_else(self):
        report = make_report()
        report.add(shape="a", time_ms=1.0, scan_ms=harness.NOT_APPLICABLE)
        with pytest.raises(MissingNumberError, match="scan_ms"):
            report.add(shape="a", time_ms=1.0, scan_ms=None)

    def test_na_is_never_read_as_a_number(self):
        report = make_report()
        row = report.add(shape="a", time_ms=0.5, scan_ms=harness.NOT_APPLICABLE)
        assert report.number(row, "time_ms") == 0.5
        for name in ("scan_ms", "shape", "unknown"):
            with pytest.raises(MissingNumberError):
                report.number(row, name)

    def test_a_report_without_rows_is_not_written(self, tmp_path):
        with pytest.raises(MissingNumberError, match="no rows"):
            make_report().write(tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_what_is_written_reads_back_the_same(self, tmp_path):
        report = make_report()
        report.add(shape="a", time_ms=1.25, scan_ms=3)
        report.judge("it is short", True, "1.25 ms")
        again = harness.load_report(report.write(tmp_path))
        assert again == report
        assert again.markdown() == report.markdown()

    @pytest.mark.parametrize(
        "damage",
        [
            lambda data: data["rows"][0].pop(),
            lambda data: data["rows"][0].__setitem__(1, None),
            lambda data: data["rows"].clear(),
            lambda data: data["environment"].pop("commit"),
            lambda data: data["environment"].update(isa=""),
            lambda data: data.update(schema=harness.SCHEMA + 1),
        ],
    )
    def test_a_damaged_file_is_refused_when_read(self, tmp_path, damage):
        report = make_report()
        report.add(shape="a", time_ms=1.25, scan_ms=3)
        path = report.write(tmp_path)
        data = json.loads(path.read_text(encoding="utf-8"))
        damage(data)
        path.write_text(json.dumps(data), encoding="utf-8")
        with pytest.raises(MissingNumberError):
            harness.load_report(path)

    @pytest.mark.parametrize(
        ("value", "printed"),
        [(0.0, "0"), (0.0123, "0.0123"), (1.0, "1.00"), (12.34, "12.3"), (1234.5, "1234")],
    )
    def test_numbers_print_with_three_significant_digits(self, value, printed):
        report = make_report(columns=(Column("x"),))
        report.add(x=value)
        assert report.markdown().splitlines()[-1].strip("| ") == printed


class TestMeasuring:
    def test_the_warm_up_is_not_among_the_runs(self):
        calls = itertools.count()
        timing = harness.measure(lambda: next(calls), runs=4, warm_up=2)
        assert next(calls) == 6
        assert len(timing.runs) == 4
        assert timing.fastest <= timing.median <= timing.slowest

    def test_preparation_runs_before_every_call_and_is_not_timed(self):
        order = []
        harness.measure(
            lambda: order.append("call"), runs=2, warm_up=1, before=lambda: order.append("before")
        )
        assert order == ["before", "call"] * 3

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

    def test_the_environment_names_machine_versions_and_commit(self):
        record = harness.environment()
        assert record["torch"] == torch.__version__
        assert record["threads"] == torch.get_num_threads()
        assert record["isa"] in ("base", "v3", "v4")
        assert isinstance(record["dirty"], bool)
        assert all(value not in (None, "") for value in record.values())


class TestHardKeys:
    @pytest.mark.parametrize("variant", ["rotated", "skewed", "offset"])
    def test_full_attention_answers_as_before_while_keys_differ(self, variant):
        asked = subjects.questions(1024, 4, seed=3, quiet=320)
        prompt = [*asked.document.ids, *asked.prompts[1]]
        plain = subjects.load_model(subjects.SHIPPED)
        hard = hard_keys.harden(subjects.load_model(subjects.SHIPPED), variant)
        before_cache, before = subjects.stock_prefill(plain, prompt)
        after_cache, after = subjects.stock_prefill(hard, prompt)
        assert int(before.argmax()) == asked.answers[1][0]
        torch.testing.assert_close(after, before, atol=2e-3, rtol=1e-3)
        layer = hard_keys.RETRIEVING_LAYER
        change = after_cache.layers[layer].keys - before_cache.layers[layer].keys
        assert change.abs().mean() > 0.1 * before_cache.layers[layer].keys.abs().mean()


class TestTraffic:
    """A record of one layer with two kv heads, four chunks of which none is sheltered."""

    def record(self, *steps, scores=None, sheltered=()):
        rows = []
        for number, pages in enumerate(steps):
            read = np.zeros((2, 4), dtype=bool)
            for chunk, head in pages:
                read[head, chunk] = True
            score = np.array(scores[number] if scores else [0.0] * 4)
            rows.append(residency_traffic.Step(read, score))
        shelter = np.isin(np.arange(4), sheltered)
        return residency_traffic.Recording(rows, 4, 2, 32, shelter, np.zeros(4))

    page = residency_traffic.Unit("page", 1)
    chunk = residency_traffic.Unit("chunk", 2)

    def play(self, record, unit, way, chunks):
        moved = residency_traffic.play(record, unit, way, chunks + 1)
        return moved.needed, moved.in_place, moved.copied_units

    def test_promoting_counts_misses_by_unit(self):
        # A prefill leaves the newest: chunks 2 and 3.
        record = self.record({(0, 0), (0, 1)}, {(0, 0)}, {(3, 0)}, {(0, 1)}, {(2, 0)})
        way = residency_traffic.PROMOTING
        assert self.play(record, self.page, way, 2) == (6, 0, 3)
        assert self.play(record, self.chunk, way, 2) == (6, 0, 2)
        assert self.play(record, self.chunk, way, 1) == (6, 0, 4)

    def test_a_step_that_needs_more_than_the_pool_streams_what_is_missing(self):
        record = self.record({(0, 0), (1, 0), (2, 0)}, {(3, 1)})
        assert self.play(record, self.chunk, residency_traffic.PROMOTING, 2) == (4, 0, 2)

    def test_what_is_read_in_place_crosses_again_when_it_is_recalled(self):
        record = self.record({(0, 0)}, {(0, 0)}, {(0, 1)})
        way = residency_traffic.Way("in place", "lru", 1)
        assert self.play(record, self.chunk, way, 2) == (3, 1, 1)
        assert self.play(record, self.page, way, 2) == (3, 2, 2)
        assert self.play(record, self.chunk, residency_traffic.Way("in place", "lru", 0), 2) == (
            3,
            3,
            0,
        )

    def test_scores_recall_only_what_beats_its_victim_by_the_hysteresis(self):
        way = residency_traffic.Way("in place", "qk", 1)
        for score, recalled in ((1.05, 0), (1.2, 1)):
            record = self.record({(0, 0)}, {(0, 0)}, scores=2 * [[score, 0.5, 1.0, 2.0]])
            assert self.play(record, self.chunk, way, 2) == (2, 2 - recalled, recalled)

    def test_the_sheltered_stay(self):
        steps = [{(0, 0)}, {(1, 0)}, {(3, 1)}]
        record = self.record(*steps, sheltered=(2, 3))
        way = residency_traffic.Way("in place", "lru", 4)
        assert self.play(record, self.chunk, way, 2) == (3, 2, 0)

    def test_independent_groups_read_as_much_and_agree_on_nothing_but_shelter(self):
        record = self.record({(0, 0), (3, 0)}, {(1, 1), (3, 1)}, sheltered=(3,))
        many = residency_traffic.independent(record, 40)
        assert many.selectors == 80
        for before, after in zip(record.steps, many.steps):
            assert after.read.sum() == 40 * before.read.sum()
            assert after.read[:, 3].sum() == 40
            assert (after.read[:, :3].sum(axis=0) > 0).all()
        assert residency_traffic.agreeing(record, 40).steps[0].read.sum() == 80


class TestFilePeers:
    def test_peers_write_the_same_bytes(self, tmp_path):
        generator = torch.Generator().manual_seed(1)
        tensor = torch.randint(256, (3_000_001,), generator=generator, dtype=torch.uint8)
        data = tensor.numpy()
        plain, copied = tmp_path / "plain", tmp_path / "copied"
        file_peers.write_synced(plain, data)
        assert plain.read_bytes() == data.tobytes()
        file_peers.write_atomic(copied, data)
        assert copied.read_bytes() == data.tobytes()
        if file_peers.has_dd():
            file_peers.dd(plain, copied)
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

    def test_prompts_have_suffixes_of_many_lengths(self):
        model = subjects.load_model(subjects.SHIPPED)
        prompts = bench_exactness.make_prompts("shipped-fp32", model, 30)
        suffixes = [
            len(ids) - bench_exactness.prefix_tokens(len(ids), i) for i, ids in enumerate(prompts)
        ]
        assert len(set(suffixes)) >= 25
        assert len({ids.tobytes() for ids in prompts}) == 30


class TestExactCost:
    class Fake:
        def __init__(self, *digests):
            self._digests = itertools.cycle(digests)

        def bits(self):
            return next(self._digests)

    def test_modes_that_agree_pass(self):
        names = (bench_exact_cost.FIXED, bench_exact_cost.ALL, bench_exact_cost.REUSE)
        bench_exact_cost.check_bits({name: self.Fake(("a", "b")) for name in names}, "here")

    def test_decoding_may_differ_where_it_is_not_promised(self):
        ours = {
            bench_exact_cost.FIXED: self.Fake(("a", "b")),
            bench_exact_cost.REUSE: self.Fake(("a", "c")),
            bench_exact_cost.FREE: self.Fake(("d", "e")),
        }
        bench_exact_cost.check_bits(ours, "here")

    @pytest.mark.parametrize(
        ("mode", "bits"),
        [
            (bench_exact_cost.ALL, ("a", "c")),
            (bench_exact_cost.ALL, ("c", "b")),
            (bench_exact_cost.REUSE, ("c", "b")),
        ],
    )
    def test_small_row_counts_that_change_bits_are_not_timed(self, mode, bits):
        ours = {bench_exact_cost.FIXED: self.Fake(("a", "b")), mode: self.Fake(bits)}
        with pytest.raises(NondeterministicSubjectError, match="not of one class"):
            bench_exact_cost.check_bits(ours, "here")

    def test_a_mode_that_changes_by_itself_is_not_timed(self):
        changing = self.Fake(("a", "b"), ("a", "c"))
        with pytest.raises(NondeterministicSubjectError, match="False"):
            bench_exact_cost.check_bits({bench_exact_cost.FREE: changing}, "here")

    @pytest.mark.parametrize(
        ("costs", "held"),
        [
            ({64: (1.3, 1.4), 256: (1.0, 1.1)}, [True, True]),
            ({64: (1.0, 1.1), 256: (1.0, 1.3)}, [True, False]),
            ({64: (0.9, 1.4), 256: (1.5, 0.9)}, [False, True]),
        ],
    )
    def test_the_default_is_judged_by_the_worse_of_decode_and_prefill(self, costs, held):
        columns = ("decode_over_transformers", "prefill_over_transformers")
        report = make_report(
            columns=(
                *(Column(name, text=True) for name in ("subject", "mode")),
                *(Column(name) for name in ("rows", *columns)),
            )
        )
        for rows, values in costs.items():
            for mode, more in ((bench_exact_cost.ALL, 0), (bench_exact_cost.FIXED, 9)):
                times = {name: value + more for name, value in zip(columns, values)}
                report.add(subject="a", mode=mode, rows=rows, **times)
        bench_exact_cost.judge(report, "a")
        assert [verdict.holds for verdict in report.verdicts] == held


class TestPacking:
    def completion(self, logprob=-1.0, key=0.5):
        kv = torch.tensor([[0.25, key]])
        sequence = SimpleNamespace(read_kv=lambda layer, start, stop: (kv[start:stop], kv))
        core = SimpleNamespace(layout=SimpleNamespace(layers=2))
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

    def test_mixed_prompts_have_one_mean_for_every_even_count(self):
        model = subjects.load_model(subjects.SHIPPED)
        draw = bench_packing.draw_prompts
        lengths = [len(prompt) for prompt in draw(bench_packing.MIXED, model, 64, seed=3)]
        least, most = bench_packing.MIXED_TOKENS
        assert {sum(lengths[:n]) / n for n in (1, 2, 8, 32, 64)} == {(least + most) / 2}
        assert least <= min(lengths) < max(lengths) <= most
        assert len(set(lengths)) > 20
        few, many = (draw(bench_packing.MIXED, model, n, seed=3) for n in (4, 16))
        assert all(np.array_equal(a, b) for a, b in zip(few, many))


class TestQuickRuns:
    """Scripts that need no minutes, at their smallest; workers run in this process."""

    @pytest.fixture
    def run(self, tmp_path, monkeypatch):
        def run(module, *options):
            monkeypatch.setenv("KVPAGER_BENCH_RESULTS", str(tmp_path / "results"))
            monkeypatch.setattr(
                harness, "run_worker", lambda _, task: module.WORKERS[task["what"]](task)
            )
            threads = str(torch.get_num_threads())
            options = (
                "--quick",
                "--runs",
                "1",
                "--threads",
                threads,
                "--folder",
                str(tmp_path),
                *options,
            )
            monkeypatch.setattr(sys, "argv", ["bench", *options])
            module.main()
            assert [path.name for path in tmp_path.iterdir()] == ["results"]
            paths = sorted((tmp_path / "results").iterdir())
            return {path.stem.removesuffix("-quick"): harness.load_report(path) for path in paths}

        return run

    @pytest.fixture
    def run_plainly(self, tmp_path, monkeypatch):
        """For scripts that start no workers and write nothing but their report."""

        def run(module, *options):
            monkeypatch.setenv("KVPAGER_BENCH_RESULTS", str(tmp_path / "results"))
            threads = str(torch.get_num_threads())
            monkeypatch.setattr(sys, "argv", ["bench", "--quick", "--threads", threads, *options])
            module.main()
            (path,) = (tmp_path / "results").iterdir()
            written = tables.write_all(tmp_path / "results", "-quick")
            return harness.load_report(path), [path.name for path in written.files]

        return run

    def test_exactness(self, run_plainly):
        report, files = run_plainly(bench_exactness, "--rows", "32")
        assert {"exactness-quick.png", "exactness-quick.csv"} < set(files)
        assert [row["by"] for row in report.rows] == ["transformers"] * 2 + ["kvpager"] * 2
        assert report.verdicts[0].holds
        for row in report.rows[2:]:
            assert row["logits_compared"] == 4 * 8 * 1024
            assert row["kv_bits_compared"] > 1e6
        table = bench_exactness.compact(report).splitlines()
        assert [line.count("|") for line in table] == [6] * 3
        assert table[-1].endswith("| 0; 0% | 0; 0% |")

    def test_exact_cost(self, run_plainly, capsys):
        report, files = run_plainly(bench_exact_cost, "--rows", "16,32")
        assert {"exact_cost-quick.csv", "benchmarks-quick.md"} < set(files)
        assert [row["mode"] for row in report.rows] == 2 * list(bench_exact_cost.MODES)
        table = exact_cost_table(report)
        assert table in capsys.readouterr().out
        assert table.splitlines()[0].endswith("| M = 16 | M = 32 |")
        assert [line.count("|") for line in table.splitlines()] == [4] * 6

    def test_experts(self, run_plainly):
        report, files = run_plainly(bench_experts, "--dtypes", "bf16")
        assert "experts-quick.csv" in files
        assert [row["way"] for row in report.rows] == [bench_experts.OURS, *bench_experts.WAYS]
        assert len(report.comparisons) == 5

    def test_packing(self, run_plainly):
        report, files = run_plainly(bench_packing)
        assert {"packing-quick.png", "packing-quick.csv"} < set(files)
        assert [row["sessions"] for row in report.rows] == [1, 2, 8, 1, 2, 8]
        for row in report.rows:
            assert row["differing_bits"] == 0
            assert row["texts_compared"] == min(row["sessions"], 6)
            assert row["bits_compared"] > 1e5

    def test_snapshots(self, run, tmp_path):
        reports = run(bench_snapshot, "--layouts", "shipped", "--contexts", "1024,4096")
        saves, reads = reports["snapshot_save"], reports["snapshot_read"]
        assert [row["context"] for row in saves.rows] == [1024, 4096]
        assert len(reads.rows) == 4
        bound = next(verdict for verdict in reads.verdicts if "read no more" in verdict.claim)
        assert bound.holds
        for row in reads.rows:
            assert 0 < row["restore_reads_mib"] < row["first_forward_reads_mib"]
        written = tables.write_all(tmp_path / "results", "-quick")
        names = {path.name for path in written.files}
        assert {"snapshot_save-quick.csv", "snapshot_read-quick.csv"} < names

    def test_stores(self, run):
        reports = run(bench_store, "--cells", "shipped:2048", "--snapshots", "4")
        turns, catalogue = reports["store_turns"].rows[0], reports["store_catalogue"].rows[0]
        assert turns["second_turn_mib"] < turns["as_file_mib"] / 2
        assert turns["shared_session_mib"] < turns["first_mib"] / 4
        assert catalogue["gc_freed_mib"] > 0

    def test_decoding_beside_a_save(self, run):
        row = run(bench_save_beside, "--contexts", "1024")["save_beside"].rows[0]
        assert row["saves"] > 0


def test_tables_refuse_an_empty_folder_and_write_what_is_there(tmp_path):
    with pytest.raises(MissingNumberError, match="no results"):
        tables.write_all(tmp_path, "")
    report = make_report(name="save_beside")
    report.add(shape="a", time_ms=1.25, scan_ms=3)
    report.judge("it is short", False, "1.25 ms")
    report.write(tmp_path)
    assert "decode" in tables.write_all(tmp_path, "").missing
    claims = (tmp_path / "tables" / "claims.csv").read_text(encoding="utf-8")
    assert "save_beside,it is short,no,1.25 ms," in claims
    rows = (tmp_path / "tables" / "save_beside.csv").read_text(encoding="utf-8")
    assert rows.splitlines()[1] == "a,1.25,3"
