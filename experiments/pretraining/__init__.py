"""The rooms that pre-training experiments share: text, vocabulary, beginning, end."""
