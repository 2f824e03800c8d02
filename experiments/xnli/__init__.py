"""The parts of finetune_xnli."""
