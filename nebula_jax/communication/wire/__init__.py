"""A connection below the link: only bytes and threads."""
