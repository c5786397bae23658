"""Lossless copies of weights, which products of few rows read."""

from mutants.mutant import Mutant

TEST = "cpp/compute/compressed_weights_test.cc::"
ORDER = TEST + "products of copies have the order of operations that is written down, in every tier"
READ = TEST + "copies are read in place of the weights, by few rows"
MARKED = TEST + "a group with a weight that 12 bits cannot hold is read from the weights"
EVERY = TEST + "every finite bfloat16 survives, zeros and denormals too"
NONE = TEST + "weights of too many sizes, too few or of another dtype get no copies"
ROWS = TEST + "copies are those of some rows of a matrix, and of nothing else"
THREADS = TEST + "threads change no bit of copies, nor of products of them"
OTHERS = TEST + "experts and programs read copies, too"
MODEL = "model/test_compress_weights.py::"

KERNEL = "csrc/compute/linear_compressed_isa.h"
COPIES = "csrc/compute/compressed_weights.cc"
OPENING = "python/kvpager/_model/facts/compression.py"

COMPRESSED_WEIGHTS = (
    Mutant(
        name="both-halves-have-the-first-halfs-high-bytes",
        breaks="products of copies of weights have the bits of the weights' own",
        file=KERNEL,
        old="above = _mm256_srli_epi16(places, 4);",
        new="above = places;",
        killers=(ORDER, EVERY),
    ),
    Mutant(
        name="marked-groups-are-read-from-copies",
        breaks="a weight that a copy cannot hold is read from the weights",
        file=KERNEL,
        old="    return (marked[group / 64] >> (group % 64) & 1) != 0;\n",
        new="    return (marked[group / 64] >> (group % 64) & 2) == 1;\n",
        killers=(MARKED,),
    ),
    Mutant(
        name="marks-beyond-a-word-are-those-of-its-beginning",
        breaks="a weight that a copy cannot hold is read from the weights",
        file=KERNEL,
        old="(marked[group / 64] >>",
        new="(marked[0] >>",
        killers=(MARKED,),
    ),
    Mutant(
        name="what-is-left-of-a-depth-is-not-multiplied",
        breaks="an element is the sum of all its products where groups do not fill the depth",
        file=KERNEL,
        old="  add_rest<Type>(params, x, w, whole * kCompressedGroup, sums);\n",
        new="",
        killers=(ORDER,),
    ),
    Mutant(
        name="several-rows-lack-what-is-left-of-a-depth",
        breaks="an element is the sum of all its products where groups do not fill the depth",
        file=KERNEL,
        old="  std::memcpy(out, w + k, static_cast<size_t>(last - k) * sizeof(Element));\n",
        new="",
        killers=(ORDER,),
    ),
    Mutant(
        name="low-bits-of-float32-are-lost",
        breaks="no bit of a float32 weight is lost",
        file=COPIES,
        old="return lost == 0 && ",
        new="return ",
        killers=(MARKED, NONE),
    ),
    Mutant(
        name="an-unknown-high-byte-is-taken-for-another",
        breaks="a weight whose high byte is in no table is read from the weights",
        file=COPIES,
        old="return lost == 0 && all_places < kCompressedTable;",
        new="return lost == 0;",
        killers=(MARKED, NONE),
    ),
    Mutant(
        name="copies-that-are-nearly-all-marked-are-kept",
        breaks="weights that copies cannot hold get none",
        file=COPIES,
        old="copied_groups() < made.all_groups() * kLeastCopied / 8",
        new="copied_groups() < 0",
        killers=(NONE,),
    ),
    Mutant(
        name="a-tier-without-copies-makes-them",
        breaks="copies are made where products read them",
        file=COPIES,
        old="kernels().linear_compressed_rows(dtype) == 0 || ",
        new="dtype == DType::kFloat16 || ",
        killers=(NONE,),
    ),
    Mutant(
        name="a-panel-has-the-first-outputs-copies",
        breaks="threads change no bit of products of copies",
        file="csrc/compute/linear.cc",
        old="    part.compressed = part.compressed.from(first);\n",
        new="",
        killers=(THREADS,),
    ),
    Mutant(
        name="products-with-copies-and-without-are-computed-alike",
        breaks="products that are computed at once may have copies or not",
        file="csrc/compute/linear.cc",
        old="return one.compressed.groups != nullptr;",
        new="return one.rows > 0;",
        killers=(TEST + "of products that are computed at once some may have copies",),
    ),
    Mutant(
        name="many-rows-read-copies",
        breaks="copies are read where they take less time than the weights",
        file="csrc/compute/linear.cc",
        old="products->rows > linear_kernels().linear_compressed_rows(products->dtype)",
        new="false",
        killers=(READ,),
    ),
    Mutant(
        name="copies-of-a-matrix-stand-for-rows-beyond-it",
        breaks="copies are those of some rows of a matrix",
        file=COPIES,
        old=" ||\n      output + params.outputs > matrix.outputs",
        new="",
        killers=(ROWS,),
    ),
    Mutant(
        name="copies-stand-for-another-depth",
        breaks="copies are those of whole rows of a matrix",
        file=COPIES,
        old=" || params.depth != matrix.depth",
        new="",
        killers=(ROWS,),
    ),
    Mutant(
        name="copies-stand-for-what-begins-within-a-row",
        breaks="copies are those of whole rows of a matrix",
        file=COPIES,
        old=" || (w - begin) % row != 0",
        new="",
        killers=(ROWS,),
    ),
    Mutant(
        name="experts-read-no-copies",
        breaks="decoding a mixture reads copies of its experts",
        file="csrc/compute/linear_experts.cc",
        old="linear(&*first, last - first, pool, compressed);",
        new="linear(&*first, last - first, pool);",
        killers=(OTHERS,),
    ),
    Mutant(
        name="programs-read-no-copies",
        breaks="a recorded decode step reads copies of weights",
        file="csrc/compute/program.cc",
        old="static_cast<int64_t>(products.size()), pool, compressed);",
        new="static_cast<int64_t>(products.size()), pool);",
        killers=(OTHERS,),
    ),
    Mutant(
        name="a-recording-knows-no-copies",
        breaks="a recorded decode step reads copies of weights",
        file="python/kvpager/_runtime/execution/recordings.py",
        old="    compressed = None if linear is None else linear.compressed\n",
        new="    compressed = None\n",
        killers=(
            MODEL + "test_every_product_of_few_rows_is_given_the_copies[llama]",
            MODEL + "test_every_product_of_few_rows_is_given_the_copies[qwen3_moe]",
        ),
    ),
    Mutant(
        name="experts-are-not-copied",
        breaks="decoding a mixture reads copies of its experts",
        file="python/kvpager/_model/seam/linear.py",
        old=" or (experts and weight.ndim == 3)",
        new="",
        killers=(MODEL + "test_experts_are_copied",),
    ),
    Mutant(
        name="a-tied-head-is-copied-twice",
        breaks="copies are of every layer's weights once",
        file="python/kvpager/_model/seam/linear.py",
        old="                    seen.add(id(weight))\n",
        new="",
        killers=(MODEL + "test_a_weight_that_two_layers_share_is_copied_once",),
    ),
    Mutant(
        name="weights-of-other-kinds-are-copied",
        breaks="weights that no product is made of get no copies",
        file="python/kvpager/_model/seam/linear.py",
        old=" and type(weight) in _PLAIN and id(weight)",
        new=" and id(weight)",
        killers=(MODEL + "test_weights_of_a_librarys_own_kind_are_left_alone",),
    ),
    Mutant(
        name="copies-that-nothing-reads-are-made",
        breaks="compress_weights is refused where linear layers are not kvpager's on the CPU",
        file=OPENING,
        old='    if not config.compress_weights or products == "processor":\n',
        new='    if not config.compress_weights or products != "torch":\n',
        killers=(MODEL + "test_copies_that_nothing_would_read_are_refused[options1]",),
    ),
    Mutant(
        name="a-closed-engine-keeps-its-copies",
        breaks="closing an engine frees the copies of its weights",
        file="python/kvpager/_runtime/execution/core.py",
        old="                steps.callback(linear.compressed.clear)\n",
        new="                pass\n",
        killers=(MODEL + "test_closing_an_engine_frees_the_copies",),
    ),
)
