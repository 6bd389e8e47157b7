"""The built-in demo model: a dense chat model, upcycled without training to a mixture of experts."""

from engine.demo.build import build_demo

__all__ = ["build_demo"]
