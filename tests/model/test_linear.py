"""Linear layers of an engine's forwards are kvpager's own products, and nobody else's are."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from adapters import with_adapters
from bits import assert_same_bits, assert_same_session
from reference_models import build, make_engine, prompt

from kvpager import FingerprintMismatchError, InvalidArgumentError, _core
from kvpager._model.facts.checked_model import whose_products
from kvpager._model.seam.linear import product
from kvpager._runtime.execution.workers import openmp_runtime
from kvpager.pager.device import PoolDevice

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = [(64, 16, 64), (3, 100, 37), (7, 1024, 64), (16, 3072, 40), (65, 96, 300)]

pytestmark = pytest.mark.skipif(_core.processor()["level"] < 3, reason="this processor lacks AVX2")


@pytest.fixture(scope="module")
def workers():
    return _core.Workers(2)


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("rows", "depth", "outputs"), SHAPES)
def test_products_are_as_near_to_float64_as_torchs(workers, dtype, rows, depth, outputs):
    x, weight = drawn(rows, depth, dtype=dtype), drawn(outputs, depth, dtype=dtype, seed=1)
    bias = drawn(outputs, dtype=dtype, seed=2)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    with torch.inference_mode():
        ours = product(workers, x, weight, bias)
    theirs = torch.nn.functional.linear(x, weight, bias)
    assert ours.dtype == dtype
    assert ours.shape == theirs.shape

    def error(found):
        return (found.double() - exact).pow(2).mean().sqrt().item()

    # Where both round the exact sum, as in 16 bits, they are equally near. Of a hundred numbers,
    # whose order of sums torch chooses by the processor, some percent are chance.
    assert error(ours) <= 1.1 * error(theirs) + 1e-9


@pytest.mark.parametrize(
    "shape",
    [(96,), (1, 96), (2, 3, 96), (0, 96), (4, 1, 1, 96)],
    ids=lambda s: "x".join(map(str, s)),
)
def test_any_number_of_dimensions_and_strides_give_the_same_bits(workers, shape):
    weight, x = drawn(40, 96), drawn(*shape)
    with torch.inference_mode():
        out = product(workers, x, weight)
        assert out.shape == (*shape[:-1], 40)
        rows = x.reshape(-1, 96)
        alone = [product(workers, row, weight) for row in rows]
        assert_same_bits(out.reshape(-1, 40), torch.stack(alone) if alone else rows[:, :40], "rows")
        if x.ndim > 1:
            crooked = torch.empty_permuted(shape, [*range(1, x.ndim), 0]).copy_(x)
            assert_same_bits(product(workers, crooked, weight), out, "other strides of rows")
        wide = drawn(40, 100)
        wide[:, :96] = weight
        assert_same_bits(product(workers, x, wide[:, :96]), out, "gaps between rows of weights")


def test_what_is_no_plain_product_of_one_dtype_is_left_to_torch(workers):
    x, weight = drawn(3, 96), drawn(40, 96)

    class Own(torch.Tensor):
        pass

    with torch.inference_mode():
        assert product(workers, x, weight.bfloat16()) is None
        assert product(workers, x.double(), weight.double()) is None
        assert product(workers, x, weight, drawn(40).half()) is None
        assert product(workers, x, weight[:, :95]) is None
        assert product(workers, x, drawn(96, 40).T) is None
        assert product(workers, x, weight.as_subclass(Own)) is None
        assert product(workers, torch.tensor(1.0), weight) is None


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_lone_session_decodes_with_one_row_and_has_the_bits_of_a_prompt(dtype, closing):
    model = build("qwen3", str(dtype).removeprefix("torch."))
    engine = closing(make_engine(model, pool_tokens=256, linear="kvpager"))
    assert engine.row_counts.ladder[0] == engine.row_counts.head[0] == 1
    assert engine.row_proof.dropped == ()
    one = closing(engine.session())
    one.prefill(prompt(20))
    one.generate(30, eos=None)
    other = closing(make_engine(model, pool_tokens=256, linear="kvpager")).session()
    other.prefill(one.tokens)
    one.prefill(one.tokens)
    assert_same_session(one, other, "decoded one by one, and as a prompt")


def test_threads_and_tiers_change_no_bit_of_a_forward():
    """Of one thread and of three, in every instruction-set tier that this machine has."""
    program = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]); torch.set_num_threads(1)\n"
        "from reference_models import build, make_engine, prompt\n"
        "from kvpager import _core; from kvpager._model.seam.linear import product\n"
        "import hashlib; summary, draw = hashlib.sha256(), torch.Generator()\n"
        "for dtype in (torch.float32, torch.bfloat16, torch.float16):\n"
        "    x, w = (torch.randn(n, 200, generator=draw.manual_seed(n)) for n in (9, 70))\n"
        "    with torch.inference_mode():\n"
        "        out = product(_core.Workers(int(sys.argv[2])), x.to(dtype), w.to(dtype))\n"
        "    summary.update(out.view(torch.uint8).numpy().tobytes())\n"
        "print(summary.hexdigest())\n"
    )

    def digest(tier, threads):
        command = [sys.executable, "-c", program, Path(__file__).parent, str(threads)]
        environment = {**os.environ, "KVPAGER_ISA": tier}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0 or "cannot run" in done.stderr, done.stderr
        return done.stdout.strip()

    found = {
        (tier, threads): digest(tier, threads)
        for tier in ("base", "v3", "v4")
        for threads in (1, 3)
    }
    assert found["base", 1]
    assert len(set(filter(None, found.values()))) == 1, found


def test_torchs_own_threads_compute_the_same_bits(workers, monkeypatch):
    """Those of its OpenMP runtime, where they spin; engines of a passive one have their own."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    runtime = openmp_runtime()
    assert "omp" in runtime
    x, weight = drawn(9, 256), drawn(700, 256, seed=1)
    with torch.inference_mode():
        expected = product(workers, x, weight)
        for threads in (1, 2, 5):
            found = product(_core.Workers(threads, runtime), x, weight)
            assert_same_bits(found, expected, f"{threads} threads")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert openmp_runtime() == ""
    with pytest.raises(InvalidArgumentError, match="openmp is"):
        _core.Workers(2, "/no/such/libgomp.so")
    with pytest.raises(InvalidArgumentError, match="threads is 0"):
        _core.Workers(0)


def test_nothing_is_written_to_a_model_and_copies_of_it_are_plain(closing):
    model = build("llama")
    ids = torch.from_numpy(prompt(12))[None]
    before = [dict(vars(module)) for module in model.modules()]
    with torch.no_grad():
        expected = model(ids).logits
    engine = closing(make_engine(model, linear="kvpager"))
    engine.session().prefill(prompt(20))
    assert [vars(module) for module in model.modules()] == before
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            assert_same_bits(other(ids).logits, expected, "a copy")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_torchscript_and_tracing_take_a_layer_as_before():
    layer, x = torch.nn.Linear(8, 4), drawn(3, 8)
    expected = layer(x)
    assert torch.equal(torch.jit.script(layer)(x), expected)
    assert torch.equal(torch.jit.trace(layer, x)(x), expected)
    assert torch.equal(torch.compile(layer, backend="eager")(x), expected)


def test_layers_of_an_adapter_are_computed_here_too(closing):
    model = with_adapters("a")
    engine = closing(make_engine(model, linear="kvpager"))
    names = [
        name
        for name, module in model.named_modules()
        if id(module) in engine.core.facts.linear.known
    ]
    assert any("lora_A" in name for name in names)
    assert engine.row_counts.ladder[0] == 1


def test_a_snapshot_of_other_products_is_refused_by_name_and_taken_if_asked(tmp_path, closing):
    model = build("llama")
    path = tmp_path / "turn.kvsnap"
    with make_engine(model, linear="torch") as engine, engine.session() as session:
        session.prefill(prompt(40))
        session.save(path)
    engine = closing(make_engine(model, linear="kvpager"))
    with pytest.raises(FingerprintMismatchError, match="linear") as refused:
        engine.restore(path)
    assert refused.value.field == "linear"
    assert refused.value.expected == f"kvpager {_core.LINEAR_VERSION}"
    assert "PagerConfig.linear" in str(refused.value)
    assert engine.restore(path, on_mismatch="approximate").length == 40


PROCESSORS = {
    "AVX-512 with bfloat16": {"level": 4, "vnni": True, "bf16": True, "amx": False},
    "AMX": {"level": 4, "vnni": True, "bf16": True, "amx": True},
    "AVX-512": {"level": 4, "vnni": False, "bf16": False, "amx": False},
    "AVX2": {"level": 3, "vnni": False, "bf16": False, "amx": False},
    "none of these": {"level": 1, "vnni": False, "bf16": False, "amx": False},
}
FAST = {
    "AVX-512 with bfloat16": ("float32", "float16", "bfloat16"),
    "AMX": ("float32", "float16"),
    "AVX-512": ("float32", "float16"),
    "AVX2": ("float32", "float16", "bfloat16"),
    "none of these": (),
}


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_whose_products_they_are_follows_from_processor_and_dtype(
    monkeypatch, closing, processor, dtype
):
    monkeypatch.setattr(_core, "processor", lambda: PROCESSORS[processor])
    engine = closing(make_engine(build("llama", dtype)))
    own = dtype in FAST[processor]
    assert engine.fingerprint.get("linear", "").startswith("kvpager") == own
    assert (engine.core.facts.linear is not None) == own


def test_without_avx2_products_that_are_asked_for_are_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(_core, "processor", lambda: PROCESSORS["none of these"])
    with pytest.raises(InvalidArgumentError, match=r'linear is "kvpager".*AVX2.*"torch"'):
        make_engine(build("llama"), linear="kvpager")


def test_a_processor_says_what_it_has():
    found = _core.processor()
    assert found.keys() == PROCESSORS["AMX"].keys()
    flags = set()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("flags"):
            flags = set(line.split())
            break
    if not flags:
        pytest.skip("this processor's features are listed elsewhere")
    assert (found["level"] >= 3) == {"avx2", "fma", "bmi2", "f16c"}.issubset(flags)
    assert (found["level"] == 4) == {"avx512f", "avx512bw", "avx512vl"}.issubset(flags)
    assert found["bf16"] == {"avx512_bf16", "avx512_vnni"}.issubset(flags)
    assert found["amx"] == {"amx_tile", "amx_bf16"}.issubset(flags)


def test_torchs_products_have_their_bits_if_asked_for(closing):
    engine = closing(make_engine(build("llama"), linear="torch"))
    assert "linear" not in engine.fingerprint
    assert engine.core.facts.linear is None


def test_on_a_gpu_they_are_kvpagers_only_if_asked_for():
    gpu = PoolDevice("cuda:0", torch.device("cuda", 0))
    for dtype in FLOATS:
        assert whose_products("auto", gpu, dtype) == "torch"
        assert whose_products("torch", gpu, dtype) == "torch"
        assert whose_products("kvpager", gpu, dtype) == "device"
    assert (
        whose_products("kvpager", PoolDevice("cpu", torch.device("cpu")), torch.float64)
        == "processor"
    )


def test_a_hook_that_multiplies_by_itself_has_torchs_bits(closing):
    """A layer that is no part of the model, within its forward."""
    model, apart = build("llama"), torch.nn.Linear(256, 8)
    x, seen = drawn(5, 256), []
    with torch.no_grad():
        expected = apart(x)
    hook = model.model.layers[0].register_forward_pre_hook(lambda *_: seen.append(apart(x)))
    try:
        engine = closing(make_engine(model, linear="kvpager"))
        seen.clear()
        engine.session().prefill(prompt(20))
    finally:
        hook.remove()
    assert seen
    for found in seen:
        assert_same_bits(found.detach(), expected, "the hook's own layer")


def test_numbers_are_those_of_the_products(workers):
    x, weight = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(4, 3)
    with torch.inference_mode():
        out = product(workers, torch.from_numpy(x).float(), torch.from_numpy(weight).float())
    assert np.array_equal(out.numpy(), x @ weight.T)


def with_forward(head):
    """As trainers do that want logits in float32."""
    head.forward = lambda x: torch.nn.functional.linear(x.float(), head.weight.float())


def with_hook(head):
    head.register_forward_hook(lambda _, args, out: torch.nn.functional.linear(*args, head.weight))


def with_hook_before(head):
    head.register_forward_pre_hook(lambda _, args: args[0] @ torch.eye(len(args[0][0, 0])))


def of_a_class_with_a_call(head):
    head.__class__ = type(
        "Calling",
        (torch.nn.Linear,),
        {"__call__": lambda self, x: torch.nn.functional.linear(x, self.weight)},
    )


def unaligned(head):
    """As in a file that is mapped from an odd place."""
    memory = bytearray(head.weight.numel() * 4 + 2)
    weight = torch.frombuffer(memory, dtype=torch.float32, offset=2).view(head.weight.shape)
    head.weight.data = weight.copy_(head.weight.data)


@pytest.mark.parametrize(
    "change", [with_forward, with_hook, with_hook_before, of_a_class_with_a_call, unaligned]
)
def test_a_head_that_torch_computes_after_all_is_tried_in_every_count(closing, change):
    model = build("llama", hidden=1024)
    change(model.lm_head)
    engine = closing(make_engine(model, pool_tokens=1024, linear="kvpager"))
    own = closing(make_engine(model, pool_tokens=1024, linear="torch"))
    assert engine.row_counts.head == own.row_counts.head
    (completion,) = engine.run([prompt(40)], 6, eos=None, logprobs=True)
    text = np.concatenate([prompt(40), completion.tokens])
    scored = np.float32(engine.score(text).logprobs[-6:])
    assert scored.tolist() == np.float32(completion.logprobs).tolist()


def test_a_forward_that_somebody_has_put_back_is_exchanged_again(closing, monkeypatch):
    ours = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", ours.__wrapped__)
    engine = closing(make_engine(build("llama"), linear="kvpager"))
    assert torch.nn.Linear.forward is ours
    assert engine.core.facts.linear.known


def test_a_forward_of_somebody_elses_computes_all_layers(closing, monkeypatch):
    ours, calls = torch.nn.Linear.forward, []

    def patched(self, x):
        calls.append(1)
        return ours(self, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", patched)
    model = build("llama")
    with pytest.raises(InvalidArgumentError, match=r"forward was replaced by .*patched.*put it"):
        make_engine(model, linear="kvpager")
    engine = closing(make_engine(model))
    assert engine.core.facts.linear is None
    del calls[:]
    engine.run([prompt(20)], 2, eos=None)
    assert calls
    monkeypatch.undo()
    other = closing(make_engine(model, linear="kvpager"))
    monkeypatch.setattr(torch.nn.Linear, "forward", patched)
    with pytest.raises(InvalidArgumentError, match=r"forward was replaced by .*patched"):
        other.weights_changed()
