"""The parts of pretrain_m3."""
