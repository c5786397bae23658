"""Moved keys: one rotation, by the model's own angles, found for each layer by running it."""

from mutants.mutant import Mutant

TESTS = "model/test_rotary.py::"
ROTATION = "python/kvpager/_model/seam/rotary.py"
FINDING = "python/kvpager/_model/seam/rotary.py"
THERE = TESTS + "test_moved_keys_are_those_that_the_model_computes_there"
ONE_ROUNDING = TESTS + "test_a_move_is_one_rounding_from_the_rotation_in_float64"
STAY = TESTS + "test_keys_that_stay_keep_their_bits_beside_keys_that_move"

ROTARY = (
    Mutant(
        name="keys-turn-the-other-way",
        breaks="keys turn from the old position to the new one",
        file=ROTATION,
        old="self._angles(new) - self._angles(old)",
        new="self._angles(old) - self._angles(new)",
        killers=(ONE_ROUNDING,),  # the search would find the model to turn backwards
    ),
    Mutant(
        name="angles-better-than-the-models",
        breaks="moved keys carry the rounding of angles that the model's own have",
        file=ROTATION,
        old="(positions.float().unsqueeze(1) * self.frequencies).double()",
        new="positions.double().unsqueeze(1) * self.frequencies.double()",
        killers=(TESTS + "test_the_rounding_of_angles_far_out_is_moved_with_the_keys",),
    ),
    Mutant(
        name="keys-are-turned-in-their-dtype",
        breaks="keys are turned in float32 and rounded once",
        file=ROTATION,
        old="x, y = (half.float() for half in self._pairs(keys[part]))",
        new="x, y = self._pairs(keys[part])\n            c, s = c.to(x.dtype), s.to(x.dtype)",
        killers=(ONE_ROUNDING,),
    ),
    Mutant(
        name="all-layers-turn-as-the-first",
        breaks="layers of another theta, or without rotation, are moved as they compute keys",
        file=FINDING,
        old="    return KeyMover(rotations)\n",
        new="    return KeyMover(rotations[:1] * len(rotations))\n",
        killers=(
            THERE + "[gemma3]",
            TESTS + "test_keys_of_a_layer_without_rotation_keep_their_bits",
        ),
    ),
    Mutant(
        name="what-moves-a-segment-takes-it-to-its-own-start",
        breaks="attention to a moved segment is that of relative positions",
        file=FINDING,
        old="return Move(self._rotations, before, after)",
        new="return Move(self._rotations, before, after - after[:1])",
        killers=(THERE, TESTS + "test_attention_to_a_moved_segment_is_that_of_relative_positions"),
    ),
    Mutant(
        name="keys-that-stay-are-turned-by-nothing",
        breaks="a key whose position stays keeps its bits",
        file=FINDING,
        old="        if self._moving.all():\n",
        new="        if self._moving.any():\n",
        killers=(STAY,),
    ),
    Mutant(
        name="positions-in-the-hidden-states-are-not-seen",
        breaks="absolute positions are refused, with the reason",
        file=FINDING,
        old="    if any(_error(v, before) > _ROUNDINGS for _, _, v in later):\n",
        new="    if any(_error(k, before) < 0 for _, k, _ in later):\n",
        killers=(TESTS + "test_absolute_positions_are_refused",),
    ),
    Mutant(
        name="the-best-guess-is-good-enough",
        breaks="keys that no rotation moves are refused",
        file=FINDING,
        old="    if not least <= _ROUNDINGS:\n",
        new="    if least < 0:\n",
        killers=(
            TESTS + "test_keys_that_are_not_left_as_they_were_turned_are_refused_with_their_layer",
            TESTS + "test_a_rotation_that_is_another_one_far_out_is_refused",
            TESTS + "test_keys_that_are_no_numbers_are_refused",
        ),
    ),
    Mutant(
        name="a-rotation-is-tried-near-the-start-alone",
        breaks="a rotation is tried at all the distances that a model has",
        file=FINDING,
        old="sorted({*_NEAR, limit - 1})",
        new="sorted(_NEAR)",
        killers=(TESTS + "test_a_rotation_that_is_another_one_far_out_is_refused",),
    ),
)
