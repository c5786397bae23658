"""From logits to tokens and log-probabilities."""

from mutants.mutant import Mutant

FILE = "python/kvpager/sampling.py"
GENERATION = "model/test_generation.py::"
CHOICES = "python/test_sampling.py::"
OPTIONS = "model/test_sampling_options.py::"

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
        old="        self._largest = float(self._logits.max())\n",
        new="        self._logits = self._logits.astype(np.float16).astype(np.float64)\n"
        "        self._largest = float(self._logits.max())\n",
        killers=(
            "model/test_stock_transformers.py::test_score_is_the_log_softmax_of_transformers"
            "[llama-float32]",
        ),
    ),
    Mutant(
        name="repetition-leaves-the-prompt-out",
        breaks="a repetition penalty is of every token of the text",
        file="python/kvpager/_runtime/logits/adjustments.py",
        old="    occurs[tokens] = True\n",
        new="    occurs[tokens[-5:]] = True\n",
        killers=(CHOICES + "test_scores_and_kept_tokens_are_those_of_transformers",),
    ),
    Mutant(
        name="repetition-divides-what-is-negative",
        breaks="a repetition penalty lowers negative logits too",
        file="python/kvpager/_runtime/logits/adjustments.py",
        old="np.where(found < 0, found * penalty, found / penalty)",
        new="found / penalty",
        killers=(CHOICES + "test_scores_and_kept_tokens_are_those_of_transformers",),
    ),
    Mutant(
        name="presence-counts-the-prompt",
        breaks="presence and frequency are of the tokens produced",
        file=FILE,
        old="produced = tokens[self.start :]",
        new="produced = tokens",
        killers=(CHOICES + "test_presence_and_frequency_count_the_tokens_produced_alone",),
    ),
    Mutant(
        name="min-p-keeps-too-many",
        breaks="min_p is a share of the largest probability",
        file=FILE,
        old='np.searchsorted(-weights, -self.min_p, "right")',
        new='np.searchsorted(-weights, -self.min_p / 2, "right")',
        killers=(CHOICES + "test_scores_and_kept_tokens_are_those_of_transformers",),
    ),
    Mutant(
        name="options-that-are-off-are-saved",
        breaks="a snapshot without new options has the bytes it had",
        file=FILE,
        old="if name in _ALWAYS_SAVED or value != _DEFAULTS[name]",
        new="if name in _ALWAYS_SAVED or value is not None",
        killers=(CHOICES + "test_what_is_saved_has_only_the_new_options_that_are_set",),
    ),
    Mutant(
        name="alternatives-in-another-order",
        breaks="alternatives that are equal are in the order of their ids",
        file=FILE,
        old='np.argsort(-rounded[ids], kind="stable")]',
        new='np.argsort(rounded[ids], kind="stable")[::-1]]',
        killers=(CHOICES + "test_alternatives_are_the_most_likely_tokens_in_a_fixed_order",),
    ),
    Mutant(
        name="going-on-counts-anew",
        breaks="a generation that goes on counts the tokens of the interrupted one",
        file="python/kvpager/_runtime/text/transcript.py",
        old="return self.sampling.start if goes_on else len(text)",
        new="return len(text)",
        killers=(
            OPTIONS + "test_a_text_that_was_interrupted_goes_on_as_if_it_was_not[sampled-9-None]",
        ),
    ),
    Mutant(
        name="a-guess-is-judged-by-the-tokens-after-it",
        breaks="a guess is verified after the text that it follows",
        file="python/kvpager/_runtime/scheduling/packing.py",
        old="token = choose_after(text[:position], logits[accepted], sampling, processors)",
        new="token = sampling.choose(logits[accepted], position, text)",
        killers=(OPTIONS + "test_speculation_changes_no_token_of_a_text_with_penalties",),
    ),
    Mutant(
        name="processors-are-asked-again",
        breaks="a processor sees each text once",
        file="python/kvpager/_runtime/logits/processors.py",
        old="        known = self._recall(tokens)\n",
        new="        self._recall(tokens)\n        known = None\n",
        killers=(
            OPTIONS + "test_processors_see_each_text_once_and_in_order",
            OPTIONS + "test_processors_see_each_text_once_although_guesses_were_dropped",
        ),
    ),
    Mutant(
        name="a-processor-fails-the-forward",
        breaks="a processor that raises ends its own request",
        file="python/kvpager/_runtime/scheduling/packing.py",
        old="    except (NonFiniteError, InvalidArgumentError):  # raised again when this token is",
        new="    except NonFiniteError:  # raised again when this token is",
        killers=(
            OPTIONS + "test_a_processor_that_raises_leaves_the_session_as_it_was_before_that_token",
        ),
    ),
    Mutant(
        name="a-config-is-believed-in-part",
        breaks="a field that is not honoured is refused",
        file="python/kvpager/_runtime/scheduling/generation_config.py",
        old="    if found:\n",
        new="    if len(found) > 1:\n",
        killers=(
            CHOICES + "test_a_field_that_would_change_the_text_is_refused_with_its_value",
            CHOICES + "test_a_field_that_no_table_has_is_refused_if_transformers_reads_it",
        ),
    ),
    Mutant(
        name="a-config-forgets-the-models-own",
        breaks="what a config leaves out is the model's own",
        file="python/kvpager/_runtime/scheduling/generation_config.py",
        old="({} if own is None else vars(own), DEFAULTS_OF_TRANSFORMERS)",
        new="({}, DEFAULTS_OF_TRANSFORMERS)",
        killers=(CHOICES + "test_what_a_config_leaves_out_is_the_models_own",),
    ),
    Mutant(
        name="the-models-own-config-is-used-on-request-alone",
        breaks="the model's generation_config is the default where it samples",
        file="python/kvpager/_runtime/scheduling/options.py",
        old='options.get("generation_config", AUTO)',
        new='options.get("generation_config")',
        killers=(
            "model/test_sampling_options.py::"
            "test_the_models_own_config_is_the_default_where_it_samples",
        ),
    ),
)
