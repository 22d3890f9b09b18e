"""`num_threads` reaches every pool, and there is one OpenMP in the process."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from octavo.engine import Engine
from octavo.errors import ConfigError
from octavo.kernels import native
from support.engines import greedy, submit, together

PROMPT = [i % 250 for i in range(600)]


def cpu_time_by_thread() -> dict[str, int]:
    """Nanoseconds each thread of this process has run for."""
    tasks = Path("/proc/self/task").iterdir()
    return {task.name: int((task / "schedstat").read_text().split()[0]) for task in tasks}


def threads_that_worked(work: Callable[[], object]) -> int:
    """How many threads took at least a tenth of the time of the busiest one."""
    before = cpu_time_by_thread()
    work()
    spent = [after - before.get(name, 0) for name, after in cpu_time_by_thread().items()]
    return sum(10 * time > max(spent) for time in spent)


def test_one_openmp_runtime_is_mapped() -> None:
    mapped = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if any(name in line for name in ("libgomp", "libomp.", "libiomp"))
    }
    assert len(mapped) == 1, mapped
    modules = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    assert any("libtorch_cpu" in name for name in modules)
    assert native._native.__file__ in modules


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_number_of_threads_reaches_every_pool(count: int, engine_of: Callable[..., Engine]) -> None:
    engine = engine_of("llama", num_threads=count)
    together(engine, [(PROMPT, greedy(2))])
    assert (native.num_threads(), native.observed_threads(), torch.get_num_threads()) == (count,) * 3


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "unfused"])
def test_as_many_threads_as_asked_for_do_the_work(
    count: int, fuse: bool, engine_of: Callable[..., Engine]
) -> None:
    engine = engine_of("12 over 4 heads of 80", num_threads=count, fuse=fuse, enable_prefix_caching=False)
    requests = [(PROMPT, greedy(2))] * 4
    assert threads_that_worked(lambda: together(engine, requests)) == count


def test_engines_of_one_process_keep_their_own_number(engine_of: Callable[..., Engine]) -> None:
    one, two = (engine_of("llama", num_threads=n) for n in (1, 2))
    for engine, count in ((one, 1), (two, 2), (one, 1)):
        submit(engine, "a", (PROMPT, greedy(2)))
        while engine.has_work:
            engine.step()
            assert (native.observed_threads(), torch.get_num_threads()) == (count, count)


@pytest.mark.parametrize("count", [1, 3])
def test_an_engine_on_another_thread_has_its_number_too(count: int, engine_of: Callable[..., Engine]) -> None:
    """OpenMP keeps the number per thread that asks; a server runs the engine on one of its own."""
    engine = engine_of("llama", num_threads=count)
    seen: list[int] = []

    def work() -> None:
        together(engine, [(PROMPT, greedy(2))])
        seen.extend([native.observed_threads(), torch.get_num_threads()])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [count, count]


def test_more_threads_than_the_pool_gives_is_an_error(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native._native, "observed_threads", lambda: 1)
    with pytest.raises(ConfigError, match="num_threads=2: the OpenMP pool gives 1"):
        engine_of("llama", num_threads=2)
