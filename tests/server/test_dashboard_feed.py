"""`/cache` and its feed: what is sent is what is there, for those who may see it, and nothing is done for nobody."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo import AsyncEngine, SamplingParams
from octavo.errors import OctavoError, Overloaded
from octavo.server import dashboard
from octavo.server import feed as feeds
from octavo.server.feed import WATCHERS, Feed, Ring
from octavo.server.moment import look, whole
from octavo.server.picture import CachePicture
from octavo.server.witness import Witness
from support.serving import Served, serving
from support.sizes import sized

ROOT = Path(__file__).parents[2]
DASHBOARD = Path(dashboard.__file__).parent
Rows = dict[int, dict[str, Any]]
SECRET = "the quick brown fox jumps over the lazy dog, twice and again"


def params(max_tokens: int = 24, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, "seed": 1, **options})


def rows_of(message: dict[str, Any]) -> Rows:
    """The blocks of a message by offset, with owners and readers in place."""
    blocks, names = message["blocks"], list(message["blocks"])
    rows = [dict(zip(names, values, strict=True)) for values in zip(*blocks.values(), strict=True)]
    for row in rows:
        row["owner"] = message["owners"][row["owner"]]
        row["readers"] = [] if row["readers"] < 0 else message["readers"][row["readers"]]
    return {row["offset"]: row for row in rows}


class Watcher:
    """What the page makes of the feed's messages."""

    def __init__(self) -> None:
        self.rows: Rows = {}
        self.requests: dict[str, Any] = {}
        self.events: list[Any] = []
        self.ended: list[Any] = []
        self.times: list[float] = []
        self.now: dict[str, Any] = {}
        self.messages = 0

    def take(self, data: bytes) -> None:
        name, payload = data.decode().strip().split("\n")
        kind, message = name.removeprefix("event: "), json.loads(payload.removeprefix("data: "))
        assert kind == ("change" if self.messages else "picture")
        self.messages += 1
        for offset in message.get("gone", []):
            del self.rows[offset]
        self.rows |= rows_of(message)
        for name in message.get("left", []):
            del self.requests[name]
        self.requests |= {request["id"]: request for request in message["requests"]}
        self.events += message["events"]
        self.ended += message["ended"]
        self.times += message["history"]["time"]
        self.now = message["now"]


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(coroutine, 120)

    return asyncio.run(bounded())


async def generate(engine: AsyncEngine, prompt: str, count: int = 1, **options: Any) -> None:
    async def one(i: int) -> None:
        async for _ in engine.generate(
            f"{prompt} {i % 3} {i}", params(**options), tenant="acme", label=f"talk {i % 2}"
        ):
            pass

    await asyncio.gather(*(one(i) for i in range(count)))


async def last(stream: AsyncGenerator[bytes, None]) -> bytes:
    return [data async for data in stream][-1]


async def is_idle(engine: AsyncEngine) -> None:
    while (await engine.stats()).running:
        await asyncio.sleep(0.01)


def test_changes_add_up_to_the_picture(tiny_engine: AsyncEngine) -> None:
    rounds = sized(4, 40)

    async def scenario() -> None:
        feed, watcher = Feed(tiny_engine, Witness()), Watcher()
        stream = feed.watch()
        watcher.take(await anext(stream))
        for i in range(rounds):
            work = asyncio.create_task(
                generate(tiny_engine, f"{SECRET} round {i}", 6, n=1 + i % 2, cache_ttl=60.0)
            )
            while not work.done():
                watcher.take(await anext(stream))
            await work
            await is_idle(tiny_engine)
        last = await feed.look()
        while watcher.now["time"] < last.sample["time"]:
            watcher.take(await anext(stream))
        assert watcher.rows == rows_of(whole(last))
        assert watcher.requests == last.requests == {}
        assert watcher.times == sorted(watcher.times)
        assert sum(event["blocks"] for event in watcher.events if event["kind"] == "stored") > 0
        pins = [event for event in watcher.events if event["kind"] == "pinned"]
        assert {event["owner"]["label"] for event in pins} == {"talk 0", "talk 1"}
        assert len({request["id"] for request in watcher.ended}) == len(watcher.ended)
        await stream.aclose()

    run(scenario())


def test_a_slow_watcher_gets_merged_changes(tiny_engine: AsyncEngine) -> None:
    async def scenario() -> None:
        feed, quick, slow = Feed(tiny_engine, Witness()), Watcher(), Watcher()
        streams = feed.watch(), feed.watch()
        quick.take(await anext(streams[0]))
        slow.take(await anext(streams[1]))
        for i in range(3):
            await generate(tiny_engine, f"slow {i} {SECRET}", 3)
            quick.take(await anext(streams[0]))
        quick.take(await anext(streams[0]))
        slow.take(await anext(streams[1]))
        slow.take(await anext(streams[1]))
        assert slow.messages < quick.messages
        last = await feed.look()
        for stream, watcher in zip(streams, (quick, slow), strict=True):
            while watcher.now["time"] < last.sample["time"]:
                watcher.take(await anext(stream))
            assert watcher.rows == rows_of(whole(last))
            await stream.aclose()
        assert slow.events == quick.events

    run(scenario())


def test_nothing_is_looked_at_for_nobody(tiny_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def counted(*args: Any) -> Any:
        nonlocal looks
        looks += 1
        return look(*args)

    monkeypatch.setattr(feeds, "look", counted)
    monkeypatch.setattr(feeds, "LONGEST_PERIOD_S", 0.01)

    async def scenario() -> None:
        feed, watcher = Feed(tiny_engine, Witness()), Watcher()
        await generate(tiny_engine, "unseen", 2)
        while len(feed._recent.samples.since(0)) < 3:
            await asyncio.sleep(0.01)
        assert looks == 0
        stream = feed.watch()
        watcher.take(await anext(stream))
        assert len(watcher.times) > 3
        assert any(event["kind"] == "stored" for event in watcher.events)
        await stream.aclose()
        seen = looks
        await generate(tiny_engine, "unseen again", 2)
        before = feed._recent.samples.count
        while feed._recent.samples.count < before + 3:
            await asyncio.sleep(0.01)
        assert looks <= seen + 1

    run(scenario())


def test_pictures_are_new_and_looks_are_shared(
    tiny_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks at once gets the same, who asks after something has happened sees it, and all wait for their turn."""
    looks = 0

    def counted(*args: Any) -> Any:
        nonlocal looks
        looks += 1
        return look(*args)

    monkeypatch.setattr(feeds, "look", counted)

    async def scenario() -> None:
        feed = Feed(tiny_engine, Witness())
        for i in range(3):
            await generate(tiny_engine, f"shared {i}")
            await is_idle(tiny_engine)
            steps = await tiny_engine.call(lambda engine: engine.steps)
            pictures = await asyncio.gather(*(feed.picture() for _ in range(10)))
            assert {json.loads(picture)["now"]["steps"] for picture in pictures} == {steps}
        assert looks == 3
        monkeypatch.setattr(feeds, "SHARE", 1e-9)
        await feed.look()
        assert feed._period == feeds.LONGEST_PERIOD_S
        early = asyncio.ensure_future(feed.picture())
        await asyncio.wait({early}, timeout=0.2)
        assert (early.done(), looks) == (False, 4)
        early.cancel()

    run(scenario())


def test_what_nobody_watches_is_not_kept(tiny_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "LONGEST_PERIOD_S", 0.01)

    async def scenario() -> None:
        feed = Feed(tiny_engine, Witness())
        stream = feed.watch()
        await anext(stream)
        assert feed._latest is not None
        await stream.aclose()
        while feed._latest is not None:
            await asyncio.sleep(0.01)

    run(scenario())


def test_a_bug_ends_the_feed_of_those_who_watch(
    tiny_engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> Any:
        raise ZeroDivisionError

    async def scenario() -> None:
        feed = Feed(tiny_engine, Witness())
        stream = feed.watch()
        await anext(stream)
        monkeypatch.setattr(feeds, "look", broken)
        with pytest.raises(OctavoError, match="internal error"):
            await last(stream)
        assert feed.ended

    run(scenario())
    assert "the feed of the cache has failed" in caplog.text


def test_only_so_many_watch(tiny_engine: AsyncEngine) -> None:
    async def scenario() -> None:
        feed = Feed(tiny_engine, Witness())
        streams = [feed.watch() for _ in range(WATCHERS)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        with pytest.raises(Overloaded):
            await anext(feed.watch())
        await streams.pop().aclose()
        streams.append(feed.watch())
        await anext(streams[-1])
        for stream in streams:
            await stream.aclose()

    run(scenario())


def test_a_ring_tells_what_came_since() -> None:
    ring = Ring(3)
    ring.add(range(2))
    assert (ring.since(0), ring.since(1), ring.since(2)) == ([0, 1], [1], [])
    ring.add(range(2, 7))
    assert (ring.count, ring.since(0), ring.since(5)) == (7, [4, 5, 6], [5, 6])


def test_the_picture_is_what_its_schema_says(served: Served) -> None:
    with served.client() as client:
        body = {
            "model": "tiny",
            "prompt": SECRET,
            "max_tokens": 8,
            "prompt_cache_key": "mail",
            "cache_salt": "pepper",
        }
        assert client.post("/v1/completions", json=body).status_code == 200
        response = client.get("/cache")
    assert response.headers["content-type"] == "application/json"
    shown = CachePicture.model_validate_json(response.content)
    stats = served.ask(lambda engine: engine.stats())
    blocks = shown.blocks
    assert {len(column) for _, column in blocks} == {sum(stats.blocks.values())}
    assert blocks.offset == sorted(blocks.offset)
    assert sum(state == "open" for state in blocks.state) == stats.blocks["open"]
    assert sum(blocks.nbytes) + shown.now.bytes_free == shown.bytes_total
    assert set(blocks.nbytes) == {group.block_bytes for group in shown.groups}
    own = [i for i, owner in enumerate(blocks.owner) if shown.owners[owner].label == "mail"]
    own.sort(key=lambda i: blocks.depth[i])
    assert [blocks.depth[i] for i in own] == list(range(len(own)))
    assert [blocks.parent[i] for i in own] == [-1, *[blocks.offset[i] for i in own[:-1]]]
    assert shown.ended[-1].label == "mail"
    assert shown.ended[-1].reason == "length"
    assert shown.ended[-1].receipt["completion_tokens"] == 8
    assert (shown.now.first_tokens, shown.now.token_gaps) == (1, 7)
    assert shown.now.first_token_seconds > 0
    assert shown.now.token_gap_seconds > 0
    for secret in ("quick", "pepper", json.dumps(list(SECRET.encode()[:4]))[1:-1]):
        assert secret not in response.text


def test_running_requests_and_who_reads_what(tiny_engine: AsyncEngine) -> None:
    started, leave = threading.Event(), threading.Event()

    async def hold() -> None:
        async for _ in tiny_engine.generate(SECRET, params(900), "held", tenant="acme", label="long talk"):
            started.set()
            if leave.is_set():
                break

    thread = threading.Thread(target=lambda: asyncio.run(hold()))
    thread.start()
    assert started.wait(60)
    try:
        with serving(tiny_engine) as server, server.client() as client:  # whose first look it is
            shown = CachePicture.model_validate_json(client.get("/cache").content)
    finally:
        leave.set()
        thread.join(60)
    [request] = [request for request in shown.requests if request.id == "held"]
    assert (request.tenant, request.label, request.max_tokens) == ("acme", "long talk", 900)
    assert [(choice.name, choice.status) for choice in request.choices] == [("held", "running")]
    blocks = shown.blocks
    readers = [[] if i < 0 else shown.readers[i] for i in blocks.readers]
    read = [i for i, names in enumerate(readers) if "held" in names]
    assert sorted(blocks.depth[i] for i in read) == list(range(len(read)))
    assert sum(blocks.filled[i] for i in read) == request.choices[0].computed
    assert shown.now.running >= 1


@contextmanager
def watching(client: httpx.Client, **options: Any) -> Iterator[Iterator[str]]:
    with client.stream("GET", "/cache/feed", **options) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield response.iter_lines()


def test_the_feed_over_http_ends_when_the_server_does(tiny_engine: AsyncEngine) -> None:
    with serving(tiny_engine) as served, served.client() as client, watching(client) as lines:
        assert next(lines) == "event: picture"
        assert "blocks" in json.loads(next(lines).removeprefix("data: "))
        served.server.stop()
        rest = list(lines)
        assert "event: failed" not in rest


def test_only_the_operator_sees_all_tenants(tiny_engine: AsyncEngine) -> None:
    keys = {"key-a": "acme", "key-b": "lab"}
    with serving(tiny_engine, api_keys=keys, admin_key="root") as served, served.client() as client:

        def status(path: str, key: str | None) -> int:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            with client.stream("GET", path, headers=headers) as response:
                return response.status_code

        for path in ("/cache", "/cache/feed"):
            assert [status(path, key) for key in (None, "wrong", "key-a", "root")] == [401, 401, 403, 200]
        assert status("/dashboard", None) == 200
        assert status("/dashboard/app.js", None) == 200


def test_parts_of_the_page(served: Served, get: Callable[..., httpx.Response]) -> None:
    page = get("/dashboard")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "http" not in policy
    assert get("/dashboard", headers={"if-none-match": page.headers["etag"]}).status_code == 304
    assert get("/dashboard/map.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert get("/dashboard/", follow_redirects=True).text == page.text
    for name in ("none.js", "__init__.py", "..%2fpicture.py", "%2e%2e/picture.py", ".js"):
        assert get(f"/dashboard/{name}").status_code == 404


def test_everything_the_page_names_is_there() -> None:
    page = (DASHBOARD / "index.html").read_text()
    named = set(re.findall(r'(?:href|src)="dashboard/([^"]+)"', page))
    for script in DASHBOARD.glob("*.js"):
        named |= set(re.findall(r'from "\./([^"]+)"', script.read_text()))
    assert {"app.js", "base.css", "map.js"} <= named
    assert named <= {file.name for file in DASHBOARD.iterdir()}
    ids = set(re.findall(r' id="([^"]+)"', page))
    for script in DASHBOARD.glob("*.js"):
        assert set(re.findall(r'\$\("([^"]+)"\)', script.read_text())) <= ids, script.name


def test_the_wheel_has_every_part(tmp_path: Path) -> None:
    build = (
        f"from scikit_build_core.build import *; build_wheel({str(tmp_path)!r}, {{'wheel.cmake': 'false'}})"
    )
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    parts = [file for file in DASHBOARD.iterdir() if file.suffix in dashboard.TYPES]
    assert len(parts) > 15
    assert {f"octavo/server/dashboard/{file.name}" for file in parts} <= inside


@pytest.fixture
def get(served: Served) -> Iterator[Callable[..., httpx.Response]]:
    with served.client() as client:
        yield client.get
