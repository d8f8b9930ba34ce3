"""Clients of a server with OpenAI's API, for draftscope's own tests: they are
openai's own, and ask many things at once. Prints, as one JSON object, what was
answered.

usage: drive_http.py --url URL --sequences FILE [options]

Requests are completions and chats, streamed and not. Some have a stop string,
some ask for two answers, some want to be kept out, some search with beams.
Some clients hang up: of
those that stream, each behind a token that it was given; of the others, after
a time, when their requests may not have been scheduled yet. With --workers,
so many clients stream one request after the other until SIGTERM, and each
answer is printed as it is there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
from typing import Any

import openai
from driving import sequences

STOP = ")"
TWICE = "twice"  # a name that two requests have
KINDS = ["ids", "text", "chat", "talk"]  # completions of ids, and of a text; chats; the second and the fourth are streamed


def tokens(choice: Any) -> list[int]:
    return getattr(choice, "token_ids", None) or getattr(choice, "response_token_ids", None) or []


class Clients:
    def __init__(self, url: str, seed: int, xargs: str, kinds: list[str]) -> None:
        self.xargs, self.kinds = xargs, kinds
        self.openai = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=1200)
        self.rng = random.Random(seed)
        self.out: dict[str, list[Any]] = {"served": [], "given_up": [], "hung_up": [], "kept_out": []}

    async def ask(self, kind: str, s: dict[str, Any], id: str, *, new: int, xargs: dict[str, Any], patience: int = 0, seconds: float = 0, beams: bool = False, **more: Any) -> None:
        """One request, given up after so many tokens or seconds, if any."""
        streamed = kind in ("text", "talk")
        extra = {"return_token_ids": True, "ignore_eos": bool(patience or seconds), self.xargs: {"draftscope_id": id, **xargs}}
        if beams:
            extra["use_beam_search"] = True
        args: dict[str, Any] = {"model": "target", "temperature": 0, "max_tokens": new, "stream": streamed, **more, "extra_body": extra}
        if seconds:
            args["timeout"] = seconds
        if kind in ("chat", "talk"):
            args["messages"] = [{"role": "user", "content": s["prompt"]}]
            create: Any = self.openai.chat.completions.create
        else:
            text = f"<|im_start|>user\n{s['prompt']}<|im_end|>\n<|im_start|>assistant\n"
            args.setdefault("prompt", text if streamed else s["input_ids"][: s["prompt_len"]])
            create = self.openai.completions.create
        try:
            answer = await create(**args)
        except openai.APITimeoutError:
            self.out["hung_up"].append(id)
            return
        parts = [answer]
        if streamed:
            parts, made = [], 0
            async for part in answer:
                parts.append(part)
                made += sum(len(tokens(c)) for c in part.choices)
                if patience and made >= patience:
                    await answer.close()
                    self.out["given_up"].append(id)
                    return
        if xargs.get("draftscope") == "off":
            self.out["kept_out"].append(id)
            return
        # Of several answers, which one has the name is not known.
        n = 1 + max(c.index for part in parts for c in part.choices)
        for i in range(n):
            choices = [c for part in parts for c in part.choices if c.index == i]
            prompt = next(ids for x in [*choices, *parts] if (ids := getattr(x, "prompt_token_ids", None)))
            self.out["served"].append({
                "id": id if n == 1 and id != TWICE else "", "name": id, "prompt_len": len(prompt),
                "input_ids": prompt + [t for c in choices for t in tokens(c)],
                "finish_reason": choices[-1].finish_reason, "stop_reason": getattr(choices[-1], "stop_reason", None) or getattr(choices[-1], "matched_stop", None),
                "tenant": xargs["draftscope_tags"].removeprefix("tenant="), "greedy": "temperature" not in more,
            })

    async def crowd(self, seqs: list[dict[str, Any]]) -> None:
        """Every sequence by every kind of request, all at once."""
        rng, jobs, first = self.rng, [], []
        for i, s in enumerate(seqs):
            for kind in self.kinds:
                xargs = {"draftscope_tags": f"tenant={rng.choice('ab')}"}
                args: dict[str, Any] = {"new": rng.randint(4, 144), "xargs": xargs}
                match rng.randrange(10):
                    case 0 | 1:  # it could go on for long
                        args |= {"new": 900, "patience": rng.randint(1, 8)} if kind in ("text", "talk") else {"new": 900, "seconds": 0.5 + 3 * rng.random()}
                    case 2 | 3:
                        args |= {"new": 144, "stop": [STOP]}
                    case 4:
                        xargs["draftscope"] = "off"
                (first if "seconds" in args else jobs).append(self.ask(kind, s, f"{kind}{i}", **args))
        rng.shuffle(jobs)
        tags = {"draftscope_tags": "tenant=a"}
        prompts = [s["input_ids"][: s["prompt_len"]] for s in seqs[:2]]
        jobs.append(self.ask("ids", seqs[2], "both", new=40, xargs=tags, n=2, temperature=0.8))
        jobs.append(self.ask("ids", seqs[3], "list", new=40, xargs=tags, prompt=prompts))
        jobs.append(self.ask("ids", seqs[5], "1234", new=20, xargs={**tags, "draftscope_id": 1234}))
        # What vLLM makes of these does not say that they are kept out.
        jobs += [] if self.xargs != "vllm_xargs" else [self.ask(kind, seqs[5], f"beams-{kind}", new=6, xargs={"draftscope": "off"}, n=2, beams=True) for kind in ("ids", "chat")]
        await asyncio.gather(*first, *jobs)
        for kind in (self.kinds[0], self.kinds[-1]):  # one behind the other
            await self.ask(kind, seqs[4], TWICE, new=20, xargs=tags)

    async def workers(self, n: int, seqs: list[dict[str, Any]]) -> None:
        over = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)

        async def one(w: int) -> None:
            i = 0
            while not over.is_set():
                try:
                    await self.ask(self.rng.choice(["text", "talk"]), self.rng.choice(seqs), f"w{w}-{i}", new=self.rng.randint(8, 40), xargs={"draftscope_tags": "tenant=a"})
                    print(json.dumps({"n": len(self.out["served"])}), flush=True)
                except openai.APIError as e:
                    print(f"w{w}-{i}: {e}", flush=True)
                    await asyncio.sleep(0.5)
                i += 1

        await asyncio.gather(*(one(w) for w in range(n)))


async def main(a: argparse.Namespace) -> None:
    clients, seqs = Clients(a.url, a.seed, a.xargs, a.kinds.split(",")), sequences(a.sequences, a.count)
    await (clients.workers(a.workers, seqs) if a.workers else clients.crowd(seqs))
    print(json.dumps(clients.out), flush=True)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--url", required=True)
    p.add_argument("--sequences", required=True)
    p.add_argument("--count", type=int, default=24)
    p.add_argument("--xargs", default="vllm_xargs", help="the key of what a client says to the tap")
    p.add_argument("--kinds", default=",".join(KINDS))
    p.add_argument("--workers", type=int, default=0)
    p.add_argument("--seed", type=int, default=1)
    asyncio.run(main(p.parse_args()))
