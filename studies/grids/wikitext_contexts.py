"""Language models of Wikipedia's articles: is their order the same as on Python code?

cat wiki.valid.tokens wiki.test.tokens > wikitext2.txt
mkdir -p runs/corpora/wikitext2
csplit -zsf runs/corpora/wikitext2/ -b %03d.txt wikitext2.txt '/^ = [^=]*= $/' '{*}'
rm runs/corpora/wikitext2/000.txt  # an empty line
python -m heinsen_jax.data.train_tokenizer runs/corpora/wikitext2 --vocab-size 2048 \\
    --output runs/corpora/wikitext2_bpe
python -m studies wikitext_contexts --jobs 2

Needs about two hours on two CPU cores.
"""

from dataclasses import replace

from studies import Study, load_study, sweeps
from studies.grids.code_contexts import BEST

ABOUT = """
Models of the study code_contexts, trained on the 122 articles of WikiText-2's validation and test
texts: 600 updates of 8 x 512 tokens, which are more than four epochs. Other articles, a tenth of
them, choose the learning rates; losses are of another tenth, in nats per token of a byte-level BPE
of 2048 tokens of all articles, on the same tokens in sequences of 32 to 2048.
"""


def get_study() -> Study:
    same = load_study("code_contexts").restricted("model", BEST)
    data = replace(
        same.base.data,
        corpus="runs/corpora/wikitext2",
        tokenizer="runs/corpora/wikitext2_bpe",
        validation_fraction=0.1,
        test_fraction=0.1,
    )
    return replace(
        same,
        title="Articles of Wikipedia: loss and context",
        about=ABOUT,
        base=replace(same.base, data=data),
        axes={**same.axes, "seed": sweeps.seeds(1, 2)},
        select=lambda _: True,
    )
