from nebula_jax.runtime.life import phases


def begun(clock, monkeypatch, importing=None):
    """The phases of a process, of a command whose imports took so long."""
    of_command = {} if importing is None else {"importing": importing, "since": 98.0}
    monkeypatch.setattr(phases, "_command", of_command)
    return phases.Phases("generator:0", clock)


def test_each_phase_has_its_seconds(clock, monkeypatch, capsys):
    made = begun(clock, monkeypatch)
    for name, seconds in (("waiting for d", 2.0), ("restoring", 0.5)):
        made.enter(name)
        clock.now += seconds
    made.enter("compiling")
    clock.now += 20.0
    made.enter("training")
    clock.now += 1000.0
    assert made.seconds == {
        "preparing": 0.0,
        "waiting for d": 2.0,
        "restoring": 0.5,
        "compiling": 20.0,
    }
    shown = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines()]
    assert shown == [*made.seconds, "training"]


def test_a_command_has_imported_before_and_prepared_since(clock, monkeypatch):
    made = begun(clock, monkeypatch, importing=3.0)
    made.enter("compiling")
    assert made.seconds == {"importing": 3.0, "preparing": 2.0}
