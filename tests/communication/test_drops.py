from nebula_jax.communication import drops


def test_many_lines_become_one_with_their_count():
    said = []
    log = drops.Drops(said.append)
    for number in range(1000):
        log.add(f"line {number}", now=5.0)
    assert said == [f"line {number}" for number in range(drops.MAX_LINES)]
    log.tick(log.deadline)
    assert said[drops.MAX_LINES :] == [
        f"and {1000 - drops.MAX_LINES} more connections like these"
    ]
    log.add("another", now=70.0)
    assert said[-1] == "another"


def test_few_lines_are_logged_alone():
    said = []
    log = drops.Drops(said.append)
    log.add("one", now=0.0)
    log.tick(59.0)
    log.tick(60.0)
    log.flush()
    assert said == ["one"]
    assert log.deadline == float("inf")
