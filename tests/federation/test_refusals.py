from nebula_jax.federation import refusals


def test_a_few_have_an_entry_each_and_many_have_one_a_second():
    entries = []
    made = refusals.Refusals(lambda *about: entries.append(about))
    for number in range(refusals.BURST):
        made.add("h", "expired", "text", 100.0 + number / 1000)
    assert entries == [("h", "expired", 0, "text")] * refusals.BURST
    for number in range(5000):
        made.add("h", "none", "text", 101.0 + number / 1000)
    later = entries[refusals.BURST :]
    assert 4 <= len(later) <= 6
    assert sum(1 + others for _, _, others, _ in later) >= 4000


def test_after_a_pause_each_has_an_entry_again():
    entries = []
    made = refusals.Refusals(lambda *about: entries.append(about))
    for now in range(1000):
        made.add("h", "none", "text", 0.01 * now)
    count = len(entries)
    made.add("h", "none", "text", 1000.0)
    made.add("h", "none", "text", 1000.0)
    assert len(entries) == count + 2
