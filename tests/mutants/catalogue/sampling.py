"""From logits to tokens and log-probabilities."""

from mutants.mutant import Mutant

FILE = "python/kvpager/sampling.py"
GENERATION = "model/test_generation.py::"

SAMPLING = (
    Mutant(
        name="a-draw-ignores-its-position",
        breaks="a draw is a function of seed and absolute position",
        file=FILE,
        old="np.random.Philox(key=seed, counter=position)",
        new="np.random.Philox(key=seed, counter=0)",
        killers=(
            GENERATION + "test_a_draw_depends_on_seed_and_position_alone",
            GENERATION + "test_draws_follow_the_distribution",
        ),
    ),
    Mutant(
        name="draws-are-counted",
        breaks="company and interruptions change no draw",
        file=FILE,
        old="    draws = np.random.Philox(key=seed, counter=position)\n",
        new="    global _drawn\n    _drawn = globals().get('_drawn', 0) + 1\n"
        "    draws = np.random.Philox(key=seed, counter=_drawn)\n",
        killers=(
            GENERATION + "test_a_draw_depends_on_seed_and_position_alone",
            GENERATION + "test_interrupted_sampling_draws_what_uninterrupted_does",
            GENERATION + "test_company_changes_no_token",
        ),
    ),
    Mutant(
        name="greedy-takes-the-last-of-equals",
        breaks="greedy ties go to the lowest token id",
        file=FILE,
        old="            token = int(exact.argmax())\n",
        new="            token = len(exact) - 1 - int(exact[::-1].argmax())\n",
        killers=(
            GENERATION + "test_greedy_takes_the_most_likely_token_and_the_lowest_id_of_equals",
        ),
    ),
    Mutant(
        name="candidates-in-no-fixed-order",
        breaks="the inverse distribution function runs over tokens in one fixed order",
        file=FILE,
        old='        ids = ids[np.argsort(-values[ids], kind="stable")]\n',
        new='        ids = ids[np.argsort(values[ids], kind="stable")[::-1]]\n',
        killers=(GENERATION + "test_top_k_keeps_the_k_most_likely_and_the_lowest_ids_of_equals",),
    ),
    Mutant(
        name="top-p-keeps-one-too-many",
        breaks="top_p keeps the fewest tokens that reach it",
        file=FILE,
        old='self.top_p * cumulative[-1], "left")) + 1',
        new='self.top_p * cumulative[-1], "left")) + 2',
        killers=(GENERATION + "test_top_p_keeps_the_fewest_tokens_that_reach_it",),
    ),
    Mutant(
        name="logprobs-in-half-precision",
        breaks="a log-probability is computed in float64 from the model's own logits",
        file=FILE,
        old="    top = float(values.max())\n"
        "    return float(values[token]) - top - math.log(float(np.exp(values - top).sum()))\n",
        new="    values = values.astype(np.float16).astype(np.float64)\n"
        "    top = float(values.max())\n"
        "    return float(values[token]) - top - math.log(float(np.exp(values - top).sum()))\n",
        killers=(
            "model/test_stock_transformers.py::test_score_is_the_log_softmax_of_transformers"
            "[llama-float32]",
        ),
    ),
)
