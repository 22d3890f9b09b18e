import pytest

from octavo.cache.layout import LayerGroup
from octavo.errors import ContextLengthExceeded, InvalidRequest, KVCacheTooSmall, Overloaded
from octavo.schedule.request import Status
from support.cache_world import FULL_GROUP, World, answer, words

B = 4


def kinds(world):
    return [event.kind for event in world.cache.events() if event.kind in ("preempted", "resumed")]


def spans(plan):
    return [(c.sequence.request.request_id, c.start, c.stop, c.sample) for c in plan.chunks]


def test_a_prompt_is_computed_in_chunks_of_the_budget():
    world = World(max_num_batched_tokens=8)
    world.add(words(1, 19), 3)
    steps = [spans(world.step()) for _ in range(5)]
    assert steps == [
        [("r1", 0, 8, False)],
        [("r1", 8, 16, False)],
        [("r1", 16, 19, True)],
        [("r1", 19, 20, True)],
        [("r1", 20, 21, True)],
    ]
    assert world.step().chunks == ()
    assert not world.scheduler.has_work


def test_running_sequences_come_first_and_the_rest_of_the_budget_is_used():
    world = World(max_num_batched_tokens=8)
    world.add(words(1, 5), 9)
    world.step()
    world.add(words(2, 20), 1)
    assert spans(world.step()) == [("r1", 5, 6, True), ("r2", 0, 7, False)]


def test_more_important_requests_start_first():
    world = World(max_num_seqs=1)
    for seed, priority in ((1, 0), (2, 5), (3, -1), (4, 0)):
        world.add(words(seed, 3), 1, priority=priority)
    world.run()
    assert [request.request_id for request in world.done] == ["r3", "r1", "r4", "r2"]


def test_a_budget_below_the_number_of_sequences_still_serves_all():
    world = World(blocks=64, max_num_seqs=8, max_num_batched_tokens=3)
    requests = [world.add(words(seed, 5), 4) for seed in range(8)]
    world.run()
    for request in requests:
        world.verify(request)


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 10 * B - 1, 10 * B, 10 * B + 1])
def test_the_same_prompt_again_computes_at_most_a_block(length):
    world = World(blocks=32, max_num_batched_tokens=B)
    first = world.generate(words(1, length), 3)
    assert first.receipt.computed_tokens == length
    for _ in range(3):
        receipt = world.generate(words(1, length), 3).receipt
        assert receipt.reused_tokens == (length - 1) // B * B
        assert receipt.reused_tokens + receipt.computed_tokens == receipt.prompt_tokens == length


def test_the_next_turn_reuses_the_answer():
    world = World()
    first = world.generate(words(1, 9), 8)
    second = world.generate([*first.sequences[0].token_ids, *words(2, 5)], 2)
    assert second.receipt.reused_tokens == 16


@pytest.mark.parametrize("copies", [2, 4, 16])
@pytest.mark.parametrize("cancel", [None, "waiting", "filling"])
def test_copies_that_arrive_together_compute_their_prefix_once(copies, cancel):
    world = World(blocks=64, max_num_seqs=16, max_num_batched_tokens=16)
    requests = [world.add(words(1, 10 * B + 3), 1) for _ in range(copies)]
    if cancel == "filling":
        world.step()
    if cancel:
        world.scheduler.abort("r1")
        requests = requests[1:]
    world.run()
    for request in requests:
        world.verify(request)
    assert world.computed == 10 * B + 3 * len(requests)
    assert sorted(r.receipt.reused_tokens for r in requests)[1:] == [10 * B] * (len(requests) - 1)


def test_a_different_request_passes_those_who_wait_for_a_block():
    world = World(blocks=64, max_num_batched_tokens=8)
    world.add(words(1, 21), 1)
    world.add(words(1, 21), 1)
    world.add(words(2, 3), 1)
    world.step()
    world.step()
    assert spans(world.step()) == [("r1", 16, 21, True), ("r3", 0, 3, True)]


def test_choices_share_the_prompt_and_the_first_equals_a_single_one():
    world = World(blocks=32)
    alone = world.generate(words(1, 10), 6)
    many = World(blocks=32)
    request = many.add(words(1, 10), 6, n=4)
    many.step()
    assert len(request.sequences) == 4
    assert len(many.cache.pool.blocks) == 2 + 4
    many.run()
    many.verify(request)
    assert request.sequences[0].token_ids == alone.sequences[0].token_ids
    assert request.receipt.completion_tokens == 4 * 6
    assert request.receipt.computed_tokens == 10
    assert request.receipt.formats == {"bf16": 10 + 4 * 5}


def test_choices_beyond_the_running_limit_wait():
    world = World(blocks=32, max_num_seqs=2)
    request = world.add(words(1, 10), 6, n=5)
    world.step()
    assert len(world.scheduler.running) == 2
    world.run()
    world.verify(request)


def test_two_rivals_in_a_small_pool_both_finish_with_bounded_work():
    world = World(blocks=32)
    rivals = [world.add(words(seed, 20), 20 * B - 20) for seed in (1, 2)]
    world.run()
    for rival in rivals:
        world.verify(rival)
    assert [r.receipt.preemptions for r in rivals] == [0, 1]
    assert world.computed <= 2 * (20 * B) + 13 * B
    assert kinds(world) == ["preempted", "resumed"]


def test_a_sequence_resumes_only_when_all_its_tokens_fit():
    """Otherwise it would be let in, compute again and be thrown out, over and over."""
    world = World(blocks=32, max_num_batched_tokens=5, enable_prefix_caching=False)
    rivals = [world.add(words(seed, 20), 20 * B - 20) for seed in (1, 2)]
    world.run()
    for rival in rivals:
        world.verify(rival)
    assert kinds(world) == ["preempted", "resumed"]


def test_the_least_important_then_the_newest_is_preempted():
    world = World(blocks=12)
    a, b, c = (world.add(words(seed, 7), 21, priority=p) for seed, p in ((1, 1), (2, 0), (3, 0)))
    world.run()
    for request in (a, b, c):
        world.verify(request)
    assert b.receipt.preemptions == 0
    assert a.receipt.preemptions >= 1
    assert world.done[0] is b


def test_work_stays_bounded_with_many_rivals():
    world = World(blocks=24, max_num_seqs=16)
    requests = [world.add(words(seed, 6), 40) for seed in range(16)]
    world.run()
    for request in requests:
        world.verify(request)
    useful = 16 * 45
    assert world.scheduler.totals.preemptions > 0
    assert world.computed - useful == world.scheduler.totals.recomputed_tokens <= 2 * useful


def test_what_others_computed_while_one_waited_to_resume_is_in_its_receipt():
    world = World(blocks=64, max_num_seqs=1, max_num_batched_tokens=B)
    slow = world.add(words(1, 8 * B), 3, priority=1)
    world.step()
    world.scheduler.preempt(slow.sequences[0])
    fast = world.add(words(1, 8 * B), 1)
    world.run()
    assert [request.request_id for request in world.done] == [fast.request_id, slow.request_id]
    assert slow.receipt.recomputed_tokens == 0
    assert slow.receipt.formats == {"bf16": 8 * B + 2}
    assert slow.receipt.reused_tokens == 0  # fixed when it was first admitted


@pytest.mark.parametrize("when", range(12))
def test_a_preempted_sequence_gives_the_same_answer(when):
    world = World(max_num_batched_tokens=5)
    request = world.add(words(1, 13), 8)
    for step in range(12):
        if step in (when, when + 1, when + 3) and request.sequences[0].status is Status.RUNNING:
            world.scheduler.preempt(request.sequences[0])
            world.cache.check()
        world.step()
    world.run()
    world.verify(request)
    assert request.receipt.computed_tokens == 13
    assert request.receipt.formats == {"bf16": 20}


def test_a_prompt_of_the_pool_less_one_block_with_two_choices():
    """The children run one after the other, and both end by length."""
    for length in (31 * B, 31 * B - 1, 31 * B + 1):
        world = World(blocks=32)
        request = world.generate(words(1, length), 1000, n=2)
        assert [s.finish_reason for s in request.sequences] == ["length", "length"]
        assert [len(s.token_ids) for s in request.sequences] == [32 * B, 32 * B]


@pytest.mark.parametrize(("prompt", "fits"), [(32 * B - 1, True), (32 * B, False), (32 * B + 1, False)])
def test_the_arena_limits_a_sequence(prompt, fits):
    world = World(blocks=32, max_model_len=2048)
    if fits:
        request = world.generate(words(1, prompt), 10)
        assert len(request.sequences[0].output_token_ids) == 1
        assert request.sequences[0].finish_reason == "length"
        return
    small = [world.add(words(seed, 3), 2) for seed in range(10)]
    with pytest.raises(KVCacheTooSmall, match=rf"'r11'.*at most {32 * B} tokens.*prompt has {prompt}"):
        world.add(words(1, prompt), 10)
    world.run()
    assert len(world.done) == len(small)


def test_the_context_limits_a_sequence():
    world = World(blocks=32, max_model_len=50)
    assert world.scheduler.limit == 50
    with pytest.raises(
        ContextLengthExceeded, match=r"'r1'.*maximum context length is 50 tokens.*prompt has 50"
    ):
        world.add(words(1, 50))
    request = world.generate(words(1, 49), 5)
    assert request.sequences[0].finish_reason == "length"
    assert len(request.sequences[0].token_ids) == 50


def test_impossible_requests_leave_nothing_behind():
    world = World()
    with pytest.raises(InvalidRequest, match="empty"):
        world.add([])
    request = world.add(words(1, 3))
    with pytest.raises(InvalidRequest, match="already in use"):
        world.scheduler.add(request)
    assert len(world.scheduler.waiting) == 1


def test_a_full_queue_refuses():
    world = World(max_num_seqs=1, max_waiting=1)
    world.add(words(1, 3), 5)
    world.step()
    world.add(words(2, 3), 5)
    with pytest.raises(Overloaded, match="max_waiting=1"):
        world.add(words(3, 3), 5)
    world.run()
    assert len(world.done) == 2


def test_the_refused_come_back_one_by_one_as_fast_as_the_queue_moves():
    world = World(max_num_seqs=1, max_waiting=2)
    now = [100.0]
    world.cache.clock = lambda: now[0]
    world.add(words(1, 3), 5)
    world.step()
    world.add(words(2, 3), 5)
    world.add(words(3, 3), 5)

    def hint():
        with pytest.raises(Overloaded) as refused:
            world.add(words(4, 3), 5)
        return refused.value.retry_after_s

    now[0] = 108.0  # the first of 2 has waited for 8 s: one goes every 4 s
    assert [hint() for _ in range(3)] == [1, 5, 9]
    full = world.scheduler.full()
    assert [full.refusal(number).retry_after_s for number in range(2)] == [13, 17]
    world.scheduler.turn_away(2, 2 * full.interval_s)
    now[0] = 110.0
    assert hint() == 19
    now[0] = 600.0  # those who were told have come, or never will
    assert hint() == 1
    assert 1 <= hint() < 61
    assert world.scheduler.totals.rejected == 3 + 2 + 3
    world.run()


def test_choices_that_wait_for_a_seat_are_no_requests_that_wait():
    world = World(max_num_seqs=2, max_waiting=1)
    world.add(words(1, 3), 5, n=6)
    world.step()
    assert len(world.scheduler.waiting) == 4
    world.add(words(2, 3), 5)
    with pytest.raises(Overloaded, match="1 requests wait and max_waiting=1"):
        world.add(words(3, 3), 5)
    world.run()


@pytest.mark.parametrize("chunks", range(1, 12))
def test_a_cancelled_prompt_leaves_no_trace_in_the_answers(chunks):
    """Poisoned memory, cancel after each chunk, fillers that take every block, then the prompt again."""
    world = World(blocks=16, max_num_batched_tokens=5)
    world.add(words(1, 55), 4)
    for _ in range(chunks):
        world.step()
    world.scheduler.abort("r1")
    world.cache.check()
    for seed in (2, 3):
        world.generate(words(seed, 60), 3)
    world.generate(words(1, 55), 4)
    world.generate([*words(1, 3 * B), *words(4, 5)], 4)


def test_a_request_cancelled_during_a_step_keeps_its_blocks_until_the_step_is_over():
    world = World()
    world.add(words(1, 9), 5)
    neighbour = world.add(words(2, 6), 5)
    plan = world.scheduler.plan()
    free = world.cache.arena.bytes_free
    assert world.scheduler.abort("r1")
    assert world.cache.arena.bytes_free == free
    world.commit(plan)
    assert world.cache.arena.bytes_free > free
    world.run()
    world.verify(neighbour)
    assert not world.scheduler.abort("r1")


def test_a_failed_step_is_computed_again():
    world = World()
    request = world.add(words(1, 9), 5)
    world.step()
    world.scheduler.plan()
    with pytest.raises(RuntimeError, match="neither committed nor dropped"):
        world.scheduler.plan()
    world.scheduler.drop()
    world.cache.check()
    world.run()
    world.verify(request)


def test_a_plan_wants_tokens_exactly_where_it_samples():
    world = World(max_num_batched_tokens=4)
    world.add(words(1, 9), 5)
    plan = world.scheduler.plan()
    with pytest.raises(ValueError, match="sample=False"):
        world.scheduler.commit(plan, [[1]])


def test_sharing_off_computes_everything():
    world = World(enable_prefix_caching=False)
    for _ in range(2):
        receipt = world.generate(words(1, 17), 3, n=2).receipt
        assert receipt.reused_tokens == 0
        assert receipt.miss.reason == "disabled"
    assert world.cache.arena.bytes_free == world.cache.arena.bytes_total


def test_windows_and_full_attention_together():
    groups = (FULL_GROUP, LayerGroup((1, 2), 1, 16, window=6))
    world = World(blocks=24, groups=groups, max_num_batched_tokens=7)
    requests = [world.add([*words(1, 12), *words(seed, 9)], 20, n=2) for seed in range(3)]
    world.run()
    for request in requests:
        world.verify(request)
    roomy = World(blocks=64, groups=groups)
    for reused in (0, 20):
        assert roomy.generate(words(1, 21), 5).receipt.reused_tokens == reused


def test_a_window_wider_than_the_arena_is_long_is_computed_in_smaller_chunks():
    world = World(blocks=3, groups=(LayerGroup((0,), 1, 16, window=8),), max_num_batched_tokens=64)
    world.generate(words(1, 50), 10)


def test_totals_are_the_sum_of_all_receipts():
    world = World(blocks=20, max_num_seqs=4)
    requests = [world.add([*words(1, 9), *words(seed, 5)], 12, n=1 + seed % 3) for seed in range(8)]
    world.run()
    totals = world.scheduler.totals
    for name in (
        "prompt_tokens",
        "completion_tokens",
        "reused_tokens",
        "computed_tokens",
        "recomputed_tokens",
        "written_blocks",
        "preemptions",
    ):
        assert getattr(totals, name) == sum(getattr(r.receipt, name) for r in requests), name
    assert totals.formats["bf16"] == sum(r.receipt.formats["bf16"] for r in requests)
    fresh = totals.formats["bf16"] - totals.reused_tokens
    assert world.computed == fresh + totals.recomputed_tokens
    assert totals.completion_tokens == sum(12 * r.n for r in requests)


def test_the_written_answer_does_not_depend_on_company():
    prompts = [[*words(seed % 3, 9), *words(seed, seed)] for seed in range(1, 9)]
    crowd = World(blocks=24, max_num_batched_tokens=11)
    together = [crowd.add(prompt, 10) for prompt in prompts]
    crowd.run()
    for request in together:
        assert request.sequences[0].output_token_ids == answer(request, 0, 10, crowd.scheduler.limit)
