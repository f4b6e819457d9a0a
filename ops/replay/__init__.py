"""The load generator behind ``sluice replay``: a trace's arrivals and lengths, over HTTP."""
