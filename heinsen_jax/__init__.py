"""Softmax attention with constant cost per token (Heinsen, 2024), and what it is compared with."""

__version__ = "0.1.0"
