"""One request: its record, the in-flight registry, its time limit, its answer, stored responses."""
