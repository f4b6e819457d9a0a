"""Tools for operators; no serving module imports them."""
