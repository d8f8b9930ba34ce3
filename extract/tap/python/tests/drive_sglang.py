"""SGLang as an engine for draftscope's own tests: serves prompts at once and
prints, as one JSON object, what it served; or becomes SGLang's server.

usage: drive_sglang.py --model DIR --socket PATH --sequences FILE [options]
       drive_sglang.py --model DIR --socket PATH --sequences FILE --serve PORT --template FILE

SGLang's CPU kernels are not on PyPI, and without them it looks for a name in
vLLM, which is not there and which it does not call: a module of ours has it.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

from driving import arguments, round_of, sequences

os.environ.setdefault("OMP_NUM_THREADS", "1")


def stand_in() -> None:
    """A package vllm for this process and those that SGLang starts."""
    site = pathlib.Path(tempfile.mkdtemp())
    (site / "vllm").mkdir()
    (site / "vllm/__init__.py").touch()
    (site / "vllm/_custom_ops.py").write_text("def rotary_embedding(*args, **kwargs):\n    raise NotImplementedError('this is no vLLM')\n")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(site))


def server(a: argparse.Namespace) -> list[str]:
    """The command line of the server. A prefix that its cache has of a request
    that was given up is nobody's row: the cache is off."""
    options = {
        "--model-path": a.model, "--served-model-name": "target", "--device": "cpu", "--dtype": "float32", "--attention-backend": "torch_native",
        "--sampling-backend": "pytorch", "--max-total-tokens": "16384", "--context-length": "1024", "--max-running-requests": "16",
        "--chat-template": a.template, "--host": "127.0.0.1", "--port": str(a.serve),
    }
    flags = ["--disable-overlap-schedule", "--disable-radix-cache", "--skip-server-warmup"]
    return [sys.executable, "-m", "sglang.launch_server", *flags, *(x for option in options.items() for x in option)]


def main(a: argparse.Namespace) -> None:
    os.environ["DRAFTSCOPE_TAP_SOCKET"] = a.socket
    stand_in()
    if a.serve:
        command = server(a)
        os.execv(command[0], command)
    import sglang

    seqs = sequences(a.sequences, a.count)
    options: dict[str, Any] = {
        "model_path": a.model, "device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "sampling_backend": "pytorch",
        "skip_tokenizer_init": True, "max_total_tokens": 16384, "context_length": 1024, "disable_overlap_schedule": True, "log_level": "error",
        **json.loads(a.engine),
    }
    engine = sglang.Engine(**options)
    start = time.monotonic()
    served: list[dict[str, Any]] = []
    for n in range(a.rounds):
        part = round_of(seqs, n)
        prompts = [s["input_ids"][: s["prompt_len"]] for s in part]
        params = [{"temperature": 0, "max_new_tokens": a.new, "stop_token_ids": [2], "custom_params": {"draftscope_id": s["id"]}} for s in part]
        for s, prompt, out in zip(part, prompts, engine.generate(input_ids=prompts, sampling_params=params)):
            served.append({"id": s["id"], "prompt_len": len(prompt), "input_ids": prompt + list(out["output_ids"])})
    seconds = time.monotonic() - start
    engine.shutdown()
    print(json.dumps({"served": served, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    p = arguments()
    p.add_argument("--serve", type=int, default=0, help="the server's port")
    p.add_argument("--template", help="the server's chat template")
    main(p.parse_args())
