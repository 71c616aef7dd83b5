"""Make `tests/golden/harness`: answers of the lm-evaluation-harness's own model to odd requests.

    python -m venv make && make/bin/pip install torch transformers accelerate lm-eval==0.4.13
    make/bin/python tests/golden/make_harness.py

`lm_eval.models.huggingface.HFLM` answers requests of all three kinds with the checkpoints `qwen2`
and `gpt2` of `tests/golden/transformers`. `gpt2`, which has 40 learned positions, gets the small
tokenizer in `harness/gpt2`, without start tokens. `answers.json` lists, for each case, the
checkpoint, arguments of the model, and requests with their answers; an answer is null where the
harness ends with an error. `chats.json` has conversations as it renders them.
"""

import copy
import itertools
import json
import shutil
import tempfile
from pathlib import Path

import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

GOLDEN = Path(__file__).resolve().parent
FOLDER = GOLDEN / "harness"
ALPHABET = "abcdefghijklmnopqrstuvwxyzĠĊ0123456789.,?!:'"
CASES = [
    ("qwen2", {}),
    ("qwen2", {"add_bos_token": False}),
    ("qwen2", {"max_length": 12}),
    ("gpt2", {}),
    ("gpt2", {"max_length": 9}),
]
CONTEXTS = [
    "",
    " ",
    "\n\n",
    "i",
    "attention is",
    "attention is ",
    "what is 2 and 2?\n\n",
    "the cost is exact and the value is constant and so on, is it not? yes.",
    "naïve 日本 🙂",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|begin|>exact",
]
CONTINUATIONS = [" a", "s", " is exact", "\n", "é日", " attention is 4 and is 2 ", "<|im_end|>"]
DOCUMENTS = [
    "",
    "a",
    " is ",
    "attention is exact and is 4",
    "attention is exact and is 4 and is 2 attention is exact and is 4 and is 2, is it not? no.",
    "日本 🙂 naïve\n",
    "<|begin|>attention",
]
KWARGS = [
    {"until": ["\n"], "max_gen_toks": 6},
    {"until": [" ", "e"], "max_new_tokens": 5, "do_sample": False, "temperature": 1.0},
    {"until": "a", "max_tokens": 5, "num_beams": 1},
    {"max_gen_toks": 4, "temperature": 0.0},
]


def make_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=67,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=[*ALPHABET],
        limit_alphabet=len(ALPHABET),
    )
    tokenizer.train_from_iterator(["attention is exact and is 4 and is 2 the the"] * 3, trainer)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    ).save_pretrained(folder)


def ask(model: HFLM, kind: str, arguments: tuple):
    request = Instance(request_type=kind, doc={}, arguments=arguments, idx=0)
    try:
        (answer,) = getattr(model, kind)([request], disable_tqdm=True)
    except (AssertionError, IndexError, RuntimeError, ValueError) as error:
        print(kind, arguments, type(error).__name__, error)
        return None
    return answer


def requests():
    for context, continuation in itertools.product(CONTEXTS, CONTINUATIONS):
        yield "loglikelihood", (context, continuation)
    for context in ("", " ", "is"):
        yield "loglikelihood", (context, "")
    for document in DOCUMENTS:
        yield "loglikelihood_rolling", (document,)
    for context, options in itertools.product(CONTEXTS, KWARGS):
        yield "generate_until", (context, options)


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    make_tokenizer(FOLDER / "gpt2")
    cases, chats = [], []
    for number, (name, options) in enumerate(CASES):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(GOLDEN / "transformers" / name, folder, dirs_exist_ok=True)
            if (FOLDER / name).exists():
                shutil.copytree(FOLDER / name, folder, dirs_exist_ok=True)
            model = HFLM(folder, device="cpu", dtype="float32", batch_size=1, **options)
            model.model.generation_config.eos_token_id = model.eot_token_id
            answers = []
            for place, (kind, arguments) in enumerate(requests()):
                if place % len(CASES) != number and place % 3:
                    continue  # a part of the requests for each case
                answer = ask(model, kind, copy.deepcopy(arguments))
                answers.append([kind, arguments, answer])
            cases.append({"checkpoint": name, "options": options, "answers": answers})
            if model.tokenizer.chat_template and not options:
                chats = render(model)
    lines = (json.dumps(case, ensure_ascii=False) for case in cases)
    (FOLDER / "answers.json").write_text("[" + ",\n".join(lines) + "]\n")
    (FOLDER / "chats.json").write_text(json.dumps(chats, ensure_ascii=False, indent=1) + "\n")
    print(sum(len(case["answers"]) for case in cases), "answers")


def render(model: HFLM) -> list[dict]:
    user, system = {"role": "user", "content": " How much? "}, {"role": "system", "content": "Be."}
    begins = ["The answer is", " The answer is ", "a\n", "user", "<|im_end|>", "é 日 "]
    chats = [[system, user, {"role": "assistant", "content": begin}] for begin in begins]
    texts = [(chat, False) for chat in chats] + [([system, user], True), ([user], True)]
    return [
        {
            "messages": chat,
            "add_generation_prompt": prompt,
            "text": model.apply_chat_template(chat, add_generation_prompt=prompt),
        }
        for chat, prompt in texts
    ]


if __name__ == "__main__":
    main()
