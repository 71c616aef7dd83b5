"""Make `tests/golden/harness`: answers of the lm-evaluation-harness's own Hugging Face model.

    python -m venv make && make/bin/pip install torch transformers 'lm-eval[hf]==0.4.13'
    make/bin/python tests/golden/make_harness.py

`gpt2` is a tiny random checkpoint with learned positions, which uses the vocabulary of
`transformers/qwen2` without a token before texts. `answers.json` has the results of `HFLM` for both
checkpoints and several of its settings, computed one request at a time in float32. Requests
that it does not accept have the name of its exception.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from lm_eval.models.huggingface import HFLM
from make_transformers import randomize

GOLDEN = Path(__file__).resolve().parent
FOLDER, QWEN = GOLDEN / "harness", GOLDEN / "transformers" / "qwen2"
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {}),
    ("qwen2", {"add_bos_token": False}),
    ("qwen2", {"max_length": 24}),
    ("gpt2", {}),
    ("gpt2", {"add_bos_token": True}),
]
LONG = "attention is exact and is 4 and is 2 " * 4
PAIRS = [
    ("attention", " is exact"),
    ("attention", " is"),
    ("attention is", " 4"),
    ("attention is ", "4"),
    ("attention is \n ", " and is"),
    ("i", "s"),
    ("a", "nd"),
    ("a", "nd is"),
    (" ", "a"),
    ("\n\n", "yes"),
    ("", "and"),
    ("", " and is"),
    ("", "<|begin|>is"),
    ("", "<|endoftext|>is"),
    ("", "<|begin|>"),
    ("", ""),
    ("is", ""),
    ("is ", ""),
    ("is", "   "),
    ("<|begin|>is", " and"),
    ("<|im_start|>user\nis<|im_end|>", "\n<|im_end|>"),
    ("naïve 日本", "é 日"),
    ("e\u0301", "\u0301"),
    (LONG, " and"),
    (LONG, " is exact and"),
    ("is", LONG[:30]),
]
DOCUMENTS = ["", " ", "is", "attention is exact", "naïve\n日本", "<|begin|>is 4", LONG, LONG[:60]]
GREEDY: dict[str, Any] = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
GENERATIONS = [
    ("attention is", GREEDY),
    ("attention is ", GREEDY),
    ("naïve 日本", GREEDY | {"temperature": 0.0}),
    ("<|begin|>is", {"until": "a", "max_new_tokens": 12}),
    ("is and", {"until": ["e", "i", "a", "o"], "max_tokens": 12, "num_beams": 1}),
    (LONG, {"until": [], "max_gen_toks": 6, "temperature": 0}),
    ("4", {"max_gen_toks": 3, "max_new_tokens": 9}),
]
USER = {"role": "user", "content": " How much is 2 + 2?"}
SYSTEM = {"role": "system", "content": "Be exact."}
CHATS = [
    ([USER], True),
    ([SYSTEM, USER], True),
    ([USER, {"role": "assistant", "content": "The answer is"}], False),
    ([USER, {"role": "assistant", "content": "The answer is "}], False),
    ([USER, {"role": "assistant", "content": ""}], False),
    ([USER, {"role": "assistant", "content": "user"}], False),
]


def make_gpt2(folder: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=268, n_positions=40, n_embd=16, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomize(model, 3, torch.bfloat16)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    tokenizer = json.loads((QWEN / "tokenizer.json").read_text())
    content = json.dumps(tokenizer | {"post_processor": None})
    (folder / "tokenizer.json").write_text(content + "\n")
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")


def answers(method: Any, requests: list[tuple]) -> list[dict[str, Any]]:
    found = []
    for request in requests:
        try:
            (answer,) = method([SimpleNamespace(args=request)], disable_tqdm=True)
            found.append({"request": request, "answer": answer})
        except (AssertionError, IndexError, RuntimeError, ValueError) as error:
            print(request, repr(error)[:100], file=sys.stderr)
            found.append({"request": request, "error": type(error).__name__})
    return found


def main() -> None:
    make_gpt2(FOLDER / "gpt2")
    records = []
    for name, arguments in SETTINGS:
        folder = QWEN if name == "qwen2" else FOLDER / name
        options = {"device": "cpu", "dtype": "float32", "batch_size": 1}
        model = HFLM(pretrained=str(folder), **options, **arguments)
        chats, pairs, generations = [], [*PAIRS], [*GENERATIONS]
        for chat, prompt in CHATS if name == "qwen2" else []:
            text = model.apply_chat_template(chat, add_generation_prompt=prompt)
            chats.append({"chat": chat, "add_generation_prompt": prompt, "text": text})
            pairs.append((text, " 4"))
            generations.append((text, GREEDY))
        record = {"model": name, "arguments": arguments, "chats": chats}
        record["loglikelihood"] = answers(model.loglikelihood, pairs)
        record["loglikelihood_rolling"] = answers(
            model.loglikelihood_rolling, [(text,) for text in DOCUMENTS]
        )
        record["generate_until"] = answers(model.generate_until, generations)
        records.append(record)
    content = json.dumps(records, ensure_ascii=False, indent=0).replace("\n", "")
    (FOLDER / "answers.json").write_text(content.replace('{"model"', '\n{"model"') + "\n")


if __name__ == "__main__":
    main()
