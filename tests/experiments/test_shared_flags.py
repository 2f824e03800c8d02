import subprocess

import pytest

from experiments import shared_flags


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A git repository that `commit` takes for ours."""
    (tmp_path / "experiments" / "results").mkdir(parents=True)
    code = tmp_path / "experiments" / "clusters.py"
    code.write_text("")
    monkeypatch.setattr(shared_flags, "__file__", str(code))

    def git(*arguments):
        who = ("-c", "user.name=n", "-c", "user.email=n@example.org")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True)

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message=all")
    return tmp_path


def test_a_changed_or_new_file_is_told_of_a_commit(checkout):
    clean = shared_flags.commit()
    assert len(clean) == 12
    (checkout / "more.py").write_text("")
    assert shared_flags.commit() == clean + "+"
    (checkout / "more.py").unlink()
    (checkout / "experiments" / "clusters.py").write_text("changed")
    assert shared_flags.commit() == clean + "+"


def test_results_of_other_runs_make_no_checkout_dirty(checkout):
    clean = shared_flags.commit()
    (checkout / "experiments" / "results" / "table.json").write_text("{}")
    assert shared_flags.commit() == clean
