"""Host memory of an observation and its copies: what is written, what is sent, and threads that copy."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch

from sinew.core.machine import Cores
from sinew.engine.cuda import staging as module
from sinew.engine.cuda.staging import ALIGNMENT, Staging, as_done, threads_for
from tests.engine.cuda.cuda_cases import CPU


def test_staging_is_one_block_with_a_copy_between():
    fields = {"a": ((3,), torch.bool), "b": ((2, 2), torch.float32), "c": ((5,), torch.int64)}
    staging = Staging(fields, CPU)
    assert staging.nbytes == 3 * ALIGNMENT
    places = {name: tensor.data_ptr() for name, tensor in staging.device.items()}
    assert all(tensor.data_ptr() % 16 == 0 for tensor in staging.device.values())
    b = np.arange(4, dtype=np.float32).reshape(2, 2)
    staging.write("b", b)
    staging.write("a", np.array([True, False, True]))
    assert not staging.device["b"].any()
    staging.upload()
    assert np.array_equal(staging.device["b"].numpy(), b)
    assert staging.device["a"].tolist() == [True, False, True]
    assert not staging.device["c"].any()
    assert {name: tensor.data_ptr() for name, tensor in staging.device.items()} == places
    with pytest.raises(ValueError, match=r"b: expected shape \[2, 2\], got \[2\]"):
        staging.write("b", np.zeros(2, np.float32))
    with pytest.raises(TypeError):
        staging.write("c", np.zeros(5, np.float32))


def test_a_part_is_sent_alone():
    staging = Staging({"a": ((3,), torch.uint8), "b": ((2, 4), torch.float32)}, CPU)
    for row in range(2):
        staging.write("b", np.full(4, row + 1.0, np.float32), row)
    staging.write("a", np.array([1, 2, 3], np.uint8))
    staging.upload(staging.part("b", 1))
    assert staging.device["b"].tolist() == [[0.0] * 4, [2.0] * 4]
    assert not staging.device["a"].any()
    assert staging.part("b") == slice(ALIGNMENT, ALIGNMENT + 32)
    with pytest.raises(ValueError, match=r"b: expected shape \[4\], got \[3\]"):
        staging.write("b", np.zeros(3, np.float32), 0)


def test_a_slow_copy_keeps_no_other_waiting():
    others = threading.Event()
    jobs = [lambda: None, lambda: _raise_unless(others.wait(60)), lambda: None]
    done = []
    for index in as_done(jobs, 2):
        done.append(index)
        if {0, 2} <= set(done):
            others.set()
    assert sorted(done) == [0, 1, 2]
    assert done[-1] == 1


def _raise_unless(held: bool) -> None:
    if not held:
        raise TimeoutError("the others waited for it")


def test_what_nobody_has_begun_is_done_by_the_caller(monkeypatch):
    """Copiers that do not wake: the caller does it all, the last first, as they take the first first."""
    awake, ran = threading.Event(), []
    with ThreadPoolExecutor(1) as asleep:
        asleep.submit(awake.wait)
        monkeypatch.setattr(module, "_copiers", lambda: asleep)
        done = list(as_done([partial(ran.append, index) for index in range(4)], 3))
        awake.set()
    assert done == ran == [0, 3, 2, 1]


def test_copies_run_beside_the_callers():
    """Each waits until the other has begun."""
    meeting, on = threading.Barrier(2), []

    def meet() -> None:
        meeting.wait(60)
        on.append(threading.get_ident())

    assert sorted(as_done([meet, meet], 1)) == [0, 1]
    assert len(set(on)) == 2


def test_a_copy_leaves_the_interpreter_to_others():
    """The interpreter takes itself from nobody here: another thread runs only where a copy has given it up."""
    staging = Staging({"frames": ((2, 2160, 3840, 3), torch.uint8)}, CPU)
    frame, before = np.ones((2160, 3840, 3), np.uint8), sys.getswitchinterval()
    begun, seen = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (begun.wait(60), seen.set()))
    sys.setswitchinterval(1e3)
    try:
        other.start()
        begun.set()
        for _ in range(1000):
            if seen.is_set():
                break
            staging.write("frames", frame, 1)
        assert seen.is_set()
    finally:
        sys.setswitchinterval(before)
        other.join()


def test_copies_have_ended_when_one_raises():
    """They write pinned memory that the next observation writes too."""
    begun, may_end, ended = threading.Event(), threading.Event(), []

    def slow() -> None:
        begun.set()
        may_end.wait(60)
        ended.append(True)

    def wrong() -> None:
        begun.wait(60)
        threading.Timer(0.05, may_end.set).start()
        raise ValueError("frames.0: expected shape")

    with pytest.raises(ValueError, match=r"frames\.0"):
        list(as_done([wrong, slow], 1))
    assert ended == [True]


def test_threads_copy_large_frames_alone(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of arithmetic
    monkeypatch.setattr(module, "cores", lambda: Cores(16, 8, None))
    module._cores.cache_clear()
    large = 480 * 640 * 3
    assert [threads_for([large] * views) for views in (1, 2, 3, 8)] == [0, 1, 2, 3]
    assert threads_for([224 * 224 * 3] * 3) == 0
    for found, threads in ((Cores(1, 1, None), 0), (Cores(16, 8, 0.5), 0), (Cores(16, 8, 2.0), 1)):
        monkeypatch.setattr(module, "cores", lambda found=found: found)
        module._cores.cache_clear()
        assert threads_for([large] * 3) == threads
    module._cores.cache_clear()
