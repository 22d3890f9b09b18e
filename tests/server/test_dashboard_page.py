"""The dashboard in Chromium."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo import AsyncEngine, SamplingParams
from support.browser import Tab, chromium
from support.serving import SMALL, Served, serving

expect = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed").expect

LABEL = "<b>mail</b> triage of the whole team, with a name that is far too long to fit anywhere"
CONTEXT = "You are a careful assistant who sorts mail by sender and by date. " * 4


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def tab(browser: Any, served: Served) -> Iterator[Tab]:
    served.ask(lambda engine: engine.reset_prefix_cache())
    opened = Tab(browser, served.url)
    yield opened
    opened.close()


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    """Playwright keeps an event loop in this thread, so that of the engine's clients has one of its own."""
    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    return thread


def load(engine: AsyncEngine, prompts: list[str], max_tokens: int = 8, **options: Any) -> None:
    """One request each, from two tenants in turn."""

    async def one(i: int, prompt: str) -> None:
        wanted = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=i, **options)
        async for _ in engine.generate(prompt, wanted, tenant=("acme", "lab")[i % 2], label=LABEL):
            pass

    async def every() -> None:
        await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))

    in_thread(every).join(300)


def alike(count: int) -> list[str]:
    """Prompts with one beginning."""
    return [f"{CONTEXT}{i}" for i in range(count)]


def unlike(count: int, length: int = 200) -> list[str]:
    """Prompts that share nothing."""
    return [f"{i} {CONTEXT * 4}"[:length] for i in range(count)]


@contextmanager
def held(engine: AsyncEngine, *names: str) -> Iterator[None]:
    """Requests with the same prompt that go on until the block is left."""
    leave, running = threading.Event(), threading.Barrier(len(names) + 1)

    async def one(name: str) -> None:
        known = False
        wanted = SamplingParams(
            max_tokens=100_000, ignore_eos=True, seed=1, context_policy="window", sinks=128, window=256
        )
        async for output in engine.generate(CONTEXT, wanted, name, tenant="acme", label=f"talk {name}"):
            if not known and len(output.outputs[0].token_ids) > 4:
                known = True
                await asyncio.to_thread(running.wait, 60)
            if leave.is_set():
                return

    async def every() -> None:
        await asyncio.gather(*(one(name) for name in names))

    thread = in_thread(every)
    running.wait(60)
    try:
        yield
    finally:
        leave.set()
        thread.join(60)


def counts(page: Any) -> dict[str, int]:
    """What the legend of the map says."""
    script = "items => items.map(li => [li.children[1].textContent, li.children[2].textContent])"
    items = page.locator("#map-legend li").evaluate_all(script)
    return {name: int(n.replace(",", "")) for name, n in items if n}


def states(served: Served) -> dict[str, int]:
    """What the books say, in the legend's words."""
    names = {"open": "being filled", "running": "read by one", "cached": "cached", "pinned": "pinned"}
    with served.client() as client:
        blocks = client.get("/cache").json()["blocks"]
    found = dict.fromkeys([*names.values(), "read by several"], 0)
    for state, refs in zip(blocks["state"], blocks["refs"], strict=True):
        found["read by several" if state == "running" and refs > 1 else names[state]] += 1
    return found


def painted(page: Any, property: str) -> int:
    """How many pixels of the map have a colour of the style sheet."""
    return page.evaluate(
        """(property) => {
            const probe = document.body.appendChild(document.createElement("i"));
            probe.style.color = `var(${property})`;
            const [r, g, b] = getComputedStyle(probe).color.match(/[0-9.]+/g).map(Number);
            probe.remove();
            const canvas = document.getElementById("map-cells");
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            let found = 0;
            for (let i = 0; i < data.length; i += 4)
                if (data[i + 3] === 255 && data[i] === r && data[i + 1] === g && data[i + 2] === b) found += 1;
            return found;
        }""",
        property,
    )


def settle(page: Any, served: Served) -> dict[str, int]:
    """Wait until the page shows what is there."""
    wanted = states(served)
    for _ in range(100):
        if counts(page) == wanted:
            return wanted
        page.wait_for_timeout(100)
    raise AssertionError(f"the page says {counts(page)}, the server {wanted}")


def test_the_map_shows_what_the_cache_holds(tab: Tab, served: Served) -> None:
    page = tab.open()
    assert settle(page, served)["cached"] == 0
    assert painted(page, "--cached") == 0
    load(served.engine, unlike(6))
    found = settle(page, served)
    assert found["cached"] > 60
    few = painted(page, "--cached")
    assert few > found["cached"]
    load(served.engine, alike(3), cache_ttl=600.0)
    assert settle(page, served)["pinned"] > 0
    assert painted(page, "--pinned") > 0
    with held(served.engine, "one", "two"):
        expect(page.locator("#shared-figure")).not_to_have_text("0 blocks")
        expect(page.locator("#requests-sub")).to_contain_text("2 running")
        assert painted(page, "--shared") > 0
        row = page.locator("#request-list li", has_text="talk one").first
        assert "reused" in row.inner_text()
        page.locator("#tree .chain .inner", has_text="2 readers").first.wait_for()
    expect(page.locator("#request-list")).to_contain_text("ended: abort")
    assert page.locator("b", has_text="mail").first.inner_text().startswith("<b>mail</b>")


def test_a_block_is_explained_to_mouse_and_keyboard(tab: Tab, served: Served) -> None:
    load(served.engine, unlike(1))
    page = tab.open()
    settle(page, served)
    inspector, said = page.locator("#inspector"), page.locator("#map-said")
    page.hover("#map", position={"x": 6, "y": 6})
    assert " at " in inspector.inner_text() or "of its sequence" in inspector.inner_text()
    page.mouse.move(0, 0)
    assert "Point at a block" in inspector.inner_text()
    assert said.inner_text() == ""
    page.locator("#tree [tabindex='0']").focus()
    page.keyboard.press("Enter")
    assert LABEL in inspector.inner_text()
    assert "block 0 of its sequence" in inspector.inner_text()
    assert f"cached, block 0, for {LABEL}" in said.inner_text()
    inspector.get_by_role("button").last.click()
    assert "block 1 of its sequence" in inspector.inner_text()
    page.focus("#map")
    page.keyboard.press("p")
    assert "block 0 of its sequence" in inspector.inner_text()
    page.keyboard.press("p")
    assert "no block before" in said.inner_text()
    page.keyboard.press("Home")
    first = inspector.inner_text()
    page.keyboard.press("ArrowRight")
    assert said.inner_text() == "free" or "block" in said.inner_text()
    assert inspector.inner_text() != first
    page.focus("#map")
    page.keyboard.press("End")
    assert "holds nothing" in inspector.inner_text()
    page.keyboard.press("Escape")
    assert "Point at a block" in inspector.inner_text()


def test_the_tree_tells_who_shares(tab: Tab, served: Served) -> None:
    load(served.engine, alike(4))
    page = tab.open()
    settle(page, served)
    chains = page.locator("#tree [role=treeitem]")
    assert chains.count() >= 4 + 1
    page.locator("#tree [tabindex='0']").focus()
    first = page.locator("#tree-says").inner_text()
    assert "tokens 0 to" in first
    page.keyboard.press("ArrowRight")
    assert page.locator("#tree-says").inner_text() != first
    assert page.evaluate("document.activeElement.getAttribute('aria-level')") == "2"
    page.keyboard.press("Enter")
    assert "of its sequence" in page.locator("#inspector").inner_text()


def test_what_was_thrown_away_and_why(tab: Tab, served: Served) -> None:
    load(served.engine, alike(3))
    page = tab.open()
    settle(page, served)
    served.ask(lambda engine: engine.reset_prefix_cache())
    entry = page.locator("#log-list li[data-kind=reclaimed]").first
    entry.wait_for()
    assert "because the cache was reset" in entry.inner_text()
    assert "by a reset" in page.locator("#thrown-says").inner_text()
    assert page.locator("#log-list li[data-kind=stored]").count() == 0
    page.check("#log-kinds input[value=stored]", force=True)
    assert page.locator("#log-list li[data-kind=stored]").count() > 0


def test_themes(browser: Any, served: Served) -> None:
    for scheme in ("light", "dark"):
        tab = Tab(browser, served.url, color_scheme=scheme)
        page = tab.open()
        paper = "getComputedStyle(document.body).backgroundColor"
        before, cells = page.evaluate(paper), painted(page, "--free")
        assert cells > 0
        other = "dark" if scheme == "light" else "light"
        while page.evaluate("document.documentElement.dataset.theme") != other:
            page.click("#theme")
        assert page.evaluate(paper) != before
        assert painted(page, "--free") == cells
        page.reload()
        page.wait_for_selector("#status[data-state=live]")
        assert page.evaluate("document.documentElement.dataset.theme") == other
        tab.close()


@pytest.mark.parametrize("width", [320, 390, 820, 1100])
def test_narrow_pages_do_not_scroll_sideways(browser: Any, served: Served, width: int) -> None:
    load(served.engine, alike(4))
    tab = Tab(browser, served.url, viewport={"width": width, "height": 800}, has_touch=True)
    page = tab.open()
    settle(page, served)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.locator("#map").tap(position={"x": 5, "y": 5})
    said = page.locator("#inspector").inner_text()
    assert "of its sequence" in said or "holds nothing" in said  # whichever the first place of the arena has
    assert page.evaluate("document.documentElement.scrollWidth") == width
    tab.close()


def test_colours_can_be_switched(tab: Tab, served: Served) -> None:
    load(served.engine, alike(4))
    page = tab.open()
    settle(page, served)
    for mode, names in {"tenant": {"acme", "lab"}, "format": {"f32"}}.items():
        page.check(f"#colour-by input[value={mode}]", force=True)
        assert set(counts(page)) == names
        assert painted(page, "--hue-0" if mode == "tenant" else "--hue-1") > 0
    page.check("#colour-by input[value=age]", force=True)
    assert sum(counts(page).values()) == states(served)["cached"]


def ask(page: Any, text: str) -> Any:
    page.fill("#chat-text", text)
    page.keyboard.press("Enter")
    return page.locator(".turn.answer").last


def test_the_chat_answers_and_shows_its_receipt(tab: Tab, served: Served) -> None:
    page = tab.open()
    page.locator("#chat summary", has_text="Settings").click()
    page.fill("#chat-max", "40")
    page.fill("#chat-system", CONTEXT)
    answer = ask(page, "hello")
    answer.locator(".receipt").wait_for()
    assert answer.get_attribute("data-state") == "ended"
    answer.locator("summary").click()
    receipt = json.loads(answer.locator("pre").inner_text())
    assert receipt["completion_tokens"] <= 40
    assert f"0 of {receipt['prompt_tokens']} prompt tokens reused" in answer.inner_text()
    again = ask(page, "and again")
    again.locator(".receipt").wait_for()
    again.locator("summary").click()
    second = json.loads(again.locator("pre").inner_text())
    assert second["reused_tokens"] > len(CONTEXT) // 2
    assert second["prompt_tokens"] > receipt["prompt_tokens"]
    assert page.locator(".turn.user").all_inner_texts() == ["hello", "and again"]
    expect(page.locator("#request-list")).to_contain_text("dashboard chat")
    page.click("#chat-new")
    assert page.locator(".turn").count() == 0


@contextmanager
def slowed(served: Served) -> Iterator[None]:
    """No step takes less than 50 ms, so that an answer can be stopped."""

    def slow(engine: Any) -> None:
        step = engine.step
        engine.step = lambda: threading.Event().wait(0.05) or step()

    served.ask(slow)
    try:
        yield
    finally:
        served.ask(lambda engine: vars(engine).pop("step"))


def endless(request: Any) -> str:
    """The same request for an answer that the model does not end."""
    return json.dumps({**json.loads(request.post_data), "ignore_eos": True})


def test_the_chat_can_be_stopped_and_shows_errors(tab: Tab, served: Served) -> None:
    page = tab.open()
    page.locator("#chat summary", has_text="Settings").click()
    page.fill("#chat-max", "800")
    page.route("**/v1/chat/completions", lambda route: route.continue_(post_data=endless(route.request)))
    with slowed(served):
        answer = ask(page, "go on for ever")
        expect(answer.locator(".text")).not_to_have_text("")
        page.click("#chat-stop")
        answer.get_by_text("stopped").wait_for()
    expect(page.locator("#request-list li").first).to_contain_text("ended: abort")
    assert served.ask(lambda engine: engine.stats().running) == 0
    page.unroute("**/v1/chat/completions")
    page.fill("#chat-max", "8")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    failed = ask(page, "are you there?")
    failed.locator(".error").wait_for()
    assert page.input_value("#chat-text") == "are you there?"
    tab.errors.clear()  # Chromium's own, about the request that was cut off
    page.unroute("**/v1/chat/completions")
    refused = ask(page, "word " * 4000)
    refused.locator(".error").wait_for()
    assert "context" in refused.inner_text()
    tab.errors = [error for error in tab.errors if "400" not in error]
    ask(page, "hello again").locator(".receipt").wait_for()


def test_a_key_is_asked_for(browser: Any, tiny_engine: AsyncEngine) -> None:
    with serving(tiny_engine, api_keys={"right": "acme"}) as served:
        tab = Tab(browser, served.url)
        page = tab.page
        page.goto(f"{served.url}/dashboard")
        for key in ("wrong", "right"):
            page.locator("#key-dialog[open]").wait_for()
            page.fill("#key-input", key)
            page.keyboard.press("Enter")
            if key == "wrong":
                page.get_by_text("does not know this key").wait_for()
        page.wait_for_selector("#status[data-state=live]")
        assert not page.locator("#key-dialog").is_visible()
        expect(page.locator("#model")).to_have_text("tiny")
        ask(page, "hello").locator(".receipt").wait_for()
        tab.errors = [error for error in tab.errors if "401" not in error]
        tab.close()


def test_who_may_not_see_the_cache_may_chat(browser: Any, tiny_engine: AsyncEngine) -> None:
    with serving(tiny_engine, api_keys={"a": "acme", "b": "lab"}, admin_key="root") as served:
        tab = Tab(browser, served.url)
        page = tab.page
        page.goto(f"{served.url}/dashboard")
        page.fill("#key-input", "a")
        page.keyboard.press("Enter")
        page.get_by_text("needs the admin key").last.wait_for()
        page.click("#key-cancel")
        ask(page, "hello").locator(".receipt").wait_for()
        page.click("#key")
        page.fill("#key-input", "root")
        page.keyboard.press("Enter")
        page.wait_for_selector("#status[data-state=live]")
        expect(page.locator("#request-list")).to_contain_text("acme")
        tab.errors = [error for error in tab.errors if "401" not in error and "403" not in error]
        tab.close()


def test_a_server_that_goes_away_is_told(browser: Any, tiny_engine: AsyncEngine) -> None:
    tab = None
    with serving(tiny_engine) as served:
        tab = Tab(browser, served.url)
        page = tab.open()
        served.server.stop()
        page.wait_for_selector("#status[data-state=lost]")
    tab.errors.clear()  # Chromium's own, about connections that are refused
    tab.close()


def test_ten_thousand_blocks(browser: Any, tiny: Callable[[str], Path]) -> None:
    options = {**SMALL, "block_size": 4, "kv_cache_memory": 10_000 * 2048, "max_num_batched_tokens": 1024}
    engine = AsyncEngine(str(tiny("llama")), **options)
    try:
        with serving(engine) as served:
            tab = Tab(browser, served.url)
            page = tab.open()
            assert "10,000 blocks" in page.locator("#arena-sub").inner_text()
            load(engine, unlike(60, 800))
            found = settle(page, served)
            assert sum(found.values()) > 9_000
            assert painted(page, "--cached") > 9_000
            page.hover("#map", position={"x": 100, "y": 60})
            assert "of its sequence" in page.locator("#inspector").inner_text()
            page.focus("#map")
            for key in ("Home", "ArrowDown", "ArrowRight", "PageDown", "p"):
                page.keyboard.press(key)
            assert "of its sequence" in page.locator("#inspector").inner_text()
            page.check("#colour-by input[value=tenant]", force=True)
            assert sum(counts(page).values()) == sum(found.values())
            load(engine, alike(8), max_tokens=40)
            page.check("#colour-by input[value=state]", force=True)
            settle(page, served)
            assert page.locator("#tree .chain").count() > 10
            tab.close()
    finally:
        engine.close()
