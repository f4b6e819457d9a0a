"""The composition root: the only package that constructs concrete classes, in one file per part."""
