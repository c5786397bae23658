"""Keys and values in fewer bits: codes of a row's own numbers, and sums without an order."""

from mutants.mutant import Mutant

MODEL_CODES = "model/test_codes.py::"
CODES_TEST = "cpp/kernels/codes_test.cc::"
TENSOR_TEST = "cpp/cuda/attend_tensor_test.cc::"
RANDOM = (
    "cpp/kernels/random_problems_test.cc::"
    "a row of any problem has the bits of the reference that computes it alone"
)

CODES = (
    Mutant(
        name="a-scale-that-is-rounded-up",
        breaks="what codes stand for has these codes again",
        file="csrc/kernels/codes_isa.cc",
        old="  *scale = float_to_bfloat16(largest / 127.0f);",
        new="  *scale = static_cast<uint16_t>((float_bits(largest / 127.0f) + 0xFFFFu) >> 16);",
        killers=(CODES_TEST + "what codes stand for has these codes again",),
    ),
    Mutant(
        name="weights-of-tokens-that-nobody-sees",
        breaks="a token that a row does not see has a weight of 0, whatever its scale is",
        file="csrc/kernels/attend_codes_isa.h",
        old="if (!all) weight = keep_range(weight, query.begin - t, query.end - t, 0.0f);",
        new="(void)all;",
        killers=(RANDOM,),
    ),
    Mutant(
        name="the-unit-of-another-query",
        breaks="a query's integers have a unit of their own",
        file="csrc/kernels/attend_codes_isa.h",
        old="store(out_[q] + at, last ? mul(score, splat(units_[q])) : score);",
        new="store(out_[q] + at, last ? mul(score, splat(units_[0])) : score);",
        killers=(RANDOM,),
    ),
    Mutant(
        name="the-other-half-of-a-pair",
        breaks="rows past the valid ones are zeros: two tokens share a pair of bytes",
        file="csrc/kernels/rows.cc",
        old="  if (dtype == DType::kQ8 && valid % 2 == 1) {\n",
        new="  if (dtype == DType::kQ4 && valid % 2 == 1) {\n",
        killers=(CODES_TEST + "rows past the valid ones are zeros, the others what they were",),
    ),
    Mutant(
        name="codes-in-a-layout-without-room",
        breaks="a layout with codes has the fields of codes too",
        file="csrc/snapshot/metadata.cc",
        old="  const bool coded = has_codes(layout);\n",
        new="  const bool coded = false;\n",
        killers=("python/test_golden_snapshots.py::test_every_field_is_what_was_saved",),
    ),
    Mutant(
        name="queries-as-they-came",
        breaks="a query meets rotated keys rotated",
        file="csrc/kernels/attend.cc",
        old="        if (params.layout->k_rotated) kernels().rotate(copy, params.layout->k_dim);\n",
        new="",
        killers=(RANDOM,),
    ),
    Mutant(
        name="outputs-that-stay-rotated",
        breaks="what attends to rotated values is turned back",
        file="csrc/kernels/attend.cc",
        old="        if (params.layout->v_rotated) kernels().rotate(result, v_dim);\n",
        new="",
        killers=(RANDOM,),
    ),
    Mutant(
        name="a-selection-by-queries-as-they-came",
        breaks="summaries are of keys as they are stored, and so are the queries they are held to",
        file="csrc/pager/scan.cc",
        old="        if (layout.k_rotated) rotate_queries(layout.k_dim, group, numbers);\n",
        new="",
        killers=(MODEL_CODES + "test_a_trained_model_finds_its_needles",),
    ),
    Mutant(
        name="a-float-layer-as-long-as-others",
        breaks="each layer's slice begins where those before it end, whatever they are kept in",
        file="csrc/include/kvpager/layout.h",
        old="    return floats == 0 ? coded : coded + floats * float_slice_bytes();",
        new="    return coded;",
        killers=(
            CODES_TEST + "layers in a float dtype have pages of their own, and the others theirs",
        ),
    ),
    Mutant(
        name="a-fingerprint-that-knows-no-rotation",
        breaks="K/V that are rotated and K/V that are not are no text of each other",
        file="python/kvpager/_model/identity/fingerprint.py",
        old='        said["kv_rotation"] = layout.rotation',
        new="        pass",
        killers=(
            MODEL_CODES + "test_a_text_is_refused_by_an_engine_that_rotates_or_keeps_other_layers",
        ),
    ),
    Mutant(
        name="a-conversion-that-says-nothing",
        breaks="what was converted is refused where nobody asked for an approximation",
        file="python/kvpager/_runtime/snapshots/converting.py",
        old='        CONVERTED: found.format if before is None else f"{before}, {found.format}",\n',
        new="",
        killers=(
            "model/test_conversion.py"
            "::test_what_was_converted_says_so_and_is_refused_without_leave",
        ),
    ),
    Mutant(
        name="codes-in-the-order-of-their-rows",
        breaks="tensor cores: a lane gets the codes of its own places of the matrix",
        file="csrc/cuda/attend_tensor_core.cuh",
        old="  if (kCodes) row = (row & 8) | (row & 7) >> 1 | (row & 1) << 2;\n",
        new="",
        killers=(
            TENSOR_TEST + "every head dimension and element type is right, for few rows and many",
        ),
    ),
    Mutant(
        name="the-scale-of-a-token-that-nobody-wrote",
        breaks="tensor cores: a weight of 0 adds nothing, whatever the scale of its value",
        file="csrc/cuda/attend_tensor_core.cuh",
        old="s[i][n][e] == 0.0f ? 0.0f : s[i][n][e] * scale.x[e & 1];",
        new="s[i][n][e] * scale.x[e & 1];",
        killers=(
            TENSOR_TEST + "any problem is right, and the same to the bit however its work is cut",
        ),
    ),
)
