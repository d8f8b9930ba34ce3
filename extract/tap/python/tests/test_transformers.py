"""The hooks, on a small random model, with a client that records."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
from typing import Any, Sequence

import pytest
import torch

transformers = pytest.importorskip("transformers")

import draftscope_tap.transformers as tapped  # noqa: E402
from draftscope_tap.client import Rows  # noqa: E402

torch.set_num_threads(1)
STATES = [0, 1, 3]


@dataclasses.dataclass
class Session:
    states: list[int]
    alive: bool = True


@dataclasses.dataclass(eq=False)
class Kept:
    id: str
    prompt: list[int]
    meta: dict[str, Any]
    session: Session
    age: int
    state: str = "open"
    ids: list[int] = dataclasses.field(default_factory=list)
    rows: list[torch.Tensor] = dataclasses.field(default_factory=list)
    end: tuple[str, list[int] | None, str] | None = None


class Recorder:
    """Keeps what a daemon would get."""

    def __init__(self) -> None:
        self.states = STATES
        self.session = Session(STATES)
        self.requests: list[Kept] = []

    def begin(self, prompt: Sequence[int], *, id: str | None = None, **meta: Any) -> Kept:
        r = Kept(id or f"r{len(self.requests)}", list(prompt), meta, self.session, len(self.requests))
        r.ids = list(prompt[: meta["cached"]])  # as the daemon has them of another request
        r.rows = [torch.full((len(STATES), 16), torch.nan)] * len(r.ids)
        self.requests.append(r)
        return r

    def wants(self, request: Kept | None) -> bool:
        return request is not None

    def step(self, rows: Sequence[Rows], states: Any, *, patient: bool) -> None:
        if isinstance(states, torch.Tensor):
            states = states.unbind(1)
        for r in rows:
            kept: Any = r.request
            assert 0 <= r.pos <= len(kept.ids), "a hole"
            del kept.ids[r.pos :], kept.rows[r.pos :]
            kept.ids += r.ids
            kept.rows += [torch.stack([s[r.lo + i] for s in states]).clone() for i in range(len(r.ids))]

    def finish(self, request: Kept | None, ids: Sequence[int], reason: str) -> None:
        if request is not None and request.end is None:
            request.end = ("finish", list(ids), reason)

    def abort(self, request: Kept | None, reason: str) -> None:
        if request is not None and request.end is None:
            request.end = ("abort", None, reason)

    def close(self) -> None:
        return None


def model_of(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, max_position_embeddings=128, eos_token_id=7, pad_token_id=0,
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 7, 0
    return model


@pytest.fixture(params=["inline", "background"])
def tap(request: Any) -> Any:
    t = tapped.Tap(model_of(), Recorder(), background=request.param == "background")  # type: ignore[arg-type]
    yield t
    t.close()


def requests(tap: Any) -> list[Kept]:
    assert tap.flush()
    got: list[Kept] = tap.client.requests
    return got


def truth(model: Any, ids: list[int]) -> torch.Tensor:
    """The states of ids run alone: [rows, states, hidden]."""
    got: dict[int, torch.Tensor] = {}
    hooks = [model.model.layers[c - 1].register_forward_hook(lambda _m, _a, o, c=c: got.__setitem__(c, o[0])) for c in STATES if c > 0]
    decoder = model.model
    with torch.inference_mode():
        got[0] = decoder.embed_tokens(torch.tensor(ids))
        x = model_of()  # the same weights without a tap
    for h in hooks:
        h.remove()
    hooks = [x.model.layers[c - 1].register_forward_hook(lambda _m, _a, o, c=c: got.__setitem__(c, o[0])) for c in STATES if c > 0]
    with torch.inference_mode():
        x.model(torch.tensor([ids]))
    return torch.stack([got[c] for c in STATES], 1)


def whole(tap: Any, kept: Kept) -> None:
    assert kept.end is not None and kept.end[0] == "finish"
    ids = kept.end[1]
    assert ids is not None and len(kept.ids) in (len(ids), len(ids) - 1) and kept.ids == ids[: len(kept.ids)]
    assert ids[: len(kept.prompt)] == kept.prompt
    cached = kept.meta["cached"]
    torch.testing.assert_close(torch.stack(kept.rows)[cached:], truth(tap.model, kept.ids)[cached:], rtol=1e-4, atol=1e-5)


PROMPTS = [[5, 6, 8], [9], [11, 12, 13, 14, 15, 16]]


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, PROMPTS))
    return (
        torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS]),
        torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS]),
    )


def test_a_padded_batch_is_as_many_requests_as_it_has_rows(tap: Any) -> None:
    ids, mask = padded()
    with torch.inference_mode(), tap.request(ids=["a", "b", "c"], tags={"k": "v"}):
        out = tap.model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    with torch.inference_mode():
        plain = model_of().generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    assert out.tolist() == plain.tolist(), "the tap changes what is generated"
    assert [r.id for r in requests(tap)] == ["a", "b", "c"]
    for r, prompt in zip(requests(tap), PROMPTS):
        assert r.prompt == prompt and r.meta["tags"] == {"k": "v"}
        whole(tap, r)


def test_a_row_that_has_stopped_is_not_captured_further(tap: Any) -> None:
    ids, mask = padded()
    first = model_of().generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    stop = int(first[0, -1])  # what the first row says third
    with torch.inference_mode():
        out = tap.model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=stop)
    for row, r in enumerate(requests(tap)):
        made = out[row, ids.shape[1] :].tolist()
        made = made[: made.index(stop) + 1] if stop in made else made
        assert r.end == ("finish", r.prompt + made, "stop" if stop in made else "length")
        assert r.ids == (r.prompt + made)[:-1]
        whole(tap, r)


def test_several_samples_of_a_prompt_are_several_requests(tap: Any) -> None:
    torch.manual_seed(3)
    with torch.inference_mode():
        out = tap.model.generate(torch.tensor([[5, 6, 8]]), max_new_tokens=6, do_sample=True, num_return_sequences=3, temperature=0.5)
    assert len(requests(tap)) == 3
    for r, row in zip(requests(tap), out.tolist()):
        assert r.meta["temperature"] == 0.5 and row[: len(r.ids)] == r.ids
        whole(tap, r)


def test_drafts_that_assisted_decoding_rejects_are_taken_back(tap: Any) -> None:
    with torch.inference_mode():
        out = tap.model.generate(torch.tensor([[5, 6, 8]]), max_new_tokens=20, do_sample=False, assistant_model=model_of(1))
    (r,) = requests(tap)
    assert out[0, : len(r.ids)].tolist() == r.ids
    whole(tap, r)


def filled(tap: Any, ids: list[int], rows: int = 1) -> Any:
    """A cache that the model has filled, outside of generate."""
    cache = transformers.DynamicCache()
    with torch.inference_mode():
        tap.model(torch.tensor([ids] * rows), past_key_values=cache, use_cache=True)
    return cache


def test_a_cache_that_was_filled_before_is_a_cached_prefix(tap: Any) -> None:
    prefix = [21, 22, 23, 24]
    cache = filled(tap, prefix)
    again = copy.deepcopy(cache)
    again.batch_repeat_interleave(3)
    ids = torch.tensor([prefix + [5, 6], prefix + [8, 9], prefix + [11, 12]])
    with torch.inference_mode():
        tap.model.generate(ids[:1], past_key_values=cache, max_new_tokens=5, do_sample=False)
        tap.model.generate(ids, past_key_values=again, max_new_tokens=5, do_sample=False)
    first, *made = requests(tap)
    assert first.prompt == prefix and first.meta["cached"] == 0
    assert [r.prompt for r in made] == [prefix + [5, 6], *ids.tolist()]
    for r in made:
        assert r.meta["cached"] == 4
        whole(tap, r)


def test_a_conversation_goes_on_in_its_cache(tap: Any) -> None:
    cache = transformers.DynamicCache()
    ids = torch.tensor([[5, 6, 8]])
    with torch.inference_mode():
        for turn in range(3):
            mask = torch.ones_like(ids)  # or it would be told from the ids, of which one may be the padding's
            ids = tap.model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=4, min_new_tokens=4, do_sample=False)
            ids = torch.cat([ids, torch.tensor([[30 + turn]])], 1)
    assert [r.meta["cached"] for r in requests(tap)] == [0, 6, 11]
    for r in requests(tap):
        whole(tap, r)


def test_a_cache_of_other_tokens_is_not_captured(tap: Any, caplog: pytest.LogCaptureFixture) -> None:
    cache = filled(tap, [21, 22, 23, 24])
    with torch.inference_mode(), contextlib.suppress(Exception):  # whatever generate does with it
        tap.model.generate(torch.tensor([[5, 6]]), attention_mask=torch.ones(1, 6, dtype=torch.long), past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert [r.prompt for r in requests(tap)] == [[21, 22, 23, 24]]
    assert "a cache that was filled before" in caplog.text


def test_a_decode_loop_of_ones_own_is_a_request_as_long_as_its_cache_lives(tap: Any) -> None:
    with torch.inference_mode():
        cache = transformers.DynamicCache()
        o = tap.model(torch.tensor([[5, 6, 8], [9, 10, 11]]), past_key_values=cache, use_cache=True)
        for _ in range(4):
            o = tap.model(o.logits[:, -1:].argmax(-1), past_key_values=cache, use_cache=True)
    assert len(requests(tap)) == 2 and all(r.end is None for r in requests(tap))
    del o, cache
    gc.collect()
    for r in requests(tap):
        assert len(r.ids) == 7
        whole(tap, r)


def test_a_forward_pass_without_a_cache_is_a_request(tap: Any) -> None:
    with torch.inference_mode():
        tap.model(torch.tensor([[5, 6, 8]]), use_cache=False)
    whole(tap, requests(tap)[0])


def test_a_call_that_raises_aborts_its_requests(tap: Any) -> None:
    class Hangup(Exception):
        pass

    def stop(*_: Any, **__: Any) -> Any:
        raise Hangup

    with pytest.raises(Hangup):
        tap.model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, stopping_criteria=transformers.StoppingCriteriaList([stop]))
    assert requests(tap)[0].end == ("abort", None, "Hangup")


def test_beam_search_is_left_out(tap: Any) -> None:
    with torch.inference_mode():
        tap.model.generate(torch.tensor([[5, 6]]), max_new_tokens=3, num_beams=2, do_sample=False)
    assert requests(tap) == []


def test_close_leaves_the_model_as_it_was() -> None:
    model = model_of()
    tapped.Tap(model, Recorder()).close()  # type: ignore[arg-type]
    assert not model.model._forward_pre_hooks and not model.model._forward_hooks and "generate" not in vars(model)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.model.layers)
