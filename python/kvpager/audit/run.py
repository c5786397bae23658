"""Asks a server for the same texts in every way, and compares its answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from kvpager.audit.answers import Answer
from kvpager.audit.asking import Asker, AuditError, Prompt
from kvpager.audit.client import HttpError, Server
from kvpager.audit.compare import CHANGED, CORRUPT, NOT_EXACT, UNKNOWN, Comparison, compare
from kvpager.audit.limits import MOST, limit_of
from kvpager.audit.parallel import in_parallel
from kvpager.audit.report import Report, Way
from kvpager.audit.restart import restart

OnStep = Callable[[str, int, int], None]
"""Called with the way that runs, the requests made, and those there are in it."""

T = TypeVar("T")

_CANARIES = 4


@dataclass(frozen=True)
class Plan:
    """What is sent.

    Attributes:
        prompts: number of texts.
        prompt_tokens: each has about as many.
        max_tokens: of each answer.
        concurrency: requests at a time, in company and to fill the cache.
        eviction_tokens: most tokens of other texts that are sent to fill the cache; 0: none.
        limit: between rounding and corruption, in nats; None: drawn from cold runs.
        restart_command: restarts the server (`restart`); None: it is not restarted.
        restart_seconds: for that command, and then for the server to answer.
    """

    prompts: int = 8
    prompt_tokens: int = 600
    max_tokens: int = 24
    concurrency: int = 4
    eviction_tokens: int = 32768
    limit: float | None = None
    restart_command: str | None = None
    restart_seconds: float = 300.0


@dataclass(frozen=True)
class Question:
    """A request, and the place of its answer in a reference.

    Attributes:
        number: of the prompt.
        prompt: what is sent; text or token ids.
        salt: as of `Asker.ask`.
        skip: tokens of the reference's answer that are part of `prompt`.
        stream: whether it is sent in pieces.
    """

    number: int
    prompt: Prompt
    salt: str | None
    skip: int = 0
    stream: bool = False


def audit(
    server: Server, plan: Plan, report: Report, model: str | None, on_step: OnStep | None = None
) -> None:
    """Audits a server. What is found goes into `report` at once, so that an interrupt loses none.

    Args:
        server: the only host that is sent anything.
        plan: what is sent.
        report: an empty one.
        model: by its name; None: the first that the server lists.
        on_step: for a progress line.

    Raises:
        AuditError: the server cannot be audited, or stopped answering.
    """
    begun = time.monotonic()
    try:
        _Audit(server, plan, report, model, on_step or (lambda *_: None)).run()
    except HttpError as error:
        report.ended = str(error)
        raise AuditError(report.ended) from error
    except AuditError as error:
        report.ended = str(error)
        raise
    finally:
        report.seconds = time.monotonic() - begun


class _Audit:
    """One audit of one server."""

    def __init__(
        self, server: Server, plan: Plan, report: Report, model: str | None, on_step: OnStep
    ) -> None:
        self._server, self._plan, self._report, self._on_step = server, plan, report, on_step
        on_step("what the server takes", 0, 0)
        self._asker = Asker(server, model, plan.max_tokens, plan.prompt_tokens)
        self._texts = [self._asker.prompt(plan.prompt_tokens) for _ in range(plan.prompts)]
        self._limit = MOST  # of cold runs: anything beyond is corruption, whatever the server
        self._references: list[Answer] = []
        report.model, report.cold = self._asker.model, self._asker.cold
        report.prompts = self._texts

    def run(self) -> None:
        """Runs every way."""
        anew = self._asker.cold != "new text"
        self._cold()
        floor = []
        if anew:
            floor = [
                self._compared(
                    "cold again", "without what is kept of them", False, self._all(None)
                ),
                self._compared(
                    "cold, continued",
                    "text and half its answer, computed anew: prefill in the place of decode",
                    False,
                    self._halves(fresh=True),
                ),
            ]
        limit = limit_of(each for way in floor for each in way.comparisons)
        if self._plan.limit is not None:
            limit = replace(limit, value=self._plan.limit)
        self._report.limit, self._limit = limit, limit.value
        self._compared("warm", "the same text again", True, self._all())
        self._compared("warm, streamed", "again, in pieces", True, self._all(stream=True))
        self._compared(
            "continued", "text and half its answer: the next turn", True, self._halves(fresh=False)
        )
        self._in_company(anew)
        if self._plan.eviction_tokens:
            self._after_eviction()
        if self._plan.restart_command is not None:
            self._after_restart(anew)
        self._notes()

    # Questions.

    def _all(self, salt: str | None = "", *, stream: bool = False) -> list[Question]:
        """Every text; `salt` "": what may be reused is what was computed for the same text."""
        return [
            Question(i, text, str(i) if salt == "" else salt, stream=stream)
            for i, text in enumerate(self._texts)
        ]

    def _halves(self, *, fresh: bool) -> list[Question]:
        """Every text followed by the first half of its answer."""
        questions = []
        for i, (text, answer) in enumerate(zip(self._texts, self._references)):
            half = len(answer.tokens) // 2
            prompt: Prompt
            if answer.ids is not None and answer.prompt_ids is not None:
                prompt = [*answer.prompt_ids, *answer.ids[:half]]
            else:
                prompt = text + "".join(token.text for token in answer.tokens[:half])
            questions.append(Question(i, prompt, None if fresh else str(i), skip=half))
        return questions

    # Ways.

    def _cold(self) -> None:
        """Computes the references; compares each with itself, which finds what is not a number."""
        way = self._began("cold", "each text for the first time: the reference", reuses=False)
        for question in self._all():
            try:
                answer = self._ask(question)
            except HttpError as error:
                raise AuditError(f"prompt {question.number}, cold: {error}") from error
            self._references.append(answer)
            itself = compare(question.number, answer, self._references, self._limit)
            way.comparisons.append(replace(itself, tokens=0))
            self._on_step(way.name, len(self._references), len(self._texts))
        self._report.scored = all(answer.scored for answer in self._references)
        if not self._report.scored:
            self._report.notes.append(
                "the server returns no log-probabilities: rounding cannot be told from corruption"
            )

    def _in_company(self, anew: bool) -> None:
        """All texts at once, streamed or not; beside them all of them cold."""
        warm = [replace(each, stream=bool(each.number % 2)) for each in self._all()]
        cold = self._all(None) if anew else []
        questions = [each for pair in zip(warm, cold) for each in pair] if cold else warm
        answers = self._answers("in company", questions, self._plan.concurrency)
        found = list(zip(questions, answers))
        for name, about, reuses in (
            ("cold in company", "while others run", False),
            ("warm in company", "while others run", True),
        ):
            pairs = [pair for pair in found if (pair[0].salt is None) != reuses]
            if pairs:
                way = self._began(name, about, reuses=reuses)
                way.comparisons += [self._comparison(*pair) for pair in pairs]

    def _after_eviction(self) -> None:
        """Texts again, after other texts have filled the cache."""
        plan, asker = self._plan, self._asker
        canaries = [(asker.prompt(plan.prompt_tokens), f"canary-{i}") for i in range(_CANARIES)]
        for text, salt in canaries:
            asker.ask(text, salt, max_tokens=1)
        count = -(-plan.eviction_tokens // (plan.prompt_tokens * len(canaries)))
        sent, evicted = 0, False
        for number, (text, salt) in enumerate(canaries):
            fillers = [
                partial(asker.ask, asker.prompt(plan.prompt_tokens), None, max_tokens=1)
                for _ in range(count)
            ]
            made = number * count
            answers = self._parallel("filling the cache", fillers, made, count * len(canaries))
            sent += sum(answer.prompt_tokens or plan.prompt_tokens for answer in answers)
            evicted = asker.ask(text, salt, max_tokens=1).cached_tokens == 0
            if evicted:
                break
        if asker.reports and not evicted:
            self._report.notes.append(
                f"after {sent:,} tokens of other texts the server still had what was kept before "
                "them: it has another tier, or needs a larger --eviction-tokens"
            )
        about = f"after {sent:,} tokens of other texts"
        self._compared("after eviction", about, True, self._all())

    def _after_restart(self, anew: bool) -> None:
        """Texts again from a new process, compared with what that computes cold."""
        plan = self._plan
        assert plan.restart_command is not None
        self._on_step("restarting", 0, 0)
        if not restart(self._server, plan.restart_command, plan.restart_seconds):
            self._report.notes.append(
                "the server answered all the while that --restart-command ran: is it a new process?"
            )
        before = self._references
        warm = self._answers("after restart", self._all())
        if anew:
            questions = self._all(None)
            answers = self._answers("cold after restart", questions)
            way = self._began("cold after restart", "without what is kept", reuses=False)
            for question, answer in zip(questions, answers):
                comparison = self._comparison(question, answer)
                if comparison.result == CORRUPT:
                    self._changed()
                    comparison = replace(comparison, result=NOT_EXACT, why=CHANGED)
                way.comparisons.append(comparison)
            pairs = zip(answers, before)
            self._references = [new if isinstance(new, Answer) else old for new, old in pairs]
        way = self._began("after restart", "the same text again, from a new process", reuses=True)
        way.comparisons += map(self._comparison, self._all(), warm)
        self._references = before

    def _changed(self) -> None:
        words = (
            "since the restart the model answers otherwise when cold: other weights or settings, "
            "which is no fault of a cache; what was kept was compared with the new cold answers"
        )
        if words not in self._report.notes:
            self._report.notes.append(words)

    def _notes(self) -> None:
        report, asker = self._report, self._asker
        report.notes += [
            f"{way.name}: not compared, as texts are tokenised otherwise with half their answer"
            for way in report.ways
            if not way.comparisons
        ]
        if asker.cold == "new text":
            report.notes.append(
                "the server has no field by which a text is computed again without its cache, so "
                "its rounding was not measured, and the limit is a constant"
            )
        if asker.assumed:
            report.notes.append(
                "the server does not report cached tokens (vLLM: --enable-prompt-tokens-details), "
                "so whether its cache was used is not known"
            )

    # Asking and comparing.

    def _began(self, name: str, about: str, *, reuses: bool) -> Way:
        way = Way(name, about, reuses)
        self._report.ways.append(way)
        return way

    def _compared(self, name: str, about: str, reuses: bool, questions: Sequence[Question]) -> Way:
        """Asks one question after the other."""
        way = self._began(name, about, reuses=reuses)
        for i, question in enumerate(questions):
            answer = self._tried(question)
            if self._is_continued(question, answer):
                way.comparisons.append(self._comparison(question, answer))
            self._on_step(name, i + 1, len(questions))
        return way

    def _answers(
        self, name: str, questions: Sequence[Question], threads: int = 1
    ) -> list[Answer | HttpError]:
        jobs = [partial(self._tried, question) for question in questions]
        return self._parallel(name, jobs, 0, len(jobs), threads)

    def _parallel(
        self,
        name: str,
        jobs: Sequence[Callable[[], T]],
        made: int,
        total: int,
        threads: int | None = None,
    ) -> list[T]:
        """Their results; `made` and `total` requests are for the progress line."""
        counted = made

        def done() -> None:
            nonlocal counted
            counted += 1
            self._on_step(name, counted, total)

        return in_parallel(jobs, threads or self._plan.concurrency, done)

    def _tried(self, question: Question) -> Answer | HttpError:
        try:
            return self._ask(question)
        except HttpError as error:
            return error

    def _ask(self, question: Question) -> Answer:
        fields = {"max_tokens": max(1, self._plan.max_tokens - question.skip)}
        return self._asker.ask(question.prompt, question.salt, stream=question.stream, **fields)

    def _is_continued(self, question: Question, answer: Answer | HttpError) -> bool:
        """False where a text was tokenised otherwise with half its answer than without."""
        before = self._references[question.number].prompt_tokens
        if isinstance(answer, HttpError) or before is None or not question.skip:
            return True
        return answer.prompt_tokens == before + question.skip

    def _comparison(self, question: Question, answer: Answer | HttpError) -> Comparison:
        if isinstance(answer, HttpError):
            return Comparison(question.number, UNKNOWN, str(answer))
        return compare(question.number, answer, self._references, self._limit, skip=question.skip)
