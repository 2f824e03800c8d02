import re

from nebula_jax.communication import codecs
from scripts import make_tables


def test_every_codec_that_the_page_names_can_be_read():
    page = make_tables.ROOT / "nebula_jax" / "communication" / "which_codec.md"
    begun, _, _ = page.read_text().partition("The first table below")
    found = re.findall(r"`([^`]+)`", begun)
    assert len(found) > 10
    for each in found:
        if "vocab" not in each:
            name = each.replace("\\|", "|")
            whole = {"svd": "svd(1)"}
            codecs.from_string(whole.get(name, name))
