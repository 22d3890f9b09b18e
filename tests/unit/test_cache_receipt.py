import json

import pytest

from octavo.cache.events import Event, EventLog
from octavo.cache.hashing import Namespace
from octavo.cache.receipt import Miss
from support.cache_world import World, words

B = 4


def test_the_receipt_of_a_simple_request():
    world = World(blocks=32)
    world.generate(words(1, 13), 1)
    world.clock.now = 2.0
    request = world.add([*words(1, 12), *words(2, 6)], 5, seed=7)
    world.clock.now = 2.5
    world.run()
    assert json.loads(json.dumps(request.receipt.to_dict())) == {
        "prompt_tokens": 18,
        "completion_tokens": 5,
        "seed": 7,
        "reused_tokens": 12,
        "reused_from": {"arena": 12},
        "computed_tokens": 6,
        "recomputed_tokens": 0,
        "written_blocks": 2,
        "miss": {"reason": "diverged", "at_token": 12},
        "preemptions": 0,
        "queued_ms": 500.0,
        "formats": {"bf16": 22},
        "compressed_tokens": 0,
        "dropped": [],
        "pinned": None,
        "exact": True,
    }


def miss_of(world, prompt, **fields):
    return world.generate(prompt, 1, **fields).receipt.miss


def test_cold_diverged_and_tail():
    world = World(blocks=32)
    assert miss_of(world, words(1, 14)) == Miss("cold", 0)
    assert miss_of(world, words(1, 14)) == Miss("tail", 12)
    assert miss_of(world, words(1, 13)) == Miss("tail", None)
    assert miss_of(world, [*words(1, 8), *words(2, 8)]) == Miss("diverged", 8)
    assert miss_of(world, [5]) == Miss("cold", None)


def test_namespaces_that_know_the_same_tokens():
    world = World(blocks=32)
    world.generate(words(1, 14), 1, namespace=Namespace(salt="a"))
    world.generate(words(1, 6), 1, namespace=Namespace(salt="b"))
    b = Namespace(salt="b")
    assert miss_of(world, words(1, 14), namespace=Namespace(salt="c")) == Miss("namespace", 0)
    assert miss_of(world, words(1, 14), namespace=b) == Miss("namespace", 4)
    assert miss_of(world, [*words(1, 12), *words(2, 8)], namespace=b) == Miss("diverged", 12)
    assert miss_of(world, words(3, 14), namespace=b) == Miss("cold", 0)


def test_what_another_tenant_has_asked_is_not_told():
    world = World(blocks=32)
    world.generate(words(1, 14), 1, namespace=Namespace(tenant="a"))
    assert miss_of(world, words(1, 14), namespace=Namespace(tenant="b")) == Miss("cold", 0)


def test_reclaimed_blocks_are_remembered():
    world = World(blocks=4)
    world.generate(words(1, 13), 1)
    world.generate(words(2, 5), 1)
    assert miss_of(world, words(1, 13)) == Miss("reclaimed", 8)
    world.cache.reset()
    assert miss_of(world, words(1, 13)) == Miss("reclaimed", 0)


def test_what_is_not_exact_is_not_for_those_who_ask_for_exact():
    world = World(blocks=32)
    request = world.add(words(1, 14), 1)
    request.sequences[0].lease.pedigree = False
    world.run()
    for exact, miss in (
        (False, Miss("tail", 12)),
        (True, Miss("exactness", 0)),
        (True, Miss("tail", 12)),  # what that computed has taken the place of what was not exact
    ):
        reader = world.generate(words(1, 14), 1, exact=exact)
        assert reader.receipt.miss == miss
        assert reader.receipt.exact == exact


@pytest.mark.parametrize("length", [3, 14])
def test_a_request_that_wants_every_row_reuses_nothing(length):
    world = World(blocks=32)
    world.generate(words(1, length), 1)
    request = world.generate(words(1, length), 1, reuse=False)
    assert request.receipt.miss == Miss("disabled", 0)
    assert request.receipt.computed_tokens == length


def test_work_after_a_preemption_is_recomputed_not_computed():
    world = World(blocks=32, max_num_batched_tokens=6)
    request = world.add(words(1, 14), 4)
    world.step()
    world.step()
    world.scheduler.preempt(request.sequences[0])
    world.run()
    receipt = request.receipt
    assert (receipt.computed_tokens, receipt.reused_tokens, receipt.preemptions) == (14, 0, 1)
    assert receipt.recomputed_tokens == 0  # 12 computed positions were whole blocks and were found again
    world.cache.reset()
    again = world.add(words(1, 14), 4)
    for _ in range(3):
        world.step()
    world.scheduler.preempt(again.sequences[0])
    world.cache.reset()
    world.run()
    assert again.receipt.recomputed_tokens == 14
    assert again.receipt.written_blocks == 3 + 4


def test_pins_show_in_the_receipt():
    world = World(blocks=8, max_pinned=3 * World().layout.block_bytes(0))
    kept = world.generate(words(1, 9), 1, cache_ttl=30.0).receipt.to_dict()["pinned"]
    size = 2 * world.layout.block_bytes(0)
    assert kept == {"ttl_s": 30.0, "tokens": 8, "blocks": 2, "bytes": size, "refused": None}
    refused = world.generate(words(2, 9), 1, cache_ttl=30.0).receipt.to_dict()["pinned"]
    assert refused["blocks"] == 0
    assert "max_pinned" in refused["refused"]


def test_the_event_log_is_bounded():
    log = EventLog(capacity=4)
    for i in range(7):
        log.add(Event(float(i), "stored", "sealed"))
    assert [event.time for event in log.drain()] == [3.0, 4.0, 5.0, 6.0]
    assert log.drain() == []
