"""The engine's half of draftscope's tap; the protocol is in docs/tap.md."""

from .client import Client, Counts, Refused, Request

__all__ = ["Client", "Counts", "Refused", "Request", "__version__"]
__version__ = "0.1.0"
