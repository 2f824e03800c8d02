import threading
import time

from nebula_jax.communication.wire import wakeups


def test_all_wake_and_those_without_news_go_on_sleeping(pool):
    waiting, reached = wakeups.Waiters(), [0]
    sleeping = [
        pool.submit(waiting.wait, lambda least=least: reached[0] >= least, None)
        for least in (1, 1, 2)
    ]
    while len(waiting._sleeping) < 3:
        time.sleep(0.001)
    reached[0] = 1
    waiting.notify()
    sleeping[0].result(5.0)
    sleeping[1].result(5.0)
    assert not sleeping[2].done()
    reached[0] = 2
    waiting.notify()
    sleeping[2].result(5.0)


def test_no_change_is_missed_however_close_it_comes_to_falling_asleep(pool):
    waiting, count, rounds = wakeups.Waiters(), [0], 1000
    turns = [threading.Event() for _ in range(rounds)]

    def wait():
        for number in range(rounds):
            turns[number].set()
            waiting.wait(lambda number=number: count[0] > number, 5.0)
            assert count[0] > number

    done = pool.submit(wait)
    for turn in turns:
        turn.wait(5.0)
        count[0] += 1
        waiting.notify()
    done.result(10.0)
