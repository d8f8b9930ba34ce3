"""Reads what draftscope exported, with the other projects' own readers, and
compares it with a dataset's states: readers.py FORMAT FOLDER NATIVE, where
NATIVE is a vllm export that safetensors has read."""

import json
import pathlib
import sys

import torch

torch.set_num_threads(1)

from safetensors.torch import load_file  # noqa: E402

format, folder, native = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
want = [load_file(f) for f in sorted(native.glob("*.safetensors"))]
equal = 0
if format == "speculators":
    import datasets

    side = datasets.load_from_disk(str(folder))
    for i, row in enumerate(side):
        got = load_file(folder / f"hidden_states/hs_{i}.safetensors")
        assert torch.equal(got["hidden_states"], want[i]["hidden_states"]) and torch.equal(got["token_ids"], want[i]["token_ids"])
        assert row["input_ids"] == want[i]["token_ids"].tolist() and row["seq_len"] == len(row["loss_mask"]) and set(row["loss_mask"]) <= {0, 1}
        equal += 1
else:
    for i, w in enumerate(want):
        # As SpecForge does, but for weights_only, which is stricter.
        got = torch.load(folder / f"rows_0-2000/data_{i}.ckpt", mmap=True, weights_only=True)
        h = w["hidden_states"]
        assert torch.equal(got["hidden_states"], h.reshape(1, h.shape[0], -1)) and torch.equal(got["input_ids"], w["token_ids"])
        assert got["loss_mask"].shape == got["input_ids"].shape and got["loss_mask"].sum() > 0
        equal += 1
print(json.dumps({"equal": equal}))
