"""Models of Hugging Face's hub, pinned by a commit: hf:ORG/NAME@COMMIT.

A branch or a tag may move, and clusters would begin with different models; a commit is
what it is. Only safetensors, and the text files beside them, are downloaded.
"""

import functools
import pathlib
import re

from nebula_jax import installed
from nebula_jax.data.tokenizers import readers
from nebula_jax.models.pretrained import folder as checkpoint_folder

PREFIX = "hf:"
_NAME = re.compile(rf"{PREFIX}([\w.-]+/[\w.-]+)@([0-9a-f]{{40}})", re.ASCII)
FILES = (
    checkpoint_folder.CONFIG,
    checkpoint_folder.INDEX,
    "model*.safetensors",
    *(readers.JSON, readers.SENTENCEPIECE, readers.VOCABULARY),
    *(readers.SPIECE, readers.CONFIG),
)


@functools.cache  # without a network the library asks for half a minute each time
def fetch(name: str) -> pathlib.Path:
    """Downloads a model into huggingface_hub's cache, unless it is there.

    The library's own variables hold: HF_HOME for the cache's place, HF_TOKEN for closed
    models, HF_HUB_OFFLINE=1 to use no network.

    Args:
      name: hf:ORG/NAME@COMMIT, the commit with all of its 40 digits.

    Returns:
      The checkpoint folder, in the cache.

    Raises:
      PretrainedError: for another form of name, if the model cannot be had, or has no
        safetensors.
      MissingExtra: without huggingface_hub.
    """
    match = _NAME.fullmatch(name)
    if not match:
        raise checkpoint_folder.PretrainedError(
            f"{name}: expected {PREFIX}ORG/NAME@COMMIT, with the 40 hexadecimal digits"
            " of a commit, which the hub shows under Files and versions (a branch or a"
            " tag may move)"
        )
    repository, commit = match.groups()
    with installed.extra("experiments"):
        import huggingface_hub
        from huggingface_hub import constants
        from huggingface_hub.utils import logging
    logging.set_verbosity_error()  # each attempt, twice: the error tells the last
    try:
        found = huggingface_hub.snapshot_download(
            repository, revision=commit, allow_patterns=list(FILES)
        )
    except Exception as error:  # of the library, of its HTTP client, of the disk
        reason = " ".join(str(error).split()) or type(error).__name__
        raise checkpoint_folder.PretrainedError(
            f"{name} is not in the cache ({constants.HF_HUB_CACHE}) and"
            f" could not be downloaded: {reason}"
        ) from None
    folder = pathlib.Path(found)
    if not any(folder.glob("model*.safetensors")):
        raise checkpoint_folder.PretrainedError(
            f"{name} has no {checkpoint_folder.TENSORS} at that commit, and pickles are"
            " not read; name one that has it"
        )
    return folder
