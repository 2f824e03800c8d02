"""Text in, int32 arrays out, on the host."""
