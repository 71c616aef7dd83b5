"""Pretrained models of the library transformers: Llama, Qwen, Mistral, Gemma 3, SmolLM3, Granite,
Phi, OLMo, Olmo Hybrid, Falcon-H1, LFM2, Nemotron-H, GPT-2 and GPT-NeoX.

    python -m heinsen_jax.interop.transformers import Qwen/Qwen3-0.6B --workdir runs/qwen3
    python -m heinsen_jax.interop.transformers export --workdir runs/qwen3 --output models/qwen3

`from_pretrained` reads `config.json`, `.safetensors` and `tokenizer.json`; `to_pretrained` writes
them; `import_model` writes a folder for the commands of this package. None needs PyTorch or
transformers. Downloads and chat templates need `pip install 'heinsen_jax[transformers]'`.

Names are imported at first use: other modules do not need the libraries of tokenizers.
"""

from typing import TYPE_CHECKING

from heinsen_jax.runtime.lazy import attributes

if TYPE_CHECKING:
    from heinsen_jax.interop.transformers.pretrained import (
        from_pretrained,
        import_model,
        to_pretrained,
    )

__all__ = ["from_pretrained", "import_model", "to_pretrained"]

__getattr__ = attributes(__name__, __all__, ("pretrained",))
