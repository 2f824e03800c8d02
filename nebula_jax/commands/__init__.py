"""Commands: flags made of the fields of frozen dataclasses, and how a main ends."""
