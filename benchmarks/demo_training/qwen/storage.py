"""How the demo's matrices are stored, in formats that the recipe's manifest allows."""

from __future__ import annotations

import re

from torch import Tensor

from flare_ray.device.weights.formats import WeightFormat

FP8 = re.compile(
    r"(linear_attn\.(in_proj_qkv|in_proj_z|out_proj)|self_attn\.[qkvo]_proj"
    r"|shared_expert\.(gate|up|down)_proj)\.weight$"
)
"""Every matrix that the recipe reads packed, but the routed experts."""


def stored_format(name: str, tensor: Tensor) -> WeightFormat:
    """Format of a published tensor or a parameter: NVFP4 for routed experts, FP8 blocks for the
    matrices of recurrent blocks, attention and shared experts; stream mixing, index, n-grams,
    fusion, embedding and head stay plain.
    """
    if ".experts." in name:
        return WeightFormat.NVFP4_MODELOPT
    return WeightFormat.FP8_BLOCK if FP8.search(name) else WeightFormat.PLAIN
