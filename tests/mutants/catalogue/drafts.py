"""Draft models, and what is saved beside a snapshot: time is all that depends on them."""

from mutants.mutant import Mutant

DRAFT = "model/test_draft.py::"
COMPANION = "model/test_draft_companion.py::"
SAVING = "model/test_draft_saving.py::"
STORE = "python/test_store_companions.py::"
LENGTH = "python/test_draft_length.py::"

DRAFTS = (
    Mutant(
        name="the-draft-draws-other-numbers",
        breaks="guesses are sampled with the draws of the tokens they stand for",
        file="python/kvpager/drafts/drafting.py",
        old="Stream(transcript, ask.sampling,",
        new="Stream(transcript, type(ask.sampling)(**{**ask.sampling.to_json(), 'seed': 77}),",
        killers=(DRAFT + "test_drafted_text_has_the_tokens_and_the_bits_of_plain_decode",),
    ),
    Mutant(
        name="the-draft-guesses-for-one-session-after-another",
        breaks="sessions of one forward share the draft's forwards",
        file="python/kvpager/drafts/drafting.py",
        old="            return self._guess(asks)\n",
        new="            return [self._guess([ask])[0] for ask in asks]\n",
        killers=(DRAFT + "test_sessions_of_one_forward_share_the_drafts_forwards",),
    ),
    Mutant(
        name="a-changed-text-is-not-noticed",
        breaks="what the draft holds is compared with the text before it guesses",
        file="python/kvpager/drafts/companion.py",
        old="            common = int(different[0]) if different.size else common\n"
        "            self._sound",
        new="            self._sound",
        killers=(COMPANION + "test_text_that_was_changed_behind_the_companions_back_is_noticed",),
    ),
    Mutant(
        name="who-lags-holds-everybody-up",
        breaks="catching up takes a bounded number of forwards between two of the target",
        file="python/kvpager/drafts/drafting.py",
        old="if not lagging or catching_up == _CATCHING_UP:",
        new="if not lagging:",
        killers=(COMPANION + "test_a_long_text_is_caught_up_a_few_forwards_at_a_time",),
    ),
    Mutant(
        name="one-that-fails-takes-the-others-along",
        breaks="a text that the draft cannot follow costs the others nothing",
        file="python/kvpager/drafts/drafting.py",
        old="            if len(asks) > 1:\n",
        new="            if len(asks) < 0:\n",
        killers=(
            COMPANION + "test_one_text_that_the_draft_cannot_follow_costs_the_others_nothing",
        ),
    ),
    Mutant(
        name="idle-companions-keep-their-room",
        breaks="companions that do not guess give their room to those that do",
        file="python/kvpager/drafts/drafting.py",
        old="        if not idle:\n",
        new="        if idle or not idle:\n",
        killers=(COMPANION + "test_idle_companions_give_their_room_to_those_that_guess",),
    ),
    Mutant(
        name="a-closed-companion-is-asked-for-room",
        breaks="what a session's end leaves behind stops nobody",
        file="python/kvpager/drafts/companion.py",
        old="        return self.transcript.closed or not self.transcript.committed\n",
        new="        return not self.transcript.committed\n",
        killers=(COMPANION + "test_idle_companions_give_their_room_to_those_that_guess",),
    ),
    Mutant(
        name="sessions-wait-for-a-collector",
        breaks="a session nobody holds gives its chunks up, and the draft's, at once",
        file="python/kvpager/_runtime/scheduling/packing.py",
        old="            batch.accept = None",
        new="            pass",
        killers=(DRAFT + "test_a_closed_session_gives_the_drafts_chunks_back",),
    ),
    Mutant(
        name="guesses-cost-nothing",
        breaks="a dearer guess makes shorter proposals",
        file="python/kvpager/speculation/proposal_length.py",
        old="(self._guess_cost if count > paid else 0.0)",
        new="0.0",
        killers=(LENGTH + "test_a_dearer_guess_makes_shorter_proposals",),
    ),
    Mutant(
        name="guesses-are-saved-as-text",
        breaks="a companion in a snapshot holds the text and no guess",
        file="python/kvpager/drafts/companion.py",
        old="            length = min(upto, self.length)\n",
        new="            length = min(upto, self.session.committed)\n",
        killers=(SAVING + "test_guesses_beyond_the_text_are_not_saved",),
    ),
    Mutant(
        name="any-companion-will-do",
        breaks="a companion of another save is left out of a restore",
        file="python/kvpager/_runtime/snapshots/companions.py",
        old="    if found.logical_digest != digest:\n",
        new="    if found.logical_digest == '':\n",
        killers=(SAVING + "test_a_companion_of_another_save_is_computed_again",),
    ),
    Mutant(
        name="damage-in-a-companion-is-kept-secret",
        breaks="a store shares no chunk that a restored companion found damaged",
        file="python/kvpager/drafts/companion.py",
        old="damage = DamageHandling(RECOMPUTE, source, snapshot.reader, first)",
        new="damage = DamageHandling(RECOMPUTE, None, snapshot.reader, first)",
        killers=(SAVING + "test_damage_in_a_companion_costs_the_companion_alone",),
    ),
    Mutant(
        name="the-primary-gets-its-name-first",
        breaks="companions are in place before the snapshot that names them",
        file="python/kvpager/stores/saving.py",
        old="now_ns) for part in self._parts]",
        new="now_ns) for part in self._parts[::-1]]",
        killers=(STORE + "test_a_writer_that_dies_between_companion_and_primary_leaves_an_orphan",),
    ),
    Mutant(
        name="orphans-stay-for-ever",
        breaks="companions that belong to nothing are collected",
        file="python/kvpager/stores/budget.py",
        old="[*orphans, *expired]",
        new="expired",
        killers=(STORE + "test_a_save_cleans_up_the_orphans_of_others",),
    ),
    Mutant(
        name="companions-count-for-nothing-in-an-eviction",
        breaks="eviction takes a snapshot with what belongs to it, and no more than necessary",
        file="python/kvpager/stores/budget.py",
        old="parts = [snapshot, *catalogue.companions(manifest.name)]",
        new="parts = [snapshot]",
        killers=(STORE + "test_eviction_takes_a_snapshot_and_its_companions_together",),
    ),
    Mutant(
        name="companions-age-by-themselves",
        breaks="a companion lives as long as its snapshot",
        file="python/kvpager/stores/catalogue.py",
        old='return Snapshot(manifest, note, row["note_bytes"], notes["used_ns"], owner)',
        new='return Snapshot(manifest, note, row["note_bytes"], row["used_ns"], owner)',
        killers=(STORE + "test_a_companion_expires_with_its_snapshot_and_not_before",),
    ),
    Mutant(
        name="companions-outlive-their-snapshot",
        breaks="deleting a snapshot deletes what belongs to it",
        file="python/kvpager/stores/removal.py",
        old="(catalogue.snapshot(name), *catalogue.companions(name))",
        new="(catalogue.snapshot(name),)",
        killers=(STORE + "test_deleting_a_snapshot_deletes_its_companions",),
    ),
    Mutant(
        name="a-companion-takes-a-users-name",
        breaks="a companion never takes the place of a snapshot of its own",
        file="python/kvpager/stores/saving.py",
        old="        if self.owner is not None and stored != self.owner:\n",
        new="        if self.owner is not None and stored == '':\n",
        killers=(STORE + "test_a_companion_takes_nobodys_name",),
    ),
)
