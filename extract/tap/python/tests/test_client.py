"""The client against a daemon that each test plays itself."""

from __future__ import annotations

import array
import contextlib
import json
import mmap
import os
import pathlib
import socket
import struct
import tempfile
import threading
import time
from typing import Any, Iterator

import pytest
import torch

from draftscope_tap import Client, Refused
from draftscope_tap.client import Rows
from draftscope_tap.protocol import MAX_FRAME, encode, receive, sampled

HELLO = {"engine": "test", "engine_version": "1", "model": {"label": "m", "layers": 4, "hidden": 3, "vocab": 9}, "dtype": "f32"}
STATES = [1, 3]


class Daemon:
    """The other side of the socket. It reads what the test asks it to."""

    def __init__(self, path: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(path)
        self.listener.listen()
        self.listener.settimeout(10)
        self.sock: socket.socket | None = None

    def accept(self, **welcome: Any) -> dict[str, Any]:
        self.sock, _ = self.listener.accept()
        self.sock.settimeout(10)
        hello = receive(self.sock)
        self.send({"type": "welcome", "protocol": 1, "run": "r", "states": STATES, "bulk": "memfd", "sample": 1, **welcome})
        data, anc, _, _ = self.sock.recvmsg(1 << 16, socket.CMSG_SPACE(4))
        (_, _, raw), = anc
        fd = array.array("i", raw)[0]
        self.ad = json.loads(data[4:])
        self.map = mmap.mmap(fd, self.ad["offset"] + self.ad["slots"] * self.ad["slot_bytes"])
        self.fd = fd
        self.send({"type": "credit", "freed": 0})
        return hello

    def send(self, message: dict[str, Any]) -> None:
        assert self.sock is not None
        self.sock.sendall(encode(message))

    def read(self, kind: str) -> dict[str, Any]:
        assert self.sock is not None
        message = receive(self.sock)
        assert message["type"] == kind, message
        return message

    def row(self, slot: int) -> list[float]:
        n = len(STATES) * 3
        return list(struct.unpack_from(f"<{n}f", self.map, self.ad["offset"] + slot % self.ad["slots"] * self.ad["slot_bytes"]))

    def free(self, n: int) -> None:
        struct.pack_into("<Q", self.map, 0, n)

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()


@contextlib.contextmanager
def connected(slots: int = 8, **options: Any) -> Iterator[tuple[Daemon, Client]]:
    with tempfile.TemporaryDirectory() as dir:
        path = str(pathlib.Path(dir) / "s")
        daemon = Daemon(path)
        welcome = options.pop("welcome", {})
        accepted = threading.Thread(target=daemon.accept, kwargs=welcome)
        accepted.start()
        client = Client(path, HELLO, dtype=torch.float32, ring_bytes=4096 + slots * 24, retry=0.05, **options)
        accepted.join()
        try:
            yield daemon, client
        finally:
            daemon.close()
            daemon.listener.close()
            client._closed.set()
            client._reader.join(5)


def states(*values: float) -> list[torch.Tensor]:
    """For each row a value v: v in the first state, v + 0.5 in the second."""
    first = torch.tensor(values)[:, None].expand(-1, 3)
    return [first, first + 0.5]


def test_rows_arrive_as_they_were_and_counts_agree() -> None:
    with connected() as (daemon, client):
        r = client.begin([4, 5], id="a", tags={"k": "v"})
        assert r is not None
        client.step([Rows(r, 0, 0, [4, 5])], states(4, 5))
        client.step([Rows(r, 0, 2, [6])], states(6))
        client.finish(r, [4, 5, 6, 7], "stop")
        assert daemon.read("begin") | {"type": 0} == {"type": 0, "r": "a", "prompt": [4, 5], "cached": 0, "temperature": 0.0, "tags": {"k": "v"}}
        step = daemon.read("step")
        assert abs(step.pop("at") - time.time()) < 10
        assert step == {"type": "step", "n": 0, "rows": [{"r": "a", "pos": 0, "ids": [4, 5], "slot": 0}]}
        assert daemon.row(1) == [5, 5, 5, 5.5, 5.5, 5.5]
        assert daemon.read("step")["rows"] == [{"r": "a", "pos": 2, "ids": [6], "slot": 2}]
        assert daemon.read("finish") == {"type": "finish", "r": "a", "reason": "stop", "rows": 3, "ids": [4, 5, 6, 7]}

        def answer() -> None:
            counts = daemon.read("bye")["counts"]
            daemon.send({"type": "bye", "counts": counts})

        t = threading.Thread(target=answer)
        t.start()
        counts = client.close(5)
        t.join()
        assert counts is not None and counts["begun"] == counts["finished"] == 1 and counts["rows"] == 3 and counts["steps"] == 2


def test_the_ring_cannot_be_shrunk_and_has_no_name() -> None:
    with connected() as (daemon, _):
        with pytest.raises(PermissionError):
            os.ftruncate(daemon.fd, 0)
        assert not [f for f in os.listdir("/dev/shm") if "draftscope" in f]


def test_more_rows_than_slots_go_in_pieces_as_credit_comes() -> None:
    with connected(slots=4, deadline=5.0) as (daemon, client):
        r = client.begin([1], id="a")
        assert r is not None
        t = threading.Thread(target=client.step, args=([Rows(r, 0, 0, list(range(8)) + [8])], states(*range(9))))
        t.start()
        daemon.read("begin")
        seen: list[float] = []
        while len(seen) < 9:
            for entry in daemon.read("step")["rows"]:
                assert entry["pos"] == entry["slot"] == len(seen)
                seen += [daemon.row(entry["slot"] + i)[0] for i in range(len(entry["ids"]))]
            daemon.free(len(seen))
        t.join()
        assert seen == list(range(9))


def test_rows_that_were_staged_go_through_the_ring_and_around_its_end() -> None:
    with connected(slots=4) as (daemon, client):
        a, b = client.begin([1], id="a"), client.begin([2], id="b")
        assert a is not None and b is not None
        daemon.read("begin"), daemon.read("begin")
        for n in range(3):
            staged = torch.stack(states(*range(10 * n, 10 * n + 6)), 1)
            client.step([Rows(b, 4, n, [1]), Rows(a, 1, 2 * n, [1, 2])], staged, patient=True)
            step = daemon.read("step")
            assert [(e["r"], e["pos"], e["ids"], e["slot"]) for e in step["rows"]] == [("a", 2 * n, [1, 2], 3 * n), ("b", n, [1], 3 * n + 2)]
            assert [daemon.row(3 * n + i)[0] for i in range(3)] == [10 * n + 1, 10 * n + 2, 10 * n + 4]
            assert struct.unpack_from("<Q", daemon.map, 16)[0] == 3 * n + 3, "the ring does not say what it holds"
            daemon.free(3 * n + 3)


def test_rows_without_memory_on_the_device_are_shed_exactly() -> None:
    with connected() as (daemon, client):
        a, b = client.begin([1], id="a"), client.begin([2], id="b")
        assert a is not None and b is not None
        client.step([Rows(a, 0, 0, [1, 2])], torch.stack(states(1, 2), 1))
        client.step([Rows(a, 0, 2, [3]), Rows(b, 1, 0, [4, 5])], None)
        client.step([Rows(b, 0, 2, [6])], None)
        c = client.counts()
        assert (c.begun, c.shed, c.rows, c.shed_rows) == (2, 2, 2, 3 + 2 + 1)
        daemon.read("begin"), daemon.read("begin"), daemon.read("step")
        assert [(m["r"], m["rows"]) for m in (daemon.read("shed"), daemon.read("shed"))] == [("a", 2), ("b", 0)]


def test_a_daemon_that_does_not_read_costs_one_deadline_and_the_youngest() -> None:
    with connected(slots=4, deadline=0.15) as (daemon, client):
        old, young = client.begin([1], id="old"), client.begin([2], id="young")
        assert old is not None and young is not None
        t = time.monotonic()
        client.step([Rows(young, 0, 0, [1, 2, 3]), Rows(old, 3, 0, [1, 2, 3])], states(1, 2, 3, 4, 5, 6))
        first = time.monotonic() - t
        assert 0.1 < first < 1
        assert young.state == "shed" and old.state == "open"
        t = time.monotonic()
        client.step([Rows(young, 0, 3, [4]), Rows(old, 1, 3, [4])], states(1, 2))
        assert time.monotonic() - t < 0.1, "it waited twice in one congestion"
        assert old.state == "shed"
        c = client.counts()
        assert (c.begun, c.shed, c.rows, c.shed_rows) == (2, 2, 4, 3 + 1 + 3 + 1)
        daemon.read("begin"), daemon.read("begin")
        step = daemon.read("step")
        assert [(e["r"], e["ids"]) for e in step["rows"]] == [("old", [1, 2, 3]), ("young", [1])]
        assert daemon.read("shed")["r"] == "young" and daemon.read("shed") | {"reason": ""} == {"type": "shed", "r": "old", "reason": "", "rows": 3}
        daemon.free(4)
        again = client.begin([1], id="again")
        assert again is not None
        client.step([Rows(again, 0, 0, [1])], states(1))
        assert daemon.read("begin")["r"] == "again" and daemon.read("step")["rows"][0]["slot"] == 4


def test_rows_of_a_dropped_request_are_not_sent() -> None:
    with connected() as (daemon, client):
        r = client.begin([1], id="a")
        assert r is not None
        daemon.send({"type": "drop", "r": "a", "reason": "not wanted"})
        while client.wants(r):
            time.sleep(0.01)
        client.step([Rows(r, 0, 0, [1])], states(1))
        client.finish(r, [1, 2], "stop")
        daemon.read("begin")
        assert daemon.read("finish")["rows"] == 0


def test_death_of_the_daemon_is_counted_and_the_next_one_is_found() -> None:
    with connected() as (daemon, client):
        r = client.begin([1], id="a")
        assert r is not None
        daemon.close()
        while client.connected:
            time.sleep(0.01)
        client.step([Rows(r, 0, 0, [1])], states(1))
        client.finish(r, [1, 2], "stop")
        assert client.counts().lost == 1 and client.begin([1]) is None
        with open("/proc/self/maps") as f:
            mapped = sum("memfd:draftscope-tap" in line for line in f)
        daemon.map.close()
        with open("/proc/self/maps") as f:
            assert sum("memfd:draftscope-tap" in line for line in f) == 0 < mapped, "the engine kept its mapping"
        daemon.accept(states=[2])
        while not client.connected:
            time.sleep(0.01)
        assert client.states == [2]
        assert client.begin([1], id="b") is not None


def test_a_refusal_is_final() -> None:
    with tempfile.TemporaryDirectory() as dir:
        path = str(pathlib.Path(dir) / "s")
        daemon = Daemon(path)

        def refuse() -> None:
            daemon.sock, _ = daemon.listener.accept()
            receive(daemon.sock)
            daemon.send({"type": "refuse", "reason": "another model"})

        t = threading.Thread(target=refuse)
        t.start()
        with pytest.raises(Refused, match="another model"):
            Client(path, HELLO, dtype=torch.float32)
        t.join()
        daemon.close()
        daemon.listener.close()


def test_without_a_daemon_serving_goes_on() -> None:
    with tempfile.TemporaryDirectory() as dir:
        client = Client(pathlib.Path(dir) / "s", HELLO, dtype=torch.float32, wait=0.05, retry=0.05)
        assert not client.connected and client.states == [] and client.begin([1]) is None
        assert client.close(5) is None


def test_requests_that_are_not_wanted_are_counted_and_not_sent() -> None:
    assert sampled("r6", 0.3) and not sampled("r0", 0.3)  # the daemon's tests have the same two
    with connected(welcome={"sample": 0.3}) as (daemon, client):
        assert client.begin([1], id="r0") is None
        assert client.begin([1], id="r6", optout=True) is None
        assert client.begin([1], id="r6", tags={"draftscope": "off"}) is None
        assert client.begin([1], id="r6") is not None
        assert daemon.read("begin")["r"] == "r6"
        c = client.counts()
        assert (c.begun, c.unsampled, c.optout) == (1, 1, 2)


def test_an_id_that_the_protocol_does_not_take_is_replaced() -> None:
    with connected() as (_, client):
        for bad in ("../a", "", "ä", "x" * 129, "-a"):
            r = client.begin([1], id=bad)
            assert r is not None and r.id != bad


def test_a_name_that_was_used_is_never_used_again() -> None:
    with connected() as (daemon, client):
        assert client.begin([1], id="same", optout=True) is None  # which takes no name
        first, second = client.begin([1], id="same"), client.begin([1], id="same")
        assert first is not None and second is not None and first.id == "same"
        assert second.id.startswith("same.t")
        client.finish(first, [1], "stop")
        third = client.begin([1], id="same")
        assert third is not None and third.id not in ("same", second.id) and third.id.startswith("same.t")
        for want in (first, second):
            assert daemon.read("begin")["r"] == want.id
        long = [client.begin([1], id="x" * 128) for _ in range(2)]
        assert long[0] is not None and long[1] is not None and long[0].id == "x" * 128 != long[1].id


def test_tags_that_no_message_can_hold_cost_their_own_request_only() -> None:
    with connected() as (daemon, client):
        assert client.begin([1], tags={"k": "v" * MAX_FRAME}) is None
        assert client.begin([1], id="a") is not None
        assert daemon.read("begin")["r"] == "a"
        assert client.counts().begun == 1
