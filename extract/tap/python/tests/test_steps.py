"""Steps, through the client, against a daemon that each test plays itself."""

from __future__ import annotations

import contextlib
import socket
from typing import Any, Iterator

import pytest
import torch
from test_client import Daemon, connected

from draftscope_tap.steps import End, Fed, Steps


def states(*values: float) -> list[torch.Tensor]:
    """The engine gives states 0, 1 and 3; the daemon wants 1 and 3. The row of
    value v holds v, v + 0.25 and v + 0.5."""
    first = torch.tensor(values)[:, None].expand(-1, 3)
    return [first, first + 0.25, first + 0.5]


@contextlib.contextmanager
def tapped(gives: tuple[int, ...] = (0, 1, 3)) -> Iterator[tuple[Daemon, Steps]]:
    with connected(slots=32) as (daemon, client):
        yield daemon, Steps(client, gives)


def entries(daemon: Daemon) -> list[tuple[str, int, list[int], int | None]]:
    return [(e["r"], e["pos"], e["ids"], e.get("accepted")) for e in daemon.read("step")["rows"]]


def silent(daemon: Daemon) -> bool:
    assert daemon.sock is not None
    daemon.sock.settimeout(0.1)
    with pytest.raises(TimeoutError):
        daemon.sock.recv(1, socket.MSG_PEEK)
    daemon.sock.settimeout(10)
    return True


def test_the_daemons_states_are_picked_out_of_the_engines() -> None:
    with tapped() as (daemon, steps):
        steps.begin("a", [4, 5], cached=0)
        steps.step([Fed("a", 1, 0, [4, 5])], states(9, 4, 5))
        assert daemon.read("begin")["prompt"] == [4, 5]
        assert entries(daemon) == [("a", 0, [4, 5], None)]
        assert daemon.row(0) == [4.25] * 3 + [4.5] * 3 and daemon.row(1) == [5.25] * 3 + [5.5] * 3


def test_nothing_is_captured_for_a_daemon_that_wants_what_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    with tapped(gives=(0, 1)) as (daemon, steps):
        for r in ("a", "b"):
            steps.begin(r, [4])
            steps.step([Fed(r, 0, 0, [4])], states(4)[:2])
            steps.end([End(r, "stop", [4, 5])])
        assert silent(daemon)
        assert len(caplog.records) == 1 and "wants states [1, 3]" in caplog.text


@pytest.mark.parametrize(
    ("next_pos", "sent"),
    [(3, [5]), (4, [5, 6]), (6, [5, 6, 7, 8])],
)
def test_drafts_are_sent_when_the_next_position_tells_that_they_were_accepted(next_pos: int, sent: list[int]) -> None:
    with tapped() as (daemon, steps):
        steps.begin("a", [3, 4])
        steps.step([Fed("a", 0, 0, [3, 4])], states(3, 4))
        rows = states(5, 6, 7, 8)
        steps.step([Fed("a", 0, 2, [5, 6, 7, 8], drafts=3)], rows)
        for s in rows:
            s.untyped_storage().fill_(0)  # as the replay of a graph would overwrite it
        daemon.read("begin")
        assert entries(daemon) == [("a", 0, [3, 4], None)] and silent(daemon)
        steps.step([Fed("a", 0, next_pos, [1])], states(1))
        assert entries(daemon) == [("a", 2, sent, len(sent) - 1)]
        assert daemon.row(2) == [5.25] * 3 + [5.5] * 3
        assert entries(daemon) == [("a", next_pos, [1], None)]


@pytest.mark.parametrize(
    ("ids", "sent"),
    [
        ([3, 4, 5, 6, 7, 8, 1], [5, 6, 7, 8]),  # all were accepted
        ([3, 4, 5, 6, 2], [5, 6]),  # the second was not: 2 was sampled for it
        ([3, 4, 5, 6, 7], [5, 6, 7]),  # the last token was fed, and the sequence ends there
        ([3, 4, 5], [5]),  # a step that was scheduled before the end was known
    ],
)
def test_the_last_drafts_are_those_of_the_ids_at_the_end(ids: list[int], sent: list[int]) -> None:
    with tapped() as (daemon, steps):
        steps.begin("a", [3, 4])
        steps.step([Fed("a", 0, 0, [3, 4])], states(3, 4))
        steps.step([Fed("a", 0, 2, [5, 6, 7, 8], drafts=3)], states(5, 6, 7, 8))
        steps.end([End("a", "length", ids)])
        daemon.read("begin")
        entries(daemon)
        assert entries(daemon) == [("a", 2, sent, len(sent) - 1)]
        assert daemon.read("finish") | {"type": 0} == {"type": 0, "r": "a", "reason": "length", "rows": 2 + len(sent), "ids": ids}


def test_rows_behind_a_stop_string_are_taken_back_at_the_end() -> None:
    with tapped() as (daemon, steps):
        for r in "ab":
            steps.begin(r, [3])
            steps.step([Fed(r, 0, 0, [3, 4, 5])], states(3, 4, 5))
        steps.step([Fed("b", 0, 3, [6, 7], drafts=1)], states(6, 7))
        steps.end([End("a", "stop", [3, 4], cut=True), End("b", "stop", [3, 4, 5, 6], cut=True)])
        daemon.read("begin"), entries(daemon), daemon.read("begin"), entries(daemon)
        assert entries(daemon) == [("b", 3, [6], 0)]
        assert daemon.read("finish") | {"type": 0} == {"type": 0, "r": "a", "reason": "stop", "rows": 2, "taken": 1, "ids": [3, 4]}
        assert daemon.read("finish") | {"type": 0} == {"type": 0, "r": "b", "reason": "stop", "rows": 4, "ids": [3, 4, 5, 6]}


def test_a_request_that_was_preempted_takes_its_rows_back_and_goes_on() -> None:
    with tapped() as (daemon, steps):
        steps.begin("a", [3, 4])
        steps.step([Fed("a", 0, 0, [3, 4])], states(3, 4))
        steps.step([Fed("a", 0, 2, [5, 6], drafts=1)], states(5, 6))
        steps.begin("a", [3, 4, 5])  # it comes as a new one
        steps.step([Fed("a", 0, 0, [3, 4, 5])], states(3, 4, 5))
        steps.end([End("a", "stop", [3, 4, 5, 7])])
        daemon.read("begin")
        assert entries(daemon) == [("a", 0, [3, 4], None)]
        assert entries(daemon) == [("a", 0, [3, 4, 5], None)]
        assert daemon.read("finish")["rows"] == 3


def test_ends_of_requests_that_never_began_say_nothing() -> None:
    with tapped() as (daemon, steps):
        steps.ignore("picture")
        steps.step([Fed("picture", 0, 0, [3]), Fed("unknown", 1, 0, [4])], states(3, 4))
        steps.end([End("picture", "stop", [3, 4]), End("waiting", "aborted", None)])
        steps.begin("a", [4], name="b")
        steps.end([End("a", "aborted", None)])
        assert daemon.read("begin")["r"] == "b"
        assert daemon.read("abort") | {"type": 0} == {"type": 0, "r": "b", "reason": "aborted", "rows": 0}
        assert silent(daemon)


def test_requests_of_one_pass_are_verified_apart() -> None:
    with tapped() as (daemon, steps):
        for r in "ab":
            steps.begin(r, [3])
        steps.step([Fed("a", 0, 0, [3, 4], drafts=1), Fed("b", 2, 0, [3, 6], drafts=1)], states(3, 4, 5, 6))
        steps.step([Fed("a", 0, 1, [8]), Fed("b", 1, 2, [7])], states(8, 7))
        daemon.read("begin"), daemon.read("begin")
        assert entries(daemon) == [("a", 0, [3], 0), ("b", 0, [3, 6], 1)]
        assert daemon.row(2) == [6.25] * 3 + [6.5] * 3
        assert entries(daemon) == [("a", 1, [8], None), ("b", 2, [7], None)]


@pytest.mark.parametrize("gives", [(1, 3), (0, 1, 3)])
def test_a_stage_of_rows_is_sent_like_states_apart(gives: tuple[int, ...]) -> None:
    with tapped(gives) as (daemon, steps):
        stage = torch.stack(states(3, 4, 5, 6)[3 - len(gives) :], 1)
        for r in "ab":
            steps.begin(r, [3])
        steps.step([Fed("a", 0, 0, [3, 4]), Fed("b", 2, 0, [5, 6], drafts=1)], stage, patient=True)
        stage.fill_(0)  # it is given back
        steps.end([End("b", "stop", [5, 6, 7])], patient=True)
        daemon.read("begin"), daemon.read("begin")
        assert entries(daemon) == [("a", 0, [3, 4], None)] and entries(daemon) == [("b", 0, [5, 6], 1)]
        assert [daemon.row(i)[0] for i in range(4)] == [3.25, 4.25, 5.25, 6.25]


def test_a_pass_that_had_no_memory_sheds_its_requests() -> None:
    with tapped() as (daemon, steps):
        for r in "ab":
            steps.begin(r, [3])
        steps.step([Fed("a", 0, 0, [3]), Fed("b", 1, 0, [3, 4], drafts=1)], None)
        steps.end([End("a", "stop", [3, 4]), End("b", "stop", [3, 4])])
        daemon.read("begin"), daemon.read("begin")
        assert {daemon.read("shed")["r"], daemon.read("shed")["r"]} == {"a", "b"}
        assert silent(daemon) and steps.client.counts().shed_rows == 3
