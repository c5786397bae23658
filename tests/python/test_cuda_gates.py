# What scripts/cuda_gates.py reads of a plug-in and holds against it: a sample of real output, made
# worse in one place at a time. No compiler for GPUs is needed.
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "tests" / "golden" / "cuobjdump"
SMALL = "tensor::small_tiles<bf16,64,0>"
SKETCHES = "scoring::score_sketches<16,1>"


def load_script():
    spec = importlib.util.spec_from_file_location("cuda_gates", ROOT / "scripts" / "cuda_gates.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["cuda_gates"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


gates = load_script()


def read(resources=lambda text: text, code=lambda text: text):
    kernels = gates.read_resources(resources((SAMPLE / "resources.txt").read_text()).splitlines())
    gates.count_instructions(code((SAMPLE / "sass.txt").read_text()).splitlines(), kernels)
    return {kernel.name: kernel for kernel in kernels.values()}


def of_kernels(found):
    return [text for text in found if not text.endswith("not there")]


def test_kernels_are_read_with_readable_names_numbers_and_instructions():
    kernels = read()
    assert set(kernels) == {SMALL, SKETCHES, "tensor::merge_states<64>", "scoring::share_mass"}
    small = kernels[SMALL]
    assert (small.architecture, small.registers, small.local_bytes) == ("sm_90a", 203, 0)
    assert small.count("HMMA.16816.F32") == small.count("LDGSTS.E.BYPASS.128") == 2
    assert kernels[SKETCHES].count("IMMA.16832.U8.S8") == 2
    assert kernels["scoring::share_mass"].count("BRA") == 2  # with a predicate and without


def test_names_of_anonymous_namespaces_and_of_plain_functions_are_readable():
    symbol = (
        "_ZN7kvpager3gpu9reference52_GLOBAL__N__3079090c_19_attend_reference_cu_a8c73208"
        "9walk_rowsILi2ELi8EEEvNS2_6ParamsE"
    )
    assert gates.readable(symbol) == "reference::walk_rows<2,8>"
    assert gates.readable("plain") == "plain"
    half = "_ZN7kvpager3gpu6tensor11large_tilesILNS_5DTypeE1ELi128ELb0EEEvNS1_6LaunchE"
    assert gates.readable(half) == "tensor::large_tiles<fp16,128,0>"


def test_the_sample_is_within_its_limits_and_lacks_what_it_lacks():
    found = gates.judge(read().values())
    assert of_kernels(found) == []
    assert "large_tiles, sm_90a: not there" in found
    assert "small_tiles, sm_90a: not there" not in found


def test_a_plugin_without_kernels_is_not_within_its_limits():
    assert gates.judge([]) == ["no kernel at all"]


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("REG:96", "REG:130", "tensor::merge_states<64>, sm_90a: 130 registers, at most 128"),
        (
            "REG:203 STACK:0 SHARED:1024 LOCAL:0",
            "REG:203 STACK:0 SHARED:1024 LOCAL:8",
            f"{SMALL}, sm_90a: 8 bytes of local memory, at most 0",
        ),
        (
            "REG:203 STACK:0",
            "REG:203 STACK:16",
            f"{SMALL}, sm_90a: 16 bytes of stack, at most 0",
        ),
        (
            "REG:203 STACK:0 SHARED:1024",
            "REG:203 STACK:0 SHARED:201024",
            f"{SMALL}, sm_90a: 265536 bytes of shared memory, at most 232448",
        ),
    ],
)
def test_numbers_outside_of_a_limit_are_named_with_kernel_architecture_value_and_limit(
    before, after, complaint
):
    kernels = read(resources=lambda text: text.replace(before, after))
    assert of_kernels(gates.judge(kernels.values())) == [complaint]


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("HMMA.16816.F32", "FFMA", f"{SMALL}, sm_90a: 0 of HMMA.16816.F32, at least 1"),
        ("IMMA.16832.U8.S8", "IDP", f"{SKETCHES}, sm_90a: 0 of IMMA.16832.U8.S8, at least 1"),
        (
            "ULDC UR5",
            "@!P0 STL [R1], R5",
            "scoring::share_mass, sm_90a: 1 instructions that spill to local memory or read it"
            " back, at most 0",
        ),
    ],
)
def test_instructions_that_lack_or_spill_are_named(before, after, complaint):
    kernels = read(code=lambda text: text.replace(before, after))
    assert of_kernels(gates.judge(kernels.values())) == [complaint]


def test_copies_of_four_bytes_are_not_copies_of_sixteen():
    kernels = read(code=lambda text: text.replace("LDGSTS.E.BYPASS.128", "LDGSTS.E"))
    found = of_kernels(gates.judge(kernels.values()))
    assert found == [
        f"{name}, sm_90a: 0 of LDGSTS.E.BYPASS.128, at least 1" for name in (SMALL, SKETCHES)
    ]


def test_an_architecture_has_its_own_limit_of_shared_memory_or_none_is_known():
    assert gates.shared_limit("sm_90a") == gates.shared_limit("sm_100f") == 232_448
    assert gates.shared_limit("sm_80") == 166_912
    assert gates.shared_limit("sm_86") == gates.shared_limit("sm_120") == 101_376
    kernels = read(resources=lambda text: text.replace("sm_90a", "sm_70"))
    found = of_kernels(gates.judge(kernels.values()))
    assert any("sm_70: an architecture without a limit" in text for text in found)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_tables_dynamic_shared_memory_is_what_the_launches_ask_for(tmp_path):
    asked = {
        "large_tiles<bf16,{dim},0>": "LargeShape<{dim}, false>::kBlockBytes",
        "small_tiles<fp16,{dim},0>": "SmallShape<{dim}, false>::kBlockBytes",
        "large_tiles<bf16,{dim},1>": "LargeShape<{dim}, true>::kBlockBytes",
        "small_tiles<bf16,{dim},1>": "SmallShape<{dim}, true>::kBlockBytes",
        "merge_states<{dim}>": "merge_shared_bytes({dim})",
    }
    sizes = [
        (expression.format(dim=dim), gates.Kernel("sm_90", f"tensor::{name.format(dim=dim)}"))
        for dim in (64, 96, 128)
        for name, expression in asked.items()
        if (dim, name[-2]) != (96, "1")  # has no kernel
    ]
    products = {
        "few_rows<bf16,1,2,1>": "FewShape<1, 2>::kSharedBytes",
        "few_rows<fp16,4,4,1>": "FewShape<4, 4>::kSharedBytes",
        "many_rows<bf16>": "ManyShape::kSharedBytes",
    }
    sizes += [
        (f"kvpager::gpu::linear::{expression}", gates.Kernel("sm_90", f"linear::{name}"))
        for name, expression in products.items()
    ]
    source = tmp_path / "sizes.cc"
    source.write_text(
        '#include "cuda/attend_tensor_launch.cuh"\n#include "cuda/linear_launch.h"\n'
        "using namespace kvpager::gpu::tensor;\n"
        + "".join(
            f"static_assert({value} == {gates.limit_of(kernel).shared_bytes});\n"
            for value, kernel in sizes
        )
    )
    folders = [f"-I{ROOT / folder}" for folder in ("csrc", "csrc/include", "tests")]
    command = ["g++", "-std=c++17", "-DKVPAGER_SHIM", "-fsyntax-only", *folders, str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
