"""The versions of transformers that are known, and the names of it that graphrt uses."""

from __future__ import annotations

import importlib

from graphrt.errors import UnsupportedHostError
from graphrt.hosts.names import is_known, missing_arguments, missing_names, missing_uses

KNOWN = tuple(f"5.{minor}" for minor in range(17, 25))
"""With which the tests of this host were run."""

_NAMES = {
    "transformers": (
        "AttentionInterface",
        "AttentionMaskInterface",
        "GenerationMixin",
        "PreTrainedModel",
    ),
    "transformers.cache_utils": (
        "Cache.is_compileable",
        "Cache.get_query_offset",
        "CacheLayerMixin.lazy_initialization",
        "DynamicCache",
        "DynamicLayer",
        "DynamicSlidingWindowLayer.activate_past_recording",
        "DynamicSlidingWindowLayer.crop",
        "EncoderDecoderCache.is_compileable",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionLayer.activate_past_recording",
    ),
    "transformers.generation.configuration_utils": ("ALL_STATIC_CACHE_IMPLEMENTATIONS",),
    "transformers.integrations.sdpa_attention": ("sdpa_attention_forward",),
    "transformers.masking_utils": (
        "ALL_MASK_ATTENTION_FUNCTIONS",
        "create_bidirectional_mask",
        "sdpa_mask",
    ),
    "transformers.modeling_utils": ("ALL_ATTENTION_FUNCTIONS",),
}
_ARGUMENTS = {
    ("transformers", "GenerationMixin._prepare_cache_for_generation"): (
        "generation_config",
        "model_kwargs",
        "generation_mode",
        "batch_size",
        "max_cache_length",
    ),
    ("transformers", "GenerationMixin._optimize_model_for_decode"): (),
    ("transformers.cache_utils", "DynamicLayer.update"): ("key_states", "value_states"),
    ("transformers.cache_utils", "LinearAttentionLayer.lazy_initialization"): (
        "conv_states",
        "recurrent_states",
        "state_idx",
        "conv_kernel_size",
    ),
    ("transformers.cache_utils", "LinearAttentionLayer.update_conv_state"): (
        "conv_states",
        "state_idx",
    ),
    ("transformers.cache_utils", "LinearAttentionLayer.update_recurrent_state"): (
        "recurrent_states",
        "state_idx",
    ),
}
"""Functions that graphrt overrides or calls, with the arguments that it needs."""

_BATCHING = "transformers.generation.continuous_batching"
_BATCH_NAMES = {
    f"{_BATCHING}.input_outputs": (
        "ContinuousBatchingAsyncIOs.get_graph",
        "ContinuousBatchingIOs.get_graph",
        "ContinuousBatchingIOs._get_graph_key",
    ),
    f"{_BATCHING}.continuous_api": ("ContinuousBatchingManager._create_batch_processor",),
}
_BATCH_ARGUMENTS = {
    (f"{_BATCHING}.model_runner", "ModelRunner._capture_graph"): (
        "forward_fn",
        "compute_stream",
        "args",
    ),
}
_BATCH_USES = {
    (f"{_BATCHING}.model_runner", "ModelRunner.compute_batch"): ("get_graph", "_capture_graph"),
    (f"{_BATCHING}.model_runner", "ModelRunner.__init__"): (
        "cache",
        "graph_pool_id",
        "mem_pool",
        "use_cuda_graph_decode",
        "use_cuda_graph_varlen",
    ),
    (f"{_BATCHING}.input_outputs", "ContinuousBatchingAsyncIOs.__init__"): (
        "compute_stream",
        "current_pair",
        "io_pairs",
    ),
}
"""Those that continuous batching needs; of the last, names that the code of functions uses."""

_ADVICE = (
    "install one of these, or leave with_graphs() out: the model then runs as transformers runs it"
)


def check_transformers(*, batches: bool = False) -> None:
    """Raise `UnsupportedHostError` where transformers is missing, of a version that was not tested,
    or without a name that graphrt relies on, for `batches` too: the error has all of those."""
    try:
        version = importlib.import_module("transformers").__version__
    except ModuleNotFoundError as error:
        raise _error("transformers is not installed", "no module transformers") from error
    if not is_known(version, KNOWN):
        raise _error("graphrt does not know this version of transformers", version)
    missing = [*missing_names(_NAMES), *missing_arguments(_ARGUMENTS)]
    if batches:
        missing += [*missing_names(_BATCH_NAMES), *missing_arguments(_BATCH_ARGUMENTS)]
        missing += missing_uses(_BATCH_USES)
    if missing:
        got = "no " + ", no ".join(missing)
        raise _error(f"transformers {version} is not as graphrt knows it", got)


def _error(what: str, got: str) -> UnsupportedHostError:
    expected = "transformers " + ", ".join(f"{known}.*" for known in KNOWN)
    return UnsupportedHostError(what, got=got, expected=expected, advice=_ADVICE)
