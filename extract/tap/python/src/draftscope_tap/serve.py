"""`transformers serve` with every generating model tapped.

    python -m draftscope_tap.serve --tap-socket /tmp/tap.sock MODEL [arguments of transformers serve]

Requests are captured through generate; with --continuous-batching, whose
forward passes pack many requests into one row, they are not.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

from . import transformers as tapped

log = logging.getLogger("draftscope_tap")


def patch(socket: str) -> None:
    """Taps what transformers' server loads from now on."""
    from transformers.cli.serving.model_manager import ModelManager

    manager: Any = ModelManager
    load = manager._load_model

    @functools.wraps(load)
    def loaded(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = load(self, *args, **kwargs)
        try:
            tapped.attach(model, socket)
        except Exception:
            log.exception("%s is served without a tap", type(model).__name__)
        return model

    manager._load_model = loaded


def main() -> None:
    args = sys.argv[1:]
    if len(args) < 2 or args[0] != "--tap-socket":
        sys.exit(__doc__)
    patch(args[1])
    from transformers.cli import transformers as cli

    sys.argv = ["transformers", "serve", *args[2:]]
    run: Any = cli.main
    run()


if __name__ == "__main__":
    main()
