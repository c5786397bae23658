"""Code that reads numbers of tensors, or chance, is refused at the start, by name."""

from __future__ import annotations

import os
import random
import secrets
import sys
import time
import warnings

import numpy as np
import pytest
import torch
from own_code import with_block
from reference_models import build, make_engine, prompt

from kvpager import UnsupportedModelError
from kvpager._model.watch.looks import only_looks


@pytest.fixture(autouse=True)
def no_module_of_a_user():
    yield
    sys.modules.pop("users_module", None)


GENERATOR = np.random.default_rng(3)


def any_of_a_comparison(self, x):
    return x * 2 if (x == 7).any() else x


def number(self, x):
    return x * int(x[0, 0, 0])


def item(self, x):
    return x * x.max().item()


def list_of_numbers(self, x):
    return x * x[0, 0].tolist()[0]


def numpy_array(self, x):
    return x * float(np.asarray(x.float())[0, 0, 0])


def iterated(self, x):
    return x * sum(1 for row in x[0, 0] if row > 0)


def text_of_a_tensor(self, x):
    return x * len(str(x[0, 0, 0]))


def chosen_by_a_mask(self, x):
    return x + x[x > 0].mean()


def places_of_numbers(self, x):
    return x + (x > 0).nonzero().shape[0]


def distinct_numbers(self, x):
    return x + len(torch.unique(x))


def equal_tensors(self, x):
    return x if torch.equal(x, x * 1) else -x


def close_tensors(self, x):
    return x if torch.allclose(x, x * 1) else -x


def index_of_a_list(self, x):
    return x * [1.0, 2.0][(x[0, 0, 0] > 0).long()]


def address(self, x):
    return x * (1 + x.data_ptr() % 2)


def elements_by_a_function(self, x):
    return x + torch.zeros(3).apply_(lambda number: number + 1)[0]


def packed_for_others(self, x):
    return x * len(str(torch.utils.dlpack.to_dlpack(x)))


def caught(self, x):
    try:
        return x * x.max().item()
    except Exception:
        return x


def scripted(x: torch.Tensor) -> torch.Tensor:
    if bool((x > 0).any()):
        x = x * 2
    return x


def of_a_script(self, x):
    return self.scripted(x)


def file(self, x):
    with open(__file__) as opened:  # noqa: PTH123
        return x * len(opened.read(1))


def random_branch(self, x):
    return x * 2 if random.random() < 0.01 else x


def random_tensor(self, x):
    return x * 2 if bool(torch.rand(()) < 0.01) else x


def random_numbers_added(self, x):
    return x + torch.rand(()) * 0


def random_branch_of_numpy(self, x):
    return x * 2 if np.random.rand() < 0.01 else x  # noqa: NPY002


def a_generator_of_its_own(self, x):
    return x * 2 if GENERATOR.random() < 0.01 else x


def a_new_generator(self, x):
    return x * 2 if np.random.default_rng().random() < 0.01 else x


def chance_of_the_system(self, x):
    return x * 2 if os.urandom(1) == b"a" else x


def secret(self, x):
    return x * 2 if secrets.randbelow(100) == 0 else x


def clock(self, x):
    return x * 2 if time.time() % 1000 < 1 else x


def dropped_out(self, x):
    return torch.nn.functional.dropout(x, 0.001, training=True)


READING = (
    *(any_of_a_comparison, number, item, list_of_numbers, numpy_array, iterated),
    *(text_of_a_tensor, chosen_by_a_mask, places_of_numbers, distinct_numbers, equal_tensors),
    *(close_tensors, index_of_a_list, address, elements_by_a_function, packed_for_others),
    *(caught, of_a_script, file),
)
CHANCE = (
    *(random_branch, random_tensor, random_numbers_added, random_branch_of_numpy),
    *(a_generator_of_its_own, a_new_generator, chance_of_the_system, secret, clock, dropped_out),
)


def model_that_reads(read):
    """The function, in a module of its own that has what it looks up here."""
    model, block, _ = with_block()
    type(block).read = read
    if read is of_a_script:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            vars(block)["scripted"] = torch.jit.script(scripted)
    return model


@pytest.mark.parametrize("read", READING, ids=lambda read: read.__name__)
def test_code_that_reads_numbers_of_a_tensor_is_refused_by_name(read, closing):
    with pytest.raises(UnsupportedModelError, match=read.__name__) as refused:
        closing(make_engine(model_that_reads(read)))
    assert "test_reading.py, line " in str(refused.value)
    assert "torch.where" in str(refused.value)


@pytest.mark.parametrize("read", CHANCE, ids=lambda read: read.__name__)
def test_code_that_draws_by_chance_or_by_the_clock_is_refused(read, closing):
    with pytest.raises(UnsupportedModelError):
        closing(make_engine(model_that_reads(read)))


def test_a_hook_that_reads_is_refused_and_let_pass_where_it_is_marked(closing):
    model, seen = build("llama"), []

    def hook(module, given, output):
        seen.append(float(output.abs().max()))

    handle = model.model.layers[0].register_forward_hook(hook)
    with pytest.raises(UnsupportedModelError, match=r"hook.*test_reading\.py, line"):
        closing(make_engine(model))
    handle.remove()
    model.model.layers[0].register_forward_hook(only_looks(hook))
    model.model.layers[1].register_forward_hook(lambda module, given, output: output * 1.0)
    session = closing(closing(make_engine(model)).session())
    session.prefill(prompt(20))
    assert seen


def masked(self, x):
    return torch.where(x > 0, x, x * 0.5) + self.inner.up_proj(x[..., :256] * 0)[..., :256]


def selected(self, x):
    first = torch.topk(x, 4, dim=-1).indices
    made = x.clone()
    made[x > 3] = 3.0
    return made + x.gather(-1, first).sum(-1, keepdim=True) * 1e-3


def only_for_three_rows(self, x):
    """Which no forward has."""
    return x * x.max().item() if x.shape[1] == 3 else x


@pytest.mark.parametrize(
    "read", [masked, selected, only_for_three_rows], ids=lambda read: read.__name__
)
def test_code_of_tensors_alone_is_taken(read, closing):
    session = closing(closing(make_engine(model_that_reads(read))).session())
    session.prefill(prompt(20))
    session.generate(3, eos=None)


def test_a_start_leaves_torch_and_the_profile_as_they_were(closing):
    events = []

    def profile(frame, event, called):
        events.append(event)

    sys.setprofile(profile)
    try:
        with pytest.raises(UnsupportedModelError):
            closing(make_engine(model_that_reads(item)))
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(None)
    assert float(torch.ones(1)) == 1
    assert events
