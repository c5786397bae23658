"""Recorded calls of torch as programs of the core: the same bits, in one call for many."""

from __future__ import annotations

import signal
from itertools import groupby, pairwise
from types import SimpleNamespace

import pytest
import torch
from bits import assert_same_bits
from torch.nn.utils.parametrize import register_parametrization

from kvpager import InvalidArgumentError, PagerConfig, _core
from kvpager._model.seam.linear import LinearLayers, computing
from kvpager._model.seam.observe import Recorder
from kvpager._runtime.execution import operations, programs
from kvpager._runtime.execution.operations import Alike, Memory, Op, lower
from kvpager._runtime.execution.recordings import recorded
from kvpager.pager import Layout, Pager

TOKENS, PLACES = torch.tensor([3, 1, 2]), torch.tensor([0, 1, 2])
OTHERS = torch.tensor([5, 5, 0]), torch.tensor([9, 4, 7])
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def workers():
    return _core.Workers(2)


def noise(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator(CPU).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=CPU).to(dtype)


def function_of(target):
    return getattr(torch.Tensor, target) if isinstance(target, str) else target


def called(target):
    """A call as a recording has it: a function, or the name of a method."""
    return SimpleNamespace(target=target)


silu = torch.nn.functional.silu
gelu = torch.nn.functional.gelu
TANH = {"approximate": "tanh"}
X = noise(1, 5, 1024)
B = noise(1, 5, 1024, dtype=torch.bfloat16)
HEADS = noise(1, 5, 16, 128, dtype=torch.bfloat16).transpose(1, 2)
COS = noise(1, 1, 5, 128, dtype=torch.bfloat16)

KNOWN = {
    "product": ("mul", (B, B), {}),
    "of two dtypes": ("mul", (X, B), {}),
    "by a vector": ("mul", (B[0, 0], B), {}),
    "by one of each row": ("mul", (X, X[..., :1]), {}),
    "by a number": ("mul", (X, 0.3), {}),
    "plus a number": ("__radd__", (X, 1), {}),
    "of elements that are apart": ("add", (X[..., ::3], 1e-6), {}),
    "of heads": ("mul", (HEADS, COS), {}),
    "sum": (torch.add, (HEADS, HEADS), {}),
    "difference": ("sub", (B, B), {}),
    "negative": ("neg", (HEADS[..., 64:],), {}),
    "square": ("pow", (X, 2), {}),
    "root": (torch.rsqrt, (X.abs(),), {}),
    "widened": ("to", (B, torch.float32), {}),
    "rounded": ("to", (X, torch.bfloat16), {}),
    "in half": ("half", (X,), {}),
    "as another": ("type_as", (X, B), {}),
    "laid out anew": ("reshape", (HEADS, 1, 5, -1), {}),
    "contiguous": ("contiguous", (HEADS,), {}),
    "side by side": (torch.cat, ((HEADS[..., 64:], HEADS[..., :64]),), {"dim": -1}),
    "activation": (silu, (noise(1, 8, 3072),), {"inplace": False}),
    "activation in 16 bits": (silu, (noise(16, 2048, dtype=torch.bfloat16),), {}),
    "activation, half": (silu, (HEADS.reshape(1, 5, -1).half(),), {}),
    "activation with a tangent": (gelu, (noise(9, 2048),), TANH),
    "activation with a tangent in 16 bits": (gelu, (noise(2, 6912, dtype=torch.bfloat16),), TANH),
    "activation with a tangent, half": (gelu, (HEADS.reshape(1, 5, -1).half(),), TANH),
    "one behind the other": (torch.cat, ([X, X], 1), {}),
    "nothing beside it": (torch.cat, ((X, X[..., :0]),), {"dim": -1}),
    **{
        f"mean of {n}, {rows} rows": ("mean", (noise(rows, n), -1), {"keepdim": True})
        for rows, n in [(1, 8), (5, 100), (16, 128), (3, 896), (1, 1024), (2, 5120), (1, 16384)]
    },
    "mean without its dimension": ("mean", (X, [-1]), {}),
}


@pytest.mark.parametrize("name", KNOWN)
def test_calls_that_are_known_have_the_bits_of_torch(workers, name):
    target, args, kwargs = KNOWN[name]
    made = function_of(target)(*args, **kwargs)
    assert lower(target, args, kwargs, torch.empty_like(made)) is not None
    assert Alike(workers).same(called(target), args, kwargs)


UNKNOWN = {
    "scaled": ("add", (X, X), {"alpha": 2}),
    "of a number that is rounded first": ("mul", (B, torch.tensor(0.3)), {}),
    "of 16 bits by a number": ("mul", (B, 0.3), {}),
    "of integers": ("mul", (TOKENS, TOKENS), {}),
    "to the third power": ("pow", (X, 3), {}),
    "of all": ("mean", (X,), {}),
    "of rows in 16 bits": ("mean", (B, -1), {}),
    "in another dtype": ("mean", (X, -1), {"dtype": torch.float64}),
    "of columns": ("mean", (X, 1), {}),
    "of nothing": ("mul", (X[:, :0], X[:, :0]), {}),
    "exponential": ("exp", (X,), {}),
    "activation in place": (silu, (X.clone(),), {"inplace": True}),
    "activation of elements that torch computes one by one": (silu, (noise(5, 1001),), {}),
    "activation of what torch's threads share": (silu, (noise(33, 1024),), {}),
    "tangents that torch computes one by one": (gelu, (noise(5, 1001),), TANH),
    "tangents that torch's threads share": (gelu, (noise(20, 1024),), TANH),
    "an activation with an error function": (gelu, (X,), {}),
    "to another dtype than a float": ("to", (X, torch.float64), {}),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_calls_stay_torchs(name):
    target, args, kwargs = UNKNOWN[name]
    made = function_of(target)(*args, **kwargs)
    assert lower(target, args, kwargs, made) is None


def test_a_known_call_that_has_other_bits_here_stays_torchs(workers):
    row = noise(3, 7)  # torch sums so few in another order
    assert lower("mean", (row, -1), {}, torch.empty(3)) is not None
    assert not Alike(workers).same(called("mean"), (row, -1), {})


class Layers(torch.nn.Module):
    """Products of one input, norms and rotations, as decoders have them."""

    def __init__(self, dtype):
        super().__init__()
        self.table = torch.nn.Embedding(16, 64, dtype=dtype)
        self.q, self.k, self.v, self.unused = (
            torch.nn.Linear(64, n, bias=n == 64, dtype=dtype) for n in (64, 32, 32, 64)
        )
        self.o = torch.nn.Linear(64, 64, bias=False, dtype=dtype)
        self.scale = torch.nn.Parameter(torch.rand(64, dtype=dtype))

    def norm(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.scale * wide.to(x.dtype)

    def turned(self, x, cos, sin):
        half = x.shape[-1] // 2
        other = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * cos + other * sin

    def forward(self, attention, tokens, positions):
        x = self.table(tokens)
        angle = positions[:, None].float() * torch.arange(32, device=CPU) / 7
        cos, sin = angle.cos()[:, None].to(x.dtype), angle.sin()[:, None].to(x.dtype)
        for layer in range(3):
            y = self.norm(x)
            q = self.turned(self.q(y).view(3, 2, 32), cos, sin)
            self.unused(y)
            k = self.turned(self.k(y).view(3, 1, 32), cos, sin)
            v = self.v(y).view(3, 1, 32)
            out = attention.attend(layer, q, k, v, scaling=1.0)
            act = gelu(self.o(silu(out.reshape(3, 64))))
            kept = torch.nn.functional.dropout(x + act, training=False)  # is what it is given
            x = kept + self.norm(self.o(self.norm(act)))
        x[1, 2:] *= 2
        return self.norm(x)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def layers(request):
    torch.manual_seed(0)
    return Layers(request.param).eval()


@pytest.fixture
def replayed(layers, workers):
    """A function that computes by a recording what the layers compute, and by themselves."""
    own = LinearLayers(layers, workers)
    with torch.inference_mode():
        replay = recorded(layers, own, TOKENS, PLACES)

    def both(tokens, positions):
        recorders = Recorder(), Recorder()
        with torch.inference_mode(), computing(own):
            return layers(recorders[0], tokens, positions), replay(recorders[1], tokens, positions)

    both.graph = replay.graph
    both.replay = replay
    return both


def names(graph):
    """What a recording calls, in order."""
    calls = [node for node in graph.nodes if node.op.startswith("call_")]
    return [getattr(node.target, "__name__", node.target) for node in calls]


def test_what_is_known_between_two_calls_of_torch_is_one_program(replayed):
    for tokens, positions in (OTHERS, (TOKENS, PLACES), OTHERS):
        expected, made = replayed(tokens, positions)
        assert_same_bits(made, expected, "replayed")
    in_place = ["mul_", "__setitem__"]  # of a view, which costs nothing
    # A dropout that does nothing is a call of torch, before 2.14, and ends a program.
    calls = (name for name in names(replayed.graph) if name != "dropout")
    parts = [name for name, _ in groupby(calls)]
    assert parts[-11:] == [*["run", "gelu"] * 3, "run", *in_place, "run", "clone"]


def test_a_call_with_other_bits_is_no_part_of_a_program():
    table = noise(16, 7)

    def decode(attention, tokens, positions):
        return torch.nn.functional.embedding(tokens, table).mean(-1) * 2

    with torch.inference_mode():
        replay = recorded(decode, None, TOKENS, PLACES)
        assert names(replay.graph) == ["embedding", "mean", "run", "clone"]
        assert_same_bits(replay(None, *OTHERS), decode(None, *OTHERS), "with a mean of torch")


def test_products_that_are_computed_at_once_write_to_memory_of_their_own(
    layers, workers, monkeypatch
):
    made, program = [], _core.Program

    def noted(workers, steps, *memory):
        made.append(steps)
        return program(workers, steps, *memory)

    monkeypatch.setattr(programs._core, "Program", noted)
    with torch.inference_mode():
        recorded(layers, LinearLayers(layers, workers), TOKENS, PLACES)
    groups = []
    for step in (step for steps in made for step in steps if step[0] == "linear"):
        groups = [*groups[:-1], [*groups[-1], step]] if step[4] else [*groups, [step]]
    assert [len(group) for group in groups] == [4, 1, 1] * 3
    size = layers.scale.itemsize
    for group in groups:
        places = sorted((step[3][0][1], step[1][2] * step[1][3] * size) for step in group)
        assert all(at + length <= after for (at, length), (after, _) in pairwise(places))


def test_a_result_stays_as_it_is_when_more_is_replayed(replayed):
    first = replayed(*OTHERS)[1]
    kept = first.clone()
    replayed(TOKENS, PLACES)
    assert_same_bits(first, kept, "the result before")


def test_attention_gets_the_models_tensors(layers, workers):
    own, calls = LinearLayers(layers, workers), []

    class Copies(Recorder):
        def attend(self, layer, q, k, v, **call):
            calls.append((layer, q.clone(), k.clone(), v.clone()))
            return super().attend(layer, q, k, v, **call)

    with torch.inference_mode(), computing(own):
        replay = recorded(layers, own, TOKENS, PLACES)
        layers(Copies(), *OTHERS)
        replay(Copies(), *OTHERS)
    for expected, found in zip(calls[:3], calls[3:], strict=True):
        assert expected[0] == found[0]
        for a, b in zip(expected[1:], found[1:]):
            assert_same_bits(b, a, "given to attention")


class Noted(Recorder):
    """Also notes what it is called with."""

    def __init__(self):
        super().__init__()
        self.given = []

    def attend(self, layer, q, k, v, **call):
        self.given.append((layer, *(each.clone() for each in (q, k, v)), call))
        return super().attend(layer, q, k, v, **call)


SINKS = noise(2, dtype=torch.bfloat16)
TABLE = noise(16, 3 * 2 * 32, seed=1)


def attending(attention, tokens, positions):
    """Attention to what a program cannot read as it is, and with every keyword."""
    x = TABLE[tokens].view(3, 3, 2, 32).unbind(1)
    turned = torch.nn.functional.gelu(x[0].transpose(0, 1)).transpose(0, 1)  # heads outside
    apart = torch.nn.functional.gelu(x[1].transpose(1, 2)).transpose(1, 2)[..., ::2]
    first = attention.attend(0, turned, turned, turned + 1, scaling=0.5, window=None)
    second = attention.attend(
        1, apart, apart, x[2][..., :5], scaling=0.25, window=7, softcap=30.0, sinks=SINKS
    )
    return first.sum(-1) * second.sum(-1)


def test_attention_gets_its_keywords_and_copies_of_what_a_program_cannot_read():
    with torch.inference_mode():
        replay = recorded(attending, None, TOKENS, PLACES)
        expected, found = Noted(), Noted()
        result = attending(expected, *OTHERS)
        assert_same_bits(replay(found, *OTHERS), result, "replayed")
    assert expected.windows == found.windows == {0: None, 1: 7}
    for (layer, *tensors, call), (number, *made, keywords) in zip(expected.given, found.given):
        assert number == layer
        for a, b in zip(tensors, made, strict=True):
            assert_same_bits(b, a, "given to attention")
        assert keywords.pop("out").shape == (3, 2, tensors[-1].shape[-1])
        sinks, other = call.pop("sinks", None), keywords.pop("sinks")
        assert keywords == call
        assert (sinks is None) == (other is None)
        if sinks is not None:
            assert_same_bits(other, sinks, "sinks")
    assert names(replay.graph).count("clone") == 5  # of queries, keys and the result


def test_an_error_of_attention_ends_a_program_and_is_raised(replayed, layers):
    class Interrupted(Recorder):
        def attend(self, layer, q, k, v, **call):
            if layer == 1:
                raise KeyboardInterrupt
            return super().attend(layer, q, k, v, **call)

    replay = replayed.replay
    with torch.inference_mode(), pytest.raises(InvalidArgumentError, match="attention is None"):
        replay(None, *OTHERS)
    attention = Interrupted()
    with torch.inference_mode(), pytest.raises(KeyboardInterrupt):
        replay(attention, *OTHERS)
    assert [*attention.calls] == [0]
    expected, made = replayed(*OTHERS)
    assert_same_bits(made, expected, "replayed after an error")


@pytest.fixture
def interrupt_soon():
    """A signal that raises KeyboardInterrupt 50 ms after it is asked for."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield lambda: signal.setitimer(signal.ITIMER_REAL, 0.05)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_an_interrupt_ends_a_long_program(workers, interrupt_soon):
    """After an attention: here each of 128 follows a product of 256 MiB."""
    layers, depth = 128, 1 << 13
    x, weight = torch.ones(1, depth), torch.zeros(depth, depth)
    made, heads = torch.empty(1, depth), torch.zeros(1, 1, 16)
    memory = Memory()
    steps = [
        operations.step(op, memory)
        for layer in range(layers)
        for op in (
            Op("linear", made, (x, weight, None)),
            Op("attend", torch.empty_like(heads), (heads,) * 3 + (None,), (layer, {})),
        )
    ]
    program = _core.Program(workers, steps, memory.tensors, [])
    pager = Pager(
        Layout(layers, 1, 16, 16, chunk_tokens=16),
        PagerConfig(4 * 16, chunk_tokens=16),
        rows=1,
        threads=1,
    )
    with pager.begin([pager.sequence()], [0], [0], [0]) as forward:
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            program.run(forward, [])
        with pytest.raises(InvalidArgumentError, match="layer"):
            forward.commit()


def test_weights_are_read_where_they_are(layers, replayed):
    with torch.no_grad():
        layers.k.weight.mul_(3)
        layers.scale.add_(1)
    expected, made = replayed(*OTHERS)
    assert_same_bits(made, expected, "changed weights")


FOUR = (0, 0, "float32", [0, 4, 4, 1])  # elements of a program's memory


def told(name, operands, last=4, *, rows=1, beside=False, call=None):
    """An operation as a program is told of it."""
    depth = 4 if name == "attend" else 0
    return (name, [rows, 1, 1, last], depth, operands, beside, call)


REFUSED = [
    (told("divide", [FOUR] * 2), "operation is"),
    (told("copy", [FOUR] * 2, 9), "outside of the 32"),
    (told("copy", [(2, *FOUR[1:])] * 2), "base is 2"),
    (told("copy", [(0, 0, "int8", FOUR[3])] * 2), "dtype"),
    (told("copy", [FOUR]), "expected memory"),
    (told("copy", []), "0 operands"),
    (told("copy", [FOUR] * 6), "6 operands"),
    (told("copy", [FOUR[:3], None]), "an operand is"),
    (told("copy", ["x", None]), "an operand is 'x'"),
    (told("copy", [FOUR] * 2, beside=True), "beside"),
    (told("copy", [FOUR] * 2, call=(0, {})), "a call"),
    (told("attend", [FOUR] * 4), "a call"),
    (told("attend", [FOUR] * 3, call=(0, {})), "attention: expected memory"),
    (told("attend", [FOUR] * 4, rows=3, call=(0, {})), "out: elements outside"),
    (told("attend", [FOUR] * 4, call=(0, {"window": "far"})), "window is 'far'; expected a number"),
]


@pytest.mark.parametrize(("step", "error"), REFUSED)
def test_a_program_refuses_what_it_cannot_do(workers, step, error):
    with pytest.raises(InvalidArgumentError, match=error):
        _core.Program(workers, [step], [torch.zeros(8)], [])


def test_a_program_refuses_tensors_that_are_not_as_it_was_told(workers):
    steps = [told("copy", [FOUR, (1, *FOUR[1:])])]
    program = _core.Program(workers, steps, [torch.zeros(8)], [16])
    program.run(None, [torch.ones(4)])
    for given in (
        [],
        [torch.ones(5)],
        [torch.ones(4, dtype=torch.int32)],
        [torch.ones(2, 4)[:, :2]],
    ):
        with pytest.raises(InvalidArgumentError, match="expected"):
            program.run(None, given)


def test_a_program_refuses_a_tensor_of_another_dtype_or_shape_of_as_many_bytes(workers):
    steps = [told("copy", [FOUR, (1, *FOUR[1:])])]
    memory = torch.zeros(8)
    program = _core.Program(workers, steps, [memory], [("float32", [2, 2])])
    for given in (torch.ones(4), torch.ones(4, 2, dtype=torch.bfloat16), torch.ones(1, 4)):
        with pytest.raises(InvalidArgumentError, match=r"tensor 0 is .*float32 of shape \(2, 2\)"):
            program.run(None, [given])
    assert not memory.any()
    program.run(None, [torch.ones(2, 2)])
    assert memory.tolist() == [1.0] * 4 + [0.0] * 4


def test_products_stay_behind_what_makes_their_weights(workers):
    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = (torch.nn.Linear(64, 64, bias=False) for _ in range(2))
            for each in (self.gate, self.up):
                register_parametrization(each, "weight", torch.nn.SiLU())
            self.table = torch.nn.Embedding(50, 64)

        def forward(self, attention, tokens, positions):
            x = self.table(tokens) * 2
            return self.gate(x) * self.up(x)

    torch.manual_seed(0)
    model = Gated().eval()
    with torch.inference_mode():
        replay = recorded(model, LinearLayers(model, workers), TOKENS, PLACES)
        for given in ((TOKENS, PLACES), OTHERS):
            with computing(LinearLayers(model, workers)):
                expected = model(None, *given)
            assert_same_bits(replay(None, *given), expected, "with weights that are computed")
