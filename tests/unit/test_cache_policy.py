import random

import pytest

from octavo.cache.blocks import Block, Owner
from octavo.cache.policy import LRU, POLICIES, CostAware
from octavo.cache.prefix import Node


def idle(nbytes: int = 10, priority: int = 0, uses: int = 1) -> Block:
    block = Block(0, nbytes, 0, 0, "bf16", priority, True, Owner("t"))
    block.sealed, block.refs, block.uses = True, 0, uses
    block.node = Node(Node(None, b"", b"", 1), b"", b"", 1)
    return block


@pytest.mark.parametrize("name", POLICIES)
def test_larger_priority_numbers_go_first(name):
    policy = POLICIES[name]()
    blocks = [idle(priority=p) for p in (0, 5, -3, 5)]
    for block in blocks:
        policy.add(block)
    assert [policy.victim(10) for _ in range(5)] == [blocks[1], blocks[3], blocks[0], blocks[2], None]


@pytest.mark.parametrize("name", POLICIES)
def test_a_block_in_use_is_nobodys_victim(name):
    policy = POLICIES[name]()
    blocks = [idle() for _ in range(6)]
    for block in blocks:
        policy.add(block)
    for block in blocks[:3]:
        policy.remove(block)
    policy.add(blocks[0])
    assert set(policy) == {blocks[0], *blocks[3:]}
    assert [policy.victim(10) for _ in range(5)] == [*blocks[3:], blocks[0], None]


@pytest.mark.parametrize("name", POLICIES)
def test_the_wanted_size_is_preferred_within_a_priority(name):
    policy = POLICIES[name]()
    small, large, unimportant = idle(10), idle(30), idle(10, priority=1)
    for block in (small, large, unimportant):
        policy.add(block)
    assert [policy.victim(30) for _ in range(3)] == [unimportant, large, small]


def test_lru_agrees_with_a_sorted_list():
    rng, policy, time = random.Random(1), LRU(), 0
    last_use: dict[Block, int] = {}
    blocks = [idle(priority=rng.randrange(3)) for _ in range(40)]
    for time in range(2000):
        block = rng.choice(blocks)
        if block in last_use:
            policy.remove(block)
            del last_use[block]
        elif rng.random() < 0.8:
            policy.add(block)
            last_use[block] = time
        elif last_use:
            expected = min(last_use, key=lambda b: (-b.priority, last_use[b]))
            assert policy.victim(10) is expected
            del last_use[expected]
    assert time == 1999
    assert set(policy) == last_use.keys()


def test_cost_aware_keeps_what_is_used_often_until_it_has_aged():
    policy = CostAware()
    often, once = idle(uses=3), [idle() for _ in range(3)]
    policy.add(often)
    victims = []
    for block in once:
        policy.add(block)
        victims.append(policy.victim(10))
    assert victims == [once[0], once[1], often]


def test_cost_aware_prefers_to_lose_large_blocks():
    policy = CostAware()
    small, large = idle(10), idle(30)
    policy.add(small)
    policy.add(large)
    assert policy.victim(20) is large


def test_lru_takes_no_parent_before_its_child_of_another_size():
    policy = LRU()
    child, parent, later = idle(10), idle(30), idle(30)
    parent.idle_children = 1
    for block in (child, parent, later):
        policy.add(block)
    assert policy.victim(30) is child
    parent.idle_children = 0
    assert [policy.victim(30) for _ in range(2)] == [parent, later]


def test_lru_a_block_that_became_smaller_goes_no_later_for_that():
    policy = LRU()
    first, second = idle(30), idle(30)
    policy.add(first)
    policy.add(second)
    for block in (second, first):
        policy.remove(block)
        block.nbytes = 10
        policy.put_back(block)
    assert policy.victim(10) is first
