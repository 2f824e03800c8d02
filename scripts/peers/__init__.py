"""One task of local steps for several frameworks, each in an environment of its own."""
