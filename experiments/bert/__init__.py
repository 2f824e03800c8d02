"""The parts of pretrain_bert."""
