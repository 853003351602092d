"""Packed weight formats: the parts of one matrix, exact dequantisation, and the reverse for tests
and tools.

Each format is one record of parts with a `dequantise` method. A record belongs to one matrix and
carries that matrix's own global scale, so that two matrices fused later (gate and up) cannot come
to share one.
"""

from __future__ import annotations

import enum


class WeightFormat(enum.StrEnum):
    """How one matrix is stored. The two NVFP4 forms differ in names and in the sense of their
    global scale."""

    PLAIN = "plain"
    FP8_BLOCK = "fp8_block"
    NVFP4_MODELOPT = "nvfp4_modelopt"
    NVFP4_COMPRESSED = "nvfp4_compressed_tensors"
    MXFP4 = "mxfp4"
    FP8_TENSOR = "fp8_tensor"
    """Rows of a table in E4M3, one scale for all of it: `TensorSpec.shared_scale`."""

    @property
    def kind(self) -> str:
        """What a configuration declares: "plain", "fp8_block", "fp8_tensor", "mxfp4" or "nvfp4"."""
        return "nvfp4" if self.value.startswith("nvfp4") else self.value
