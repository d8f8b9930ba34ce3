"""A plugin for draftscope's own tests: the tap says wrong things of its rows.
The daemon wants all states, so that they stand at their own index."""

from __future__ import annotations

import os
from typing import Any

import draftscope_tap.vllm as tap
from draftscope_tap.client import Client


class Liar(Client):
    def step(self, rows: Any, states: Any, **more: Any) -> None:
        states = list(states)
        match os.environ["DRAFTSCOPE_TAP_TEST_LIE"]:
            case "plus":
                states[4] = states[5]
            case "minus":
                states[4] = states[3]
            case "postnorm":
                assert tap.worker is not None
                states[-1] = tap.decoder_of(tap.worker.runner.get_model()).norm(states[-1])
        super().step(rows, states, **more)


def register() -> None:
    tap.Client = Liar  # type: ignore[misc]
