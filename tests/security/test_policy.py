import json

import pytest

from nebula_jax.security import policy


def load(tmp_path, jobs):
    path = tmp_path / policy.FILE
    path.write_text(json.dumps({"jobs": jobs}))
    return policy.load(path)


def test_without_a_file_everything_may_cross(tmp_path):
    rules = policy.load(tmp_path / policy.FILE)
    rules.check_kind("m3", "hidden")
    rules.check_bytes("m3", 10**15)
    rules.check_lab("m3", "discriminator", "lab-t")


def test_kinds_that_are_not_listed_may_not_cross(tmp_path):
    rules = load(tmp_path, {"m3": {"kinds": ["tokens"]}})
    rules.check_kind("m3", "tokens")
    rules.check_kind("m3", "StepDone")  # which steers, and carries nothing
    with pytest.raises(policy.PolicyError, match="hidden may not cross for job m3"):
        rules.check_kind("m3", "hidden")
    rules.check_kind("another", "hidden")


def test_bytes_and_labs_are_bounded_by_job(tmp_path):
    labs = {"discriminator": ["lab-t"], "generator": ["lab-s", "lab-u"]}
    rules = load(tmp_path, {"*": {"bytes": 1e6, "labs": labs}})
    rules.check_bytes("m3", 10**6)
    with pytest.raises(policy.PolicyError, match="used up its 1,000,000 bytes"):
        rules.check_bytes("m3", 10**6 + 1)
    rules.check_lab("m3", "generator:1", "lab-u")
    with pytest.raises(policy.PolicyError, match="lab-s may not be discriminator"):
        rules.check_lab("m3", "discriminator", "lab-s")


def test_a_kind_is_a_channels_name_or_its_first_word(tmp_path):
    rules = load(tmp_path, {"bert": {"kinds": ["delta", "held out"]}})
    for channel in ("delta", "delta 3 of cluster:1", "held out"):
        rules.check_kind("bert", channel)
    for channel in ("deltas", "held", "undelta 3"):
        with pytest.raises(policy.PolicyError, match="allows delta, held out"):
            rules.check_kind("bert", channel)


def test_what_leaves_must_be_encoded_first_as_the_lab_says(tmp_path):
    rules = load(tmp_path, {"bert": {"codecs": {"delta": "private(1, 0.5)"}}})
    for codec in ("private(1, 0.5)", "private(1, 0.5)|int8(64)"):
        rules.check_codec("bert", "delta 0 of cluster:1", codec)
    rules.check_codec("bert", "held out", "identity")
    rules.check_codec("m3", "delta", "identity")
    for codec in (
        "identity",
        "private(1, 0.25)|int8(64)",
        "private(1, 0.5), x",
        "int8(64)|private(1, 0.5)",
        "error_feedback(private(1, 0.5)|int8(64))",
    ):
        words = r"delta 2 of a may not leave .* begins with private\(1, 0.5\), such as"
        with pytest.raises(policy.PolicyError, match=words):
            rules.check_codec("bert", "delta 2 of a", codec)


@pytest.mark.parametrize(
    "jobs",
    [
        *({"m3": {"kind": []}}, {"m3": {"bytes": "1"}}, {"m3": {"bytes": -1}}),
        *(
            {"m3": {"kinds": "tokens"}},
            {"m3": {"labs": ["lab-s"]}},
            {"m3": {"codecs": {"delta": 1}}},
            {"m3": []},
            [],
        ),
    ],
)
def test_rules_that_cannot_be_meant_are_refused(tmp_path, jobs):
    with pytest.raises(policy.PolicyError):
        load(tmp_path, jobs)


def test_a_file_that_cannot_be_read_lets_nothing_cross(tmp_path):
    path = tmp_path / policy.FILE
    for text in (
        "{",
        '{"jobs": {"*": {"bytes": NaN}}}',
        '{"jobs": {"*": {"bytes": 1e999}}}',
        '{"jobs": {"*": {"bytes": 5, "bytes": 5e9}}}',
        '{"jobs": ' * 100_000,
    ):
        path.write_text(text)
        with pytest.raises(policy.PolicyError, match="cannot be read"):
            policy.load(path)
