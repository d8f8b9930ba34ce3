"""What of the tap in vLLM works without vLLM."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from draftscope_tap import vllm_stops
from draftscope_tap.vllm import Options, beam, meta_of, options_of


def config(connector: str | None = None, **extra: Any) -> Any:
    transfer = None if connector is None else SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra)
    return SimpleNamespace(kv_transfer_config=transfer)


def test_options_come_from_our_connector_or_else_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options_of(config()) is None
    assert options_of(config("NixlConnector", socket="/theirs")) is None
    ours = {"socket": "/a", "states": [2, 8], "prefix_cache": "recompute"}
    want = Options(socket="/a", states=(2, 8), prefix_cache="recompute")
    assert options_of(config("TapConnector", **ours)) == want
    one_of_two = [{"kv_connector": "NixlConnector"}, {"kv_connector": "TapConnector", "kv_connector_extra_config": ours}]
    assert options_of(config("MultiConnector", connectors=one_of_two)) == want
    monkeypatch.setenv("DRAFTSCOPE_TAP_SOCKET", "/b")
    monkeypatch.setenv("DRAFTSCOPE_TAP_OPTIONS", json.dumps({"states": [1]}))
    assert options_of(config()) == Options(socket="/b", states=(1,))
    assert options_of(config("TapConnector", **ours)) == want


def test_a_wrong_option_is_an_error() -> None:
    with pytest.raises(ValueError, match="complete or recompute"):
        Options(socket="/a", prefix_cache="refuse")
    with pytest.raises(TypeError):
        options_of(config("TapConnector", socket="/a", sates=[1]))


def test_an_abort_says_which_requests_a_stop_string_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_stops, "_stopped", {"a": 7, "b:c": 0})
    ids = ["x", "a", "b:c"]
    sent = vllm_stops.marked(ids, True)
    assert vllm_stops.unmarked(sent) == (ids, {"a": 7, "b:c": 0}) and len(sent) == 5
    assert vllm_stops.marked(ids, True) == ids  # each is said once
    monkeypatch.setattr(vllm_stops, "_stopped", {"a": 7})
    assert vllm_stops.marked(ids, False) == ids and not vllm_stops._stopped


def test_what_a_client_says_of_its_vllm_request() -> None:
    class Params:
        temperature = 0.5
        extra_args: dict[str, Any] | None = {"draftscope_id": "x", "draftscope_tags": "tenant=a,plan=b=c", "draftscope": "off"}

    assert meta_of(Params) == ("x", {"temperature": 0.5, "tags": {"tenant": "a", "plan": "b=c"}, "optout": True})
    Params.extra_args = None
    assert meta_of(Params) == (None, {"temperature": 0.5, "tags": {}, "optout": False})


def test_the_steps_of_a_beam_search_are_known() -> None:
    def request(id: str, new: int | None) -> Any:
        return SimpleNamespace(req_id=id, sampling_params=SimpleNamespace(max_tokens=new))

    assert beam(request("cmpl-a46bb2be-0-9f1c-beam-1-86e9f44c", 1)) and beam(request("chatcmpl-a46bb2be-9f1c-beam-12", 1))
    assert not beam(request("cmpl-my-beam-1-0-86e9f44c", 2)) and not beam(request("cmpl-a46bb2be-0-86e9f44c", 1))
    assert not beam(SimpleNamespace(req_id="x-beam-1", sampling_params=None))
