"""Vectorised training model of the GLM-5.3-Flash text architecture with its MTP layer."""

from .kernels import Kernels
from .model import DemoModel
from .published import from_published, is_drafter, to_published

__all__ = ["DemoModel", "Kernels", "from_published", "is_drafter", "to_published"]
