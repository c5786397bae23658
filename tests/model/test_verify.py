"""The contract harness: every relation holds, and none does once its property is broken."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from reference_models import CHUNK, ROWS, SHIPPED, build

from kvpager import (
    CapacityError,
    Engine,
    InvalidArgumentError,
    NonFiniteError,
    Pager,
    PagerConfig,
    PagerError,
    Session,
    TopK,
)
from kvpager._model.seam.causal_lm import Head
from kvpager._model.weights.digests import weights_digest
from kvpager._runtime.execution.runner import Runner
from kvpager._runtime.execution.unchanged import Unchanged
from kvpager._runtime.gradients import scored
from kvpager._runtime.scheduling import packing
from kvpager._runtime.text.transcript import Transcript
from kvpager.errors import VerificationError
from kvpager.pager import Forward, Sequence
from kvpager.verify import (
    RELATIONS,
    Comparison,
    Relation,
    Subject,
    check_relation,
    child,
    relation,
    verify,
    verify_engine,
    verify_selections,
)
from kvpager.verify import subject as subjects
from kvpager.verify.run import moved_order

HERE = [each for each in RELATIONS if not each.processes]
CONFIG = PagerConfig(pool_tokens=8 * CHUNK, rows=ROWS, chunk_tokens=CHUNK, host_bytes="256MiB")


@pytest.fixture
def subject():
    """The shipped model."""
    with Subject(build(SHIPPED), CONFIG) as subject:
        yield subject


@pytest.fixture
def subject_of_torch():
    """The shipped model with torch's products, which differ with the number of rows."""
    with Subject(build(SHIPPED), CONFIG.replace(linear="torch")) as subject:
        yield subject


def statuses(report):
    return {outcome.relation: outcome.status for outcome in report.outcomes}


# Every relation holds.


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        ("mistral", "bfloat16"),
        pytest.param("llama", "float32", marks=pytest.mark.deep),
        pytest.param("qwen3", "float16", marks=pytest.mark.deep),
    ],
)
def test_every_relation_within_a_process_holds(architecture, dtype):
    with Subject(build(architecture, dtype), CONFIG) as subject:
        report = verify(subject, HERE)
    assert report.kept, str(report)
    found = statuses(report)
    assert found.pop("equal to transformers") == "within"
    assert set(found.values()) == {"same"}
    least = {"trained": 1_000}  # of log-probabilities alone
    assert all(report.outcome(name).comparison.bits > least.get(name, 100_000) for name in found)


def test_every_relation_within_a_process_holds_under_a_selection_that_chooses():
    config = CONFIG.replace(selection=TopK(chunks=2, sinks=CHUNK, recent=ROWS))
    with Subject(build(SHIPPED), config) as subject:
        report = verify(subject, HERE)
        assert subject.engine().stats()["chunks_evicted"] > 0
    assert report.kept, str(report)
    assert report.outcome("self-consistent").notes == ("rows choose 2 of at most 4 chunks",)


def test_a_mode_that_promises_less_is_held_to_what_it_promises():
    with Subject(build(SHIPPED), CONFIG.replace(exact="reuse")) as subject:
        report = verify(subject, HERE)
    assert report.kept, str(report)
    found = statuses(report)
    assert {name for name, status in found.items() if status == "does not apply"} == {
        "decoded",
        "packed",
        "speculated",
        "trained",
    }
    assert found["warm"] == found["re-sealed"] == "same"


def test_a_mode_that_promises_nothing_is_refused():
    with pytest.raises(InvalidArgumentError, match="promises nothing"):
        Subject(build(SHIPPED), CONFIG.replace(exact=False))


@pytest.mark.deep
def test_every_relation_holds_in_fresh_processes_for_a_model_without_a_folder():
    # Cast as a whole: its rotary frequencies are bfloat16, and transformers does not save them.
    with Subject(build("qwen3", "bfloat16"), CONFIG) as subject:
        workdir = subject.workdir
        report = verify_selections(subject)
    assert report.kept, str(report)
    assert "does not apply" not in statuses(report).values()
    assert not workdir.exists()


@pytest.mark.deep
def test_the_full_form_holds():
    with Subject(build(SHIPPED), CONFIG, effort="full") as subject:
        report = verify_selections(subject)
    assert report.kept, str(report)


def test_a_report_tells_how_much_was_compared_and_is_json(subject):
    report = verify(subject, [relation("trimmed")])
    told = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert told["kept"]
    assert told["compared"]["bits"] == sum(r["comparison"]["bits"] for r in told["relations"])
    assert [r["relation"] for r in told["relations"]] == ["self-consistent", "trimmed"]
    assert told["row_counts"][-1] == ROWS
    assert f"{told['compared']['bits']:,} bits compared, 0 differ" in str(report)


def test_a_prompt_of_the_users_own_is_what_is_run():
    given = np.arange(5, 40)
    with Subject(build(SHIPPED), CONFIG, prompts=[given]) as subject:
        assert subject.prompt[: len(given)].tolist() == given.tolist()
        assert len(subject.prompt) == subject.sweep.length
        assert check_relation(subject, relation("self-consistent")).kept


# It fails closed.


def test_nothing_is_compared_with_a_run_that_does_not_agree_with_itself(subject, monkeypatch):
    nudge_keys(monkeypatch, after=1)
    report = verify(subject, HERE)
    assert not report.kept
    assert report.broken
    found = statuses(report)
    assert found.pop("self-consistent") == "differs"
    assert set(found.values()) == {"not run"}
    assert "self-consistent differs" in report.outcomes[1].reason


def test_a_relation_that_compares_nothing_is_not_kept(subject):
    outcome = check_relation(subject, Relation("empty", "", lambda subject, check: None))
    assert (outcome.status, outcome.reason) == ("not run", "nothing was compared")
    assert not outcome.kept


def test_a_relation_without_room_is_not_run_and_says_why(subject):
    def full(subject, check):
        check.tokens(subject.prompt, subject.prompt)
        raise CapacityError("no room for 4 bytes")

    outcome = check_relation(subject, Relation("full", "", full))
    assert (outcome.status, outcome.kept) == ("not run", False)
    assert "no room for 4 bytes" in outcome.reason


def test_an_error_is_no_kept_promise(subject):
    def raising(subject, check):
        check.tokens(subject.prompt, subject.prompt)
        raise NonFiniteError("a key is NaN")

    outcome = check_relation(subject, Relation("raising", "", raising))
    assert (outcome.status, outcome.reason) == ("failed", "NonFiniteError: a key is NaN")


def test_a_difference_stands_whatever_comes_after_it(subject):
    def differing(subject, check):
        check.tokens(subject.prompt, subject.prompt[::-1])
        raise CapacityError("no room")

    outcome = check_relation(subject, Relation("differing", "", differing))
    assert outcome.status == "differs"
    assert outcome.comparison.first is not None


def test_missing_logits_are_not_taken_for_equal_ones(subject):
    def looking(subject, check):
        cold = subject.cold(subject.prompt)
        check.logits(cold.logits[0], cold, len(subject.prompt) + 5)

    outcome = check_relation(subject, Relation("looking", "", looking))
    assert outcome.status == "not run"
    assert "no logits" in outcome.reason


def test_an_unknown_relation_is_refused_with_all_names():
    with pytest.raises(InvalidArgumentError, match="self-consistent, equal to transformers, warm"):
        relation("decode")


def test_a_subject_gives_the_model_its_own_attention_back_and_leaves_no_files():
    model = build(SHIPPED)
    before = model.config._attn_implementation
    with Subject(model, CONFIG) as subject:
        assert (subject.folder / "config.json").is_file()
        workdir = subject.workdir
    assert model.config._attn_implementation == before
    assert not workdir.exists()


# Each property, broken.


def nudge_keys(monkeypatch, *, when=lambda: True, after=0, layer=1, rows=None):
    """One key of a layer is one ulp off: from some forward on, or in forwards of so many rows."""
    attend = Forward.attend
    seen = {"forwards": 0}

    def nudged(self, at, q, k, v, **call):
        seen["forwards"] += at == 0
        if at == layer and seen["forwards"] > after and when() and rows in (None, len(k)):
            k = k.clone()
            k[0, 0, 0] = torch.nextafter(k[0, 0, 0], torch.tensor(torch.inf, dtype=k.dtype))
        return attend(self, at, q, k, v, **call)

    monkeypatch.setattr(Forward, "attend", nudged)


def broken(subject, name, status="differs"):
    """The outcome of a relation that must not hold."""
    outcome = check_relation(subject, relation(name))
    assert outcome.status == status, f"{outcome.status}: {outcome.reason}"
    assert not outcome.kept
    return outcome


def test_a_key_one_ulp_off_is_found_with_its_layer_position_and_head(subject, monkeypatch):
    subject.cold(subject.prompt)
    nudge_keys(monkeypatch, rows=subject.engine().row_counts.ladder[0])
    first = broken(subject, "decoded").comparison.first
    assert first.place.endswith("keys of layer 1, position 0, head 0, element 0")
    assert first.ulps == 1


def test_the_decode_path_is_swept_and_not_a_prefill_of_single_tokens(subject, monkeypatch):
    # Broken where a pending token gets its row: tokens that are given never come this way.
    decode = packing.Packing.decode
    decoding = []

    def noted(self, session, stream=None):
        decoding.append(self)
        decode(self, session, stream)

    subject.cold(subject.prompt)
    monkeypatch.setattr(packing.Packing, "decode", noted)
    nudge_keys(monkeypatch, when=lambda: bool(decoding))
    assert "generated from 1 to 4" in broken(subject, "decoded").comparison.first.place


def test_another_row_count_for_decode_is_found(subject_of_torch, monkeypatch):
    monkeypatch.setattr(Runner, "count", lambda self, batch: batch.used)
    broken(subject_of_torch, "decoded")
    broken(subject_of_torch, "warm")


def test_a_head_that_runs_on_the_wanted_rows_alone_is_found(subject_of_torch, monkeypatch):
    any_count = Head(subject_of_torch.model, tuple(range(1, ROWS + 1)))
    monkeypatch.setattr(subject_of_torch.engine().core.runner, "head", any_count)
    first = broken(subject_of_torch, "decoded").comparison.first
    assert "logits after position" in first.place


def test_attention_that_depends_on_where_blocks_are_is_found(subject, monkeypatch):
    begin = Pager.begin_spans

    def told(self, spans, tokens, **options):
        forward = begin(self, spans, tokens, **options)
        attend = forward.attend
        owners = [span[0] for span in spans if span[0] is not None]

        def noisy(layer, q, *args, **call):
            out = attend(layer, q, *args, **call)
            return out * (1 + 1e-6 * owners[0].ledger()[-1].block)

        forward.attend = noisy
        return forward

    monkeypatch.setattr(Pager, "begin_spans", told)
    broken(subject, "paged")
    assert not verify(subject, HERE).kept


@pytest.fixture
def leaky(subject, monkeypatch):
    """Makes a layer of the model do something with the other rows of its forward."""

    def leak(change):
        module = subject.model.model.layers[0].mlp
        forward = module.forward
        subject.cold(subject.prompt)
        # An engine that looked at its model would refuse it before anything is compared.
        monkeypatch.setattr(Unchanged, "check_model", lambda *_, **__: None)
        monkeypatch.setattr(module, "forward", lambda x: change(forward(x), x))

    return leak


def test_a_layer_that_depends_on_its_neighbours_is_found(subject, leaky):
    leaky(lambda out, x: out + 1e-4 * x.nan_to_num().mean(dim=1, keepdim=True))
    broken(subject, "packed")


def test_padding_whose_nan_reaches_other_rows_is_found(subject, leaky):
    # Nothing but NaN shows it: zero times any number is zero.
    leaky(lambda out, x: out + 0 * x.sum(dim=1, keepdim=True).abs())
    outcome = check_relation(subject, relation("packed"))
    assert outcome.status in ("differs", "failed")
    assert not outcome.kept


def test_proposals_that_are_taken_unchecked_are_found(subject, monkeypatch):
    from kvpager._runtime.text.transcript import Accepted

    def trusting(share, logits, stream):
        share.transcript.accept(
            Accepted(
                start=share.position + 1,
                tokens=tuple(share.guess),
                logits=logits[1 : 1 + len(share.guess)].clone(),
                sampling=stream.sampling,
            )
        )
        return len(share.guess)

    monkeypatch.setattr(packing, "_confirmed", trusting)
    first = broken(subject, "speculated").comparison.first
    assert "bad proposals" in first.place


def test_proposals_of_which_none_is_ever_accepted_prove_nothing(subject, monkeypatch):
    monkeypatch.setattr(packing, "_confirmed", lambda share, logits, stream: 0)
    assert "no good proposal was accepted" in broken(subject, "speculated", "not run").reason


@pytest.mark.parametrize(
    ("name", "owner", "method"),
    [
        ("warm", Sequence, "adopt_prefix"),
        ("forked", Session, "fork"),
        ("trimmed", Session, "trim"),
        ("paged", Pager, "evict_all"),
    ],
)
def test_bits_that_depend_on_what_happened_before_are_found(
    subject, monkeypatch, name, owner, method
):
    original = getattr(owner, method)
    happened = []

    def noted(self, *args):
        happened.append(method)
        return original(self, *args)

    subject.cold(subject.prompt)
    monkeypatch.setattr(owner, method, noted)
    nudge_keys(monkeypatch, when=lambda: bool(happened))
    broken(subject, name)


def test_a_prefix_that_is_computed_again_is_no_reuse(subject, monkeypatch):
    monkeypatch.setattr(Sequence, "adopt_prefix", lambda self, ids: 0)
    assert "0 tokens reused, expected 16" in broken(subject, "warm", "failed").reason


def test_eviction_that_never_happens_proves_nothing(subject, monkeypatch):
    monkeypatch.setattr(type(subject.sweep), "least_pool", property(lambda self: 4096))
    monkeypatch.setattr(Pager, "evict_all", lambda self: 0)
    assert "no chunk was evicted" in broken(subject, "paged", "not run").reason


def test_rows_that_are_never_moved_prove_nothing(subject, monkeypatch):
    from kvpager.verify.runners import DisturbedRunner

    monkeypatch.setattr(DisturbedRunner, "run", lambda self, batch: self._inner.run(batch))
    assert "not all of it was tried" in broken(subject, "packed", "not run").reason


def test_provisional_rows_that_are_sealed_are_found(subject_of_torch, monkeypatch):
    monkeypatch.setattr(Transcript, "must_recompute", property(lambda self: False))
    outcome = check_relation(subject_of_torch, relation("re-sealed"))
    assert outcome.status in ("differs", "failed")
    assert not outcome.kept


def test_padding_that_is_never_poisoned_hides_a_leak(subject, leaky, monkeypatch):
    """The poison is what finds it: without it the leak of the test above stays unseen."""
    from kvpager.verify import runners

    monkeypatch.setattr(runners, "_answer_padding_with_nan", lambda forward, padding: None)
    leaky(lambda out, x: out + 0 * x.sum(dim=1, keepdim=True).abs())
    assert check_relation(subject, relation("packed")).status == "same"


# In fresh processes.


@pytest.fixture
def in_broken_children(monkeypatch):
    """Fresh processes of the harness have a property broken; see broken_child.py."""

    def breaking(what):
        monkeypatch.setattr(subjects, "_CHILD", "broken_child")
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
        monkeypatch.setenv("KVPAGER_BROKEN", what)

    return breaking


def test_log_probabilities_that_gradients_change_are_found(subject, monkeypatch):
    own = Runner.traced

    def moved(self, batch, trace):
        hidden, logits = own(self, batch, trace)
        return hidden, logits * (1 + 1e-6)

    monkeypatch.setattr(Runner, "traced", moved)
    assert "log-probabilities" in broken(subject, "trained").comparison.first.place


def test_texts_that_take_a_forward_each_are_found(subject, monkeypatch):
    own = scored.pieces
    monkeypatch.setattr(scored, "pieces", lambda *args: ([p] for some in own(*args) for p in some))
    assert "computed once" in broken(subject, "trained", "failed").reason


def test_scoring_that_decodes_is_no_rescoring(subject, in_broken_children):
    in_broken_children("score")
    outcome = broken(subject, "re-scored", "failed")
    assert outcome.comparison.same  # the bits are right, and prove nothing
    assert "they are given and need no decoding" in outcome.reason


def test_a_fresh_process_with_other_bits_is_found(subject, in_broken_children):
    in_broken_children("kernels")
    first = broken(subject, "restored").comparison.first
    assert "keys of layer 1" in first.place
    assert first.ulps == 1


@pytest.mark.deep
def test_a_kernel_tier_with_other_bits_is_found(subject, in_broken_children):
    in_broken_children("kernels")
    assert "tier base" in broken(subject, "kernel tiers").comparison.first.place


def test_a_fresh_process_that_dies_is_told_and_not_kept(subject, monkeypatch):
    monkeypatch.setattr(subjects, "_CHILD", "no_such_module_anywhere")
    outcome = broken(subject, "re-scored", "not run")
    assert "no_such_module_anywhere" in outcome.reason


def test_a_folder_that_holds_another_model_is_told(tmp_path):
    job = {
        "model": str(Path(__file__).parents[2] / "models" / "tiny-retriever-plain"),
        "weights": weights_digest(build(SHIPPED)),
        "dtype": "float32",
        "experts": None,
        "threads": torch.get_num_threads(),
        "tasks": [],
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert child.main([str(tmp_path / "job.json")]) == 1
    told = json.loads((tmp_path / "result.json").read_text())
    assert told["kind"] == "InvalidArgumentError"
    assert told["error"].startswith("load: ")
    assert "holds weights" in told["error"]


# The short form of an engine.


def test_an_engine_that_was_verified_is_as_one_that_was_not():
    model = build(SHIPPED)
    with Engine(model, CONFIG, verify=verify_engine) as engine, Engine(model, CONFIG) as plain:
        counted = {name for name, value in engine.stats().items() if value != plain.stats()[name]}
        assert not {name for name in counted if not name.startswith("seconds")}
        session, other = engine.session(), plain.session()
        for each in (session, other):
            each.prefill(range(5, 60))
        assert (
            session.generate(5, eos=None).tokens.tolist()
            == other.generate(5, eos=None).tokens.tolist()
        )


def test_a_verified_engine_refuses_to_exist_where_a_bit_differs(monkeypatch):
    model = build(SHIPPED)
    before = model.config._attn_implementation
    monkeypatch.setattr(Runner, "count", lambda self, batch: batch.used)
    with pytest.raises(VerificationError) as caught:
        Engine(model, CONFIG.replace(linear="torch"), verify=verify_engine)
    assert isinstance(caught.value, PagerError)
    assert caught.value.report.broken
    assert isinstance(caught.value.report.compared, Comparison)
    assert "bits in" in str(caught.value)
    assert model.config._attn_implementation == before


def test_a_verified_engine_of_a_mode_that_promises_nothing_is_refused():
    model = build(SHIPPED)
    before = model.config._attn_implementation
    with pytest.raises(InvalidArgumentError, match="nothing to verify"):
        Engine(model, CONFIG.replace(exact=False), verify=verify_engine)
    assert model.config._attn_implementation == before


def test_what_is_no_check_is_refused_before_anything_runs():
    with pytest.raises(InvalidArgumentError, match=r"verify is True; expected a check, such as"):
        Engine(build(SHIPPED), CONFIG, verify=True)


# A second pass.


def test_a_second_pass_calls_in_another_order_over_other_tokens():
    order = [each.name for each in moved_order(1)]
    first = [each.name for each in RELATIONS if each.name in order]
    assert order[0] == first[0]
    assert order != first
    assert set(order) == {each.name for each in HERE if not each.once}
    with Subject(build(SHIPPED), CONFIG, effort="start") as subject, subject.again("x") as other:
        assert other.selection.endswith(", x")
        assert other.config == subject.config
        assert other.prompt.tolist() != subject.prompt.tolist()


def test_a_fault_of_one_call_in_many_is_seen_by_the_second_pass(monkeypatch):
    """One that the first pass cannot see: keys are wrong after a trim that a fork came before."""
    original_fork, original_trim = Session.fork, Session.trim
    after = {"forked": True}

    def fork(self):
        after["forked"] = True
        return original_fork(self)

    def trim(self, *args, **options):
        kept = original_trim(self, *args, **options)
        if not after["forked"]:
            nudge_keys(monkeypatch, after=0)
        return kept

    monkeypatch.setattr(Session, "fork", fork)
    monkeypatch.setattr(Session, "trim", trim)
    with Subject(build(SHIPPED), CONFIG, effort="start") as subject:
        first = verify(subject, [relation(name) for name in ("forked", "trimmed")])
        assert first.kept, str(first)
        after["forked"] = False
        with subject.again("calls moved") as other:
            second = verify(other, [relation(name) for name in ("trimmed", "forked")])
    assert second.outcome("trimmed").status == "differs"


def test_a_report_tells_the_lengths_that_were_tried(subject):
    report = verify(subject, [relation("warm"), relation("forked")])
    assert len(subject.prompt) in report.lengths
    assert report.lengths == sorted(set(report.lengths))
    assert report.to_json()["lengths"] == report.lengths
