"""Where a layer is being exported to."""

from __future__ import annotations

import torch

from khot._core.torch_internals import is_exporting

__all__ = ["to_onnx"]


def to_onnx() -> bool:
    """Whether torch.onnx is exporting, which translates fewer operations than torch.export keeps."""
    return is_exporting() and torch.onnx.is_in_onnx_export()
