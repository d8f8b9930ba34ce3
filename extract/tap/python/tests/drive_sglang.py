"""SGLang as an engine for draftscope's own tests: serves prompts at once and
prints, as one JSON object, what it served.

usage: drive_sglang.py --model DIR --socket PATH --sequences FILE [options]

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


def main(a: argparse.Namespace) -> None:
    os.environ["DRAFTSCOPE_TAP_SOCKET"] = a.socket
    stand_in()
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
    main(arguments().parse_args())
