"""Files of states as vLLM itself writes them: its method extract_hidden_states
and its ExampleHiddenStatesConnector, on the CPU.

usage: vllmfiles.py MODEL SEQUENCES FOLDER STATES"""

import json
import os
import pathlib
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

torch.set_num_threads(1)

from vllm import LLM, SamplingParams  # noqa: E402


def main(model: str, sequences: str, folder: str, states: list[int]) -> None:
    with open(sequences) as f:
        seqs = [json.loads(line) for line in f][:4]
    pathlib.Path(folder).mkdir(parents=True)
    llm = LLM(
        model=model, dtype="float32", skip_tokenizer_init=True, max_model_len=512, max_num_seqs=8, enforce_eager=True, enable_prefix_caching=False,
        speculative_config={"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": states}}},
        kv_transfer_config={
            "kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"shared_storage_path": folder},
        },
    )
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    out = llm.generate([{"prompt_token_ids": s["input_ids"]} for s in seqs], params)
    for o in out:  # they are written behind the answer
        path = pathlib.Path(o.kv_transfer_params["hidden_states_path"])
        end = time.monotonic() + 60
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.1)
    print(json.dumps({"files": [o.kv_transfer_params for o in out]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], [int(c) for c in sys.argv[4].split(",")])
