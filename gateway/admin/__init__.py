"""The operators' services, one file per noun; the files do not import each other."""
