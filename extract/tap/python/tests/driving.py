"""What the scripts that drive engines for draftscope's own tests share."""

from __future__ import annotations

import argparse
import json
from typing import Any


def arguments() -> argparse.ArgumentParser:
    """The arguments that every engine's script has."""
    p = argparse.ArgumentParser()
    p.add_argument("--model", required=True)
    p.add_argument("--socket", required=True)
    p.add_argument("--sequences", required=True)
    p.add_argument("--count", type=int, default=24)
    p.add_argument("--rounds", type=int, default=1)
    p.add_argument("--new", type=int, default=144)
    p.add_argument("--engine", default="{}", help="JSON of more engine arguments")
    return p


def sequences(path: str, count: int) -> list[dict[str, Any]]:
    """The first sequences of a file of one JSON object a line."""
    with open(path) as f:
        return [json.loads(line) for line in f][:count]


def round_of(seqs: list[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    """The sequences under the ids of round n."""
    return [{**s, "id": f"{s['id']}-{n}" if n else s["id"]} for s in seqs]
