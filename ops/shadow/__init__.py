"""Reports of shadowed requests, for a terminal and as an HTML page."""
