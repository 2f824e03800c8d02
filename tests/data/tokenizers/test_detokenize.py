import re

import pytest

from nebula_jax.data.tokenizers import detokenize

SENTENCES = [
    "I don't know; it's Tom's.",
    "They've 3,000 books (in 1999), haven't they?",
    '"Yes," he said, "we\'ll go!"',
    "A well-known e-mail: name@example.com.",
    "The students' books cost $3.50 at 10:30 p.m. in the U.S.",
    "It's 5 o'clock, and/or 50% of 1914–1918...",
    "In 2000, 300 people came; 1, 2, 3, go!",
    "He lives in Mr. O'Brien's house at http://www.example.org/home_page.",
    "'What?' she asked.",
    "(-5 degrees) [see below].",
    'I saw it in the ground," said Tom.',
    "The £1,500th of ¥2,500 is 0.6.",
    "¿Qué? ¡No!",
    "我们走了。他们也走了。",
    "",
]


def cut(text):
    """As BERT's tokenizer: spaces around every punctuation mark and character."""
    return " ".join(re.findall(r"[^\W_\u4e00-\u9fff]+|[\u4e00-\u9fff]|\S", text))


@pytest.mark.parametrize("sentence", SENTENCES)
def test_english_gets_its_spaces_back(sentence):
    assert detokenize.english(cut(sentence)) == sentence
