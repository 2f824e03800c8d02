"""The model card of a checkpoint folder: README.md, as Hugging Face's hub shows it."""

import pathlib

import nebula_jax
from nebula_jax.models import pretrained

CARD = """\
---
library_name: transformers
pipeline_tag: {task}
tags: [nebula-jax]
---
# {title}

{about}

The model is {shape}.

    from transformers import pipeline
    print(pipeline("{task}", "{name}")({text}))

Nebula-JAX {version} wrote this page. It knows no licence: add here under which one the
text that this model was trained on, and the model that it began with, allow its use.
"""
SENTENCE = '"A man sleeps."'
PAIR = f'{{"text": {SENTENCE}, "text_pair": "Somebody is awake."}}'


def write(folder: pathlib.Path, model: pretrained.Pretrained, about: str) -> None:
    """Writes the card of a model, with a command that uses it.

    `about` is a paragraph: where the model is from.
    """
    is_classifier = "classifier_head" in model.params
    card = CARD.format(
        task="text-classification" if is_classifier else "feature-extraction",
        title="A classifier of pairs of sentences" if is_classifier else "An encoder",
        text=PAIR if is_classifier else SENTENCE,
        about=about,
        shape=pretrained.describe(model),
        name=folder.name,
        version=nebula_jax.__version__,
    )
    (folder / "README.md").write_text(card, "utf-8")
