"""Data by grant: text that one organization serves and another reads."""
