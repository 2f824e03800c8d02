"""Tools around the experiments: environment, vocabulary, tables."""
