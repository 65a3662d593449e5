"""Why common operators without a tile op stay out, in words that tell the user what to do or expect."""

from __future__ import annotations

from torch import fx

from tilestream.graph.convolutions import why_not
from tilestream.graph.masked.sites import is_masked, site_of
from tilestream.graph.nodes import Unsupported, aten, packet

UNKNOWN = "no tile op does this"
MASKED = "attention over a mask: a kernel of ours is timed beside it, with the graph as a whole"

_GROUPS: dict[str, tuple[str, ...]] = {
    "dropout in training mode: call model.eval()": ("native_dropout", "bernoulli", "_fused_dropout"),
    "batch statistics in training mode: call model.eval()": (
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_functional",
        "_batch_norm_with_update",
        "batch_norm_with_update",
    ),
    "gathers rows: rows stream in order": ("gather", "_embedding_bag", "take"),
    "scatters rows: rows stream in order": (
        "index_add",
        "index_put",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "index_copy",
        "segment_reduce",
    ),
    "attention mixes rows": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_transformer_encoder_layer_fwd",
        "_native_multi_head_attention",
    ),
    "a convolution mixes rows": ("_conv_depthwise2d",),
    "orders or scans elements": ("sort", "topk", "argsort", "cumsum", "cumprod", "argmax", "argmin", "median"),
    "makes or uses booleans, which are no tile dtype": (
        *("eq", "ne", "lt", "le", "gt", "ge", "where", "logical_and", "logical_or", "logical_not"),
        *("isnan", "isinf", "any", "all", "bitwise_and", "bitwise_or", "bitwise_not", "masked_fill"),
    ),
    "makes a tensor of its own: nothing streams in": (
        *("full", "zeros", "ones", "empty", "arange", "scalar_tensor", "full_like", "zeros_like", "ones_like"),
        *("new_zeros", "new_ones", "new_full", "eye", "linspace"),
    ),
    "random numbers": ("rand", "randn", "rand_like", "randn_like", "uniform", "normal", "randint", "exponential"),
    "interpolates or pools over positions": (
        *("upsample_bilinear2d", "upsample_nearest2d", "grid_sampler_2d", "max_pool2d_with_indices", "avg_pool2d"),
        *("_adaptive_avg_pool2d", "adaptive_max_pool2d"),
    ),
}

_REASONS = {getattr(aten, name): reason for reason, names in _GROUPS.items() for name in names if hasattr(aten, name)}


def reason(node: fx.Node) -> str:
    """Why an operator that has no rule stays out."""
    if packet(node) is aten.convolution:
        return why_not(node) or "a convolution mixes rows: option convolutions='bulk' takes this one"
    if is_masked(node):
        try:
            site_of(node)
        except Unsupported as why:
            return f"attention over a mask stays Inductor's: {why.reason}"
        return MASKED
    return _REASONS.get(packet(node), UNKNOWN)
