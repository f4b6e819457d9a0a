"""The load generator of ``sluice replay``: a trace's arrivals and lengths, over HTTP."""
