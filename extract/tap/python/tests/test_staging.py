"""Where states wait, on the CPU in place of a GPU."""

from __future__ import annotations

import threading
import time

import torch

from draftscope_tap.staging import Staging

CPU = torch.device("cpu")
ROW = 2 * 3 * 4  # bytes: two states of three floats


def test_memory_is_used_again_and_bounded() -> None:
    s = Staging(CPU, 250 * ROW, 0.0)
    a = s.take(50, 2, 3, torch.float32)
    b = s.take(128, 2, 3, torch.float32)
    assert a is not None and b is not None and s.bytes == (64 + 128) * ROW
    assert s.take(100, 2, 3, torch.float32) is None, "more than the bound"
    s.give(a)
    s.give(b)
    assert s.take(17, 2, 3, torch.float32) is a
    small = s.take(2, 2, 3, torch.float32)
    assert small is not None and small.rows.shape[0] == 16, "a step took a prefill's memory"
    last = s.take(32, 2, 3, torch.float32)
    assert last is b and s.most == s.bytes == (64 + 128 + 16) * ROW
    for stage in (a, b, small):
        s.give(stage)
    big = s.take(200, 2, 3, torch.float32)  # the others make room
    assert big is not None and big.rows.shape == (208, 2, 3) and s.bytes <= s.limit
    assert s.take(10**6, 2, 3, torch.float32) is None
    s.drop()
    s.give(big)
    assert s.bytes == 0
    s.close()


def test_the_engine_waits_one_deadline_in_a_congestion() -> None:
    s = Staging(CPU, 100 * ROW, 0.1)
    a = s.take(64, 2, 3, torch.float32)
    assert a is not None
    t = time.monotonic()
    assert s.take(64, 2, 3, torch.float32) is None and time.monotonic() - t > 0.09
    assert s.take(64, 2, 3, torch.float32) is None and s.waits == 1, "it waited twice"
    s.give(a)
    assert s.take(64, 2, 3, torch.float32) is a
    s.close()


def test_what_comes_free_ends_the_wait() -> None:
    s = Staging(CPU, 100 * ROW, 60)
    a = s.take(64, 2, 3, torch.float32)
    assert a is not None
    threading.Timer(0.02, s.give, [a]).start()
    assert s.take(64, 2, 3, torch.float32) is a
    s.close()


def test_jobs_run_in_order_and_one_that_fails_stops_none() -> None:
    s = Staging(CPU, 1, 0.0)
    seen: list[int] = []

    def job(n: int) -> None:
        if n == 3:
            raise ValueError("on purpose")
        seen.append(n)

    for n in range(6):
        s.put(lambda n=n: job(n))  # type: ignore[misc]
    assert s.flush(5) and seen == [0, 1, 2, 4, 5]
    s.close()
    assert not s._thread.is_alive()


def test_views_are_the_states_of_a_padded_batch() -> None:
    s = Staging(CPU, 1 << 20, 0.0)
    stage = s.take(6, 2, 3, torch.float32)
    assert stage is not None
    for i, view in enumerate(stage.views(2, 3)):
        view.copy_(torch.arange(18.0).view(2, 3, 3) + 100 * i)
    assert stage.rows[4].tolist() == [[12, 13, 14], [112, 113, 114]]
    s.close()


def test_jobs_gather_until_somebody_waits_or_memory_is_short() -> None:
    s = Staging(CPU, 100 * ROW, 0.0)
    began: list[float] = []
    t = time.monotonic()
    s.put(lambda: began.append(time.monotonic() - t))
    time.sleep(0.03)
    s.put(lambda: began.append(time.monotonic() - t))
    while len(began) < 2:
        assert time.monotonic() - t < 5
        time.sleep(0.001)
    assert began[0] > 0.09 and began[1] - began[0] < 0.05, "they ran one by one"
    began.clear()
    t = time.monotonic()
    s.put(lambda: began.append(time.monotonic() - t))
    assert s.flush(5) and began[0] < 0.09, "a flush waited"
    a = s.take(32, 2, 3, torch.float32)
    t = time.monotonic()
    s.put(lambda: began.append(time.monotonic() - t))
    b = s.take(32, 2, 3, torch.float32)
    assert a is not None and b is not None
    while len(began) < 2:
        assert time.monotonic() - t < 5
        time.sleep(0.001)
    assert began[1] < 0.09, "memory was short"
    s.close()
