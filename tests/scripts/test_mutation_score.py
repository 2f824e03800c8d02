"""Tests of scripts/mutation_score: hand-made mutants are judged rightly."""

import pytest

from nebula_jax import errors
from scripts import mutation_score
from scripts.mutation import mutants, trial

MODULE = "nebula_jax.communication.wire.liveness"
TESTS = ["tests/communication/wire/test_liveness.py"]


def changed(old, new):
    source = mutants.source_of(MODULE).read_text("utf-8")
    assert old in source
    return source.replace(old, new)


def test_a_mutant_is_killed_by_the_test_that_notices_it(tmp_path):
    trials = [
        trial.Trial("", "", TESTS, 60.0),
        trial.Trial(MODULE, changed("# so that", "# so"), TESTS, 60.0),
        trial.Trial(
            MODULE, changed(">= self._timeout", "< self._timeout"), TESTS, 60.0
        ),
        trial.Trial(MODULE, changed("def silence", "def silence ="), TESTS, 60.0),
        trial.Trial(MODULE, changed('"""Silence', 'while True: pass\n"""'), TESTS, 1.0),
    ]
    found = mutation_score.run(trials, tmp_path, workers=2)
    assert {each.number: each.outcome.name for each in found} == {
        0: "SURVIVED",
        1: "SURVIVED",
        2: "KILLED",
        3: "BROKEN",
        4: "HUNG",
    }


def test_code_whose_tests_fail_anyway_is_an_error(tmp_path):
    with pytest.raises(errors.NebulaError, match=r"no_such.py: fail on the unchanged"):
        mutation_score.baseline(["tests/no_such.py"], tmp_path)


def test_a_modules_own_test_runs_first():
    assert mutation_score.tests_of(MODULE, ["tests/communication"]) == [
        *TESTS,
        "tests/communication",
    ]


def test_every_target_has_modules_and_tests():
    for patterns, tests in mutation_score.TARGETS.values():
        for pattern in patterns:
            assert mutants.modules([pattern]), pattern
        for test in tests:
            assert (trial.ROOT / test).exists(), test


def test_mutants_are_drawn_alike_and_leave_annotations_alone():
    pytest.importorskip("cosmic_ray", reason="pip install -r requirements-mutation.txt")
    drawn = list(mutants.draw(MODULE, seed=1))
    assert drawn == list(mutants.draw(MODULE, seed=1))
    assert len(drawn) > 10
    source = mutants.source_of(MODULE).read_text("utf-8")
    for mutant in drawn:
        changed_source = mutants.mutated(mutant)
        lines = zip(source.splitlines(), changed_source.splitlines(), strict=True)
        different = [n for n, (old, new) in enumerate(lines, 1) if old != new]
        assert different == [mutant.line]


def test_what_cosmic_ray_fails_to_make_is_not_drawn():
    pytest.importorskip("cosmic_ray", reason="pip install -r requirements-mutation.txt")
    # Its modules name exceptions as attributes: cosmic-ray replaces bare names only.
    names = mutants.modules(["nebula_jax/security/*.py"])
    drawn = [each for name in names for each in mutants.draw(name, seed=0)]
    assert len(drawn) > 10 * len(names)
    for mutant in drawn:
        assert mutants.mutated(mutant)


def test_the_record_says_what_survived():
    survivor = {"module": MODULE, "line": 7, "operator": "AddNot", "occurrence": 0}
    targets = [{"name": "tls", "mutants": 10, "survivors": [survivor, survivor]}]
    hardware = {"cpu": "c", "cores": 2, "devices": "cpu", "python": "3", "jax": "0"}
    record = {
        **{"command": "x", "commit": "abc", "hardware": hardware, "seconds": 1.0},
        **{"seed": 0, "count": 5, "targets": targets},
    }
    text = mutation_score.markdown(record)
    assert "| tls | 10 | 8 | 80.0% | **not met** |" in text
    assert "`communication.wire.liveness:7` AddNot" in text
