"""What is taken is given back on every path: models, hooks, room, requests, seeds."""

from mutants.mutant import Mutant

SEEDS = "model/test_seeds.py::"
CLOSING = "model/test_closing.py::"
FAILING = "model/test_requests_that_fail.py::"
ROOM = "model/test_room.py::"
BESIDE = "model/test_model_beside_engines.py::"

LIFETIMES = (
    Mutant(
        name="open-models-attend-through-kvpager",
        breaks="outside an engine's forward a model attends as its owner had it",
        file="python/kvpager/_model/seam/attach.py",
        old="return NAME if is_running(config) and id(config) in _known else None\n",
        new="return NAME if id(config) in _known else None\n",
        killers=(
            BESIDE + "test_a_model_answers_with_the_same_bits_while_engines_are_open[llama-sdpa]",
            BESIDE + "test_an_engine_that_nobody_closed_is_collected_and_harms_nobody",
        ),
    ),
    Mutant(
        name="a-forward-takes-every-models-attention",
        breaks="a forward of an engine changes the attention of its own model alone",
        file="python/kvpager/_model/seam/attach.py",
        old="return NAME if is_running(config) and id(config) in _known else None\n",
        new="return NAME if is_running(config) else None\n",
        killers=(BESIDE + "test_a_model_that_is_run_inside_a_forward_has_its_own_attention",),
    ),
    Mutant(
        name="compiled-models-ask-what-runs",
        breaks="a model can be compiled by its owner while an engine is open",
        file="python/kvpager/_model/seam/attach.py",
        old="            if torch.compiler.is_compiling():",
        new="            if config is None:",
        killers=(BESIDE + "test_a_compiled_copy_of_the_model_works_beside_an_engine",),
    ),
    Mutant(
        name="a-start-watches-every-thread",
        breaks="an engine's start sees its own calls of the model's modules, and no other thread's",
        file="python/kvpager/_model/seam/hooks.py",
        old="        if _watching.get() is self._watch:\n",
        new="        if self._watch is not None:\n",
        killers=(BESIDE + "test_engines_are_made_beside_threads_that_run_the_model",),
    ),
    Mutant(
        name="an-interrupted-start-leaves-its-hooks",
        breaks="a model has no hooks of an engine's start after it, whatever interrupted it",
        file="python/kvpager/_model/seam/hooks.py",
        old="        self._removal()\n",
        new="        self._removal.detach()\n",
        killers=(BESIDE + "test_engines_are_made_beside_threads_that_run_the_model",),
    ),
    Mutant(
        name="a-text-that-ended-keeps-its-room",
        breaks="room held for a text is given back with its last token",
        file="python/kvpager/_runtime/scheduling/decode.py",
        old="                if finish is not None:\n                    stream.leave()\n",
        new="",
        killers=(ROOM + "test_room_is_given_back_with_the_last_token_not_after_it",),
    ),
    Mutant(
        name="an-interrupted-recording-goes-on",
        breaks="an interrupt while an engine starts leaves torch as it was",
        file="python/kvpager/_model/proof/operations.py",
        old="    finally:\n        _take_left_behind()\n",
        new="    finally:\n        pass\n",
        killers=(
            "model/test_operations_between_modules.py::"
            "test_no_interrupt_of_a_recording_leaves_products_that_give_zeros",
        ),
    ),
    Mutant(
        name="an-abandoned-text-keeps-its-room",
        breaks="room held for a text is given back when nobody holds its iterator any more",
        file="python/kvpager/_runtime/scheduling/decode.py",
        old="        self._finalizer = weakref.finalize(self, _end, streams)\n",
        new="        self._finalizer = weakref.finalize(self._steps, _end, [])\n",
        killers=(ROOM + "test_an_abandoned_stream_holds_no_room[dropped-0]",),
    ),
    Mutant(
        name="the-room-of-one-stream-is-anothers",
        breaks="the end of one iterator gives back no room that another one holds",
        file="python/kvpager/_runtime/text/transcript.py",
        old="            with suppress(PagerError):\n"
        "                self.sequence.reserve(self._most_reserved())\n",
        new="            with suppress(PagerError):\n"
        "                self.sequence.reserve(self.sequence.length)\n",
        killers=(ROOM + "test_a_stream_that_replaces_another_keeps_its_own_room",),
    ),
    Mutant(
        name="a-failed-prefill-keeps-its-room",
        breaks="a prefill that fails holds no room",
        file="python/kvpager/_runtime/scheduling/prefill.py",
        old="                feed.leave()\n",
        new="                feed.done  # noqa: B018\n",
        killers=(ROOM + "test_a_prefill_that_fails_holds_nothing",),
    ),
    Mutant(
        name="a-finished-request-keeps-its-room",
        breaks="a request that ends holds no room",
        file="python/kvpager/requests/request.py",
        old="                holder.leave()\n",
        new="                holder.transcript.length  # noqa: B018\n",
        killers=(ROOM + "test_requests_that_end_early_hold_nothing",),
    ),
    Mutant(
        name="only-known-errors-are-a-requests-own",
        breaks="whatever fails with a request ends it alone, and nothing loops",
        file="python/kvpager/requests/scheduler.py",
        old="        except Exception as error:  # one of these requests causes it\n",
        new="        except InvalidArgumentError as error:\n",
        killers=(
            FAILING + "test_a_forward_that_fails_is_found_by_halving_and_the_others_go_on",
            FAILING + "test_what_fails_for_everyone_ends_everyone[IndexError]",
        ),
    ),
    Mutant(
        name="a-callback-takes-the-batch-with-it",
        breaks="a callback that raises ends its own request",
        file="python/kvpager/requests/scheduler.py",
        old="            except Exception as error:  # of sampling, or of `on_token`\n",
        new="            except CapacityError as error:\n",
        killers=(FAILING + "test_a_callback_that_raises_ends_its_request",),
    ),
    Mutant(
        name="learned-positions-have-no-end",
        breaks="a text beyond learned positions is refused, whatever the options say",
        file="python/kvpager/_model/seam/causal_lm.py",
        old="        self._beyond = beyond and not self.learned\n",
        new="        self._beyond = beyond\n",
        killers=(FAILING + "test_learned_positions_have_an_end[True]",),
    ),
    Mutant(
        name="a-draft-goes-beyond-its-positions",
        breaks="drafting stops where the draft model's positions end",
        file="python/kvpager/drafts/drafting.py",
        old="        within = most is None or len(ask.text) + ask.most - 1 <= most\n",
        new="        within = True\n",
        killers=(FAILING + "test_a_draft_stops_where_its_positions_end",),
    ),
    Mutant(
        name="closing-does-not-wait-for-a-forward",
        breaks="close waits for the forward of another thread",
        file="python/kvpager/_runtime/execution/core.py",
        old="            self.turns.end()\n",
        new="            self.turns._ended = True\n",
        killers=(
            CLOSING + "test_closing_waits_for_the_forward_of_another_thread_and_frees_everything",
        ),
    ),
    Mutant(
        name="closing-inside-a-forward-hangs-or-half-closes",
        breaks="close inside a forward is refused and changes nothing",
        file="python/kvpager/_runtime/execution/core.py",
        old="        if self.turns.held_here:\n",
        new="        if self.turns is None:\n",
        killers=(CLOSING + "test_closing_inside_a_forward_is_refused_and_changes_nothing",),
    ),
    Mutant(
        name="requests-outlive-their-engine",
        breaks="requests of a closed engine end as closed",
        file="python/kvpager/engine.py",
        old='[partial(scheduler.end, "closed") for scheduler in list(self._schedulers)]',
        new="[]",
        killers=(CLOSING + "test_requests_of_a_closed_engine_end_as_closed",),
    ),
    Mutant(
        name="a-closed-scheduler-takes-requests",
        breaks="nothing is submitted to a closed scheduler",
        file="python/kvpager/requests/scheduler.py",
        old="            if self._ending is not None:\n                raise",
        new="            if self._queues is None:\n                raise",
        killers=(CLOSING + "test_nothing_is_submitted_to_a_closed_scheduler",),
    ),
    Mutant(
        name="runs-of-one-prompt-draw-alike",
        breaks="without a seed every request draws afresh",
        file="python/kvpager/requests/scheduler.py",
        old="            draws = fresh_seed()\n",
        new="            draws = 0\n",
        killers=(SEEDS + "test_sampled_runs_of_one_prompt_differ_and_each_can_be_repeated",),
    ),
    Mutant(
        name="new-sessions-share-a-seed",
        breaks="sessions draw differently from each other unless given a seed",
        file="python/kvpager/_runtime/text/transcript.py",
        old="(sampling or Sampling(seed=fresh_seed()), _NOWHERE)",
        new="(sampling or Sampling(), _NOWHERE)",
        killers=(SEEDS + "test_sessions_draw_differently_and_record_their_seed",),
    ),
    Mutant(
        name="forks-draw-alike",
        breaks="forks draw differently from each other unless given a seed",
        file="python/kvpager/session.py",
        old="        twin.sampling = replace(self.sampling, seed=fresh_seed())\n",
        new="",
        killers=(SEEDS + "test_forks_draw_differently_unless_given_a_seed",),
    ),
    Mutant(
        name="a-text-regenerated-draws-the-same",
        breaks="each generation draws afresh, in a way that its session's seed decides",
        file="python/kvpager/_runtime/text/transcript.py",
        old="return own if sampling.temperature == 0 or self.goes_on(text) else seed_after(own)\n",
        new="return own\n",
        killers=(SEEDS + "test_regenerated_text_is_another",),
    ),
    Mutant(
        name="an-interrupted-text-goes-on-with-other-draws",
        breaks="a text that was left in the middle goes on with its own draws, restored or not",
        file="python/kvpager/_runtime/text/transcript.py",
        old="return own if sampling.temperature == 0 or self.goes_on(text) else seed_after(own)\n",
        new="return own if sampling.temperature == 0 else seed_after(own)\n",
        killers=(SEEDS + "test_an_interrupted_text_goes_on_with_its_draws",),
    ),
    Mutant(
        name="a-text-without-its-token-does-not-go-on",
        breaks="a text that failed between a forward and its token goes on with its draws",
        file="python/kvpager/_runtime/text/transcript.py",
        old="        return 0 <= self.length - self._generation[1] <= 1\n",
        new="        return self.pending is not None\n",
        killers=(
            SEEDS
            + "test_a_text_that_failed_between_a_forward_and_its_token_goes_on_with_its_draws",
        ),
    ),
    Mutant(
        name="a-request-goes-on-with-the-pending-token",
        breaks="a request in a session is what update and generate make",
        file="python/kvpager/_runtime/text/transcript.py",
        old="        if text is None or len(text) == self.length:\n",
        new="        if self.pending is not None:\n            return True\n"
        "        if text is None or len(text) == self.length:\n",
        killers=(SEEDS + "test_a_request_in_a_session_is_what_update_and_generate_make",),
    ),
    Mutant(
        name="a-snapshot-forgets-that-a-text-goes-on",
        breaks="a text that failed between a forward and its token goes on, restored or not",
        file="python/kvpager/_runtime/snapshots/freezing.py",
        old="        if transcript.pending is None and transcript.generated_last:\n",
        new="        if False:\n",
        killers=(
            SEEDS
            + "test_a_text_that_failed_between_a_forward_and_its_token_goes_on_with_its_draws",
        ),
    ),
)
