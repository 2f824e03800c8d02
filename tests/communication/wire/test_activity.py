from nebula_jax.communication.wire import activity
from nebula_jax.communication.wire.activity import Activity


def take(work, clock, *seconds):
    for each in seconds:
        clock.now += each
        work.step_done()


def test_a_process_starts_until_its_first_step_is_done(clock):
    work = activity.Work(clock=clock)
    work.begin()
    assert work.report(False) == (Activity.STARTING, 0)
    take(work, clock, 1.0)
    assert work.report(False) == (Activity.COMPUTING, 1)


def test_an_activity_holds_as_long_as_its_block_and_waiting_comes_first(clock):
    work = activity.Work(clock=clock)
    with work.busy(Activity.SAVING):
        assert work.report(False).activity is Activity.SAVING
        work.waiting.append("tokens of step 3")
        assert work.report(False).activity is Activity.WAITING_FOR_ANOTHER
        assert work.report(True).activity is Activity.WAITING
    work.waiting.clear()
    assert work.report(False).activity is Activity.STARTING


def test_the_timeout_is_twenty_times_the_longest_step_of_the_run_so_far(clock):
    work = activity.Work(clock=clock)
    clock.now += 1000.0  # for the other clusters to come
    work.begin()
    assert work.stuck_timeout == 600.0
    take(work, clock, 8.0)  # the first one compiles
    assert work.stuck_timeout == 160.0
    take(work, clock, 1.0, 9.0, 1.0)
    assert work.stuck_timeout == 180.0


def test_the_timeout_is_a_minute_at_least_unless_it_is_given(clock):
    derived, given = activity.Work(clock=clock), activity.Work(5.0, clock)
    for work in (derived, given):
        work.begin()
        take(work, clock, 0.5)
    assert derived.stuck_timeout == 60.0
    assert given.stuck_timeout == 5.0
