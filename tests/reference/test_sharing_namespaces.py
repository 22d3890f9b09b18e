"""Tenants and salts keep caches apart: nothing crosses, and equals share."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from octavo.cache.receipt import Receipt
from octavo.engine import Engine
from octavo.params import SamplingParams
from support.engines import greedy
from support.sharing import Ear, Heard

PROMPT = [(11 * i) % 241 for i in range(30)]
REUSED = 28
Key = tuple[str, str | None]
SPLIT: list[Key] = [("ab", "c"), ("a", "bc")]
NAMESPACES: list[Key] = [
    ("", None),
    ("", ""),
    ("", "a"),
    ("a", None),
    ("a", ""),
    ("other tenant", None),
    *SPLIT,
    ("abc", None),
    ("", "abc"),
]


def ask(engine: Engine, tenant: str, params: SamplingParams) -> tuple[Heard, Receipt]:
    """An engine serves one tenant; here it serves several from one cache."""
    live = engine.prepare("asked", PROMPT, params)
    live.request.namespace = replace(live.request.namespace, tenant=tenant)
    engine.submit(live)
    ear = Ear(live)
    while engine.has_work:
        engine.step()
        ear.listen()
    engine.check()
    return ear.heard(), live.request.receipt


def salted(salt: str | None) -> SamplingParams:
    return greedy(3, cache_salt=salt)


@pytest.fixture
def engine(single_of: Callable[..., Engine]) -> Engine:
    return single_of("llama", block_size=4)


def test_no_hit_crosses_and_equals_share(engine: Engine) -> None:
    heard = set()
    for i, (tenant, salt) in enumerate(NAMESPACES):
        answer, receipt = ask(engine, tenant, salted(salt))
        heard.add(answer)
        assert receipt.reused_tokens == 0
        known = any(other == tenant for other, _ in NAMESPACES[:i])  # nothing is told of other tenants
        assert receipt.to_dict()["miss"] == {"reason": "namespace" if known else "cold", "at_token": 0}
    for tenant, salt in reversed(NAMESPACES):
        answer, receipt = ask(engine, tenant, salted(salt))
        heard.add(answer)
        assert receipt.reused_tokens == REUSED
    assert len(heard) == 1


@pytest.mark.parametrize(("first", "second"), [(SPLIT[0], SPLIT[1]), (SPLIT[1], SPLIT[0])])
def test_tenant_and_salt_are_not_run_together(first: Key, second: Key, engine: Engine) -> None:
    for tenant, salt in (first, second):
        assert ask(engine, tenant, salted(salt))[1].reused_tokens == 0


def test_a_missing_salt_is_none(engine: Engine) -> None:
    ask(engine, "", salted(None))
    assert ask(engine, "", greedy(3))[1].reused_tokens == REUSED
    assert ask(engine, "", salted(""))[1].reused_tokens == 0


def test_copies_in_different_namespaces_do_not_wait_for_each_other(engine: Engine) -> None:
    lives = [engine.prepare(str(i), PROMPT, salted(salt)) for i, salt in enumerate((None, "", "a"))]
    for live in lives:
        engine.submit(live)
    engine.step()
    assert engine.stats().running == 3
    while engine.has_work:
        engine.step()
    assert all(live.request.receipt.reused_tokens == 0 for live in lives)
    assert all(
        one.output().outputs[0].token_ids == two.output().outputs[0].token_ids for one, two in pairwise(lives)
    )


def test_an_engine_s_tenant_is_part_of_its_requests_namespace(single_of: Callable[..., Engine]) -> None:
    engine = single_of("llama", block_size=4, tenant="mine")
    live = engine.prepare("a", PROMPT, salted("s"))
    assert (live.request.namespace.tenant, live.request.namespace.salt) == ("mine", "s")
    ask(engine, "mine", salted("s"))
    engine.submit(live)
    while engine.has_work:
        engine.step()
    assert live.request.receipt.reused_tokens == REUSED
