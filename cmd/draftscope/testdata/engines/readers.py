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
want = {tuple(w["token_ids"].tolist()): w["hidden_states"] for w in map(load_file, native.glob("*.safetensors"))}
equal = 0
if format == "speculators":
    import datasets

    side = datasets.load_from_disk(str(folder))
    assert side.format["type"] == "torch"
    for i, row in enumerate(side):
        got = load_file(folder / f"hidden_states/hs_{i}.safetensors")
        assert torch.equal(row["input_ids"], got["token_ids"]) and row["seq_len"] == len(row["loss_mask"]) and set(row["loss_mask"].tolist()) == {0, 1}
        assert torch.equal(got["hidden_states"], want.pop(tuple(row["input_ids"].tolist())))
        equal += 1
else:
    for file in sorted(folder.glob("rows_0-2000/data_*.ckpt")):
        # As SpecForge does, but for weights_only, which is stricter.
        got = torch.load(file, mmap=True, weights_only=True)
        h = want.pop(tuple(got["input_ids"].tolist()))
        assert torch.equal(got["hidden_states"], h.reshape(1, h.shape[0], -1))
        assert got["loss_mask"].shape == got["input_ids"].shape and set(got["loss_mask"].tolist()) == {0, 1}
        equal += 1
assert not want
print(json.dumps({"equal": equal}))
