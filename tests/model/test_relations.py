"""Every way to the same tokens gives the bits of a cold run, for a pairwise selection of models.

`make verify-all` shows the same for every combination, with more lengths and in fresh processes.
"""

from __future__ import annotations

import itertools

import matrix
import pytest
import torch
from matrix import DIMENSIONS, Case, lacking, pairs

from kvpager.verify import RELATIONS, Subject, verify

HERE = [relation for relation in RELATIONS if not relation.processes]
ELSEWHERE = [relation for relation in RELATIONS if relation.processes]
CASES = matrix.pairwise()


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def assert_kept(report, relations):
    names = [outcome.relation for outcome in report.outcomes]
    assert names == list(dict.fromkeys(["self-consistent", *(each.name for each in relations)]))
    assert report.kept, report.verdict()
    for outcome in report.outcomes:
        compared = outcome.comparison.bits > 0 or outcome.measures
        assert outcome.status == "does not apply" or compared, outcome.relation


@pytest.mark.parametrize(
    ("case", "threads"), [(case, case.threads) for case in CASES], ids=str, indirect=["threads"]
)
def test_every_relation_holds(case, threads):
    with Subject(case.model(), case.config, effort="start") as subject:
        assert_kept(verify(subject, HERE), HERE)


@pytest.mark.parametrize(
    ("selection", "kv_dtype"),
    [
        pytest.param("dense", "auto", id="dense"),
        pytest.param("dense", "q8", id="q8"),
        pytest.param("topk", "auto", id="topk", marks=pytest.mark.deep),
    ],
)
def test_relations_between_processes_hold(selection, kv_dtype):
    case = Case("qwen3", "bfloat16", 256, True, torch.get_num_threads(), 2, selection, kv_dtype)
    with Subject(case.model(), case.config, effort="start") as subject:
        assert_kept(verify(subject, ELSEWHERE), ELSEWHERE)


def test_the_chosen_cases_hold_every_pair_of_values():
    assert lacking(CASES, every_combination()) == set()
    most = sorted(map(len, DIMENSIONS.values()))[-2:]
    assert most[0] * most[1] <= len(CASES) <= 2 * most[0] * most[1]


def test_the_full_matrix_holds_every_combination_and_every_group_with_each_value():
    cases = matrix.full()
    assert len({str(case) for case in cases}) == len(cases) == 5 * 3 * 2 * 2 * 2 * 2
    assert lacking(cases, every_combination()) == set()


def test_what_a_selection_lacks_is_found():
    assert lacking(CASES[1:], CASES) != set()
    first = CASES[0]
    assert lacking([first], [first]) == set()
    assert len(pairs(first)) == len(DIMENSIONS) * (len(DIMENSIONS) - 1) // 2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_case_is_the_model_it_says(case):
    model = case.model()
    config = model.config
    assert config.model_type == case.architecture
    assert str(model.dtype) == f"torch.{case.dtype}"
    assert config.hidden_size == case.hidden
    assert config.num_attention_heads == case.group * config.num_key_value_heads
    weights = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (weights[0].data_ptr() == weights[1].data_ptr()) == case.tied
    assert case.config.selection.kind == case.selection


def every_combination():
    return [Case(*values) for values in itertools.product(*DIMENSIONS.values())]
