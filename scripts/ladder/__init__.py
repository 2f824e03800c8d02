"""The parts of `bert_ladder`."""
