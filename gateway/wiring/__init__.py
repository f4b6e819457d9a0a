"""The composition root: the only package that constructs concrete classes, one file a part."""
