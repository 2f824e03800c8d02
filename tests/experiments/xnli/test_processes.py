"""Fine-tuning by two processes, started by hand, beside one of two devices."""

import ports
import pytest
import tiny_nli
import trees

STEPS, SAVED = 12, 6
TWO = {"steps": STEPS, "checkpoint_every": SAVED, "devices_per_cluster": 2}
TWO |= {"length_buckets": "16", "eval_every": SAVED}  # one shape is soon compiled


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tiny_nli.Finetunings(tmp_path_factory.mktemp("xnli"))


@pytest.mark.slow  # of several devices: tests/parallel/test_mesh.py
def test_two_processes_train_and_test_what_one_does(runs):
    runs.finished(**TWO, workdir="one")
    members = {"coordinator": f"127.0.0.1:{ports.free_port()}", "num_processes": 2}
    both = [
        runs.start(**TWO, **members, workdir="two", process_id=rank)
        for rank in range(2)
    ]
    for each in both:
        output, _ = each.communicate(timeout=120)
        assert each.returncode == 0, output
    one, two = (runs.state(each, "finetune", STEPS) for each in ("one", "two"))
    trees.assert_close(two, one, rtol=0, atol=1e-6)
    one, two = (
        {path.name: path.read_text() for path in (runs.folder / each).iterdir()}
        for each in ("one/predictions", "two/predictions")
    )
    assert one == two
