"""BLEU of translations, by sacrebleu.

Two figures that must not be compared with each other:

    tokenize="13a"    for plain text; sacrebleu's standard, with exponential smoothing
    tokenize="none"   for tokenized text, without smoothing. With lowercase=True it is
                      `multi-bleu.perl -lc`, the figure of ABNet and probably of Tables
                      2 and 5; ABNet computes it on joined word pieces, where `don't`
                      is three words (`don ' t`) on both sides
"""

from collections.abc import Sequence
from typing import NamedTuple

import sacrebleu

from nebula_jax import errors


class BleuError(errors.NebulaError):
    """A request to score translations that cannot be scored."""


class Bleu(NamedTuple):
    """A score and its components."""

    score: float
    """0 to 100."""
    signature: str
    """sacrebleu's description of the settings; scores compare only if it is equal."""
    precisions: tuple[float, ...]
    """Precisions of 1- to 4-grams, in percent, after smoothing."""
    brevity_penalty: float
    """At most 1."""
    hypothesis_length: int
    """Words of all hypotheses."""
    reference_length: int
    """Words of all references."""

    def __str__(self) -> str:
        return f"BLEU {self.score:.2f} ({self.signature})"


def corpus_bleu(
    hypotheses: Sequence[str],
    references: Sequence[str],
    lowercase: bool = True,
    tokenize: str = "13a",
) -> Bleu:
    """Scores translations against one reference each.

    >>> print(corpus_bleu(["The cat sat there."], ["the cat sat there ."]))
    BLEU 100.00 (nrefs:1|case:lc|eff:no|tok:13a|smooth:exp|version:...)

    Args:
      hypotheses: a translation of each sentence; it may be empty.
      references: in the same order, none empty.
      lowercase: True to ignore case.
      tokenize: `13a`, `none` (see above), or another of sacrebleu's, such as `zh`.

    Raises:
      BleuError: if there is no sentence, numbers differ, a reference is empty, or
        sacrebleu does not have the tokenizer.
    """
    if tokenize not in sacrebleu.BLEU.TOKENIZERS:
        known = ", ".join(sorted(sacrebleu.BLEU.TOKENIZERS))
        raise BleuError(f"sacrebleu has no tokenizer {tokenize!r}; it has {known}")
    if len(hypotheses) != len(references):
        raise BleuError(
            f"{len(hypotheses)} translations and {len(references)} references"
        )
    if not references:
        raise BleuError("there is no translation to score")
    for number, reference in enumerate(references, start=1):
        if not reference.strip():
            raise BleuError(f"reference {number} of {len(references)} is empty")
    plain = tokenize == "none"
    metric = sacrebleu.BLEU(
        lowercase=lowercase,
        tokenize=tokenize,
        smooth_method="none" if plain else "exp",
        force=plain,  # or it warns that the text looks tokenized
    )
    result = metric.corpus_score(list(hypotheses), [list(references)])
    return Bleu(
        result.score,
        str(metric.get_signature()),
        tuple(result.precisions),
        result.bp,
        result.sys_len,
        result.ref_len,
    )
