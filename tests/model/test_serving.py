"""Requests of asyncio tasks: the same tokens as alone, in any order, cancelled, failed, closed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest
import text_models

from kvpager import CapacityError, Engine, InvalidArgumentError

SAMPLED = {"temperature": 1.0, "seed": 5, "eos": None}
_Result = TypeVar("_Result")


@pytest.fixture
def engine() -> Iterator[Engine]:
    model, tokenizer = text_models.model(), text_models.byte_level()
    with Engine(model, tokenizer=tokenizer, pool_tokens=4096, rows=32) as made:
        yield made


def run(work: Coroutine[Any, Any, _Result]) -> _Result:
    return asyncio.run(asyncio.wait_for(work, 120))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "kvpager-serve"]


def test_many_tasks_get_the_text_they_would_get_alone(engine: Engine) -> None:
    prompts = [f"Prompt number {i}" for i in range(12)]
    alone = []
    for prompt in prompts:
        session = engine.session()
        session.prefill(prompt)
        alone.append(session.generate(16, **SAMPLED).text)

    async def serve() -> list[str]:
        async with engine.serve() as serving:

            async def one(prompt: str) -> str:
                return "".join([text async for text in serving.stream(prompt, 16, **SAMPLED)])

            return await asyncio.gather(*map(one, prompts))

    assert run(serve()) == alone
    assert not threads()


def test_conversations_of_many_tasks_are_those_of_sessions_alone(engine: Engine) -> None:
    def talk(number: int) -> list[str]:
        return [f"Question {number}", "And why?", "Thanks."]

    expected = []
    for number in range(6):
        session = engine.session()
        for text in talk(number):
            session.chat(text, 10, **SAMPLED)
        expected.append((session.messages, session.tokens.tolist()))

    async def serve() -> list[Any]:
        async with engine.serve(max_sessions=4) as serving:

            async def one(number: int) -> tuple[Any, Any]:
                session = engine.session()
                for text in talk(number):
                    done = await serving.chat(session, text, 10, **SAMPLED).complete()
                    assert done.text == session.messages[-1]["content"]
                    assert done.session is session
                return session.messages, session.tokens.tolist()

            return await asyncio.gather(*map(one, range(6)))

    assert run(serve()) == expected


def test_a_given_session_is_made_to_hold_the_prompt(engine: Engine) -> None:
    session, expected = engine.session(), engine.session()
    session.prefill("The first part, and an end that goes")
    expected.prefill("The first part, and another end")
    told = expected.generate(8, **SAMPLED)
    with engine.scheduler() as scheduler:
        prompt = "The first part, and another end"
        request = scheduler.submit(prompt, 8, session=session, **SAMPLED)
        while not scheduler.idle:
            scheduler.step()
    assert request.completion is not None
    assert request.completion.tokens.tolist() == told.tokens.tolist()
    assert session.tokens.tolist() == expected.tokens.tolist()
    with engine.scheduler() as scheduler, pytest.raises(InvalidArgumentError, match="given too"):
        scheduler.submit(session, 8, session=session)


def test_a_prompt_without_room_leaves_its_session_as_it_was() -> None:
    room = {"pool_tokens": 1024, "host_bytes": 0}
    with Engine(text_models.model(), rows=32, **room) as engine:
        session = engine.session()
        session.prefill(range(5, 200))
        other = [*range(5, 50), *range(7, 400)]
        with engine.scheduler() as scheduler:
            request = scheduler.submit(other, 900, session=session)
            scheduler.step()
        assert request.completion is not None
        assert isinstance(request.completion.error, CapacityError)
        assert session.tokens.tolist() == list(range(5, 200))


def test_what_ends_a_request_is_told_once(engine: Engine) -> None:
    told: list[Any] = []

    def on_finish(request: Any, completion: Any) -> None:
        told.append((request.index, completion.finish_reason, completion is request.completion))
        raise RuntimeError("of the caller's")

    with engine.scheduler() as scheduler:
        for length in (3, 6):
            scheduler.submit("Hello", length, on_finish=on_finish, **SAMPLED)
        scheduler.submit("Hello", 9, on_finish=on_finish, **SAMPLED).cancel()
        while not scheduler.idle:
            scheduler.step()
        with pytest.raises(InvalidArgumentError, match="on_finish is 5"):
            scheduler.submit("Hello", 3, on_finish=5)  # type: ignore[arg-type]
    assert sorted(told) == [(0, "length", True), (1, "length", True), (2, "cancelled", True)]


def test_tokens_can_be_had_instead_of_text(engine: Engine) -> None:
    async def serve() -> tuple[list[Any], Any]:
        async with engine.serve() as serving:
            stream = serving.stream("Hello", 8, stream="tokens", logprobs=True, **SAMPLED)
            return [token async for token in stream], stream.completion

    told, completion = run(serve())
    assert [token.id for token in told] == completion.tokens.tolist()
    assert [token.logprob for token in told] == completion.logprobs.tolist()


def test_a_stream_that_is_left_ends_its_request(engine: Engine) -> None:
    async def serve() -> str:
        async with engine.serve() as serving:
            stream = serving.stream("Hello", 2000, **SAMPLED)
            async for _ in stream:
                break
            await stream.aclose()
            other = await serving.stream("Hello", 4, **SAMPLED).complete()
            assert other.finish_reason == "length"
            while stream.completion is None:
                await asyncio.sleep(0.01)
            return stream.completion.finish_reason

    assert run(serve()) == "cancelled"


def test_a_task_that_is_cancelled_ends_its_request(engine: Engine) -> None:
    async def serve() -> str:
        async with engine.serve() as serving:
            stream = serving.stream("Hello", 2000, **SAMPLED)
            task = asyncio.ensure_future(stream.complete())
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while stream.completion is None:
                await asyncio.sleep(0.01)
            return stream.completion.finish_reason

    assert run(serve()) == "cancelled"


def test_a_stream_that_nobody_has_any_more_ends_its_request(engine: Engine) -> None:
    async def serve() -> str:
        async with engine.serve() as serving:
            stream = serving.stream("Hello", 2000, **SAMPLED)
            await anext(stream)
            request = stream.request
            del stream
            gc.collect()
            while request.completion is None:
                await asyncio.sleep(0.01)
            return request.completion.finish_reason

    assert run(serve()) == "cancelled"


def test_a_wrong_argument_is_an_error_of_the_call(engine: Engine) -> None:
    async def serve() -> None:
        async with engine.serve() as serving:
            with pytest.raises(InvalidArgumentError, match="did you mean temperature"):
                serving.stream("Hello", 3, temprature=1.0)
            with pytest.raises(InvalidArgumentError, match="stream is 'text'"):
                serving.stream("Hello", 3, stream="text")  # type: ignore[arg-type]
            with pytest.raises(InvalidArgumentError, match="max_new_tokens is 0"):
                serving.chat(engine.session(), "Hello", 0)
            session = engine.session()
            running = serving.chat(session, "Hello", 1000, **SAMPLED)
            with pytest.raises(InvalidArgumentError, match="in another request"):
                serving.chat(session, "Hello", 3)
            await running.aclose()

    run(serve())


def test_an_error_of_one_request_is_raised_where_it_is_awaited() -> None:
    room = {"pool_tokens": 1024, "host_bytes": 0}
    model, tokenizer = text_models.model(), text_models.byte_level()

    async def serve(engine: Engine) -> None:
        async with engine.serve() as serving:
            small = serving.stream("Hello", 5, **SAMPLED)
            with pytest.raises(CapacityError):
                await serving.stream("Hello " * 600, 5, **SAMPLED).complete()
            assert (await small.complete()).finish_reason == "length"

    with Engine(model, tokenizer=tokenizer, rows=32, **room) as engine:
        run(serve(engine))


def test_what_stops_all_steps_is_told_to_all_who_wait(engine: Engine) -> None:
    async def serve() -> None:
        weight = engine.model.lm_head.weight
        async with engine.serve() as serving:
            streams = [serving.stream("Hello", 500, **SAMPLED) for _ in range(3)]
            await anext(streams[0])
            before = weight.data.clone()
            try:
                with text_models.torch.no_grad():
                    weight.mul_(1.5)
                for stream in streams:
                    with pytest.raises(InvalidArgumentError, match="changed"):
                        await stream.complete()
            finally:
                with text_models.torch.no_grad():
                    weight.copy_(before)

    run(serve())


def test_an_engine_that_is_closed_ends_the_streams_and_the_thread() -> None:
    model, tokenizer = text_models.model(), text_models.byte_level()

    async def serve() -> str:
        engine = Engine(model, tokenizer=tokenizer, pool_tokens=2048, rows=32)
        serving = engine.serve()
        stream = serving.stream("Hello", 1500, **SAMPLED)
        await anext(stream)
        await asyncio.to_thread(engine.close)
        done = await stream.complete()
        await serving.aclose()
        return done.finish_reason

    assert run(serve()) == "closed"
    assert not threads()


def test_serving_that_nobody_has_any_more_ends_its_thread(engine: Engine) -> None:
    async def serve() -> None:
        serving = engine.serve()
        await serving.stream("Hello", 2, **SAMPLED).complete()
        assert threads()
        del serving
        gc.collect()
        while threads():
            await asyncio.sleep(0.01)

    run(serve())


def test_any_number_of_tasks_may_wait_for_one_request(engine: Engine) -> None:
    async def serve() -> list[Any]:
        async with engine.serve() as serving:
            stream = serving.stream("Hello", 10, **SAMPLED)
            pieces = asyncio.ensure_future(drained(stream))
            done = await asyncio.gather(stream.complete(), stream.complete())
            await pieces
            return [*done, await stream.complete()]

    first, *others = run(serve())
    assert first.finish_reason == "length"
    assert all(other is first for other in others)


async def drained(stream: Any) -> None:
    async for _ in stream:
        pass


def test_after_a_timeout_the_rest_of_the_answer_can_be_had(engine: Engine) -> None:
    async def serve() -> Any:
        async with engine.serve() as serving:
            stream = serving.stream("Hello", 3000, **SAMPLED)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stream.complete(), 0.2)
            return await stream.complete()

    done = run(serve())
    assert done.finish_reason == "cancelled"
    assert len(done.tokens) < 3000


@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError, GeneratorExit])
def test_an_exit_in_a_callback_ends_requests_with_an_error_and_serving_goes_on(
    engine: Engine, error: type[BaseException]
) -> None:
    def leave(*_: object) -> None:
        raise error

    async def serve() -> tuple[Any, Any]:
        async with engine.serve() as serving:
            bad = serving.scheduler.submit("Hello", 10, on_token=leave, **SAMPLED)
            while bad.completion is None:
                await asyncio.sleep(0.01)
            return bad.completion, await serving.stream("Hello", 4, **SAMPLED).complete()

    failed, later = run(serve())
    assert failed.finish_reason == "error"
    assert error.__name__ in str(failed.error)
    assert later.finish_reason == "length"
