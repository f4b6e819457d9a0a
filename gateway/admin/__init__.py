"""What operators can do, one file a noun; the files do not know each other."""
