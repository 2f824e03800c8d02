import re

from nebula_jax.communication import codecs
from scripts import make_tables
from scripts.tables import codec_choice


def test_the_table_has_the_figures_of_both_records():
    table = codec_choice.markdown(make_tables.RESULTS)
    assert (
        "| `pack_tokens\\|int8(64)` | 0.985 | -0.008 ± 0.001 | +0.20 | 0.93 |" in table
    )
    assert "| streaming, e3m0 | 2 | 2.74 | 452 | +2.4% ± 0.4% |" in table


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
