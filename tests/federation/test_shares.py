from nebula_jax.federation import shares


def drain(made, count):
    """The streams of the next `count` turns, by the first byte of what they send."""
    return [made.next()[:1].decode() for _ in range(count)]


def filled(**weights):
    made = shares.Shares()
    for stream, (account, weight) in weights.items():
        made.add(stream, account, weight)
        for _ in range(1000):
            made.put(stream, stream.encode() * 100)
    return made


def test_accounts_share_by_weight_and_streams_of_an_account_alike():
    made = filled(a=("ana", 3), b=("bob", 1), c=("bob", 1))
    turns = drain(made, 400)
    assert abs(turns.count("a") - 300) <= 2
    assert abs(turns.count("b") - 50) <= 2
    assert abs(turns.count("c") - 50) <= 2


def test_shares_are_of_bytes_not_of_turns():
    made = shares.Shares()
    for stream, size in (("a", 10), ("b", 1000)):
        made.add(stream, stream, 1)
        for _ in range(2000):
            made.put(stream, stream.encode() * size)
    turns = drain(made, 1010)
    assert abs(turns.count("a") * 10 - turns.count("b") * 1000) <= 2000


def test_who_was_idle_gains_nothing():
    made = filled(a=("ana", 1))
    drain(made, 500)
    made.add("b", "bob", 1)
    for _ in range(1000):
        made.put("b", b"b" * 100)
    assert abs(drain(made, 200).count("b") - 100) <= 2


def test_data_of_a_stream_keep_their_order_and_end():
    made = shares.Shares()
    made.add("a", "ana", 1)
    for each in (b"1", b"2", b"3"):
        made.put("a", each)
    made.remove_when_empty("a")
    assert [made.next() for _ in range(3)] == [b"1", b"2", b"3"]
    assert made.next() is None
    assert "a" not in made


def test_a_stream_that_was_removed_sends_nothing():
    made = filled(a=("ana", 1), b=("bob", 1))
    made.remove("a")
    made.put("a", b"a")
    assert set(drain(made, 100)) == {"b"}
