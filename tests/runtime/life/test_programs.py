import os
import sys

import children
import pytest

from nebula_jax.runtime.life import processes, programs

PROGRAM = """
from nebula_jax.runtime.life import programs
programs.keep()
import jax, os
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
print(jax.jit(lambda x: x + 1)(1.0), os.environ.get(programs.VARIABLE, ""))
"""


def ran(home, **more):
    """The folder of programs that a command had, and what it left in its home."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_COMPILATION", "XDG_CACHE"))
    }
    done = children.python("-c", PROGRAM, env=environment | {"HOME": str(home)} | more)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2.0")
    kept = [path for path in home.rglob("*-cache") if path.is_file()]
    return done.stdout.split()[1:], kept


def test_programs_are_kept_for_the_next_command(tmp_path):
    (where,), kept = ran(tmp_path)
    assert where.startswith(str(tmp_path / ".cache" / "nebula_jax" / "programs"))
    assert kept
    assert ran(tmp_path) == ([where], kept)  # nothing is compiled anew


def test_who_names_another_folder_gets_that(tmp_path):
    own = tmp_path / "own"
    where, _ = ran(tmp_path, JAX_COMPILATION_CACHE_DIR=str(own))
    assert where == [str(own)]
    assert not (tmp_path / ".cache").exists()


def test_without_a_home_to_write_to_nothing_is_kept(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert ran(file) == ([], [])


def test_machines_that_share_a_home_share_no_program(monkeypatch):
    here = programs.folder()
    monkeypatch.setattr(programs, "_processor", lambda: "another")
    assert programs.folder().parent == here.parent != programs.folder()


@pytest.mark.parametrize("given", [None, "0.2"])
def test_processes_share_a_gpus_memory_unless_told(
    tmp_path, monkeypatch, capsys, given
):
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(name, given)
    code = [sys.executable, "-c", f"import os; print(os.environ['{name}'])"]
    commands = {each: processes.Command(code, ()) for each in ("a", "b", "c")}
    assert processes.Processes(tmp_path, commands, {}, 0).run() == 0
    assert capsys.readouterr().out.split() == [given or "0.300"] * 3
