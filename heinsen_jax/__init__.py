"""Log-attention (Heinsen, 2024), and the attention mechanisms that it is compared with."""

__version__ = "0.1.0"
