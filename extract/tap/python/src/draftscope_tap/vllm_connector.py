"""The KV connector. It moves no KV: it is vLLM's own channel for what the
scheduler knows of a request to reach the worker that has its states."""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole, SupportsHMA

from . import vllm as tap
from .steps import End


@dataclasses.dataclass
class Ends(KVConnectorMetadata):
    """Requests that have ended since the last step."""

    ends: list[End]


class TapConnector(KVConnectorBase_V1, SupportsHMA):
    """Loaded by kv_connector_module_path draftscope_tap.vllm."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = tap.options_of(vllm_config)
        if options is None:
            raise ValueError("kv_connector_extra_config has no socket")
        self._recompute = options.prefix_cache == "recompute"
        self._ends: list[End] = []
        if role == KVConnectorRole.WORKER and tap.worker is None:
            raise RuntimeError(
                "the model is loaded already, and its states cannot be had any more: install draftscope-tap in this "
                "environment, so that vLLM finds its plugin draftscope_tap, and let VLLM_PLUGINS name it if it names any"
            )

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # -- the scheduler's half --------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        if self._recompute:
            request.skip_reading_prefix_cache = True

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        meta, self._ends = Ends(self._ends), []
        return meta

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._ends.append(tap.end_of(request))
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    # -- the worker's half -----------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if tap.worker is not None and isinstance(connector_metadata, Ends):
            tap.worker.end(connector_metadata.ends)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return
