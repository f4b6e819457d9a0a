"""The configuration: pydantic sections, one file each, read from YAML and the environment."""
