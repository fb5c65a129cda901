"""What vLLM's workers can do beside their own methods; vLLM imports this module (``--worker-extension-cls``).

On CPUs vLLM keeps a packed copy of each weight matrix. An output layer that is tied to the embedding has a copy of its
own, and ``reload_weights`` of vLLM 0.32 packs only layers whose tensors are in the files anew: after it, such a model
embeds with the new weights and computes logits with the old ones.
"""

from __future__ import annotations

from typing import Any

_READ_FIELDS = {
    "scheduler_config": ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill"),
    "parallel_config": ("tensor_parallel_size",),
    "cache_config": ("block_size", "num_gpu_blocks"),
}
_EXTRA = "kv_connector_extra_config"


class WorkerExtension:
    """Methods that ``POST /collective_rpc`` can call in every worker; vLLM mixes them into its worker's class."""

    model_runner: Any
    vllm_config: Any

    def configuration(self) -> dict[str, Any]:
        """The part of vLLM's configuration that is read here, by vLLM's names."""
        config = self.vllm_config
        transfer = config.kv_transfer_config
        return {
            **{
                section: {name: getattr(getattr(config, section), name) for name in names}
                for section, names in _READ_FIELDS.items()
            },
            "kv_transfer_config": transfer and {_EXTRA: getattr(transfer, _EXTRA)},
        }

    def reload_every_layer(self, weights_path: str) -> int:
        """Load the weights of a model directory in place.

        Returns
        -------
        int
            Number of layers that were packed again.
        """
        self.model_runner.reload_weights(weights_path=weights_path)
        return pack_every_layer(self.model_runner.get_model())


def pack_every_layer(model: Any) -> int:
    """Pack the layers again that vLLM's own loading left as they were; returns their number."""
    packed = [module for module in model.modules() if hasattr(module, "cpu_linear") and _has_weights(module)]
    for module in packed:
        module.quant_method.process_weights_after_loading(module)
    return len(packed)


def _has_weights(module: Any) -> bool:
    """Whether the layer still has the matrix that its packed copy was made of; most layers give it up."""
    weight = getattr(module, "weight", None)
    return weight is not None and weight.numel() > 0
