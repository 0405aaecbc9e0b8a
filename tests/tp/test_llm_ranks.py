"""The offline LLM over two ranks: real processes, and what becomes of them."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minisgl import LLM, SamplingParams
from minisgl.errors import ModelError, PluginError, WorkerError
from tests.tiny_models import TinyModel
from tests.tp import stuck_source
from tests.tp.group_harness import settings_for
from tests.tp.spare_clock import GONE_S, PATIENCE_S, SpareClock, wait_for
from tests.tp.stuck_source import stuck_wheel

ModelFolder = Callable[[str, TinyModel], Path]

GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)
SETTINGS = {"num_page_override": 600, "page_size": 4, "max_running_req": 8, "dtype": "float32"}
SCRIPT = """
import multiprocessing, sys
from minisgl import LLM, SamplingParams
def main():
    llm = LLM(sys.argv[1], tp=2, dtype="float32", num_page_override=600, page_size=4)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    while True:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=200, ignore_eos=True))
"""


@pytest.fixture(scope="module")
def folder(model_folder: ModelFolder) -> Path:
    spec = TinyModel("llama", num_heads=8, num_kv_heads=2, max_positions=2048)
    return model_folder("long context", spec)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), tp=2, **SETTINGS) as llm:
        yield llm


def follower_pids() -> list[int]:
    return [
        process.pid
        for process in multiprocessing.active_children()
        if process.pid is not None and process.name.startswith("minisgl scheduler")
    ]


def is_alive(pid: int) -> bool:
    """Whether it runs; one that ended and was not waited for by its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_gone(pids: Iterable[int]) -> None:
    wait_for(lambda: not any(map(is_alive, pids)), "a group without a process that outlives it")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_two_ranks_are_two_processes_that_say_what_one_does(llm: LLM, folder: Path) -> None:
    assert len(follower_pids()) == 1
    with LLM(str(folder), **SETTINGS) as one:
        expected = one.generate(["The capital of", "def"], GREEDY)
    assert llm.generate(["The capital of", "def"], GREEDY) == expected


def test_a_stream_that_is_closed_gives_its_pages_back(llm: LLM) -> None:
    stream = llm.stream([5, 6, 7], ENDLESS)
    while not next(stream)["token_ids"]:
        pass
    stream.close()  # type: ignore[attr-defined]  # it is a generator
    assert llm.stats().num_running == 0
    llm.check_integrity()


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_ends_its_call_and_nothing_else(llm: LLM) -> None:
    expected = llm.generate("def", GREEDY)

    with pytest.raises(KeyboardInterrupt):
        generate_until_interrupted(llm)
    assert llm.stats().num_running == 0
    assert llm.generate("def", GREEDY)[0]["text"] == expected[0]["text"]


def generate_until_interrupted(llm: LLM) -> None:
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    llm.generate([[5, 6, 7]] * 1000, ENDLESS)  # many, so that it is not over before


def test_ranks_that_wait_do_not_compute(llm: LLM) -> None:
    (pid,) = follower_pids()
    before = cpu_s(pid) + time.process_time()
    time.sleep(1.0)
    assert cpu_s(pid) + time.process_time() - before < 0.2


def test_a_rank_that_cannot_start_is_heard_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, manager = settings_for(folder, tp=2, **SETTINGS)
    before = set(threading.enumerate())
    monkeypatch.setenv("MINISGL_PLUGINS", "no-such-thing")  # the other rank reads it at its start
    with pytest.raises(PluginError, match="no-such-thing"):
        LLM.from_settings(settings, manager)
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), f"{thread.name} still waits for the others"


def test_rank_0_reads_no_more_tensors_for_a_start_that_has_failed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(stuck_wheel(tmp_path))
    stuck = importlib.import_module(stuck_source.MODULE)
    before = set(threading.enumerate())
    with pytest.raises(ModelError, match="rank 1 cannot read"):
        LLM(str(folder), tp=2, model_source="stuck", **SETTINGS)
    (rank_0,) = (t for t in set(threading.enumerate()) - before if t.name == "minisgl rank 0")
    stuck.MAY_GO_ON.set()
    rank_0.join(PATIENCE_S)
    assert not rank_0.is_alive()
    assert len(stuck.READ) == 1


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_everything(tp: int, folder: Path) -> None:
    before = set(follower_pids())
    llm = LLM(str(folder), tp=tp, **SETTINGS)
    pids = sorted(set(follower_pids()) - before)
    assert len(pids) == tp - 1
    clocks: list[SpareClock] = []

    def kill() -> None:
        clocks.append(SpareClock())
        os.kill(pids[-1], signal.SIGKILL)

    stream = llm.stream([8, 9, 10], ENDLESS)
    threading.Timer(0.3, kill).start()
    with pytest.raises(WorkerError, match=r"scheduler \d was killed by signal 9"):
        llm.generate([[5, 6, 7]] * 4, ENDLESS)
    assert_gone(pids)
    assert clocks[0].stop() < GONE_S
    last = list(stream)[-1]
    assert last["finish_reason"] == "error"
    assert "was killed by signal 9" in (last["error"] or "")
    with pytest.raises(WorkerError, match="killed by signal 9; make a new LLM"):
        llm.generate([[5, 6, 7]], GREEDY)
    llm.shutdown()


@pytest.mark.slow
def test_a_rank_killed_while_nothing_runs_is_noticed(folder: Path) -> None:
    before = set(follower_pids())
    llm = LLM(str(folder), tp=2, **SETTINGS)
    (pid,) = set(follower_pids()) - before
    os.kill(pid, signal.SIGKILL)
    assert_gone([pid])
    time.sleep(1.0)
    with pytest.raises(WorkerError, match="killed by signal 9"):
        llm.generate([[5, 6, 7]], GREEDY)
    llm.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("age_s", [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0])
def test_a_rank_killed_at_any_time_of_its_start_ends_all(folder: Path, age_s: float) -> None:
    before = set(follower_pids())
    with ThreadPoolExecutor(1) as threads:
        opened = threads.submit(LLM, str(folder), tp=2, **SETTINGS)
        wait_for(lambda: set(follower_pids()) != before, "a process for rank 1")
        pids = set(follower_pids()) - before
        time.sleep(age_s)
        clock = SpareClock()
        os.kill(min(pids), signal.SIGKILL)
        with pytest.raises(WorkerError, match="scheduler 1 was killed by signal 9"):
            opened.result(PATIENCE_S).generate([[5, 6, 7]] * 50, ENDLESS)
    assert_gone(pids)
    assert clock.stop() < GONE_S


@pytest.mark.slow
def test_an_object_that_is_let_go_of_ends_its_ranks(folder: Path) -> None:
    before = set(follower_pids())
    llm = LLM(str(folder), tp=2, **SETTINGS)
    pids = list(set(follower_pids()) - before)
    llm.generate([[5, 6, 7]], GREEDY)
    del llm
    gc.collect()
    assert_gone(pids)


@pytest.mark.slow
def test_a_model_that_cannot_be_cut_is_refused_with_the_flag(folder: Path) -> None:
    before = set(follower_pids())
    with pytest.raises(ModelError, match="--tp 3: must divide"):
        LLM(str(folder), tp=3, **SETTINGS)
    assert set(follower_pids()) == before


@pytest.mark.slow
def test_ranks_die_with_a_parent_that_is_killed(folder: Path, short_tmp: Path) -> None:
    with start_script(
        SCRIPT + 'if __name__ == "__main__":\n    main()\n', folder, short_tmp
    ) as run:
        assert run.stdout is not None
        pids = [int(pid) for pid in run.stdout.readline().split()]
        assert len(pids) == 1
        run.kill()
        assert_gone(pids)
    assert not list(short_tmp.glob("minisgl-*")), "the private folder is removed"


@pytest.mark.slow
def test_a_script_that_just_ends_is_not_held_up_by_its_ranks(folder: Path, tmp_path: Path) -> None:
    text = SCRIPT.partition("    while True")[0] + "    global kept\n    kept = llm\n"
    text += 'if __name__ == "__main__":\n    main()\n'
    with start_script(text, folder, tmp_path) as run:
        output, errors = run.communicate(timeout=120)
    assert run.returncode == 0
    # The first engine of a machine says so.
    assert [line for line in errors.splitlines() if "compiling the native" not in line] == []
    assert_gone([int(pid) for pid in output.split()])


@pytest.mark.slow
def test_a_script_whose_start_fails_waits_for_a_rank_that_is_loading(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(stuck_wheel(tmp_path)), prepend=os.pathsep)
    monkeypatch.setenv("STUCK_S", "10")  # more than a failed start waits for it by itself
    text = SCRIPT.replace("tp=2", 'tp=2, model_source="stuck"')
    with start_script(text + 'if __name__ == "__main__":\n    main()\n', folder, tmp_path) as run:
        _, errors = run.communicate(timeout=PATIENCE_S)
    assert "ModelError: rank 1 cannot read" in errors
    assert "minisgl rank 0 is still at work" in errors
    assert run.returncode == 1, errors


@pytest.mark.slow
def test_a_script_without_a_main_guard_is_told_so(folder: Path, tmp_path: Path) -> None:
    with start_script(SCRIPT + "main()\n", folder, tmp_path) as run:
        _, errors = run.communicate(timeout=120)
    assert run.returncode == 1
    assert '`if __name__ == "__main__":`' in errors


def start_script(text: str, folder: Path, tmp_path: Path) -> subprocess.Popen[str]:
    path = tmp_path / "script.py"
    path.write_text(text)
    return subprocess.Popen(
        [sys.executable, str(path), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
