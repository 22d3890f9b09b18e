"""Ctrl-C at any moment of `LLM.generate`: blocks come back, the books balance, the next answer is right."""

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from octavo import LLM
from octavo.cache.manager import CacheManager
from octavo.schedule.scheduler import Scheduler
from support.engines import answers, greedy

PLACES = [(Scheduler, "plan"), (Scheduler, "commit"), (Scheduler, "add"), (CacheManager, "extend")]
PROMPTS = [list(range(40)), list(range(100, 130))]


@pytest.mark.parametrize(("owner", "name"), PLACES, ids=[name for _, name in PLACES])
def test_an_interrupt_inside_a_step_waits_for_its_end(
    owner: type,
    name: str,
    llm_of: Callable[..., AbstractContextManager[LLM]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = greedy(8, n=2)
    with llm_of("llama", max_num_batched_tokens=16) as llm:
        expected = [answers(o) for o in llm.generate(PROMPTS, params)]
        inside = getattr(owner, name)

        def pressed(*args: object, **options: object) -> object:
            os.kill(os.getpid(), signal.SIGINT)  # arrives before the next line of Python
            result = inside(*args, **options)
            finished.append(name)
            return result

        finished: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, pressed)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, params)
        assert finished
        llm.check()
        assert (llm.stats().running, llm.stats().waiting, llm.stats().bytes_running) == (0, 0, 0)
        assert [answers(o) for o in llm.generate(PROMPTS, params)] == expected


def test_a_handler_that_goes_on_lets_the_answers_end(
    llm_of: Callable[..., AbstractContextManager[LLM]], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    inside = Scheduler.commit
    monkeypatch.setattr(
        Scheduler, "commit", lambda *args: (os.kill(os.getpid(), signal.SIGINT), inside(*args))[1]
    )
    try:
        with llm_of("llama") as llm:
            [output] = llm.generate([PROMPTS[0]], greedy(3))
    finally:
        signal.signal(signal.SIGINT, before)
    assert output.finished
    assert heard == 3 * [signal.SIGINT]
