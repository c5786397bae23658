"""What K/V in fewer bits cost in quality: windows, divergences, formats, other systems' caches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from bench_reports import make_report
from transformers import Qwen3Config, Qwen3ForCausalLM

pytest.importorskip("kvpager_bench")

from kvpager import Engine, PagerConfig
from kvpager.config import KV_DTYPES
from kvpager_bench import divergence, format_quality, kv_formats, pages
from kvpager_bench.format_quality import (
    COLUMNS,
    NEEDLE_COLUMNS,
    Cut,
    last_logits,
    logits_after_a_file,
    windows,
)
from kvpager_bench.kv_formats import FORMATS, Format, UnknownFormatError, formats_of
from kvpager_bench.peers import kv_caches
from kvpager_bench.peers.environments import Missing, PeerError
from kvpager_bench.pictures.gallery import picture_of
from kvpager_bench.questions import codes
from kvpager_bench.questions.attention import Case


class TestDivergence:
    def test_kl_is_of_each_row_in_nats_and_never_below_zero(self):
        p, q = torch.tensor([[0.5, 0.5]] * 2).log(), torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log()
        expected = [0, 0.5 * math.log(2) + 0.5 * math.log(2 / 3)]
        assert divergence.kl_divergences(p, q).tolist() == pytest.approx(expected)
        rounded = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        assert (divergence.kl_divergences(rounded, rounded.float()) == 0).all()

    def test_perplexity_and_the_top_token_are_of_the_logits_that_are_scored(self):
        expected = torch.tensor([[0.0, 9.0], [0.0, 9.0]])
        logits = torch.tensor([[0.75, 0.25], [0.25, 0.75]]).log()
        one = divergence.sample(expected, logits, np.array([0, 1]))
        assert one.perplexity == pytest.approx(4 / 3)
        assert one.same_top.tolist() == [False, True]
        both = divergence.pooled([one, one])
        assert len(both.kl) == len(both.logprob) == 4
        assert both.perplexity == pytest.approx(one.perplexity)

    def test_logits_of_another_shape_are_refused(self):
        with pytest.raises(ValueError, match=r"\[2, 8\] of 3 tokens beside \[2, 8\]"):
            divergence.sample(torch.zeros(2, 8), torch.zeros(2, 8), np.arange(3))


class TestWindows:
    MODULES = ([1] * 5, [2] * 30, [3] * 12, [4] * 20)

    def test_each_ends_with_another_module_the_longest_first(self):
        made = windows(self.MODULES, 10, 3)
        assert [set(window.tolist()) for window in made] == [{2}, {4}, {3}]
        assert all(len(window) == 10 for window in made)

    def test_a_short_module_has_those_that_follow_it_in_front(self):
        (_, window) = windows(self.MODULES, 40, 2)
        assert window.tolist() == [2] * 15 + [1] * 5 + [4] * 20

    @pytest.mark.parametrize(("tokens", "count"), [(10, 5), (10, 0), (68, 1)])
    def test_what_the_modules_do_not_give_is_refused(self, tokens, count):
        with pytest.raises(ValueError, match="modules"):
            windows(self.MODULES, tokens, count)


class TestFormats:
    def test_native_comes_first_whether_it_is_named_or_not(self):
        assert [kept.name for kept in formats_of(["q8", "bfloat16"])] == [
            "native", "bfloat16", "q8"
        ]  # fmt: skip
        assert formats_of([]) == formats_of(["native"])

    def test_an_unknown_name_is_told_beside_the_known_ones(self):
        with pytest.raises(UnknownFormatError, match=r"'q5'; expected some of native, bfloat16"):
            formats_of(["q5"])

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"kv_colour": True}, r"'odd' sets PagerConfig.kv_colour, which this version does not"),
            ({"kv_dtype": "q5"}, r"'odd': PagerConfig.kv_dtype is 'q5'"),
        ],
    )
    def test_a_format_that_the_pager_does_not_have_is_refused(self, fields, message, monkeypatch):
        odd = Format("odd", fields)
        monkeypatch.setattr(kv_formats, "FORMATS", {**FORMATS, "odd": odd})
        with pytest.raises(UnknownFormatError, match=message):
            formats_of(["odd"])

    @pytest.mark.parametrize("percent", [100, 10])
    def test_a_config_reads_no_more_of_the_context_than_asked(self, percent):
        config = format_quality.config_of(FORMATS["q8"], 4096, percent)
        assert config.kv_dtype == "q8"
        assert config.selection.kind == ("dense" if percent == 100 else "topk")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.2,
    )
    return Qwen3ForCausalLM(config).eval()


def engine_of(model, **fields):
    config = PagerConfig(pool_tokens=1024, rows=64, small_rows="fixed", **fields)
    return Engine(model, config)


class TestLogits:
    IDS = np.random.default_rng(0).integers(8, 128, 130, dtype=np.int32)

    def test_they_are_those_of_a_prefill_of_what_comes_before_each_token(self, model):
        with engine_of(model) as engine:
            logits = last_logits(engine, self.IDS, 70)
            assert logits.shape == (70, 128)
            for row in (0, 69):
                with engine.session() as session:
                    session.prefill(self.IDS[: len(self.IDS) - 70 + row])
                    assert torch.equal(session.logits, logits[row])

    def test_those_after_a_file_differ_only_if_the_file_has_other_numbers(self, model):
        with engine_of(model) as engine:
            logits = last_logits(engine, self.IDS, 70)
            same = logits_after_a_file(engine, self.IDS, 70, "float32")
            coded = logits_after_a_file(engine, self.IDS, 70, "q8")
        assert torch.equal(same, logits)
        assert not torch.equal(coded, logits)
        assert divergence.kl_divergences(logits, coded).max() < 0.01

    def test_a_row_has_the_distance_from_native(self, model):
        cut = Cut(130, [self.IDS, self.IDS[::-1].copy()], 64)
        report = make_report("quality_formats", COLUMNS, [row()])
        told = []
        for fields in ({}, {"kv_dtype": "q8"}):
            with engine_of(model, **fields) as engine:
                told.append([last_logits(engine, ids, 64) for ids in cut.windows])
        names = {"by": "kvpager", "read": 100, "token_bytes": 1}
        plain = cut.add(report, told[0], told[0], told[0], format="native", **names)
        coded = cut.add(report, told[0], told[0], told[1], format="q8", **names)
        assert (plain["kl"], plain["same_top"], plain["tokens"]) == (0, 100, 128)
        assert 0 < coded["kl"] < coded["kl_p99"] < 0.1
        assert coded["kl_of_all"] == coded["kl"]
        assert coded["kl_se"] > 0


def row(**changes):
    told = {
        "by": "kvpager", "format": "native", "context": 4096, "read": 100, "windows": 2,
        "tokens": 64, "token_bytes": 512, "perplexity": 4.5, "kl": 0.0, "kl_se": 0.0,
        "kl_p99": 0.0, "same_top": 100.0, "kl_of_all": 0.0,
    }  # fmt: skip
    return told | changes


def texts_report(*rows):
    settings = {
        "windows": {"4096": 8, "32768": 2},
        "scored": 512,
        "model": "tiny-coder",
        "formats": {"q8": {}},
    }
    return make_report("quality_formats", COLUMNS, [row(), *rows], settings=settings)


def some_rows():
    kls = {"q8": 1e-4, "k8v4": 1e-3, "q4": 4e-3, "q4 not rotated": 2e-3}
    return [
        row(format=name, context=context, kl=kl, kl_of_all=kl)
        for name, kl in kls.items()
        for context in (4096, 32768)
    ] + [
        row(by="llama.cpp", format="f32", token_bytes="n/a", kl_of_all=1e-9),
        row(by="llama.cpp", format="q4_0", token_bytes="n/a", kl=8e-3),
        row(read=10, context=32768, kl_of_all=0.5),
        row(format="q8", read=10, context=32768, kl=1e-3, kl_of_all=0.25),
    ]


def test_formats_are_judged_by_order_and_stand_beside_caches_of_as_many_bits():
    report = texts_report(*some_rows())
    format_quality.judge(report)
    held = {verdict.claim: verdict.holds for verdict in report.verdicts}
    assert held == {
        "keys of 8 bits and values of 4 cost more than 8 bits for both": True,
        "4 bits for both cost more than for values alone": True,
        "q4 is nearer to native with rotation than without": False,
        "llama.cpp has the same model at 4K": True,
    }
    (beside,) = report.comparisons
    assert (beside.peer, beside.ours, beside.theirs) == ("llama.cpp, q4_0", 4e-3, 8e-3)
    assert beside.ratio == pytest.approx(2)


def needles_report(found):
    rows = [
        {"keys": keys, "format": name, "context": 16384, "read": read, "found": count, "asked": 32,
         "mass_recall": "n/a"}
        for name, count in found.items()
        for keys in ("trained", "plain")
        for read in (100, 10)
    ]  # fmt: skip
    return make_report("quality_needles", NEEDLE_COLUMNS, rows)


def test_lengths_that_were_measured_before_are_kept_if_they_were_measured_alike(tmp_path):
    before = texts_report(row(format="q8", context=32768, kl=1e-4))
    path = before.write(tmp_path)
    settings = {**before.settings, "windows": {"32768": 3}, "formats": {"q4": {}}}
    report = make_report("quality_formats", COLUMNS, [row(context=32768)], settings=settings)
    format_quality.keep_lengths(report, path, [32768])
    assert [kept["context"] for kept in report.rows] == [32768, 4096]
    assert report.settings["windows"] == {"4096": 8, "32768": 3}
    assert report.settings["formats"] == {"q8": {}, "q4": {}}
    assert list(report.settings["measured"]) == ["4096", "32768"]
    report.settings["scored"] = 256
    with pytest.raises(ValueError, match="measured with scored 512; expected 256"):
        format_quality.keep_lengths(report, path, [32768])
    with pytest.raises(ValueError, match=r"there is no other\.json"):
        format_quality.keep_lengths(report, tmp_path / "other.json", [32768])


def test_a_format_that_loses_needles_is_said():
    report = needles_report({"native": 32, "q8": 32, "q4": 30})
    format_quality.judge_needles(report)
    assert [verdict.holds for verdict in report.verdicts] == [True, False]
    assert "2 of 32 fewer" in report.verdicts[1].evidence


def test_the_page_has_a_table_of_formats_one_of_shares_and_one_of_needles():
    reports = {
        "quality_formats": texts_report(*some_rows()),
        "quality_needles": needles_report({"native": 32, "q4": 30}),
    }
    text = pages.kv_formats_text(reports)
    assert "windows: 8 of 4K, 2 of 32K tokens, of which the last 512 are scored" in text
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    (ours,) = (cells for cells in lines if cells[:2] == ["kvpager", "q8"])
    assert ours[2:5] == ["512", "0.00010 ± 0", "0.00010 ± 0"]
    (theirs,) = (cells for cells in lines if cells[:2] == ["llama.cpp", "q4_0"])
    assert theirs[2:5] == ["", "0.0080 ± 0", ""]
    assert ["q8", "0.0010 ± 0", "0.25", "4.5000"] in lines
    assert ["q4", "30", "30", "30", "30"] in lines
    assert pages.kv_formats_text({}) is None


def test_the_picture_says_what_the_longest_context_costs():
    picture, report = picture_of("quality_formats"), texts_report(*some_rows())
    assert "at 32K moves by 0.00010 nats in q8, 0.0010 nats in k8v4" in picture.message(report)
    assert "(tiny-coder)" in picture.told_beside(report)


def test_the_picture_has_a_line_for_every_format_that_differs():
    (axis,) = picture_of("quality_formats").draw(texts_report(*some_rows())).axes
    assert len(axis.lines) == 5


class TestOtherCaches:
    def read(self, monkeypatch, model, saved):
        monkeypatch.setattr(kv_caches.environments, "find", lambda name: None)

        def call(name, script, task, timeout):
            assert (name, script) == ("llama", "llama_logits")
            with np.load(task["weights"]) as weights:
                assert weights["model.layers.1.self_attn.q_proj.weight"].shape == (64, 64)
            assert (task["shape"]["tied"], task["shape"]["rope_base"]) == (False, 10000.0)
            np.save(f"{task['folder']}/logits.npy", saved)
            return {"files": {kept: ["logits.npy"] for kept in task["caches"]}}

        monkeypatch.setattr(kv_caches.environments, "call", call)
        ids = np.arange(9, dtype=np.int32)
        with kv_caches.logits(kv_caches.LLAMA, model, [ids], 4, 1) as caches:
            assert list(caches) == ["f32", "f16", "q8_0", "q4_0"]
            return caches["q8_0"][0]()

    def test_their_logits_are_read_where_they_lie(self, monkeypatch, model):
        saved = np.ones((4, 128), dtype=np.float32)
        assert (self.read(monkeypatch, model, saved) == 1).all()

    @pytest.mark.parametrize("saved", [np.ones((3, 128)), np.full((4, 128), np.nan)])
    def test_logits_of_another_shape_and_nan_are_refused(self, monkeypatch, model, saved):
        with pytest.raises(PeerError, match="logits, not all of them finite"):
            self.read(monkeypatch, model, saved)

    def test_a_peer_that_is_not_there_is_left_out_with_the_reason(self, monkeypatch, model):
        missing = Missing(kv_caches.environments.PEERS["quanto"], "not installed")
        monkeypatch.setattr(kv_caches.environments, "find", lambda name: missing)
        report = texts_report()
        cut = Cut(64, [np.arange(64, dtype=np.int32)], 8)
        format_quality.measure_peer(report, kv_caches.QUANTO, model, cut, [], 1)
        assert [(s.peer, s.reason) for s in report.skipped] == [
            ("transformers' QuantizedCache (quanto 0.2.7)", "not installed")
        ]


def test_codes_measures_the_dtypes_that_the_pager_has():
    kept = [dtype for dtype in codes.AIMS if dtype in KV_DTYPES]
    assert kept[0] == "q8"
    sizes = [Case("16/8/128", dtype, 2048).row_bytes for dtype in (codes.PLAIN, *kept)]
    assert sizes == sorted(sizes, reverse=True)
    for dtype, size in zip(kept, sizes[1:]):
        assert sizes[0] / size >= codes.AIMS[dtype].smaller
