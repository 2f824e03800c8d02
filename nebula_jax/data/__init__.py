"""Text in, int32 arrays out. Host side, except for masking, which is jitted."""
