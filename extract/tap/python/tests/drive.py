"""An engine for draftscope's own tests: serves prompts with a tapped model and
prints, as one JSON object, what it served.

usage: drive.py MODE --model DIR --socket PATH --sequences FILE [options]

generate  the prompts in padded batches
prefix    the prompts one by one behind the first one, which a cache has that
          they share
load      one thread a prompt, all at once; some of them are given up midway
forever   batches until the process is killed; a line on stdout for each
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import logging
import os
import random
import sys
import threading
import time
from typing import Any

import torch
from driving import sequences

torch.set_num_threads(1)

import transformers  # noqa: E402

import draftscope_tap.transformers as tapped  # noqa: E402
from draftscope_tap.client import Client, Refused, Rows  # noqa: E402


class Liar(Client):
    """A client that says wrong things of its rows. The daemon wants all
    states, so that they stand at their own index."""

    lie = ""
    norm: Any = None
    cut = 7

    def begin(self, prompt: Any, **meta: Any) -> Any:
        if self.lie == "prefix":
            prompt = prompt[self.cut :]
        return super().begin(prompt, **meta)

    def finish(self, request: Any, ids: Any, reason: str) -> None:
        super().finish(request, ids[self.cut :] if self.lie == "prefix" else ids, reason)

    def step(self, rows: Any, states: Any, **how: Any) -> None:
        if not self.lie or states is None:
            return super().step(rows, states, **how)
        staged = isinstance(states, torch.Tensor)
        states = list(states.unbind(1) if staged else states)
        match self.lie:
            case "plus":
                states[4] = states[5]
            case "minus":
                states[4] = states[3]
            case "swap":
                states[4], states[6] = states[6], states[4]
            case "postnorm":
                states[-1] = self.norm(states[-1])
            case "prefix":
                rows = [self._shift(r) for r in rows]
        super().step(rows, torch.stack(states, 1) if staged else states, **how)

    def _shift(self, r: Rows) -> Rows:
        n = max(0, self.cut - r.pos)
        return dataclasses.replace(r, lo=r.lo + n, pos=r.pos + n - self.cut, ids=r.ids[n:])


class GivenUp(Exception):
    """A client that has hung up."""


class GiveUp(transformers.StoppingCriteria):
    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left <= 0:
            raise GivenUp
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def batch_of(seqs: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of different lengths, padded on the left."""
    width = max(s["prompt_len"] for s in seqs)
    rows, masks = [], []
    for s in seqs:
        prompt, pad = s["input_ids"][: s["prompt_len"]], width - s["prompt_len"]
        rows.append([0] * pad + prompt)
        masks.append([0] * pad + [1] * len(prompt))
    return torch.tensor(rows), torch.tensor(masks)


def generate(model: Any, tap: Any, seqs: list[dict[str, Any]], new: int, **more: Any) -> list[dict[str, Any]]:
    ids, mask = (x.to(model.device) for x in batch_of(seqs))
    with torch.inference_mode(), tap.request(ids=[s["id"] for s in seqs]):
        out = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **more)
    served = []
    for s, row in zip(seqs, out.tolist()):
        made = row[ids.shape[1] :]
        if 2 in made:
            made = made[: made.index(2) + 1]
        served.append({"id": s["id"], "prompt_len": s["prompt_len"], "input_ids": s["input_ids"][: s["prompt_len"]] + made})
    return served


def prefixed(model: Any, tap: Any, seqs: list[dict[str, Any]], new: int) -> list[dict[str, Any]]:
    """The first prompt is a request of its own, outside of generate; the
    others begin with it and get a copy of its cache."""
    first, *rest = seqs
    prefix = first["input_ids"][: first["prompt_len"]]
    cache = transformers.DynamicCache()
    with torch.inference_mode(), tap.request(ids=[first["id"]]):
        model.model(torch.tensor([prefix], device=model.device), past_key_values=cache, use_cache=True)
    # It was all fed: there is no last token without a row.
    served = [{"id": first["id"], "prompt_len": len(prefix), "input_ids": prefix + [0]}]
    for s in rest:
        prompt = prefix + s["input_ids"][: s["prompt_len"]]
        whole = {"id": s["id"], "prompt_len": len(prompt), "input_ids": prompt}
        served += generate(model, tap, [whole], new, past_key_values=copy.deepcopy(cache))
    return served


def load(model: Any, tap: Any, seqs: list[dict[str, Any]], seed: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Every prompt in a thread of its own; a quarter are given up."""
    rng = random.Random(seed)
    served: list[dict[str, Any]] = []
    given_up: list[str] = []
    lock = threading.Lock()

    def client(s: dict[str, Any], new: int, patience: int | None) -> None:
        more = {} if patience is None else {"stopping_criteria": transformers.StoppingCriteriaList([GiveUp(patience)])}
        try:
            got = generate(model, tap, [s], new, **more)
        except GivenUp:
            with lock:
                given_up.append(s["id"])
        else:
            with lock:
                served.extend(got)

    threads = []
    for s in seqs:
        new = rng.randint(4, 40)
        patience = rng.randint(1, new) if rng.random() < 0.25 else None
        threads.append(threading.Thread(target=client, args=(s, new, patience)))
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return served, given_up


def ring_mapped() -> bool:
    with open("/proc/self/maps") as f:
        return any("memfd:draftscope-tap" in line for line in f)


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("mode", choices=["generate", "prefix", "load", "forever"])
    p.add_argument("--model", required=True)
    p.add_argument("--socket", required=True)
    p.add_argument("--sequences", required=True)
    p.add_argument("--count", type=int, default=24)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--new", type=int, default=144)
    p.add_argument("--dtype", default="float32")
    p.add_argument("--attention", default="sdpa")
    p.add_argument("--ring-bytes", type=int, default=256 << 20)
    p.add_argument("--staging-bytes", type=int, default=256 << 20)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--lie", default="")
    p.add_argument("--background", action="store_true", default=bool(os.environ.get("DRAFTSCOPE_ENGINE_BACKGROUND")))
    p.add_argument("--device", default=os.environ.get("DRAFTSCOPE_ENGINE_DEVICE", "cpu"))
    a = p.parse_args()
    logging.basicConfig(level=logging.WARNING)
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(a.model, dtype=getattr(torch, a.dtype), attn_implementation=a.attention).to(a.device)
    seqs = sequences(a.sequences, a.count)
    hello = tapped.hello_of(model, "target")
    if a.lie == "bits":
        hello["dtype"] = "f16" if a.dtype == "bfloat16" else "bf16"
    Liar.lie, Liar.norm = a.lie, model.model.norm
    tap = tapped.Tap(model, Liar(a.socket, hello, dtype=model.dtype, device=model.device, ring_bytes=a.ring_bytes, wait=60, retry=0.2), background=a.background or None, staging_bytes=a.staging_bytes)
    result: dict[str, Any] = {}
    start = time.monotonic()
    if a.mode == "generate":
        result["served"] = [s for lo in range(0, len(seqs), a.batch) for s in generate(model, tap, seqs[lo : lo + a.batch], a.new)]
    elif a.mode == "prefix":
        result["served"] = prefixed(model, tap, seqs, a.new)
    elif a.mode == "load":
        result["served"], result["given_up"] = load(model, tap, seqs, a.seed)
    else:
        for n in range(1_000_000):
            part = [{**s, "id": f"{s['id']}-{n}"} for s in seqs[: a.batch]]
            t = time.monotonic()
            served = generate(model, tap, part, a.new)
            made = sum(len(s["input_ids"]) - s["prompt_len"] for s in served)
            seconds = time.monotonic() - t
            line = {"n": n, "seconds": seconds, "tokens_per_second": made / seconds, "connected": tap.client.connected, "mapped": ring_mapped()}
            print(json.dumps({**line, "counts": dataclasses.asdict(tap.client.counts())}), flush=True)
    result["seconds"] = time.monotonic() - start
    result["daemon"] = tap.close()
    result["engine"] = dataclasses.asdict(tap.client.counts())
    result["refused"] = tap.client.refused
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Refused as e:
        print(json.dumps({"refused": str(e)}), flush=True)
